"""Trees of class folders: one folder per class, or train/, valid/ and test/ with such folders in each."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flatout.data.labels import first_few, read_class_list
from flatout.data.parts import ordered, spans, split_of
from flatout.data.source import Found, Source
from flatout.errors import InputError

KIND = "class folders"
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif"),
    *(".webp", ".tif", ".tiff", ".ppm", ".pgm"),
)
_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}


def is_image_name(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def visible(folder: Path | str) -> list[os.DirEntry[str]]:
    """Return a folder's entries by name, without hidden files and what operating systems leave behind.

    Raises:
        InputError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            kept = [e for e in entries if not e.name.startswith(".") and e.name not in _CLUTTER]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    return sorted(kept, key=lambda entry: entry.name)


@dataclass
class _Listing:
    """The image files under one folder, and the suffixes of the files that are no images."""

    images: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    def add(self, folder: str, above: tuple[str, ...] = ()) -> None:
        real = os.path.realpath(folder)
        if real in above:  # a link to a folder that holds it
            return
        for entry in visible(folder):
            if entry.is_dir():
                self.add(entry.path, (*above, real))
            else:
                self.add_file(entry)

    def add_file(self, entry: os.DirEntry[str]) -> None:
        if is_image_name(entry.name):
            self.images.append(entry.path)
        else:
            self.others[Path(entry.name).suffix.lower() or entry.name] += 1


def find(folder: Path, class_list: Path | None) -> Found | None:
    """Return the tree of class folders that a folder is, or None.

    A class may be called train: beside other class folders, a folder of that name that itself holds images is one.

    Raises:
        InputError: it is unclear which folders are classes.
    """
    below = [entry for entry in visible(folder) if entry.is_dir()]
    parts: dict[str, Path] = {}
    for entry in below:
        name = split_of(entry.name)
        if name in parts:
            raise InputError(f"{folder}: both {parts[name].name} and {entry.name} mean {name}; leave one")
        if name is not None:
            parts[name] = Path(entry.path)
    if any(_holds_class_folders(path) for path in parts.values()):
        return _found(folder, ordered(parts, folder), class_list)
    if len(parts) == len(below) or not _has_images(folder):
        return None
    for name, path in parts.items():
        if path.name.lower() != "train":
            raise InputError(
                f"{folder}: has {path.name} beside class folders; put the class folders into {folder / 'train'}, "
                f"and those of the {name} images into {path}"
            )
    _refuse_wrapper(folder, below)
    return _found(folder, {"train": folder}, class_list)


def _found(folder: Path, parts: dict[str, Path], class_list: Path | None) -> Found:
    return Found(kind=KIND, path=folder, inputs=(), read=lambda: _read(folder, parts, class_list))


def _holds_class_folders(folder: Path) -> bool:
    """Whether there are several folders, or one and no image beside it (an image may lie there by mistake)."""
    entries = visible(folder)
    below = sum(entry.is_dir() for entry in entries)
    return below > 1 or (below == 1 and not any(is_image_name(e.name) and e.is_file() for e in entries))


def _has_images(folder: Path) -> bool:
    return any(is_image_name(name) for _, _, names in os.walk(folder, followlinks=False) for name in names) or any(
        entry.is_symlink() and entry.is_dir() for entry in visible(folder)
    )


def _refuse_wrapper(folder: Path, below: list[os.DirEntry[str]]) -> None:
    """Point to the real folder where an archive was unpacked into one more folder."""
    if len(below) == 1 and _holds_class_folders(Path(below[0].path)):
        inner = [entry.name for entry in visible(below[0].path) if entry.is_dir()]
        if len(inner) > 1:
            raise InputError(
                f"{folder}: holds one folder only, {below[0].name}, with {first_few(inner, 5)} in it; "
                f"if these are the classes or splits, give {Path(folder, below[0].name)}"
            )


def _read(folder: Path, parts: dict[str, Path], class_list: Path | None) -> Source:
    listings: dict[str, dict[str, _Listing]] = {}
    others: Counter[str] = Counter()
    notes: list[str] = []
    for split, path in parts.items():
        listings[split], loose = _list_classes(path)
        others += loose.others
        empty = [name for name, listing in listings[split].items() if not listing.images]
        for name in empty:
            others += listings[split].pop(name).others
        if empty:
            notes.append(f"taken for no class, as they hold no images: {first_few(empty, 5)} in {path}")
        if loose.images and not listings[split]:
            raise InputError(f"{path}: holds images but no class folders; sort the images into a folder for each class")
        if loose.images:
            notes.append(f"ignored images outside the class folders in {path}: {len(loose.images):,}")
        for listing in listings[split].values():
            others += listing.others
    extra = [e.name for e in visible(folder) if e.is_dir() and split_of(e.name) is None]
    if extra and parts != {"train": folder}:
        notes.append(f"ignored beside the splits: {first_few(extra, 5)}")
    if others:
        kinds = ", ".join(f"{name} {count:,}" for name, count in others.most_common(5))
        notes.append(f"ignored files that are no images: {others.total():,} ({kinds})")
    counts = {split: sum(len(listing.images) for listing in found.values()) for split, found in listings.items()}
    splits = spans(counts, folder)
    classes, labels = _label(folder, listings, class_list)
    return Source(
        kind=KIND,
        path=folder,
        classes=classes,
        labels=labels,
        splits=splits,
        files=[Path(path) for found in listings.values() for listing in found.values() for path in listing.images],
        notes=tuple(notes),
    )


def _list_classes(folder: Path) -> tuple[dict[str, _Listing], _Listing]:
    """Return class name -> its files, and the files outside the class folders."""
    classes: dict[str, _Listing] = {}
    loose = _Listing()
    for entry in visible(folder):
        if entry.is_dir():
            classes[entry.name] = _Listing()
            classes[entry.name].add(entry.path)
        else:
            loose.add_file(entry)
    return classes, loose


def _label(
    folder: Path, listings: dict[str, dict[str, _Listing]], class_list: Path | None
) -> tuple[tuple[str, ...], np.ndarray]:
    names = sorted({name for found in listings.values() for name in found})
    classes = tuple(names)
    if class_list is not None:
        classes = read_class_list(class_list)
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise InputError(f"{folder}: class folders that are not in {class_list}: {first_few(unknown)}")
    index = {name: i for i, name in enumerate(classes)}
    per_class = [(index[name], len(listing.images)) for found in listings.values() for name, listing in found.items()]
    return classes, np.repeat([i for i, _ in per_class], [n for _, n in per_class]).astype(np.int64)
