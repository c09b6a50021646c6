"""The user's request, and what the phases of a run share on one rank."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.data.batches import steps_per_epoch
from flatout.distributed.environment import HANG_TIMEOUT, Hosts, launched, restart_count
from flatout.engine.base import Counts
from flatout.train.callbacks import Callback, UserFunctions
from flatout.utils.errors import InputError
from flatout.utils.run_files import JsonObject

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.batches import Split
    from flatout.data.pack import Pack, SharedPack
    from flatout.data.source import DataSource, ImageDataset
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceDataset, Engine
    from flatout.train.head import HeadStage
    from flatout.train.run_dir import Checkpoint
    from flatout.utils.console import Console


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a recipe is run, except for what the recipe defines; see `fit`."""

    out: Path | None = None
    devices: str = "auto"
    engine: str = "torch"
    resume: bool = False
    overwrite: bool = False
    cache: bool = True
    allow_code: bool = False  # whether a model named as `package.module:factory` may be imported
    hosts: Hosts = field(default_factory=Hosts)
    restarts: int | None = None  # None: as often as elastic hosts may be lost
    hang_timeout: float = HANG_TIMEOUT
    minutes: float | None = None
    began: float = field(default_factory=time.perf_counter)  # the time of the user's request
    notes: tuple[str, ...] = ()  # sentences about the recipe, for the summary and the report
    report: bool = True
    callbacks: tuple[Callback, ...] = ()
    functions: UserFunctions = field(default_factory=UserFunctions)

    @property
    def seconds(self) -> float | None:
        """The time budget."""
        return None if self.minutes is None else 60 * self.minutes

    def __post_init__(self) -> None:
        for flag, value in (("minutes", self.minutes), ("hang-timeout", self.hang_timeout)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"--{flag} {value:g}: must be a finite number greater than 0")
        if self.restarts is not None and self.restarts < 0:
            raise InputError(f"--restarts {self.restarts}: must be 0 or more")


def check_request(recipe: Recipe, options: Options) -> None:
    """Refuse options that the recipe or another launcher excludes."""
    if launched() is not None and (options.hosts.most > 1 or options.restarts):
        raise InputError(
            "--nodes and --restarts: another launcher (torchrun, Slurm, Ray) has started this process as one of its "
            "ranks; leave them out and use the launcher's own, or start flatout without it"
        )
    refused = {
        "--minutes": options.minutes is not None,
        "several hosts or another launcher": options.hosts.most > 1 or launched() is not None,
        # The held-out images must not set the learning rate.
        "schedule.name = 'plateau'": recipe.schedule.name == "plateau",
    }
    if recipe.data.folds and not recipe.data.fold and any(refused.values()):
        names = ", ".join(name for name, is_given in refused.items() if is_given)
        raise InputError(f"data.folds = {recipe.data.folds}: cannot be combined with {names}; leave one out")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest:
    """A run to be made. It can be sent to other processes once its data is a `SharedPack`."""

    recipe: Recipe  # complete except for values measured on the data
    data: "DataSource | ImageDataset | Pack | SharedPack"
    options: Options
    module: "nn.Module | None" = None
    run_dir: Path | None = None  # if the process that starts the ranks holds it
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # of finished phases
    prepared_at: float = 0.0  # when the folder was claimed, by time.time


@dataclass(kw_only=True, eq=False)
class Progress:
    """The progress of a run; with the engine's state, everything that a checkpoint needs.

    A record is a line of metrics.jsonl: `epoch`, `step`, `learning_rate`, `images`, `seconds`, `images_per_second`, and
    the mean loss and the metrics of each split, such as `train_loss` and `valid_accuracy`.
    """

    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the next one
    head: JsonObject | None = None  # the record of the head fitted before the first step
    history: list[JsonObject] = field(default_factory=list)  # the records of the finished epochs
    counts: Counts = field(default_factory=Counts)  # sums over the finished steps of the unfinished epoch
    best_epoch: int = 0  # by validation, from 1; 0 for none, or for the fitted head
    best: Any = None  # the engine's snapshot of the weights after it, if the recipe keeps the best
    train_seconds: float = 0.0  # in training epochs, including the next two
    wait_seconds: float = 0.0  # for input
    communication_seconds: float = 0.0  # for other processes
    epoch_seconds: float = 0.0  # in the unfinished epoch
    evaluate_seconds: float = 0.0
    first_seconds: float = 0.0  # of the first steps, which allocate memory, choose algorithms, capture CUDA graphs
    first_images: int = 0
    images_trained: int = 0
    earlier_seconds: float = 0.0  # from the run's first command to the checkpoint that it resumed from
    step_losses: list[tuple[int, float]] = field(default_factory=list)  # step of the run, mean loss since the last one

    @property
    def records(self) -> list[JsonObject]:
        """The lines of metrics.jsonl."""
        return [self.head, *self.history] if self.head else self.history

    def position(self, steps_per_epoch: int) -> int:
        """Return the finished steps of the whole run."""
        return self.epoch * steps_per_epoch + self.step

    @property
    def warmup_seconds(self) -> float | None:
        """Extra time of the first steps compared with the others; None without others."""
        images, seconds = self.images_trained - self.first_images, self.train_seconds - self.first_seconds
        if images <= 0 or seconds <= 0:
            return None
        return max(0.0, self.first_seconds - self.first_images * seconds / images)


def metrics_of(record: JsonObject, split: str) -> dict[str, float]:
    """Return the loss and the metrics of a split, by name."""
    return {key.removeprefix(f"{split}_"): value for key, value in record.items() if key.startswith(f"{split}_")}


class RunLog:
    """Collects messages and times for the summary: `seconds` of each finished phase, without gaps."""

    def __init__(self, console: "Console", request: TrainRequest) -> None:
        self.console = console
        self.notes = [*request.options.notes]
        # A checkpoint counts the time before it, so a restarted rank counts from here.
        is_first = restart_count() == 0
        self.seconds = dict(request.phase_seconds) if is_first else {}
        self.stopped = ""
        self.failure: BaseException | None = None
        self._began = request.options.began if is_first else time.perf_counter()
        self._lap = self._began + sum(self.seconds.values())

    def end(self, reason: str, failure: BaseException | None = None) -> None:
        """Record why the run ends early, and the exception that it ends with; the first ones stay."""
        self.stopped, self.failure = self.stopped or reason, self.failure or failure

    def note(self, sentence: str) -> None:
        """Print a message, and keep it for the summary."""
        self.notes.append(sentence)
        self.console.note(sentence)

    def lap(self, phase: str, **parts: float) -> None:
        """End a phase; `parts` are the seconds of nested phases, which are subtracted."""
        now = time.perf_counter()
        self.seconds |= {phase: now - self._lap - sum(parts.values()), **parts}
        self._lap = now

    def wall_seconds(self, progress: Progress) -> float:
        """Return the time since the run's first command, without time lost when it was killed."""
        return progress.earlier_seconds + time.perf_counter() - self._began


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainContext:
    """The state that the phases of a run share on one rank. Only the engine changes."""

    request: TrainRequest
    recipe: Recipe  # with the values that depend on the data, the devices and the time budget
    run_dir: Path
    world: "World"
    log: RunLog
    pack: "Pack"
    splits: "dict[str, Split]"
    engine: "Engine"
    stage: "HeadStage | None"  # the head fitted before the first step
    checkpoint: "Checkpoint | None"  # from which the run continues
    parameters: int
    trained_parameters: int
    devices: str  # of all ranks, as a SPEC
    device_count: int
    datasets: "Mapping[str, DeviceDataset]" = field(default_factory=dict)  # on the devices; empty if nothing is trained

    @property
    def options(self) -> Options:
        """The options of the request."""
        return self.request.options

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch."""
        return steps_per_epoch(len(self.splits["train"]), self.recipe.batch_size, self.recipe.drop_last)
