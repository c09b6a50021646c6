"""Lists of image files and labels: CSV, JSON lines and PaddleClas lists.

A list is one file, a folder with a file for each split, such as `desc_train.csv`, or a folder of split folders with a
`metadata.csv` or `metadata.jsonl` in each, as in Hugging Face's image folders. Lists may have millions of rows, so that
columns are processed as a whole.
"""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from flatout.data.formats import folders
from flatout.data.formats.folders import files_in, folders_in, is_image_name, one_per_split
from flatout.data.labels import NoLabels, find_class_list, first_few
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
# Rows that are Python objects at the same time.
_CHUNK = 1 << 16


# Recognising


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataSource | None:
    """Recognise a CSV file, the CSV files of a folder that are named after splits, or a folder's only CSV file.

    Next to class folders, the only CSV file is used only if its first row names an image.
    """
    if not path.is_dir():
        files = {"": path} if path.is_file() and path.suffix.lower() in SUFFIXES else {}
        return _source(KIND, path, files, class_list, options)
    found = files_in(path, lambda name: name.lower().endswith(SUFFIXES))
    files = one_per_split(path, [(split_within(file.stem), file) for file in found])
    if not found:
        metadata = (folder / name for folder in folders_in(path) for name in _METADATA)
        files = one_per_split(path, [(split_of(file.parent.name), file) for file in metadata if file.is_file()])
    elif "train" not in files:
        inside = folders_in(path)
        is_one_class = len(inside) == 1 and not split_of(inside[0].name)
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
        texts = files_in(path, lambda name: name.lower().endswith(".txt"))
        sure = [file for file in texts if file.name.lower().endswith("_list.txt")]
        splits = ((split_of(file.stem.lower().removesuffix("_list")), file) for file in texts)
        files = one_per_split(
            path, [(split, f) for split, f in splits if split and (f in sure or _begins_with_image(f))]
        )
        # A text file of that name next to class folders may be anything.
        files = files if "train" in files or any(file in sure for file in files.values()) else {}
    names = class_list or find_class_list("", path, _PADDLE_CLASS_LISTS)
    return _source(PADDLE_KIND, path, files, names, options)


def _source(
    kind: str, path: Path, files: dict[str, Path], class_list: Path | None, options: ReadOptions
) -> DataSource | None:
    if not files:
        return None
    files = files if "" in files else in_order(files, path)
    return DataSource(kind=kind, path=path, read=lambda: _read(kind, path, files, class_list, options))


def _names_images(path: Path, options: ReadOptions) -> bool:
    text, locator = _TextFile(path), _Locator(path.parent, "train", options)
    with suppress(InputError):
        columns = _find_columns(text, locator, options)
        return any(locator.find(cells[columns.file]) for cells in text.head[columns.has_header :][:1])
    return False


def _begins_with_image(path: Path) -> bool:
    with suppress(InputError):
        return any(len(cells) == 2 and is_image_name(cells[0]) for cells in _TextFile(path).head[:1])
    return False


# Text files


class _TextFile:
    """The rows of a text file that are not blank, trimmed; of JSON lines, the first row is the keys.

    `head` is the cells of the first two rows.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._suffix = path, path.suffix.lower()
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
        start = self._data[:65536].decode(errors="ignore")
        first = next((line for line in start.splitlines() if line.strip()), "")
        delimiter = max(",;\t", key=first.count)
        self._delimiter = delimiter if delimiter in first else "|"  # a bar also separates labels
        self.head = [cells for _, cells in islice(self._rows(), 2)]
        if not self.head:
            raise InputError(f"{path}: {_EMPTY}")

    def place(self, row: int | np.integer) -> str:
        """Return the start of a message about a row."""
        return f"{self.path}: line {self._lines[row]}"

    @cached_property
    def _lines(self) -> list[int]:
        return [line for line, _ in self._rows()]

    def columns(self) -> list[pa.Array]:
        """Read all columns, Arrow arrays of text [rows]."""
        # pyarrow takes the rest of the file for the cell of a quotation mark that is not closed.
        if self._suffix not in (".jsonl", ".txt") and self._data.count(b'"') % 2 == 0:
            with suppress(pa.ArrowInvalid):
                return self._arrow_columns()
        rows, width = list(self._rows()), len(self.head[0])
        if ragged := [f"line {line} has {len(cells)}" for line, cells in rows if len(cells) != width]:
            fix = "quote cells that hold the delimiter"
            raise InputError(f"{self.path}: {width} columns are expected, but {first_few(ragged)}; {fix}")
        return [pa.array(column, pa.string()) for column in zip(*(cells for _, cells in rows), strict=True)]

    def _arrow_columns(self) -> list[pa.Array]:
        types = {str(i): pa.string() for i in range(len(self.head[0]))}
        table = pyarrow.csv.read_csv(
            pa.BufferReader(self._data),
            pyarrow.csv.ReadOptions(column_names=list(types)),
            pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
        columns = [pc.call_function("utf8_trim_whitespace", [column.combine_chunks()]) for column in table.columns]
        lengths = [pc.call_function("binary_length", [column]).to_numpy() for column in columns]
        is_filled = pa.array(np.any(lengths, axis=0))
        return [column.filter(is_filled) for column in columns]

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of the line in which each row begins, and its cells."""
        text = io.TextIOWrapper(io.BytesIO(self._data), "utf-8", newline="")
        if self._suffix == ".jsonl":
            yield from self._json_rows(text)
            return
        if self._suffix == ".txt":
            yield from ((number, cells) for number, line in enumerate(text, 1) if (cells := line.rsplit(maxsplit=1)))
            return
        reader = csv.reader(text, delimiter=self._delimiter, strict=True)
        first = 1
        try:
            for cells in reader:
                stripped = [cell.strip() for cell in cells]
                if any(stripped):
                    yield first, stripped
                first = reader.line_num + 1
        except csv.Error as error:
            what = "a quotation mark is not closed" if "end of data" in str(error) else error
            raise InputError(f"{self.path}: line {first}: is not valid CSV: {what}") from None

    def _json_rows(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        tables: dict[int, dict[str, object]] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    tables[number] = {**json.loads(line)}
                except (ValueError, TypeError, RecursionError):
                    need = 'is not a JSON object, such as {"file_name": ..., "label": ...}'
                    raise InputError(f"{self.path}: line {number}: {need}") from None
        if keys := list(dict.fromkeys(chain.from_iterable(tables.values()))):
            yield 0, keys
            yield from ((number, [_json_cell(table.get(key)) for key in keys]) for number, table in tables.items())


def _json_cell(value: object) -> str:
    if isinstance(value, str):
        return value.strip()
    return "" if value is None else json.dumps(value, ensure_ascii=False)


# Columns


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Column indices (and names of label columns), whether splits are flags, and whether there is a header."""

    file: int
    labels: dict[int, str | int]
    split: int | None
    has_flags: bool
    group: int | None
    has_header: bool


def _find_columns(text: _TextFile, locator: "_Locator", options: ReadOptions) -> _Columns:
    """Find the columns by the options, else by the header, else by content."""
    path = text.path
    # Messages about columns fit one line.
    first = [" ".join(cell.splitlines()) for cell in text.head[0]]
    has_header = not any(is_image_name(cell) or (cell and locator.find(cell)) for cell in first)
    header, body = first if has_header else [], next(iter(text.head[has_header:]), [])
    width, keys = len(first), ["".join(words_of(name)) for name in header]

    def find(key: str, usual: Sequence[str] = ()) -> list[int]:
        """Find the columns that an option names, else the first with a usual name."""
        value: str = getattr(options, key)
        names = [value] if value and value in header else [name.strip() for name in value.split(",") if name.strip()]
        if unknown := next((name for name in names if name not in header), None):
            columns = f"its columns are {', '.join(header)}" if header else "it has no header"
            error = NoLabels if key == "label_column" else InputError
            raise error(f"{path}: has no column {unknown!r}, which data.{key} names; {columns}")
        return [header.index(name) for name in names] or [keys.index(name) for name in usual if name in keys][:1]

    by_content = (i for i, cell in enumerate(body[:width]) if is_image_name(cell))
    file = next(chain(find("file_column", _FILE_COLUMNS), by_content), 0)
    labels, group = find("label_column", _LABEL_COLUMNS), find("group_column")[:1]
    split = [keys.index(name) for name in _SPLIT_COLUMNS if name in keys][:1]
    left = [i for i in range(width) if i not in (file, *split, *group)]
    are_flags = header and all(body[i].lower() in _FLAGS for i in left if i < len(body))
    if not labels and (len(left) == 1 or are_flags):
        labels = left
    if not labels:
        names = f"the columns {', '.join(header)}" if header else f"{width} columns and no header"
        raise (NoLabels if header or width == 1 else InputError)(
            f"{path}: has {names}; name the columns of files and classes 'file' and 'label', or give "
            "--set data.file_column=NAME and --set data.label_column=NAME"
        )
    used = [header[i] for i in (file, *labels, *split, *group) if header]
    if twice := next((name for name in used if header.count(name) > 1), None):
        raise InputError(f"{path}: line 1: has several columns {twice!r}; rename all but one")
    return _Columns(
        file=file,
        labels={label: header[label] if header else label + 1 for label in labels},
        split=next(iter(split), None),
        has_flags=any(keys[i] == "isvalid" for i in split),
        group=next(iter(group), None),
        has_header=has_header,
    )


# Files


def _image_folder(options: ReadOptions) -> Path | None:
    return Path(os.path.expanduser(options.images)) if options.images else None  # noqa: PTH111 - Path drops "./"


class _Locator:
    """Finds the image files that rows of a split name, without suffix if only one fits.

    Paths are relative to `data.images`, the folder of the list, or its subfolders named after the split (Kaggle's
    train.csv next to train_images/) or `images`. Each folder is listed once.
    """

    def __init__(self, folder: Path, split: str, options: ReadOptions) -> None:
        if images := _image_folder(options):
            if not images.is_dir():
                raise InputError(f"data.images = {options.images!r}: there is no such folder")
            self._bases, self._where = [images, folder], f"{images} and {folder}"
        else:
            named = [f for f in folders_in(folder) if split_of(f.name) == split or f.name.lower() in _IMAGE_FOLDERS]
            self._bases, self._where = [folder, *named], str(folder)
        self._real_bases = [base.resolve() for base in self._bases]
        self._folders, self._files, self._stems = cache(self._folders), cache(self._files), cache(self._stems)

    def find_all(self, cells: pa.Array, place: Callable[[int], str]) -> list[str]:
        """Find the files that an array names; those missing or outside the folders are one error."""
        spans = (cells[start : start + _CHUNK] for start in range(0, len(cells), _CHUNK))
        found = [self.find(cell) for span in spans for cell in span.to_pylist()]
        if missing := [f"{place(i)}: {cells[i].as_py() or '(empty)'}" for i, file in enumerate(found) if file is None]:
            raise InputError(
                f"files that are missing or not below {self._where}, {len(missing):,} (--set data.images=DIR names "
                f"another folder): {first_few(missing)}"
            )
        return [file for file in found if file is not None]

    def find(self, cell: str) -> str | None:
        """Return the path of a file, or None."""
        parent, slash, name = cell.replace("\\", "/").rpartition("/")  # lists written on Windows have backslashes
        for folder in self._folders(parent or slash):
            if found := self._files(folder).get(name) or self._stems(folder).get(name):
                return found
        return None

    def _folders(self, parent: str) -> list[str]:
        bases = () if "\0" in parent else self._bases  # JSON can hold NUL, which no path may
        return [str(base / parent) for base in bases if self._is_inside(base / parent)]

    def _is_inside(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))  # Path.resolve refuses circles of links
        return any(map(real.is_relative_to, self._real_bases))

    def _files(self, folder: str) -> dict[str, str]:
        """Return name -> path of the files of a folder; empty if it cannot be read."""
        files: dict[str, str] = {}
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:  # there may be millions
                is_file, path = entry.is_file(follow_symlinks=False), entry.path
                if is_file or (Path(path).is_file() and self._is_inside(Path(path))):
                    files[entry.name] = path
        return files

    def _stems(self, folder: str) -> dict[str, str]:
        """Return name without suffix -> path of the images of a folder; empty where several have one stem."""
        stems: dict[str, str] = {}
        for name, path in self._files(folder).items():
            if is_image_name(name):
                stem = name[: name.rindex(".")]
                stems[stem] = "" if stem in stems else path
        return stems


# Reading


def _read(kind: str, path: Path, lists: dict[str, Path], class_list: Path | None, options: ReadOptions) -> ImageDataset:
    """Read split -> list; the only list may have a column of splits."""
    parts: dict[str, tuple[list[str], list[pa.DictionaryArray]]] = {}
    places: dict[str, Callable[[int], str]] = {}
    groups: dict[str, list[str]] = {}
    notes: list[str] = []
    names: list[str | int] = []
    for name, file in lists.items():
        text, locator = _TextFile(file), cache(partial(_Locator, file.parent, options=options))
        try:
            columns = _find_columns(text, locator(name or split_within(file.stem) or "train"), options)
        except NoLabels as error:
            if name in ("", "train"):
                raise
            notes.append(f"there is no {name} split: {error}")
            continue
        if names and [*columns.labels.values()] != names:
            found, known = (", ".join(map(repr, some)) for some in (columns.labels.values(), names))
            raise InputError(f"{file}: the columns of labels are {found}, elsewhere {known}")
        names, cells = [*columns.labels.values()], text.columns()
        rows = np.arange(int(columns.has_header), len(cells[0]))
        if not len(rows):
            raise InputError(f"{file}: {_EMPTY}")
        splits = {name or "train": rows}
        if columns.split is not None and len(lists) == 1:
            splits = _split_rows(text, cells[columns.split], rows, columns.has_flags)
        for split, own in splits.items():
            place = places[split] = lambda i, text=text, own=own: text.place(own[i])
            files = locator(split).find_all(cells[columns.file].take(own), place)
            parts[split] = files, [cells[column].take(own).dictionary_encode() for column in columns.labels]
            groups[split] = [] if columns.group is None else cells[columns.group].take(own).to_pylist()
            if empty := [f"{place(i)}: the group is empty" for i, group in enumerate(groups[split]) if not group]:
                raise InputError(first_few(empty))
    parts = in_order(parts, path)
    seen: set[str] = set()
    every = ((split, i, file) for split, (files, _) in parts.items() for i, file in enumerate(files))
    if again := [(split, i) for split, i, file in every if file in seen or seen.add(file)]:
        split, i = again[0]
        notes.append(
            f"rows that name the image of an earlier row: {len(again):,} (such as {places[split](i)}); several labels "
            "of an image belong in one cell, such as cat|dog"
        )
    # In a small split, lists of class numbers may all look like flags.
    texts = (text for _, some in parts.values() for column in some for text in column.dictionary.to_pylist())
    are_flags = len(names) > 1 or all(map(_ROW_OF_FLAGS.fullmatch, texts))
    return assemble(
        kind,
        path,
        {split: (files, _read_labels(some, are_flags, places[split])) for split, (files, some) in parts.items()},
        names=tuple(map(str, names)) if len(names) > 1 else None,
        class_list=class_list,
        notes=tuple(notes),
        locate=lambda split, i: places[split](i),
        subject=f"{next(iter(lists.values()))}: column {', '.join(map(repr, names))}",
        task=options.task,
        groups=[group for split in parts for group in groups[split]] or None,
        image_folder=_image_folder(options),
    )


def _split_rows(text: _TextFile, cells: pa.Array, rows: np.ndarray, has_flags: bool) -> dict[str, np.ndarray]:
    """Divide rows by the column of splits, or of false and true for training and validation."""
    meaning = {"false": "train", "0": "train", "true": "valid", "1": "valid"} if has_flags else {}
    encoded = cells.take(rows).dictionary_encode()
    codes, splits = encoded.indices.to_numpy(), []
    for code, cell in enumerate(encoded.dictionary.to_pylist()):
        split = meaning.get(cell.lower()) or split_of(cell)
        if split is None:
            place = text.place(int(rows[np.argmax(codes == code)]))
            need = "true or false" if has_flags else "train, valid or test"
            raise InputError(f"{place}: unknown split {cell!r}; write {need}")
        splits.append(split)
    split_of_row = np.array(splits)[codes]
    return {split: rows[split_of_row == split] for split in dict.fromkeys(splits)}


def _read_labels(
    columns: list[pa.DictionaryArray], are_flags: bool, place: Callable[[int], str]
) -> list[Any] | np.ndarray:
    """Read a column of labels, or flags as int8 [rows, columns]: of one column, or of several named after classes."""
    distinct = [(column.dictionary.to_pylist(), column.indices.to_numpy()) for column in columns]
    texts, codes = distinct[0]
    if not are_flags:
        labels = list(map(_list_in, texts))
        return [labels[code] for code in codes.tolist()]
    if len(columns) == 1:
        lengths = np.array(list(map(len, texts)))
        if short := np.flatnonzero((lengths < lengths.max())[codes]).tolist():
            lines = first_few(f"{place(i)}: {columns[0][i]}" for i in short)
            raise InputError(f"{lines}; elsewhere there are {lengths.max() // 2 + 1} numbers of 0 and 1")
        return np.array([[*map(int, text[::2])] for text in texts], np.int8)[codes]
    tables = (np.array([_FLAGS.get(text.lower(), -1) for text in texts], np.int8)[codes] for texts, codes in distinct)
    flags = np.stack(list(tables), axis=1)
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
