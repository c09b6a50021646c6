"""A Keras model as a pure JAX function.

Shape letters: B batch, H height, W width, C channels, K outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from flatout.engine.xla.function import Arrays, SampleMask
from flatout.models.keras import KerasModule, counting
from flatout.utils.errors import InputError, first_line


class KerasFunction:
    """A Keras model as a pure function of JAX arrays; see `function.Function`.

    Random numbers depend only on the key of the call, so a run is reproducible from its seed.

    Raises:
        InputError: Keras cannot run the model under jit, or the model adds to the loss.
    """

    def __init__(
        self, module: KerasModule, inputs: tuple[torch.Tensor, ...], *, name: str, precision: str = "fp32"
    ) -> None:
        self._network, self._is_training = module.network(precision=precision), module.training
        shapes = {n: jax.ShapeDtypeStruct(t.shape, t.numpy().dtype) for n, t in module.state_dict().items()}
        images = jax.ShapeDtypeStruct(inputs[0].shape, jnp.float32)
        try:
            logits, _, losses = jax.eval_shape(self._call, shapes, images, jax.random.key(0))
        except Exception as error:  # user-defined layers may raise anything
            raise InputError(f"model {name}: fails under XLA: {type(error).__name__}: {first_line(error)}") from error
        if losses:
            raise InputError(f"model {name}: adds terms to the loss (add_loss, regularizers), which is not supported")
        self.output_shapes = [logits.shape]

    def __call__(
        self,
        parameters: Arrays,
        buffers: Arrays,
        images_BCHW: jax.Array,
        *,
        key: jax.Array | None = None,
        mask: SampleMask | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Return the logits [B, K], and the new buffers; for the arguments see `function.Function`."""
        if mask is not None and mask.groups > 1 and buffers:
            raise InputError("norm = 'per-device': Keras models normalise by the whole batch; use norm = 'global'")
        with counting(None if mask is None else mask.mask > 0):
            logits, others, _ = self._call({**parameters, **buffers}, images_BCHW, key)
        new = {n: others[n].astype(buffer.dtype) if n in others else buffer for n, buffer in buffers.items()}
        return logits, new

    def _call(
        self, values: Arrays, images_BCHW: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]:
        """Return logits, the new values of the variables that are not trained, and the model's own losses."""
        model, trainable, others = self._network
        generators = others.count(None)
        # Keras requires every generator's state, even if unused.
        keys = jax.random.split(jax.random.key(0) if key is None else key, max(1, generators))
        seeds = iter(jax.random.key_data(keys))
        logits, after, losses = model.stateless_call(
            [values[name] for name in trainable],
            [next(seeds) if name is None else values[name] for name in others],
            images_BCHW.transpose(0, 2, 3, 1),
            training=self._is_training,
            return_losses=True,
        )
        return logits, {n: value for n, value in zip(others, after, strict=True) if n is not None}, losses
