"""Normalisation and augmentation of a batch on the device: what `numerics.augment.apply` computes, without gathers.

Flips, crops, zooms and shifts move rows and columns independently of each other, so each is two small matrix products
per image. TPUs multiply matrices at full speed, but fetch single pixels hundreds of times more slowly; only rotation
and shear still do that.

Shape letters: B batch, H height, W width, C channels, O output positions, I input positions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from flatout.numerics import pixels
from flatout.recipe import Recipe


class Augmentation:
    """Turns the stored pixels of a batch into the model's input.

    Args:
        recipe: data.mean and data.std must be filled in.
    """

    def __init__(self, recipe: Recipe) -> None:
        mean, std = (np.asarray(values, np.float32) for values in (recipe.data.mean, recipe.data.std))
        self._size, self._eval_size = recipe.image_size, recipe.eval_size
        self._scale, self._bias = 1 / (255 * std), -mean / std
        self._is_separable = not (recipe.augment.rotate or recipe.augment.shear or recipe.augment.policy != "none")

    def __call__(self, images_BHWC: Any, transforms: Any, *, is_training: bool) -> jax.Array:
        """Return float32 [B, C, H, W].

        Args:
            images_BHWC: uint8.
            transforms: the batch's rows of `numerics.augment.epoch_transforms`; None where nothing is random.
            is_training: whether the images are of the size for training, or of that for evaluation.
        """
        transforms, size = transforms or {}, self._size if is_training else self._eval_size
        if "affine" not in transforms:
            top, left = ((length - size) // 2 for length in images_BHWC.shape[1:3])
            images_BHWC = images_BHWC[:, top : top + size, left : left + size]
        x = images_BHWC.astype(jnp.float32)
        if "affine" in transforms and self._is_separable:
            x = _resample_separably(x, transforms["affine"], size)
        elif "affine" in transforms:
            x = jax.vmap(functools.partial(_resample, size=size))(x, transforms["affine"])
        elif "flip" in transforms:
            x = jnp.where(transforms["flip"][:, None, None, None] > 0, x[:, :, ::-1], x)
        if "color" in transforms:
            x = pixels.recolor(jnp, x, transforms["color"], _count_darker)
        x = x * self._scale + self._bias
        if "erase" in transforms:
            x = jnp.where(_inside(transforms["erase"], x)[..., None], 0, x)
        return x.transpose(0, 3, 1, 2)


def _count_darker(levels_BHWC: jax.Array) -> jax.Array:
    """See `pixels.recolor`. Histograms are sums of comparisons, since scattered additions are slow on TPUs."""
    levels_BPC = levels_BHWC.astype(jnp.int32).reshape(len(levels_BHWC), -1, levels_BHWC.shape[3])
    histograms = (levels_BPC[..., None] == jnp.arange(256)).sum(1)
    darker_BLC = (histograms.cumsum(2) - histograms).transpose(0, 2, 1)
    return jnp.take_along_axis(darker_BLC, levels_BPC, axis=1).astype(jnp.float32).reshape(levels_BHWC.shape)


def reduced(images_BCHW: jax.Array, size: int) -> jax.Array:
    """Return smaller images, each pixel the mean of those that it covers: torch's interpolation of mode "area"."""
    length = images_BCHW.shape[2]
    if size == length:
        return images_BCHW
    first = np.arange(size)[:, None] * length // size
    last = -(-(np.arange(size)[:, None] + 1) * length // size)
    covered = (np.arange(length) >= first) & (np.arange(length) < last)
    means_OI = (covered / covered.sum(1, keepdims=True)).astype(np.float32)
    # Pixels would be rounded where the model's own products may be.
    return jnp.einsum("bchw,oh,pw->bcop", images_BCHW, means_OI, means_OI, precision="highest")


def mix(images_BCHW: jax.Array, partners_BCHW: jax.Array, rows_B6: jax.Array) -> jax.Array:
    """See `numerics.augment.mix`."""
    is_inside = _inside(rows_B6[:, 1:5], images_BCHW.transpose(0, 2, 3, 1))[:, None]
    weight = pixels.partner_weight(is_inside, rows_B6[:, 0, None, None, None])
    return images_BCHW + weight * (partners_BCHW - images_BCHW)


def _inside(boxes_B4: jax.Array, images_BHWC: jax.Array) -> jax.Array:
    """Return which pixels lie in a box of each image, bool [B, H, W]."""
    height, width = (jnp.arange(length) for length in images_BHWC.shape[1:3])
    return pixels.inside(boxes_B4, height, width)


def _resample_separably(images_BHWC: jax.Array, maps: jax.Array, size: int) -> jax.Array:
    """Apply affine maps [B, 2, 3] without rotation and shear: bilinear, edge pixels repeated."""
    _, height, width, _ = images_BHWC.shape
    rows_BOI = _interpolation(maps[:, 1, 1], maps[:, 1, 2], height, size)
    columns_BOI = _interpolation(maps[:, 0, 0], maps[:, 0, 2], width, size)
    return jnp.einsum("bpwc,bqw->bpqc", jnp.einsum("bhwc,bph->bpwc", images_BHWC, rows_BOI), columns_BOI)


def _interpolation(scale: jax.Array, shift: jax.Array, length: int, size: int) -> jax.Array:
    """Return the matrices [B, O, I] that interpolate `length` pixels at scale * x + shift, `size` x from -1 to 1."""
    positions_BO = _pixels(scale[:, None] * _centres(size) + shift[:, None], length)
    return jnp.maximum(0, 1 - jnp.abs(jnp.clip(positions_BO, 0, length - 1)[..., None] - jnp.arange(length)))


def _resample(image_HWC: jax.Array, affine: jax.Array, size: int) -> jax.Array:
    """Apply an affine map [2, 3] to one image: bilinear, edge pixels repeated."""
    height, width, _ = image_HWC.shape
    y, x = jnp.meshgrid(_centres(size), _centres(size), indexing="ij")
    columns = _pixels(affine[0, 0] * x + affine[0, 1] * y + affine[0, 2], width)
    rows = _pixels(affine[1, 0] * x + affine[1, 1] * y + affine[1, 2], height)
    return jax.vmap(lambda channel: map_coordinates(channel, [rows, columns], 1, "nearest"), 2, 2)(image_HWC)


def _centres(length: int) -> np.ndarray:
    """Return where the pixels of a side lie, from -1 to 1."""
    return ((2 * np.arange(length) + 1) / length - 1).astype(np.float32)


def _pixels(x: jax.Array, length: int) -> jax.Array:
    """Return positions from -1 to 1 as pixel indices of a side, with fractions."""
    return ((x + 1) * length - 1) / 2
