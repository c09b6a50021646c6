"""A Keras model as a pure JAX function.

Shape letters: B batch, H height, W width, C channels, K outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from flatout.engine.xla.function import Arrays
from flatout.engine.xla.lowerings import Counted
from flatout.errors import InputError, first_line
from flatout.models.keras import KerasModule, counting


class KerasFunction:
    """A Keras model as a pure function of JAX arrays; what `functional.Function` is for a torch module.

    What Keras draws at random depends on the key of the call alone, so a run repeats with its seed.

    Args:
        module: in training or in evaluation mode, as it is to be run; it is not changed.
        inputs: example images [B, C, H, W].
        name: what to call the model in messages.
        precision: "bf16" to compute in bfloat16.

    Attributes:
        parameters, buffers, output_shapes: as `functional.Function` has them.

    Raises:
        InputError: Keras cannot run the model under jit, or the model adds to the loss.
    """

    def __init__(
        self, module: KerasModule, inputs: tuple[torch.Tensor, ...], *, name: str, precision: str = "fp32"
    ) -> None:
        self.parameters = [n for n, _ in module.named_parameters()]
        self.buffers = [n for n, _ in module.named_buffers()]
        self._network, self._is_training = module.network(precision=precision), module.training
        shapes = {n: jax.ShapeDtypeStruct(t.shape, t.numpy().dtype) for n, t in module.state_dict().items()}
        images = jax.ShapeDtypeStruct(inputs[0].shape, jnp.float32)
        try:
            logits, _, losses = jax.eval_shape(self._call, shapes, images, jax.random.key(0))
        except Exception as error:  # layers of the user's own may raise anything
            raise InputError(f"model {name}: fails under XLA: {type(error).__name__}: {first_line(error)}") from error
        if losses:
            raise InputError(f"model {name}: adds to the loss by itself (add_loss, regularizers); leave that out")
        self.output_shapes = [logits.shape]

    def __call__(
        self,
        parameters: Arrays,
        buffers: Arrays,
        images_BCHW: jax.Array,
        *,
        key: jax.Array | None = None,
        counted: Counted | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Return the logits [B, K], and the buffers afterwards; arguments as for `functional.Function`."""
        if counted is not None and counted.groups > 1 and self.buffers:
            raise InputError("norm = 'per-device': Keras models normalise by the whole batch; use norm = 'global'")
        mask = None if counted is None else counted.mask > 0
        with counting(mask):
            logits, others, _ = self._call({**parameters, **buffers}, images_BCHW, key)
        new = {n: others[n].astype(buffer.dtype) if n in others else buffer for n, buffer in buffers.items()}
        return logits, new

    def _call(
        self, values: Arrays, images_BCHW: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]:
        """Return logits, the variables that are not trained as they are afterwards, and losses of the model's own."""
        model, trainable, others = self._network
        generators = others.count(None)
        # Without a key nothing is drawn, but Keras wants every state.
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
