"""Image arrays of every common layout and range as uint8 or uint16 [N, H, W, C].

Shape letters: N images, H height, W width, C channels.
"""

from collections.abc import Iterator

import numpy as np

from flatout.errors import InputError

BYTES = (0.0, 255.0)
WORDS = (0.0, 65535.0)
UNIT = (0.0, 1.0)
SIGNED = (-1.0, 1.0)
_BLOCK = 4096
_BLOCK_VALUES = 2**16


def channels_last(images: np.ndarray, where: object, channels: int = 0) -> np.ndarray:
    """Return a view [N, H, W, C] of images [N, H, W], [N, H, W, C] or [N, C, H, W].

    The axis of channels is the one that has 1, 3 or `channels` (where that is known); else the one without which the
    two others are most alike, as the sides of images are.

    Raises:
        InputError: the shape is none of these, or could be two of them.
    """
    if images.ndim not in (3, 4) or min(images.shape[1:]) == 0:
        raise InputError(f"{where}: images of shape {images.shape}; give [N, H, W], [N, H, W, C] or [N, C, H, W]")
    if images.ndim == 3:
        return images[..., None]
    _, one, two, three = images.shape
    first, last = (length in (1, 3, channels) for length in (one, three))
    if not first and not last:
        # max / min of the two sides that remain.
        if_first, if_last = max(two, three) / min(two, three), max(one, two) / min(one, two)
        first, last = if_first <= if_last, if_last <= if_first
    if first and last and images.shape[1:] != (1, 1, 1):
        raise InputError(f"{where}: images of shape {images.shape}: channels may be first or last; give [N, H, W]")
    return images if last else images.transpose(0, 2, 3, 1)


def value_range(low: float, high: float, where: object, *, signed: bool = False) -> tuple[float, float]:
    """Return the range of pixels from `low` to `high`: 0..1, 0..255 or (if `signed`) -1..1.

    Raises:
        InputError: the values are not finite, or fit no range.
    """
    if not np.isfinite((low, high)).all():
        raise InputError(f"{where}: pixels hold values that are not finite numbers (NaN or infinity)")
    for bottom, top in (UNIT, SIGNED, BYTES) if signed else (UNIT, BYTES):
        if bottom <= low and high <= top:
            return bottom, top
    ranges = "0..1, -1..1 or 0..255" if signed else "0..1 or 0..255"
    raise InputError(f"{where}: pixels run from {low:g} to {high:g}; scale them to {ranges}")


def range_of(images: np.ndarray, where: object) -> tuple[float, float]:
    """Return the range of an array of images: by its type, for floats by its values; errors as for `value_range`.

    uint16 is always 0..65535, so that it does not depend on the images.
    """
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


def with_bits(images: np.ndarray, bits: int, highest: int = 0) -> np.ndarray:
    """Return uint8 or uint16 images with 8 or 16 bits per pixel and channel.

    Of 16 bits, cameras and scanners often use 12 or 8; scaled by 16 bits, few levels would remain of these. `highest`
    is the highest pixel of all, by default that of these images.
    """
    if images.dtype.itemsize * 8 == bits:
        return images
    if bits == 16:
        scaled = images.astype(np.uint16)
        scaled *= np.uint16(257)
        return scaled
    top = next(top for top in (0xFF, 0xFFF, 0xFFFF) if (highest or images.max(initial=0)) <= top)
    values, scaled = images.reshape(-1), np.empty(images.size, np.uint8)
    for block in blocks(images.size):
        scaled[block] = (values[block].astype(np.uint32) * 255 + top // 2) // top
    return scaled.reshape(images.shape)


def blocks(length: int) -> Iterator[slice]:
    """Yield slices that cover a length, so that what is computed in between takes little memory and stays in caches."""
    return (slice(start, start + _BLOCK_VALUES) for start in range(0, length, _BLOCK_VALUES))


def to_pixels(images: np.ndarray, scale: tuple[float, float], where: object) -> np.ndarray:
    """Return uint16 images of the range 0..65535 as they are, others as `to_uint8`.

    Raises:
        InputError: only some of the images are uint16; or as `to_uint8`.
    """
    if (scale == WORDS) != (images.dtype == np.uint16):
        wanted = "uint16" if scale == WORDS else "not uint16"
        raise InputError(
            f"{where}: images of type {images.dtype}, where those of training are {wanted}; make them alike"
        )
    return images if scale == WORDS else to_uint8(images, scale, where)


def to_uint8(images: np.ndarray, scale: tuple[float, float], where: object) -> np.ndarray:
    """Return images scaled from the range to 0..255 and rounded; uint8 images are returned as they are.

    Raises:
        InputError: a value is outside the range, or the range is 0..255 and a value is no whole number.
    """
    if images.dtype == np.uint8:
        return images
    low, high = scale
    pixels = np.empty(images.shape, dtype=np.uint8)
    for start in range(0, len(images), _BLOCK):  # by blocks, so that no float copy of everything is made
        block = images[start : start + _BLOCK].astype(np.float32)
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
        pixels[start : start + _BLOCK] = rounded
    return pixels
