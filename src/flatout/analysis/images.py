"""Images of a data set: headers, names, labels, thumbnails, blank images, and model inputs.

Shape letters: N images of the data set, M of them, V views, H height, W width, C channels.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

import numpy as np

from flatout.config import Recipe
from flatout.config.settings import Size
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
# Height and width to which images are reduced to compare them, and the standard deviation below which one is blank.
COMPARED_SIZE, MIN_CONTRAST = 72, 4.0
# Blank files are searched for by bytes per pixel, this many at a time, until none is blank. The approximate size of a
# header. Bytes of arrays that are searched.
_BLANK_AT_ONCE, _MAX_BLANK, _HEADER_BYTES, _MAX_ARRAY_BYTES = 64, 1024, 1024, 2**30
# Files per task of a thread, and images of arrays reduced at once.
_FILES_AT_ONCE, _ARRAYS_AT_ONCE = 16, 500


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

    def figures(self) -> dict[str, Any]:
        """Return `widths` and `heights` (smallest, median, largest), `shapes` (height x width -> number), `modes`."""
        sides = np.stack([self.heights, self.widths], axis=1)[self.widths > 0]
        shapes, counts = np.unique(sides, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return {
            "widths": _range_of(sides[:, 1]),
            "heights": _range_of(sides[:, 0]),
            "shapes": {f"{shapes[i][0]}x{shapes[i][1]}": int(counts[i]) for i in order},
            "modes": self.modes,
        }


def format_sizes(figures: dict[str, Any]) -> list[str]:
    """Return the widths and heights of `Headers.figures` as lines of text."""
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


def reduce_file(file: ImageBytes | bytes, header: ImageHeader, size: Size = COMPARED_SIZE) -> np.ndarray:
    """Return an image of another size with its own channels and bits, [1, H, W, C]. Raises BadImage."""
    return decode_image(file, size=size, channels=header.channels, bits=header.bits, resize="squash")[None]


def reduce_arrays(images_NHWC: np.ndarray, size: Size = COMPARED_SIZE) -> Iterator[np.ndarray]:
    """Yield images of another size, some at a time, [.., H, W, C]."""
    how = {"channels": images_NHWC.shape[-1], "bits": 8 * images_NHWC.itemsize, "resize": "squash"}
    for start in range(0, len(images_NHWC), _ARRAYS_AT_ONCE):
        yield resize_images(images_NHWC[start : start + _ARRAYS_AT_ONCE], size=size, **how)


def survey(source: ImageDataset, report: Progress) -> tuple[Headers, list[int]]:
    """Return the headers of all images, and the indices of blank ones.

    Only files with the fewest bytes per pixel are decoded, to find blank ones.

    Raises:
        InputError: FLATOUT_MAX_PIXELS is not a number.
    """
    if source.files is None:
        assert source.images is not None
        some = source.images[: max(1, _MAX_ARRAY_BYTES // source.images[:1].nbytes)]
        are_blank = np.concatenate([_are_blank(part) for part in reduce_arrays(some)])
        return headers_of_arrays(source.images), np.flatnonzero(are_blank).tolist()
    files, blank = source.files, []
    headers, bytes_per_pixel = scan(files, _read_header, report)
    candidates = sorted(bytes_per_pixel, key=lambda i: bytes_per_pixel[i])[:_MAX_BLANK]
    with ThreadPoolExecutor(usable_cores()) as pool:
        for start in range(0, len(candidates), _BLANK_AT_ONCE):
            some = candidates[start : start + _BLANK_AT_ONCE]
            are_blank = list(pool.map(lambda i: _is_blank_file(files[i]), some))
            blank += [i for i, is_blank in zip(some, are_blank, strict=True) if is_blank]
            if not any(are_blank):
                break
    return headers, blank


def _read_header(file: ImageBytes) -> tuple[ImageHeader, float]:
    """Return the header and the bytes per pixel, without reading more of a file."""
    content = file if isinstance(file, Path) else read_file(file)
    header = read_header(content)
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return header, max(0, size - _HEADER_BYTES) / (header.width * header.height)


def _is_blank_file(file: ImageBytes) -> bool:
    try:
        content = read_file(file)
        return bool(_are_blank(reduce_file(content, read_header(content)))[0])
    except BadImage:  # one that is damaged after its header
        return False


def _are_blank(images_NHWC: np.ndarray) -> np.ndarray:
    """Whether images have one colour, bool [N]; many 16-bit images use only a part of their range."""
    images = images_NHWC.astype(np.float32)
    if images_NHWC.dtype == np.uint16:
        images *= 255 / np.maximum(images.max(axis=(1, 2, 3), keepdims=True), 1)
    return images.std(axis=(1, 2)).max(axis=1) < MIN_CONTRAST


def thumbnails(source: ImageDataset, indices: Sequence[int]) -> list[np.ndarray | None]:
    """Return thumbnails uint8 [H, W, 1 or 3] with the images' aspect ratios; None for unreadable ones."""

    def fitting(height: int, width: int) -> tuple[int, int]:
        scale = min(1.0, THUMBNAIL_PIXELS / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def small(index: int) -> np.ndarray | None:
        if source.files is None:
            assert source.images is not None
            image = np.asarray(source.images[index : index + 1])
            return visible(next(reduce_arrays(image, fitting(*image.shape[1:3]))))[0]
        try:
            content = read_file(source.files[index])
            header = read_header(content)
            return visible(reduce_file(content, header, fitting(header.height, header.width)))[0]
        except BadImage:
            return None

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(small, indices))


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


def label_of(source: ImageDataset, index: int, *, empty: str = "none") -> str:
    """Return the label of an image in words; `empty` for a multi-label image without classes."""
    label = source.labels[index]
    if source.task == "regression":
        return f"{label:g}"
    if source.task == "multi-label":
        return "|".join(source.classes[i] for i in label.nonzero()[0]) or empty
    return source.classes[label]


def label_figures(source: ImageDataset) -> dict[str, Any]:
    """Return `images` of each split, `counts` by class, and of a regression `numbers`: smallest, median, largest."""
    numbers = {}
    if source.task == "regression":
        values = {split: sorted(source.labels[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
        numbers = {split: (part[0], median_low(part), part[-1]) for split, part in values.items()}
    return {
        "images": {split: stop - start for split, (start, stop) in source.splits.items()},
        "numbers": numbers,
        "counts": {split: source.class_counts(split) for split in source.splits},
    }


def stored(source: ImageDataset, indices: Sequence[int], recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored form of readable images, [M, H, W, C], as in a pack, and their indices.

    Raises:
        InputError: the channels of arrays are not those of the recipe.
    """
    bits = recipe.data.bits or bits_of(source)
    how = {"size": recipe.stored_sides, "channels": recipe.channels, "resize": recipe.data.resize, "bits": bits}
    if source.files is None:
        assert source.images is not None
        return resize_images(source.images[list(indices)], **how), np.array(indices, np.int64)
    files = source.files

    def decode(index: int) -> np.ndarray | None:
        try:
            return decode_image(files[index], **how)
        except BadImage:
            return None

    with ThreadPoolExecutor(usable_cores()) as pool:
        decoded = list(pool.map(decode, indices))
    kept = [i for i, image in zip(indices, decoded, strict=True) if image is not None]
    images = [image for image in decoded if image is not None]
    empty = np.empty((0, *recipe.stored_sides, recipe.channels), np.uint8)
    return np.stack(images) if images else empty, np.array(kept, np.int64)


def augmented(source: ImageDataset, indices: np.ndarray, recipe: Recipe, epochs: Sequence[int]) -> np.ndarray:
    """Return augmented readable training images in V epochs, uint8 [M, V, H, W, 1 or 3].

    The recipe has a mean and a standard deviation; sample i is the i-th training image.
    """
    import torch
    from torch.nn.functional import interpolate

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
        if (size := augment.training_size(recipe, epoch)) != recipe.image_sides:
            batch = interpolate(interpolate(batch, size=size, mode="area"), size=recipe.image_sides)
        views.append((batch.permute(0, 2, 3, 1) * std + mean).numpy())
    shown = np.stack(views, axis=1) * (1.0 if images.itemsize == 1 else 65535 / max(1, int(images.max(initial=0))))
    return visible((shown * 255).round().clip(0, 255).astype(np.uint8))
