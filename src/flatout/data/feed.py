"""Read rows of an array ahead of time, in memory that does not grow with their number."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np

from flatout.data.order import Batch, part

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")

# The most that is read ahead at once. A gap of less between images is read, too, which takes less time than a seek.
READ_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """One split of a pack: rows, int64 [N], of images [P, ...], in memory or mapped from a file; labels, int64 [N].

    If `is_mirrored`, left and right of images [H, W, C] are exchanged when they are read.
    """

    images: np.ndarray
    rows: np.ndarray
    labels: np.ndarray
    is_mirrored: bool = False

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.labels)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """The size of the split's images in bytes."""
        return len(self) * self.images[:1].nbytes

    @property
    def is_on_disk(self) -> bool:
        """Whether the images are in a file that is read for each batch."""
        return isinstance(self.images, np.memmap)

    def at(self, positions: np.ndarray) -> "Samples":
        """Return the samples at `positions` (int64 [M]) alone."""
        return replace(self, rows=self.rows[positions], labels=self.labels[positions])

    def mirrored(self) -> "Samples":
        """Return the samples with left and right exchanged in every image, [H, W, C]."""
        return replace(self, is_mirrored=not self.is_mirrored)

    def images_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the images at `positions`, [B, ...], in memory of their own; see `read`."""
        return self.read(positions, np.empty((len(positions), *self.images.shape[1:]), self.images.dtype))

    def read(self, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the images at `positions` (int64 [B]) into `out` [B, ...], and return it.

        A mapped file is read rather than touched through the map, since mapped pages count as memory of the process.
        """
        rows = self.rows[positions]
        if not isinstance(self.images, np.memmap):
            np.take(self.images, rows, axis=0, out=out)
        else:
            self._read_file(rows, out)
        if self.is_mirrored:
            out[:] = out[:, :, ::-1].copy()
        return out

    def _read_file(self, rows: np.ndarray, out: np.ndarray) -> None:
        assert isinstance(self.images, np.memmap)
        row_bytes = self.images[:1].nbytes
        with open(self.images.filename, "rb", buffering=0) as file:  # type: ignore[arg-type]  # noqa: PTH123
            for target, row in zip(out, rows.tolist(), strict=True):
                offset = self.images.offset + row * row_bytes
                if os.preadv(file.fileno(), [target.reshape(-1).view(np.uint8)], offset) != row_bytes:
                    raise OSError(f"{self.images.filename}: ends before row {row}")


def read_ahead(samples: Samples, batches: Iterable[Batch], rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """Yield the batches; those of a window (see `Batch.ahead`) when its images are in the file cache.

    A thread brings the next window there meanwhile, in the order of the file. The `ranks` of a host share the cache, so
    each of them reads its part. Nothing is read ahead in full order, or of images in memory.
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
                pending.append([pool.submit(_cache, images, *span) for span in _spans(rows, images[:1].nbytes)])
            while len(pending) > 1:
                for read in pending.popleft():
                    read.result()
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def _spans(rows: np.ndarray, row_bytes: int) -> list[tuple[int, int]]:
    """Return the first and last row of each part of the file that holds ascending rows, without large gaps."""
    is_far = (np.diff(rows) - 1) * row_bytes >= READ_BYTES
    return [(int(run[0]), int(run[-1])) for run in np.split(rows, np.flatnonzero(is_far) + 1) if len(run)]


def _cache(images: np.memmap, first: int, last: int) -> None:
    """Bring rows of a mapped file into the file cache of the system."""
    row_bytes = images[:1].nbytes
    start, stop = (images.offset + row * row_bytes for row in (first, last + 1))
    with open(images.filename, "rb", buffering=0) as file:  # type: ignore[arg-type]  # noqa: PTH123
        for offset in range(start, stop, READ_BYTES):
            os.pread(file.fileno(), min(READ_BYTES, stop - offset), offset)


def prefetch(load: Callable[[Item], Loaded], items: Iterable[Item], depth: int = 3) -> Iterator[Loaded]:
    """Yield `load(item)` for each item in order, loading up to `depth` items ahead in a thread.

    An exception of `load` is raised here, at its place in the order. Closing the iterator ends the thread.
    """
    items = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="flatout-feed") as pool:
        pending = deque(pool.submit(load, item) for item in islice(items, depth))
        while pending:
            ready = pending.popleft()
            pending.extend(pool.submit(load, item) for item in islice(items, 1))
            yield ready.result()
