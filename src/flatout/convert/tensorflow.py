"""TensorFlow's V2 checkpoints, and the variables of SavedModels, which are one.

PREFIX.index is a table from names to the places of tensors, PREFIX.data-00000-of-00001 has their bytes:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/protobuf/tensor_bundle.proto.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from flatout.convert.foreign import Foreign
from flatout.convert.problems import damaged, natural
from flatout.convert.table import WHAT, masked, read_table
from flatout.data.formats.shards import fields, inside, signed
from flatout.errors import InputError, one_line

_DTYPES = {1: "f4", 2: "f8", 3: "i4", 4: "u1", 5: "i2", 6: "i1", 9: "i8", 10: "?", 19: "f2"}
_STRING, _BFLOAT16 = 7, 14
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_OPTIMIZERS = re.compile(
    r"(^|/)(_?optimizer|training|\.OPTIMIZER_SLOT|seed_generator\w*|metrics|keras_api)(/|$)", re.I | re.M
)


class _Entry(NamedTuple):
    """Where a tensor is."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: bytes


def read(path: Path) -> Foreign:
    """Return the variables of a checkpoint, `path` being its `.index`; those of optimizers are left out.

    Raises:
        InputError: a file is missing or damaged, or a variable is partitioned.
    """
    table = read_table(path)
    header, entries = table.pop(b"", b""), dict[str, _Entry]()
    try:
        shards, is_big_endian = 1, False
        for number, value in fields(header, slice(0, len(header))):
            shards = value if number == 1 else shards
            is_big_endian = bool(value) if number == 2 else is_big_endian
        for key, value in table.items():
            entries[key.decode()] = _entry(path, key.decode(), value)
    except (ValueError, IndexError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise damaged(path, WHAT, error) from None
    if is_big_endian or not 0 < shards < 100_000:
        raise damaged(path, WHAT, "it has numbers of another byte order" if is_big_endian else "it has no shards")
    files = _Shards(path, shards)
    names = _names(_full_names(path, files, entries), entries)
    if not names:
        raise InputError(f"{path}: holds no variables but {', '.join(list(entries)[:6])!r:.200}")
    return Foreign("keras", {name.replace("/", "."): files.tensor(key, entries[key]) for key, name in names.items()})


def _names(full_names: dict[str, str], entries: dict[str, _Entry]) -> dict[str, str]:
    """Return key -> name of the variables of a model, in the order of the keys.

    Where layers made alike have equal names, variables are named by their places among the objects, which differ.
    """
    places: dict[str, str] = {}
    for key in sorted(entries, key=natural):
        place, entry = key.removesuffix(_VALUE), entries[key]
        is_slot = place.rpartition("/")[0] in entries or _OPTIMIZERS.search(f"{key}\n{full_names.get(key, '')}")
        if entry.dtype != _STRING and entry.shape and not is_slot:
            places[key] = place
    # Keras's `model.export` lists them twice, once without an order.
    once = {key: place for key, place in places.items() if not key.startswith("_all_variables/")} or places
    names = {key: full_names.get(key, place) for key, place in once.items()}
    return names if len({*names.values()}) == len(names) else once


def _entry(path: Path, name: str, value: bytes) -> _Entry:
    numbers: dict[int, int] = {}
    shape, crc = list[int](), b""
    for number, found in fields(value, slice(0, len(value))):
        if number == 2 and isinstance(found, slice):
            for dim in inside(value, found, 2):
                sizes = [signed(size) for field, size in fields(value, dim) if field == 1 and isinstance(size, int)]
                shape.append(sizes[-1] if sizes else 0)
        elif number == 6 and isinstance(found, slice):
            crc = value[found]
        elif number == 7:
            raise InputError(
                f"{path}: the variable {one_line(name)} is partitioned, which is not supported; load the checkpoint in "
                "TensorFlow and save it without a partitioner"
            )
        elif isinstance(found, int):
            numbers[number] = signed(found)
    if min([0, *shape, *numbers.values()]) < 0:
        raise ValueError("a size is negative")
    return _Entry(numbers.get(1, 0), tuple(shape), numbers.get(3, 0), numbers.get(4, 0), numbers.get(5, 0), crc)


class _Shards:
    """The files with the bytes of the tensors."""

    def __init__(self, index: Path, count: int) -> None:
        self.index, self.count = index, count

    def read(self, key: str, entry: _Entry) -> bytes:
        """Return the bytes of an entry, as many as the index says, if the file has them."""
        if entry.shard >= self.count:
            raise damaged(self.index, WHAT, f"{key} is in file {entry.shard} of {self.count}")
        path = self.index.with_name(f"{self.index.stem}.data-{entry.shard:05}-of-{self.count:05}")
        try:
            with path.open("rb") as file:
                if entry.offset + entry.size > path.stat().st_size:
                    raise damaged(path, WHAT, f"it ends before {key}")
                file.seek(entry.offset)
                return file.read(entry.size)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror}); a checkpoint is the files {self.index.stem}.*"
            ) from None

    def tensor(self, key: str, entry: _Entry) -> torch.Tensor:
        """Return a variable; its checksum is verified."""
        kind = np.dtype("i2" if entry.dtype == _BFLOAT16 else _DTYPES.get(entry.dtype, "V1"))
        if kind.kind == "V":
            raise damaged(self.index, WHAT, f"{key} has the type {entry.dtype}")
        if len(entry.shape) > 32 or math.prod(entry.shape) * kind.itemsize != entry.size:
            raise damaged(self.index, WHAT, f"{key} of shape {list(entry.shape)} has {entry.size:,} bytes")
        content = self.read(key, entry)
        if masked(content) != entry.crc:
            raise damaged(self.index, WHAT, f"the checksum of {key} is wrong")
        tensor = torch.from_numpy(np.frombuffer(bytearray(content), kind).reshape(entry.shape))
        return tensor.view(torch.bfloat16) if entry.dtype == _BFLOAT16 else tensor


def _full_names(path: Path, files: _Shards, entries: dict[str, _Entry]) -> dict[str, str]:
    """Return key -> name of the variable, as checkpoints of objects have them in a graph of the objects.

    TrackableObjectGraph {1: TrackableObject {2: SerializedTensor {2: full_name, 3: checkpoint_key}}}
    """
    entry = entries.get(_GRAPH)
    if entry is None or entry.dtype != _STRING:
        return {}
    # A tensor of strings is their lengths, the checksum of these, and the strings; the graph is one string.
    content = files.read(_GRAPH, entry)
    names: dict[str, str] = {}
    try:
        start = next(i for i, byte in enumerate(content[:11]) if byte < 0x80) + 5
        for node in inside(content, slice(start, len(content)), 1):
            for attribute in inside(content, node, 2):
                texts = {n: content[v].decode() for n, v in fields(content, attribute) if isinstance(v, slice)}
                if texts.get(2) and texts.get(3):
                    names[texts[3]] = texts[2]
    except (ValueError, IndexError, StopIteration) as error:
        raise damaged(path, WHAT, f"the graph of its objects: {error}") from None
    return names
