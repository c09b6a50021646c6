"""Trees of class folders: one folder per class, or train/, valid/ and test/ with such folders in each."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from flatout.data.image_bytes import ImageBytesList
from flatout.data.labels import first_few, read_class_list, split_ids
from flatout.data.source import DataRef, Source, assemble
from flatout.data.splits import in_order, split_of
from flatout.errors import InputError
from flatout.files import printable
from flatout.recipe import Data

T = TypeVar("T", str, Path)

KIND = "class folders"
ABOUT = {
    KIND: ("the folder", "one folder per class, with or without split folders around them"),
}
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif"),
    *(".webp", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".heic", ".heif", ".npy"),
)
_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}


def is_image_name(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def is_array_name(name: str) -> bool:
    """Whether a file name has the suffix of an array."""
    return name.lower().endswith(".npy")


def without_arrays(files: list[T]) -> list[T]:
    """Return image files, without `.npy` files unless all are: beside images, these hold masks and the like."""
    return [file for file in files if not is_array_name(str(file))] or files


class Entry:
    """One entry of a folder. A symbolic link that leads nowhere or in a circle is neither a file nor a folder."""

    __slots__ = ("_entry", "name")

    def __init__(self, entry: "os.DirEntry[str]") -> None:
        self.name, self._entry = entry.name, entry

    @property
    def path(self) -> Path:
        """The folder's path and the name."""
        return Path(self._entry.path)

    def is_dir(self) -> bool:
        """Whether it is a folder or a link to one."""
        return self._is(self._entry.is_dir)

    def is_file(self) -> bool:
        """Whether it is a regular file or a link to one."""
        return self._is(self._entry.is_file)

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self._is(self._entry.is_symlink)

    @staticmethod
    def _is(check) -> bool:
        try:
            return check()
        except OSError:
            return False


def visible(folder: Path) -> Sequence[Entry]:
    """Return a folder's entries by name, without hidden files and what operating systems leave behind.

    Raises:
        InputError: the folder cannot be read.
    """
    return sorted(entries_of(folder), key=lambda entry: entry.name)


def entries_of(folder: Path) -> Iterator[Entry]:
    """Yield the same in any order, one at a time, as there may be millions."""
    try:
        entries = os.scandir(folder)
    except OSError as error:
        raise InputError(f"{printable(folder)}: cannot be read: {error.strerror}") from None
    with entries:
        yield from (Entry(entry) for entry in entries if entry.name[:1] != "." and entry.name not in _CLUTTER)


def _folders(folder: Path) -> list[Entry]:
    return [entry for entry in visible(folder) if entry.is_dir()]


@dataclass
class _Listing:
    """The image files under one folder, and the suffixes of the files that are no images."""

    images: ImageBytesList = field(default_factory=ImageBytesList)
    others: Counter[str] = field(default_factory=Counter)

    def add(self, folder: Path, above: tuple[Path, ...] = ()) -> None:
        real = folder.resolve()
        if real in above:  # a link to a folder that holds it
            return
        for entry in visible(folder):
            if entry.is_dir():
                self.add(entry.path, (*above, real))
            else:
                self.add_file(entry)

    def add_file(self, entry: Entry) -> None:
        if is_image_name(entry.name):
            self.images.append(entry.path)
        else:
            self.others[printable(Path(entry.name).suffix.lower() or entry.name)] += 1


def recognise(path: Path, class_list: Path | None, options: Data) -> DataRef | None:
    """Return the tree of class folders that a folder is, or None.

    A class may be called train: beside other class folders, a folder of that name that itself holds images is one.

    Raises:
        InputError: it is unclear which folders are classes.
    """
    if not path.is_dir():
        return None
    below = _folders(path)
    splits: dict[str, Path] = {}
    for entry in below:
        name = split_of(entry.name)
        if name in splits:
            raise InputError(f"{path}: both {splits[name].name} and {entry.name} mean {name}; leave one")
        if name is not None:
            splits[name] = entry.path
    if any(_holds_class_folders(folder) for folder in splits.values()):
        splits = in_order(splits, path)
    elif len(splits) == len(below) or not has_images(path):
        return None
    else:
        for name, folder in splits.items():
            if folder.name.lower() != "train":
                raise InputError(
                    f"{path}: has {folder.name} beside class folders; put the class folders into {path / 'train'}, "
                    f"and those of the {name} images into {folder}"
                )
        _refuse_wrapper(path, below)
        splits = {"train": path}
    # A classes.txt that merely lies in the folder does not count: the folders name the classes.
    return DataRef(kind=KIND, path=path, read=lambda: read(path, splits, class_list if options.classes else None))


def _holds_class_folders(folder: Path) -> bool:
    """Whether there are several folders, or one and no image beside it (an image may lie there by mistake)."""
    below = len(_folders(folder))
    return below > 1 or (below == 1 and not any(is_image_name(e.name) and e.is_file() for e in visible(folder)))


def has_images(folder: Path) -> bool:
    """Whether there are images in or below a folder; links to folders count without a look."""
    return any(
        entry.is_symlink() or has_images(entry.path) if entry.is_dir() else is_image_name(entry.name)
        for entry in visible(folder)
    )


def is_empty(folder: Path) -> bool:
    """Whether there are no files in or below a folder."""
    return all(entry.is_dir() and not entry.is_symlink() and is_empty(entry.path) for entry in visible(folder))


def _refuse_wrapper(folder: Path, below: Sequence[Entry]) -> None:
    """Point to the real folder where an archive was unpacked into one more folder."""
    filled = list(islice((entry for entry in below if entry.is_symlink() or has_images(entry.path)), 2))
    if len(filled) == 1 and _holds_class_folders(filled[0].path):
        inner = [entry.name for entry in _folders(filled[0].path)]
        if len(inner) > 1:
            raise InputError(
                f"{folder}: holds images in one folder only, {filled[0].name}, with {first_few(inner, 5)} in it; "
                f"if these are the classes or splits, give {filled[0].path}"
            )


def read(path: Path, splits: Mapping[str, Path], class_list: Path | None) -> Source:
    """Return the source of split -> folder of class folders."""
    listings: dict[str, dict[str, _Listing]] = {}
    others: Counter[str] = Counter()
    notes: list[str] = []
    for split, folder in splits.items():
        every, loose = _list_classes(folder)
        listings[split] = {name: listing for name, listing in every.items() if listing.images}
        others += sum((listing.others for listing in every.values()), loose.others)
        if empty := [name for name, listing in every.items() if not listing.images]:
            notes.append(f"not taken as classes, since they hold no images: {first_few(empty, 5)} in {folder}")
        if loose.images and not listings[split]:
            raise InputError(f"{folder}: holds images but no class folders; sort the images into a folder per class")
        if loose.images:
            notes.append(f"ignored images outside the class folders in {folder}: {len(loose.images):,}")
    extra = [entry.name for entry in _folders(path) if split_of(entry.name) is None]
    if extra and splits != {"train": path}:
        notes.append(f"ignored beside the splits: {first_few(map(printable, extra), 5)}")
    if others:
        kinds = ", ".join(f"{name} {count:,}" for name, count in others.most_common(5))
        notes.append(f"ignored files that are no images: {others.total():,} ({kinds})")
    names = sorted({name for found in listings.values() for name in found})
    ids = classes = tuple(names)
    if class_list:
        ids, classes = split_ids(read_class_list(class_list), names)
        if unknown := [name for name in names if name not in ids]:
            raise InputError(f"{path}: class folders that are not in {class_list}: {first_few(unknown)}")
    index = {name: i for i, name in enumerate(ids)}
    parts = {}
    for split, found in listings.items():
        labels = np.repeat([index[name] for name in found], [len(listing.images) for listing in found.values()])
        parts[split] = (
            ImageBytesList(*(listing.images for listing in found.values())),
            labels.astype(np.int64),
        )
    return assemble(KIND, path, parts, names=classes, notes=tuple(notes))


def _list_classes(folder: Path) -> tuple[dict[str, _Listing], _Listing]:
    """Return class name -> its files, and the files outside the class folders."""
    classes: dict[str, _Listing] = {}
    loose = _Listing()
    for entry in visible(folder):
        if not entry.is_dir():
            loose.add_file(entry)
            continue
        if printable(entry.name) != entry.name:
            raise InputError(f"{folder}: the name of the folder {printable(entry.name)} is not UTF-8; rename it")
        classes[entry.name] = _Listing()
        classes[entry.name].add(entry.path)
    has_arrays_only = all(is_array_name(str(image)) for listing in classes.values() for image in listing.images)
    for listing in () if has_arrays_only else classes.values():
        if not any(is_array_name(str(image)) for image in listing.images):
            continue
        images = ImageBytesList(image for image in listing.images if not is_array_name(str(image)))
        listing.others.update([".npy"] * (len(listing.images) - len(images)))
        listing.images = images
    return classes, loose
