"""Keras 3 models as torch modules, trained by the XLA engine.

Keras is only imported when a Keras model is given. Shape letters: B batch, H height, W width, C channels, K outputs.
"""

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from flatout.models.layers import submodule
from flatout.utils.errors import InputError

# The real samples of the current batch, bool [B]; None if all are.
_counted: ContextVar[Any] = ContextVar("counted", default=None)


def is_keras(model: object) -> bool:
    """Whether an object is a Keras 3 model, without importing Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, getattr(keras, "Model", ()))


class Network(NamedTuple):
    """A Keras model from [B, H, W, C] to logits [B, K], and the names of its variables as in `stateless_call`."""

    model: Any
    trainable: list[str]
    others: list[str | None]  # None for the state of a random generator


class KerasModule(nn.Module):
    """A copy of a Keras model whose trainable weights are torch parameters, and the others buffers.

    It takes images [B, C, H, W], which Keras sees as [B, H, W, C], and returns logits [B, K]: the last activation is
    left out. Torch runs it on the CPU in evaluation mode, without gradients. Padding does not enter the statistics of
    BatchNormalization layers, except inside user-defined layers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._architecture = _Architecture(model)
        trained = {id(variable) for variable in model.trainable_weights}
        for name, variable in _named_weights(model).items():
            *path, last = name.split(".")
            owner, value = submodule(self, path), torch.from_numpy(np.array(variable.value))
            if id(variable) in trained:
                owner.register_parameter(last, nn.Parameter(value))
            else:
                owner.register_buffer(last, value)

    def conventions(self, report: Callable[[str], None]) -> dict[str, Any]:
        """Derive recipe keys from the model; `report` receives a message for each surprising one."""
        model, left_out, keys = self._architecture.original, self._architecture.left_out, {}
        if model.output_shape[-1] == 1:
            keys["loss"] = "binary-cross-entropy"
        if left_out:
            report(f"the loss takes logits, so the model's last activation, {left_out}, is left out")
        if scale := _rescaling(model):
            # Pixels reach a model as (pixel / 255 - mean) / std.
            top = 255 if scale < 0.1 else 1
            keys |= {"data.mean": (0.0,), "data.std": (1 / top,)}
            report(f"the model begins with Rescaling, so it gets pixels in 0..{top}, not normalised ones")
        return keys

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 [B, K]."""
        if self.training:
            raise InputError("a Keras model is trained by XLA alone: --engine xla")
        network = self._architecture.evaluated
        values = {name: tensor.cpu().numpy() for name, tensor in self.state_dict().items()}
        logits, _ = network.model.stateless_call(
            [values[name] for name in network.trainable],
            [np.zeros(2, np.uint32) if name is None else values[name] for name in network.others],
            x_NCHW.detach().permute(0, 2, 3, 1).cpu().numpy(),
            training=False,
        )
        return torch.from_numpy(np.array(logits)).to(x_NCHW.device)

    def network(self, *, precision: str = "fp32") -> Network:
        """Return the model for `stateless_call`, with the same frozen weights."""
        frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return self._architecture.network(frozen, precision)

    def to_keras(self) -> Any:
        """Make a `keras.Model` like the original, including its last activation, with this module's weights."""
        model = _copied(self._architecture.original)
        self.write_to(model)
        return model

    def write_to(self, model: object) -> None:
        """Assign this module's weights to a Keras model of the same architecture."""
        values = self.state_dict()
        for name, variable in _named_weights(model).items():
            variable.assign(values[name].numpy())


@contextlib.contextmanager
def counting(mask_B: object) -> Iterator[None]:
    """Compute batch statistics inside the block from the samples that `mask_B` (bool) marks; None for all."""
    token = _counted.set(mask_B)
    try:
        yield
    finally:
        _counted.reset(token)


class _Architecture:
    """A Keras model without its weights; immutable, so copies of a module share it."""

    def __init__(self, model: Any) -> None:
        _keras()  # checks its backend
        shape = getattr(model, "output_shape", None) if model.built else None
        if not (isinstance(shape, tuple) and len(shape) == 2):
            need = "a Sequential or functional keras.Model that begins with keras.Input and has one output [None, K]"
            raise InputError(f"model: must be {need}, not {type(model).__name__} with the output {shape}")
        if any(variable.constraint is not None for variable in model.weights) or model.losses:
            raise InputError("model: has regularizers or constraints; leave them out and set optimizer.weight_decay")
        self.left_out = _activation(model)
        if self.left_out and (self.left_out == "softmax") != (shape[-1] > 1):
            need = "softmax is for several, sigmoid is for one"
            raise InputError(f"model: ends in {self.left_out} over {shape[-1]} outputs; {need}")
        try:
            self.original = _copied(model)
        except Exception as error:  # user-defined layers may raise anything
            raise InputError(f"model: {model.name} cannot be copied ({type(error).__name__}: {error})") from error
        for own, given in zip(self.original.weights, model.weights, strict=True):
            own.assign(given.value)

    def __deepcopy__(self, memo: object) -> "_Architecture":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Architecture, (self.original,)

    @functools.cached_property
    def evaluated(self) -> Network:
        return self.network((), "fp32")

    def network(self, frozen: Collection[str], precision: str) -> Network:
        last = _last_layer(self.original) if self.left_out else None
        model = _copied(self.original, functools.partial(_for_training, last=last, is_bf16=precision == "bf16"))
        names = {id(variable): name for name, variable in _named_weights(model).items()}
        for layer in _leaves(model):
            trained = [names[id(variable)] for variable in layer.trainable_weights]
            if trained and all(name in frozen for name in trained):
                layer.trainable = False
        return Network(
            model,
            [names[id(variable)] for variable in model.trainable_variables],
            [names.get(id(variable)) for variable in model.non_trainable_variables],
        )


def _keras() -> Any:
    import keras  # pyright: ignore[reportMissingImports]

    if (backend := keras.backend.backend()) != "jax":
        raise InputError(f"model: Keras runs on {backend} here; set KERAS_BACKEND=jax before Keras is imported")
    return keras


def _copied(model: object, copied_layer: Callable[[Any], Any] | None = None) -> Any:
    return _keras().models.clone_model(model, clone_function=copied_layer, recursive=True)


def _for_training(layer: Any, *, last: Any, is_bf16: bool) -> Any:
    """Copy a layer, or an operation between layers; the activation of the layer `last` is left out."""
    keras, config = _keras(), layer.get_config()
    if is_bf16 and isinstance(layer, keras.layers.Layer) and layer.dtype_policy.name == "float32":
        config["dtype"] = "mixed_bfloat16"
    kind = _counting_norm() if type(layer) is keras.layers.BatchNormalization else type(layer)
    if layer is last and isinstance(layer, keras.layers.Softmax):
        return keras.layers.Lambda(lambda logits: logits, name=layer.name, dtype=config["dtype"])
    if layer is last:
        config["activation"] = "linear"
    return kind.from_config(config)


@functools.cache
def _counting_norm() -> type:
    """Define the layer that replaces BatchNormalization; Keras is imported late."""
    keras = _keras()

    class CountingBatchNormalization(keras.layers.BatchNormalization):
        """Normalises by the counted samples; Keras itself expects a mask of every position, channels last."""

        def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
            counted, ndim = _counted.get(), len(inputs.shape)
            if counted is not None:
                if self.axis not in (-1, ndim - 1):
                    raise InputError(f"model: layer {self.name} normalises axis {self.axis}; it must be the last one")
                places = keras.ops.reshape(counted, (-1, *[1] * (ndim - 2)))
                mask = keras.ops.broadcast_to(places, inputs.shape[:-1])
            return super().call(inputs, training=training, mask=mask)

    return CountingBatchNormalization


def _leaves(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        yield from _leaves(layer) if is_keras(layer) else [layer]


def _rescaling(model: object) -> float:
    """Find the scale of the Rescaling at the start of a model, augmentation aside; 0 for none."""
    keras = _keras()
    for layer in _leaves(model):
        if isinstance(layer, keras.layers.Rescaling):
            return float(np.max(np.abs(layer.scale)))
        if not isinstance(layer, keras.layers.InputLayer) and not type(layer).__name__.startswith("Random"):
            break
    return 0.0


def _last_layer(model: Any) -> Any:
    """Find the layer, or the operation between layers, that computes the model's outputs."""
    while is_keras(model):
        model = getattr(model, "operations", model.layers)[-1]
    return model


def _activation(model: object) -> str:
    """Find the activation that a model ends in: "softmax", "sigmoid" or ""."""
    keras, layer = _keras(), _last_layer(model)
    if not isinstance(layer, keras.layers.Layer) and type(layer).__name__ in ("Softmax", "Sigmoid"):
        raise InputError(f"model: ends in keras.ops.{type(layer).__name__.lower()}: end it in a layer instead")
    is_softmax = isinstance(layer, keras.layers.Softmax)
    last = keras.activations.softmax if is_softmax else getattr(layer, "activation", None)
    return {keras.activations.softmax: "softmax", keras.activations.sigmoid: "sigmoid"}.get(last, "")


def _named_weights(model: Any) -> dict[str, Any]:
    """Name the weights of a model, each once, as `conv2d_1.kernel`, with numbers as in a new process of Keras's.

    So a run's weights fit any model of the same architecture.
    """
    named, numbers = dict[str, Any](), Counter[str]()
    for layer in model.layers:
        name, base = layer.name, re.sub(r"_\d+$", "", layer.name)
        if base.replace("_", "") == type(layer).__name__.removeprefix("Counting").lower():
            name = f"{base}_{numbers[base]}" if numbers[base] else base
            numbers[base] += 1
        if is_keras(layer):
            inner = _named_weights(layer)
        else:
            inner = {}
            for variable in layer.weights:
                parts = variable.path.split("/")
                within = parts[parts.index(layer.name) + 1 :] if layer.name in parts else parts
                inner[".".join(part.replace(".", "_") for part in within)] = variable
            assert len(inner) == len(layer.weights), f"layer {layer.name} has several weights of one name"
        seen = {id(variable) for variable in named.values()}
        new = {path: variable for path, variable in inner.items() if id(variable) not in seen}
        named |= {f"{name.replace('.', '_')}.{path}": variable for path, variable in new.items()}
    return named
