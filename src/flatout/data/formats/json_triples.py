"""JSON triples: a list of three [images, labels] pairs (train, validation, test), each image a flat list of numbers."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.formats.idx import open_maybe_compressed
from flatout.data.pixels import to_uint8, value_range
from flatout.data.source import DataRef, Source, assemble
from flatout.data.splits import SPLITS
from flatout.errors import InputError
from flatout.recipe import Data

KIND = "JSON triples"
ABOUT = {
    KIND: ("the `.json` or `.json.gz`", "three `[images, labels]` pairs: train, valid, test"),
}
SUFFIXES = (".json", ".json.gz")
_BLOCK_IMAGES = 1000
_LAYOUT = "three pairs [images, labels] for train, validation and test are expected"


def recognise(path: Path, class_list: Path | None, options: Data) -> DataRef | None:
    """Return the JSON triples in a file, by its name, or None."""
    if not path.name.lower().endswith(SUFFIXES) or not path.is_file():
        return None
    return DataRef(kind=KIND, path=path, inputs=(path,), read=lambda: read(path, class_list))


def read(path: Path, class_list: Path | None) -> Source:
    """Return the source of a file, parsed as a stream: as Python floats, a whole set takes gigabytes."""
    import ijson

    try:
        with open_maybe_compressed(path) as stream:
            # The third level holds lists (images) and plain values (labels) in turn.
            values = ijson.items(stream, "item.item.item", use_float=True, buf_size=1 << 20)
            splits = _convert(path, _parts(path, values))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except ijson.JSONError as error:
        reason = str(error).partition("\n")[0].strip()
        raise InputError(f"{path}: the file ends in the middle or is no JSON: {reason}; {_LAYOUT}") from None
    if len(splits) != 3:
        fix = "a list of JSON objects is read from a .jsonl file, one on each line"
        raise InputError(f"{path}: holds {len(splits)} pairs with images; {_LAYOUT}{'' if splits else f'; {fix}'}")
    return assemble(KIND, path, splits, class_list=class_list)


def _convert(path: Path, parts: "Iterable[_Part]") -> dict[str, tuple[np.ndarray, list[Any]]]:
    """Return split -> (images [N, side, side, 1], labels)."""
    splits: dict[str, tuple[np.ndarray, list[Any]]] = {}
    scale = None
    for part in parts:
        if part.name in splits:
            raise InputError(f"{path}: goes on after the third pair; {_LAYOUT}")
        if not part.blocks:
            raise InputError(f"{path}: {part.name}: labels before the first image; {_LAYOUT}")
        # The training images decide the scale: a few dark images could look like another.
        extremes = [(float(block.min()), float(block.max())) for block in part.blocks]
        scale = scale or value_range(min(extremes)[0], max(high for _, high in extremes), path, signed=True)
        pixels = np.concatenate([to_uint8(block, scale, f"{path}: {part.name}") for block in part.blocks])
        side = math.isqrt(pixels.shape[1])
        splits[part.name] = (pixels.reshape(-1, side, side, 1), part.labels)
    return splits


class _Part:
    """One pair: images as float32 blocks [n, length], and labels."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.blocks: list[np.ndarray] = []
        self.labels: list[Any] = []
        self._rows: list[np.ndarray] = []
        self._length = 0

    def add(self, image: list[Any]) -> None:
        number = len(self.blocks) * _BLOCK_IMAGES + len(self._rows)
        where = f"{self.path}: {self.name} image {number}"
        self._length = self._length or len(image)
        if len(image) != self._length or math.isqrt(len(image)) ** 2 != len(image) or not image:
            need = f"the {self._length} of image 0" if number else "a square number, such as 784 for 28x28"
            raise InputError(f"{where} has {len(image)} numbers instead of {need}")
        try:
            self._rows.append(np.array(image, dtype=np.float32))
        except (TypeError, ValueError):
            raise InputError(f"{where} holds something other than numbers") from None
        if len(self._rows) == _BLOCK_IMAGES:
            self.end()

    def end(self) -> None:
        if self._rows:
            self.blocks.append(np.stack(self._rows))
            self._rows = []


def _parts(path: Path, values: Iterable[Any]) -> Iterator[_Part]:
    """Yield each pair when it is complete; an image after labels begins the next."""
    part = _Part(path, SPLITS[0])
    names = iter(SPLITS[1:])
    for value in values:
        if isinstance(value, list):
            if part.labels:
                part.end()
                yield part
                part = _Part(path, next(names, SPLITS[0]))
            part.add(value)
        elif not isinstance(value, (int, float, str)):
            raise InputError(f"{path}: {part.name}: {value!r} where an image or a label is expected; {_LAYOUT}")
        else:
            part.labels.append(value)
    part.end()
    if part.blocks:
        yield part
