"""Image arrays: layout, range, bits, channels and size. One resize serves files and arrays.

Shape letters: N images, H height, W width, C channels.
"""

from typing import NamedTuple

import numpy as np

from flatout.config.settings import Size, sides
from flatout.utils.errors import InputError

BYTES = (0.0, 255.0)
WORDS = (0.0, 65535.0)
UNIT = (0.0, 1.0)
SIGNED = (-1.0, 1.0)
MIN_REDUCTION_LEFT = 1.3  # cheaper decoding is used only if the antialiased resize after it still reduces by this
TURNED = (5, 6, 7, 8)  # EXIF orientations of images whose rows are stored as columns
_BLOCK_IMAGES = 2**12  # converted to float at a time, to limit memory


class BadImage(ValueError):
    """A file that cannot be used as an image; the message is the reason, without the file's name."""


def channels_last(images: np.ndarray, where: object, channels: int = 0) -> np.ndarray:
    """Return a view [N, H, W, C] of images [N, H, W], [N, H, W, C] or [N, C, H, W].

    The channel axis is that of size 1, 3 or `channels` (if known), else the one without which the others are alike.
    """
    if images.ndim not in (3, 4) or min(images.shape[1:]) == 0:
        raise InputError(f"{where}: images of shape {images.shape}; give [N, H, W], [N, H, W, C] or [N, C, H, W]")
    if images.ndim == 3:
        return images[..., None]
    _, one, two, three = images.shape
    first, last = (length in (1, 3, channels) for length in (one, three))
    if not first and not last:
        if_first, if_last = max(two, three) / min(two, three), max(one, two) / min(one, two)
        first, last = if_first <= if_last, if_last <= if_first
    if first and last and images.shape[1:] != (1, 1, 1):
        raise InputError(f"{where}: images of shape {images.shape}: channels may be first or last; give [N, H, W]")
    return images if last else images.transpose(0, 2, 3, 1)


def value_range(low: float, high: float, where: object, *, signed: bool = False) -> tuple[float, float]:
    """Return the range of pixels from `low` to `high`: 0..1, 0..255 or (if `signed`) -1..1."""
    for bottom, top in (UNIT, SIGNED, BYTES) if signed else (UNIT, BYTES):
        if bottom <= low and high <= top:
            return bottom, top
    raise InputError(f"{where}: pixels run from {low:g} to {high:g}; scale them to 0..1 or 0..255")


def range_of(images: np.ndarray, where: object) -> tuple[float, float]:
    """Return the range of an array of images, by dtype or for floats by value; that of uint16 is always 0..65535."""
    if images.dtype.kind == "b":
        return UNIT
    if images.dtype.kind not in "iuf":
        raise InputError(f"{where}: images of type {images.dtype}; give uint8, uint16, or numbers in 0..1 or 0..255")
    if images.dtype == np.uint16:
        return WORDS
    if images.dtype == np.uint8 or images.size == 0:
        return BYTES
    found = value_range(float(images.min()), float(images.max()), where)
    return found if images.dtype.kind == "f" else BYTES


def to_pixels(images: np.ndarray, scale: tuple[float, float], where: object) -> np.ndarray:
    """Return uint16 images of the range 0..65535 unchanged, others converted by `to_uint8`."""
    if (scale == WORDS) != (images.dtype == np.uint16):
        wanted = "uint16" if scale == WORDS else "not uint16"
        raise InputError(f"{where}: images of type {images.dtype}, but those of training are {wanted}; make them alike")
    return images if scale == WORDS else to_uint8(images, scale, where)


def to_uint8(images: np.ndarray, scale: tuple[float, float], where: object) -> np.ndarray:
    """Return images scaled from the range to 0..255 and rounded; uint8 images are unchanged."""
    if images.dtype == np.uint8:
        return images
    low, high = scale
    pixels = np.empty(images.shape, dtype=np.uint8)
    for start in range(0, len(images), _BLOCK_IMAGES):
        block = images[start : start + _BLOCK_IMAGES].astype(np.float32)
        # The comparisons are false for NaN too.
        if not (block.min() >= low and block.max() <= high):
            raise InputError(
                f"{where}: pixels run from {block.min():g} to {block.max():g} among images {start} to "
                f"{start + len(block) - 1}, where {low:g}..{high:g} is expected"
            )
        scaled = (block - low) * (255.0 / (high - low))
        rounded = np.rint(scaled)
        if scale == BYTES and not np.array_equal(rounded, scaled):
            raise InputError(f"{where}: pixels in 0..255 must be whole numbers; scale them to 0..1 or round them")
        pixels[start : start + _BLOCK_IMAGES] = rounded
    return pixels


# Bits and channels


def with_bits(images: np.ndarray, bits: int, highest: int = 0) -> np.ndarray:
    """Return uint8 or uint16 images with 8 or 16 bits per pixel and channel; white stays white.

    Cameras and scanners often use 12 or 8 of 16 bits, so 16 are scaled by the bits in use, which the `highest` pixel of
    the data set tells, by default that of these images.
    """
    if images.dtype.itemsize * 8 == bits:
        return images
    if bits == 16:
        return images.astype(np.uint16) * np.uint16(257)
    top = next(top for top in (0xFF, 0xFFF, 0xFFFF) if (highest or images.max(initial=0)) <= top)
    return ((images.astype(np.uint32) * 255 + top // 2) // top).astype(np.uint8)


def with_channels(images_NHWC: np.ndarray, channels: int) -> np.ndarray:
    """Return images with grey repeated as colour, or colour as luma; raise BadImage for other conversions."""
    found = images_NHWC.shape[-1]
    if found == channels:
        return images_NHWC
    if (found, channels) == (1, 3):
        return np.repeat(images_NHWC, 3, axis=-1)
    if (found, channels) != (3, 1):
        raise BadImage(f"has {found} channel{'s' * (found > 1)}, but channels = {channels}")
    # ITU-R 601 luma in 16-bit fixed point, rounded: what Pillow computes.
    luma = images_NHWC.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
    return ((luma + 0x8000) >> 16).astype(images_NHWC.dtype)[..., None]


# Size


class Target(NamedTuple):
    """The wanted form of an image; see `decode.decode_image`."""

    height: int
    width: int
    channels: int
    resize: str
    bits: int

    def turned(self, orientation: int) -> "Target":
        """Return the target of an image that is not upright yet, given its EXIF orientation (1 is upright)."""
        return self._replace(height=self.width, width=self.height) if orientation in TURNED else self

    def used(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the used part of an image: all, or the largest centred part."""
        if self.resize != "crop":
            return 0, 0, height, width
        # The whole of one side, and as much of the other as the target's shape has.
        if height * self.width <= width * self.height:
            used = height, max(1, round(height * self.width / self.height))
        else:
            used = max(1, round(width * self.height / self.width)), width
        return (height - used[0]) // 2, (width - used[1]) // 2, *used

    def filled(self, height: float, width: float) -> tuple[int, int]:
        """Return the size that an image fills in the target: all of it, or less along one axis with padding."""
        if self.resize != "pad":
            return self.height, self.width
        if height * self.width <= width * self.height:
            return max(1, round(self.width * height / width)), self.width
        return self.height, max(1, round(self.height * width / height))


def resize_images(images_NHWC: np.ndarray, *, size: Size, channels: int, resize: str, bits: int = 8) -> np.ndarray:
    """Return decoded images as uint8 or uint16 [N, height, width, channels], resized; see `decode_image`."""
    return resized_to(images_NHWC, Target(*sides(size), channels, resize, bits))


def resized_to(images_NHWC: np.ndarray, target: Target) -> np.ndarray:
    images_NHWC = with_bits(with_channels(images_NHWC, target.channels), target.bits)
    top, left, height, width = target.used(*images_NHWC.shape[1:3])
    return placed_in(images_NHWC[:, top : top + height, left : left + width], target, height, width)


def placed_in(images_NHWC: np.ndarray, target: Target, height: float, width: float) -> np.ndarray:
    """Return images resized and, if they do not fill the target, centred on black.

    `height` and `width` are the extent of the content in pixels of the array: a JPEG of odd width, halved in the DCT,
    has a last column that is half empty.
    """
    filled = target.filled(height, width)
    resized = _interpolated(images_NHWC, *filled, height, width)
    if filled == (target.height, target.width):
        return resized
    images = np.zeros((len(resized), target.height, target.width, resized.shape[-1]), resized.dtype)
    top, left = (target.height - filled[0]) // 2, (target.width - filled[1]) // 2
    images[:, top : top + filled[0], left : left + filled[1]] = resized
    return images


def upright(image_HWC: np.ndarray, orientation: int) -> np.ndarray:
    if orientation in TURNED:
        image_HWC = image_HWC.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image_HWC = image_HWC[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image_HWC = image_HWC[::-1]
    return np.ascontiguousarray(image_HWC)


def _interpolated(images_NHWC: np.ndarray, rows: int, columns: int, height: float, width: float) -> np.ndarray:
    import torch

    if (rows, columns) == images_NHWC.shape[1:3] == (height, width):
        return np.ascontiguousarray(images_NHWC)
    is_wide = images_NHWC.dtype == np.uint16  # for which torch has no resize
    if is_wide:
        writable = images_NHWC.astype(np.float32)
    else:
        writable = images_NHWC if images_NHWC.flags.writeable else images_NHWC.copy()  # torch warns otherwise
    # NHWC permuted to NCHW is what torch calls channels_last, for which it has vectorised 8-bit kernels. It detects
    # this by the strides, and NumPy gives the axis of a single image any stride.
    single = len(writable) == 1
    images = torch.from_numpy(writable[0]).unsqueeze(0) if single else torch.from_numpy(writable)
    # torch derives the result's size, rounded down, from the scales. The excess keeps a product like 127.99999999 from
    # being rounded to 127, and moves no pixel.
    scale = ((rows + 1e-6) / height, (columns + 1e-6) / width)
    images_NCHW = images.permute(0, 3, 1, 2)
    resized_NCHW = torch.nn.functional.interpolate(images_NCHW, scale_factor=scale, mode="bilinear", antialias=True)
    resized = resized_NCHW.permute(0, 2, 3, 1).numpy()
    return np.rint(resized).clip(0, 0xFFFF).astype(np.uint16) if is_wide else np.ascontiguousarray(resized)
