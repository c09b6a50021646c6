"""Normalisation, augmentation and optimizers as JAX functions, with the numbers of the torch engine.

Shape letters: B batch, H height, W width, C channels, P rows and Q columns of the result, L levels of a channel.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from flatout.config import OPTIMIZERS, Optimizer, Recipe
from flatout.engine import pixels
from flatout.utils.errors import InputError

Arrays = dict[str, jax.Array]


class OptimizerState(NamedTuple):
    """The steps taken, int32 [], and arrays like the parameters under torch's keys."""

    count: Any
    arrays: dict[str, Arrays]


# --- augmentation -----------------------------------------------------------------------------------------------------


class Augmentation:
    """Turns the stored pixels of a batch into the model's input; see `engine.augment.apply`.

    TPUs multiply matrices at full speed, but fetch single pixels very slowly. Linear interpolation along a side is a
    product with a sparse matrix of weights, which the compiler fuses into the product. CPUs fetch the pixels.
    """

    def __init__(self, recipe: Recipe) -> None:
        mean, std = (np.asarray(values, np.float32) for values in (recipe.data.mean, recipe.data.std))
        self._size, self._eval_size = recipe.image_sides, recipe.eval_sides
        self._scale, self._bias = 1 / (255 * std), -mean / std
        is_turned = recipe.augment.rotate or recipe.augment.policy != "none"
        self._products = _turned if is_turned else functools.partial(_unturned, shear=bool(recipe.augment.shear))

    def __call__(self, images_BHWC: Any, transforms: Any, *, is_training: bool) -> jax.Array:
        """Return float32 [B, C, H, W] from uint8 or uint16, with the batch's rows of `epoch_transforms`, if any."""
        transforms, size = transforms or {}, self._size if is_training else self._eval_size
        if "affine" not in transforms:
            images_BHWC = pixels.centre(images_BHWC, *size)
        x = images_BHWC.astype(jnp.float32)
        if images_BHWC.dtype == jnp.uint16:
            x = x * pixels.FROM_16_BITS
        if "affine" in transforms:
            resample = functools.partial(
                jax.lax.platform_dependent,
                tpu=functools.partial(self._products, size=size),
                default=functools.partial(_fetched, size=size),
            )
            x = jax.vmap(resample)(x, transforms["affine"])
        elif "flip" in transforms:
            x = jnp.where(transforms["flip"][:, None, None, None] > 0, x[:, :, ::-1], x)
        if "color" in transforms:
            x = pixels.recolor(jnp, x, transforms["color"], _count_darker)
        x = x * self._scale + self._bias
        if "erase" in transforms:
            x = jnp.where(_inside(transforms["erase"], *x.shape[1:3])[..., None], 0, x)
        return x.transpose(0, 3, 1, 2)


def _count_darker(levels_BHWC: jax.Array) -> jax.Array:
    """See `pixels.recolor`. Compares with every level, since TPUs scatter and gather slowly."""
    has_level_BHWCL = levels_BHWC[..., None] == jnp.arange(256)
    histograms_BCL = has_level_BHWCL.sum((1, 2))
    darker_BCL = histograms_BCL.cumsum(2) - histograms_BCL
    return (has_level_BHWCL * darker_BCL[:, None, None]).sum(4).astype(jnp.float32)


def mix(images_BCHW: jax.Array, partners_BCHW: jax.Array, rows_B6: jax.Array) -> jax.Array:
    """See `engine.augment.mix`."""
    is_inside = _inside(rows_B6[:, 1:5], *images_BCHW.shape[2:])[:, None]
    return pixels.mixed(images_BCHW, partners_BCHW, rows_B6, is_inside)


def _inside(boxes_B4: jax.Array, height: int, width: int) -> jax.Array:
    """Return the mask of a box in each image, bool [B, H, W]."""
    return pixels.inside(boxes_B4, jnp.arange(height), jnp.arange(width))


def _fetched(image_HWC: jax.Array, affine: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Apply any affine map [2, 3] to an image by gathers: bilinear, edge pixels repeated."""
    height, width, _ = image_HWC.shape
    y, x = np.meshgrid(*map(_centres, size), indexing="ij")
    positions = _positions(affine[1], x, y, height), _positions(affine[0], x, y, width)
    return jax.vmap(lambda image_HW: map_coordinates(image_HW, positions, 1, "nearest"), 2, 2)(image_HWC)


def _unturned(image_HWC: jax.Array, affine: jax.Array, size: tuple[int, int], *, shear: bool) -> jax.Array:
    """Apply a map without rotation: rows stay rows, with a product per side; with shear, each has its own weights."""
    height, width, _ = image_HWC.shape
    y, x = map(_centres, size)
    rows_PH = _weights(_positions(affine[1], 0, y, height), height)
    columns = _weights(_positions(affine[0], x, y[:, None] if shear else 0, width), width)
    subscripts = "pwc,pqw->pqc" if shear else "pwc,qw->pqc"
    return _product(subscripts, _product("hwc,ph->pwc", image_HWC, rows_PH), columns)


def _turned(image_HWC: jax.Array, affine: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Apply any map: each pixel of the result interpolates every row, then between the rows.

    The compiler sums over the rows without storing them if each channel has a product of its own.
    """
    height, width, _ = image_HWC.shape
    y, x = np.meshgrid(*map(_centres, size), indexing="ij")
    rows_PQH = _weights(_positions(affine[1], x, y, height), height)
    columns_PQW = _weights(_positions(affine[0], x, y, width), width)
    channels = [
        (_product("hw,pqw->pqh", image_HW, columns_PQW) * rows_PQH).sum(2) for image_HW in jnp.moveaxis(image_HWC, 2, 0)
    ]
    return jnp.stack(channels, axis=2)


def _centres(length: int) -> np.ndarray:
    """Return the pixel centres of a side, from -1 to 1."""
    return ((2 * np.arange(length) + 1) / length - 1).astype(np.float32)


def _positions(coefficients: jax.Array, x: Any, y: Any, length: int) -> jax.Array:
    """Map x and y by one row of an affine map [3] to fractional pixel indices of a side."""
    return ((coefficients[0] * x + coefficients[1] * y + coefficients[2] + 1) * length - 1) / 2


def _weights(positions: jax.Array, length: int) -> jax.Array:
    """Return the linear interpolation weights [..., length] of a side's pixels at positions [...]."""
    return jnp.maximum(0, 1 - jnp.abs(jnp.clip(positions, 0, length - 1)[..., None] - jnp.arange(length)))


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    """Return an einsum in full 32-bit precision, even if the model's products are rounded."""
    return jnp.einsum(subscripts, *operands, precision="highest")


# --- optimizers -------------------------------------------------------------------------------------------------------


class UpdateRule:
    """A torch optimizer: from gradients to the direction that is subtracted, times the learning rate."""

    def __init__(self, optimizer: Optimizer) -> None:
        if optimizer.is_of_library:
            raise InputError(
                f"optimizer.name = {optimizer.name!r} is not available with --engine xla; use {', '.join(OPTIMIZERS)}, "
                "or --engine torch"
            )
        self._name, self._decay = optimizer.name, optimizer.weight_decay
        # Sections of known optimizers have all numbers.
        self._eps, self._betas = optimizer.eps or 0.0, optimizer.betas or []
        self._momentum, self._dampening = optimizer.momentum or 0.0, optimizer.dampening
        self._is_nesterov = bool(optimizer.nesterov)
        keys = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}
        self._keys = keys.get(self._name, ("momentum_buffer",) if self._momentum else ())

    def init(self, parameters: object) -> OptimizerState:
        """Return the state before the first step for parameters on the host."""
        zeros = {key: jax.tree.map(np.zeros_like, parameters) for key in self._keys}
        return OptimizerState(np.zeros((), np.int32), zeros)

    def update(self, gradients: Arrays, state: OptimizerState, parameters: Arrays) -> tuple[Arrays, OptimizerState]:
        """Return the directions, and the new state."""
        count, directions = state.count + 1, {}
        new: dict[str, Arrays] = {key: {} for key in self._keys}
        for name, gradient in gradients.items():
            kept = [state.arrays[key][name] for key in self._keys]
            if self._decay and self._name != "adamw":
                gradient = gradient + self._decay * parameters[name]
            directions[name], kept = self._direct(gradient, kept, count)
            if self._decay and self._name == "adamw":
                directions[name] = directions[name] + self._decay * parameters[name]
            for key, value in zip(self._keys, kept, strict=True):
                new[key][name] = value
        return directions, OptimizerState(count, new)

    def _direct(
        self, gradient: jax.Array, kept: list[jax.Array], count: jax.Array
    ) -> tuple[jax.Array, Sequence[jax.Array]]:
        if self._name.startswith("adam"):  # Kingma and Ba, arXiv 1412.6980
            moments = [b * m + (1 - b) * gradient**n for b, m, n in zip(self._betas, kept, (1, 2), strict=True)]
            mean, square = (m / (1 - b**count) for b, m in zip(self._betas, moments, strict=True))
            return mean / (jnp.sqrt(square) + self._eps), moments
        if self._name == "adagrad":  # Duchi et al., JMLR 2011
            total = kept[0] + gradient * gradient
            return gradient / (jnp.sqrt(total) + self._eps), [total]
        if not kept:
            return gradient, []
        # Dampening applies from the second gradient on.
        buffer = self._momentum * kept[0] + jnp.where(count == 1, 1.0, 1.0 - self._dampening) * gradient
        return gradient + self._momentum * buffer if self._is_nesterov else buffer, [buffer]


def to_torch(state: OptimizerState) -> dict[str, np.ndarray]:
    """Return the optimizer state in torch's layout: arrays by `NAME.KEY`, none before the first step."""
    found: dict[str, np.ndarray] = {}
    for key, arrays in state.arrays.items() if int(state.count) else ():
        for name, value in arrays.items():
            found[f"{name}.{key}"] = np.asarray(value)
            if key != "momentum_buffer":
                found[f"{name}.step"] = np.asarray(state.count, np.float32)
    return found


def from_torch(state: OptimizerState, arrays: Mapping[str, np.ndarray]) -> OptimizerState:
    """Return an initial state with torch's optimizer state, where there is one."""
    count, new = 0, dict[str, Any]()
    for key, zeros in state.arrays.items():
        new[key] = {name: arrays.get(f"{name}.{key}", zero) for name, zero in zeros.items()}
        # Plain momentum has no step count; a state implies at least one step.
        steps = [int(arrays.get(f"{name}.step", np.float32(f"{name}.{key}" in arrays))) for name in zeros]
        count = max([count, *steps])
    return OptimizerState(np.int32(count), new)
