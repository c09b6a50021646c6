"""The state that the phases of a run share on one rank, its messages, and how training ended."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.data.batches import steps_per_epoch
from flatout.train import claim
from flatout.train.checkpoint import data_facts
from flatout.train.request import Options, TrainRequest

if TYPE_CHECKING:
    from flatout.data.batches import Split
    from flatout.data.pack import Pack
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceDataset, Engine
    from flatout.train.head_stage import HeadStage
    from flatout.train.progress import Progress
    from flatout.utils.console import Console


class RunLog:
    """Collects messages and times for the summary.

    Attributes:
        console: prints the messages.
        notes: the messages so far.
        seconds: the time of each finished phase, without gaps.
        setup_seconds: the time before the first step.
    """

    def __init__(self, console: "Console", request: TrainRequest) -> None:
        self.console = console
        self.notes = [*request.options.notes]
        self.seconds = dict(request.phase_seconds)
        self.setup_seconds = 0.0
        self._began = request.options.began
        self._lap = self._began + sum(self.seconds.values())

    def note(self, sentence: str) -> None:
        """Print a message, and keep it for the summary."""
        self.notes.append(sentence)
        self.console.note(sentence)

    def lap(self, phase: str, parts: Mapping[str, float] = MappingProxyType({})) -> None:
        """End a phase; `parts` are the seconds of nested phases, which are subtracted."""
        now = time.perf_counter()
        self.seconds |= {phase: now - self._lap - sum(parts.values()), **parts}
        self._lap = now

    def end_setup(self) -> None:
        """Mark the end of the set-up."""
        self.setup_seconds = time.perf_counter() - self._began

    def wall_seconds(self, progress: "Progress") -> float:
        """Return the time since the run's first command, without time lost when it was killed."""
        return progress.earlier_seconds + time.perf_counter() - self._began


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainContext:
    """The state that the phases of a run share on one rank. Only the engine changes.

    Attributes:
        request: the user's request.
        recipe: complete, with the values that depend on the data, the devices and the time budget.
        run_dir: the run folder.
        world: the ranks of the run.
        log: the messages and the times of the run.
        pack, splits: the data, and its splits.
        engine: the model on the devices of the run.
        stage: the head fitted before the first step, or None.
        parameters, trained_parameters: their number in the model.
        devices, device_count: the devices of all ranks, as a SPEC, and their number.
        datasets: the splits on the devices; empty if nothing is trained.
    """

    request: TrainRequest
    recipe: Recipe
    run_dir: Path
    world: "World"
    log: RunLog
    pack: "Pack"
    splits: "dict[str, Split]"
    engine: "Engine"
    stage: "HeadStage | None"
    parameters: int
    trained_parameters: int
    devices: str
    device_count: int
    datasets: "Mapping[str, DeviceDataset]" = field(default_factory=dict)

    @property
    def options(self) -> Options:
        """The options of the request."""
        return self.request.options

    @property
    def data_facts(self) -> dict[str, Any]:
        """What identifies the data in checkpoints."""
        return data_facts(self.pack)

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch."""
        return steps_per_epoch(len(self.splits["train"]), self.recipe.batch_size, self.recipe.drop_last)

    def with_recipe(self, recipe: Recipe) -> "TrainContext":
        """Return the context with the main process's `recipe` of another length, and write it into the run folder.

        All ranks call this.
        """
        recipe = self.world.broadcast_object(recipe)
        if recipe != self.recipe and self.world.is_main:
            claim.begin(self.run_dir, recipe, overwrite=False)
        return replace(self, recipe=recipe)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How training ended.

    Attributes:
        reason: why training ended early, or "".
        failure: the exception; None if this is not a failure.
    """

    reason: str = ""
    failure: Exception | None = None
