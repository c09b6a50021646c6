"""Folders of images whose names hold the class, found by the regular expression `data.label_pattern`."""

import re
from pathlib import Path

from flatout.data.formats.folders import is_image_name, visible
from flatout.data.labels import first_few
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.data.splits import in_order, split_of
from flatout.errors import InputError

KIND = "images with classes in their names"
ABOUT = {
    KIND: ("the folder, and `--set data.label_pattern=...`", "the pattern is set"),
}


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataRef | None:
    """Return the images of a folder, or of the folders in it that are named after splits, if a pattern is given."""
    if not options.label_pattern or not path.is_dir():
        return None
    splits = {split: entry.path for entry in visible(path) if entry.is_dir() and (split := split_of(entry.name))}
    splits = in_order(splits, path) if splits else {"train": path}
    pattern = re.compile(options.label_pattern)
    return DataRef(kind=KIND, path=path, read=lambda: read(path, splits, pattern, class_list, options.task))


def read(path: Path, splits: dict[str, Path], pattern: re.Pattern[str], class_list: Path | None, task: str) -> Source:
    """Return the source of split -> folder, whose own images are taken, not those of folders in it."""
    group = "label" if "label" in pattern.groupindex else 1
    parts, others = {}, []
    for split, folder in splits.items():
        images = [entry.path for entry in visible(folder) if is_image_name(entry.name) and entry.is_file()]
        matches = [pattern.search(image.name) for image in images]
        others += [str(image) for image, match in zip(images, matches, strict=True) if not (match and match[group])]
        parts[split] = images, [match[group] for match in matches if match and match[group]]
    if others:
        raise InputError(
            f"data.label_pattern = {pattern.pattern!r}: finds no class in {len(others):,} names: {first_few(others, 5)}"
        )
    return assemble(KIND, path, parts, class_list=class_list, task=task)
