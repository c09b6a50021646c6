"""Lists of image files and labels: CSV, JSON lines and PaddleClas lists.

A list is one file (with a `split` column or without), a folder with a file for each split, such as `desc_train.csv`, or
a folder of split folders with a `metadata.csv` or `metadata.jsonl` in each, as in Hugging Face's image folders. Lists
may have millions of rows, so columns are processed as a whole.
"""

import csv
import io
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from flatout.data.formats import folders
from flatout.data.formats.folders import is_image_name, list_files, one_per_split, visible, without_arrays
from flatout.data.labels import DistinctLabels, find_class_list_beside, first_few
from flatout.data.source import DataSource, ImageBytesList, ImageDataset, ReadOptions, assemble
from flatout.data.splits import in_order, split_of, split_within, words_of
from flatout.utils.errors import InputError

KIND, PADDLE_KIND = "CSV manifest", "PaddleClas lists"
SUFFIXES = (".csv", ".tsv", ".jsonl")
_METADATA = ("metadata.csv", "metadata.jsonl")
_PADDLE_CLASS_LISTS = ("label_list.txt", "labels.txt")
_IMAGE_FOLDERS = ("images", "imgs", "img")

_DELIMITERS = ",;\t|"
# First line of files that name their delimiter for Excel.
_GIVEN_DELIMITER = re.compile(rb"sep=([,;\t|])\r?\n", re.IGNORECASE)
_SNIFFED_LINES, _SNIFFED_BYTES = 20, 65536

_FILE_COLUMNS = (
    *("file", "path", "image", "img", "filename", "filepath", "imagepath", "imgpath", "imagefile", "imageid"),
    *("imagename", "fname", "files", "images", "filenames", "idcode", "name", "id"),
)
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "classname", "labelname", "classid", "labelid", "y")
_SPLIT_COLUMNS = ("split", "set", "subset", "partition", "dataset")
_FLAG_COLUMNS = {"isvalid": "valid", "istest": "test"}
_FLAGS = {**dict.fromkeys(("true", "1", "1.0", "yes"), True), **dict.fromkeys(("false", "0", "0.0", "no", ""), False)}
_ZEROS = ("0", "0.0", "false", "False", "FALSE")
_ONES = ("1", "1.0", "true", "True", "TRUE")
# PaddleClas has 0,1,0 in one cell for several labels.
_ROW_OF_FLAGS = re.compile(r"[01](,[01])+")


# Recognising


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataSource | None:
    """Recognise a CSV file, the CSV files of a folder that are named after splits, or a folder's only CSV file.

    Next to class folders, the only CSV file is used only if its first row names an image.

    Raises:
        InputError: it is unclear which CSV files are meant, or the only one cannot be read.
    """
    if not path.is_dir():
        files = {"": path} if path.is_file() and path.suffix.lower() in SUFFIXES else {}
        return _reference(KIND, path, files, class_list, options)
    found = [entry.path for entry in visible(path) if entry.name.lower().endswith(SUFFIXES) and entry.is_file()]
    files = one_per_split(path, [(split_within(file.stem), file) for file in found])
    if not found:
        below = [(split_of(entry.name), entry.path) for entry in visible(path) if entry.is_dir()]
        metadata = ((split, folder / name) for split, folder in below for name in _METADATA)
        files = one_per_split(path, [(split, file) for split, file in metadata if split and file.is_file()])
    elif "train" not in files:
        is_list = len(found) == 1 and _names_images(found[0], options)
        inside = [entry.name for entry in visible(path) if entry.is_dir()]
        is_one_class = len(inside) == 1 and not split_of(inside[0])
        if not is_list and not is_one_class and folders.recognise(path, class_list, options):
            return None
        if len(found) > 1:
            names = first_few([file.name for file in found], 5)
            fix = "give the path of one, or name them train.csv, test.csv"
            raise InputError(f"{path}: holds several CSV files ({names}); {fix}")
        files = {"": found[0]}
    return _reference(KIND, path, files, class_list, options)


def recognise_paddle(path: Path, class_list: Path | None, options: ReadOptions) -> DataSource | None:
    """Recognise the PaddleClas lists of a folder, or one list.

    Raises:
        InputError: two lists are of the same split, or there is no training list.
    """
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
    names = class_list or find_class_list_beside(path if path.is_dir() else path.parent, _PADDLE_CLASS_LISTS)
    return _reference(PADDLE_KIND, path, files, names, options)


def _reference(
    kind: str, path: Path, files: dict[str, Path], class_list: Path | None, options: ReadOptions
) -> DataSource | None:
    if not files:
        return None
    files = files if "" in files else in_order(files, path)
    return DataSource(kind=kind, path=path, read=lambda: _read(kind, path, files, class_list, options))


def _names_images(path: Path, options: ReadOptions) -> bool:
    """Whether the first row of a CSV file names an image that exists."""
    text, locator = _TextFile(path), _Locator(path.parent, options)
    with suppress(InputError):
        columns, has_header = _find_columns(text, locator, "train", options)
        return any(locator.find(row[columns.file], "train") for row in text.head[has_header:][:1])
    return False


def _begins_with_image(path: Path) -> bool:
    with suppress(InputError):
        return any(len(cells) == 2 and is_image_name(cells[0]) for cells in _TextFile(path).head[:1])
    return False


# Text files


class _TextFile:
    """The rows of a text file that are not blank, trimmed; of JSON lines, the first row is the keys.

    Raises:
        InputError: the file is not UTF-8 text; or, when a row is reached, not of its format.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._suffix, self._skipped_lines = path, path.suffix.lower(), 0
        try:
            self._data = path.read_bytes()
            self._data.decode()
            bad = self._data.find(b"\0")
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            bad = error.start
        if bad >= 0:
            line = self._data.count(b"\n", 0, bad) + 1
            raise InputError(f"{path}: line {line}: is not UTF-8 text (byte {bad}); save it as UTF-8")
        self._data = self._data.removeprefix(b"\xef\xbb\xbf")
        if given := _GIVEN_DELIMITER.match(self._data):
            self._data, self._skipped_lines = self._data[given.end() :], 1
        self._delimiter = given[1].decode() if given else self._sniff()
        self.head = [cells for _, cells in islice(self._rows(), 2)]

    def place(self, row: int) -> str:
        """Return the start of a message about a row."""
        return f"{self.path}: line {self._lines[row]}"

    def columns(self) -> list[Any]:
        """Read all columns, Arrow arrays of text [rows]."""
        # Unclosed quotation marks, and those after a space, need Python's parser.
        is_plain = self._data.count(b'"') % 2 == 0 and b' "' not in self._data
        if is_plain and self._suffix not in (".jsonl", ".txt"):
            with suppress(pa.ArrowInvalid):
                return self._arrow_columns()
        rows, width = list(self._rows()), len(self.head[0])
        if ragged := [f"line {line} has {len(cells)}" for line, cells in rows if len(cells) != width]:
            fix = "quote cells that hold the delimiter"
            raise InputError(f"{self.path}: {width} columns are expected, but {first_few(ragged)}; {fix}")
        return [pa.array(column, pa.string()) for column in zip(*(cells for _, cells in rows), strict=True)]

    def _arrow_columns(self) -> list[Any]:
        names = [str(i) for i in range(len(self.head[0]))]
        table = pyarrow.csv.read_csv(
            pa.BufferReader(self._data),
            read_options=pyarrow.csv.ReadOptions(column_names=names),
            parse_options=pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
        columns = [pc.call_function("utf8_trim_whitespace", [column.combine_chunks()]) for column in table.columns]
        is_filled = np.zeros(len(table), bool)
        for column in columns:
            is_filled |= pc.call_function("binary_length", [column]).to_numpy() > 0
        return columns if is_filled.all() else [column.filter(pa.array(is_filled)) for column in columns]

    @cached_property
    def _lines(self) -> list[int]:
        return [line for line, _ in self._rows()]

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield line number and cells of each row."""
        text = io.TextIOWrapper(io.BytesIO(self._data), "utf-8", newline="")
        if self._suffix == ".jsonl":
            yield from self._json_rows(text)
            return
        if self._suffix == ".txt":
            yield from ((number, cells) for number, line in enumerate(text, 1) if (cells := line.rsplit(maxsplit=1)))
            return
        reader = csv.reader(text, delimiter=self._delimiter, strict=True, skipinitialspace=True)
        first = self._skipped_lines + 1
        try:
            for cells in reader:
                first = self._skipped_lines + reader.line_num + 1
                stripped = [cell.strip() for cell in cells]
                if any(stripped):
                    yield first - 1, stripped
        except csv.Error as error:
            what = "a quotation mark is not closed" if "end of data" in str(error) else error
            raise InputError(f"{self.path}: line {first}: is not valid CSV: {what}") from None

    def _json_rows(self, text: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        tables: list[tuple[int, dict[str, Any]]] = []
        for number, line in enumerate(text, start=1):
            if not line.strip():
                continue
            try:
                table = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self.path}: line {number}: is not valid JSON: {error}") from None
            if not isinstance(table, dict):
                need = 'is not a JSON object, such as {"file_name": ..., "label": ...}'
                raise InputError(f"{self.path}: line {number}: {need}")
            tables.append((number, table))
        keys = list(dict.fromkeys(key for _, table in tables for key in table))
        if keys:
            yield 0, keys
        for number, table in tables:
            yield number, [_cell(table.get(key)).strip() for key in keys]

    def _sniff(self) -> str:
        """Find the most common delimiter of the first lines; a bar, which also separates labels, must be in all."""
        lines = [line for line in self._data[:_SNIFFED_BYTES].decode(errors="ignore").splitlines() if line.strip()]
        lines = lines[:_SNIFFED_LINES] or [""]
        found = max(_DELIMITERS[:3], key=lambda mark: (sum(mark in line for line in lines), lines[0].count(mark)))
        return "|" if all("|" in line and found not in line for line in lines) else found


def _cell(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


# Columns


class _NoLabels(InputError):
    """A list without a column of classes."""


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Column indices, the names of the label columns, and the split that true means in a column of flags."""

    file: int
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    split: int | None
    flag: str
    group: int | None


def _find_columns(text: _TextFile, locator: "_Locator", split: str, options: ReadOptions) -> tuple[_Columns, bool]:
    """Find the columns by the options, else by the header, else by content, and whether there is a header."""
    # Messages about columns fit one line.
    first = [" ".join(cell.splitlines()) for cell in text.head[0]] if text.head else []
    has_header = not any(is_image_name(cell) or (cell and locator.find(cell, split)) for cell in first)
    header, body = first if has_header else [], [*text.head[has_header:], []][0]
    path, width = text.path, len(first)
    if width < 2:
        raise _NoLabels(f"{path}: line 1 has one column; rows of file,label are expected")

    def given(key: str) -> tuple[int, ...]:
        value: str = getattr(options, key)
        names = [value] if value and value in header else [name.strip() for name in value.split(",") if name.strip()]
        for name in names:
            if name not in header:
                columns = f"its columns are {', '.join(header)}" if header else "it has no header"
                raise InputError(f"{path}: has no column {name!r}, which data.{key} names; {columns}")
        return tuple(map(header.index, names))

    keys = ["".join(words_of(name)) for name in header]

    def named(wanted: Sequence[str]) -> int | None:
        return next((keys.index(name) for name in wanted if name in keys), None)

    split_column = named((*_SPLIT_COLUMNS, *_FLAG_COLUMNS))
    if not header and width == 3:
        split_column = next((i for i, cell in enumerate(first) if not is_image_name(cell) and split_of(cell)), None)
    labels, group = given("label_column"), next(iter(given("group_column")), None)
    file = next(iter(given("file_column")), named(_FILE_COLUMNS))
    if file is None:
        file = next((i for i, cell in enumerate(body) if is_image_name(cell)), 0)
    left = tuple(i for i in range(width) if i not in (file, split_column, group))
    if not labels and (found := named(_LABEL_COLUMNS)) is not None:
        labels = (found,)
    are_flags = header and all(body[i] in (*_ZEROS, *_ONES) for i in left if i < len(body))
    if not labels and (len(left) == 1 or are_flags):
        labels = left
    if not labels:
        names = f"the columns {', '.join(header)}" if header else f"{width} columns and no header"
        raise (_NoLabels if header else InputError)(
            f"{path}: has {names}; name the columns of files and classes 'file' and 'label', or give "
            "--set data.file_column=NAME and --set data.label_column=NAME"
        )
    used = [header[i] for i in (file, *labels, split_column, group) if header and i is not None]
    if twice := next((name for name in used if header.count(name) > 1), None):
        raise InputError(f"{path}: line 1: has several columns {twice!r}; rename all but one")
    columns = _Columns(
        file=file,
        labels=labels,
        label_names=tuple(repr(header[label]) if header else str(label + 1) for label in labels),
        split=split_column,
        flag=_FLAG_COLUMNS.get(keys[split_column], "") if split_column is not None and header else "",
        group=group,
    )
    return columns, has_header


# Files


class _Locator:
    """Finds the image files that rows name, without suffix if only one fits.

    Paths are relative to `data.images`, the folder of the list, or its subfolders named after the split (Kaggle's
    train.csv next to train_images/) or `images`. Each folder is listed once.

    Attributes:
        folders: those in which files were found.
    """

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        self._folder, self._images = folder, None
        if options.images:
            self._images = Path(os.path.expanduser(options.images))  # noqa: PTH111 - Path drops a leading "./"
            if not self._images.is_dir():
                raise InputError(f"data.images = {options.images!r}: there is no such folder")
        self._bases, self._listings = cache(self._bases), cache(self._listings)
        self._real_bases = cache(lambda split: [base.resolve() for base in self._bases(split)])
        self._known: dict[Path, _Listing] = {}
        self.folders: list[Path] = []

    def find_all(self, cells: Any, split: str, place: Callable[[int], str]) -> tuple[np.ndarray, list[str]]:
        """Find the files that an Arrow array names: folder indices, int64 [N], and names within them.

        Raises:
            InputError: files are missing or lie outside the folders; ten are listed.
        """
        numbers, names, missing = [], [], []
        for i, cell in enumerate(cells.to_numpy(zero_copy_only=False)):
            if found := self.find(cell, split):
                numbers.append(found[0])
                names.append(found[1])
            else:
                missing.append(f"{place(i)}: {cell or '(empty)'}")
        if missing:
            where = f"{self._images} and {self._folder}" if self._images else self._folder
            raise InputError(
                f"files that are missing or not below {where}, {len(missing):,} (--set data.images=DIR names another "
                f"folder): {first_few(missing)}"
            )
        return np.array(numbers, np.int64), names

    def find(self, cell: str, split: str) -> tuple[int, str] | None:
        """Return a file's folder index, and its name within the folder."""
        parent, slash, last = cell.replace("\\", "/").rpartition("/")  # lists written on Windows have backslashes
        for listing in self._listings(parent or slash, split):
            name = last if last in listing.files else listing.find_stem(last)
            if name and (not listing.files[name] or self._is_inside(listing.folder / name, split)):
                return listing.number, name
        return None

    def _bases(self, split: str) -> list[Path]:
        if self._images:
            return [self._images, self._folder]
        named = [e for e in visible(self._folder) if split_of(e.name) == split or e.name.lower() in _IMAGE_FOLDERS]
        return [self._folder, *(entry.path for entry in named if entry.is_dir())]

    def _listings(self, parent: str, split: str) -> list["_Listing"]:
        found = [base / parent for base in self._bases(split)]
        for folder in found:
            if folder not in self._known:
                files = list_files(folder) if self._is_inside(folder, split) else {}
                self._known[folder] = _Listing(folder, len(self.folders), files)
                self.folders.append(folder)
        return [self._known[folder] for folder in found]

    def _is_inside(self, path: Path, split: str) -> bool:
        return any(map(path.resolve().is_relative_to, self._real_bases(split)))


@dataclass(frozen=True, eq=False)
class _Listing:
    """A folder, its index, and whether each of its files is a link."""

    folder: Path
    number: int
    files: dict[str, bool]

    def find_stem(self, stem: str) -> str:
        """Find the unique image file with this name and a suffix; or ""."""
        named = without_arrays(self._by_stem.get(stem, []))
        return named[0] if len(named) == 1 else ""

    @cached_property
    def _by_stem(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.files:
            if is_image_name(name):
                found.setdefault(name[: name.rindex(".")], []).append(name)
        return found


# Reading


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The rows of one split.

    Attributes:
        text, rows: the file, and the row numbers in it.
        files, keys: the image files, and an integer per distinct file.
        labels, groups: Arrow arrays of the cells, one for each column.
    """

    text: _TextFile
    rows: np.ndarray
    files: ImageBytesList
    keys: np.ndarray
    labels: list[Any]
    groups: list[Any]


def _read(kind: str, path: Path, files: dict[str, Path], class_list: Path | None, options: ReadOptions) -> ImageDataset:
    """Read split -> list; one list without a split in its name may have a column of splits."""
    parts: dict[str, _Part] = {}
    notes: list[str] = []
    names: tuple[str, ...] = ()
    subject = ""
    for name, file in files.items():
        text, locator = _TextFile(file), _Locator(file.parent, options)
        if not text.head:
            raise InputError(f"{file}: lists no images; write rows of file,label")
        try:
            columns, has_header = _find_columns(text, locator, name or split_within(file.stem) or "train", options)
        except _NoLabels as error:
            if name in ("", "train"):
                raise
            notes.append(f"there is no {name} split: {error}")
            continue
        if names and columns.label_names != names:
            found = ", ".join(columns.label_names)
            raise InputError(f"{file}: the columns of labels are {found}, elsewhere {', '.join(names)}")
        names, subject = columns.label_names, subject or f"{file}: column {', '.join(columns.label_names)}"
        cells = text.columns()
        rows = np.arange(int(has_header), len(cells[0]))
        if not len(rows):
            raise InputError(f"{file}: lists no images; write rows of file,label")
        for split, own in ({name: rows} if name else _split_rows(text, cells, rows, columns)).items():
            taken = [column.take(pa.array(own)) for column in cells]
            parts[split] = _read_part(text, own, taken, columns, locator, split)
    parts = in_order(parts, path)
    every, starts = list(parts.values()), np.cumsum([0, *(len(part.rows) for part in parts.values())]).tolist()

    def place(i: int) -> str:
        number = bisect_right(starts, i) - 1
        return every[number].text.place(int(every[number].rows[i - starts[number]]))

    spans = {split: slice(*span) for split, span in zip(parts, pairwise(starts), strict=True)}
    label_columns = [pa.concat_arrays(columns) for columns in zip(*(part.labels for part in every), strict=True)]
    labels = _read_labels(label_columns, place)
    are_flags = isinstance(labels, np.ndarray)
    repeated = _about_repeated(np.concatenate([part.keys for part in every]), place)
    return assemble(
        kind,
        path,
        {split: (part.files, labels[spans[split]]) for split, part in parts.items()},
        names=tuple(name.strip("'") for name in names) if are_flags else None,
        class_list=class_list,
        notes=(*notes, *repeated),
        locate=lambda split, i: place(spans[split].start + i),
        subject=subject,
        task=options.task,
        groups=_read_groups(every, place) if options.group_column else None,
    )


def _split_rows(text: _TextFile, cells: list[Any], rows: np.ndarray, columns: _Columns) -> dict[str, np.ndarray]:
    """Divide rows by the column of splits."""
    if columns.split is None:
        return {"train": rows}
    encoded = cells[columns.split].take(pa.array(rows)).dictionary_encode()
    codes, splits = encoded.indices.to_numpy(), []
    for code, cell in enumerate(encoded.dictionary.to_pylist()):
        is_flagged = _FLAGS.get(cell.lower()) if columns.flag else None
        split = (columns.flag if is_flagged else "train") if is_flagged is not None else split_of(cell)
        if split is None:
            need = "true or false" if columns.flag else "train, valid or test"
            place = text.place(int(rows[np.argmax(codes == code)]))
            raise InputError(f"{place}: unknown split {cell!r}; write {need}")
        splits.append(split)
    split_of_row = np.array(splits)[codes]
    return {split: rows[split_of_row == split] for split in dict.fromkeys(splits)}


def _read_part(
    text: _TextFile, rows: np.ndarray, cells: list[Any], columns: _Columns, locator: _Locator, split: str
) -> _Part:
    numbers, names = locator.find_all(cells[columns.file], split, lambda i: text.place(int(rows[i])))
    folders = list(map(str, locator.folders))
    keys = (hash((folders[number], name)) for number, name in zip(numbers.tolist(), names, strict=True))
    return _Part(
        text=text,
        rows=rows,
        files=ImageBytesList.of_paths(folders, numbers, names),
        keys=np.fromiter(keys, np.int64),
        labels=[cells[column] for column in columns.labels],
        groups=[] if columns.group is None else [cells[columns.group]],
    )


def _read_labels(columns: list[Any], place: Callable[[int], str]) -> DistinctLabels | np.ndarray:
    """Read a column of labels, or several of 0 and 1 that are named after classes as int8 [rows, columns]."""
    encoded = [column.dictionary_encode() for column in columns]
    texts, codes = [column.dictionary.to_pylist() for column in encoded], [c.indices.to_numpy() for c in encoded]
    if len(columns) == 1:
        if not all(map(_ROW_OF_FLAGS.fullmatch, texts[0])):
            return DistinctLabels(list(map(_list_in, texts[0])), codes[0])
        lengths = np.array(list(map(len, texts[0])))
        if short := np.flatnonzero((lengths < lengths.max())[codes[0]]).tolist():
            lines = first_few(f"{place(i)}: {columns[0][i]}" for i in short)
            raise InputError(f"{lines}; elsewhere there are {lengths.max() // 2 + 1} numbers of 0 and 1")
        return DistinctLabels([list(map(int, text[::2])) for text in texts[0]], codes[0])
    known = {**dict.fromkeys(_ZEROS, 0), **dict.fromkeys(_ONES, 1)}
    tables = (np.array([known.get(text, -1) for text in some], np.int8) for some in texts)
    flags = np.stack([table[own] for table, own in zip(tables, codes, strict=True)], axis=1)
    if wrong := np.argwhere(flags < 0).tolist():
        found = ((place(i), columns[column][i].as_py()) for i, column in wrong)
        lines = first_few(f"{row}: {cell or '(empty)'} in a column of 0 and 1" for row, cell in found)
        raise InputError(f"{lines}; write 0 or 1, or several names in one column, such as cat|dog")
    return flags


def _list_in(cell: str) -> Any:
    """Parse a list in a cell, written in JSON or by Python; other cells are text."""
    if cell[:1] == "[" and cell[-1:] == "]":
        for text in (cell, cell.replace("'", '"')):
            with suppress(ValueError, RecursionError):
                return json.loads(text)
    return cell


def _about_repeated(keys: np.ndarray, place: Callable[[int], str]) -> list[str]:
    """Return notes about rows that repeat an earlier row's image."""
    in_order = np.sort(keys)
    if (in_order[1:] != in_order[:-1]).all():
        return []
    again = np.setdiff1d(np.arange(len(keys)), np.unique(keys, return_index=True)[1])
    return [
        f"rows that name the image of an earlier row: {len(again):,} (such as {place(int(again[0]))}); several labels "
        "of an image belong in one cell, such as cat|dog"
    ]


def _read_groups(parts: list[_Part], place: Callable[[int], str]) -> list[str]:
    groups = [group for part in parts for column in part.groups for group in column.to_pylist()]
    if empty := [f"{place(i)}: the group is empty" for i, group in enumerate(groups) if not group]:
        raise InputError(first_few(empty))
    return groups
