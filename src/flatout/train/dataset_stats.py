"""Statistics of the data, the device and the time that a generated recipe is based on."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flatout.config import with_settings
from flatout.config.settings import Size, collapse_size, shown, sides
from flatout.data.decode import ImageBytes
from flatout.data.source import DataSource, ImageDataset
from flatout.utils.errors import InputError

# Image sizes to choose from; on a CPU, 128 pixels keep an epoch of a few thousand images within a minute.
SIZES = (32, 64, 96, 128, 160, 224)
LARGEST_ON_CPU, LARGEST_ON_GPU = 128, 224
# Colour images with at least this many pixels per side are considered photos.
PHOTO = 64
# Images have one shape if the ratios of nine in ten differ from the median by at most this factor. Images within the
# second factor of a square are squashed to one.
ONE_SHAPE, NEARLY_SQUARE = 1.05, 1.2
# Squashing changes images more than cropping where more than one in ten is longer than this.
TOO_LONG = 2.0
# Sides of images that are not square are multiples of the stride of networks for photos; smaller for small images.
STRIDE, STRIDE_FROM, SMALL_STRIDE = 32, 96, 4


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """What a generated recipe depends on: the data, the device, and the time.

    Attributes:
        size: the training size; side: that of a square with as many pixels; shape: the reason for the shape.
        resize: `data.resize`; why_resize: the reason, empty if all images have one size.
        channels: 1 for grey, 3 for colour, else the number of bands.
        task: the task of the labels.
        ratio: width / height; 1 if images differ in shape or are nearly square.
        images, classes: their number in training; every: the number of images of all splits.
        balance: the ratio of the largest class to the smallest.
        accelerated: whether training uses an accelerator.
        seconds: the time budget, or None. ends: its end, by time.perf_counter.
        is_size_given: whether the user has chosen the size.
    """

    size: Size
    side: int
    shape: str
    resize: str
    why_resize: str
    channels: int
    task: str
    ratio: float
    images: int
    every: int
    classes: int
    balance: float
    accelerated: bool
    seconds: float | None
    ends: float | None
    is_size_given: bool = False

    @property
    def is_photo(self) -> bool:
        """Whether the images are considered photos."""
        return self.channels == 3 and self.side >= PHOTO

    @property
    def suits_backbones(self) -> bool:
        """Whether networks pre-trained on photos suit the images: photos, and large grey images."""
        return self.channels in (1, 3) and self.side >= PHOTO

    @property
    def left(self) -> float | None:
        """Remaining seconds of the time budget, or None."""
        return None if self.ends is None else self.ends - time.perf_counter()

    def of_size(self, image_size: Any) -> "DatasetStats":
        """Return the statistics with the image size that the user or the weights determine."""
        size = with_settings({"image_size": image_size}).image_size
        return replace(self, size=size, side=side_of(size), is_size_given=True)

    def why_size(self, size: Size) -> str:
        """Return the explanation of an image size."""
        colour = {1: "grey", 3: "colour"}.get(self.channels, f"{self.channels} channels")
        return f"image_size = {shown(size)}, {colour}: {self.shape}"

    def by_images(self, table: Sequence[tuple[int, int]]) -> int:
        """Look up a table entry by the number of images."""
        return next(value for limit, value in table if self.images < limit)


def measure_dataset(
    found: DataSource | ImageDataset,
    *,
    accelerated: bool,
    seconds: float | None = None,
    began: float | None = None,
) -> DatasetStats:
    """Measure the data; the image size suits the device. `began` is the start of the time budget.

    Raises:
        InputError: none of the sampled images can be read, or they differ in their channels.
    """
    largest, is_pack, resize, why = LARGEST_ON_GPU if accelerated else LARGEST_ON_CPU, False, "squash", ""
    if isinstance(found, DataSource) and found.kind == "pack":
        from flatout.data.pack import open_pack

        source = pack = open_pack(found.path, verify=False)
        is_pack, resize = True, pack.resize
    else:
        source = found if isinstance(found, ImageDataset) else found.read()
    if source.images is not None:
        height, width, channels = source.images.shape[1:]
        side, ratio, pixels = max(height, width), width / height, height * width
        shape = f"the images are {height}x{width}"
    else:
        side, pixels, ratio, channels, resize, why = _shape_of_files(source.files or ())
        shape = f"the median of the images' shorter sides is {side} pixels"
    is_square = 1 / NEARLY_SQUARE < ratio < NEARLY_SQUARE
    if source.images is not None and (side <= largest or is_pack):
        size = collapse_size((source.images.shape[1], source.images.shape[2]))
    elif is_square:
        # The largest size that does not enlarge most images.
        size = max((usual for usual in SIZES if usual <= min(side, largest)), default=side)
    else:
        size = of_shape(min(math.sqrt(pixels), largest), ratio)
    start, stop = source.splits["train"]
    counts = np.ones(1)
    if source.task == "single-label":
        counts = np.bincount(source.labels[start:stop], minlength=len(source.classes))
    return DatasetStats(
        size=size,
        side=side_of(size),
        shape=shape,
        resize=resize,
        why_resize=why,
        channels=channels,
        task=source.task,
        ratio=1.0 if is_square else ratio,
        images=stop - start,
        every=len(source.labels),
        classes=len(source.classes),
        balance=float(counts.max() / max(1, counts[counts > 0].min())),
        accelerated=accelerated,
        seconds=seconds,
        ends=None if seconds is None else (time.perf_counter() if began is None else began) + seconds,
    )


def side_of(size: Size) -> int:
    """Return the side of a square with as many pixels."""
    return round(math.sqrt(math.prod(sides(size))))


def of_shape(side: float, ratio: float) -> tuple[int, int]:
    """Return height and width with about side * side pixels and width / height about `ratio`."""
    stride, longer_by = STRIDE if side >= STRIDE_FROM else SMALL_STRIDE, max(ratio, 1 / ratio)
    shorter = stride * max(1, round(side / math.sqrt(longer_by) / stride))
    longer = stride * round(shorter * longer_by / stride)
    return (shorter, longer) if ratio > 1 else (longer, shorter)


def _shape_of_files(files: Sequence[ImageBytes]) -> tuple[int, float, float, int, str, str]:
    """Return the typical shorter side, number of pixels, width / height, and number of channels.

    The ratio is 1 if images differ in shape. Also return `data.resize` and its reason.
    """
    from flatout.data.decode import read_headers

    headers = read_headers(files)
    if not headers:
        raise InputError(f"none of the images sampled can be read, such as {files[0]}; flatout check says why")
    channels = {header.channels for header in headers}
    if len(channels) > 1 and channels != {1, 3}:
        found = " and ".join(map(str, sorted(channels)))
        raise InputError(f"{files[0]} and others: some images have {found} channels; give all of them as many")
    side = int(np.median([min(header.width, header.height) for header in headers]))
    ratios = np.array([header.width / header.height for header in headers])
    usual, lengths = float(np.median(ratios)), np.maximum(ratios, 1 / ratios)
    pixels = float(np.median([header.width * header.height for header in headers]))
    ratio, resize = 1.0, "squash"
    if np.mean(np.abs(np.log(ratios / usual)) <= math.log(ONE_SHAPE)) >= 0.9:
        shape = "are square" if f"{usual:.2f}" == "1.00" else f"have one shape, {usual:.2f} times as wide as high"
        ratio, why = usual, f"nearly all images {shape}"
    elif np.mean(lengths > TOO_LONG) > 0.1:
        resize, why = "crop", f"more than one in ten images is longer than {TOO_LONG:g}:1; squashing would distort them"
    else:
        why = f"shapes differ, but nine in ten images are not longer than {TOO_LONG:g}:1; all of each image is kept"
    return side, pixels, ratio, max(channels), resize, why
