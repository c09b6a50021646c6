"""Lists of image files and labels: CSV, JSON lines and PaddleClas lists.

A list is one file, a folder with a file for each split, such as `desc_train.csv`, or a folder of split folders with a
`metadata.csv` or `metadata.jsonl` in each, as in Hugging Face's image folders.
"""

import csv
import io
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, compress, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from flatout.data.formats import folders
from flatout.data.formats.folders import is_image_name, one_per_split, visible
from flatout.data.labels import find_class_list, first_few
from flatout.data.source import DataSource, ImageDataset, ReadOptions, assemble
from flatout.data.splits import in_order, split_of, split_within, words_of
from flatout.utils.errors import InputError

KIND, PADDLE_KIND = "CSV manifest", "PaddleClas lists"
SUFFIXES = (".csv", ".tsv", ".jsonl")
_METADATA = ("metadata.csv", "metadata.jsonl")
_PADDLE_CLASS_LISTS = ("label_list.txt", "labels.txt")
_IMAGE_FOLDERS = ("images", "imgs", "img")
_FILE_COLUMNS = (
    *("file", "path", "image", "img", "filename", "filepath", "imagepath", "imgpath", "imagefile", "imageid"),
    *("imagename", "fname", "files", "images", "filenames", "idcode", "name", "id"),
)
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "classname", "labelname", "classid", "labelid", "y")
_SPLIT_COLUMNS = ("split", "set", "subset", "isvalid")
_FLAGS = {**dict.fromkeys(("0", "0.0", "false"), 0), **dict.fromkeys(("1", "1.0", "true"), 1)}
# PaddleClas has 0,1,0 in one cell for several labels.
_ROW_OF_FLAGS = re.compile(r"[01](,[01])+")
_EMPTY = "lists no images; write rows of file,label"

Row = tuple[int, list[str]]  # a line number and the cells


# Recognising


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataSource | None:
    """Recognise a CSV file, the CSV files of a folder that are named after splits, or a folder's only CSV file.

    Next to class folders, the only CSV file is used only if its first row names an image.
    """
    if not path.is_dir():
        files = {"": path} if path.is_file() and path.suffix.lower() in SUFFIXES else {}
        return _source(KIND, path, files, class_list, options)
    found = [entry.path for entry in visible(path) if entry.name.lower().endswith(SUFFIXES) and entry.is_file()]
    files = one_per_split(path, [(split_within(file.stem), file) for file in found])
    if not found:
        below = [(split_of(entry.name), entry.path) for entry in visible(path) if entry.is_dir()]
        metadata = ((split, folder / name) for split, folder in below for name in _METADATA)
        files = one_per_split(path, [(split, file) for split, file in metadata if split and file.is_file()])
    elif "train" not in files:
        inside = [entry.name for entry in visible(path) if entry.is_dir()]
        is_one_class = len(inside) == 1 and not split_of(inside[0])
        is_list = is_one_class or (len(found) == 1 and _names_images(found[0], options))
        if not is_list and folders.recognise(path, class_list, options):
            return None
        if len(found) > 1:
            names = first_few([file.name for file in found], 5)
            fix = "give the path of one, or name them train.csv, test.csv"
            raise InputError(f"{path}: holds several CSV files ({names}); {fix}")
        files = {"": found[0]}
    return _source(KIND, path, files, class_list, options)


def recognise_paddle(path: Path, class_list: Path | None, options: ReadOptions) -> DataSource | None:
    """Recognise the PaddleClas lists of a folder, or one list."""
    if not path.is_dir():
        files = {"": path} if path.is_file() and path.suffix.lower() == ".txt" and _begins_with_image(path) else {}
    else:
        texts = [entry.path for entry in visible(path) if entry.name.lower().endswith(".txt") and entry.is_file()]
        sure = [file for file in texts if file.name.lower().endswith("_list.txt")]
        splits = ((split_of(file.stem.lower().removesuffix("_list")), file) for file in texts)
        files = one_per_split(
            path, [(split, f) for split, f in splits if split and (f in sure or _begins_with_image(f))]
        )
        # A text file of that name next to class folders may be anything.
        files = files if "train" in files or any(file in sure for file in files.values()) else {}
    names = class_list or find_class_list("", path if path.is_dir() else path.parent, _PADDLE_CLASS_LISTS)
    return _source(PADDLE_KIND, path, files, names, options)


def _source(
    kind: str, path: Path, files: dict[str, Path], class_list: Path | None, options: ReadOptions
) -> DataSource | None:
    if not files:
        return None
    files = files if "" in files else in_order(files, path)
    return DataSource(kind=kind, path=path, read=lambda: _read(kind, path, files, class_list, options))


def _names_images(path: Path, options: ReadOptions) -> bool:
    head, locator = list(islice(_rows(path), 2)), _Locator(path.parent, options)
    with suppress(InputError):
        columns = _find_columns(path, head, locator, "train", options)
        return any(locator.find(cells[columns.file], "train") for _, cells in head[columns.has_header :][:1])
    return False


def _begins_with_image(path: Path) -> bool:
    with suppress(InputError):
        return any(len(cells) == 2 and is_image_name(cells[0]) for _, cells in islice(_rows(path), 1))
    return False


# Rows


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        text, bad = data.decode("utf-8-sig"), data.find(b"\0")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad >= 0:
        line = data.count(b"\n", 0, bad) + 1
        raise InputError(f"{path}: line {line}: is not UTF-8 text (byte {bad}); save it as UTF-8")
    return text


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows that are not blank, trimmed; of JSON lines, the first row is the keys."""
    text = _read_text(path)
    lines = enumerate(io.StringIO(text), start=1)
    if path.suffix.lower() == ".jsonl":
        yield from _json_rows(path, lines)
    elif path.suffix.lower() == ".txt":
        yield from ((number, cells) for number, line in lines if (cells := line.rsplit(maxsplit=1)))
    else:
        yield from _csv_rows(path, text)


def _read_columns(path: Path, width: int) -> list[list[str]]:
    """Return the cells of each column of `_rows`; pyarrow reads a million rows in a second."""
    text = _read_text(path)
    # pyarrow takes the rest of the file for the cell of a quotation mark that is not closed.
    if path.suffix.lower() not in (".jsonl", ".txt") and text.count('"') % 2 == 0:
        with suppress(pa.ArrowInvalid):
            types = {str(i): pa.string() for i in range(width)}
            table = pyarrow.csv.read_csv(
                pa.BufferReader(text.encode()),
                pyarrow.csv.ReadOptions(column_names=list(types)),
                pyarrow.csv.ParseOptions(delimiter=_delimiter(text), newlines_in_values=True),
                pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False),
            )
            columns = [list(map(str.strip, column.to_pylist())) for column in table.columns]
            is_filled = [any(cells) for cells in zip(*columns, strict=True)]
            return [list(compress(column, is_filled)) for column in columns]
    rows = list(_rows(path))
    if ragged := [f"line {line} has {len(cells)}" for line, cells in rows if len(cells) != width]:
        fix = "quote cells that hold the delimiter"
        raise InputError(f"{path}: {width} columns are expected, but {first_few(ragged)}; {fix}")
    return list(map(list, zip(*(cells for _, cells in rows), strict=True)))


def _delimiter(text: str) -> str:
    first = next((line for line in text[:65536].splitlines() if line.strip()), "")
    delimiter = max(",;\t", key=first.count)
    return delimiter if delimiter in first else "|"  # a bar also separates labels


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    first = 1
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped):
                yield first, stripped
            first = reader.line_num + 1
    except csv.Error as error:
        what = "a quotation mark is not closed" if "end of data" in str(error) else error
        raise InputError(f"{path}: line {first}: is not valid CSV: {what}") from None


def _json_rows(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Row]:
    tables: dict[int, dict[str, object]] = {}
    for number, line in lines:
        if line.strip():
            try:
                tables[number] = {**json.loads(line)}
            except (ValueError, TypeError, RecursionError):
                need = 'is not a JSON object, such as {"file_name": ..., "label": ...}'
                raise InputError(f"{path}: line {number}: {need}") from None
    if keys := list(dict.fromkeys(chain.from_iterable(tables.values()))):
        yield 0, keys
        yield from ((number, [_json_cell(table.get(key)) for key in keys]) for number, table in tables.items())


def _json_cell(value: object) -> str:
    if isinstance(value, str):
        return value.strip()
    return "" if value is None else json.dumps(value, ensure_ascii=False)


# Columns


class _NoLabels(InputError):
    """A list without a column of classes."""


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Column indices, the names of the label columns, whether splits are flags, and whether there is a header."""

    file: int
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    split: int | None
    has_flags: bool
    group: int | None
    has_header: bool


def _find_columns(path: Path, head: list[Row], locator: "_Locator", split: str, options: ReadOptions) -> _Columns:
    """Find the columns by the options, else by the header, else by content; `head` is the first two rows."""
    if not head:
        raise InputError(f"{path}: {_EMPTY}")
    # Messages about columns fit one line.
    first = [" ".join(cell.splitlines()) for cell in head[0][1]]
    has_header = not any(is_image_name(cell) or (cell and locator.find(cell, split)) for cell in first)
    header = first if has_header else []
    body = next((cells for _, cells in head[has_header:]), [])
    width, keys = len(first), ["".join(words_of(name)) for name in header]

    def given(key: str) -> tuple[int, ...]:
        value: str = getattr(options, key)
        names = [value] if value and value in header else [name.strip() for name in value.split(",") if name.strip()]
        if unknown := next((name for name in names if name not in header), None):
            columns = f"its columns are {', '.join(header)}" if header else "it has no header"
            raise InputError(f"{path}: has no column {unknown!r}, which data.{key} names; {columns}")
        return tuple(map(header.index, names))

    def named(wanted: Sequence[str]) -> tuple[int, ...]:
        return tuple(keys.index(name) for name in wanted if name in keys)[:1]

    group, flags = next(iter(given("group_column")), None), next(iter(named(_SPLIT_COLUMNS)), None)
    by_content = (i for i, cell in enumerate(body[:width]) if is_image_name(cell))
    file = next(chain(given("file_column"), named(_FILE_COLUMNS), by_content), 0)
    labels = given("label_column") or named(_LABEL_COLUMNS)
    left = tuple(i for i in range(width) if i not in (file, flags, group))
    are_flags = header and all(body[i].lower() in _FLAGS for i in left if i < len(body))
    if not labels and (len(left) == 1 or are_flags):
        labels = left
    if not labels:
        names = f"the columns {', '.join(header)}" if header else f"{width} columns and no header"
        raise (_NoLabels if header or width == 1 else InputError)(
            f"{path}: has {names}; name the columns of files and classes 'file' and 'label', or give "
            "--set data.file_column=NAME and --set data.label_column=NAME"
        )
    used = [header[i] for i in (file, *labels, flags, group) if header and i is not None]
    if twice := next((name for name in used if header.count(name) > 1), None):
        raise InputError(f"{path}: line 1: has several columns {twice!r}; rename all but one")
    return _Columns(
        file=file,
        labels=labels,
        label_names=tuple(repr(header[label]) if header else str(label + 1) for label in labels),
        split=flags,
        has_flags=flags is not None and keys[flags] == "isvalid",
        group=group,
        has_header=has_header,
    )


# Files


class _Locator:
    """Finds the image files that rows name, without suffix if only one fits.

    Paths are relative to `data.images`, the folder of the list, or its subfolders named after the split (Kaggle's
    train.csv next to train_images/) or `images`. Each folder is listed once, since there may be millions of rows.
    """

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        self._folder, self._images = folder, None
        if options.images:
            self._images = Path(os.path.expanduser(options.images))  # noqa: PTH111 - Path drops a leading "./"
            if not self._images.is_dir():
                raise InputError(f"data.images = {options.images!r}: there is no such folder")
        self._bases, self._folders, self._listed = cache(self._bases), cache(self._folders), cache(self._listed)
        self._real_bases = cache(lambda split: [base.resolve() for base in self._bases(split)])

    def find_all(self, cells: list[str], split: str, place: Callable[[int], str]) -> list[str]:
        """Find the files that cells name; those that are missing or lie outside the folders are one error."""
        found = [self.find(cell, split) for cell in cells]
        if missing := [f"{place(i)}: {cells[i] or '(empty)'}" for i, file in enumerate(found) if file is None]:
            where = f"{self._images} and {self._folder}" if self._images else self._folder
            raise InputError(
                f"files that are missing or not below {where}, {len(missing):,} (--set data.images=DIR names another "
                f"folder): {first_few(missing)}"
            )
        return list(filter(None, found))

    def find(self, cell: str, split: str) -> str | None:
        """Return the path of a file, or None."""
        parent, slash, name = cell.replace("\\", "/").rpartition("/")  # lists written on Windows have backslashes
        for folder in self._folders(parent or slash, split):
            if found := self._listed(folder, split).get(name):
                return f"{folder}/{found}"
        return None

    def _bases(self, split: str) -> list[Path]:
        if self._images:
            return [self._images, self._folder]
        named = [e for e in visible(self._folder) if split_of(e.name) == split or e.name.lower() in _IMAGE_FOLDERS]
        return [self._folder, *(entry.path for entry in named if entry.is_dir())]

    def _folders(self, parent: str, split: str) -> list[str]:
        bases = () if "\0" in parent else self._bases(split)  # JSON can hold NUL, which no path may
        return [str(base / parent) for base in bases if self._is_inside(base / parent, split)]

    def _is_inside(self, path: Path, split: str) -> bool:
        return any(map(path.resolve().is_relative_to, self._real_bases(split)))

    def _listed(self, folder: str, split: str) -> dict[str, str]:
        """Return name -> name of the files of a folder, and stem -> name where only one image has the stem."""
        entries = visible(Path(folder)) if Path(folder).is_dir() else ()
        files = [e for e in entries if e.is_file() and (not e.is_link() or self._is_inside(e.path, split))]
        images = [(entry.name.rpartition(".")[0], entry.name) for entry in files if is_image_name(entry.name)]
        count = Counter(stem for stem, _ in images)
        return {stem: name for stem, name in images if count[stem] == 1} | {entry.name: entry.name for entry in files}


# Reading


@dataclass(frozen=True)
class _List:
    """A list file. Lines are counted for messages only."""

    path: Path

    def place(self, row: int) -> str:
        """Return the start of a message about a row."""
        return f"{self.path}: line {self._lines[row]}"

    @cached_property
    def _lines(self) -> list[int]:
        return [line for line, _ in _rows(self.path)]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The rows of one split: their numbers in the list, and the cells of each column."""

    list: _List
    columns: _Columns
    rows: Sequence[int]
    cells: Sequence[Sequence[str]]
    files: Sequence[str]

    def place(self, i: int) -> str:
        """Return the start of a message about a row."""
        return self.list.place(self.rows[i])


def _read(kind: str, path: Path, files: dict[str, Path], class_list: Path | None, options: ReadOptions) -> ImageDataset:
    """Read split -> list; one list without a split in its name may have a column of splits."""
    parts: dict[str, _Part] = {}
    notes: list[str] = []
    for name, file in files.items():
        try:
            parts |= _read_list(name, file, options)
        except _NoLabels as error:
            if name in ("", "train"):
                raise
            notes.append(f"there is no {name} split: {error}")
    parts = in_order(parts, path)
    names = parts["train"].columns.label_names
    groups: list[str] = []
    seen: set[str] = set()
    for part in parts.values():
        if part.columns.label_names != names:
            found = ", ".join(part.columns.label_names)
            raise InputError(f"{part.list.path}: the columns of labels are {found}, elsewhere {', '.join(names)}")
        if part.columns.group is not None:
            groups += part.cells[part.columns.group]
            if empty := [part.place(i) for i, group in enumerate(part.cells[part.columns.group]) if not group]:
                raise InputError(first_few(f"{place}: the group is empty" for place in empty))
        if repeated := [i for i, file in enumerate(part.files) if file in seen or seen.add(file)]:
            notes.append(
                f"rows that name the image of an earlier row: {len(repeated):,} (such as {part.place(repeated[0])}); "
                "several labels of an image belong in one cell, such as cat|dog"
            )
    labels = _labels_of_cells(parts) if len(names) == 1 else _labels_of_columns(parts)
    return assemble(
        kind,
        path,
        {split: (part.files, labels[split]) for split, part in parts.items()},
        names=tuple(name.strip("'") for name in names) if len(names) > 1 else None,
        class_list=class_list,
        notes=tuple(notes),
        locate=lambda split, i: parts[split].place(i),
        subject=f"{parts['train'].list.path}: column {', '.join(names)}",
        task=options.task,
        groups=groups or None,
    )


def _read_list(name: str, file: Path, options: ReadOptions) -> dict[str, _Part]:
    """Return the split that the file is of, or those of its column of splits."""
    head, locator = list(islice(_rows(file), 2)), _Locator(file.parent, options)
    columns = _find_columns(file, head, locator, name or split_within(file.stem) or "train", options)
    every = _read_columns(file, len(head[0][1]))
    rows: Sequence[int] = range(columns.has_header, len(every[0]))
    if not rows:
        raise InputError(f"{file}: {_EMPTY}")
    here, splits = _List(file), {name or "train": rows}
    if not name and columns.split is not None:
        splits = _split_rows(here, rows, every[columns.split], columns.has_flags)
    parts = {}
    for split, own in splits.items():
        cells = [[column[row] for row in own] for column in every]
        files = locator.find_all(cells[columns.file], split, lambda i, own=own: here.place(own[i]))
        parts[split] = _Part(list=here, columns=columns, rows=own, cells=cells, files=files)
    return parts


def _split_rows(here: _List, rows: Sequence[int], cells: list[str], has_flags: bool) -> dict[str, Sequence[int]]:
    """Divide rows by the column of splits, or of false and true for training and validation."""
    meaning = {"false": "train", "0": "train", "true": "valid", "1": "valid"} if has_flags else {}
    split_in = {cell: meaning.get(cell.lower()) or split_of(cell) for cell in set(cells)}
    if unknown := next((row for row in rows if split_in[cells[row]] is None), None):
        need = "true or false" if has_flags else "train, valid or test"
        raise InputError(f"{here.place(unknown)}: unknown split {cells[unknown]!r}; write {need}")
    splits: defaultdict[str, list[int]] = defaultdict(list)
    for row in rows:
        splits[split_in[cells[row]] or ""].append(row)
    return dict(splits)


def _labels_of_cells(parts: dict[str, _Part]) -> dict[str, list[object]]:
    """Return the labels of the only column: texts, or lists."""
    cells = {split: part.cells[part.columns.labels[0]] for split, part in parts.items()}
    known = dict.fromkeys(chain.from_iterable(cells.values()))
    if all(map(_ROW_OF_FLAGS.fullmatch, known)):
        longest = max(map(len, known))
        if short := [f"{parts[s].place(i)}: {t}" for s in cells for i, t in enumerate(cells[s]) if len(t) < longest]:
            raise InputError(f"{first_few(short)}; elsewhere there are {longest // 2 + 1} numbers of 0 and 1")
        values: dict[str, object] = {text: list(map(int, text[::2])) for text in known}
    else:
        values = {text: _list_in(text) for text in known}
    return {split: [values[text] for text in texts] for split, texts in cells.items()}


def _list_in(cell: str) -> object:
    """Parse a list in a cell, written in JSON or by Python; other cells are text."""
    if cell[:1] == "[" and cell[-1:] == "]":
        for text in (cell, cell.replace("'", '"')):
            with suppress(ValueError, RecursionError):
                return json.loads(text)
    return cell


def _labels_of_columns(parts: dict[str, _Part]) -> dict[str, np.ndarray]:
    """Return columns of 0 and 1 that are named after classes, int8 [rows, columns]."""
    labels, wrong = {}, []
    for split, part in parts.items():
        cells = [part.cells[number] for number in part.columns.labels]
        flags = np.array([[_FLAGS.get(cell.lower(), -1) for cell in column] for column in cells], np.int8).T
        wrong += [f"{part.place(i)}: {cells[column][i] or '(empty)'}" for i, column in np.argwhere(flags < 0).tolist()]
        labels[split] = flags
    if wrong:
        lines = first_few(f"{text} in a column of 0 and 1" for text in wrong)
        raise InputError(f"{lines}; write 0 or 1, or several names in one column, such as cat|dog")
    return labels
