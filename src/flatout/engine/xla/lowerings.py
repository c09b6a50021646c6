"""Operations with a JAX form of our own: batch normalisation that ignores padding, max pooling, dropout from a key.

Shape letters: B batch, C channels, H height, W width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

aten = torch.ops.aten


class SampleMask(NamedTuple):
    """Which samples of a batch are real.

    Attributes:
        mask: float32 [B], 1 for a real sample and 0 for padding.
        groups: the number of equal parts of the batch with batch statistics of their own.
    """

    mask: jax.Array
    groups: int = 1


class Keys:
    """Provides a new key for each random operation, by the method that torchax's lowerings call."""

    def __init__(self, key: jax.Array | None) -> None:
        self._key = key

    def get_and_rotate_prng_key(self, generator: object = None) -> jax.Array:
        """Return a key that no other operation gets."""
        if self._key is None:
            raise TypeError("the module draws random numbers: pass a key")
        self._key, key = jax.random.split(self._key)
        return key


class Call(NamedTuple):
    """Shared by the operations of one call of a model; `batch` is the length of its batch."""

    keys: Keys
    mask: SampleMask | None
    batch: int


def _batch_norm(
    call: Call,
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    """Normalise by the statistics of the real samples (Ioffe and Szegedy, arXiv 1502.03167), as the torch engine does.

    Returns:
        y, None, None, and the new running statistics, as `aten._native_batch_norm_legit_functional`.
    """
    assert training
    samples = call.mask if call.mask and len(x) == call.batch else SampleMask(jnp.ones(len(x), jnp.float32))
    groups = samples.groups

    def normalise(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        axes = (0, *range(2, x.ndim))
        wide, weights = x.astype(jnp.float32), mask.reshape(-1, *[1] * (x.ndim - 1))
        per_sample = x[0, 0].size
        n = mask.sum() * per_sample
        mean = (wide * weights).sum(axes) / jnp.maximum(n, 1)
        centred = wide - _per_channel(mean, x.ndim)
        var = (jnp.square(centred) * weights).sum(axes) / jnp.maximum(n, 1)
        new_mean = running_mean + momentum * (mean - running_mean)
        new_var = running_var + momentum * (var * (n / jnp.maximum(n - 1, 1)) - running_var)
        if per_sample == 1 or groups > 1:
            # One value has no variance: a lone sample at the end of an epoch is normalised by the running statistics.
            is_lone = n < 2
            mean, var = jnp.where(is_lone, running_mean, mean), jnp.where(is_lone, running_var, var)
            new_mean, new_var = jnp.where(is_lone, running_mean, new_mean), jnp.where(is_lone, running_var, new_var)
            centred = wide - _per_channel(mean, x.ndim)
        scale = jax.lax.rsqrt(var + eps)
        y = centred * _per_channel(scale if weight is None else scale * weight, x.ndim)
        y = y if bias is None else y + _per_channel(bias, x.ndim)
        return y.astype(x.dtype), new_mean, new_var

    if groups == 1:
        y, new_mean, new_var = normalise(x, samples.mask)
        return y, None, None, new_mean, new_var
    parts, masks = x.reshape(groups, -1, *x.shape[1:]), samples.mask.reshape(groups, -1)
    y, new_mean, new_var = jax.vmap(normalise)(parts, masks)
    return y.reshape(x.shape), None, None, new_mean.mean(0), new_var.mean(0)


def _per_channel(values: jax.Array, ndim: int) -> jax.Array:
    return values.reshape(1, -1, *[1] * (ndim - 2))


def max_pool(call: Call, x: jax.Array, *window: Any) -> tuple[jax.Array, None]:
    """Return the maxima of 2 x 2 windows side by side; the gradient goes to the first of equal values, as in torch.

    XLA searches the windows again for the gradient. On CPUs four slices are several times faster.
    """
    x = x[..., : x.shape[-2] // 2 * 2, : x.shape[-1] // 2 * 2]
    return jax.lax.platform_dependent(x, cpu=_max_of_slices, default=_max_of_windows), None


def _max_of_windows(x: jax.Array) -> jax.Array:
    shape = (*[1] * (x.ndim - 2), 2, 2)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, shape, shape, "VALID")


@jax.custom_vjp
def _max_of_slices(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, _corners(x))


def _max_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = _max_of_slices(x)
    return y, (x, y)


def _max_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array]:
    x, y = kept
    is_open, parts = jnp.ones(y.shape, bool), []
    for corner in _corners(x):
        is_first = is_open & (corner == y)
        is_open &= ~is_first
        parts.append(jnp.where(is_first, grad, 0))
    rows = [jnp.stack(pair, -1).reshape(*y.shape[:-1], x.shape[-1]) for pair in (parts[:2], parts[2:])]
    return (jnp.stack(rows, -2).reshape(x.shape),)


_max_of_slices.defvjp(_max_forward, _max_backward)


def _corners(x: jax.Array) -> list[jax.Array]:
    """Return the four corners of all 2 x 2 windows, row by row."""
    return [x[..., row::2, column::2] for row in (0, 1) for column in (0, 1)]


def is_plain_pool(node: torch.fx.Node) -> bool:
    """Return whether a max pooling has 2 x 2 windows side by side, and its indices are unused."""
    x, kernel, *rest = cast(list[Any], node.args)
    stride, padding, dilation, ceil = (*rest, *([[], [0, 0], [1, 1], False][len(rest) :]))
    is_even = all(length % 2 == 0 for length in x.meta["val"].shape[-2:])
    return (
        list(kernel) == [2, 2] == list(stride or kernel)
        and not np.any(padding)
        and bool(np.all(np.equal(dilation, 1)))
        and (is_even or not ceil)
        and all(user.args[1] == 0 for user in node.users)
    )


def _native_dropout(call: Call, x: jax.Array, p: float, train: bool | None) -> tuple[jax.Array, None]:
    if not train or p == 0:
        return x, None
    kept = jax.random.bernoulli(call.keys.get_and_rotate_prng_key(), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0), None


OWN: dict[object, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten.native_dropout: _native_dropout,
}
