"""The state that the phases of a run share on one rank, and how training ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.data.batches import steps_per_epoch
from flatout.train import claim
from flatout.train.request import Options, TrainRequest
from flatout.train.run_log import RunLog

if TYPE_CHECKING:
    from flatout.data.batches import Split
    from flatout.data.pack import Pack
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceDataset, Engine
    from flatout.train.head_stage import HeadStage


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
        data_facts: classes and checksums of the data, for checkpoints.
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
    data_facts: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> Options:
        """The options of the request."""
        return self.request.options

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
