"""The order of samples: a function of (seed, epoch, position)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flatout.numerics.random import Stream, permutation


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One global batch of fixed size: positions in the split, int64 [B], and weights, float32 [B], 0 for padding.

    `count` samples are not padding; they come first.
    """

    samples: np.ndarray
    weights: np.ndarray
    count: int

    def part(self, rank: int, ranks: int) -> "Batch":
        """Return a rank's share."""
        share = part(len(self.samples), rank, ranks)
        count = min(max(0, self.count - share.start), share.stop - share.start)
        return Batch(samples=self.samples[share], weights=self.weights[share], count=count)


def part(count: int, rank: int, ranks: int) -> slice:
    """Return which of `count` things are a rank's: consecutive ones, the first ranks have one more if need be."""
    each, more = divmod(count, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def steps_per_epoch(count: int, batch_size: int, drop_last: bool = False) -> int:
    """Return the number of batches that cover `count` samples; at least one, even when the last is dropped."""
    return max(1, count // batch_size) if drop_last else -(-count // batch_size)


def training_batches(
    seed: int, epoch: int, count: int, batch_size: int, drop_last: bool = False, start: int = 0
) -> Iterator[Batch]:
    """Yield the batches of one shuffled epoch, from step `start` on; of `count` samples where a batch is larger."""
    order = permutation(seed, Stream.ORDER, epoch, count)
    return _batches(order, min(batch_size, count), steps_per_epoch(count, batch_size, drop_last), start)


def evaluation_batches(count: int, batch_size: int) -> Iterator[Batch]:
    """Yield every sample once, in order."""
    return _batches(np.arange(count), min(batch_size, count), steps_per_epoch(count, batch_size), 0)


def _batches(order: np.ndarray, batch_size: int, steps: int, start: int) -> Iterator[Batch]:
    for step in range(start, steps):
        samples = order[step * batch_size : (step + 1) * batch_size]
        count = len(samples)
        weights = np.zeros(batch_size, np.float32)
        weights[:count] = 1
        if count < batch_size:
            # Padding repeats a sample of the batch, so that it costs no input from elsewhere.
            samples = np.concatenate([samples, np.full(batch_size - count, samples[0])])
        yield Batch(samples=samples, weights=weights, count=count)
