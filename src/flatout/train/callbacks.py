"""Callbacks: their protocol, and the runner that calls them in the main process."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.config.settings import nearest
from flatout.distributed.environment import launched
from flatout.train.progress import Progress
from flatout.utils.errors import CallbackFailed, InputError
from flatout.utils.run_files import read_summary

if TYPE_CHECKING:
    from flatout.train.context import TrainContext


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Information about a run before its first step.

    Attributes:
        path: the run folder.
        recipe: the complete recipe.
        classes: class names, in the order of the outputs.
        devices: the devices of all processes as a SPEC, such as `2xcpu`.
        parameters: the number of model parameters.
        epoch: finished epochs: 0, or more if a run continues from a checkpoint.
    """

    path: Path
    recipe: Recipe
    classes: tuple[str, ...]
    devices: str
    parameters: int
    epoch: int


class Callback:
    """Hooks called during training; subclasses override those they need.

    The methods are called in the process of rank 0 alone, at most once per epoch. If devices have processes of their
    own, cloudpickle sends the object there before the run starts, and its attributes are copied back afterwards. Create
    what cannot be pickled, such as an open file, in `on_start`, and delete it in `on_end`.

    An exception ends the run with a `TrainingFailed` that contains it. The weights and a checkpoint are kept. In a
    cross-validation every fold is a run that calls the methods.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step, also when a run continues."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> bool | None:
        """Called after each epoch, counted from 1; return True to end training here.

        `metrics` is a line of `metrics.jsonl`: `train_loss`, `train_accuracy`, `valid_loss`, `valid_accuracy`,
        `learning_rate`, `step`, `images`, `seconds`, `images_per_second`.
        """

    def on_end(self, summary: dict[str, Any]) -> None:
        """Called when the run folder is complete, with the content of `summary.json`; `stopped` has the reason if the
        run was interrupted, failed or ended early.
        """


METHODS = ("on_start", "on_epoch_end", "on_end")


def check_callback(callback: Any) -> Callback:
    """Return a callback given by a user.

    Raises:
        InputError: it is not a callback, or has an unknown `on_...` method.
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


class CallbackRunner:
    """The callbacks of a run. Every process has a runner and calls its methods; without callbacks they do nothing.

    The constructor calls `on_start`.

    Raises:
        CallbackFailed: a callback raised an exception; raised on every process.
    """

    def __init__(self, context: "TrainContext", progress: Progress) -> None:
        self._context, self._callbacks, self._world = context, context.options.callbacks, context.world
        info = RunInfo(
            path=context.run_dir,
            recipe=context.recipe,
            classes=context.pack.classes,
            devices=context.devices,
            parameters=context.parameters,
            epoch=progress.epoch,
        )
        self._call("on_start", lambda: (info,))

    def epoch(self, line: dict[str, Any]) -> str:
        """Call `on_epoch_end` with a line of metrics.jsonl; return the reason to end training here, or ""."""
        metrics = {key: value for key, value in line.items() if key != "epoch"}
        return self._call("on_epoch_end", lambda: (line["epoch"], dict(metrics)))

    def end(self, failure: Exception | None) -> Exception | None:
        """Call `on_end`; return `failure`, or a callback's failure."""
        try:
            self._call("on_end", lambda: (read_summary(self._context.run_dir, {}),))
        except CallbackFailed as error:
            return failure or error
        return failure

    def _call(self, method: str, arguments: Callable[[], tuple[Any, ...]]) -> str:
        if not self._callbacks:
            return ""
        outcome = self._world.broadcast_object(self._call_each(method, arguments) if self._world.is_main else "")
        if isinstance(outcome, CallbackFailed):
            raise outcome
        return outcome

    def _call_each(self, method: str, arguments: Callable[[], tuple[Any, ...]]) -> str | CallbackFailed:
        ended = ""
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                # Each callback gets a copy, which it may change.
                if getattr(callback, method)(*arguments()) is True:
                    ended = f"{name} ended training"
            except Exception as error:
                if launched() is not None:
                    # The process that shows the message does not get the traceback; log it here.
                    traceback.print_exception(error, file=sys.stderr)
                frames = traceback.extract_tb(error.__traceback__)
                # The first frame is this one.
                frame = frames[min(1, len(frames) - 1)]
                text = "".join(traceback.format_exception_only(error)).strip()
                failure = CallbackFailed(
                    f"the callback {name} raised {text} ({frame.filename}, line {frame.lineno})"
                )
                failure.__cause__ = error
                return failure
        return ended
