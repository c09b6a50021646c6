"""Decoded images brought to their channels, bits and size, by one resize for all formats.

Shape letters: N images, H height, W width, C channels.
"""

from typing import NamedTuple

import numpy as np

from flatout.data.bands import BadImage
from flatout.data.pixels import blocks, with_bits
from flatout.settings import Size, sides

# What the cheaper ways to decode leave out is hidden by the antialiased resize behind them, if that still reduces by
# this much after scaling in the DCT.
MIN_REDUCTION_LEFT = 1.3
# The orientations of images whose rows are stored as columns.
TURNED = (5, 6, 7, 8)


class Target(NamedTuple):
    """What an image is to become; see `decode.decode_image`."""

    height: int
    width: int
    channels: int
    resize: str
    bits: int

    def turned(self, orientation: int) -> "Target":
        """Return what an image becomes before it is turned upright, given its EXIF orientation (1 is upright)."""
        return self._replace(height=self.width, width=self.height) if orientation in TURNED else self

    def used(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of what is used of an image: all, or the largest centred part."""
        if self.resize != "crop":
            return 0, 0, height, width
        # The whole of one side, and as much of the other as the target's shape has.
        if height * self.width <= width * self.height:
            used = height, max(1, round(height * self.width / self.height))
        else:
            used = max(1, round(width * self.height / self.width)), width
        return (height - used[0]) // 2, (width - used[1]) // 2, *used

    def filled(self, height: float, width: float) -> tuple[int, int]:
        """Return how much of the target the used part of an image fills: all, or less one way if it is to be padded."""
        if self.resize != "pad":
            return self.height, self.width
        if height * self.width <= width * self.height:
            return max(1, round(self.width * height / width)), self.width
        return self.height, max(1, round(self.height * width / height))


def resize_images(images_NHWC: np.ndarray, *, size: Size, channels: int, resize: str, bits: int = 8) -> np.ndarray:
    """Return decoded images as uint8 or uint16 [N, height, width, channels], resized as `decode_image` does."""
    return resized_to(images_NHWC, Target(*sides(size), channels, resize, bits))


def with_channels(images_NHWC: np.ndarray, channels: int) -> np.ndarray:
    """Return images with grey repeated as colour, or colour as luma; raise BadImage where other channels differ."""
    found = images_NHWC.shape[-1]
    if found == channels:
        return images_NHWC
    if (found, channels) == (1, 3):
        return np.repeat(images_NHWC, 3, axis=-1)
    if (found, channels) != (3, 1):
        raise BadImage(f"has {found} channel{'s' * (found > 1)}, but channels = {channels}")
    # ITU-R 601 luma in 16-bit fixed point, rounded: what Pillow computes.
    colours, weights = images_NHWC.reshape(-1, 3), np.array([19595, 38470, 7471], np.uint32)
    luma = np.empty(len(colours), images_NHWC.dtype)
    for block in blocks(len(colours)):
        luma[block] = (colours[block].astype(np.uint32) @ weights + 0x8000) >> 16
    return luma.reshape(*images_NHWC.shape[:3], 1)


def resized_to(images_NHWC: np.ndarray, target: Target) -> np.ndarray:
    """Return images with the target's channels, bits and size."""
    images_NHWC = with_bits(with_channels(images_NHWC, target.channels), target.bits)
    top, left, height, width = target.used(*images_NHWC.shape[1:3])
    return placed_in(images_NHWC[:, top : top + height, left : left + width], target, height, width)


def placed_in(images_NHWC: np.ndarray, target: Target, height: float, width: float) -> np.ndarray:
    """Return images resized and, if they do not fill the target, centred on black; arguments as of `_resample`."""
    filled = target.filled(height, width)
    resized = _resample(images_NHWC, *filled, height, width)
    if filled == (target.height, target.width):
        return resized
    images = np.zeros((len(resized), target.height, target.width, resized.shape[-1]), resized.dtype)
    top, left = (target.height - filled[0]) // 2, (target.width - filled[1]) // 2
    images[:, top : top + filled[0], left : left + filled[1]] = resized
    return images


def _resample(images_NHWC: np.ndarray, rows: int, columns: int, height: float, width: float) -> np.ndarray:
    """Return images resized to [N, rows, columns, C].

    `height` and `width` are the extent of the content in pixels of `images_NHWC`. A JPEG of odd width, halved in the
    DCT, has a last column that is half empty: resized by its array's size it would be off by up to half a pixel.
    """
    import torch
    from torch.nn.functional import interpolate

    if (rows, columns) == images_NHWC.shape[1:3] == (height, width):
        return np.ascontiguousarray(images_NHWC)
    is_wide = images_NHWC.dtype == np.uint16  # for which torch has no resize
    if is_wide:
        writable = images_NHWC.astype(np.float32)
    else:
        writable = images_NHWC if images_NHWC.flags.writeable else images_NHWC.copy()  # torch warns otherwise
    # NHWC permuted to NCHW is what torch calls channels_last, for which it has vectorised 8-bit kernels. It tells by
    # the strides, and NumPy gives the axis of a single image any stride.
    single = len(writable) == 1
    images = torch.from_numpy(writable[0]).unsqueeze(0) if single else torch.from_numpy(writable)
    images_NCHW = images.permute(0, 3, 1, 2)
    # torch derives the result's size, rounded down, from the scales. The excess keeps a product like 127.99999999 from
    # being rounded to 127, and moves no pixel.
    scale = ((rows + 1e-6) / height, (columns + 1e-6) / width)
    resized_NCHW = interpolate(images_NCHW, scale_factor=scale, mode="bilinear", antialias=True)
    resized = resized_NCHW.permute(0, 2, 3, 1).numpy()
    return np.rint(resized).clip(0, 0xFFFF).astype(np.uint16) if is_wide else np.ascontiguousarray(resized)


def upright(image_HWC: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image turned and mirrored as its EXIF orientation says."""
    if orientation in TURNED:
        image_HWC = image_HWC.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image_HWC = image_HWC[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image_HWC = image_HWC[::-1]
    return np.ascontiguousarray(image_HWC)
