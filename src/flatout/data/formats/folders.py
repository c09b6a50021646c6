"""Folders of images: one folder per class, or classes in the names of files. Split folders may be around them."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path

from flatout.data.labels import first_few
from flatout.data.source import DataSource, ImageDataset, ReadOptions, assemble
from flatout.data.splits import in_order, split_of
from flatout.utils.errors import InputError
from flatout.utils.files import printable

KIND, NAMES_KIND = "class folders", "images with classes in their names"
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif"),
    *(".webp", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".heic", ".heif"),
)
_CLUTTER = {"__MACOSX", "Thumbs.db", "desktop.ini"}


def is_image_name(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def visible(folder: Path) -> list["os.DirEntry[str]"]:
    """List a folder by name, without hidden files and operating system artefacts."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.name[:1] != "." and entry.name not in _CLUTTER]
    except OSError as error:
        raise InputError(f"{printable(folder)}: cannot be read: {error.strerror}") from None
    return sorted(found, key=attrgetter("name"))


def is_dir(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a folder or a link to one; a circle of links is not."""
    with suppress(OSError):
        return entry.is_dir()
    return False


def folders_in(folder: Path) -> list[Path]:
    """List the folders in a folder by name."""
    return [Path(entry) for entry in visible(folder) if is_dir(entry)]


def files_in(path: Path, is_wanted: Callable[[str], object]) -> list[Path]:
    """List those files of a folder by name whose names are wanted; none if it is not a folder."""
    files = []
    for entry in visible(path) if path.is_dir() else ():
        with suppress(OSError):
            if is_wanted(entry.name) and entry.is_file():
                files.append(Path(entry))
    return files


def has_images(folder: Path) -> bool:
    """Whether there are images in or below a folder; links to folders count unread."""
    return any(
        entry.is_symlink() or has_images(Path(entry)) if is_dir(entry) else is_image_name(entry.name)
        for entry in visible(folder)
    )


# Class folders


def recognise(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise a tree of class folders; next to others, a folder `train` that itself contains images is a class."""
    if not path.is_dir():
        return None
    below, splits = folders_in(path), _split_folders(path)
    if any(_has_class_folders(folder) for folder in splits.values()):
        splits = in_order(splits, path)
    elif len(splits) == len(below) or not has_images(path):
        return None
    elif any(folder.name.lower() != "train" for folder in splits.values()):
        names = first_few(folder.name for folder in splits.values())
        raise InputError(f"{path}: has {names} beside class folders; put the class folders into {path / 'train'}")
    else:
        filled = [folder for folder in below if folder.is_symlink() or has_images(folder)]
        if len(filled) == 1 and len(folders_in(filled[0])) > 1:  # some archives wrap the real folder
            raise InputError(f"{path}: holds images in one folder only, {filled[0].name}; give {filled[0]}")
        splits = {"train": path}
    # A classes.txt in the folder is ignored: the folders name the classes.
    options = replace(options, class_list=options.class_list if options.classes else None)
    options = replace(options, task="single-label" if options.task == "auto" else options.task)
    return DataSource(kind=KIND, path=path, read=lambda: _read_folders(path, splits, options))


def one_per_split(path: Path, named: Iterable[tuple[str | None, Path]]) -> dict[str, Path]:
    """Return split -> file or folder, without those of no split; two of one split are an InputError."""
    found: dict[str, Path] = {}
    for split, part in named:
        if split in found:
            raise InputError(f"{path}: both {found[split].name} and {part.name} mean {split}; move one away")
        if split:
            found[split] = part
    return found


def _split_folders(path: Path) -> dict[str, Path]:
    return one_per_split(path, ((split_of(folder.name), folder) for folder in folders_in(path)))


def _has_class_folders(folder: Path) -> bool:
    below = len(folders_in(folder))
    return below > 1 or (below == 1 and not files_in(folder, is_image_name))


def _files_below(entry: "os.DirEntry[str]", above: tuple[Path, ...]) -> Iterator["os.DirEntry[str]"]:
    """Yield a file, or those in and below a folder, unless it is a link to one of those above."""
    if not is_dir(entry):
        yield entry
    elif (real := Path(entry).resolve()) not in above:
        for inner in visible(Path(entry)):
            yield from _files_below(inner, (*above, real))


def _read_folders(path: Path, splits: dict[str, Path], options: ReadOptions) -> ImageDataset:
    parts: dict[str, tuple[list[str], list[str]]] = {}
    others: Counter[str] = Counter()
    notes: list[str] = []
    for split, folder in splits.items():
        images: dict[str, list[str]] = {}
        loose, above = list[str](), (folder.resolve(),)
        for entry in visible(folder):
            if is_dir(entry) and printable(entry.name) != entry.name:
                raise InputError(f"{folder}: the name of the folder {printable(entry.name)} is not UTF-8; rename it")
            own = images.setdefault(entry.name, []) if is_dir(entry) else loose
            for file in _files_below(entry, above):
                if is_image_name(file.name):
                    own.append(file.path)
                else:
                    others[printable(Path(file.name).suffix.lower() or file.name)] += 1
        filled = {name: files for name, files in images.items() if files}
        if loose and not filled:
            raise InputError(f"{folder}: holds images but no class folders; sort the images into a folder per class")
        if empty := [name for name in images if name not in filled]:
            notes.append(f"not taken as classes, since they hold no images: {first_few(empty, 5)} in {folder}")
        if loose:
            notes.append(f"ignored images outside the class folders in {folder}: {len(loose):,}")
        labels = [name for name, files in filled.items() for _ in files]
        parts[split] = list(chain.from_iterable(filled.values())), labels
    extra = [folder.name for folder in folders_in(path) if split_of(folder.name) is None]
    if extra and splits != {"train": path}:
        notes.append(f"ignored beside the splits: {first_few(map(printable, extra), 5)}")
    if others:
        kinds = ", ".join(f"{name} {count:,}" for name, count in others.most_common(5))
        notes.append(f"ignored files that are not images: {others.total():,} ({kinds})")
    return assemble(
        KIND,
        path,
        parts,
        options,
        names=None if options.class_list else tuple(sorted({name for _, labels in parts.values() for name in labels})),
        notes=tuple(notes),
        locate=lambda split, i: str(Path(parts[split][0][i]).parent),
    )


# Classes in the names of files


def recognise_names(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise the images of a folder, or of its split folders, if `data.label_pattern` finds classes in names."""
    if not options.label_pattern or not path.is_dir():
        return None
    splits = _split_folders(path)
    splits = in_order(splits, path) if splits else {"train": path}
    return DataSource(kind=NAMES_KIND, path=path, read=lambda: _read_names(path, splits, options))


def _read_names(path: Path, splits: dict[str, Path], options: ReadOptions) -> ImageDataset:
    """Read split -> folder; images in subfolders are ignored."""
    pattern = re.compile(options.label_pattern)
    group = "label" if "label" in pattern.groupindex else 1
    parts, others = {}, []
    for split, folder in splits.items():
        images = files_in(folder, is_image_name)
        labels = [match[group] if (match := pattern.search(image.name)) else "" for image in images]
        others += [str(image) for image, label in zip(images, labels, strict=True) if not label]
        parts[split] = images, labels
    if others:
        raise InputError(
            f"data.label_pattern = {pattern.pattern!r}: finds no class in {len(others):,} names: {first_few(others, 5)}"
        )
    return assemble(NAMES_KIND, path, parts, options)
