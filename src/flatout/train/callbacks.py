"""Callbacks: their protocol, the runner that calls them in the main process, and experiment trackers."""

import importlib
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.config.settings import nearest
from flatout.distributed.environment import launched
from flatout.train.progress import Progress
from flatout.utils.errors import CallbackFailed, InputError
from flatout.utils.files import write_atomically
from flatout.utils.run_files import LOGS, PICTURES, TENSORBOARD, TRACKER_IDS, read_summary

if TYPE_CHECKING:
    from flatout.train.context import TrainContext


# Names of trackers: the package, the extra that installs it, and the choices of `--track`.
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
PROJECT = "flatout"
# MLflow's limit of parameters per call.
MAX_PARAMS = 100


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
                failure = CallbackFailed(f"the callback {name} raised {text} ({frame.filename}, line {frame.lineno})")
                failure.__cause__ = error
                return failure
        return ended


# --- Experiment trackers ----------------------------------------------------------------------------------------------


class _Tracker(Callback):
    """Base class of trackers.

    Each receives the recipe before training, the metrics of every epoch under their names in metrics.jsonl, and at the
    end the summary and the pictures. A resumed run continues in the tracker too.

    Raises:
        InputError: the package is not installed.
    """

    package = ""
    _run: RunInfo
    # Metrics of the epochs; in the summary, they are those of the epoch whose weights are kept.
    _logged: frozenset[str] = frozenset()

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise InputError(
                f"{type(self).__name__} needs the package {self.package}: pip install 'flatout[{self.package}]'"
            )

    def _id_of(self, run: RunInfo) -> str | None:
        """Return the tracker's id of a resumed run."""
        return _ids(run.path).get(self.package) if run.epoch else None

    def _keep_id(self, run: RunInfo, number: str) -> None:
        content = {**_ids(run.path), self.package: number}
        write_atomically(run.path / LOGS / TRACKER_IDS, (json.dumps(content, indent=2) + "\n").encode())

    def _of_epoch(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of an epoch."""
        self._logged |= metrics.keys()
        return _numbers(metrics)

    def _of_run(self, summary: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of the summary that are not a series over the epochs."""
        return {name: value for name, value in _numbers(summary).items() if name not in self._logged}

    def _pictures(self) -> dict[str, Path]:
        return {Path(name).stem: path for name in PICTURES if (path := self._run.path / name).is_file()}


def _ids(run: Path) -> dict[str, str]:
    try:
        return json.loads((run / LOGS / TRACKER_IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _settings(run: RunInfo) -> dict[str, Any]:
    """Return the recipe by dotted keys, and other settings of a run."""
    keys = {key: list(value) if isinstance(value, tuple) else value for key, value in run.recipe.flat().items()}
    return {**keys, "devices": run.devices, "parameters": run.parameters, "folder": str(run.path)}


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

    Raises:
        InputError: tensorboard is not installed.
    """

    package = "tensorboard"
    _writer: Any = None

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def on_start(self, run: RunInfo) -> None:
        """Open the event file, and write the recipe."""
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        # Hide what an interrupted run has written for later epochs.
        purge = run.epoch + 1 if run.epoch else None
        self._writer = SummaryWriter(str(self.folder or run.path / TENSORBOARD), purge_step=purge)
        lines = [f"    {key} = {value}" for key, value in _settings(run).items()]
        self._writer.add_text("recipe", "\n".join(lines), run.epoch)

    def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Write a scalar for each figure."""
        for name, value in self._of_epoch(metrics).items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def on_end(self, summary: dict[str, Any]) -> None:
        """Write test metrics and pictures, and close the file."""
        import numpy as np
        from PIL import Image

        epoch = summary.get("epochs_trained", 0)
        for name, value in self._of_run(summary).items():
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

    Raises:
        InputError: wandb is not installed.
    """

    package = "wandb"
    _library: Any = None

    def __init__(self, project: str | None = None, name: str | None = None, **options: Any) -> None:
        super().__init__()
        self.project = project or os.environ.get(f"{self.package.upper()}_PROJECT") or PROJECT
        self.name, self.options = name, options

    def on_start(self, run: RunInfo) -> None:
        """Start or continue a run in the tracker."""
        self._run, self._library = run, importlib.import_module(self.package)
        options = {"project": self.project, "name": self.name or run.path.name, "config": _settings(run)}
        self._open(run, options | self.options)

    def _open(self, run: RunInfo, options: dict[str, Any]) -> None:
        known = self._id_of(run)
        opened = self._library.init(**({"id": known, "resume": "allow"} if known else {}) | options)
        self._keep_id(run, opened.id)

    def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Log the figures."""
        # These libraries count steps themselves.
        figures = {key: value for key, value in self._of_epoch(metrics).items() if key != "step"}
        self._library.log({"epoch": epoch, **figures}, step=epoch)

    def on_end(self, summary: dict[str, Any]) -> None:
        """Log the summary and the pictures, and end the run."""
        step = summary.get("epochs_trained", 0) + 1
        pictures = {name: self._library.Image(str(path)) for name, path in self._pictures().items()}
        self._library.log({**self._of_run(summary), **pictures}, step=step)
        self._library.finish()
        self._library = None


class Trackio(WandB):
    """Logs to trackio, which keeps runs on this host; `trackio show` displays them.

    Args:
        project: by default `TRACKIO_PROJECT`, else `flatout`.
        name: the run's name; by default that of the run folder.
        **options: options of `trackio.init`.

    Raises:
        InputError: trackio is not installed.
    """

    package = "trackio"

    def _open(self, run: RunInfo, options: dict[str, Any]) -> None:
        # trackio identifies runs by name.
        known = self._id_of(run)
        self._library.init(**({"name": known, "resume": "allow"} if known else {"resume": "never"}) | options)
        self._keep_id(run, options["name"])


class MLflow(_Tracker):
    """Logs to MLflow, configured by its environment variables: `MLFLOW_TRACKING_URI` names a server or a folder.

    Args:
        experiment: by default `MLFLOW_EXPERIMENT_NAME`, else `flatout`.
        name: the run's name; by default that of the run folder.

    Raises:
        InputError: mlflow is not installed.
    """

    package = "mlflow"
    _client: Any = None

    def __init__(self, experiment: str | None = None, name: str | None = None) -> None:
        super().__init__()
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        self.name = name

    def on_start(self, run: RunInfo) -> None:
        """Start or continue a run in the experiment."""
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        self._run, self._client = run, MlflowClient()
        if known := self._id_of(run):
            self._id = known
            self._client.update_run(known, "RUNNING")
            return
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment)
        self._id = self._client.create_run(experiment, run_name=self.name or run.path.name).info.run_id
        params = [Param(key, str(value)) for key, value in _settings(run).items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])
        self._keep_id(run, self._id)

    def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Log the figures."""
        self._log(self._of_epoch(metrics), epoch)

    def on_end(self, summary: dict[str, Any]) -> None:
        """Log the summary and the pictures, and end the run."""
        self._log(self._of_run(summary), summary.get("epochs_trained", 0))
        for path in self._pictures().values():
            self._client.log_artifact(self._id, str(path))
        stopped = str(summary.get("stopped") or "")
        states = {"failed": "FAILED", "interrupted": "KILLED", "terminated": "KILLED"}
        # Other reasons, such as early stopping, are normal.
        self._client.set_terminated(self._id, states.get(stopped.partition(" ")[0].rstrip(":"), "FINISHED"))
        self._client = None

    def _log(self, figures: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)


# --- What the user gives ----------------------------------------------------------------------------------------------


def callbacks_of(given: Any) -> tuple[Callback, ...]:
    """Return the callbacks for a `Callback`, the name of a tracker, or several of these.

    Raises:
        InputError: one is neither, or has an unknown `on_...` method; a tracker's package is not installed.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    trackers, found = {cls.package: cls for cls in (TensorBoard, WandB, Trackio, MLflow)}, list[Callback]()
    for one in given:
        if isinstance(one, str) and one not in trackers:
            raise InputError(f"callbacks: {one!r} is not a tracker; {nearest(one, TRACKERS)}")
        callback = trackers[one]() if isinstance(one, str) else one
        name = one.__name__ if isinstance(one, type) else type(one).__name__
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise InputError(f"callbacks: {name} is a class; give an object: {name}()")
        if not isinstance(callback, Callback):
            raise InputError(
                f"callbacks: {name} is not a flatout.Callback; derive a class from that with some of "
                f"{', '.join(METHODS)}, or name a tracker, such as 'tensorboard'"
            )
        for method in dir(callback):
            if method.startswith("on_") and method not in METHODS and callable(getattr(callback, method)):
                raise InputError(f"callbacks: {name}.{method} is never called; {nearest(method, METHODS)}")
        found.append(callback)
    return tuple(found)
