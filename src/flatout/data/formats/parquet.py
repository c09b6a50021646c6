"""Parquet files and saved Hugging Face data sets, whose column of images holds encoded bytes.

A saved data set is a folder of Arrow files with `dataset_info.json`, or a folder of such folders, one for each split,
with `dataset_dict.json`. Class names are those in the metadata of the schema.
"""

import errno
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.decode import MAX_FILE_BYTES
from flatout.data.formats.shards import find_shards, reference
from flatout.data.image_bytes import ImageBytes
from flatout.data.labels import first_few
from flatout.data.parquet_metadata import bytes_of_column, columns_of_groups, refuse_bombs
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.data.splits import split_of
from flatout.errors import InputError, first_line

KIND, SAVED_KIND = "Parquet files", "saved Hugging Face data set"
ABOUT = {
    KIND: ("the folder, a `.parquet`, or a pattern with braces", "a column of encoded images and one of classes"),
    SAVED_KIND: ("the folder", "`dataset_dict.json`, or `dataset_info.json` and `state.json`"),
}
_IMAGE_NAMES = ("image", "img", "images", "jpg", "png", "picture")
_LABEL_NAMES = ("label", "labels", "class", "target", "category", "cls")
# Threads are in as many row groups as their next images lie in: two at least, where one ends and the next begins.
_KEPT_CHUNKS = 2
_KEPT_BYTES = 1 << 27


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataRef | None:
    """Return Parquet files, or a saved data set; or None."""
    kind, splits = KIND, find_shards(path, lambda name: name.lower().endswith(".parquet"))
    if not splits and (splits := _saved(path)):
        kind = SAVED_KIND
    return reference(kind, path, splits, lambda splits: read(path, kind, splits, class_list, options))


def _saved(path: Path) -> dict[str, list[Path]]:
    """Return split -> Arrow files of a saved data set."""
    if not isinstance(path, Path):
        return {}
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return {"train": _arrow_files(path)}
    if not (path / "dataset_dict.json").is_file():
        return {}
    names = _json(path / "dataset_dict.json").get("splits", [])
    return {split: _arrow_files(path / str(name)) for name in names if (split := split_of(str(name)))}


def _arrow_files(folder: Path) -> list[Path]:
    files = _json(folder / "state.json").get("_data_files")
    if not isinstance(files, list) or not all(isinstance(file, dict) and "filename" in file for file in files):
        raise InputError(f"{folder / 'state.json'}: names no data files; save the data set again")
    return [folder / Path(str(file["filename"])).name for file in files]


def _json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: is no JSON object")
    return table


def read(path: Path, kind: str, splits: dict[str, list[Path]], class_list: Path | None, options: ReadOptions) -> Source:
    """Return the source of split -> files; images are read in pieces when they are decoded."""
    parts: dict[str, tuple[list[ImageBytes], list[Any]]] = {}
    places: dict[str, list[ImageBytes]] = {}
    names: tuple[str, ...] | None = None
    notes: list[str] = []
    kept = _Kept()
    for split, files in splits.items():
        images: list[ImageBytes] = []
        labels: list[Any] = []
        for file in files:
            table = _Table(file, options, kept)
            names = names or table.class_names
            if table.class_names != names:
                raise InputError(
                    f"{file}: names other classes than {next(iter(splits.values()))[0]}; make them the same"
                )
            images += table.cells
            labels += table.labels
        if names and split != "train" and all(label == -1 for label in labels):
            notes.append(f"there is no {split} split: its labels are all -1, which means unknown")
            continue
        if missing := [str(image) for image, label in zip(images, labels, strict=True) if label is None]:
            raise InputError(f"rows without a label: {first_few(missing)}")
        parts[split], places[split] = (images, labels), images
    return assemble(
        kind,
        path,
        parts,
        names=names,
        class_list=class_list,
        notes=tuple(notes),
        locate=lambda split, i: str(places[split][i]),
        task=options.task,
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """The image in a row of a table, which is in a chunk (a row group or record batch)."""

    table: "_Table"
    row: int
    chunk: int
    row_in_chunk: int

    def __str__(self) -> str:
        return f"{self.table.path}: row {self.row}"

    def read_bytes(self) -> bytes:
        """Return the bytes of the image; raises OSError."""
        content = self.table.image(self.chunk, self.row_in_chunk)
        if content is None:
            raise OSError(errno.EIO, "the row holds no bytes of an image; save the data set with its images embedded")
        return bytes(content)  # of a list of numbers too


class _Kept:
    """The row groups that were used last, of all files: `_KEPT_CHUNKS` of them, or as many as `_KEPT_BYTES` hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[_Table, int], _Group] = OrderedDict()
        self._bytes = 0

    def images(self, table: "_Table", number: int) -> Any:
        """Return the encoded images of a row group, read now unless they are kept; raises as `_Table.read_group`."""
        key = table, number
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group(table.group_bytes[number])
                self._bytes += group.size
                while len(self._groups) > _KEPT_CHUNKS and self._bytes > _KEPT_BYTES:
                    self._bytes -= self._groups.popitem(last=False)[1].size
            self._groups.move_to_end(key)
        with group.lock:  # others read other groups meanwhile
            if group.images is None:
                group.images = table.read_group(number)
            return group.images


class _Group:
    """A row group, whose images are read by the first thread that needs them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.images: Any = None


class _Table:
    """A Parquet or Arrow file: its labels, and the chunks of its images, of which few are in memory at a time."""

    def __init__(self, path: Path, options: ReadOptions, kept: _Kept) -> None:
        self.path = path
        self._kept = kept
        pyarrow = self._import()
        try:
            if path.suffix.lower() == ".parquet":
                self._arrow = None
                with pyarrow.parquet.ParquetFile(path) as file:
                    schema, about = file.schema_arrow, file.metadata
                self._image, label = self._columns(schema, options)
                columns = columns_of_groups(path, about, {self._image, label})
                self._texts = refuse_bombs(path, about.num_rows, columns)
                with self._open() as file:
                    rows = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
                    self.group_bytes = [bytes_of_column(group, self._image) for group in columns]
                    # Lists that are stored once each can be read from one row group at a time.
                    is_list = pyarrow.types.is_nested(schema.field(label).type)
                    groups = [[i] for i in range(len(rows))] if is_list else [list(range(len(rows)))]
                    labels = [file.read_row_groups(some, columns=[label]).column(label) for some in groups]
            else:
                table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
                schema = table.schema
                self._image, label = self._columns(schema, options)
                self._arrow = table.select([self._image, label])
                self._arrow.validate(full=True)  # Arrow trusts what it maps: a wrong offset would end the process
                rows = [len(chunk) for chunk in self._arrow.column(self._image).chunks]
                labels = [self._arrow.column(label)]
            self.labels = [value for column in labels for chunk in column.chunks for value in _values(chunk)]
            self.class_names = _class_names(schema, label)
        except InputError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
            raise InputError(f"{path}: is damaged or cannot be read: {first_line(error)}") from None
        starts = np.cumsum([0, *rows]).tolist()
        if starts[-1] != len(self.labels):
            raise InputError(f"{path}: is damaged: {starts[-1]:,} images but {len(self.labels):,} labels")
        self.cells = [
            Cell(self, start + i, number, i)
            for number, (start, count) in enumerate(zip(starts, rows, strict=False))
            for i in range(count)
        ]

    def _import(self) -> Any:
        try:
            import pyarrow
            import pyarrow.ipc
            import pyarrow.parquet
        except ImportError:
            raise InputError(f"{self.path}: needs the package pyarrow: pip install 'flatout[parquet]'") from None
        return pyarrow

    def _open(self) -> Any:
        """Open a Parquet file. What it stores once stays so in memory: a page of a kilobyte may be a billion rows."""
        return self._import().parquet.ParquetFile(self.path, read_dictionary=self._texts)

    def _columns(self, schema: Any, options: ReadOptions) -> tuple[str, str]:
        """Return the columns of images and labels."""
        images = [field.name for field in schema if _holds_images(field.type)]
        names = _features(schema)
        classes = [name for name, feature in names.items() if "names" in _of_items(feature)]
        image = _choose(options.file_column, images, _IMAGE_NAMES)
        label = _choose(options.label_column, classes or [name for name in schema.names if name != image], _LABEL_NAMES)
        if image not in schema.names or label not in schema.names:
            raise InputError(
                f"{self.path}: has the columns {', '.join(schema.names)}; name those of images (encoded bytes) and "
                "classes: --set data.file_column=NAME, --set data.label_column=NAME"
            )
        return image, label

    def image(self, chunk: int, row: int) -> bytes | None:
        """Return the encoded image in a row of a chunk; raises OSError."""
        pyarrow = self._import()
        try:
            if self._arrow is not None:
                return _bytes_of(self._arrow.column(self._image).chunk(chunk))[row].as_py()
            return self._kept.images(self, chunk)[row].as_py()
        except (pyarrow.ArrowException, OSError, LookupError) as error:
            raise OSError(errno.EIO, f"row group {chunk} cannot be read ({first_line(error)})") from None

    def read_group(self, number: int) -> Any:
        """Return the encoded images of a row group, an Arrow array of bytes."""
        if self.group_bytes[number] > MAX_FILE_BYTES:
            size = self.group_bytes[number]
            raise OSError(f"it has {size:,} bytes; write the file again with smaller row groups")
        # Opened for each row group, as there may be more files than a process may have open.
        with self._open() as file:
            column = file.read_row_group(number, columns=[self._image]).column(0)
            return _bytes_of(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def _values(array: Any) -> list[Any]:
    """Return the values of an Arrow array; those of a dictionary are the same objects each time."""
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        known = array.dictionary.to_pylist()
        return [None if i is None else known[i] for i in array.indices.to_pylist()]
    if pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        items = iter(_values(array.flatten()))
        return [None if count is None else list(islice(items, count)) for count in array.value_lengths().to_pylist()]
    return array.to_pylist()


def _holds_images(type: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(type):
        return type.get_field_index("bytes") >= 0
    is_list = pyarrow.types.is_list(type) or pyarrow.types.is_large_list(type)
    return (type.value_type == pyarrow.uint8()) if is_list else str(type) in ("binary", "large_binary", "binary_view")


def _bytes_of(array: Any) -> Any:
    import pyarrow

    return array.field("bytes") if pyarrow.types.is_struct(array.type) else array


def _choose(given: str, among: list[str], usual: tuple[str, ...]) -> str:
    """Return the column that an option names, else the only one, else the first with a usual name; or nothing."""
    if given or len(among) == 1:
        return given or among[0]
    return next((name for wanted in usual for name in among if name.lower() == wanted), "")


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return name -> feature as the library datasets describes it; empty without such metadata."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (LookupError, ValueError, TypeError, RecursionError):
        return {}
    if not isinstance(features, dict):
        return {}
    # Versions before 4 of the library write a list of one feature for lists.
    items = {name: f[0] if isinstance(f, list) and f else f for name, f in features.items()}
    return {name: f for name, f in items.items() if isinstance(f, dict)}


def _of_items(feature: dict[str, Any]) -> dict[str, Any]:
    """Return the feature of the items, where one is a list of them."""
    items = feature.get("feature")
    return items if isinstance(items, dict) else feature


def _class_names(schema: Any, label: str) -> tuple[str, ...] | None:
    names = _of_items(_features(schema).get(label, {})).get("names")
    return tuple(map(str, names)) if isinstance(names, list) and names else None
