"""CSV manifests: each row names an image file and its class, its classes, or a number.

Either one file (with a `split` column or without), or a folder with a file for each split, such as `desc_train.csv`, or
with folders named after splits that hold a `metadata.csv` or `metadata.jsonl`, as in Hugging Face's image folders.
"""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flatout.data.archive import Member
from flatout.data.formats import folders
from flatout.data.formats.folders import is_image_name, visible, without_arrays
from flatout.data.labels import first_few
from flatout.data.members import EncodedList
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.data.splits import SPLITS, in_order, split_of, split_within, words_of
from flatout.errors import InputError

KIND = "CSV manifest"
# Name, what to give and how it is recognised: the rows of the table in docs/data.md.
ABOUT = {
    KIND: (
        "the file or its folder",
        "`.csv`, `.tsv` or `.jsonl` with rows of image file and labels; Hugging Face's `metadata.csv` and "
        "`metadata.jsonl`",
    ),
}
SUFFIXES = (".csv", ".tsv", ".jsonl")
_DELIMITERS = ",;\t"
_FILE_COLUMNS = (
    *("file", "path", "image", "img", "filename", "filepath", "imagepath", "imgpath", "imagefile", "imageid"),
    *("imagename", "fname", "files", "images", "filenames", "idcode", "name", "id"),
)
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "classname", "labelname", "classid", "labelid", "y")
# Such as label1 and label2, which hold a class each.
_NUMBERED_LABEL = re.compile(rf"({'|'.join(_LABEL_COLUMNS)}|tag)\d+")
_ZERO_OR_ONE = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
_SPLIT_COLUMNS = ("split", "set", "subset", "partition", "dataset")
_FLAG_COLUMNS = {"isvalid": "valid", "istest": "test"}
_FLAGS = {**dict.fromkeys(("true", "1", "1.0", "yes"), True), **dict.fromkeys(("false", "0", "0.0", "no", ""), False)}
_IMAGE_FOLDERS = ("images", "imgs", "img")
_NAME_THEM = (
    "name the columns of files and classes 'file' and 'label', or give --set data.file_column=NAME and "
    "--set data.label_column=NAME"
)


class _NoLabels(InputError):
    """A CSV file without a column of classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    line: int
    file: str
    labels: tuple[str, ...]
    split: str
    group: str | None


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
        elif len(every) == 1 and (
            _names_image_first(every[0], options) or folders.recognise(path, class_list, options) is None
        ):
            files = {"": every[0]}
        elif len(every) > 1 and folders.recognise(path, class_list, options) is None:
            names = first_few([file.name for file in every], 5)
            raise InputError(
                f"{path}: holds several CSV files ({names}); give the path of one, or name them train.csv, test.csv"
            )
        else:
            files = {} if every else _metadata_of_splits(path)
    if not files:
        return None
    return DataRef(kind=KIND, path=path, read=lambda: read(path, files, class_list, options))


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
    rows: dict[str, list[tuple[Path, _Row]]] = {}
    notes: list[str] = []
    names: tuple[str, ...] = ()
    subject = ""
    for name, file in files.items():
        try:
            columns, found = _read_rows(file, name or split_within(file.stem) or "train", options)
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
        for split in SPLITS:
            if of_split := [(file, row) for row in found if (name or row.split or "train") == split]:
                rows[split] = of_split
    rows = in_order(rows, path)
    located = _locate(rows, options)
    labels, are_names = _labels(rows)
    return assemble(
        kind,
        path,
        {split: (located[split], labels[split]) for split in rows},
        names=tuple(name.strip("'") for name in names) if are_names else None,
        class_list=class_list,
        notes=tuple(notes),
        locate=lambda split, i: f"{rows[split][i][0]}: line {rows[split][i][1].line}",
        subject=subject,
        task=options.task if len(names) == 1 or are_names else "multi-label",
        groups=_groups(rows) if options.group_column else None,
    )


def _labels(rows: dict[str, list[tuple[Path, _Row]]]) -> tuple[dict[str, list[Any]], bool]:
    """Return the labels of each split, and whether they are numbers 0 and 1 in columns that are named after classes.

    Several columns with the name of a class each become one text.

    Raises:
        InputError: a column of 0 and 1 has something else; ten lines are listed.
    """
    every = [(file, row) for some in rows.values() for file, row in some]
    if len(every[0][1].labels) == 1:
        return {split: [row.labels[0] for _, row in some] for split, some in rows.items()}, False
    wrong = [(f, row, cell) for f, row in every for cell in row.labels if cell not in _ZERO_OR_ONE]
    if not wrong:
        return {s: [[_ZERO_OR_ONE[cell] for cell in row.labels] for _, row in some] for s, some in rows.items()}, True
    if len(wrong) < len(every):
        # Nearly all are 0 or 1.
        lines = [f"{file}: line {row.line}: {cell or '(empty)'} in a column of 0 and 1" for file, row, cell in wrong]
        raise InputError(first_few(lines))
    return {split: ["|".join(filter(None, row.labels)) for _, row in some] for split, some in rows.items()}, False


def _groups(rows: dict[str, list[tuple[Path, _Row]]]) -> list[str]:
    """Return the groups of all rows, in the order of the splits.

    Raises:
        InputError: one is empty; ten lines are listed.
    """
    every = [(file, row) for some in rows.values() for file, row in some]
    if empty := [f"{file}: line {row.line}: the group is empty" for file, row in every if not row.group]:
        raise InputError(first_few(empty))
    return [row.group or "" for _, row in every]


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError(f"{path}: line {line}: holds a NUL character; save it as UTF-8 text")
    return text


def read_table(path: Path) -> list[tuple[int, list[str]]]:
    """Return line number and cells of each row that is not blank; JSON lines have their keys as the first row.

    Raises:
        InputError: the file is no UTF-8 text, or not of its format.
    """
    text = _read_text(path)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if path.suffix.lower() == ".txt":
        return [(number, line.strip().rsplit(maxsplit=1)) for number, line in lines]
    if path.suffix.lower() == ".jsonl":
        tables = [(number, _json_table(path, number, line)) for number, line in lines]
        keys = list(dict.fromkeys(key for _, table in tables for key in table))
        return [(0, keys), *((number, [table.get(key, "") for key in keys]) for number, table in tables)]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    try:
        return [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: is no CSV: {error}") from None


def _json_table(path: Path, number: int, line: str) -> dict[str, str]:
    try:
        table = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: line {number}: is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise InputError(f'{path}: line {number}: is no JSON object, such as {{"file_name": ..., "label": ...}}')
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in table.items()}


def _names_image_first(path: Path, options: ReadOptions) -> bool:
    """Whether the first row of a CSV file names an image that exists."""
    _read_text(path)  # a file that cannot be read is reported, not passed over
    try:
        rows = _read_rows(path, "train", options)[1]
    except InputError:
        return False
    return bool(rows) and _Locator(path.parent, "train", options).find(rows[0].file) is not None


def _read_rows(path: Path, split: str, options: ReadOptions) -> tuple[tuple[str, ...], list[_Row]]:
    """Return the names of the columns of labels and the rows of one file, without its header."""
    table = read_table(path)
    if not table:
        return (), []
    locator = _Locator(path.parent, split, options)
    has_header = not any(is_image_name(cell) or (cell and locator.find(cell)) for cell in table[0][1])
    body = table[1:] if has_header else table
    columns = _columns(path, table[0][1] if has_header else None, body[0][1] if body else [], options)
    width = len(table[0][1])
    if ragged := [f"line {line} has {len(cells)}" for line, cells in body if len(cells) != width]:
        raise InputError(
            f"{path}: {width} columns are expected, but {first_few(ragged)}; quote cells that hold the delimiter"
        )
    rows = []
    for line, cells in body:
        cell = cells[columns.split] if columns.split is not None else ""
        is_flagged = _FLAGS.get(cell.lower()) if columns.flag else None
        named = split_of(cell) if is_flagged is None else columns.flag if is_flagged else ""
        if named is None and columns.split is not None:
            need = "true or false" if columns.flag else "train, valid or test"
            raise InputError(f"{path}: line {line}: unknown split {cell!r}; write {need}")
        # Manifests written on Windows have backslashes.
        file = cells[columns.file].replace("\\", "/")
        labels = tuple(cells[column] for column in columns.labels)
        group = None if columns.group is None else cells[columns.group]
        rows.append(_Row(line=line, file=file, labels=labels, split=named or "", group=group))
    return columns.label_names, rows


def _delimiter(text: str) -> str:
    """Return the delimiter that most of the first lines hold; a comma if there is none."""
    lines = [line for line in text[:65536].splitlines() if line.strip()][:20]
    return max(
        _DELIMITERS, key=lambda mark: (sum(mark in line for line in lines), lines[0].count(mark) if lines else 0)
    )


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
    names = [given] if given in known else [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            columns = f"its columns are {', '.join(known)}" if header else "it has no header"
            raise InputError(f"{path}: has no column {name!r}, which data.{key} names; {columns}")
    return tuple(map(known.index, names))


def _first_of(wanted: Sequence[str], keys: list[str]) -> int | None:
    return next((keys.index(name) for name in wanted if name in keys), None)


class _Locator:
    """Finds the image files that the rows of one split name, with or without suffix.

    Paths are relative to `data.images`, the folder of the CSV file, or the folders in it that are named after the split
    (Kaggle's train.csv beside train_images/) or `images`. Folders are listed once each and links resolved only where
    there are any: 100,000 rows do not cost 100,000 system calls.
    """

    def __init__(self, folder: Path, split: str, options: ReadOptions) -> None:
        self.bases = [folder]
        if options.images:
            inside = folder if isinstance(folder, Member) else Path()
            self.bases.insert(0, inside / os.path.expanduser(options.images))  # noqa: PTH111 - Path drops a leading "./"
            if not self.bases[0].is_dir():
                raise InputError(f"data.images = {options.images!r}: there is no such folder")
        else:
            named = [e for e in visible(folder) if split_of(e.name) == split or e.name.lower() in _IMAGE_FOLDERS]
            self.bases += [entry.path for entry in named if entry.is_dir()]
        self._roots = [base.resolve() for base in self.bases]
        self._folders, self._files = cache(self._folders), cache(self._files)
        self._stems, self._is_inside = cache(self._stems), cache(self._is_inside)
        self.outside = False

    def find(self, name: str) -> Path | None:
        """Return the file that a cell names; None with `outside` set where it exists but leads out of the folders."""
        parent, last = os.path.split(name)
        self.outside = False
        for folder in self._folders(parent):
            files = self._files(folder)
            found = last if last in files else self._stems(folder).get(last)
            if found is None:
                continue
            if self._is_inside(folder) and not (files[found] and not self._is_inside(folder / found)):
                return folder / found
            self.outside = True
        return None

    def _folders(self, parent: str) -> list[Path]:
        return [base / parent for base in self.bases]

    def _is_inside(self, path: Path) -> bool:
        return any(path.resolve().is_relative_to(root) for root in self._roots)

    def _files(self, folder: Path) -> dict[str, bool]:
        """Return the files in a folder, and whether each is a link."""
        try:
            return {entry.name: entry.is_symlink() for entry in visible(folder) if entry.is_file()}
        except (InputError, ValueError):
            return {}

    def _stems(self, folder: Path) -> dict[str, str]:
        """Return the images in a folder by their names without the suffix, where these are unique."""
        names = without_arrays([name for name in self._files(folder) if is_image_name(name)])
        images = {name: name.rpartition(".")[0] for name in names}
        counts = Counter(images.values())
        return {stem: name for name, stem in images.items() if counts[stem] == 1}


def _locate(rows: dict[str, list[tuple[Path, _Row]]], options: ReadOptions) -> dict[str, EncodedList]:
    """Return split -> the rows' files.

    Raises:
        InputError: files are missing or lie outside the folders; ten are listed.
    """
    files: dict[str, EncodedList] = {}
    outside: list[str] = []
    missing: list[str] = []
    folder = next(iter(rows.values()))[0][0].parent
    for split, some in rows.items():
        folder, files[split] = some[0][0].parent, EncodedList()
        locator = _Locator(folder, split, options)
        for path, row in some:
            if file := locator.find(row.file):
                files[split].append(file)
            else:
                (outside if locator.outside else missing).append(f"{path}: line {row.line}: {row.file or '(empty)'}")
    if outside:
        raise InputError(
            f"paths that lead out of {folder}, {len(outside):,}: {first_few(outside)}; name a folder that holds all "
            "the images: --set data.images=DIR"
        )
    if missing:
        where = f"{options.images} and {folder}" if options.images else folder
        raise InputError(
            f"missing files, {len(missing):,} (paths are relative to {where}; --set data.images=DIR names another "
            f"folder): {first_few(missing)}"
        )
    return files
