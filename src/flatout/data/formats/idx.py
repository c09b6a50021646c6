"""IDX files, the format of MNIST: http://yann.lecun.com/exdb/mnist/ (the section on the file format).

Two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number, then the values.
"""

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from flatout.data.formats.folders import visible
from flatout.data.pixels import channels_last
from flatout.data.source import DataRef, Source, assemble
from flatout.data.splits import in_order, split_within
from flatout.data.unpack import refuse_bomb
from flatout.errors import InputError
from flatout.recipe import Data

KIND = "IDX files"
ABOUT = {
    KIND: ("the folder", "names such as `train-images-idx3-ubyte`, with or without `.gz`"),
}
_NAME = re.compile(r"(?P<before>.*?)[-_.]?(?P<role>images|labels)[-_.]idx\d-(ubyte|byte|short|int)(?P<gz>\.gz)?", re.I)
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_BLOCK_BYTES = 1 << 24


def recognise(path: Path, class_list: Path | None, options: Data) -> DataRef | None:
    """Return the IDX set in a folder, or None.

    Raises:
        InputError: a file's partner or the training split is missing, or two files could be the same.
    """
    if not path.is_dir():
        if _NAME.fullmatch(path.name):
            raise InputError(f"{path}: is one file of an IDX set; give its folder, {path.parent}")
        return None
    files: dict[tuple[str, str], Path] = {}
    for entry in visible(path):
        match = _NAME.fullmatch(entry.name)
        split = split_within(match["before"]) if match else None
        if not match or split is None or not entry.is_file():
            continue
        key = (split, match["role"].lower())
        before = files.get(key)
        # The same file compressed and not is common; the uncompressed one is faster to read.
        if before is not None and before.name.removesuffix(".gz") != entry.name.removesuffix(".gz"):
            raise InputError(f"{path}: both {before.name} and {entry.name} are {' '.join(key)}; move one away")
        if before is None or not match["gz"]:
            files[key] = entry.path
    if not files:
        return None
    for split, role in [(split, role) for split, _ in files for role in ("images", "labels")]:
        if (split, role) not in files:
            raise InputError(f"{path}: has no IDX file of {split} {role} beside its partner")
    pairs = in_order({split: (files[split, "images"], files[split, "labels"]) for split, _ in files}, path)
    inputs = tuple(file for pair in pairs.values() for file in pair)
    return DataRef(kind=KIND, path=path, inputs=inputs, read=lambda: read(path, pairs, class_list))


def read(folder: Path, pairs: dict[str, tuple[Path, Path]], class_list: Path | None) -> Source:
    """Return the source of split -> (file of images, file of labels)."""
    splits = {}
    for split, (image_path, label_path) in pairs.items():
        pixels, labels = read_idx(image_path), read_idx(label_path)
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
            raise InputError(f"{image_path}: holds {pixels.dtype} values of shape {pixels.shape}, not images of bytes")
        if len(labels) != len(pixels):
            raise InputError(f"{label_path}: {len(labels):,} labels for {len(pixels):,} images in {image_path.name}")
        splits[split] = (channels_last(pixels, image_path), labels)
    return assemble(KIND, folder, splits, class_list=class_list, locate=lambda s, i: f"{pairs[s][1]}: label {i}")


def read_idx(path: Path) -> np.ndarray:
    """Return the array of an IDX file, compressed with gzip or not, in the machine's byte order.

    Raises:
        InputError: the file cannot be read, is no IDX file, or is shorter or longer than its header says.
    """
    with open_maybe_compressed(path) as stream:
        magic = stream.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0:
            raise InputError(f"{path}: is no IDX file (it starts with {magic.hex(' ') or 'nothing'})")
        header = stream.read(4 * magic[3])
        shape = tuple(np.frombuffer(header[: len(header) // 4 * 4], dtype=">u4").tolist())
        dtype = np.dtype(_TYPES[magic[2]])
        size = math.prod(shape) * dtype.itemsize
        content = bytearray()
        # By blocks, so that a wrong header cannot make it ask for all memory.
        while len(content) < size and (block := stream.read(min(size - len(content), _BLOCK_BYTES))):
            content += block
        if len(shape) < magic[3] or len(content) < size:
            raise InputError(
                f"{path}: is cut off: its header promises shape {shape}, {size:,} bytes, "
                f"of which {len(content):,} are there; get it again"
            )
        if stream.read(1):
            raise InputError(f"{path}: is longer than its header says (shape {shape}); get it again")
    return np.frombuffer(content, dtype=dtype).astype(dtype.newbyteorder("="), copy=False).reshape(shape)


class _Bounded:
    """A compressed stream that refuses to expand far beyond the size of its file."""

    def __init__(self, stream: BufferedIOBase, path: Path, compressed: int) -> None:
        self._stream, self._path, self._compressed, self._expanded = stream, path, compressed, 0

    def read(self, size: int) -> bytes:
        """Return up to so many bytes; raises InputError."""
        data = self._stream.read(size)
        self._expanded += len(data)
        refuse_bomb(self._path, self._compressed, self._expanded)
        return data


@contextmanager
def open_maybe_compressed(path: Path) -> Iterator[BufferedIOBase | _Bounded]:
    """Open a file that may be compressed with gzip; errors of reading it are an InputError."""
    try:
        with path.open("rb") as raw:
            is_compressed, size = raw.read(2) == b"\x1f\x8b", raw.seek(0, os.SEEK_END)
            raw.seek(0)
            with gzip.open(raw) if is_compressed else raw as stream:
                yield _Bounded(stream, path, size) if is_compressed else stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: is a damaged gzip file ({error}); get it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
