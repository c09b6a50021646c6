"""The order of samples: a function of (seed, epoch, position).

In block order (`data.order`), an epoch goes through windows of blocks of images, which are read ahead in large pieces,
because disks are slow at reading single images in random order; see `numerics.random.block_permutation`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from flatout.numerics.random import Stream, block_permutation, permutation
from flatout.recipe import Recipe

if TYPE_CHECKING:
    from flatout.data.feed import Samples

# The images of a block of consecutive samples, large enough that a disk reads blocks about as fast as a whole file, and
# small enough that those of a window are from all over a data set that is sorted by class.
BLOCK_BYTES = 1 << 18
# Enough images for mean and standard deviation to three digits.
MEASURED_IMAGES = 5000


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One global batch of fixed size: positions in the split, int64 [B], and weights, float32 [B], 0 for padding.

    `count` samples are not padding; they come first. `ahead` are the windows to read from this batch on, as ascending
    positions: the first batch of an epoch has its own window and the next one, and the first batch of another window
    the one after that, which is empty where there is none.
    """

    samples: np.ndarray
    weights: np.ndarray
    count: int
    ahead: Sequence[np.ndarray] = ()

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


def block_size(recipe: Recipe, samples: "Samples", epoch: int) -> int:
    """Return how many consecutive samples of a split form a block in an epoch; 0 in full order."""
    if recipe.data.order != "blocks":
        return 0
    return max(1, BLOCK_BYTES // samples.images[:1].nbytes)


def epoch_batches(recipe: Recipe, samples: "Samples", epoch: int, start: int = 0) -> Iterator[Batch]:
    """Yield the batches of one epoch of training on a split, from step `start` on."""
    block, count = block_size(recipe, samples, epoch), len(samples)
    return training_batches(recipe.seed, epoch, count, recipe.batch_size, recipe.drop_last, start, block)


def measured(count: int) -> np.ndarray:
    """Return the evenly spaced positions in a split of so many images on which mean and deviation are measured."""
    return np.unique(np.linspace(0, count - 1, min(count, MEASURED_IMAGES)).astype(np.int64))


def training_batches(
    seed: int, epoch: int, count: int, batch_size: int, drop_last: bool = False, start: int = 0, block: int = 0
) -> Iterator[Batch]:
    """Yield the batches of one shuffled epoch, from step `start` on; of `count` samples where a batch is larger.

    `block` is the size of the blocks in block order, 0 for full order.
    """
    steps = steps_per_epoch(count, batch_size, drop_last)
    if not block:
        return _batches(permutation(seed, Stream.ORDER, epoch, count), min(batch_size, count), steps, start)
    order, ends = block_permutation(seed, Stream.ORDER, epoch, count, block)
    return _with_windows(_batches(order, min(batch_size, count), steps, start), order, ends, start * batch_size)


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


def _with_windows(batches: Iterator[Batch], order: np.ndarray, ends: np.ndarray, place: int) -> Iterator[Batch]:
    """Add the windows to read ahead to batches of block order, the first of which begins at a place in it."""
    bounds = [0, *ends.tolist(), len(order)]
    begun = np.searchsorted(ends, place, side="right")
    for batch in batches:
        place += batch.count
        following = np.searchsorted(ends, place - 1, side="right") + 2
        yield replace(batch, ahead=[np.sort(order[bounds[w] : bounds[w + 1]]) for w in range(begun, following)])
        begun = following
