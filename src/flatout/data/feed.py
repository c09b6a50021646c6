"""Read rows of an array ahead of time, in memory that does not grow with their number."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """One split of a pack: rows, int64 [N], of images [P, ...], in memory or mapped from a file; labels, int64 [N]."""

    images: np.ndarray
    rows: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.labels)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """The size of the split's images in bytes."""
        return len(self) * self.images[:1].nbytes

    def read(self, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the images at `positions` (int64 [B]) into `out` [B, ...], and return it.

        A mapped file is read rather than touched through the map, since mapped pages count as memory of the process.
        """
        rows = self.rows[positions]
        if not isinstance(self.images, np.memmap):
            return np.take(self.images, rows, axis=0, out=out)
        row_bytes = self.images[:1].nbytes
        with open(self.images.filename, "rb", buffering=0) as file:  # type: ignore[arg-type]  # noqa: PTH123
            for target, row in zip(out, rows.tolist(), strict=True):
                offset = self.images.offset + row * row_bytes
                if os.preadv(file.fileno(), [target.reshape(-1).view(np.uint8)], offset) != row_bytes:
                    raise OSError(f"{self.images.filename}: ends before row {row}")
        return out


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
