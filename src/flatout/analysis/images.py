"""Images of a data set: headers, names, labels, thumbnails, and model inputs.

Shape letters: N images of the data set, M of them, V views, H height, W width, C channels.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

import numpy as np

from flatout.config import Recipe
from flatout.data.build import bits_of
from flatout.data.cache import Progress
from flatout.data.decode import STRICT_PILLOW, ImageBytes, ImageHeader, decode_image, read_file, read_header
from flatout.data.pixels import BadImage, resize_images
from flatout.data.source import ImageDataset
from flatout.engine import augment
from flatout.report.html import SMOOTH_FROM_PIXELS, THUMBNAIL_PIXELS, thumbnail
from flatout.utils.files import printable
from flatout.utils.host import usable_cores
from flatout.utils.run_files import visible

T = TypeVar("T")

# Images are extreme if one side is this many times the other, or the size this many times the median or less.
EXTREME = 4.0
# Files per task of a thread.
_FILES_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Headers:
    """Sizes and modes of N images.

    Attributes:
        widths, heights: in pixels, int32 [N]; 0 for unreadable images.
        modes: Pillow's mode (L, RGB and so on), or bands and their type -> number of images, the most frequent first.
        unreadable: index -> reason.
    """

    widths: np.ndarray
    heights: np.ndarray
    modes: dict[str, int]
    unreadable: dict[int, str]

    def extreme(self) -> np.ndarray:
        """Return the indices of images with an extreme aspect ratio or size, int64, the most extreme first.

        Sizes are square roots of the area, compared with the median.
        """
        readable = np.flatnonzero(self.widths)
        if not len(readable):
            return readable
        widths, heights = (sides[readable].astype(np.float64) for sides in (self.widths, self.heights))
        sizes = np.sqrt(widths * heights)
        usual = np.quantile(sizes, 0.5, method="lower")
        deviation = np.maximum(np.abs(np.log(widths / heights)), np.abs(np.log(sizes / usual)))
        found = np.flatnonzero(deviation >= math.log(EXTREME) * (1 - 1e-12))
        return readable[found[np.argsort(-deviation[found], kind="stable")]]


def format_sizes(figures: Mapping[str, Any]) -> list[str]:
    """Return the widths and heights of `figures` as lines of text."""
    named = {"width: ": figures["widths"], "height:": figures["heights"]}
    return [f"{name} {s['smallest']} to {s['largest']} pixels, median {s['median']}" for name, s in named.items() if s]


def _range_of(values: np.ndarray) -> dict[str, int] | None:
    if not len(values):
        return None
    return {
        "smallest": int(values.min()),
        "median": int(np.quantile(values, 0.5, method="lower")),
        "largest": int(values.max()),
    }


def headers_of_arrays(images_NHWC: np.ndarray) -> Headers:
    """Return the headers that images in an array would have."""
    count, height, width, channels = images_NHWC.shape
    modes = {(1, 1): "L", (3, 1): "RGB"}
    mode = modes.get((channels, images_NHWC.itemsize), f"{channels} x {images_NHWC.dtype}")
    widths, heights = np.full(count, width, np.int32), np.full(count, height, np.int32)
    return Headers(widths=widths, heights=heights, modes={mode: count}, unreadable={})


def scan(
    files: Sequence[ImageBytes], inspect: Callable[[ImageBytes], tuple[ImageHeader, T]], report: Progress
) -> tuple[Headers, dict[int, T]]:
    """Inspect files on all cores. A file for which `inspect` raises BadImage or OSError is unreadable.

    Returns:
        The headers, and index -> the other result of `inspect`, in the order of the files.
    """

    def inspect_one(file: ImageBytes) -> tuple[ImageHeader, T] | str:
        try:
            return inspect(file)
        except BadImage as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    def inspect_part(part: range) -> list[tuple[ImageHeader, T] | str]:
        return [inspect_one(files[i]) for i in part]

    count = len(files)
    widths, heights = np.zeros(count, np.int32), np.zeros(count, np.int32)
    modes, unreadable, found = Counter[str](), dict[int, str](), dict[int, T]()
    parts = [range(start, min(start + _FILES_AT_ONCE, count)) for start in range(0, count, _FILES_AT_ONCE)]
    with STRICT_PILLOW, ThreadPoolExecutor(usable_cores()) as pool:
        for part, results in zip(parts, pool.map(inspect_part, parts), strict=True):
            for i, result in zip(part, results, strict=True):
                if isinstance(result, str):
                    unreadable[i] = result
                else:
                    header, found[i] = result
                    widths[i], heights[i] = header.width, header.height
                    modes[header.mode] += 1
            report.update(part.stop, count)
    return Headers(widths=widths, heights=heights, modes=dict(modes.most_common()), unreadable=unreadable), found


def read_headers(source: ImageDataset, report: Progress) -> Headers:
    """Return the headers of all images; files are not read further.

    Raises:
        InputError: FLATOUT_MAX_PIXELS is not a number.
    """
    if source.files is None:
        assert source.images is not None
        return headers_of_arrays(source.images)

    def read(file: ImageBytes) -> tuple[ImageHeader, None]:
        return read_header(file if isinstance(file, Path) else read_file(file)), None

    return scan(source.files, read, report)[0]


def _decoded(
    source: ImageDataset, indices: Sequence[int], how: Callable[..., dict[str, Any]]
) -> list[np.ndarray | None]:
    """Return images, [H, W, C], as `how(height, width, channels, bits)` says; None for unreadable ones."""

    def decode(index: int) -> np.ndarray | None:
        if source.files is None:
            assert source.images is not None
            image = np.asarray(source.images[index : index + 1])
            return resize_images(image, **how(*image.shape[1:], 8 * image.itemsize))[0]
        try:
            content = read_file(source.files[index])
            header = read_header(content)
            return decode_image(content, **how(header.height, header.width, header.channels, header.bits))
        except BadImage:
            return None

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(decode, indices))


def thumbnails(source: ImageDataset, indices: Sequence[int]) -> list[np.ndarray | None]:
    """Return thumbnails uint8 [H, W, 1 or 3] with the images' aspect ratios; None for unreadable ones."""

    def fitting(height: int, width: int, channels: int, bits: int) -> dict[str, Any]:
        scale = min(1.0, THUMBNAIL_PIXELS / max(height, width))
        size = max(1, round(height * scale)), max(1, round(width * scale))
        return {"size": size, "channels": channels, "bits": bits, "resize": "squash"}

    return [None if image is None else visible(image) for image in _decoded(source, indices, fitting)]


def tile(image_HWC: np.ndarray | None) -> dict[str, Any]:
    """Return an image for a page: a data URI, and whether it is enlarged without interpolation."""
    if image_HWC is None:
        return {"image": "", "tiny": False}
    return {"image": thumbnail(image_HWC), "tiny": max(image_HWC.shape[:2]) < SMOOTH_FROM_PIXELS}


def name_of(source: ImageDataset, index: int) -> str:
    """Return the name of an image: its file, below the folder of the data, or split[position] in an array."""
    if source.files is None:
        split = source.split_of(index)
        return f"{split}[{index - source.splits[split][0]}]"
    folder = source.path if source.path is None or source.path.is_dir() else source.path.parent
    return printable(str(source.files[index]).removeprefix(f"{folder}{os.sep}"))


def label_of(source: ImageDataset, index: int) -> str:
    """Return the label of an image in words."""
    label = source.labels[index]
    if source.task == "regression":
        return f"{label:g}"
    if source.task == "multi-label":
        return "|".join(source.classes[i] for i in label.nonzero()[0]) or "none"
    return source.classes[label]


def figures(source: ImageDataset, headers: Headers) -> dict[str, Any]:
    """Return what `check` and `look` both report of a data set.

    Returns:
        kind, path, task, notes: see `ImageDataset`.
        images: split -> number of images.
        counts: split -> class -> number of images; without classes in regression.
        numbers: split -> smallest, median and largest label of a regression; empty otherwise.
        widths, heights: smallest, median and largest in pixels, of the readable images; None without any.
        shapes: height x width, such as 480x640 -> number of images.
        modes: Pillow's mode (L, RGB, CMYK and so on), or bands and their type (5 x uint16) -> number of images.
    """
    numbers = {}
    if source.task == "regression":
        values = {split: sorted(source.labels[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
        numbers = {split: (part[0], median_low(part), part[-1]) for split, part in values.items()}
    sides = np.stack([headers.heights, headers.widths], axis=1)[headers.widths > 0]
    shapes, counts = np.unique(sides, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {
        "kind": source.kind,
        "path": None if source.path is None else str(source.path),
        "task": source.task,
        "images": {split: stop - start for split, (start, stop) in source.splits.items()},
        "numbers": numbers,
        "counts": {split: source.class_counts(split) for split in source.splits},
        "widths": _range_of(sides[:, 1]),
        "heights": _range_of(sides[:, 0]),
        "shapes": {f"{shapes[i][0]}x{shapes[i][1]}": int(counts[i]) for i in order},
        "modes": headers.modes,
        "notes": list(source.notes),
    }


def stored(source: ImageDataset, indices: Sequence[int], recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored form of readable images, [M, H, W, C], as in a pack, and their indices.

    Raises:
        InputError: the channels of arrays are not those of the recipe.
    """
    bits = recipe.data.bits or bits_of(source)
    how = {"size": recipe.stored_sides, "channels": recipe.channels, "resize": recipe.data.resize, "bits": bits}
    decoded = _decoded(source, indices, lambda *_: how)
    kept = [i for i, image in zip(indices, decoded, strict=True) if image is not None]
    images = [image for image in decoded if image is not None]
    empty = np.empty((0, *recipe.stored_sides, recipe.channels), np.uint8)
    return np.stack(images) if images else empty, np.array(kept, np.int64)


def augmented(source: ImageDataset, indices: np.ndarray, recipe: Recipe, epochs: Sequence[int]) -> np.ndarray:
    """Return augmented readable training images in V epochs, uint8 [M, V, H, W, 1 or 3].

    The recipe has a mean and a standard deviation; sample i is the i-th training image.
    """
    import torch

    mean, std = (torch.tensor(values) for values in (recipe.data.mean, recipe.data.std))
    start, stop = source.splits["train"]
    images, _ = stored(source, indices.tolist(), recipe)

    def apply(images: np.ndarray, tables: dict[str, np.ndarray], positions: np.ndarray) -> "torch.Tensor":
        rows = {name: torch.from_numpy(table[positions]) for name, table in tables.items()}
        batch = torch.from_numpy(np.ascontiguousarray(images))
        return augment.apply(batch, rows, 1 / (255 * std), -mean / std, recipe.image_sides)

    views = []
    for epoch in epochs:
        tables = augment.epoch_transforms(recipe, epoch, stop - start) or {}
        partners, mix = tables.pop("partner", None), tables.pop("mix", None)
        batch = apply(images, tables, indices - start)
        if partners is not None and mix is not None:
            chosen = partners[indices - start].astype(np.int64)
            others, kept = stored(source, (chosen + start).tolist(), recipe)
            if len(kept) == len(indices):
                batch = augment.mix(batch, apply(others, tables, chosen), torch.from_numpy(mix[indices - start]))
        views.append((batch.permute(0, 2, 3, 1) * std + mean).numpy())
    shown = np.stack(views, axis=1) * (1.0 if images.itemsize == 1 else 65535 / max(1, int(images.max(initial=0))))
    return visible((shown * 255).round().clip(0, 255).astype(np.uint8))
