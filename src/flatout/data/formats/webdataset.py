"""WebDataset shards: tar files. The members of a sample follow each other, and have one name up to the first dot.

`000001.jpg` is an image, `000001.cls` its class as text, `000001.json` a dictionary with the class under a key.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from flatout.data.archive import TAR_SUFFIXES, tar_parts
from flatout.data.formats.folders import is_image_name
from flatout.data.members import Container, EncodedList, Slice
from flatout.data.shards import reference, shards
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.errors import InputError

KIND = "WebDataset shards"
ABOUT = {
    KIND: (
        "the folder, a `.tar` or `.tar.gz`, or a pattern with braces",
        "files with members such as `000001.jpg` and `000001.cls` or `000001.json`",
    ),
}
_LABEL_KEYS = ("label", "labels", "cls", "class", "target", "class_id", "category")
_PEEKED, _PEEKED_BYTES = 16, 1 << 24
_MAX_LABEL_BYTES = 1 << 20


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataRef | None:
    """Return the shards if one of them begins with an image and its label, or None."""
    splits = shards(path, lambda name: name.lower().endswith(TAR_SUFFIXES))
    if not any(_begins_with_sample(file, options) for files in splits.values() for file in files):
        return None
    return reference(KIND, path, splits, lambda splits: read(path, splits, class_list, options))


def read(path: Path, splits: dict[str, list[Path]], class_list: Path | None, options: ReadOptions) -> Source:
    """Return the source of split -> shards."""
    places: dict[str, EncodedList] = {}
    parts: dict[str, tuple[EncodedList, list[Any]]] = {}
    for split, files in splits.items():
        images, places[split] = EncodedList(), EncodedList()
        for file in files:
            for key, members in _samples(tar_parts(Container(file, decompress=True))):
                image, label = _image_and_label(f"{file}: sample {key}", dict(members), options)
                images.append(image)
                places[split].append(label)
        parts[split] = images, [_label(place, options) for place in places[split] if isinstance(place, Slice)]
    return assemble(
        KIND, path, parts, class_list=class_list, locate=lambda split, i: str(places[split][i]), task=options.task
    )


def _begins_with_sample(file: Path, options: ReadOptions) -> bool:
    try:
        first = islice(tar_parts(Container(file, decompress=True, limit=_PEEKED_BYTES)), _PEEKED)
        return any(_is_sample(dict(members), options) for _, members in _samples(first))
    except InputError:  # it is reported where it is read as a shard or an archive
        return False


def _samples(parts: Iterable[tuple[str, Slice | None]]) -> Iterator[tuple[str, Iterator[tuple[str, Slice]]]]:
    """Yield the name of each sample, and extension and place of its members."""

    def named() -> Iterator[tuple[str, str, Slice]]:
        for name, part in parts:
            folder, slash, last = name.rpartition("/")
            stem, _, extension = last.partition(".")
            if part is not None and stem:  # neither a folder nor a hidden file
                yield folder + slash + stem, extension.lower(), part

    for key, group in groupby(named(), key=lambda entry: entry[0]):
        yield key, ((extension, part) for _, extension, part in group)


def _label_extensions(options: ReadOptions) -> tuple[str, ...]:
    return (*([options.label_column.lower()] if options.label_column else ["cls"]), "json")


def _images(members: dict[str, Slice], options: ReadOptions) -> list[Slice]:
    """Return the member with the extension that is named, or those with that of an image: `seg.png` beside `jpg` is
    none."""
    if options.file_column:
        return [members[key] for key in (options.file_column.lower(),) if key in members]
    images = {extension: part for extension, part in members.items() if is_image_name(f".{extension}")}
    return [part for extension, part in images.items() if "." not in extension] or list(images.values())


def _is_sample(members: dict[str, Slice], options: ReadOptions) -> bool:
    return bool(_images(members, options)) and any(extension in members for extension in _label_extensions(options))


def _image_and_label(where: str, members: dict[str, Slice], options: ReadOptions) -> tuple[Slice, Slice]:
    images = _images(members, options)
    labels = [members[extension] for extension in _label_extensions(options) if extension in members]
    if len(images) != 1 or not labels:
        need = f"one image and a .{_label_extensions(options)[0]} or .json member are needed"
        name = "--set data.file_column=EXTENSION and --set data.label_column=EXTENSION name others"
        raise InputError(f"{where}: has the members {', '.join(sorted(members))}; {need}; {name}")
    return images[0], labels[0]


def _label(place: Slice, options: ReadOptions) -> Any:
    """Return the label that a member holds: its text, or a value of its dictionary, which may be a list."""
    if place.size > _MAX_LABEL_BYTES:
        raise InputError(f"{place}: has {place.size:,} bytes, too many for a label")
    try:
        text = place.read_bytes().decode("utf-8-sig").strip()
        if not place.name.lower().endswith(".json"):
            return text
        table = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{place}: cannot be read as a label: {error}") from None
    keys = (options.label_column,) if options.label_column else _LABEL_KEYS
    label = next((table[key] for key in keys if key in table), None) if isinstance(table, dict) else None
    if not isinstance(label, (int, float, str, list)) or isinstance(label, bool):
        raise InputError(
            f"{place}: has no label (a number, a text or a list of them) under {' or '.join(keys)}; --set "
            "data.label_column=KEY names another key"
        )
    return label
