"""TFRecord files of `tf.train.Example`, read without TensorFlow.

A record is its length (8 bytes, little-endian), the masked CRC-32C of these, the data, and the masked CRC-32C of the
data: https://www.tensorflow.org/tutorials/load_data/tfrecord. The data is a protocol buffer, of which only what an
Example is made of is parsed: https://protobuf.dev/programming-guides/encoding/.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.data.crc32c import masked_crc32c
from flatout.data.decode import MAX_FILE_BYTES
from flatout.data.labels import find_class_list_beside
from flatout.data.members import Container, Slice
from flatout.data.protobuf import fields, inside, signed, varint
from flatout.data.shards import reference, shards
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.errors import InputError

KIND = "TFRecord files"
ABOUT = {
    KIND: (
        "the folder, a file, or a pattern with braces",
        "names such as `train-00000-of-00010` or `train.tfrecord`",
    ),
}
# Slim's train-00000-of-00010, TFDS's mnist-train.tfrecord-00000-of-00001, Kaggle's train00-512.tfrec
_NAME = re.compile(r".*\.tfrec(ord)?s?(-\d+-of-\d+)?(\.gz)?|[^.]*-\d+-of-\d+", re.I)
_IMAGE_KEYS = ("image/encoded", "image", "image_raw", "image/raw", "img", "image_bytes", "encoded")
_LABEL_KEYS = ("image/class/label", "label", "class", "target", "labels", "image/class/text")
_TEXT_KEY = "image/class/text"
_SHAPE_KEYS = (
    ("image/height", "height", "rows"),
    ("image/width", "width", "cols"),
    ("image/channels", "depth", "channels", "image/depth"),
)
_CLASS_LISTS = ("labels.txt", "label.labels.txt")
_MAX_NUMBERS = 10_000  # of a feature, such as 0 or 1 for each class


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataRef | None:
    """Return the files, by their names, or None."""
    splits = shards(path, lambda name: bool(_NAME.fullmatch(name)))
    folder = path if path.is_dir() else path.parent
    found = class_list or find_class_list_beside(folder, _CLASS_LISTS)
    beside = (found,) if found and not class_list else ()
    return reference(KIND, path, splits, lambda splits: read(path, splits, found, options), beside)


_Features = dict[str, list[int | float | slice]]


class _NoLabel(InputError):
    """A record with an image but no class."""


class _Sample(NamedTuple):
    place: str
    image: Slice | np.ndarray
    labels: list[int | float | str]
    text: str

    @property
    def label(self) -> int | float | str:
        return self.labels[0]


def read(path: Path, splits: dict[str, list[Path]], class_list: Path | None, options: ReadOptions) -> Source:
    """Return the source of split -> files; the records are checked, and encoded images are left where they are."""
    samples: dict[str, list[_Sample]] = {}
    notes: list[str] = []
    for split, files in splits.items():
        try:
            samples[split] = [sample for file in files for sample in _samples(file, options)]
        except _NoLabel as error:
            if split == "train":
                raise
            notes.append(f"there is no {split} split: {error}")
    every = [sample for some in samples.values() for sample in some]
    is_single = all(len(sample.labels) == 1 for sample in every)
    texts = _texts(every) if is_single and class_list is None else {}
    parts: dict[str, tuple[Any, list[Any]]] = {}
    are_raw = {isinstance(sample.image, np.ndarray) for sample in every}
    shapes = {sample.image.shape for sample in every if isinstance(sample.image, np.ndarray)}
    if len(are_raw) > 1 or len(shapes) > 1:
        raise InputError(f"{path}: raw images must be of one size, and none encoded; their sizes are {sorted(shapes)}")
    for split, some in samples.items():
        images: list[Any] = [sample.image for sample in some]
        labels = [texts.get(sample.label, sample.label) if is_single else sample.labels for sample in some]
        parts[split] = (np.stack(images) if shapes else images), labels
    return assemble(
        KIND,
        path,
        parts,
        names=tuple(texts.values()) or None,
        class_list=class_list,
        notes=tuple(notes),
        locate=lambda split, i: samples[split][i].place,
        task=options.task,
    )


def _texts(samples: list[_Sample]) -> dict[int | float | str, str]:
    """Return number -> name of the classes, in the order of the numbers, if every record has both."""
    pairs = {sample.label: sample.text for sample in samples}
    if not all(pairs.values()) or not all(isinstance(label, int) for label in pairs):
        return {}
    if any(pairs[sample.label] != sample.text for sample in samples):
        return {}
    counts = Counter(pairs.values())
    # ImageNet has two classes called crane.
    return {
        number: f"{name} ({number})" if counts[name] > 1 else name
        for number, name in sorted(pairs.items(), key=lambda pair: int(pair[0]))
    }


def _samples(file: Path, options: ReadOptions) -> Iterator[_Sample]:
    start = _read_start(file)
    container = Container(file, decompress=_masked_crc32c(start[:8]) != start[8:])
    with container.opened() as descriptor:
        for number, (offset, record) in enumerate(_records(container, descriptor)):
            try:
                features = _features(record)
            except (ValueError, IndexError) as error:
                raise InputError(f"{container.path}: record {number}: is no tf.train.Example ({error})") from None
            yield _sample(container, number, offset, record, features, options)


def _read_start(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(12)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None


def _masked_crc32c(data: bytes) -> bytes:
    return masked_crc32c(data, what="TFRecord files", extra="tfrecord")


def _records(container: Container, descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and data of each record, checked."""
    offset, number = 0, 0
    header = os.pread(descriptor, 12, 0)
    while header:
        where = f"{container.path}: record {number}"
        if len(header) < 12 or _masked_crc32c(header[:8]) != header[8:]:
            raise InputError(f"{where}: is damaged, or this is no TFRecord file (at byte {offset:,}); get it again")
        length = int.from_bytes(header[:8], "little")
        if offset + length + 16 > container.size:
            raise InputError(f"{where}: is cut off; get the file again")
        if length > MAX_FILE_BYTES:
            raise InputError(f"{where}: has {length:,} bytes, more than {MAX_FILE_BYTES:,}, the limit")
        # The data alone, which is not copied again; then its checksum with the next header.
        data, behind = os.pread(descriptor, length, offset + 12), os.pread(descriptor, 16, offset + 12 + length)
        if _masked_crc32c(data) != behind[:4]:
            raise InputError(f"{where}: is damaged: its checksum is wrong; get the file again")
        yield offset + 12, data
        offset, number, header = offset + length + 16, number + 1, behind[4:]


def _sample(
    container: Container,
    number: int,
    offset: int,
    record: bytes,
    features: _Features,
    options: ReadOptions,
) -> _Sample:
    place = f"{container.path}: record {number}"
    image_keys = (options.file_column,) if options.file_column else _IMAGE_KEYS
    label_keys = (options.label_column,) if options.label_column else _LABEL_KEYS
    image = next((features[key] for key in image_keys if features.get(key)), [])
    labels = next((features[key] for key in label_keys if features.get(key)), [])
    if len(image) != 1 or not isinstance(image[0], slice) or not labels or len(labels) > _MAX_NUMBERS:
        raise (_NoLabel if len(image) == 1 and not labels else InputError)(
            f"{place}: has the features {', '.join(sorted(features)) or 'none'}; an image under "
            f"{' or '.join(image_keys[:2])} and a class under {' or '.join(label_keys[:2])} are needed; --set "
            "data.file_column=KEY and --set data.label_column=KEY name others"
        )
    where = image[0]
    shape = [_number(features, keys) for keys in _SHAPE_KEYS]
    shape[2] = shape[2] or 1
    pixels: Slice | np.ndarray = Slice(container, f"record {number}", offset + where.start, where.stop - where.start)
    if pixels.size == math.prod(shape) and pixels.size:
        if shape[2] not in (1, 3):
            raise InputError(f"{place}: has raw pixels of {shape[2]} channels; 1 or 3 are needed")
        pixels = np.frombuffer(record[where], np.uint8).reshape(shape)
    named = [_text(record, label, place) if isinstance(label, slice) else label for label in labels]
    text = next((_text(record, value, place) for value in features.get(_TEXT_KEY, []) if isinstance(value, slice)), "")
    return _Sample(place, pixels, named, text)


def _number(features: _Features, keys: tuple[str, ...]) -> int:
    values = next((features[key] for key in keys if features.get(key)), [0])
    return max(0, values[0]) if isinstance(values[0], int) else 0


def _text(record: bytes, value: slice, place: str) -> str:
    try:
        return record[value].decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{place}: its class is no UTF-8 text") from None


# Images stay in the file until they are decoded. Example {1: Features {1: map<string, Feature>}}, Feature {1:
# BytesList, 2: FloatList, 3: Int64List}, each list {1: repeated value}.


def _features(record: bytes) -> _Features:
    """Return name -> values of the features: places of bytes in the record, and numbers.

    Raises:
        ValueError, IndexError: the record is damaged or something else.
    """
    found: _Features = {}
    for features in inside(record, slice(0, len(record)), 1):
        for entry in inside(record, features, 1):
            name = next((record[key].decode() for key in inside(record, entry, 1)), "")
            values: list[int | float | slice] = []
            for feature in inside(record, entry, 2):
                for bytes_list in inside(record, feature, 1):
                    values += inside(record, bytes_list, 1)
                for float_list in inside(record, feature, 2):
                    for place in inside(record, float_list, 1):  # packed or one by one
                        values += np.frombuffer(record[place], "<f4")[: _MAX_NUMBERS + 1].tolist()
                for int64_list in inside(record, feature, 3):
                    values += _int64s(record, int64_list)
            found[name] = values
    return found


def _int64s(record: bytes, place: slice) -> list[int]:
    """Return the first values of an Int64List, packed or not."""
    values: list[int] = []
    for number, value in fields(record, place):
        if number == 1 and isinstance(value, slice):
            position = value.start
            while position < value.stop and len(values) <= _MAX_NUMBERS:
                integer, position = varint(record, position, value.stop)
                values.append(signed(integer))
        elif number == 1:
            values.append(signed(value))
        if len(values) > _MAX_NUMBERS:
            break
    return values
