"""The parts (splits) of a data set: what people call them, and how they are laid end to end."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from flatout.data.source import SPLITS
from flatout.errors import InputError

T = TypeVar("T")

_WORDS = {
    "train": "train",
    "training": "train",
    "trn": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
    "testing": "test",
    "t10k": "test",
}


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a file, folder or array name: `Train_Labels` is `["train", "labels"]`."""
    return re.findall(r"[a-z0-9]+", name.lower())


def split_of(name: str) -> str | None:
    """Return the split that a whole name means (`Training_Set` is `train`), or None."""
    words = [word.removesuffix("set") or "set" for word in words_of(name)]
    words = [word for word in words if word not in ("set", "data", "images", "split")]
    return _WORDS.get(words[0]) if len(words) == 1 else None


def split_within(name: str) -> str | None:
    """Return the split named by one word of a name (`desc_train` is `train`), or None when no word or several do."""
    found = {_WORDS[word] for word in words_of(name) if word in _WORDS}
    return found.pop() if len(found) == 1 else None


def ordered(parts: Mapping[Any, T], where: object) -> dict[str, T]:
    """Return the parts in the order train, valid, test.

    Raises:
        InputError: there is no training part.
    """
    if "train" not in parts:
        raise InputError(f"{where}: has {' and '.join(parts)} but no training part; name one 'train'")
    return {name: parts[name] for name in SPLITS if name in parts}


def spans(counts: Mapping[str, int], where: object) -> dict[str, tuple[int, int]]:
    """Return name -> (start, stop) of parts laid end to end.

    Raises:
        InputError: a part is there but empty.
    """
    bounds: dict[str, tuple[int, int]] = {}
    start = 0
    for name, count in counts.items():
        if count == 0:
            raise InputError(f"{where}: the {name} part holds no images; fill it or leave it out")
        bounds[name] = (start, start + count)
        start += count
    return bounds


def join_images(parts: Mapping[str, np.ndarray], where: object) -> np.ndarray:
    """Return the images [N, H, W, C] of all parts end to end; a single part is returned as it is, without a copy.

    Raises:
        InputError: the images of the parts differ in size.
    """
    shapes = {name: images.shape[1:] for name, images in parts.items()}
    if len(set(shapes.values())) > 1:
        sizes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        raise InputError(f"{where}: the images differ in size (height x width x channels: {sizes}); make them equal")
    images = list(parts.values())
    return images[0] if len(images) == 1 else np.concatenate(images)
