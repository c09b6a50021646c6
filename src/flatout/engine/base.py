"""The engine protocol: the interface between the training loop and any number of devices."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from flatout.data.batches import Batch, Split
from flatout.tasks import Task

Keep = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over samples, which are divided once, so that metrics do not depend on batches and ranks."""

    loss_sum: float = 0.0  # of weight times loss
    weight_sum: float = 0.0  # the number of samples, unless classes are weighted
    metric_sum: float = 0.0  # of the task's training metric, such as correct predictions
    count: int = 0  # without padding

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def loss(self) -> float:
        """Mean loss; NaN without samples."""
        return self.loss_sum / self.weight_sum if self.weight_sum else float("nan")

    @property
    def metric(self) -> float:
        """Mean of the metric, such as the accuracy; NaN without samples."""
        return self.metric_sum / self.count if self.count else float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The results on all samples of a split, in its order.

    Attributes:
        predicted: see `Task.predicted`: int64 [N], the most probable class, -1 where the logits are not finite; or
            probabilities float32 [N, K]; or numbers float32 [N].
        labels: see `Pack.labels`.
        probabilities: see `Task.probabilities`, float32 [N, K], if requested.
        logits: float32 [N, outputs], if requested.
        features: what `keep_features` returned, [N, ...]; None if not requested or unknown.
    """

    task: Task
    loss_sum: float
    predicted: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray | None = None
    logits: np.ndarray | None = None
    features: np.ndarray | None = None

    def of_task(self, task: Task) -> "Evaluation":
        """Return the results with a task's tuned thresholds, and its temperature for probabilities."""
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
    """One split of the data, placed for the engine. Training steps only enqueue work."""

    samples: Split

    def compile(self) -> None:
        """Compile the step with XLA, or cache the output of frozen layers, before the training time is measured."""

    def begin_epoch(self, epoch: int) -> None:
        """Set the augmentation of an epoch, counted from 0."""

    def feed(self, batches: Iterable[Batch]) -> Iterator[Any]:
        """Yield the inputs of the training step for each batch, prepared ahead of time."""
        ...

    def train_step(self, inputs: Any, learning_rate: float, seed: int) -> None:
        """Update the engine's state from one batch; `seed` determines dropout."""

    def draws(self, inputs: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return this process's samples in a training batch, int64 [B], and their rows of the epoch's transforms."""
        ...

    def evaluate(
        self,
        *,
        with_probabilities: bool = False,
        with_logits: bool = False,
        keep_features: Keep | None = None,
        tta: bool = False,
    ) -> Evaluation:
        """Evaluate the split, with `tta` over several views (`augment.tta_views`), and wait for the result.

        `keep_features` maps the input of the network's head in each batch, float32 [B, F], to what is kept, [B, ...].
        """
        ...

    def features(self) -> np.ndarray | None:
        """Return the output of the frozen prefix, float32 [N, ...] with channels last, or None, on all processes."""
        ...


class Engine(Protocol):
    """Trains one model on the devices of this process, together with the other processes of its world."""

    task: Task
    threads: int  # of this process
    device_names: list[str]  # of this process, such as cuda:0 and tpu:0

    def describe(self) -> list[str]:
        """Return sentences about the devices, threads and number formats in use."""
        ...

    def place(self, samples: Split) -> DeviceDataset:
        """Place a split in device memory, host memory or on disk, the first that fits."""
        ...

    def counts(self) -> tuple[Counts, int | None]:
        """Wait for all steps; return the sums since the last call and the first step with a loss that is not finite.

        Steps count from 0 since `begin_epoch`; None if there is none.
        """
        ...

    def communication_seconds(self) -> float:
        """Return the time spent in all-reduces since the last call; NaN if not reported."""
        ...

    def is_finite(self) -> bool:
        """Return whether the whole training state is finite; the same on all processes."""
        ...

    def snapshot(self, *, weights_only: bool = False) -> Any:
        """Return a copy of the training state, on the devices if it fits."""

    def restore(self, snapshot: Any) -> None:
        """Restore a snapshot of this engine."""

    def state(self, snapshot: Any = None) -> dict[str, Any]:
        """Return the training state, or that of a snapshot, in the main process; the others participate and return {}.

        `model.NAME` and `optimizer.NAME.KEY` are whole torch tensors on the CPU, for any engine and number of devices.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the main process's `state`, of any engine; in other processes the argument is ignored."""

    def peak_memory_bytes(self) -> int | None:
        """Return the peak of device memory; None if it has no memory of its own."""
        ...

    def close(self) -> None:
        """Restore the settings of the process; the engine must not be used afterwards."""
