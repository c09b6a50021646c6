"""IDX files, the format of MNIST: http://yann.lecun.com/exdb/mnist/ (the section on the file format).

Two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number, then the values.
"""

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np

from flatout.data.formats.folders import visible
from flatout.data.labels import find_class_list, flat_labels, index_labels, read_class_list
from flatout.data.parts import join_images, ordered, spans, split_within
from flatout.data.pixels import channels_last
from flatout.data.source import Found, Source
from flatout.errors import InputError

KIND = "IDX files"
_NAME = re.compile(r"(?P<before>.*?)[-_.]?(?P<role>images|labels)[-_.]idx\d-(ubyte|byte|short|int)(?P<gz>\.gz)?", re.I)
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_BLOCK_BYTES = 1 << 24


def is_idx_name(name: str) -> bool:
    """Whether a file is named like one of an IDX set, such as `t10k-labels-idx1-ubyte.gz`."""
    return _NAME.fullmatch(name) is not None


def find(folder: Path, classes: str) -> Found | None:
    """Return the IDX set in a folder, or None.

    Raises:
        InputError: a file's partner or the training part is missing, or two files could be the same part.
    """
    files: dict[tuple[str, str], Path] = {}
    for entry in visible(folder):
        match = _NAME.fullmatch(entry.name)
        split = split_within(match["before"]) if match else None
        if not match or split is None:
            continue
        key = (split, match["role"].lower())
        before = files.get(key)
        # The same file packed and unpacked is common; the unpacked one is faster to read.
        if before is not None and before.name.removesuffix(".gz") != entry.name.removesuffix(".gz"):
            raise InputError(f"{folder}: both {before.name} and {entry.name} are {' '.join(key)}; move one away")
        if before is None or not match["gz"]:
            files[key] = Path(entry.path)
    if not files:
        return None
    parts: dict[str, tuple[Path, Path]] = {}
    for split in {split for split, _ in files}:
        for role in ("images", "labels"):
            if (split, role) not in files:
                raise InputError(f"{folder}: has no IDX file of {split} {role} beside its partner")
        parts[split] = files[split, "images"], files[split, "labels"]
    parts = ordered(parts, folder)
    class_list = find_class_list(classes, folder)
    inputs = tuple(path for pair in parts.values() for path in pair) + ((class_list,) if class_list else ())
    return Found(kind=KIND, path=folder, inputs=inputs, read=lambda: _read(folder, parts, class_list))


def _read(folder: Path, parts: dict[str, tuple[Path, Path]], class_list: Path | None) -> Source:
    images: dict[str, np.ndarray] = {}
    labels: list[np.ndarray] = []
    for split, (image_path, label_path) in parts.items():
        pixels = read_idx(image_path)
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
            raise InputError(f"{image_path}: holds {pixels.dtype} values of shape {pixels.shape}, not images of bytes")
        images[split] = channels_last(pixels, image_path)
        labels.append(flat_labels(read_idx(label_path), label_path))
        if len(labels[-1]) != len(pixels):
            raise InputError(
                f"{label_path}: {len(labels[-1]):,} labels for {len(pixels):,} images in {image_path.name}"
            )
    splits = spans({split: len(part) for split, part in images.items()}, folder)

    def locate(i: int) -> str:
        split = next(name for name, (_, stop) in splits.items() if i < stop)
        return f"{parts[split][1]}: label {i - splits[split][0]}"

    names = read_class_list(class_list) if class_list else None
    labelling = index_labels(np.concatenate(labels), names, locate)
    notes = (f"class names from {class_list}",) if class_list else ()
    return Source(
        kind=KIND,
        path=folder,
        classes=labelling.classes,
        labels=labelling.labels,
        splits=splits,
        images=join_images(images, folder),
        notes=notes + labelling.notes,
    )


def read_idx(path: Path) -> np.ndarray:
    """Return the array of an IDX file, packed with gzip or not, in the machine's byte order.

    Raises:
        InputError: the file cannot be read, is no IDX file, or is shorter or longer than its header says.
    """
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as stream:
            magic = stream.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0:
                raise InputError(f"{path}: is no IDX file (it starts with {magic.hex(' ') or 'nothing'})")
            header = stream.read(4 * magic[3])
            shape = tuple(np.frombuffer(header[: len(header) // 4 * 4], dtype=">u4").tolist())
            dtype = np.dtype(_TYPES[magic[2]])
            size = math.prod(shape) * dtype.itemsize
            content = _read_up_to(stream, size if len(shape) == magic[3] else 0)
            if len(shape) < magic[3] or len(content) < size:
                raise InputError(
                    f"{path}: is cut off: its header promises shape {shape}, {size:,} bytes, "
                    f"of which {len(content):,} are there; get it again"
                )
            if stream.read(1):
                raise InputError(f"{path}: is longer than its header says (shape {shape}); get it again")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: is a damaged gzip file ({error}); get it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return np.frombuffer(content, dtype=dtype).astype(dtype.newbyteorder("="), copy=False).reshape(shape)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _read_up_to(stream: _Readable, size: int) -> bytearray:
    """Return at most `size` bytes, read by blocks so that a wrong header cannot make it ask for all memory."""
    content = bytearray()
    while len(content) < size and (block := stream.read(min(size - len(content), _BLOCK_BYTES))):
        content += block
    return content
