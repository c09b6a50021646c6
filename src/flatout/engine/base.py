"""The engine protocol: all that the training loop knows of devices, one or a thousand."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flatout.data.feed import Samples
from flatout.data.order import Batch
from flatout.engine.recorder import Recorder
from flatout.numerics.metrics import Counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Sums over all samples of a split, and float32 [N, K] probabilities in its order if they were requested."""

    counts: Counts
    probabilities: np.ndarray | None


class DeviceSplit(Protocol):
    """One split of the data where the engine reads it. Training steps only enqueue work."""

    samples: Samples

    def compile(self) -> None:
        """Compile the training step, before the clock of training starts."""

    def begin_epoch(self, transforms: np.ndarray | None) -> None:
        """Set the epoch's augmentation table (see `augment.epoch_transforms`)."""

    def feed(self, batches: Iterable[Batch]) -> Iterator[Any]:
        """Yield the inputs of the training step for each batch, prepared ahead of time."""
        ...

    def train_step(self, inputs: Any, learning_rate: float, seed: int) -> None:
        """Update the engine's state from one batch; `seed` determines dropout."""

    def evaluate(self, *, with_probabilities: bool = False) -> Evaluation:
        """Run the model over the split and wait for the result."""
        ...


class Engine(Protocol):
    """Trains one model on the devices of this process, together with the other processes of its world.

    Attributes:
        recorder: receives the samples of this process in each step; None for nobody.
        threads: compute threads of this process.
        device_names: the devices of this process, as torch writes them.
    """

    recorder: Recorder | None
    threads: int
    device_names: list[str]

    def describe(self) -> list[str]:
        """Return sentences about the devices, threads and number formats in use."""
        ...

    def place(self, samples: Samples) -> DeviceSplit:
        """Place a split in device memory, host memory or on disk, wherever it fits."""
        ...

    def counts(self) -> tuple[Counts, int | None]:
        """Wait for all steps; return the sums since the last call and the first step of the epoch with a bad loss.

        Steps count from 0 since `begin_epoch`; None where all losses were finite.
        """
        ...

    def communication_seconds(self) -> float:
        """Return the time spent in all-reduces since the last call; NaN where the device does not report it."""
        ...

    def state(self) -> dict[str, Any]:
        """Return a copy of the training state: `model.NAME` and `optimizer.NAME.KEY`, torch tensors on the CPU."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned, on this engine or another."""

    def peak_memory_bytes(self) -> int | None:
        """Return the peak of device memory; None where the device has no memory of its own."""
        ...

    def close(self) -> None:
        """Restore the settings of the process; the engine must not be used afterwards."""
