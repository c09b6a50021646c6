"""Data sets in several large files: WebDataset shards and TFRecord files, whose images are read in place."""

import json
import math
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.data.decode import MAX_FILE_BYTES
from flatout.data.formats.folders import is_dir, is_image_name, visible
from flatout.data.labels import NoLabels, distinct_names
from flatout.data.source import DataSource, ImageDataset, ReadOptions, Slice, assemble
from flatout.data.splits import SPLITS, in_order, split_of, split_within
from flatout.data.unpack import opener_of, reading, tar_members
from flatout.utils.errors import InputError

WEBDATASET_KIND, TFRECORD_KIND = "WebDataset shards", "TFRecord files"
_MAX_PATHS = 100_000

# WebDataset: tar files. The members of a sample follow each other, and have one name up to the first dot:
# `000001.jpg` is an image, `000001.cls` its class as text, `000001.json` a dictionary with the class under a key.
_JSON_KEYS = ("label", "labels", "cls", "class", "target", "class_id", "category")
_PEEKED = 16

# TFRecord: Slim's train-00000-of-00010, TFDS's mnist-train.tfrecord-00000-of-00001, Kaggle's train00-512.tfrec
_TFRECORD_NAME = re.compile(r".*\.tfrec(ord)?s?(-\d+-of-\d+)?(\.gz)?|[^.]*-\d+-of-\d+", re.I)
_IMAGE_KEYS = ("image/encoded", "image", "image_raw", "image/raw", "img", "image_bytes", "encoded")
_LABEL_KEYS = ("image/class/label", "label", "class", "target", "labels", "image/class/text")
_TEXT_KEY = "image/class/text"
_CLASS_LISTS = ("labels.txt", "label.labels.txt")
_MAX_NUMBERS = 10_000  # of a feature, such as 0 or 1 for each class


def recognise_webdataset(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise shards by the first samples of one of them: an image and its label."""
    splits = find_shards(path, lambda name: name.lower().endswith(".tar"))
    if not any(_begins_with_sample(file, options) for files in splits.values() for file in files):
        return None
    return reference(WEBDATASET_KIND, path, splits, _read_webdataset, options)


def recognise_tfrecord(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise the files by their names."""
    splits = find_shards(path, lambda name: bool(_TFRECORD_NAME.fullmatch(name)))
    return reference(TFRECORD_KIND, path, splits, _read_tfrecord, options.with_class_list(path, _CLASS_LISTS))


# --- files ---


def find_shards(path: Path, is_shard: Callable[[str], bool]) -> dict[str, list[Path]]:
    """Return split -> shards by name, from a folder, a file, or a pattern; those without a split are training data."""
    found: dict[str, list[Path]] = {}
    # The folders of a pattern such as {train,val}/{0..9}.tar may be splits.
    has_folders = "{" in str(path.parent)
    named = ((split_of(file.parent.name) if has_folders else None, file) for file in expand_braces(path))
    for split, file in _files(path) if path.is_dir() else named:
        if is_shard(file.name) and file.is_file():
            found.setdefault(split or split_within(file.name) or "train", []).append(file)
    return {split: found[split] for split in SPLITS if split in found}


def _files(folder: Path) -> Iterator[tuple[str | None, Path]]:
    for entry in visible(folder):
        if not is_dir(entry):
            yield None, Path(entry)
        elif entry.name.lower() == "data" or split_of(entry.name):
            yield from ((split_of(entry.name), Path(inner)) for inner in visible(Path(entry)))


def reference(
    kind: str, path: Path, splits: dict[str, list[Path]], read: Callable[..., ImageDataset], options: ReadOptions
) -> DataSource | None:
    """Return the data in split -> shards, or None without shards; `read` gets the other arguments."""
    if not splits:
        return None
    splits = in_order(splits, path)
    inputs, read_all = tuple(chain.from_iterable(splits.values())), partial(read, kind, path, splits, options)
    return DataSource(kind=kind, path=path, inputs=inputs, class_list=options.class_list, read=read_all)


def expand_braces(path: Path) -> list[Path]:
    """Expand `{000..127}` and `{train,val}` as a shell does; an existing file is not expanded."""
    if "{" not in str(path) or path.exists():
        return [path]
    parts: list[Sequence[str]] = []
    for i, text in enumerate(re.split(r"\{([^{}]*)\}", str(path))):
        if i % 2 and (match := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)):
            numbers = range(int(match[1]), int(match[2]) + 1)[: _MAX_PATHS + 1]
            parts.append([f"{number:0{len(match[1])}}" for number in numbers])
        else:
            parts.append(text.split(",") if i % 2 else [text])
    if not 0 < (count := math.prod(map(len, parts))) <= _MAX_PATHS:
        what = f"more than {_MAX_PATHS:,} files; give their folder" if count else "no files; write ranges as {0..9}"
        raise InputError(f"{path}: stands for {what}")
    return [Path("".join(names)) for names in product(*parts)]


# --- WebDataset ---


def _read_webdataset(kind: str, path: Path, splits: dict[str, list[Path]], options: ReadOptions) -> ImageDataset:
    parts: dict[str, tuple[list[Slice], list[object]]] = {}
    label_name = options.label_column.lower() or "cls"
    for split, files in splits.items():
        parts[split] = [], []
        for file in files:
            with reading(file), file.open("rb") as stream:
                for key, members in _samples(file, tar_members(stream, file)):
                    images, labels = _images_and_labels(members, options)
                    if len(images) != 1 or not labels:
                        raise InputError(
                            f"{file}: sample {key}: has the members {', '.join(sorted(members))}; one image and a "
                            f".{label_name} or .json member are needed; --set data.file_column=EXTENSION and --set "
                            "data.label_column=EXTENSION name others"
                        )
                    parts[split][0].append(images[0])
                    parts[split][1].append(_label(labels[0], options))
    return assemble(kind, path, parts, options)


def _begins_with_sample(file: Path, options: ReadOptions) -> bool:
    try:
        with file.open("rb") as stream:
            samples = list(_samples(file, islice(tar_members(stream, file), _PEEKED)))
    except (InputError, OSError):  # reported when the file is read as a shard or an archive
        return False
    return any(all(_images_and_labels(members, options)) for _, members in samples)


def _samples(file: Path, members: Iterable[tuple[Any, tarfile.TarInfo]]) -> Iterator[tuple[str, dict[str, Slice]]]:
    """Yield the name of each sample and its members by extension."""
    # The name up to the first dot of its last part, and the extension; hidden files have no name.
    named = ((re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]*)", m.name, re.DOTALL), m) for _, m in members if m.isreg())
    for key, group in groupby(((match, member) for match, member in named if match), key=lambda pair: pair[0][1]):
        yield key, {match[2].lower(): Slice(file, f"member {m.name}", m.offset_data, m.size) for match, m in group}


def _images_and_labels(members: dict[str, Slice], options: ReadOptions) -> list[list[Slice]]:
    """Return the images of a sample, without auxiliary ones such as `seg.png` next to `jpg`, and its labels."""
    images = [options.file_column.lower()] if options.file_column else [x for x in members if is_image_name(f".{x}")]
    images = [extension for extension in images if "." not in extension] or images
    labels = [options.label_column.lower() or "cls", "json"]
    return [[members[key] for key in keys if key in members] for keys in (images, labels)]


def _label(place: Slice, options: ReadOptions) -> object:
    """Return a member's label: its text, or a value (perhaps a list) of its dictionary."""
    keys = (options.label_column,) if options.label_column else _JSON_KEYS
    try:
        text = place.read_bytes().decode("utf-8-sig").strip()
        if not place.name.lower().endswith(".json"):
            return text
        table = json.loads(text)
        label = next((table[key] for key in keys if key in table), None)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{place}: cannot be read as a label: {error}") from None
    if not isinstance(label, (int, float, str, list)) or isinstance(label, bool):
        raise InputError(
            f"{place}: has no label (a number, a text or a list of them) under {' or '.join(keys)}; --set "
            "data.label_column=KEY names another key"
        )
    return label


# --- TFRecord ---
# A record is its length (8 bytes, little-endian), the masked CRC-32C of these, the data, and the masked CRC-32C of the
# data: https://www.tensorflow.org/tutorials/load_data/tfrecord. The data is a protocol buffer, `tf.train.Example`:
# https://protobuf.dev/programming-guides/encoding/.


class _Sample(NamedTuple):
    image: Slice
    labels: list[int | float | str]
    text: str  # the name of the class


# Numbers, and positions of bytes in the record: images stay in the file until they are decoded.
_Features = dict[str, list[int | float | slice]]


def _read_tfrecord(kind: str, path: Path, splits: dict[str, list[Path]], options: ReadOptions) -> ImageDataset:
    samples: dict[str, list[_Sample]] = {}
    notes: list[str] = []
    for split, files in splits.items():
        try:
            samples[split] = [sample for file in files for sample in _read_samples(file, options)]
        except NoLabels as error:
            if split == "train":
                raise
            notes.append(f"there is no {split} split: {error}")
    every = [sample for some in samples.values() for sample in some]
    is_single = all(len(sample.labels) == 1 for sample in every)
    texts = _class_texts(every) if is_single and options.class_list is None else {}

    def label(sample: _Sample) -> object:
        return texts.get(sample.labels[0], sample.labels[0]) if is_single else sample.labels

    parts = {split: ([one.image for one in some], list(map(label, some))) for split, some in samples.items()}
    return assemble(kind, path, parts, options, names=tuple(texts.values()) or None, notes=tuple(notes))


def _class_texts(samples: list[_Sample]) -> dict[int | float | str, str]:
    """Return number -> class name in numeric order, if every record has both."""
    texts = {sample.labels[0]: sample.text for sample in samples}
    are_complete = all(sample.text and texts[sample.labels[0]] == sample.text for sample in samples)
    if not are_complete or not all(isinstance(label, int) for label in texts):
        return {}
    return distinct_names(dict(sorted(texts.items())))


def _read_samples(file: Path, options: ReadOptions) -> Iterator[_Sample]:
    """Yield the samples of the records; checksums are not compared."""
    with reading(file), file.open("rb") as stream:
        if opener_of(file):
            raise InputError(f"{file}: is compressed; unpack it first, such as with gunzip")
        size, offset, number = file.stat().st_size, 0, 0
        while header := stream.read(12):
            length = int.from_bytes(header[:8], "little")
            place = Slice(file, f"record {number}", offset + 12, length)
            if len(header) < 12 or offset + length + 16 > size or length > MAX_FILE_BYTES:
                what = f"is cut off, or this is not a TFRecord file (at byte {offset:,})"
                raise InputError(f"{place}: {what}; get it again")
            try:
                yield _sample(place, stream.read(length), options)
            except UnicodeDecodeError:
                raise InputError(f"{place}: its class is not UTF-8 text") from None
            except (ValueError, IndexError) as error:
                if isinstance(error, InputError):
                    raise
                raise InputError(f"{place}: is not a tf.train.Example ({error})") from None
            stream.read(4)
            offset, number = offset + length + 16, number + 1


def _sample(place: Slice, record: bytes, options: ReadOptions) -> _Sample:
    features = _features(record)
    image_keys = (options.file_column,) if options.file_column else _IMAGE_KEYS
    label_keys = (options.label_column,) if options.label_column else _LABEL_KEYS
    image = next((features[key] for key in image_keys if features.get(key)), [])
    labels = next((features[key] for key in label_keys if features.get(key)), [])
    if len(image) != 1 or not isinstance(image[0], slice) or not labels or len(labels) > _MAX_NUMBERS:
        raise (NoLabels if len(image) == 1 and not labels else InputError)(
            f"{place}: has the features {', '.join(sorted(features)) or 'none'}; an image under "
            f"{' or '.join(image_keys[:2])} and a class under {' or '.join(label_keys[:2])} are needed; --set "
            "data.file_column=KEY and --set data.label_column=KEY name others"
        )
    encoded = replace(place, offset=place.offset + image[0].start, size=image[0].stop - image[0].start)
    named = [record[label].decode() if isinstance(label, slice) else label for label in labels]
    text = next((record[value].decode() for value in features.get(_TEXT_KEY, []) if isinstance(value, slice)), "")
    return _Sample(encoded, named, text)


def _features(record: bytes) -> _Features:
    """Return name -> values of the features of a `tf.train.Example`; raises ValueError or IndexError if it is none.

    Example {1: Features {1: map<string, Feature>}}, Feature {1: BytesList, 2: FloatList, 3: Int64List}, each list
    {1: repeated value}.
    """
    found: _Features = {}
    for entry in inside(record, slice(0, len(record)), 1, 1):
        name = next((record[key].decode() for key in inside(record, entry, 1)), "")
        values = found[name] = [*inside(record, entry, 2, 1, 1)]
        for place in inside(record, entry, 2, 2, 1):  # packed or one by one
            values += np.frombuffer(record[place], "<f4")[: _MAX_NUMBERS + 1].tolist()
        for int64_list in inside(record, entry, 2, 3):
            values += islice(_int64s(record, int64_list), _MAX_NUMBERS + 1)
    return found


def _int64s(record: bytes, place: slice) -> Iterator[int]:
    for number, value in fields(record, place):
        if number == 1 and isinstance(value, slice):  # packed
            position = value.start
            while position < value.stop:
                integer, position = varint(record, position, value.stop)
                yield signed(integer)
        elif number == 1:
            yield signed(value)


# --- protocol buffers, also of TensorFlow's checkpoints ---

_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


def inside(record: bytes, place: slice, wanted: int, *deeper: int) -> Iterator[slice]:
    """Yield the positions of the length-delimited fields with one field number, or with a path of numbers."""
    for number, value in fields(record, place):
        if number == wanted and isinstance(value, slice):
            yield from inside(record, value, *deeper) if deeper else (value,)


def fields(record: bytes, place: slice) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message (else ValueError): a number, or the position of bytes."""
    position, stop = place.start, place.stop
    while position < stop:
        tag, position = varint(record, position, stop)
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, position = varint(record, position, stop)
            yield tag >> 3, value
            continue
        if wire_type == _BYTES:
            length, position = varint(record, position, stop)
        elif (length := _FIXED_BYTES.get(wire_type, 0)) == 0:
            raise ValueError(f"unknown wire type {wire_type}")
        if position + length > stop:
            raise ValueError("a field ends after its message")
        yield tag >> 3, slice(position, position + length)
        position += length


def varint(record: bytes, position: int, stop: int) -> tuple[int, int]:
    """Return a varint (up to ten bytes, lowest seven bits first) and the position after it."""
    if position < stop and (number := record[position]) < 0x80:  # nearly all
        return number, position + 1
    number = 0
    for i, byte in enumerate(record[position : min(position + 10, stop)]):
        number |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return number, position + i + 1
    raise ValueError("a number is cut off, or has more than ten bytes")


def signed(number: int) -> int:
    """Reinterpret an unsigned 64-bit integer as signed."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
