"""CSV manifests: each row names an image file and its class, its classes, or a number.

Either one file (with a `split` column or without), or a folder with a file for each split, such as `desc_train.csv`, or
with folders named after splits that hold a `metadata.csv` or `metadata.jsonl`, as in Hugging Face's image folders.
"""

import re
from array import array
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.formats import folders
from flatout.data.formats.columns import MINUS_ONES, ZERO_OR_ONE, ZEROS, Columns, NoLabels, layout
from flatout.data.formats.folders import visible
from flatout.data.formats.locator import Locator
from flatout.data.image_bytes import ImageBytesList
from flatout.data.labels import first_few
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.data.splits import in_order, split_of, split_within
from flatout.data.tables import list_in, rows_of
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
_ROW = re.compile(r"[01](,[01])+")
_FLAGS = {**dict.fromkeys(("true", "1", "1.0", "yes"), True), **dict.fromkeys(("false", "0", "0.0", "no", ""), False)}


@dataclass(kw_only=True)
class _Part:
    """The rows of one split, in columns, as there may be millions.

    Attributes:
        path: the CSV file.
        lines: of the rows in it.
        files: what they name.
        labels: the cells of each row.
        groups: of the rows; empty where they have none.
        keys: hashes of the paths of the files.
    """

    path: Path
    keys: array = field(default_factory=lambda: array("q"))
    lines: array = field(default_factory=lambda: array("Q"))
    files: ImageBytesList = field(default_factory=ImageBytesList)
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
        except NoLabels as error:
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
        notes=(*notes, *_about_repeated(list(parts.values()))),
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
        texts = {cells[0] for part in parts for cells in part.labels}
        # PaddleClas has 0,1,0 in one cell for several labels.
        are_rows, long = all(map(_ROW.fullmatch, texts)), max(map(len, texts))
        if are_rows and min(map(len, texts)) < long:
            rows = ((part.place(i), cells[0]) for part in parts for i, cells in enumerate(part.labels))
            short = first_few([f"{place}: {text}" for place, text in rows if len(text) < long])
            raise InputError(f"{short}; elsewhere there are {long // 2 + 1} numbers of 0 and 1")
        lists = {
            text: list(map(int, text[::2])) if are_rows else list_in(text)
            for text in texts
            if are_rows or text[:1] == "["
        }
        return [[lists.get(text, text) for (text,) in part.labels] for part in parts], False
    known = set(ZERO_OR_ONE)
    if any(cell in ZEROS for cells in set(chain.from_iterable(part.labels for part in parts)) for cell in cells):
        known.difference_update(MINUS_ONES)
    wrong = [
        f"{part.place(i)}: {cell or '(empty)'} in a column of 0 and 1"
        for part in parts
        for i, cells in enumerate(part.labels)
        for cell in cells
        if cell not in known
    ]
    if not wrong:
        flat = ((ZERO_OR_ONE[cell] for cell in chain.from_iterable(part.labels)) for part in parts)
        return [np.fromiter(numbers, np.uint8).reshape(-1, width) for numbers in flat], True
    if len(wrong) < sum(len(part.labels) for part in parts):
        raise InputError(f"{first_few(wrong)}; write 0 or 1")  # nearly all are
    return [["|".join(filter(None, cells)) for cells in part.labels] for part in parts], False


def _about_repeated(parts: list[_Part]) -> list[str]:
    """Return a note if rows name the image of an earlier row."""
    _, first, which = np.unique(np.concatenate([part.keys for part in parts]), return_index=True, return_inverse=True)
    again = np.flatnonzero(first[which] < np.arange(len(which)))
    if not len(again):
        return []
    labels = list(chain.from_iterable(part.labels for part in parts))
    pairs = list(zip(again.tolist(), first[which[again]].tolist(), strict=True))
    others = sum(labels[row] != labels[earlier] for row, earlier in pairs)
    place = next(islice((part.place(i) for part in parts for i in range(len(part.keys))), pairs[0][0], None))
    advice = "; several labels of an image belong in one cell, such as cat|dog" if others else ""
    return [
        f"rows that name the image of an earlier row: {len(pairs):,} (such as {place}), {others:,} of them with "
        f"another label{advice}"
    ]


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
        columns, has_header = layout(path, head, locator, "train", options)
    except InputError:
        return False
    body = head[has_header:]
    return any(locator.find(_named(cells, columns), "train") for _, cells in body[:1] if len(cells) > columns.file)


def _named(cells: list[str], columns: Columns) -> str:
    """Return the file that a row names; manifests written on Windows have backslashes."""
    return cells[columns.file].replace("\\", "/")


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
    columns, has_header = layout(path, head, locator, name or split_within(path.stem) or "train", options)
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
            part.keys.append(hash(str(found)))
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


def _split_in(path: Path, line: int, cells: list[str], columns: Columns) -> str:
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
