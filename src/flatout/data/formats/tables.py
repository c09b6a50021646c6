"""Lists of image files and labels: CSV, JSON lines and PaddleClas lists.

A list is one file, a folder with a file for each split, such as `desc_train.csv`, or a folder of split folders with a
`metadata.csv` or `metadata.jsonl` in each, as in Hugging Face's image folders. Lists may have millions of rows.
"""

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from flatout.data.formats import folders
from flatout.data.formats.folders import files_in, folders_in, is_image_name, one_per_split
from flatout.data.labels import NoLabels, first_few
from flatout.data.source import DataSource, ImageDataset, ReadOptions, assemble
from flatout.data.splits import in_order, split_of, split_within, words_of
from flatout.utils.errors import InputError

KIND, PADDLE_KIND = "CSV manifest", "PaddleClas lists"
_LISTS = (".csv", ".tsv", ".jsonl")
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
# Rows that are lists at the same time: the columns of millions take less memory.
_CHUNK = 1 << 12


# Recognising


def recognise(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise a CSV file, the CSV files of a folder that are named after splits, or a folder's only CSV file.

    Next to class folders, the only CSV file is used only if its first row names an image.
    """
    if not path.is_dir():
        files = {"": path} if path.is_file() and path.suffix.lower() in _LISTS else {}
        return _source(KIND, path, files, options)
    found = files_in(path, lambda name: name.lower().endswith(_LISTS))
    files = one_per_split(path, [(split_within(file.stem), file) for file in found])
    if not found:
        metadata = (folder / name for folder in folders_in(path) for name in ("metadata.csv", "metadata.jsonl"))
        files = one_per_split(path, [(split_of(file.parent.name), file) for file in metadata if file.is_file()])
    elif "train" not in files:
        inside = folders_in(path)
        is_one_class = len(inside) == 1 and not split_of(inside[0].name)
        is_list = is_one_class or (len(found) == 1 and _names_images(found[0], options))
        if not is_list and folders.recognise(path, options):
            return None
        if len(found) > 1:
            names = first_few([file.name for file in found], 5)
            fix = "give the path of one, or name them train.csv, test.csv"
            raise InputError(f"{path}: holds several CSV files ({names}); {fix}")
        files = {"": found[0]}
    return _source(KIND, path, files, options)


def recognise_paddle(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise the PaddleClas lists of a folder, or one list."""
    if not path.is_dir():
        files = {"": path} if path.is_file() and path.suffix.lower() == ".txt" and _begins_with_image(path) else {}
    else:
        texts = files_in(path, lambda name: name.lower().endswith(".txt"))
        sure = [file for file in texts if file.stem.lower().endswith("_list")]
        splits = ((split_of(file.stem.lower().removesuffix("_list")), file) for file in texts)
        lists = [(split, file) for split, file in splits if split and (file in sure or _begins_with_image(file))]
        files = one_per_split(path, lists)
        # A text file of that name next to class folders may be anything.
        files = files if "train" in files or any(file in sure for file in files.values()) else {}
    return _source(PADDLE_KIND, path, files, options.with_class_list(path, ("label_list.txt", "labels.txt")))


def _source(kind: str, path: Path, files: dict[str, Path], options: ReadOptions) -> DataSource | None:
    if not files:
        return None
    files = files if "" in files else in_order(files, path)
    return DataSource(kind=kind, path=path, read=lambda: _read(kind, path, files, options))


def _names_images(path: Path, options: ReadOptions) -> bool:
    content, locator = _bytes_of(path), _Locator(path.parent, "train", options)
    with suppress(InputError):
        return bool(locator.find(_find_columns(path, *_parse(path, content, 2), locator, options).images[0]))
    return False


def _begins_with_image(path: Path) -> bool:
    with suppress(InputError):
        _, columns = _parse(path, _bytes_of(path), 1)
        return len(columns) == 2 and is_image_name(columns[0][0])
    return False


# Text files


def _bytes_of(path: Path) -> bytes:
    """Read a file, which must be UTF-8 without NUL."""
    try:
        content = path.read_bytes()
        content.decode()
        bad = content.find(b"\0")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        content, bad = error.object, error.start
    if bad >= 0:
        line = content.count(b"\n", 0, bad) + 1
        raise InputError(f"{path}: line {line}: is not UTF-8 text (byte {bad}); save it as UTF-8")
    return content


def _parse(path: Path, content: bytes, most: int | None = None) -> tuple[Sequence[int], list[list[str]]]:
    """Return the numbers of the lines in which the rows of a text file begin, and the trimmed cells of each column.

    Blank rows are left out, and rows after the first `most`. Of JSON lines, the first row is the keys.
    """
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    parse = {".jsonl": _json_rows, ".txt": _paddle_rows}.get(path.suffix.lower(), _csv_rows)
    if parse is _csv_rows and most is None and (found := _parse_plain(path, content)):
        return found
    rows, lines, columns = islice(parse(path, text), most), list[int](), list[list[str]]()
    while some := list(islice(rows, _CHUNK)):
        columns = columns or [[] for _ in some[0][1]]
        width = len(columns)
        if ragged := [f"line {line} has {len(cells)}" for line, cells in some if len(cells) != width]:
            fix = "quote cells that hold the delimiter"
            raise InputError(f"{path}: {width} columns are expected, but {first_few(ragged)}; {fix}")
        lines += [line for line, _ in some]
        for column, cells in zip(columns, zip(*(cells for _, cells in some), strict=True), strict=True):
            column += map(str.strip, cells)
    if not lines:
        raise InputError(f"{path}: {_EMPTY}")
    return lines, columns


def _parse_plain(path: Path, content: bytes) -> tuple[range, list[list[str]]] | None:
    """Parse a CSV file by pyarrow, which is several times as fast, if each of its lines is a row that is not blank."""
    if content.count(b'"') % 2:
        return None  # pyarrow takes the rest of the file for the cell of a quotation mark that is not closed
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    delimiter = _delimiter(text)
    types = {str(i): pa.string() for _, cells in islice(_csv_rows(path, text), 1) for i in range(len(cells))}
    with suppress(pa.ArrowInvalid):
        table = pyarrow.csv.read_csv(
            pa.BufferReader(content.removeprefix(b"\xef\xbb\xbf")),
            pyarrow.csv.ReadOptions(column_names=list(types)),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
        columns = [pc.call_function("utf8_trim_whitespace", [column]).to_pylist() for column in table.columns]
        lines = content.count(b"\n") + (not content.endswith(b"\n"))
        if table.num_rows == lines and all(map(any, zip(*columns, strict=True))):
            return range(1, lines + 1), columns
    return None


# Rows of each kind of text: the number of the line in which each begins, and its cells.


def _paddle_rows(path: Path, lines: io.TextIOBase) -> Iterator[tuple[int, list[str]]]:
    return ((number, cells) for number, line in enumerate(lines, start=1) if (cells := line.rsplit(maxsplit=1)))


def _csv_rows(path: Path, lines: io.TextIOBase) -> Iterator[tuple[int, list[str]]]:
    reader, first = csv.reader(lines, delimiter=_delimiter(lines), strict=True), 1
    try:
        for cells in reader:
            if any(map(str.strip, cells)):
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        what = "a quotation mark is not closed" if "end of data" in str(error) else error
        raise InputError(f"{path}: line {first}: is not valid CSV: {what}") from None


def _delimiter(lines: io.TextIOBase) -> str:
    head = next(filter(str.strip, lines.read(1 << 16).splitlines()), "")
    lines.seek(0)
    delimiter = max(",;\t", key=head.count)
    return delimiter if delimiter in head else "|"  # a bar also separates labels


def _json_rows(path: Path, lines: io.TextIOBase) -> Iterator[tuple[int, list[str]]]:
    tables: dict[int, dict[str, str]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                cells = {**json.loads(line)}
            except (ValueError, TypeError, RecursionError):
                need = 'is not a JSON object, such as {"file_name": ..., "label": ...}'
                raise InputError(f"{path}: line {number}: {need}") from None
            tables[number] = {key: _json_cell(cell) for key, cell in cells.items()}
    if keys := list(dict.fromkeys(chain.from_iterable(tables.values()))):
        yield 0, keys
        yield from ((number, [table.get(key, "") for key in keys]) for number, table in tables.items())


def _json_cell(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


# Columns


class _Rows(NamedTuple):
    """The rows of a list below its header: cells of images, of labels by the name of their column, and of others."""

    path: Path
    lines: Sequence[int]
    images: list[str]
    labels: dict[str | int, list[str]]
    splits: list[str]
    has_flags: bool  # false and true as splits
    groups: list[str]

    def place(self, row: int) -> str:
        """Return the start of a message about a row."""
        return f"{self.path}: line {self.lines[row]}"

    def take(self, rows: list[int]) -> "_Rows":
        labels = {name: [cells[i] for i in rows] for name, cells in self.labels.items()}
        lines, images = [self.lines[i] for i in rows], [self.images[i] for i in rows]
        groups = [self.groups[i] for i in rows] if self.groups else []
        return self._replace(lines=lines, images=images, labels=labels, splits=[], groups=groups)


def _find_columns(
    path: Path, lines: Sequence[int], columns: list[list[str]], locator: "_Locator", options: ReadOptions
) -> _Rows:
    """Find the columns by the options, else by the header, else by content."""
    # Messages about columns fit one line.
    header = [" ".join(cells[0].splitlines()) for cells in columns]
    width = len(header)
    if any(is_image_name(cell) or (cell and locator.find(cell)) for cell in header):
        header = []
    else:
        lines, columns = lines[1:], [cells[1:] for cells in columns]
    if not lines:
        raise InputError(f"{path}: {_EMPTY}")
    keys, body = ["".join(words_of(name)) for name in header], [cells[0] for cells in columns]

    def find(key: str, usual: Sequence[str] = ()) -> list[int]:
        """Find the columns that an option names, else the first with a usual name."""
        value: str = getattr(options, key)
        names = [value] if value and value in header else [name.strip() for name in value.split(",") if name.strip()]
        if unknown := next((name for name in names if name not in header), None):
            known = f"its columns are {', '.join(header)}" if header else "it has no header"
            error = NoLabels if key == "label_column" else InputError
            raise error(f"{path}: has no column {unknown!r}, which data.{key} names; {known}")
        return [header.index(name) for name in names] or [keys.index(name) for name in usual if name in keys][:1]

    by_content = (i for i, cell in enumerate(body) if is_image_name(cell))
    file = next(chain(find("file_column", _FILE_COLUMNS), by_content), 0)
    labels, group = find("label_column", _LABEL_COLUMNS), find("group_column")[:1]
    split = [keys.index(name) for name in _SPLIT_COLUMNS if name in keys][:1]
    left = [i for i in range(width) if i not in (file, *split, *group)]
    are_flags = header and all(body[i].lower() in _FLAGS for i in left)
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
    return _Rows(
        path,
        lines,
        columns[file],
        labels={header[label] if header else label + 1: columns[label] for label in labels},
        splits=[cell for i in split for cell in columns[i]],
        has_flags=any(keys[i] == "isvalid" for i in split),
        groups=[cell for i in group for cell in columns[i]],
    )


# Files


class _Locator:
    """Finds the image files that rows of a split name, without suffix if only one fits.

    Paths are relative to `data.images`, the folder of the list, or its subfolders named after the split (Kaggle's
    train.csv next to train_images/) or `images`. Each folder is listed once.
    """

    def __init__(self, folder: Path, split: str, options: ReadOptions) -> None:
        if images := options.image_folder:
            if not images.is_dir():
                raise InputError(f"data.images = {options.images!r}: there is no such folder")
            self._bases, self._where = [images, folder], f"{images} and {folder}"
        else:
            named = [f for f in folders_in(folder) if split_of(f.name) == split or f.name.lower() in _IMAGE_FOLDERS]
            self._bases, self._where = [folder, *named], str(folder)
        self._real_bases = [base.resolve() for base in self._bases]
        self._folders, self._files, self._stems = cache(self._folders), cache(self._files), cache(self._stems)

    def find_all(self, rows: _Rows) -> list[str]:
        """Find the files that rows name; those missing or outside the folders are one error."""
        found = list(map(self.find, rows.images))
        if missing := [f"{rows.place(i)}: {rows.images[i] or '(empty)'}" for i, file in enumerate(found) if not file]:
            raise InputError(
                f"files that are missing or not below {self._where}, {len(missing):,} (--set data.images=DIR names "
                f"another folder): {first_few(missing)}"
            )
        return found

    def find(self, cell: str) -> str:
        """Return the path of a file, or an empty text."""
        parent, slash, name = cell.replace("\\", "/").rpartition("/")  # lists written on Windows have backslashes
        for folder in self._folders(parent or slash):
            if found := self._files(folder).get(name) or self._stems(folder).get(name):
                return found
        return ""

    def _folders(self, parent: str) -> list[str]:
        with suppress(ValueError):  # JSON can hold NUL and half characters, which no path may
            return [str(base / parent) for base in self._bases if self._is_inside(base / parent)]
        return []

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


def _read(kind: str, path: Path, lists: dict[str, Path], options: ReadOptions) -> ImageDataset:
    """Read split -> list; the only list may have a column of splits."""
    parts: dict[str, _Rows] = {}
    notes: list[str] = []
    names: list[str | int] = []
    for name, file in lists.items():
        table, locator = _parse(file, _bytes_of(file)), cache(partial(_Locator, file.parent, options=options))
        try:
            rows = _find_columns(file, *table, locator(name or split_within(file.stem) or "train"), options)
        except NoLabels as error:
            if name in ("", "train"):
                raise
            notes.append(f"there is no {name} split: {error}")
            continue
        if names and [*rows.labels] != names:
            found, known = (", ".join(map(repr, some)) for some in (rows.labels, names))
            raise InputError(f"{file}: the columns of labels are {found}, elsewhere {known}")
        names = [*rows.labels]
        if empty := [f"{rows.place(i)}: the group is empty" for i, group in enumerate(rows.groups) if not group]:
            raise InputError(first_few(empty))
        for split, own in (_by_split(rows) if rows.splits and len(lists) == 1 else {name or "train": rows}).items():
            parts[split] = own._replace(images=locator(split).find_all(own))
    parts = in_order(parts, path)
    seen: set[str] = set()
    every = ((part, i, file) for part in parts.values() for i, file in enumerate(part.images))
    if again := [(part, i) for part, i, file in every if file in seen or seen.add(file)]:
        part, i = again[0]
        notes.append(
            f"rows that name the image of an earlier row: {len(again):,} (such as {part.place(i)}); several labels "
            "of an image belong in one cell, such as cat|dog"
        )
    # In a small split, lists of class numbers may all look like flags.
    cells = chain.from_iterable(column for part in parts.values() for column in part.labels.values())
    are_flags = len(names) > 1 or all(map(_ROW_OF_FLAGS.fullmatch, cells))
    return assemble(
        kind,
        path,
        {split: (part.images, _read_labels(part, are_flags)) for split, part in parts.items()},
        options,
        names=tuple(map(str, names)) if len(names) > 1 else None,
        notes=tuple(notes),
        locate=lambda split, i: parts[split].place(i),
        subject=f"{next(iter(lists.values()))}: column {', '.join(map(repr, names))}",
        groups=[group for part in parts.values() for group in part.groups] or None,
    )


def _by_split(rows: _Rows) -> dict[str, _Rows]:
    """Divide rows by their splits, or by false and true for training and validation."""
    meaning = {"false": "train", "0": "train", "true": "valid", "1": "valid"} if rows.has_flags else {}
    split_in = cache(lambda cell: meaning.get(cell.lower()) or split_of(cell))
    found: dict[str, list[int]] = {}
    for row, cell in enumerate(rows.splits):
        if (split := split_in(cell)) is None:
            need = "true or false" if rows.has_flags else "train, valid or test"
            raise InputError(f"{rows.place(row)}: unknown split {cell!r}; write {need}")
        found.setdefault(split, []).append(row)
    return {split: rows.take(own) for split, own in found.items()}


def _read_labels(rows: _Rows, are_flags: bool) -> list[Any] | np.ndarray:
    """Read a column of labels, or flags as int8 [rows, columns]: of one column, or of several named after classes."""
    columns = list(rows.labels.values())
    cells = columns[0]
    if not are_flags:
        return list(map(cache(_list_in), cells))
    if len(columns) == 1:
        length = max(map(len, cells))
        if short := [i for i, cell in enumerate(cells) if len(cell) < length]:
            lines = first_few(f"{rows.place(i)}: {cells[i]}" for i in short)
            raise InputError(f"{lines}; elsewhere there are {length // 2 + 1} numbers of 0 and 1")
        return np.array([[*map(int, cell[::2])] for cell in cells], np.int8)
    flags = np.array([[_FLAGS.get(cell.lower(), -1) for cell in column] for column in columns], np.int8).T
    if wrong := np.argwhere(flags < 0).tolist():
        found = ((rows.place(i), columns[column][i]) for i, column in wrong)
        lines = first_few(f"{place}: {cell or '(empty)'} in a column of 0 and 1" for place, cell in found)
        raise InputError(f"{lines}; write 0 or 1, or several names in one column, such as cat|dog")
    return flags


def _list_in(cell: str) -> Any:
    """Parse a list in a cell, written in JSON or by Python; other cells are text."""
    if cell[:1] == "[" and cell[-1:] == "]":
        for text in (cell, cell.replace("'", '"')):
            with suppress(ValueError, RecursionError):
                return json.loads(text)
    return cell
