"""CSV manifests: each row names an image file and its class, its classes, or a number.

Either one file (with a `split` column or without), or a folder with a file for each split, such as `desc_train.csv`, or
with folders named after splits that hold a `metadata.csv` or `metadata.jsonl`, as in Hugging Face's image folders.
"""

import json
import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.formats import folders
from flatout.data.formats.folders import is_image_name, visible
from flatout.data.formats.locator import Locator
from flatout.data.labels import first_few
from flatout.data.members import EncodedList
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.data.splits import in_order, split_of, split_within, words_of
from flatout.data.tables import rows_of
from flatout.errors import InputError

KIND = "CSV manifest"
ABOUT = {
    KIND: (
        "the file or its folder",
        "`.csv`, `.tsv` or `.jsonl` with rows of image file and labels; Hugging Face's `metadata.csv` and "
        "`metadata.jsonl`",
    ),
}
SUFFIXES = (".csv", ".tsv", ".jsonl")
_FILE_COLUMNS = (
    *("file", "path", "image", "img", "filename", "filepath", "imagepath", "imgpath", "imagefile", "imageid"),
    *("imagename", "fname", "files", "images", "filenames", "idcode", "name", "id"),
)
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "classname", "labelname", "classid", "labelid", "y")
# Such as label1 and label2, which hold a class each.
_NUMBERED_LABEL = re.compile(rf"({'|'.join(_LABEL_COLUMNS)}|tag)\d+")
_ZEROS = ("0", "0.0", "false", "False", "FALSE")
_MINUS_ONE = "-1"  # instead of 0, as in CelebA
_ZERO_OR_ONE = {**dict.fromkeys((*_ZEROS, _MINUS_ONE), 0), **dict.fromkeys(("1", "1.0", "true", "True", "TRUE"), 1)}
_SPLIT_COLUMNS = ("split", "set", "subset", "partition", "dataset")
_FLAG_COLUMNS = {"isvalid": "valid", "istest": "test"}
_FLAGS = {**dict.fromkeys(("true", "1", "1.0", "yes"), True), **dict.fromkeys(("false", "0", "0.0", "no", ""), False)}
_NAME_THEM = (
    "name the columns of files and classes 'file' and 'label', or give --set data.file_column=NAME and "
    "--set data.label_column=NAME"
)


class _NoLabels(InputError):
    """A CSV file without a column of classes."""


@dataclass(kw_only=True)
class _Part:
    """The rows of one split, in columns, as there may be millions.

    Attributes:
        path: the CSV file.
        lines: of the rows in it.
        files: what they name.
        labels: the cells of each row.
        groups: of the rows; empty where they have none.
    """

    path: Path
    lines: array = field(default_factory=lambda: array("Q"))
    files: EncodedList = field(default_factory=EncodedList)
    labels: list[tuple[str, ...]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def place(self, index: int) -> str:
        """Return the start of a message about a row."""
        return f"{self.path}: line {self.lines[index]}"


@dataclass(kw_only=True)
class _Unfound:
    """Where rows name files that are missing, or lie outside the folders."""

    missing: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    file: int
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    split: int | None
    flag: str
    group: int | None


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataRef | None:
    """Return a CSV file, the CSV files of a folder that are named after splits, or a folder's only CSV file; or None.

    Beside class folders, the only CSV file is taken if its first row names an image.

    Raises:
        InputError: it is unclear which CSV files are meant, or the only one cannot be read.
    """
    files: dict[str, Path] = {}
    if path.is_file():
        files = {"": path} if path.suffix.lower() in SUFFIXES else {}
    elif path.is_dir():
        every = [e.path for e in visible(path) if e.name.lower().endswith(SUFFIXES) and e.is_file()]
        for file in every:
            name = split_within(file.stem)
            if name in files:
                raise InputError(f"{path}: both {files[name].name} and {file.name} mean {name}; move one away")
            if name is not None:
                files[name] = file
        if "train" in files:
            files = in_order(files, path)
        elif len(every) == 1 and (_names_image_first(every[0], options) or not _has_classes(path, class_list, options)):
            files = {"": every[0]}
        elif len(every) > 1 and not _has_classes(path, class_list, options):
            names = first_few([file.name for file in every], 5)
            raise InputError(
                f"{path}: holds several CSV files ({names}); give the path of one, or name them train.csv, test.csv"
            )
        else:
            files = {} if every else _metadata_of_splits(path)
    if not files:
        return None
    return DataRef(kind=KIND, path=path, read=lambda: read(path, files, class_list, options))


def _has_classes(path: Path, class_list: Path | None, options: ReadOptions) -> bool:
    """Whether a folder holds class folders: more than one, or folders of splits."""
    inside = [entry for entry in visible(path) if entry.is_dir()]
    is_one_class = len(inside) == 1 and split_of(inside[0].name) is None
    return not is_one_class and folders.recognise(path, class_list, options) is not None


def _metadata_of_splits(path: Path) -> dict[str, Path]:
    """Return the `metadata.csv` or `metadata.jsonl` of folders named after splits, as Hugging Face has them."""
    files: dict[str, Path] = {}
    for entry in visible(path):
        if entry.is_dir() and (split := split_of(entry.name)):
            found = (file for name in ("metadata.csv", "metadata.jsonl") if (file := entry.path / name).is_file())
            if file := next(found, None):
                files[split] = file
    return in_order(files, path) if files else {}


def read(path: Path, files: dict[str, Path], class_list: Path | None, options: ReadOptions, kind: str = KIND) -> Source:
    """Return the source of split -> CSV file; one file without a split in its name may have a column of splits."""
    parts: dict[str, _Part] = {}
    notes: list[str] = []
    names: tuple[str, ...] = ()
    subject, unfound = "", _Unfound()
    for name, file in files.items():
        try:
            columns, found = _read_parts(file, name, options, unfound)
        except _NoLabels as error:
            if name in ("", "train"):
                raise
            notes.append(f"there is no {name} split: {error}")
            continue
        if not found:
            raise InputError(f"{file}: lists no images; write rows of file,label")
        if names and columns != names:
            raise InputError(f"{file}: the columns of labels are {', '.join(columns)}, elsewhere {', '.join(names)}")
        names = columns
        subject = subject or f"{file}: column {', '.join(columns)}"
        parts |= found
    _refuse(unfound, next(iter(files.values())).parent, options)
    parts = in_order(parts, path)
    labels, are_names = _labels(list(parts.values()))
    return assemble(
        kind,
        path,
        {split: (part.files, own) for (split, part), own in zip(parts.items(), labels, strict=True)},
        names=tuple(name.strip("'") for name in names) if are_names else None,
        class_list=class_list,
        notes=tuple(notes),
        locate=lambda split, i: parts[split].place(i),
        subject=subject,
        task=options.task if len(names) == 1 or are_names else "multi-label",
        groups=_groups(list(parts.values())) if options.group_column else None,
    )


def _labels(parts: list[_Part]) -> tuple[list[Any], bool]:
    """Return the labels of each part, and whether they are numbers 0 and 1 in columns that are named after classes.

    Several columns with the name of a class each become one text.

    Raises:
        InputError: a column of 0 and 1 has something else; ten lines are listed.
    """
    width = len(parts[0].labels[0])
    if width == 1:
        return [[_list_in(cell) for (cell,) in part.labels] for part in parts], False
    known = set(_ZERO_OR_ONE)
    if any(cell in _ZEROS for cells in set(chain.from_iterable(part.labels for part in parts)) for cell in cells):
        known.discard(_MINUS_ONE)
    wrong = [
        f"{part.place(i)}: {cell or '(empty)'} in a column of 0 and 1"
        for part in parts
        for i, cells in enumerate(part.labels)
        for cell in cells
        if cell not in known
    ]
    if not wrong:
        flat = ((_ZERO_OR_ONE[cell] for cell in chain.from_iterable(part.labels)) for part in parts)
        return [np.fromiter(numbers, np.uint8).reshape(-1, width) for numbers in flat], True
    if len(wrong) < sum(len(part.labels) for part in parts):
        raise InputError(first_few(wrong))  # nearly all are 0 or 1
    return [["|".join(filter(None, cells)) for cells in part.labels] for part in parts], False


def _list_in(cell: str) -> Any:
    """Return the list of labels in a cell, in JSON or as Python prints it; of other cells the text."""
    if cell[:1] == "[" and cell[-1:] == "]":
        for text in (cell, cell.replace("'", '"')):
            with suppress(ValueError, RecursionError):
                return json.loads(text)
    return cell


def _groups(parts: list[_Part]) -> list[str]:
    """Return the groups of all rows, in the order of the parts.

    Raises:
        InputError: one is empty; ten lines are listed.
    """
    empty = (f"{part.place(i)}: the group is empty" for part in parts for i, g in enumerate(part.groups) if not g)
    if lines := list(empty):
        raise InputError(first_few(lines))
    return [group for part in parts for group in part.groups]


def _names_image_first(path: Path, options: ReadOptions) -> bool:
    """Whether the first row of a CSV file names an image that exists."""
    rows, locator = rows_of(path), Locator(path.parent, options)
    try:
        head = list(islice(rows, 2))
        columns, has_header = _layout(path, head, locator, "train", options)
    except InputError:
        return False
    body = head[has_header:]
    return any(locator.find(_named(cells, columns), "train") for _, cells in body[:1] if len(cells) > columns.file)


def _named(cells: list[str], columns: _Columns) -> str:
    """Return the file that a row names; manifests written on Windows have backslashes."""
    return cells[columns.file].replace("\\", "/")


def _layout(
    path: Path, head: list[tuple[int, list[str]]], locator: Locator, split: str, options: ReadOptions
) -> tuple[_Columns, bool]:
    """Return which column is which, and whether the first row is a header, from the first two rows."""
    # Messages about columns are of one line.
    first = [" ".join(cell.splitlines()) for cell in head[0][1]] if head else []
    has_header = not any(is_image_name(cell) or (cell and locator.find(cell, split)) for cell in first)
    body = head[has_header:]
    return _columns(path, first if has_header else None, body[0][1] if body else [], options), has_header


def _read_parts(
    path: Path, name: str, options: ReadOptions, unfound: _Unfound
) -> tuple[tuple[str, ...], dict[str, _Part]]:
    """Return the names of the columns of labels and the parts of one file, which are added to `unfound`, too.

    `name` is that of the split; empty for a file that may have a column of splits.
    """
    rows = rows_of(path)
    head = list(islice(rows, 2))
    if not head:
        return (), {}
    locator = Locator(path.parent, options)
    columns, has_header = _layout(path, head, locator, name or split_within(path.stem) or "train", options)
    parts: dict[str, _Part] = {}
    equal: dict[tuple[str, ...], tuple[str, ...]] = {}  # most rows have the labels of another one
    width, ragged = len(head[0][1]), list[str]()
    for line, cells in chain(head[has_header:], rows):
        if len(cells) != width:
            ragged.append(f"line {line} has {len(cells)}")
            continue
        split = name or _split_in(path, line, cells, columns) or "train"
        if split not in parts:
            parts[split] = _Part(path=path)
        part, file = parts[split], _named(cells, columns)
        if found := locator.find(file, split):
            part.files.append(found)
        else:
            reason = unfound.outside if locator.outside else unfound.missing
            reason.append(f"{path}: line {line}: {file or '(empty)'}")
        labels = tuple([cells[column] for column in columns.labels])
        part.lines.append(line)
        part.labels.append(equal.setdefault(labels, labels))
        if columns.group is not None:
            part.groups.append(cells[columns.group])
    if ragged:
        raise InputError(
            f"{path}: {width} columns are expected, but {first_few(ragged)}; quote cells that hold the delimiter"
        )
    return columns.label_names, parts


def _split_in(path: Path, line: int, cells: list[str], columns: _Columns) -> str:
    """Return the split that a row names; empty for none."""
    if columns.split is None:
        return ""
    cell = cells[columns.split]
    if columns.flag and (is_flagged := _FLAGS.get(cell.lower())) is not None:
        return columns.flag if is_flagged else ""
    if (named := split_of(cell)) is None:
        need = "true or false" if columns.flag else "train, valid or test"
        raise InputError(f"{path}: line {line}: unknown split {cell!r}; write {need}")
    return named


def _columns(path: Path, header: Sequence[str] | None, first: list[str], options: ReadOptions) -> _Columns:
    """Return which column is which: as the options name them, by the header's names, or by the first row's content."""
    width = len(header or first)
    if width < 2:
        raise _NoLabels(f"{path}: line 1 has one column; rows of file,label are expected")
    keys = ["".join(words_of(name)) for name in header or ()]
    split = _first_of((*_SPLIT_COLUMNS, *_FLAG_COLUMNS), keys)
    if header is None and width == 3:
        split = next((i for i in range(3) if not is_image_name(first[i]) and split_of(first[i])), None)
    labels, files = (_given(path, header, key, options) for key in ("label_column", "file_column"))
    file = files[0] if files else None
    if file is None:
        file = _first_of(_FILE_COLUMNS, keys)
    if file is None:
        file = next((i for i, cell in enumerate(first[:width]) if is_image_name(cell)), 0)
    group = next(iter(_given(path, header, "group_column", options)), None)
    left = tuple(i for i in range(width) if i not in (file, split, group))
    if not labels and (found := _first_of(_LABEL_COLUMNS, keys)) is not None:
        labels = (found,)
    if not labels:
        labels = tuple(i for i in left if keys and _NUMBERED_LABEL.fullmatch(keys[i]))
    if not labels and (len(left) == 1 or (header and all(first[i] in _ZERO_OR_ONE for i in left if i < len(first)))):
        labels = left
    if not labels:
        names = f"the columns {', '.join(header)}" if header else f"{width} columns and no header"
        raise (_NoLabels if header else InputError)(f"{path}: has {names}; {_NAME_THEM}")
    return _Columns(
        file=file,
        labels=labels,
        label_names=tuple(repr(header[label]) if header else str(label + 1) for label in labels),
        split=split,
        flag=_FLAG_COLUMNS.get(keys[split], "") if split is not None and keys else "",
        group=group,
    )


def _given(path: Path, header: Sequence[str] | None, key: str, options: ReadOptions) -> tuple[int, ...]:
    """Return the column that an option names, or several, separated by commas; none if it is empty."""
    given, known = getattr(options, key), list(header or ())
    names = [given] if given and given in known else [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            columns = f"its columns are {', '.join(known)}" if header else "it has no header"
            raise InputError(f"{path}: has no column {name!r}, which data.{key} names; {columns}")
    return tuple(map(known.index, names))


def _first_of(wanted: Sequence[str], keys: list[str]) -> int | None:
    return next((keys.index(name) for name in wanted if name in keys), None)


def _refuse(unfound: _Unfound, folder: Path, options: ReadOptions) -> None:
    """Raise InputError if files are missing or lie outside the folders; ten are listed."""
    if outside := unfound.outside:
        raise InputError(
            f"paths that lead out of {folder}, {len(outside):,}: {first_few(outside)}; name a folder that holds all "
            "the images: --set data.images=DIR"
        )
    if missing := unfound.missing:
        where = f"{options.images} and {folder}" if options.images else folder
        raise InputError(
            f"missing files, {len(missing):,} (paths are relative to {where}; --set data.images=DIR names another "
            f"folder): {first_few(missing)}"
        )
