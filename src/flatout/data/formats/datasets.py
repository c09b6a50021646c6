"""Data sets of other libraries: Parquet files, saved Hugging Face data sets, and data sets of torch in Python."""

import errno
import json
import threading
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from flatout.data.decode import MAX_FILE_BYTES, ImageBytes, over_white
from flatout.data.formats.arrays import as_array, by_split, is_array
from flatout.data.formats.shards import find_shards, reference
from flatout.data.labels import first_few
from flatout.data.pixels import UNIT, channels_last, to_uint8
from flatout.data.source import DataSource, ImageDataset, ReadOptions, assemble
from flatout.data.splits import split_of
from flatout.data.unpack import refuse_bomb
from flatout.utils.errors import InputError, first_line

PARQUET_KIND, SAVED_KIND, TORCH_KIND = "Parquet files", "saved Hugging Face data set", "torch data sets"

# Tables

_IMAGE_NAMES = ("image", "img", "images", "jpg", "png", "picture")
_LABEL_NAMES = ("label", "labels", "class", "target", "category", "cls")
# Row groups in memory: at least two, since decoding threads overlap at boundaries; more if they are small.
_MIN_GROUPS, _GROUP_BYTES = 2, 1 << 27
# What a row takes in memory, even if a page of a kilobyte has a billion of them.
_ROW_BYTES = 100


def recognise_parquet(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise Parquet files by their names."""
    splits = find_shards(path, lambda name: name.lower().endswith(".parquet"))
    return reference(PARQUET_KIND, path, splits, _read_tables, options)


def recognise_saved(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise a folder of Arrow files with `dataset_info.json`, or one per split with `dataset_dict.json`."""
    folders: dict[str, Path] = {}
    try:
        if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
            folders = {"train": path}
        elif (about := path / "dataset_dict.json").is_file():
            names = map(str, json.loads(about.read_bytes())["splits"])
            folders = {split: path / Path(name).name for name in names if (split := split_of(name))}
        states = {split: json.loads((folder / "state.json").read_bytes()) for split, folder in folders.items()}
        splits = {
            split: [folders[split] / Path(file["filename"]).name for file in state["_data_files"]]
            for split, state in states.items()
        }
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        what = f"its JSON files cannot be read ({first_line(error)}); save the data set again"
        raise InputError(f"{path}: {what}") from None
    return reference(SAVED_KIND, path, splits, _read_tables, options)


def _read_tables(kind: str, path: Path, splits: dict[str, list[Path]], options: ReadOptions) -> ImageDataset:
    """Read the labels of split -> files; images are read in pieces when they are decoded."""
    tables = {split: [_Table(file, options) for file in files] for split, files in splits.items()}
    every = [table for some in tables.values() for table in some]
    names = every[0].class_names
    if other := next((table for table in every if table.class_names != names), None):
        raise InputError(f"{other.path}: names other classes than {every[0].path}; make them the same")
    groups = _Groups(max((table.largest_group for table in every), default=0))
    parts: dict[str, tuple[list[ImageBytes], list[Any]]] = {}
    notes: list[str] = []
    for split, some in tables.items():
        images: list[ImageBytes] = [Cell(table, row, groups) for table in some for row in range(len(table.labels))]
        labels = [label for table in some for label in table.labels]
        if names and split != "train" and all(label == -1 for label in labels):
            notes.append(f"there is no {split} split: its labels are all -1, which means unknown")
            continue
        if missing := [str(image) for image, label in zip(images, labels, strict=True) if label is None]:
            raise InputError(f"rows without a label: {first_few(missing)}")
        parts[split] = images, labels
    return assemble(kind, path, parts, options, names=names, notes=tuple(notes))


class _Groups:
    """Row groups of all files; the most recently used are in memory."""

    def __init__(self, largest: int) -> None:
        self._lock = threading.Lock()
        self._read = lru_cache(max(_MIN_GROUPS, _GROUP_BYTES // max(largest, 1)))(_Table.read_group)

    def read(self, table: "_Table", number: int) -> pa.Array:
        with self._lock:  # threads that need the same group read it once
            return self._read(table, number)


@dataclass(frozen=True, slots=True)
class Cell:
    """The image in a row of a table."""

    table: "_Table"
    row: int
    groups: _Groups

    def __str__(self) -> str:
        return f"{self.table.path}: row {self.row}"

    def read_bytes(self) -> bytes:
        """Read the image; raises OSError."""
        group = bisect_right(self.table.starts, self.row) - 1
        try:
            content = self.groups.read(self.table, group)[self.row - self.table.starts[group]].as_py()
        except (pa.ArrowException, OSError, LookupError) as error:
            raise OSError(errno.EIO, f"row group {group} cannot be read ({first_line(error)})") from None
        if content is None:
            raise OSError(errno.EIO, "the row holds no bytes of an image; save the data set with its images embedded")
        return content


class _Table:
    """A file; `starts` are the first rows of its row groups or record batches, and the number of rows."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self._arrow, self._stored_once = path, None, list[str]()
        try:
            if path.suffix.lower() == ".parquet":
                sizes, labels = self._open_parquet(options)
            else:
                table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
                self._choose_columns(table.schema, options)
                self._arrow = table.select([self._image, self._label])
                self._arrow.validate(full=True)  # a wrong offset in mapped data would crash the process
                sizes = [len(chunk) for chunk in self._arrow.column(self._image).chunks]
                labels, self.largest_group = [self._arrow.column(self._label)], 0
            self.labels = [value for column in labels for chunk in column.chunks for value in _values(chunk)]
        except (pa.ArrowException, OSError, ValueError, LookupError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: is damaged or cannot be read: {first_line(error)}") from None
        self.starts: list[int] = np.cumsum([0, *sizes]).tolist()
        if self.starts[-1] != len(self.labels):
            raise InputError(f"{path}: is damaged: {self.starts[-1]:,} images but {len(self.labels):,} labels")

    def _open_parquet(self, options: ReadOptions) -> tuple[list[int], list[pa.ChunkedArray]]:
        about = pq.read_metadata(self.path)
        self._choose_columns(about.schema.to_arrow_schema(), options)
        # Keep dictionary encoding in memory.
        columns = map(about.schema.column, range(len(about.schema)))
        self._stored_once = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        # Column metadata is not read: pyarrow crashes the process if it is damaged.
        groups = [about.row_group(i) for i in range(about.num_row_groups)]
        expanded = max(sum(group.total_byte_size for group in groups), about.num_rows * _ROW_BYTES)
        refuse_bomb(self.path, self.path.stat().st_size, expanded)
        self.largest_group = max((group.total_byte_size for group in groups), default=0)
        with self._open() as file:
            # One at a time, since pyarrow cannot join lists of texts that are stored once.
            labels = [file.read_row_groups([i], columns=[self._label]).column(0) for i in range(len(groups))]
        return [group.num_rows for group in groups], labels

    def _open(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, read_dictionary=self._stored_once)

    def _choose_columns(self, schema: pa.Schema, options: ReadOptions) -> None:
        images = [field.name for field in schema if _holds_images(field.type)]
        classes = _class_names(schema)
        image = _choose(options.file_column, images, _IMAGE_NAMES)
        others = [*classes] or [name for name in schema.names if name != image]
        label = _choose(options.label_column, others, _LABEL_NAMES)
        if image not in schema.names or label not in schema.names:
            raise InputError(
                f"{self.path}: has the columns {', '.join(schema.names)}; name those of images (encoded bytes) and "
                "classes: --set data.file_column=NAME, --set data.label_column=NAME"
            )
        self._image, self._label, self.class_names = image, label, classes.get(label)

    def read_group(self, number: int) -> pa.Array:
        """Read the encoded images of a row group, an Arrow array of bytes."""
        if self._arrow is not None:
            images = self._arrow.column(self._image).chunk(number)
        else:
            # Opened for each row group, because there may be more files than a process can have open.
            with self._open() as file:
                size = file.metadata.row_group(number).total_byte_size
                if size > MAX_FILE_BYTES:
                    raise OSError(f"it has {size:,} bytes; write the file again with smaller row groups")
                column = file.read_row_group(number, columns=[self._image]).column(0)
            images = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        return images.field("bytes") if pa.types.is_struct(images.type) else images


def _values(array: pa.Array) -> list[Any]:
    """List the values of an Arrow array; equal values of a dictionary array are one object."""
    if pa.types.is_dictionary(array.type):
        known = array.dictionary.to_pylist()
        return [None if i is None else known[i] for i in array.indices.to_pylist()]
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        items = iter(_values(array.flatten()))
        return [None if count is None else list(islice(items, count)) for count in array.value_lengths().to_pylist()]
    return array.to_pylist()


def _holds_images(type: pa.DataType) -> bool:
    if pa.types.is_struct(type):
        return type.get_field_index("bytes") >= 0
    return str(type) in ("binary", "large_binary", "binary_view")


def _choose(given: str, among: list[str], usual: tuple[str, ...]) -> str:
    """Choose the column that an option names, else the only one, else the first with a usual name, else None."""
    if given or len(among) == 1:
        return given or among[0]
    return next((name for wanted in usual for name in among if name.lower() == wanted), "")


def _class_names(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Return column -> class names from the metadata of the datasets library, of labels and of lists of labels."""
    found = {}
    with suppress(LookupError, ValueError, TypeError, AttributeError, RecursionError):
        for column, feature in json.loads(schema.metadata[b"huggingface"])["info"]["features"].items():
            while feature and "names" not in feature:
                # Versions before 4 of the library write lists as a list of one feature.
                feature = feature[0] if isinstance(feature, list) else feature.get("feature")
            if feature and isinstance(names := feature["names"], list) and names:
                found[column] = tuple(map(str, names))
    return found


# Data sets in Python

# Float interpolation may exceed 0..1 by this much.
_TOLERANCE = 1e-3
_READ_TWICE = 16
# Keys of the image and the label in items that are dicts, in the order of preference.
_IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x")
_LABEL_KEYS = ("label", "labels", "target", "targets", "y", "fine_label", "class")
_RANDOM = (
    "items of the {name} data set differ each time they are read, so its transform is random. flatout reads each item "
    "once: the random changes stay the same in every epoch. Take random transforms out of the data set, and use "
    "augment= or transform= instead, which change images anew in every epoch"
)


def _is_dataset(value: object) -> bool:
    """Whether a value is a data set: indexed with a length, or iterable, but not an array, mapping or tuple."""
    has_items = _is_map_style(value) or hasattr(value, "__iter__")
    return has_items and not is_array(value) and not isinstance(value, (Mapping, tuple, str, bytes))


def _is_map_style(value: object) -> bool:
    from torch.utils.data import IterableDataset

    # torch's has a method for items that raises.
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, IterableDataset)


def from_dataset(data: object, task: str = "auto") -> ImageDataset:
    """Read data sets whose items are (image, label), or dicts of these, once into an array.

    An image is a PIL image, or uint8, uint16 or float in 0..1 as an array [H, W] or [H, W, C], or as a tensor [H, W] or
    [C, H, W]. The first items are read twice to detect random transforms. `data` is a data set, or a tuple
    (train[, valid], test) or a dict by split of them.
    """
    parts = by_split(data, _is_dataset, "(images, labels) as arrays, or a data set (with len() and [i], or iterable)")
    splits = {name: _read_items(part, name) for name, part in parts.items()}
    notes = tuple(_RANDOM.format(name=name) for name, part in parts.items() if _is_random(part, splits[name][0]))
    return assemble(TORCH_KIND, None, splits, ReadOptions(task=task), names=_names_of(parts["train"]), notes=notes)


def _read_items(dataset: Any, name: str) -> tuple[np.ndarray, list[Any]]:
    items = (dataset[i] for i in range(len(dataset))) if _is_map_style(dataset) else iter(dataset)
    content, first, labels = bytearray(), np.empty(0), list[Any]()
    for i, item in enumerate(items):
        where = f"data: {name}: item {i}"
        image, label = _pair(item, where)
        image = _to_pixels(image, where)
        first = first if i else image
        if (image.shape, image.dtype) != (first.shape, first.dtype):
            both = [f"{'x'.join(map(str, array.shape))} {array.dtype}" for array in (image, first)]
            raise InputError(
                f"{where} has height x width x channels {both[0]} where item 0 has {both[1]}; put a Resize or a "
                "conversion into the data set"
            )
        content += image.tobytes()
        labels.append(label if isinstance(label, list) else as_array(label))
    if not labels:
        raise InputError(f"data: {name}: the data set is empty")
    return np.frombuffer(content, first.dtype).reshape(len(labels), *first.shape), labels


def _pair(item: object, where: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        image, label = (next((key for key in keys if key in item), None) for keys in (_IMAGE_KEYS, _LABEL_KEYS))
        if image is not None and label is not None:
            return item[image], item[label]
    elif isinstance(item, (tuple, list)) and len(item) >= 2:
        return item[0], item[1]
    need = "a pair (image, label), or a dict with 'image' and 'label', is needed"
    raise InputError(f"{where} is a {type(item).__name__}; {need}")


def _is_random(dataset: Any, images: np.ndarray) -> bool:
    count = min(_READ_TWICE, len(images)) if _is_map_style(dataset) else 0
    return any(not np.array_equal(_to_pixels(_pair(dataset[i], "")[0], ""), images[i]) for i in range(count))


def _to_pixels(image: Any, where: str) -> np.ndarray:
    if hasattr(image, "convert") and hasattr(image, "mode"):  # PIL
        if image.mode in ("I", "F"):
            raise InputError(f"{where} has 32 bits per pixel (mode {image.mode}); convert it to L, I;16 or RGB")
        if not image.mode.startswith("I;16"):
            mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
            image = (over_white(image) if image.has_transparency_data else image).convert(mode)
        pixels = np.asarray(image).reshape(image.height, image.width, -1)
        return pixels if image.mode in ("L", "RGB") else pixels.astype(np.uint16)
    if not is_array(image):
        raise InputError(f"{where}: the image is a {type(image).__name__}; a PIL image, an array or a tensor is needed")
    is_tensor = hasattr(image, "detach")
    pixels = as_array(image)
    if is_tensor and pixels.ndim == 3:
        if pixels.shape[0] not in (1, 3) and pixels.shape[2] in (1, 3):
            raise InputError(f"{where}: a tensor of shape {pixels.shape}; [C, H, W] is needed")
        pixels = pixels.transpose(1, 2, 0)
    elif pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        pixels = channels_last(pixels[None], where)[0]
    if pixels.dtype in (np.uint8, np.uint16):
        return pixels
    if pixels.dtype.kind != "f":
        raise InputError(f"{where}: pixels of type {pixels.dtype}; give uint8, uint16, or floats in 0..1")
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # false for NaN too
        raise InputError(
            f"{where}: pixels run from {low:g} to {high:g}, outside 0..1; take Normalize out of the data set's "
            "transform: flatout normalises by itself"
        )
    return to_uint8(pixels.clip(0, 1), UNIT, where)


def _names_of(dataset: object) -> tuple[str, ...] | None:
    """Find the class names of a data set, also inside wrappers such as `Subset`."""
    while dataset is not None:
        features = getattr(dataset, "features", None)  # of Hugging Face
        columns = [features[key] for key in _LABEL_KEYS if key in features] if isinstance(features, Mapping) else []
        names = getattr(columns[0], "names", None) if columns else getattr(dataset, "classes", None)
        if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
        dataset = getattr(dataset, "dataset", None)
    return None
