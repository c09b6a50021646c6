"""The user's code in a run: callbacks, experiment trackers, and functions of losses, images and metrics."""

import copy
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Recipe
from flatout.config.settings import nearest
from flatout.distributed.environment import launched
from flatout.tasks import TASKS
from flatout.utils.errors import CallbackFailed, InputError
from flatout.utils.files import write_atomically
from flatout.utils.run_files import LOGS, PICTURES, TENSORBOARD, TRACKER_IDS, JsonObject, read_summary

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.train.request import Progress, TrainContext

Function = Callable[..., Any]
# What `summary.json` has of each split besides the metrics of a task.
_COMPUTED = {
    "loss", "count", "images", "class_counts", "accuracy_interval", "top5_accuracy", "roc_auc", "average_precision"
}  # fmt: skip

# --- Callbacks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Information about a run before its first step."""

    path: Path  # the run folder
    recipe: Recipe
    classes: tuple[str, ...]  # their names, in the order of the outputs
    devices: str  # of all processes, as a SPEC such as `2xcpu`
    parameters: int  # their number in the model
    epoch: int  # finished epochs: 0, or more if a run continues from a checkpoint


class Callback:
    """Hooks called during training; subclasses override those they need.

    The methods are called in the process of rank 0 alone, at most once per epoch. If devices have processes of their
    own, cloudpickle sends the object there before the run starts, and its attributes are copied back afterwards. Create
    what cannot be pickled, such as an open file, in `on_start`, and delete it in `on_end`.

    An exception ends the run with a `TrainingFailed` that contains it. The weights and a checkpoint are kept, unless it
    is raised in `on_start`, before the training. In a cross-validation every fold is a run that calls the methods.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step, also when a run continues."""

    def on_epoch_end(self, epoch: int, metrics: JsonObject) -> bool | None:
        """Called after each epoch, counted from 1; return True to end training here.

        `metrics` is a line of `metrics.jsonl`: `train_loss`, `train_accuracy`, `valid_loss`, `valid_accuracy`,
        `learning_rate`, `step`, `images`, `seconds`, `images_per_second`.
        """

    def on_end(self, summary: JsonObject) -> None:
        """Called when the run folder is complete, with the content of `summary.json`; `stopped` has the reason if the
        run was interrupted, failed or ended early.
        """


METHODS = ("on_start", "on_epoch_end", "on_end")


def call_on_start(context: "TrainContext", progress: "Progress") -> None:
    """Call `on_start`. All ranks call this and the next two, and raise what a callback on rank 0 raises."""
    info = RunInfo(
        path=context.run_dir,
        recipe=context.recipe,
        classes=context.pack.classes,
        devices=context.devices,
        parameters=context.parameters,
        epoch=progress.epoch,
    )
    _call(context, "on_start", info)


def call_on_epoch_end(context: "TrainContext", record: JsonObject) -> str:
    """Call `on_epoch_end`; return the reason to end training here, or ""."""
    return _call(context, "on_epoch_end", record["epoch"], {key: record[key] for key in record if key != "epoch"})


def call_on_end(context: "TrainContext") -> None:
    """Call `on_end`; the run ends with a callback's failure, if not with another."""
    try:
        _call(context, "on_end", read_summary(context.run_dir, {}) if context.options.callbacks else {})
    except CallbackFailed as error:
        if context.log.failure:
            context.log.console.note(str(error))
        context.log.end("", error)


def _call(context: "TrainContext", method: str, *arguments: object) -> str:
    outcome: str | CallbackFailed = ""
    for callback in context.options.callbacks if context.world.is_main else ():
        name = f"{type(callback).__name__}.{method}"
        try:
            # Each callback gets a copy, which it may change.
            if getattr(callback, method)(*copy.deepcopy(arguments)) is True:
                outcome = f"{name} ended training"
        except Exception as error:
            if launched() is not None:
                # The process that shows the message does not get the traceback; log it here.
                traceback.print_exception(error, file=sys.stderr)
            # The first frame is this one.
            frame = traceback.extract_tb(error.__traceback__)[:2][-1]
            text = "".join(traceback.format_exception_only(error)).strip()
            outcome = CallbackFailed(f"the callback {name} raised {text} ({frame.filename}, line {frame.lineno})")
            outcome.__cause__ = error
            break
    if context.options.callbacks:
        outcome = context.world.broadcast_object(outcome)
    if isinstance(outcome, CallbackFailed):
        raise outcome
    return outcome


def callbacks_of(given: Callback | str | Iterable[Callback | str]) -> tuple[Callback, ...]:
    """Return the callbacks for a `Callback`, the name of a tracker, or several of these."""
    found = list[Callback]()
    for one in given if isinstance(given, Iterable) and not isinstance(given, str) else [given]:
        if isinstance(one, str) and one not in TRACKERS:
            raise InputError(f"callbacks: {one!r} is not a tracker; {nearest(one, TRACKERS)}")
        callback = TRACKERS[one]() if isinstance(one, str) else one
        name = getattr(callback, "__name__", type(callback).__name__)
        if not isinstance(callback, Callback):
            raise InputError(
                f"callbacks: {name} is not an object of a class derived from flatout.Callback; write {name}() for a "
                f"class that is, with some of {', '.join(METHODS)}, or name a tracker, such as 'tensorboard'"
            )
        for method in dir(callback):
            if method.startswith("on_") and method not in METHODS and callable(getattr(callback, method)):
                raise InputError(f"callbacks: {name}.{method} is never called; {nearest(method, METHODS)}")
        found.append(callback)
    return tuple(found)


# --- Experiment trackers ----------------------------------------------------------------------------------------------


class _Tracker(Callback):
    """Base class of trackers, each in a package of its own."""

    package = ""
    _run: RunInfo

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise InputError(
                f"{type(self).__name__} needs the package {self.package}: pip install 'flatout[{self.package}]'"
            )

    def _settings(self) -> JsonObject:
        run = self._run
        keys = {key: list(value) if isinstance(value, tuple) else value for key, value in run.recipe.flat().items()}
        return {**keys, "devices": run.devices, "parameters": run.parameters, "folder": str(run.path)}

    def _pictures(self) -> dict[str, Path]:
        return {Path(name).stem: path for name in PICTURES if (path := self._run.path / name).is_file()}


def _numbers(figures: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class TensorBoard(_Tracker):
    """Writes TensorBoard event files.

    Args:
        folder: by default `tensorboard` in the run folder, so that `tensorboard --logdir runs` shows all runs.
    """

    package = "tensorboard"
    _writer: Any = None

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def on_start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        # Hide what an interrupted run has written for later epochs.
        purge = run.epoch + 1 if run.epoch else None
        self._writer = SummaryWriter(str(self.folder or run.path / TENSORBOARD), purge_step=purge)
        lines = [f"    {key} = {value}" for key, value in self._settings().items()]
        self._writer.add_text("recipe", "\n".join(lines), run.epoch)

    def on_epoch_end(self, epoch: int, metrics: JsonObject) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def on_end(self, summary: JsonObject) -> None:
        from PIL import Image

        epoch = summary.get("epochs_trained", 0)
        for name, value in _numbers(summary).items():
            if name.startswith("test_"):
                self._writer.add_scalar(name, value, epoch)
        for name, path in self._pictures().items():
            with Image.open(path) as picture:
                self._writer.add_image(name, np.asarray(picture.convert("RGB")), epoch, dataformats="HWC")
        self._writer.close()
        self._writer = None


class WandB(_Tracker):
    """Logs to Weights & Biases, configured by its environment variables: `WANDB_MODE=offline` needs no account.

    Args:
        project: by default `WANDB_PROJECT`, else `flatout`.
        name: the run's name; by default that of the run folder.
        **options: options of `wandb.init`.
    """

    package = "wandb"
    _opened: Any = None

    def __init__(self, project: str | None = None, name: str | None = None, **options: object) -> None:
        super().__init__()
        self.project = project or os.environ.get("WANDB_PROJECT") or "flatout"
        self.name, self.options = name, options

    def on_start(self, run: RunInfo) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = run
        options = {"project": self.project, "name": self.name or run.path.name, "config": self._settings()}
        ids = run.path / LOGS / TRACKER_IDS
        if ids.is_file():
            options |= {"id": json.loads(ids.read_text(encoding="utf-8"))[self.package], "resume": "allow"}
        self._opened = wandb.init(**options | self.options)
        write_atomically(ids, (json.dumps({self.package: self._opened.id}) + "\n").encode())

    def on_epoch_end(self, epoch: int, metrics: JsonObject) -> None:
        # The library counts steps itself.
        figures = {key: value for key, value in _numbers(metrics).items() if key != "step"}
        self._opened.log({"epoch": epoch, **figures}, step=epoch)

    def on_end(self, summary: JsonObject) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._opened.log({name: wandb.Image(str(path)) for name, path in self._pictures().items()})
        self._opened.summary.update(_numbers(summary))
        self._opened.finish()
        self._opened = None


# By the name of the package, which is that of the extra that installs it, and a choice of `--track`.
TRACKERS: dict[str, type[_Tracker]] = {kind.package: kind for kind in (TensorBoard, WandB)}

# --- Functions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """The functions that a caller of `fit` passes; see there."""

    loss: Function | None = None
    transform: tuple[Function, ...] = ()
    batch_transforms: tuple[Function, ...] = ()
    metrics: tuple[tuple[str, Function], ...] = ()

    @property
    def in_training(self) -> list[str]:
        """The arguments of `fit` that change training itself."""
        return [name for name in ("loss", "transform", "batch_transforms") if getattr(self, name)]

    def check(self, recipe: Recipe, engine: str) -> None:
        """Refuse functions that the engine or the recipe cannot use."""
        if self.in_training and (engine == "xla" or recipe.shard == "full"):
            raise InputError(
                f"{self.in_training[0]}: a function of your own can be neither compiled by the XLA engine nor sharded; "
                "use engine='torch' and shard='none'"
            )
        if self.in_training and not recipe.epochs:
            raise InputError(f"{self.in_training[0]}: is never called, as only the head is fitted; give epochs=5")

    def for_engine(self, recipe: Recipe) -> dict[str, Any]:
        """Return arguments of the torch engine."""
        if not self.in_training:
            return {}
        of_images = [per_image(self.transform, recipe)] if self.transform else []
        return {"loss": self.loss, "batch_transforms": (*of_images, *self.batch_transforms)}


def per_image(transforms: tuple[Function, ...], recipe: Recipe) -> Function:
    """Return a transform of normalised batches that applies those of single images, float32 [C, H, W] in 0..1."""

    def transformed(images_BCHW: "Tensor") -> "Tensor":
        import torch

        mean, std = (images_BCHW.new_tensor(v).reshape(-1, 1, 1) for v in (recipe.data.mean, recipe.data.std))
        # Mixing and erasing stay in 0..1, but rounding may exceed it.
        images = (images_BCHW * std + mean).clamp(0, 1)
        return (torch.stack([_transformed(image, transforms) for image in images]) - mean) / std

    return transformed


def _transformed(image_CHW: "Tensor", transforms: tuple[Function, ...]) -> "Tensor":
    def described(value: Any) -> str:
        return f"{value.dtype} {[*value.shape]}" if hasattr(value, "dtype") else type(value).__name__

    wanted = described(image_CHW)
    takes = f"images are tensors, {wanted} in 0..1; leave ToTensor, Normalize and Resize out"
    for transform in transforms:
        name = getattr(transform, "__name__", type(transform).__name__)
        try:
            image_CHW = transform(image_CHW)
        except Exception as error:  # users' functions may raise anything
            raise InputError(f"transform: {name} raised {type(error).__name__}: {error}; {takes}") from error
        if (found := described(image_CHW)) != wanted:
            raise InputError(f"transform: {name} returned {found}; {takes}")
    return image_CHW


def user_functions(loss: Function | None, transform: Any, batch_transforms: Any, metrics: Any) -> UserFunctions:
    """Check and return the functions passed to `fit`."""
    given = {"transform": transform, "batch_transforms": batch_transforms}
    found = {name: (value,) if callable(value) else tuple(value or ()) for name, value in given.items()}
    for argument, functions in found.items():
        for function in functions:
            if not callable(function):
                raise InputError(f"{argument}: {function!r} is not a function of images")
    several = [metrics] if callable(metrics) or isinstance(metrics, str) else metrics or ()
    named = several if isinstance(several, Mapping) else {getattr(m, "__name__", str(m)): m for m in several}
    known = sorted({name for task in TASKS.values() for name in task.metric_names} | _COMPUTED)
    for name, function in named.items():
        if not (callable(function) and str(name).isidentifier() and name not in known):
            raise InputError(
                f"metrics: {name!r} must be a function of labels and predictions with an unused name; give a "
                f'dict: metrics={{"name": function}}. Always computed: {", ".join(known)}'
            )
    return UserFunctions(loss=loss, **found, metrics=tuple(named.items()))
