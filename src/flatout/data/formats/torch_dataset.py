"""Data sets of torch and Hugging Face, in Python, read once into an array."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flatout.data.formats.npy import by_split, is_array
from flatout.data.pixels import UNIT, channels_last, to_uint8
from flatout.data.source import Source, assemble
from flatout.errors import InputError

KIND = "torch data sets"
# Interpolation in floats may leave 0..1 by this much.
_TOLERANCE = 1e-3
_READ_TWICE = 16
_FIRST_GUESS = 1024
_RANDOM = (
    "items of the {name} data set differ each time they are read, so its transform is random. flatout reads each item "
    "once: the random changes stay the same in every epoch. Take random transforms out of the data set, and use "
    "augment= or transform= instead, which change images anew in every epoch"
)


# Where an item is a dict: the names of its image and its label, in the order in which they are tried.
_IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x")
_LABEL_KEYS = ("label", "labels", "target", "targets", "y", "fine_label", "class")


def is_dataset(value: object) -> bool:
    """Whether a value is a data set, with a length and items or iterable, and no array, mapping or tuple."""
    has_items = _is_map_style(value) or hasattr(value, "__iter__")
    return has_items and not is_array(value) and not isinstance(value, (Mapping, tuple, str, bytes))


def _is_map_style(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def from_dataset(data: object, task: str = "auto") -> Source:
    """Return the source of data sets whose items are (image, label), or dicts of these; every item is read once.

    A data set has a length and items, or is iterated once to its end.

    An image is a PIL image, or uint8, uint16 or float in 0..1 as an array [H, W] or [H, W, C], or as a tensor [H, W] or
    [C, H, W].
    The first items are read again to detect a random transform, which becomes a note. Labels are as
    `npy.from_arrays` takes them. `data` is a data set, or a tuple (train[, valid], test) or a dict by split of them.
    """
    parts = by_split(data, is_dataset, "(images, labels) as arrays, or a data set (with len() and [i], or iterable)")
    splits, names = {name: _read(part, name) for name, part in parts.items()}, _class_names(parts["train"])
    parts = {name: part for name, part in parts.items() if _is_map_style(part)}
    notes = tuple(_RANDOM.format(name=name) for name, part in parts.items() if _is_random(part, splits[name][0]))
    return assemble(KIND, None, splits, names=names, notes=notes, task=task)


def _read(dataset: Any, name: str) -> tuple[np.ndarray, list[Any]]:
    """Return the images [N, H, W, C] and the labels of a data set as its items give them."""
    images = np.empty((0, 1, 1, 1), dtype=np.uint8)
    labels: list[Any] = []
    for i, item in enumerate(_items(dataset)):
        where = f"data: {name}: item {i}"
        image, label = _pair(item, where)
        image = _to_pixels(image, where)
        if i == 0:
            images = np.empty((_length(dataset), *image.shape), dtype=image.dtype)
        if image.dtype != images.dtype:
            bits = [8 * array.itemsize for array in (image, images)]
            raise InputError(f"{where} has {bits[0]} bits per channel where item 0 has {bits[1]}; make them alike")
        if image.shape != images.shape[1:]:
            size, first = ("x".join(map(str, shape)) for shape in (image.shape, images.shape[1:]))
            fix = "a Resize" if image.shape[:2] != images.shape[1:3] else "a conversion to RGB"
            raise InputError(
                f"{where} has height x width x channels {size} where item 0 has {first}; put {fix} into the data set"
            )
        if i == len(images):
            # Of a data set without a length; memory that is not written to is not used.
            images = np.concatenate([images, np.empty_like(images)])
        images[i] = image
        labels.append(np.asarray(label))
    if not labels:
        raise InputError(f"data: {name}: the data set is empty")
    return images[: len(labels)], labels


def _items(dataset: Any) -> Iterator[Any]:
    return (dataset[i] for i in range(len(dataset))) if _is_map_style(dataset) else iter(dataset)


def _length(dataset: Any) -> int:
    """Return the number of items, or a first guess."""
    return max(1, len(dataset)) if _is_map_style(dataset) else _FIRST_GUESS


def _pair(item: Any, where: str) -> tuple[Any, Any]:
    """Return image and label of an item."""
    if isinstance(item, Mapping):
        image, label = (next((key for key in keys if key in item), None) for keys in (_IMAGE_KEYS, _LABEL_KEYS))
        if image is None or label is None:
            missing, keys = ("image", _IMAGE_KEYS) if image is None else ("label", _LABEL_KEYS)
            raise InputError(
                f"{where} is a dict of {', '.join(map(str, item))}; name its {missing} one of {', '.join(keys)}"
            )
        return item[image], item[label]
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise InputError(f"{where} is a {type(item).__name__}; a pair (image, label), or a dict of both, is needed")
    return item[0], item[1]


def _is_random(dataset: Any, images: np.ndarray) -> bool:
    again = (_to_pixels(_pair(dataset[i], f"item {i}")[0], f"item {i}") for i in range(min(_READ_TWICE, len(images))))
    return any(not np.array_equal(image, images[i]) for i, image in enumerate(again))


def _to_pixels(image: Any, where: str) -> np.ndarray:
    """Return one image as uint8 or uint16 [H, W, C]."""
    if hasattr(image, "convert") and hasattr(image, "mode"):  # PIL
        if image.mode.startswith("I;16"):
            return np.asarray(image).astype(np.uint16)[..., None]
        if image.mode in ("I", "F"):
            raise InputError(f"{where} has 32 bits per pixel (mode {image.mode}); convert it to L, I;16 or RGB")
        grey = image.mode in ("1", "L", "LA")
        return np.asarray(image.convert("L" if grey else "RGB")).reshape(image.height, image.width, 1 if grey else 3)
    if not is_array(image):
        raise InputError(f"{where}: the image is a {type(image).__name__}; a PIL image, an array or a tensor is needed")
    is_tensor = hasattr(image, "detach")
    pixels = image.detach().cpu().numpy() if is_tensor else np.asarray(image)
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


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return `dataset.classes`, looked for inside wrappers such as `Subset` too, or None."""
    while dataset is not None:
        features = getattr(dataset, "features", None)
        labelled = [features[key] for key in _LABEL_KEYS if key in features] if isinstance(features, Mapping) else []
        # Those of Hugging Face name the classes of a column.
        names = getattr(labelled[0], "names", None) if labelled else getattr(dataset, "classes", None)
        if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
        dataset = getattr(dataset, "dataset", None)
    return None
