"""The progress of a run: counted by the loop, kept in checkpoints, and shown in metrics.jsonl."""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flatout.engine.base import Counts
from flatout.utils.run_files import JsonObject
from flatout.utils.style import number

T = TypeVar("T")
# Warm-up steps, which allocate memory, choose algorithms and capture CUDA graphs.
FIRST_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One line of metrics.jsonl. Losses are means."""

    epoch: int
    step: int
    learning_rate: float
    train_loss: float
    images: int
    seconds: float
    images_per_second: float
    metrics: dict[str, float]  # of the task, and losses: `train_accuracy`, `valid_loss`, `valid_accuracy` and so on

    def of(self, split: str) -> dict[str, float]:
        """Return the metrics of a split, by name."""
        return {key.removeprefix(f"{split}_"): v for key, v in self.metrics.items() if key.startswith(f"{split}_")}

    def describe(self, epochs: int, shown: tuple[str, ...], *, is_best: bool) -> str:
        """Return the line that is printed after the epoch of several, with some metrics."""
        parts = [f"epoch {self.epoch}/{epochs}"]
        for split in ("train", "valid", "test"):
            found = self.of(split)
            figures = [f"{name.replace('_', ' ')} {number(found[name], 4)}" for name in shown if name in found]
            if figures:
                loss = self.train_loss if split == "train" else found["loss"]
                parts.append(f"{split} " + ", ".join([f"loss {number(loss, 4)}", *figures]))
        parts.append(f"{self.images_per_second:,.0f} images/s")
        return "  ".join([*parts, "best so far"] if is_best else parts)

    def to_plain(self) -> JsonObject:
        """Return the line as plain values."""
        return {**{name: value for name, value in vars(self).items() if name != "metrics"}, **self.metrics}

    @classmethod
    def from_plain(cls, line: JsonObject) -> "EpochRecord":
        """Return the record that `to_plain` wrote."""
        own = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: line[key] for key in line.keys() & own}, metrics={k: line[k] for k in line if k not in own})


@dataclass(kw_only=True, eq=False)
class Progress:
    """The progress of a run; with the engine's state, everything that a checkpoint needs."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the next one
    head: EpochRecord | None = None  # of the head fitted before the first step
    history: list[EpochRecord] = field(default_factory=list)  # of every finished epoch
    counts: Counts = field(default_factory=Counts)  # sums over the finished steps of the unfinished epoch
    best_epoch: int = 0  # by validation, from 1; 0 for none, or for the fitted head
    best: Any = None  # the engine's snapshot of the weights after it, if the recipe keeps the best
    train_seconds: float = 0.0  # in training epochs, including the next two
    wait_seconds: float = 0.0  # for input
    communication_seconds: float = 0.0  # for other processes
    epoch_seconds: float = 0.0  # in the unfinished epoch
    evaluate_seconds: float = 0.0
    first_seconds: float = 0.0  # time and images of the first `FIRST_STEPS` steps
    first_images: int = 0
    first_steps: int = 0
    images_trained: int = 0
    earlier_seconds: float = 0.0  # from the run's first command to the checkpoint that it resumed from
    step_losses: list[tuple[int, float]] = field(default_factory=list)  # step of the run, mean loss since the last one

    @property
    def records(self) -> list[EpochRecord]:
        """The lines of metrics.jsonl."""
        return [self.head, *self.history] if self.head else self.history

    @property
    def best_record(self) -> EpochRecord | None:
        """The line of the best epoch by validation, or of the fitted head."""
        return self.history[self.best_epoch - 1] if self.best_epoch else self.head

    def note_first_steps(self) -> None:
        """Record time and images of the first steps separately."""
        if self.first_steps < FIRST_STEPS:
            self.first_steps += 1
            self.first_seconds, self.first_images = self.train_seconds, self.images_trained

    def position(self, steps_per_epoch: int) -> int:
        """Return the finished steps of the whole run."""
        return self.epoch * steps_per_epoch + self.step

    @property
    def warmup_seconds(self) -> float | None:
        """Extra time of the first steps compared with the others; None without others."""
        images, seconds = self.images_trained - self.first_images, self.train_seconds - self.first_seconds
        if self.first_steps < FIRST_STEPS or images <= 0 or seconds <= 0:
            return None
        return max(0.0, self.first_seconds - self.first_images * seconds / images)


class Clock:
    """Adds elapsed time to the progress during an epoch."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._last = progress, time.perf_counter()

    def tick(self) -> None:
        """Count the time since the last call as training."""
        now = time.perf_counter()
        self._progress.train_seconds += now - self._last
        self._progress.epoch_seconds += now - self._last
        self._last = now

    def skip(self) -> None:
        """Do not count the time since the last call."""
        self._last = time.perf_counter()

    def waiting(self, inputs: Iterator[T]) -> Iterator[T]:
        """Yield inputs, and count the time spent waiting for them."""
        while True:
            began = time.perf_counter()
            item = next(inputs, None)
            self._progress.wait_seconds += time.perf_counter() - began
            if item is None:
                return
            yield item


def to_plain(progress: Progress) -> JsonObject:
    """Return the progress without tensors as plain values, for a checkpoint."""
    return {
        **{name: value for name, value in vars(progress).items() if name != "best"},
        "history": [record.to_plain() for record in progress.history],
        "head": progress.head and progress.head.to_plain(),
        "counts": dataclasses.asdict(progress.counts),
    }


def from_plain(fields: dict[str, Any]) -> Progress:
    """Return the progress that `to_plain` wrote; older checkpoints have no `head`."""
    history = [EpochRecord.from_plain(line) for line in fields["history"]]
    head = EpochRecord.from_plain(fields["head"]) if fields.get("head") else None
    return Progress(**{**fields, "history": history, "head": head, "counts": Counts(**fields["counts"])})
