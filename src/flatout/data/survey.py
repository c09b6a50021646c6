"""What the headers of all images of a data set say: sizes, modes, and images unlike the others, in little memory."""

import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.data import near
from flatout.data.decode import BadImage, decode_image, read_file, read_header
from flatout.data.image_bytes import ImageBytes
from flatout.data.pack import Progress
from flatout.data.pillow import STRICT_PILLOW
from flatout.data.resize import resize_images
from flatout.data.source import Source
from flatout.host import usable_cores

# Images are extreme with one side this many times the other, or as much larger or smaller than the median image.
EXTREME = 4.0
# Files are looked at in parts of this many, so that memory does not grow with their number.
_AT_ONCE = 512
# Files are decoded in the order of their bytes per pixel, so many at a time, until none of these is blank.
_BLANK_AT_ONCE, _MOST_BLANK = 64, 1024
# What the header of a file takes, and is no sign of content.
_HEADER_BYTES = 1024
# Of arrays, so many bytes of images are searched for blank ones.
_MOST_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """What is known of N images from their headers.

    Attributes:
        widths, heights: in pixels, int32 [N]; 0 where an image is unreadable.
        modes: Pillow's mode (L, RGB and so on), or bands and their type -> number of images, the most frequent first.
        unreadable: index -> reason.
        extreme: indices of images of an extreme shape or size, int64, the most extreme first.
        blank: indices of images that show nothing, int64; among files, those with the fewest bytes per pixel are
            decoded to find them.
    """

    widths: np.ndarray
    heights: np.ndarray
    modes: dict[str, int]
    unreadable: dict[int, str]
    extreme: np.ndarray
    blank: np.ndarray


def survey(source: Source, report: Progress) -> Survey:
    """Read the headers of all files; of arrays, the images themselves. Nothing else is decoded but likely blank ones.

    Raises:
        InputError: FLATOUT_MAX_PIXELS is no number.
    """
    if source.files is not None:
        return _survey_files(source, report)
    assert source.images is not None
    count, height, width, channels = source.images.shape
    mode = {(1, 1): "L", (3, 1): "RGB"}.get((channels, source.images.itemsize), f"{channels} x {source.images.dtype}")
    widths, heights = (np.full(count, side, np.int32) for side in (width, height))
    blank = _blank_arrays(source.images)
    nothing = np.empty(0, np.int64)
    return Survey(widths=widths, heights=heights, modes={mode: count}, unreadable={}, extreme=nothing, blank=blank)


def extremes(widths: np.ndarray, heights: np.ndarray) -> np.ndarray:
    """Return the indices of images with an extreme aspect ratio, or whose size is far from the median, int64.

    The most extreme come first. Sizes are roots of areas; images of size 0 are in neither.
    """
    is_readable = widths > 0
    if not is_readable.any():
        return np.empty(0, np.int64)
    sizes = np.sqrt(widths.astype(np.float64) * heights)
    usual = np.sort(sizes[is_readable])[(is_readable.sum() - 1) // 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        shape, size = np.abs(np.log(widths / heights)), np.abs(np.log(sizes / usual))
    most = np.where(is_readable, np.maximum(shape, size), 0.0)
    found = np.flatnonzero(most >= math.log(EXTREME) * (1 - 1e-12))
    return found[np.argsort(-most[found], kind="stable")]


def _survey_files(source: Source, report: Progress) -> Survey:
    assert source.files is not None
    files, count = source.files, len(source.files)
    widths, heights, bytes_per_pixel = np.zeros(count, np.int32), np.zeros(count, np.int32), np.full(count, np.inf)
    modes, unreadable = Counter[str](), dict[int, str]()
    with STRICT_PILLOW, ThreadPoolExecutor(usable_cores()) as pool:
        parts = (range(start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE))
        for part, looks in pool.map(lambda part: (part, [_look_at(files[i]) for i in part]), parts):
            for i, found in zip(part, looks, strict=True):
                if isinstance(found, str):
                    unreadable[i] = found
                    continue
                widths[i], heights[i], mode, size = found
                modes[mode] += 1
                bytes_per_pixel[i] = max(0, size - _HEADER_BYTES) / (found[0] * found[1])
            report.update(part.stop, count)
        blank = np.array(list(_blank_files(files, bytes_per_pixel, pool)), np.int64)
    return Survey(
        widths=widths,
        heights=heights,
        modes=dict(modes.most_common()),
        unreadable=unreadable,
        extreme=extremes(widths, heights),
        blank=blank,
    )


def _look_at(file: ImageBytes) -> tuple[int, int, str, int] | str:
    """Return width, height, mode and bytes of a file, or the reason why it is unreadable."""
    try:
        content = file if isinstance(file, Path) else read_file(file)
        header = read_header(content)
        size = content.stat().st_size if isinstance(content, Path) else len(content)
    except BadImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return header.width, header.height, header.mode, size


def _blank_files(files, bytes_per_pixel: np.ndarray, pool: ThreadPoolExecutor) -> Iterator[int]:
    most = min(_MOST_BLANK, int(np.isfinite(bytes_per_pixel).sum()))
    if not most:
        return
    candidates = np.argpartition(bytes_per_pixel, most - 1)[:most]
    candidates = candidates[np.argsort(bytes_per_pixel[candidates], kind="stable")].tolist()
    for start in range(0, most, _BLANK_AT_ONCE):
        some = candidates[start : start + _BLANK_AT_ONCE]
        is_blank = list(pool.map(_is_blank, (files[i] for i in some)))
        yield from (i for i, blank in zip(some, is_blank, strict=True) if blank)
        if not any(is_blank):
            return


def _is_blank(file: ImageBytes) -> bool:
    try:
        content = file if isinstance(file, Path) else read_file(file)
        header = read_header(content)
        how = {"channels": header.channels, "bits": header.bits, "resize": "squash"}
        return bool(_show_nothing(decode_image(content, size=near.SIZE, **how)[None])[0])
    except BadImage:  # one that is damaged behind its header
        return False


def _show_nothing(images_NHWC: np.ndarray) -> np.ndarray:
    """Return whether images are of one colour, bool [N]; of 16 bits, many use but a part of their range."""
    images = images_NHWC.astype(np.float32)
    if images_NHWC.dtype == np.uint16:
        images *= 255 / np.maximum(images.max(axis=(1, 2, 3), keepdims=True), 1)
    return images.std(axis=(1, 2)).max(axis=1) < near.LEAST_CONTRAST


def _blank_arrays(images: np.ndarray) -> np.ndarray:
    """Return the indices of blank images, of all or of as many from the start as a limit of bytes permits."""
    count = min(len(images), max(1, _MOST_BYTES // images[:1].nbytes))
    found = []
    for start in range(0, count, _AT_ONCE):
        part = resize_images(images[start : min(start + _AT_ONCE, count)], size=near.SIZE, channels=images.shape[-1],
                             resize="squash", bits=8 * images.itemsize)  # fmt: skip
        found += (start + np.flatnonzero(_show_nothing(part))).tolist()
    return np.array(found, np.int64)
