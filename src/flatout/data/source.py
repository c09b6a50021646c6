"""What every kind of data looks like once it has been recognised: a table of samples with named splits."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flatout.errors import InputError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Labelled images, not yet decoded or already arrays, in the order train, valid, test.

    Attributes:
        kind: what the data was recognised as, for people ("class folders", "IDX files").
        path: where it came from; None for arrays and data sets given in Python.
        classes: class names; a label is an index into them.
        labels: int64 [N].
        splits: name -> (start, stop), contiguous and covering 0..N; "train" is always there.
        files: N paths of image files; None where `images` is given.
        images: uint8 [N, H, W, C] with C 1 or 3; None where `files` is given.
        notes: what a person should know about how the data was read, one sentence each.
    """

    kind: str
    path: Path | None
    classes: tuple[str, ...]
    labels: np.ndarray
    splits: dict[str, tuple[int, int]]
    files: Sequence[Path] | None = None
    images: np.ndarray | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        assert (self.files is None) != (self.images is None)
        assert len(self.labels) == len(self.files if self.files is not None else self.images)  # type: ignore[arg-type]
        assert list(self.splits) == [name for name in SPLITS if name in self.splits]
        where = str(self.path) if self.path is not None else "the data"
        counts = np.bincount(self.labels, minlength=len(self.classes))
        start, stop = self.splits["train"]
        in_train = np.bincount(self.labels[start:stop], minlength=len(self.classes))
        if len(self.labels) == 0 or stop == start:
            raise InputError(f"{where}: holds no training images")
        if np.count_nonzero(in_train) < 2 and np.count_nonzero(counts) < 2:
            raise InputError(
                f"{where}: all images are of one class ({self.classes[int(self.labels[0])]}); two are needed"
            )
        for index in np.flatnonzero((in_train == 0) & (counts > 0)):
            elsewhere = [
                name for name, (a, b) in self.splits.items() if name != "train" and np.any(self.labels[a:b] == index)
            ]
            raise InputError(
                f"{where}: class {self.classes[index]!r} is in {' and '.join(elsewhere)} but has no training images"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> str:
        """Return what was found, such as `CSV manifest: train 2,848 images of 101 classes, valid 944, test 930`."""
        return describe(self.kind, self.classes, self.splits)

    def class_counts(self, split: str) -> dict[str, int]:
        """Return the number of images of each class in a split, in the order of the classes."""
        start, stop = self.splits[split]
        counts = Counter(self.labels[start:stop].tolist())
        return {name: counts.get(index, 0) for index, name in enumerate(self.classes)}


def describe(kind: str, classes: Sequence[str], splits: dict[str, tuple[int, int]]) -> str:
    """Return one line that says what was found: kind, images of each split, classes."""
    sizes = [f"{name} {stop - start:,}" for name, (start, stop) in splits.items()]
    sizes[0] += f" images of {len(classes):,} classes"
    return f"{kind}: {', '.join(sizes)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Data that has been recognised but not read.

    Attributes:
        kind: as `Source.kind`.
        path: the file or folder.
        inputs: the files whose content decides the arrays, so that a cached pack can be found without reading them;
            empty where the images are separate files (listing those is cheap, so `read` is called first).
        read: lists or reads the data.
    """

    kind: str
    path: Path
    inputs: tuple[Path, ...]
    read: Callable[[], Source]
