"""JSON triples: a list of three [images, labels] pairs (train, validation, test), each image a flat list of numbers."""

import gzip
import json
import math
import re
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from flatout.data.labels import find_class_list, flat_labels, index_labels, read_class_list
from flatout.data.parts import join_images, spans
from flatout.data.pixels import to_uint8, value_range
from flatout.data.source import SPLITS, Found, Source
from flatout.errors import InputError

KIND = "JSON triples"
SUFFIXES = (".json", ".json.gz")
_CHUNK_CHARACTERS = 1 << 20
_BLOCK_IMAGES = 1000
_SPACE = re.compile(r"[ \t\r\n]*")
_LAYOUT = "three pairs [images, labels] for train, validation and test are expected"


def find(path: Path, classes: str) -> Found | None:
    """Return the JSON triples that a file is, by its name, or None."""
    if not path.name.lower().endswith(SUFFIXES):
        return None
    class_list = find_class_list(classes, path.parent)
    inputs = (path, class_list) if class_list else (path,)
    return Found(kind=KIND, path=path, inputs=inputs, read=lambda: _read(path, class_list))


def _read(path: Path, class_list: Path | None) -> Source:
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if is_packed else path.open(encoding="utf-8") as text:
            images, labels = _read_parts(path, _Scanner(path, text))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: is a damaged gzip file ({error}); get it again") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    splits = spans({name: len(part) for name, part in images.items()}, path)

    def locate(i: int) -> str:
        split = next(name for name, (_, stop) in splits.items() if i < stop)
        return f"{path}: label {i - splits[split][0]} of {split}"

    names = read_class_list(class_list) if class_list else None
    labelling = index_labels(flat_labels(np.array(labels), path), names, locate)
    notes = (f"class names from {class_list}",) if class_list else ()
    return Source(
        kind=KIND,
        path=path,
        classes=labelling.classes,
        labels=labelling.labels,
        splits=splits,
        images=join_images(images, path),
        notes=notes + labelling.notes,
    )


class _Scanner:
    """Reads JSON text piece by piece and holds little more than the piece, as a whole set in Python floats is huge."""

    def __init__(self, path: Path, text: IO[str]) -> None:
        self._path = path
        self._text = text
        self._buffer = ""
        self._at = 0
        self._decode = json.JSONDecoder().raw_decode

    def _more(self) -> bool:
        chunk = self._text.read(_CHUNK_CHARACTERS)
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def peek(self) -> str:
        """Return the next character that is no space, "" at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def take(self, mark: str, where: str) -> None:
        """Step over one character.

        Raises:
            InputError: another is there.
        """
        found = self.peek()
        if found != mark:
            what = repr(found) if found else "its end"
            raise InputError(f"{self._path}: {where}: {what} where {mark!r} is expected; {_LAYOUT}")
        self._at += 1

    def take_if(self, mark: str) -> bool:
        """Step over one character if it is next."""
        is_next = self.peek() == mark
        self._at += is_next
        return is_next

    def take_list(self, where: str) -> list[Any]:
        """Return the next value, a list without lists in it.

        Raises:
            InputError: it is no list, or no JSON.
        """
        if self.peek() != "[":
            self.take("[", where)
        searched = self._at
        while self._buffer.find("]", searched) < 0:
            searched = len(self._buffer) - self._at
            if not self._more():
                raise InputError(f"{self._path}: {where}: the file ends in the middle; get it again")
        try:
            value, self._at = self._decode(self._buffer, self._at)
        except json.JSONDecodeError as error:
            raise InputError(f"{self._path}: {where}: is no JSON: {error.msg}; {_LAYOUT}") from None
        return value


def _read_parts(path: Path, scanner: _Scanner) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Return the images [N, side, side, 1] of each part and all labels in a row."""
    images: dict[str, np.ndarray] = {}
    labels: list[Any] = []
    scale = None
    scanner.take("[", "start")
    for number, split in enumerate(SPLITS):
        if number:
            scanner.take(",", f"after {number} of 3 parts")
        scanner.take("[", split)
        scanner.take("[", f"{split} images")
        blocks = _read_images(path, scanner, split)
        scanner.take(",", f"after the {split} images")
        part_labels = scanner.take_list(f"{split} labels")
        if not all(isinstance(label, (int, float, str)) for label in part_labels):
            raise InputError(f"{path}: {split} labels: each must be one number or name")
        scanner.take("]", f"after the {split} labels")
        count = sum(map(len, blocks))
        if len(part_labels) != count:
            raise InputError(f"{path}: {split} has {count:,} images but {len(part_labels):,} labels; make them equal")
        if not blocks:
            raise InputError(f"{path}: the {split} part holds no images")
        # The training part alone decides the scale; a part of few dark images could look like another.
        scale = scale or value_range(min(b.min() for b in blocks), max(b.max() for b in blocks), path, signed=True)
        side = math.isqrt(blocks[0].shape[1])
        pixels = [to_uint8(blocks.pop(0), scale, f"{path}: {split}") for _ in range(len(blocks))]
        images[split] = np.concatenate(pixels).reshape(-1, side, side, 1)
        labels += part_labels
    scanner.take("]", "after 3 parts")
    if scanner.peek():
        raise InputError(f"{path}: goes on after the list; {_LAYOUT}")
    return images, labels


def _read_images(path: Path, scanner: _Scanner, split: str) -> list[np.ndarray]:
    """Return the images of a part as float32 blocks [n, length]."""
    blocks: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    length = 0
    if scanner.take_if("]"):
        return blocks
    while True:
        number = len(blocks) * _BLOCK_IMAGES + len(rows)
        where = f"{split} image {number}"
        values = scanner.take_list(where)
        length = length or len(values)
        if len(values) != length or math.isqrt(length) ** 2 != length or not length:
            need = f"the {length} of image 0" if number else "a square number, such as 784 for 28x28"
            raise InputError(f"{path}: {where} has {len(values)} numbers instead of {need}")
        try:
            rows.append(np.array(values, dtype=np.float32))
        except (TypeError, ValueError):
            raise InputError(f"{path}: {where} holds something else than numbers") from None
        has_next = scanner.take_if(",")
        if len(rows) == _BLOCK_IMAGES or not has_next:
            blocks.append(np.stack(rows))
            rows = []
        if not has_next:
            scanner.take("]", f"after {where}")
            return blocks
