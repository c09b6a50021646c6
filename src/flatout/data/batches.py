"""From the rows of a pack to batches: the order of samples, and reading them ahead of time.

In block order (`data.order`), an epoch goes through windows of blocks of images, which are read ahead in large pieces.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from flatout.config import Recipe
from flatout.utils.random import Stream, block_permutation, permutation

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")

# Images per block: large enough that a disk reads blocks about as fast as a whole file, small enough that a window of
# blocks covers many classes of a data set that is sorted by class.
BLOCK_BYTES = 1 << 18
READ_BYTES = 1 << 18  # read ahead at once; smaller gaps between images are read as well, which is faster than a seek
MEASURED_IMAGES = 5000  # enough for mean and standard deviation to three digits
CHUNK_BYTES = 1 << 22  # images per read when a statistic of all of them is computed
EVALUATION_BATCH = 256  # the largest, on a CPU or a TPU core


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """One split of a pack: rows, int64 [N], of images [P, ...], in memory or mapped from a file; labels, int64 [N]."""

    images: np.ndarray
    rows: np.ndarray
    labels: np.ndarray
    is_mirrored: bool = False  # images [H, W, C] are flipped horizontally when they are read

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return len(self) * self.images[:1].nbytes

    @property
    def is_on_disk(self) -> bool:
        return isinstance(self.images, np.memmap)

    def at(self, positions: np.ndarray) -> "Split":
        return replace(self, rows=self.rows[positions], labels=self.labels[positions])

    def with_images(self, images: np.ndarray) -> "Split":
        """Return the samples with other images, [N, ...] in their order."""
        return Split(images=images, rows=np.arange(len(self)), labels=self.labels)

    def mirrored(self) -> "Split":
        return replace(self, is_mirrored=not self.is_mirrored)

    def images_at(self, positions: np.ndarray) -> np.ndarray:
        """Return a copy of the images at `positions`, [B, ...]."""
        return self.read(positions, np.empty((len(positions), *self.images.shape[1:]), self.images.dtype))

    def read(self, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the images at `positions` (int64 [B]) into `out` [B, ...], and return it."""
        rows = self.rows[positions]
        if isinstance(self.images, np.memmap):
            # Pages that are touched through the map count as memory of the process.
            _read_rows(self.images, rows, out)
        else:
            # With the default mode, NumPy copies through a buffer: that takes three times as long.
            np.take(self.images, rows, axis=0, out=out, mode="clip")
        if self.is_mirrored:
            out[:] = out[:, :, ::-1].copy()
        return out


def measure(samples: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of pixels scaled to 0..1, over evenly spaced images."""
    count = len(samples)
    positions = np.unique(np.linspace(0, count - 1, min(count, MEASURED_IMAGES)).astype(np.int64))
    channels, bits = samples.images.shape[-1], 8 * samples.images.itemsize
    histogram = np.zeros((channels, 2**bits), np.int64)
    at_once = max(1, CHUNK_BYTES // samples.images[:1].nbytes)
    for start in range(0, len(positions), at_once):
        images = samples.images_at(positions[start : start + at_once])
        for channel in range(channels):
            histogram[channel] += np.bincount(images[..., channel].ravel(), minlength=2**bits)
    levels, pixels = np.arange(2**bits) / (2**bits - 1), histogram[0].sum()
    mean = histogram @ levels / pixels
    std = np.sqrt(np.maximum(histogram @ np.square(levels) / pixels - np.square(mean), 0))
    # 16-bit images often use a small part of the range.
    digits = 4 if bits == 8 else 7
    return tuple(round(float(m), digits) for m in mean), tuple(round(max(float(s), 0.1**digits), digits) for s in std)


# Order


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One global batch of fixed size: positions in the split, int64 [B], and weights, float32 [B], 0 for padding.

    `count` samples are not padding; they come first. `ahead` are the windows that begin to be read with this batch, as
    ascending positions: in an epoch's first batch two, in that of each other window the next one, empty at the end.
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
    """Return a rank's consecutive share of `count` items; the first ranks have one more if it is uneven."""
    each, more = divmod(count, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def steps_per_epoch(count: int, batch_size: int, drop_last: bool = False) -> int:
    """Return the number of batches that cover `count` samples; at least one, even when the last is dropped."""
    return max(1, count // batch_size) if drop_last else -(-count // batch_size)


def block_size(recipe: Recipe, samples: Split) -> int:
    """Return the number of consecutive samples per block; 0 in full order."""
    return max(1, BLOCK_BYTES // samples.images[:1].nbytes) if recipe.data.order == "blocks" else 0


def epoch_batches(recipe: Recipe, samples: Split, epoch: int, start: int = 0) -> Iterator[Batch]:
    """Yield the batches of one epoch of training on a split, from step `start` on."""
    block = block_size(recipe, samples)
    return training_batches(recipe.seed, epoch, len(samples), recipe.batch_size, recipe.drop_last, start, block)


def training_batches(
    seed: int, epoch: int, count: int, batch_size: int, drop_last: bool = False, start: int = 0, block: int = 0
) -> Iterator[Batch]:
    """Yield the batches of one shuffled epoch from step `start` on; `block` is the size of the blocks, if not 0."""
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
            # Padding repeats a sample of the batch, so no other image has to be read.
            samples = np.concatenate([samples, np.full(batch_size - count, samples[0])])
        yield Batch(samples=samples, weights=weights, count=count)


def _with_windows(batches: Iterator[Batch], order: np.ndarray, ends: np.ndarray, place: int) -> Iterator[Batch]:
    """Add read-ahead windows to batches in block order; the first batch begins at `place`."""
    bounds = [0, *ends.tolist(), len(order)]
    begun = np.searchsorted(ends, place, side="right")
    for batch in batches:
        place += batch.count
        following = np.searchsorted(ends, place - 1, side="right") + 2
        yield replace(batch, ahead=[np.sort(order[bounds[w] : bounds[w + 1]]) for w in range(begun, following)])
        begun = following


# Reading


def prefetch(
    load: Callable[[Item], Loaded], items: Iterable[Item], depth: int = 3, pool: ThreadPoolExecutor | None = None
) -> Iterator[Loaded]:
    """Yield `load(item)` for each item in order, loading up to `depth` items ahead in a thread or in `pool`."""
    items = iter(items)
    with pool or ThreadPoolExecutor(1, thread_name_prefix="flatout-feed") as pool:
        pending = deque(pool.submit(load, item) for item in islice(items, depth))
        while pending:
            ready = pending.popleft()
            pending.extend(pool.submit(load, item) for item in islice(items, 1))
            yield ready.result()


class Ahead(Generic[Loaded]):
    """Calls a function of the epoch; a thread computes the next epoch's result ahead of time."""

    def __init__(self, compute: Callable[[int], Loaded]) -> None:
        self._compute, self._pool = compute, ThreadPoolExecutor(1, thread_name_prefix="flatout-epoch")
        self._pending: dict[int, Future[Loaded]] = {}

    def __call__(self, epoch: int) -> Loaded:
        pending = self._pending.get(epoch)
        result = pending.result() if pending else self._compute(epoch)
        self._pending = {epoch + 1: self._pool.submit(self._compute, epoch + 1)}
        return result


def read_ahead(samples: Split, batches: Iterable[Batch], rank: int, ranks: int) -> Iterator[Batch]:
    """Yield the batches, each once its window (see `Batch.ahead`) is in the file cache; a thread reads the next one.

    The `ranks` of a host share the cache, so each reads its part.
    """
    images = samples.images
    if not isinstance(images, np.memmap):
        yield from batches
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="flatout-ahead")
    pending: deque[list[Future[None]]] = deque()
    try:
        for batch in batches:
            for window in batch.ahead:
                rows = samples.rows[window[part(len(window), rank, ranks)]]
                pending.append([pool.submit(_cache_rows, images, *span) for span in _spans(rows, images[:1].nbytes)])
            while len(pending) > 1:
                for read in pending.popleft():
                    read.result()
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def _spans(rows: np.ndarray, row_bytes: int) -> list[tuple[int, int]]:
    """Return the first and last row of each contiguous range to read for ascending rows; large gaps separate ranges."""
    is_far = (np.diff(rows) - 1) * row_bytes >= READ_BYTES
    return [(int(run[0]), int(run[-1])) for run in np.split(rows, np.flatnonzero(is_far) + 1) if len(run)]


def _cache_rows(images: np.memmap, first: int, last: int) -> None:
    row_bytes = images[:1].nbytes
    start, stop = (images.offset + row * row_bytes for row in (first, last + 1))
    with Path(str(images.filename)).open("rb", buffering=0) as file:
        for offset in range(start, stop, READ_BYTES):
            os.pread(file.fileno(), min(READ_BYTES, stop - offset), offset)


def _read_rows(images: np.memmap, rows: np.ndarray, out: np.ndarray) -> None:
    row_bytes = images[:1].nbytes
    with Path(str(images.filename)).open("rb", buffering=0) as file:
        for target, row in zip(out, rows.tolist(), strict=True):
            offset = images.offset + row * row_bytes
            if os.preadv(file.fileno(), [target.reshape(-1).view(np.uint8)], offset) != row_bytes:
                raise OSError(f"{images.filename}: ends before row {row}")
