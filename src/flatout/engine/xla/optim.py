"""torch's optimizers as optax transformations: the same numbers, and a state that either engine can continue from.

optax's own differ slightly from torch's: its Adagrad adds epsilon under the root, its momentum has no dampening. The
transformations here do not include the learning rate, which changes: the step multiplies by it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flatout.config import OPTIMIZERS, Optimizer
from flatout.utils.errors import InputError

Arrays = dict[str, jax.Array]


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


def build(optimizer: Optimizer) -> optax.GradientTransformation:
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
