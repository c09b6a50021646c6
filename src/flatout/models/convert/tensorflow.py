"""TensorFlow's V2 checkpoints, and the variables of SavedModels, which are one.

PREFIX.index is a sorted table from names to the positions of tensors, in the format of LevelDB's tables, and
PREFIX.data-00000-of-00001 has their bytes: https://github.com/google/leveldb/blob/main/doc/table_format.md,
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/protobuf/tensor_bundle.proto.
"""

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from flatout.data.formats.shards import fields, inside, signed, varint
from flatout.models.weights import damaged, natural
from flatout.utils.errors import InputError

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER_BYTES = 48
_WHAT = "a TensorFlow checkpoint"
_DTYPES = {1: "f4", 2: "f8", 3: "i4", 4: "u1", 5: "i2", 6: "i1", 9: "i8", 10: "?", 14: "i2", 19: "f2"}
_STRING, _BFLOAT16 = 7, 14
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_OPTIMIZERS = re.compile(
    r"(^|/)(_?optimizer|training|\.OPTIMIZER_SLOT|seed_generator\w*|metrics|keras_api)(/|$)", re.I | re.M
)


class _Entry(NamedTuple):
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: bytes


def read_variables(path: Path) -> dict[str, torch.Tensor]:
    """Read the variables of a checkpoint, `path` being its `.index`; those of optimizers are left out."""
    try:
        table = dict(_table(path.read_bytes()))
        header = table.pop(b"", b"")
        settings = {1: 1, 2: 0, **dict(fields(header, slice(0, len(header))))}
        shards = settings[1]
        if settings[2] or not 0 < shards < 100_000:
            raise ValueError(f"it has {shards} parts, or big-endian numbers")
        entries = {key.decode(): _entry(value) for key, value in table.items()}
        names = _names(_full_names(path, shards, entries), entries)
    except InputError:
        raise
    except (OSError, ValueError, IndexError, TypeError, StopIteration) as error:
        raise damaged(path, _WHAT, getattr(error, "strerror", None) or error) from None
    if not names:
        raise InputError(f"{path}: holds no variables but {', '.join(list(entries)[:6])!r:.200}")
    return {name.replace("/", "."): _tensor(path, shards, key, entries[key]) for key, name in names.items()}


# ---- the table -------------------------------------------------------------------------------------------------------


def masked(data: bytes) -> bytes:
    """Compute the checksum of checkpoints, a masked CRC-32C of 4 bytes."""
    try:
        import google_crc32c
    except ImportError:
        raise InputError("TensorFlow checkpoints need google-crc32c: pip install 'flatout[convert]'") from None
    crc = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a table in order; checksums are verified."""
    if len(content) < _FOOTER_BYTES or content[-8:] != MAGIC:
        raise ValueError("it does not end as one")
    footer = position = len(content) - _FOOTER_BYTES
    for _ in range(2):  # skip the handle of the meta index
        _, position = varint(content, position, len(content))
    blocks = (_block(content, handle, 0, footer) for _, handle in _entries(_block(content, content, position, footer)))
    for count, entry in enumerate(chain.from_iterable(map(_entries, blocks))):
        # Every entry takes three bytes at least, unless a table repeats its blocks.
        if count > len(content):
            raise ValueError("more entries than bytes")
        yield entry


def _block(content: bytes, handle: bytes, position: int, end: int) -> bytes:
    """Read the block whose offset and size a handle has; a byte for compression and a checksum follow it."""
    offset, position = varint(handle, position, len(handle))
    size, _ = varint(handle, position, len(handle))
    if offset + size + 5 > end:
        raise ValueError("a block ends after the file")
    block = content[offset : offset + size + 1]
    if masked(block) != content[offset + size + 1 : offset + size + 5]:
        raise ValueError("a checksum is wrong")
    if block[-1]:
        raise ValueError("a block is compressed; TensorFlow writes none")
    return block[:-1]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries: each key shares its first bytes with the one before, then has its own."""
    if len(block) < 4:
        raise ValueError("a block is cut off")
    stop = len(block) - 4 * (int.from_bytes(block[-4:], "little") + 1)
    position, key = 0, b""
    while position < stop:
        shared, position = varint(block, position, stop)
        own, position = varint(block, position, stop)
        size, position = varint(block, position, stop)
        if shared > len(key) or position + own + size > stop:
            raise ValueError("an entry ends after its block")
        key = key[:shared] + block[position : position + own]
        yield key, block[position + own : position + own + size]
        position += own + size


def _entry(value: bytes) -> _Entry:
    numbers: dict[int, int] = {}
    shape, checksum = list[int](), b""
    for number, found in fields(value, slice(0, len(value))):
        if number == 2 and isinstance(found, slice):
            for dim in inside(value, found, 2):
                sizes = [signed(size) for field, size in fields(value, dim) if field == 1 and isinstance(size, int)]
                shape.append(sizes[-1] if sizes else 0)
        elif number == 6 and isinstance(found, slice):
            checksum = value[found]
        elif number == 7:
            raise ValueError("a variable is partitioned; save the checkpoint without a partitioner")
        elif isinstance(found, int):
            numbers[number] = signed(found)
    if min([0, *shape, *numbers.values()]) < 0:
        raise ValueError("a size is negative")
    return _Entry(numbers.get(1, 0), tuple(shape), numbers.get(3, 0), numbers.get(4, 0), numbers.get(5, 0), checksum)


# ---- the variables ---------------------------------------------------------------------------------------------------


def _full_names(path: Path, shards: int, entries: dict[str, _Entry]) -> dict[str, str]:
    """Map keys to names of variables, as checkpoints of objects have them in a graph of the objects.

    TrackableObjectGraph {1: TrackableObject {2: SerializedTensor {2: full_name, 3: checkpoint_key}}}
    """
    entry = entries.get(_GRAPH)
    if entry is None or entry.dtype != _STRING:
        return {}
    # A tensor of strings is their lengths, the checksum of these, and the strings; the graph is one string.
    content = _read_bytes(path, shards, _GRAPH, entry)
    names: dict[str, str] = {}
    start = next(i for i, byte in enumerate(content[:11]) if byte < 0x80) + 5
    for node in inside(content, slice(start, len(content)), 1):
        for attribute in inside(content, node, 2):
            texts = {n: content[v].decode() for n, v in fields(content, attribute) if isinstance(v, slice)}
            if texts.get(2) and texts.get(3):
                names[texts[3]] = texts[2]
    return names


def _names(full_names: dict[str, str], entries: dict[str, _Entry]) -> dict[str, str]:
    """Map keys to names of the variables of a model, in the order of the keys.

    If layers have equal names, variables are named by their object paths, which are unique.
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


def _tensor(index: Path, shards: int, key: str, entry: _Entry) -> torch.Tensor:
    if entry.dtype not in _DTYPES:
        raise damaged(index, _WHAT, f"{key} has the type {entry.dtype}")
    kind = np.dtype(_DTYPES[entry.dtype])
    if len(entry.shape) > 32 or math.prod(entry.shape) * kind.itemsize != entry.size:
        raise damaged(index, _WHAT, f"{key} of shape {list(entry.shape)} has {entry.size:,} bytes")
    content = _read_bytes(index, shards, key, entry)
    if masked(content) != entry.checksum:
        raise damaged(index, _WHAT, f"the checksum of {key} is wrong")
    tensor = torch.from_numpy(np.frombuffer(bytearray(content), kind).reshape(entry.shape))
    return tensor.view(torch.bfloat16) if entry.dtype == _BFLOAT16 else tensor


def _read_bytes(index: Path, shards: int, key: str, entry: _Entry) -> bytes:
    if entry.shard >= shards:
        raise damaged(index, _WHAT, f"{key} is in file {entry.shard} of {shards}")
    path = index.with_name(f"{index.stem}.data-{entry.shard:05}-of-{shards:05}")
    try:
        with path.open("rb") as file:
            if entry.offset + entry.size > path.stat().st_size:
                raise damaged(path, _WHAT, f"it ends before {key}")
            file.seek(entry.offset)
            return file.read(entry.size)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); a checkpoint is the files {index.stem}.*"
        ) from None
