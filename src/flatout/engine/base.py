"""What the training loop asks of an engine. One device or a thousand, the loop sees the same few calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Protocol, TypeVar

import numpy as np

from flatout.data.feed import Samples
from flatout.data.order import Batch
from flatout.engine.recorder import Recorder
from flatout.numerics.metrics import Counts

Value = TypeVar("Value")


class Ask(IntFlag):
    """What one process of a run asks of all: to look at the counts, or to end as by SIGINT or SIGTERM."""

    NOTHING = 0
    LOOK = 1
    INTERRUPT = 2
    TERMINATE = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The result of one pass over a split.

    Attributes:
        counts: sums over all samples, each counted once.
        probabilities: float32 [N, K] in the order of the split, if they were asked for.
    """

    counts: Counts
    probabilities: np.ndarray | None


class Engine(Protocol):
    """Trains one model on all devices it was made for, in one process or with others.

    Steps only enqueue work; `counts` waits for it.

    Attributes:
        recorder: is told which samples this process takes in each step; None for nobody.
    """

    recorder: Recorder | None

    @property
    def threads(self) -> int:
        """The threads that compute in each process."""
        ...

    @property
    def device_names(self) -> list[str]:
        """The devices that this process drives, as torch writes them."""
        ...

    def describe(self) -> list[str]:
        """Return sentences about the devices, threads and number formats in use."""
        ...

    def place(self, samples: Samples) -> Any:
        """Bring a split to where the steps will read it; what is returned means something to the engine alone."""
        ...

    def prepare(self, placed: Any) -> None:
        """Do what the steps on a split need once, before the clock of training starts: compile them, say."""
        ...

    def begin_epoch(self, placed: Any, transforms: np.ndarray | None) -> None:
        """Take the epoch's augmentation table (see `augment.epoch_transforms`)."""
        ...

    def feed(self, placed: Any, batches: Iterable[Batch]) -> Iterator[Any]:
        """Yield the batches as the steps want them, prepared ahead of time."""
        ...

    def train_step(self, placed: Any, inputs: Any, learning_rate: float, seed: int, ask: Ask = Ask.NOTHING) -> None:
        """Update the state from one batch; `seed` decides what a dropout drops, `ask` travels to all processes."""
        ...

    def asked(self) -> Ask:
        """Return what any process asked for in the steps since the last call, and all now know.

        All get the same answer after the same step; where asking would wait for the device, some steps later.
        """
        ...

    def share(self, value: Value) -> Value:
        """Return the first process's value on every process, so that what follows from it is decided once."""
        ...

    def evaluate(self, placed: Any, *, with_probabilities: bool = False) -> Evaluation:
        """Run the model over a split, and wait for the result."""
        ...

    def counts(self) -> tuple[Counts, int | None]:
        """Wait for all steps; return the sums since the last call and the first step whose loss was not finite.

        Steps count from 0 since `begin_epoch`; None where all were finite.
        """
        ...

    def communication_seconds(self) -> float:
        """Return the time in steps since the last call in which this process added up with others, or waited for them.

        NaN where the device does that by itself.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return a copy of everything that training changes: torch tensors on the CPU by name.

        `model.NAME` holds parameters and buffers under their plain names, `optimizer.NAME.KEY` what the optimizer
        keeps.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned, on this engine or another."""
        ...

    def close(self) -> None:
        """Give back what was changed in the process for the engine's sake; it may not be used afterwards."""
        ...

    def peak_memory_bytes(self) -> int | None:
        """Return the most device memory used so far; None where the device has no memory of its own."""
        ...
