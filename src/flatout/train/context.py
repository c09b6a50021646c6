"""What the phases of a run share on one rank, and how training ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.data.batches import steps_per_epoch
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
    """What the phases of a run share on one rank. Of all this, only the engine changes.

    Attributes:
        request: what the user asked for.
        recipe: complete, with the values that the data, the devices and the time budget decide.
        run_dir: the run folder.
        world: the ranks of the run.
        log: the sentences and the times of the run.
        pack, splits: the data, and the images of each split.
        data_facts: classes and checksums of the data, for checkpoints.
        engine: the model on the devices of the run.
        stage: the head that was fitted before the first step; None without one.
        parameters, trained_parameters: of the model.
        devices, device_count: of all ranks, as a SPEC and their number.
        datasets: the splits on the devices; empty where nothing is trained.
    """

    request: TrainRequest
    recipe: Recipe
    run_dir: Path
    world: "World"
    log: RunLog
    pack: "Pack"
    data_facts: dict[str, Any]
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
        """How the recipe is run."""
        return self.request.options

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch."""
        return steps_per_epoch(len(self.splits["train"]), self.recipe.batch_size, self.recipe.drop_last)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How training ended.

    Attributes:
        reason: why it ended before the last epoch; "" if it did not.
        failure: the same as an exception; None if training may end like that.
    """

    reason: str = ""
    failure: Exception | None = None
