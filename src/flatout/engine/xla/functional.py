"""Normalisation, augmentation and optimizers as JAX functions, with the numbers of the torch engine.

Pixels: TPUs multiply matrices at full speed, but fetch single pixels very slowly. Linear interpolation along a side is
a product with a sparse matrix of weights, which the compiler fuses into the product. CPUs and GPUs fetch the pixels,
which takes less time and memory; see `engine.augment.apply`.

Optimizers are optax transformations whose state either engine can continue from. optax's own differ slightly from
torch's: its Adagrad adds epsilon under the root, its momentum has no dampening. The transformations here do not include
the learning rate, which changes: the step multiplies by it.

Shape letters: B batch, H height, W width, C channels, P rows and Q columns of the result, L levels of a channel.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.ndimage import map_coordinates

from flatout.config import OPTIMIZERS, Optimizer, Recipe
from flatout.engine import pixels
from flatout.utils.errors import InputError

Arrays = dict[str, jax.Array]


# --- augmentation -----------------------------------------------------------------------------------------------------


class Augmentation:
    """Turns the stored pixels of a batch into the model's input.

    Args:
        recipe: data.mean and data.std must be filled in.
    """

    def __init__(self, recipe: Recipe) -> None:
        mean, std = (np.asarray(values, np.float32) for values in (recipe.data.mean, recipe.data.std))
        self._size, self._eval_size = recipe.image_sides, recipe.eval_sides
        self._scale, self._bias = 1 / (255 * std), -mean / std
        if recipe.augment.rotate or recipe.augment.policy != "none":
            self._products = _turned
        else:
            self._products = _sheared if recipe.augment.shear else _upright

    def __call__(self, images_BHWC: Any, transforms: Any, *, is_training: bool) -> jax.Array:
        """Return float32 [B, C, H, W].

        Args:
            images_BHWC: uint8 or uint16.
            transforms: the batch's rows of `engine.augment.epoch_transforms`; None if nothing is random.
            is_training: whether the images have the training size rather than the evaluation size.
        """
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
            x = jnp.where(_inside(transforms["erase"], x)[..., None], 0, x)
        return x.transpose(0, 3, 1, 2)


def _count_darker(levels_BHWC: jax.Array) -> jax.Array:
    """See `pixels.recolor`. Compares with every level, since TPUs scatter and gather slowly."""
    has_level_BHWCL = levels_BHWC[..., None] == jnp.arange(256)
    histograms_BCL = has_level_BHWCL.sum((1, 2))
    darker_BCL = histograms_BCL.cumsum(2) - histograms_BCL
    return (has_level_BHWCL * darker_BCL[:, None, None]).sum(4).astype(jnp.float32)


def mix(images_BCHW: jax.Array, partners_BCHW: jax.Array, rows_B6: jax.Array) -> jax.Array:
    """See `engine.augment.mix`."""
    is_inside = _inside(rows_B6[:, 1:5], images_BCHW.transpose(0, 2, 3, 1))[:, None]
    weight = pixels.partner_weight(is_inside, rows_B6[:, 0, None, None, None])
    return images_BCHW + weight * (partners_BCHW - images_BCHW)


def _inside(boxes_B4: jax.Array, images_BHWC: jax.Array) -> jax.Array:
    """Return the mask of a box in each image, bool [B, H, W]."""
    height, width = (jnp.arange(length) for length in images_BHWC.shape[1:3])
    return pixels.inside(boxes_B4, height, width)


def _fetched(image_HWC: jax.Array, affine: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Apply any affine map [2, 3] to an image by gathers: bilinear, edge pixels repeated."""
    height, width, _ = image_HWC.shape
    y, x = np.meshgrid(*map(_centres, size), indexing="ij")
    positions = _positions(affine[1], x, y, height), _positions(affine[0], x, y, width)
    return jax.vmap(lambda image_HW: map_coordinates(image_HW, positions, 1, "nearest"), 2, 2)(image_HWC)


def _upright(image_HWC: jax.Array, affine: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Apply a map without rotation and shear."""
    height, width, _ = image_HWC.shape
    rows_PH = _weights(_positions(affine[1], 0, _centres(size[0]), height), height)
    columns_QW = _weights(_positions(affine[0], _centres(size[1]), 0, width), width)
    return _product("pwc,qw->pqc", _product("hwc,ph->pwc", image_HWC, rows_PH), columns_QW)


def _sheared(image_HWC: jax.Array, affine: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Apply a map without rotation: rows stay rows, and each has its own weights."""
    height, width, _ = image_HWC.shape
    rows_PH = _weights(_positions(affine[1], 0, _centres(size[0]), height), height)
    columns_PQW = _weights(_positions(affine[0], _centres(size[1]), _centres(size[0])[:, None], width), width)
    return _product("pwc,pqw->pqc", _product("hwc,ph->pwc", image_HWC, rows_PH), columns_PQW)


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


class MomentumState(NamedTuple):
    """SGD's step count, and a running sum of gradients per parameter."""

    count: jax.Array
    momentum_buffer: Arrays


class AdagradState(NamedTuple):
    """Adagrad's step count, and the sum of squared gradients per parameter."""

    count: jax.Array
    sum: Arrays


# Torch's key of each array -> the field of the optax state.
_KEYS = {
    MomentumState: {"momentum_buffer": "momentum_buffer"},
    AdagradState: {"sum": "sum"},
    optax.ScaleByAdamState: {"exp_avg": "mu", "exp_avg_sq": "nu"},
}


def build_optimizer(optimizer: Optimizer) -> optax.GradientTransformation:
    """Return the transformation from gradients to the direction that is subtracted, times the learning rate.

    Raises:
        InputError: the optimizer is one of torch's or timm's own.
    """
    if optimizer.is_of_library:
        raise InputError(
            f"optimizer.name = {optimizer.name!r} is not available with --engine xla; use {', '.join(OPTIMIZERS)}, or "
            "--engine torch"
        )
    decay = optax.add_decayed_weights(optimizer.weight_decay)
    # Sections of known optimizers have all numbers.
    eps, betas, momentum = optimizer.eps or 0.0, optimizer.betas or [], optimizer.momentum or 0.0
    if optimizer.name == "adamw":
        return optax.chain(optax.scale_by_adam(betas[0], betas[1], eps), decay)
    if optimizer.name == "adam":
        return optax.chain(decay, optax.scale_by_adam(betas[0], betas[1], eps))
    if optimizer.name == "adagrad":
        return optax.chain(decay, scale_by_adagrad(eps))
    if momentum == 0:
        return optax.chain(decay)
    return optax.chain(decay, scale_by_momentum(momentum, optimizer.dampening, nesterov=bool(optimizer.nesterov)))


def scale_by_momentum(momentum: float, dampening: float, *, nesterov: bool) -> optax.GradientTransformation:
    """Return SGD's momentum as in torch: dampening applies from the second gradient on."""

    def init(parameters: Arrays) -> MomentumState:
        return MomentumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, parameters))

    def update(gradients: Arrays, state: MomentumState, parameters: Arrays | None = None) -> tuple[Any, MomentumState]:
        share = jnp.where(state.count == 0, 1.0, 1.0 - dampening)
        buffers = jax.tree.map(lambda b, g: momentum * b + share * g, state.momentum_buffer, gradients)
        ahead = jax.tree.map(lambda b, g: g + momentum * b, buffers, gradients) if nesterov else buffers
        return ahead, MomentumState(state.count + 1, buffers)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def scale_by_adagrad(eps: float) -> optax.GradientTransformation:
    """Return Adagrad (Duchi et al., JMLR 2011) as in torch: epsilon is added to the root."""

    def init(parameters: Arrays) -> AdagradState:
        return AdagradState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, parameters))

    def update(gradients: Arrays, state: AdagradState, parameters: Arrays | None = None) -> tuple[Any, AdagradState]:
        sums = jax.tree.map(lambda s, g: s + g * g, state.sum, gradients)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), gradients, sums), AdagradState(state.count + 1, sums)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def to_torch(state: Any) -> dict[str, np.ndarray]:
    """Return the optimizer state in torch's layout: arrays by `NAME.KEY`, none before the first step."""
    kept = _kept(state)
    if kept is None or int(kept.count) == 0:
        return {}
    arrays: dict[str, np.ndarray] = {}
    for key, field in _KEYS[type(kept)].items():
        for name, value in getattr(kept, field).items():
            arrays[f"{name}.{key}"] = np.asarray(value)
            if not isinstance(kept, MomentumState):
                arrays[f"{name}.step"] = np.asarray(kept.count, np.float32)
    return arrays


def from_torch(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return an optax state of the same structure with torch's optimizer state; zero where that is missing."""
    kept = _kept(state)
    if kept is None:
        return state
    fields, count = {}, 0
    for key, field in _KEYS[type(kept)].items():
        zeros = getattr(kept, field)
        fields[field] = {name: arrays.get(f"{name}.{key}", np.zeros(v.shape, v.dtype)) for name, v in zeros.items()}
        for name in zeros:
            # Plain momentum has no step count; a state implies at least one step.
            steps = arrays.get(f"{name}.step", np.float32(f"{name}.{key}" in arrays))
            count = max(count, int(steps))
    new = kept._replace(count=np.int32(count), **fields)
    return tuple(new if part is kept else part for part in state)


def _kept(state: Any) -> Any:
    """Return the part of a chain's state with arrays per parameter."""
    return next((part for part in state if type(part) in _KEYS), None)
