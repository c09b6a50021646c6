"""The protocol of callbacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.errors import InputError
from flatout.recipe import Recipe
from flatout.settings import nearest


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known of a run before its first step.

    Attributes:
        path: the run folder.
        recipe: the complete recipe.
        classes: class names, in the order of the outputs.
        devices: the devices of all processes as a SPEC, such as `2xcpu`.
        parameters: the number of the model's parameters.
        epoch: how many epochs are already finished: 0, or more where a run continues from a checkpoint.
    """

    path: Path
    recipe: Recipe
    classes: tuple[str, ...]
    devices: str
    parameters: int
    epoch: int


class Callback:
    """Is called while a run trains; a subclass overrides what it needs.

    The methods are called in the process of rank 0 alone, at most once per epoch. Where devices have processes of their
    own, the object is sent there by cloudpickle before the run starts, and its attributes are brought back after it;
    what cannot be pickled, such as an open file, belongs in `on_start`, and is removed in `on_end`.

    An exception ends the run with a `TrainingFailed` that names it. The weights and a checkpoint are kept. In a
    cross-validation every fold is a run that calls the methods.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step, also when a run continues."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> bool | None:
        """Called after each epoch, counted from 1; return True to end training here.

        `metrics` is the line of `metrics.jsonl`: `train_loss`, `train_accuracy`, `valid_loss`, `valid_accuracy`,
        `learning_rate`, `step`, `images`, `seconds`, `images_per_second`.
        """

    def on_end(self, summary: dict[str, Any]) -> None:
        """Called when the run folder is complete, with the content of `summary.json`; `stopped` has the reason if the
        run was interrupted, failed or ended early.
        """


METHODS = ("on_start", "on_epoch_end", "on_end")


def checked(callback: Any) -> Callback:
    """Return a callback given by a user.

    Raises:
        InputError: it is none, or it has a method `on_...` that would never be called.
    """
    name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise InputError(f"callbacks: {name} is a class; give an object: {name}()")
    if not isinstance(callback, Callback):
        raise InputError(
            f"callbacks: {name} is not a flatout.Callback; derive a class from that with some of {', '.join(METHODS)}, "
            "or name a tracker, such as 'tensorboard'"
        )
    for method in dir(callback):
        if method.startswith("on_") and method not in METHODS and callable(getattr(callback, method)):
            raise InputError(f"callbacks: {name}.{method} is never called; {nearest(method, METHODS)}")
    return callback
