"""CSV manifests: each row names an image file and its class.

Either one file (with a `split` column or without), or a folder with a file for each split, such as `desc_train.csv`.
"""

import csv
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from flatout.data.formats.folders import IMAGE_SUFFIXES, visible
from flatout.data.labels import first_few, index_labels, read_class_list
from flatout.data.parts import ordered, spans, split_of, split_within, words_of
from flatout.data.source import SPLITS, Found, Source
from flatout.errors import InputError

KIND = "CSV manifest"
SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t"
_FILE_COLUMNS = (
    "file",
    "path",
    "image",
    "img",
    "filename",
    "filepath",
    "imagepath",
    "imgpath",
    "imagefile",
    "imageid",
    "name",
    "id",
)
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "classname", "labelname", "classid", "labelid", "y")
_SPLIT_COLUMNS = ("split", "set", "subset", "partition", "dataset")


@dataclass(frozen=True, kw_only=True)
class _Row:
    where: str
    file: str
    label: str
    split: str


@dataclass(frozen=True, kw_only=True)
class _Columns:
    file: int
    label: int
    split: int | None = None


def find_set(folder: Path, class_list: Path | None) -> Found | None:
    """Return the CSV files of a folder that are named after splits (`desc_train.csv`, `test.csv`), or None.

    Raises:
        InputError: two files name the same split.
    """
    parts: dict[str, Path] = {}
    for path in _csv_files(folder):
        name = split_within(path.stem)
        if name in parts:
            raise InputError(f"{folder}: both {parts[name].name} and {path.name} mean {name}; move one away")
        if name is not None:
            parts[name] = path
    return _found(folder, ordered(parts, folder), class_list) if "train" in parts else None


def find_single(path: Path, class_list: Path | None) -> Found | None:
    """Return the manifest that a CSV file, or the only CSV file in a folder, is, or None.

    Raises:
        InputError: the folder holds several.
    """
    if path.is_file():
        return _found(path, {"": path}, class_list) if path.suffix.lower() in SUFFIXES else None
    files = _csv_files(path)
    if len(files) > 1:
        names = first_few([file.name for file in files], 5)
        raise InputError(
            f"{path}: holds several CSV files ({names}); give the path of one, or name them train.csv, test.csv"
        )
    return _found(files[0], {"": files[0]}, class_list) if files else None


def lists_images(folder: Path) -> bool:
    """Whether a folder's only CSV file names, in its first row, an image that is there."""
    files = _csv_files(folder)
    if len(files) != 1:
        return False
    try:
        rows = _read_rows(files[0])
    except InputError:  # not a manifest, then
        return False
    return bool(rows) and "\0" not in rows[0].file and (folder / rows[0].file).is_file()


def _csv_files(folder: Path) -> list[Path]:
    return [Path(e.path) for e in visible(folder) if e.name.lower().endswith(SUFFIXES) and e.is_file()]


def _found(path: Path, parts: dict[str, Path], class_list: Path | None) -> Found:
    return Found(kind=KIND, path=path, inputs=(), read=lambda: _read(path, parts, class_list))


def _read(path: Path, parts: dict[str, Path], class_list: Path | None) -> Source:
    rows: dict[str, list[_Row]] = {}
    for name, file in parts.items():
        found = _read_rows(file)
        if not found:
            raise InputError(f"{file}: lists no images; write rows of file,label")
        if name:
            rows[name] = found
        else:
            for split in SPLITS:
                of_split = [row for row in found if (row.split or "train") == split]
                if of_split:
                    rows[split] = of_split
    rows = ordered(rows, path)
    every = [row for found in rows.values() for row in found]
    folder = next(iter(parts.values())).parent
    files = _locate_files(every, folder)
    names = read_class_list(class_list) if class_list else None
    labelling = index_labels(np.array([row.label for row in every], dtype=np.str_), names, lambda i: every[i].where)
    notes = (f"class names from {class_list}",) if class_list else ()
    return Source(
        kind=KIND,
        path=path,
        classes=labelling.classes,
        labels=labelling.labels,
        splits=spans({name: len(found) for name, found in rows.items()}, path),
        files=files,
        notes=notes + labelling.notes,
    )


def _read_rows(path: Path) -> list[_Row]:
    """Return the rows of one file, without its header."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    try:
        table = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: is no CSV: {error}") from None
    if not table:
        return []
    exists = cache(lambda cell: (path.parent / cell).is_file())
    has_header = not any(_names_image(cell, exists) for cell in table[0][1])
    columns = _columns(path, table[0][1] if has_header else None, table[1:2] if has_header else table[:1])
    body = table[1:] if has_header else table
    width = len(table[0][1])
    ragged = [(line, cells) for line, cells in body if len(cells) != width]
    if ragged:
        few = first_few([f"line {line} has {len(cells)}" for line, cells in ragged])
        raise InputError(f"{path}: {width} columns are expected, but {few}; quote cells that hold the delimiter")
    return [_row(path, line, cells, columns) for line, cells in body]


def _row(path: Path, line: int, cells: list[str], columns: _Columns) -> _Row:
    where = f"{path}: line {line}"
    split = "" if columns.split is None else split_of(cells[columns.split])
    if split is None:
        raise InputError(f"{where}: unknown split {cells[columns.split or 0]!r}; write train, valid or test")
    # Manifests written on Windows have backslashes.
    return _Row(where=where, file=cells[columns.file].replace("\\", "/"), label=cells[columns.label], split=split)


def _delimiter(text: str) -> str:
    """Return the delimiter that most of the first lines hold; a comma if there is none."""
    lines = [line for line in text[:65536].splitlines() if line.strip()][:20]
    return max(
        _DELIMITERS, key=lambda mark: (sum(mark in line for line in lines), lines[0].count(mark) if lines else 0)
    )


def _names_image(cell: str, exists: Callable[[str], bool]) -> bool:
    return cell.lower().endswith(IMAGE_SUFFIXES) or (
        bool(cell) and len(cell) < 256 and "\0" not in cell and exists(cell)
    )


def _columns(path: Path, header: Sequence[str] | None, first: list[tuple[int, list[str]]]) -> _Columns:
    """Return which column is which: by the header's names, else by the first row's content."""
    cells = first[0][1] if first else []
    width = len(header if header is not None else cells)
    if width < 2:
        line = 1 if header is not None else first[0][0]
        raise InputError(f"{path}: line {line} has one column; rows of file,label are expected")
    keys = ["".join(words_of(name)) for name in header or ()]
    file = _first_of(_FILE_COLUMNS, keys)
    if file is None:
        file = next((i for i, cell in enumerate(cells[:width]) if cell.lower().endswith(IMAGE_SUFFIXES)), 0)
    split = _first_of(_SPLIT_COLUMNS, keys)
    if header is None and width == 3:
        split = next((i for i in range(3) if i != file and split_of(cells[i])), None)
    label = _first_of(_LABEL_COLUMNS, keys)
    if label is None:
        left = [i for i in range(width) if i not in (file, split)]
        if len(left) != 1:
            names = f"the columns {', '.join(header)}" if header else f"{width} columns and no header"
            raise InputError(f"{path}: has {names}; name the columns of files and classes 'file' and 'label'")
        label = left[0]
    return _Columns(file=file, label=label, split=split)


def _first_of(wanted: Sequence[str], keys: list[str]) -> int | None:
    return next((keys.index(name) for name in wanted if name in keys), None)


def _locate_files(rows: list[_Row], folder: Path) -> list[Path]:
    """Return the rows' files.

    Folders are listed once each and links resolved only where there are any: 100,000 rows are no 100,000 system calls.

    Raises:
        InputError: files are missing or lie outside the folder; ten are listed.
    """
    root = os.path.realpath(folder)

    def is_inside(path: Path) -> bool:
        return Path(os.path.realpath(path)).is_relative_to(root)

    @cache
    def look(parent: str) -> tuple[bool, dict[str, bool]]:
        """Whether a folder lies inside the root, and its files with whether each is a link."""
        path = Path(root, parent.replace("\0", "?"))
        try:
            with os.scandir(path) as entries:
                return is_inside(path), {e.name: e.is_symlink() for e in entries if e.is_file()}
        except OSError:
            return is_inside(path), {}

    files: list[Path] = []
    outside: list[str] = []
    missing: list[str] = []
    for row in rows:
        parent, name = os.path.split(row.file)
        inside, names = look(parent)
        if not inside or (names.get(name, False) and not is_inside(Path(root, row.file))):
            outside.append(f"{row.where}: {row.file}")
        elif name not in names:
            missing.append(f"{row.where}: {row.file or '(empty)'}")
        else:
            files.append(folder / row.file)
    if outside:
        raise InputError(
            f"paths that lead out of {folder}, {len(outside):,}: {first_few(outside)}; "
            "put the CSV file into a folder that holds all the images"
        )
    if missing:
        raise InputError(f"missing files, {len(missing):,} (paths are relative to {folder}): {first_few(missing)}")
    return files
