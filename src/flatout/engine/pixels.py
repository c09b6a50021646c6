"""Pixel operations of augmentation except resampling, for torch and JAX: `xp` is either module.

Pixels are floats from 0 to 255. Operations are those of Pillow, without intermediate rounding.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # torch.Tensor or jax.Array

# Columns of a row for `recolor`, after the factors of brightness, contrast, saturation and sharpness.
POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE = 4, 5, 6, 7
# The identity row.
UNCHANGED = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 256.0, 0.0, 0.0])
# Factor from 16-bit pixels to 0..255: 65535 is 257 times 255.
FROM_16_BITS = 1 / 257
# ITU-R 601 luma.
_LUMA = (0.299, 0.587, 0.114)


def centre(images_BHWC: Array, height: int, width: int) -> Array:
    """Return the central crop."""
    top, left = (images_BHWC.shape[1] - height) // 2, (images_BHWC.shape[2] - width) // 2
    return images_BHWC[:, top : top + height, left : left + width]


def recolor(xp: Any, x_BHWC: Array, rows: Array, count_darker: Callable[[Array], Array]) -> Array:
    """Return images with changed colours.

    Args:
        rows: float32 [B, 3]: the factors of brightness, contrast and saturation, 1 for no change. Or [B, 8]: those,
            the factor of sharpness, the step of posterising, the threshold of solarising, 1 to stretch each channel to
            0..255, and 1 to equalise its histogram.
        count_darker: returns for integers 0..255 [B, H, W, C] the number of darker pixels in the same channel of the
            image, float32 [B, H, W, C].
    """

    def column(index: int) -> Array:
        return rows[:, index, None, None, None]

    def blend(base: Array, factor: Array) -> Array:
        return xp.clip(base + factor * (x - base), 0, 255)

    x = xp.clip(x_BHWC * column(0), 0, 255)
    x = blend(_grey(x).mean((1, 2), keepdims=True), column(1))
    if x.shape[-1] == 3:
        x = blend(_grey(x), column(2))
    if rows.shape[1] == 3:
        return x
    x = blend(_smoothed(xp, x), column(3))
    step, threshold = column(POSTERIZE), column(SOLARIZE)
    x = xp.where(step > 1, xp.floor(x / step) * step, x)
    x = xp.where(x >= threshold, 255 - x, x)
    low, high = xp.amin(x, axis=(1, 2), keepdims=True), xp.amax(x, axis=(1, 2), keepdims=True)
    spread = xp.where(high > low, high - low, 255.0 + 0 * low)
    x = xp.where((column(AUTOCONTRAST) > 0) & (high > low), (x - low) * (255 / spread), x)
    return xp.where(column(EQUALIZE) > 0, _equalized(xp, xp.round(x), count_darker), x)


def _equalized(xp: Any, x_BHWC: Array, count_darker: Callable[[Array], Array]) -> Array:
    """In Pillow's integer arithmetic."""
    darker = count_darker(x_BHWC)
    # Pixels per level; the brightest pixels do not count.
    step = xp.floor(xp.amax(darker, axis=(1, 2), keepdims=True) / 255)
    # Half a pixel more protects the integer quotient from rounding.
    levels = xp.floor((darker + xp.floor(step / 2) + 0.5) / xp.clip(step, 1, None))
    return xp.where(step > 0, xp.clip(levels, 0, 255), x_BHWC)


def _grey(x_BHWC: Array) -> Array:
    """The luma, [B, H, W, 1]; grey images are unchanged."""
    if x_BHWC.shape[-1] != 3:
        return x_BHWC
    return sum(weight * x_BHWC[..., i : i + 1] for i, weight in enumerate(_LUMA))


def _smoothed(xp: Any, x_BHWC: Array) -> Array:
    """By Pillow's 3x3 kernel, whose centre weighs 5 of 13; edge pixels are unchanged."""
    _, height, width, _ = x_BHWC.shape
    if min(height, width) < 3:
        return x_BHWC
    rows = x_BHWC[:, :-2] + x_BHWC[:, 1:-1] + x_BHWC[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    inner = (total + 4 * x_BHWC[:, 1:-1, 1:-1]) / 13
    middle = xp.concatenate([x_BHWC[:, 1:-1, :1], inner, x_BHWC[:, 1:-1, -1:]], axis=2)
    return xp.concatenate([x_BHWC[:, :1], middle, x_BHWC[:, -1:]], axis=1)


def inside(boxes_B4: Array, rows_H: Array, columns_W: Array) -> Array:
    """Return the mask of a box in each image, bool [B, H, W], from the indices of rows and columns.

    Boxes are top, left, bottom, right, as fractions of height and width; empty if both ends are equal.
    """
    y = (rows_H + 0.5) / len(rows_H)
    x = (columns_W + 0.5) / len(columns_W)
    in_rows = (y >= boxes_B4[:, 0:1]) & (y < boxes_B4[:, 2:3])
    in_columns = (x >= boxes_B4[:, 1:2]) & (x < boxes_B4[:, 3:4])
    return in_rows[:, :, None] & in_columns[:, None, :]


def mixed(images_BCHW: Array, partners_BCHW: Array, rows_B6: Array, is_inside_B1HW: Array) -> Array:
    """Return images mixed with their partners by rows of the table `mix`, whose boxes are those of the mask."""
    weight = is_inside_B1HW + ~is_inside_B1HW * rows_B6[:, 0, None, None, None]
    return images_BCHW + weight * (partners_BCHW - images_BCHW)


def view(xp: Any, x_BCHW: Array, shift: int, is_mirrored: bool) -> Array:
    """Return images shifted down and right by `shift` pixels (edge pixels repeated), and mirrored."""
    down, up = max(0, shift), max(0, -shift)
    height, width = x_BCHW.shape[2:]
    x = xp.concatenate(
        [*[x_BCHW[:, :, :1]] * down, x_BCHW[:, :, up : height - down], *[x_BCHW[:, :, -1:]] * up], axis=2
    )
    x = xp.concatenate([*[x[..., :1]] * down, x[..., up : width - down], *[x[..., -1:]] * up], axis=3)
    return xp.flip(x, (3,)) if is_mirrored else x
