"""Data that has been recognised (`DataSource`), and data that has been read (`ImageDataset`)."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.config import Data
from flatout.data.decode import MAX_FILE_BYTES, ImageBytes
from flatout.data.labels import count_classes, first_few, read_labels
from flatout.data.splits import SPLITS, in_order
from flatout.data.unpack import UnpackedArchive
from flatout.utils.errors import InputError
from flatout.utils.files import printable

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a file; `name` is its position, such as "record 17"."""

    file: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def read_bytes(self) -> bytes:
        if self.size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {self.size:,} bytes, more than {MAX_FILE_BYTES:,}, the limit")
        # Open only briefly: there may be thousands of files.
        with self.file.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.size, self.offset)
        if len(data) < self.size:
            raise OSError(errno.EIO, "it is cut off")
        return data


class ImageBytesList(Sequence[ImageBytes]):
    """A list of images, which may be millions: paths are stored as text, which takes a third of the memory."""

    def __init__(self, images: Iterable[ImageBytes | str]) -> None:
        self._images = [str(image) if isinstance(image, Path) else image for image in images]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> ImageBytes:  # type: ignore[override] - no slices
        image = self._images[index]
        return Path(image) if isinstance(image, str) else image


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageDataset:
    """Labelled images in the order train, valid, test: files to decode, or arrays.

    `kind` is the format in words, such as "class folders"; `path` is None for data given in Python. `classes` are empty
    in regression. `splits` are name -> (start, stop), contiguous and covering 0..N; "train" is always present.
    `notes` are sentences for the user about how the data was read. The names of files are relative to `folder`.
    """

    kind: str
    path: Path | None
    task: str = "single-label"
    classes: tuple[str, ...]
    labels: np.ndarray
    splits: dict[str, tuple[int, int]]
    files: Sequence[ImageBytes] | None = None
    images: np.ndarray | None = None
    groups: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    unpacked: UnpackedArchive | None = None

    def __post_init__(self) -> None:
        assert (self.files is None) != (self.images is None)
        assert len(self.labels) == len(self.files if self.files is not None else self.images)  # type: ignore[arg-type]
        assert list(self.splits) == [name for name in SPLITS if name in self.splits]
        where = self.path or "the data"
        if name := next((name for name in self.classes if _CONTROL.search(name)), None):
            raise InputError(f"{where}: the name of the class {name!r} has control characters; rename it")
        start, stop = self.splits["train"]
        if start == stop:
            raise InputError(f"{where}: holds no training images")
        if self.task == "regression":
            if np.ptp(self.labels[start:stop]) == 0:
                value = self.labels[start]
                raise InputError(f"{where}: all training images have the label {value:g}; different ones are needed")
            return
        counts = {n: count_classes(self.labels[a:b], len(self.classes)) for n, (a, b) in self.splits.items()}
        in_train, everywhere = counts["train"], np.sum(list(counts.values()), axis=0)
        if np.count_nonzero(everywhere) < 2:
            names = [name for name, count in zip(self.classes, everywhere, strict=True) if count]
            raise InputError(
                f"{where}: all images are of one class ({', '.join(names) or 'none'}); at least two are needed"
            )
        for index in np.flatnonzero((in_train == 0) & (everywhere > 0)):
            others = " and ".join(name for name, count in counts.items() if count[index])
            raise InputError(f"{where}: class {self.classes[index]!r} is in {others} but has no training images")

    def __len__(self) -> int:
        return len(self.labels)

    def read(self) -> "ImageDataset":
        """Return itself: data that has been read can stand for a `DataSource`."""
        return self

    def describe(self) -> str:
        """Return a summary such as `CSV manifest: train 2,848 images of 101 classes, valid 944, test 930`."""
        return describe(self.kind, self.classes, self.splits, self.task)

    def file_name(self, index: int) -> str:
        """Return the name of a file for messages; in an archive, it begins with the archive's."""
        assert self.files is not None
        name = printable(self.files[index])
        return name if self.unpacked is None else name.replace(str(self.unpacked.folder), str(self.path))

    def without(self, bad: Mapping[int, str]) -> "ImageDataset":
        """Return the files without bad ones (index -> reason); a split other than "train" may vanish."""
        assert self.files is not None
        is_good = np.ones(len(self), bool)
        is_good[list(bad)] = False
        start, stop = self.splits["train"]
        had = count_classes(self.labels[start:stop], len(self.classes))
        left = count_classes(self.labels[start:stop][is_good[start:stop]], len(self.classes))
        if len(lost := np.flatnonzero((had > 0) & (left == 0))):
            what = f"all training images of class {self.classes[lost[0]]!r} are bad"
            of_class = [i for i in bad if start <= i < stop and count_classes(self.labels[[i]], len(had))[lost[0]]]
            listed = first_few(f"{self.file_name(i)}: {bad[i]}" for i in of_class)
            raise InputError(f"{self.path}: {what}; repair them ({listed})")
        good_before = np.cumsum([0, *is_good]).tolist()
        splits = {name: (good_before[a], good_before[b]) for name, (a, b) in self.splits.items()}
        emptied = [name for name, (a, b) in splits.items() if a == b and name != "train"]
        return replace(
            self,
            files=ImageBytesList(compress(self.files, is_good)),
            labels=self.labels[is_good],
            groups=None if self.groups is None else self.groups[is_good],
            splits={name: span for name, span in splits.items() if name not in emptied},
            notes=(*self.notes, *(f"All {name} images are bad, so there is no {name} split." for name in emptied)),
        )

    @property
    def group_numbers(self) -> np.ndarray | None:
        """The groups as indices, int64 [N]."""
        return None if self.groups is None else np.unique(self.groups, return_inverse=True)[1]

    def split_of(self, index: int) -> str:
        return next(name for name, (_, stop) in self.splits.items() if index < stop)

    def class_counts(self, split: str) -> dict[str, int]:
        """Return the number of images per class in a split."""
        counts = count_classes(self.labels[slice(*self.splits[split])], len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=True))


def describe(kind: str, classes: Sequence[str], splits: dict[str, tuple[int, int]], task: str) -> str:
    sizes = [f"{name} {stop - start:,}" for name, (start, stop) in splits.items()]
    of = {"single-label": f"of {len(classes):,} classes", "multi-label": f"with any of {len(classes):,} classes"}
    sizes[0] += f" images {of.get(task, 'with numbers')}"
    return f"{kind}: {', '.join(sizes)}"


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Data):
    """The `data` section of a recipe, its task, and the file of class names that is given or next to the data."""

    task: str = "auto"
    class_list: Path | None = None

    @property
    def image_folder(self) -> Path | None:
        return Path(os.path.expanduser(self.images)) if self.images else None  # noqa: PTH111 - Path drops "./"

    def with_class_list(self, data: Path, names: Iterable[str] = ("classes.txt",)) -> "ReadOptions":
        """Return the options with the class list given, else the first of these names in a folder or next to a file."""
        given = Path(self.classes).expanduser() if self.classes else self.class_list
        if given and not given.is_file():
            raise InputError(f"{given}: no such class list; give a text file with one class name per line")
        folder = data if data.is_dir() else data.parent
        found = (path for name in names if (path := folder / name).is_file())
        return replace(self, class_list=given or next(found, None))


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSource:
    """Data that has been recognised but not read.

    `inputs` are the files whose content determines the arrays, so that a cached pack is found without reading them;
    empty for separate image files. `class_list` is one of a name that belongs to the format. `options` are the recipe
    keys that determine the arrays in addition.
    """

    kind: str
    path: Path
    inputs: tuple[Path, ...] = ()
    class_list: Path | None = None
    options: str = ""
    task: str = "auto"
    read: Callable[[], ImageDataset]


def assemble(
    kind: str,
    path: Path | None,
    splits: Mapping[str, tuple[Any, Any]],
    options: ReadOptions,
    *,
    names: tuple[str, ...] | None = None,
    notes: tuple[str, ...] = (),
    locate: Callable[[str, int], str] | None = None,
    subject: str = "",
    groups: Sequence[str] | None = None,
) -> ImageDataset:
    """Return the data set of split -> (images, labels); every format uses this.

    Images are an array [N, H, W, C] or a list of files; for labels, `names`, `locate` and `subject` see `read_labels`.
    By default messages locate a label by its file. `groups` are those of the images of all splits.
    """
    where = str(path or "data")
    splits = in_order(splits, where)
    for name, (images, labels) in splits.items():
        if len(images) != len(labels):
            raise InputError(f"{where}: {name} has {len(images):,} images but {len(labels):,} labels; make them equal")
        if len(images) == 0:
            raise InputError(f"{where}: the {name} split holds no images; fill it or leave it out")
    bounds = np.cumsum([0, *(len(labels) for _, labels in splits.values())]).tolist()
    images = [images for images, _ in splits.values()]
    is_files = not isinstance(images[0], np.ndarray)

    def place(name: str, index: int) -> str:
        return str(splits[name][0][index]) if is_files else f"{where}: {name}: label {index}"

    found = read_labels(
        {name: labels for name, (_, labels) in splits.items()},
        where,
        locate=locate or place,
        names=names,
        class_list=options.class_list,
        subject=subject or where,
        task=options.task,
    )
    files = ImageBytesList(chain.from_iterable(images)) if is_files else None
    return ImageDataset(
        kind=kind,
        path=path,
        task=found.task,
        classes=found.classes,
        labels=found.values,
        splits=dict(zip(splits, pairwise(bounds), strict=True)),
        files=files,
        images=None if is_files else _join(images, list(splits), where),
        groups=None if groups is None else np.array(groups),
        notes=notes + found.notes,
        folder=options.image_folder or (path if path is None or path.is_dir() else path.parent),
    )


def _join(parts: list[np.ndarray], names: list[str], where: str) -> np.ndarray:
    if len({part.shape[1:] for part in parts}) > 1:
        sizes = (f"{name} {'x'.join(map(str, part.shape[1:]))}" for name, part in zip(names, parts, strict=True))
        raise InputError(
            f"{where}: the images differ in size (height x width x channels: {', '.join(sizes)}); make them equal"
        )
    if len({part.dtype for part in parts}) > 1:
        types = (f"{name} {part.dtype}" for name, part in zip(names, parts, strict=True))
        raise InputError(f"{where}: the images differ in type ({', '.join(types)}); make them equal")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # one split, possibly memory-mapped, is not copied
