"""The engine protocol: all that the training loop knows of devices, one or a thousand."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from flatout.data.batches import Batch, Split
from flatout.engine.metrics import Counts
from flatout.engine.recorder import Recorder
from flatout.tasks.base import Task

Keep = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The results on all samples of a split, in its order.

    Attributes:
        task: of the engine.
        loss_sum: the sum of the losses.
        predicted: as `Task.predicted` returns it: int64 [N], the most probable class, -1 where the logits are not
            finite; or probabilities float32 [N, K]; or numbers float32 [N].
        labels: as those of a pack.
        probabilities: as `Task.probabilities` returns it, float32 [N, K], if they were requested.
        logits: float32 [N, outputs], if they were requested.
        features: what `keep_features` made of what the head of the network reads, [N, ...]; None where that is not
            known, or not requested.
    """

    task: Task
    loss_sum: float
    predicted: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray | None
    logits: np.ndarray | None = None
    features: np.ndarray | None = None

    def of_task(self, task: Task) -> "Evaluation":
        """Return the results with what a task has chosen since: thresholds, and a temperature for probabilities."""
        probabilities = self.probabilities
        if self.logits is not None and probabilities is not None:
            import torch

            probabilities = task.probabilities(torch.from_numpy(self.logits)).numpy()
        return replace(self, task=task, probabilities=probabilities)

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.loss_sum / len(self.labels)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the task, by name."""
        own = self.task.own(self.predicted, self.labels)
        return {**self.task.metrics(self.predicted, self.labels), **own}


class DeviceDataset(Protocol):
    """One split of the data where the engine reads it. Training steps only enqueue work."""

    samples: Split

    def compile(self) -> None:
        """Compile the training step, before the clock of training starts."""

    def begin_epoch(self, epoch: int) -> None:
        """Set the augmentation and the image size of an epoch, counted from 0."""

    def feed(self, batches: Iterable[Batch]) -> Iterator[Any]:
        """Yield the inputs of the training step for each batch, prepared ahead of time."""
        ...

    def train_step(self, inputs: Any, learning_rate: float, seed: int) -> None:
        """Update the engine's state from one batch; `seed` determines dropout."""

    def evaluate(
        self,
        *,
        with_probabilities: bool = False,
        with_logits: bool = False,
        keep_features: Keep | None = None,
        tta: bool = False,
    ) -> Evaluation:
        """Run the model over the split, or over views of its images (`augment.tta_views`), and wait for the result.

        `keep_features` is called with the features of each batch, float32 [B, F], and returns what is kept of them,
        [B, ...], since those of all images can be larger than the images; None for nothing.
        """
        ...

    def features(self) -> np.ndarray | None:
        """Return the output of the frozen prefix, float32 [N, ...] with channels last; None where there is none.

        All processes call this, and each gets the whole.
        """
        ...


class Engine(Protocol):
    """Trains one model on the devices of this process, together with the other processes of its world.

    Attributes:
        task: what the labels mean.
        recorder: receives the samples of this process in each step; None for nobody.
        threads: compute threads of this process.
        device_names: the devices of this process, as torch writes them.
    """

    task: Task
    recorder: Recorder | None
    threads: int
    device_names: list[str]

    def describe(self) -> list[str]:
        """Return sentences about the devices, threads and number formats in use."""
        ...

    def place(self, samples: Split) -> DeviceDataset:
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

    def is_finite(self) -> bool:
        """Return whether the whole training state is finite; the same on all processes."""
        ...

    def snapshot(self, *, weights_only: bool = False) -> Any:
        """Return a copy of the training state on the devices, or in host memory if it does not fit there."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot of this engine."""

    def state(self, snapshot: Any = None) -> dict[str, Any]:
        """Return the training state, or that of a snapshot, in the main process; the others take part and return {}.

        `model.NAME` and `optimizer.NAME.KEY` are whole torch tensors on the CPU, for any engine and number of devices.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the main process's `state`, of any engine; in other processes the argument is ignored."""

    def peak_memory_bytes(self) -> int | None:
        """Return the peak of device memory; None where the device has no memory of its own."""
        ...

    def close(self) -> None:
        """Restore the settings of the process; the engine must not be used afterwards."""
