"""What a reader returns: named tensors as a framework lays them out, and the same as layers laid out as torch's."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

Kind = Literal["conv", "linear", "norm", "other"]

# What frameworks call the tensors of a layer, and torch's names. Paddle's static graphs number them: w_0, b_0, w_1.
_ROLES = {
    **dict.fromkeys(("weight", "kernel", "_kernel", "depthwise_kernel", "weights", "gamma", "w_0"), "weight"),
    **dict.fromkeys(("bias", "biases", "beta", "b_0"), "bias"),
    **dict.fromkeys(("running_mean", "moving_mean", "_mean", "w_1"), "running_mean"),
    **dict.fromkeys(("running_var", "moving_variance", "moving_var", "_variance", "w_2"), "running_var"),
}
# Under which of these, other things beside them, programs save the weights of a model.
NESTED_KEYS = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "params")
# Added to the variance by batch normalisation, where a file does not have it: the defaults of the frameworks.
_EPSILON = {"keras": 1e-3, "paddle": 1e-5, "torch": 1e-5}
# Keras's own ResNets, whose names no other network has.
_KERAS_RESNET = re.compile(r"conv\d_(block\d+_\d_)?bn$")
_KERAS_RESNET_EPSILON = 1.001e-5


@dataclass(frozen=True)
class Foreign:
    """The weights of a file.

    framework: whose layout they have; keras stands for TensorFlow, too.
    tensors: by name, `layer.kernel`, in the order of the layers as far as the file has one.
    epsilons: of batch normalisation, by the name of the layer, where the file has them.
    channels_first: whether images were [C, H, W], which Keras can be set to; kernels have the same layout.
    image: height, width and channels of the images, where the file has them.
    """

    framework: Literal["torch", "paddle", "keras"]
    tensors: dict[str, torch.Tensor]
    epsilons: dict[str, float] = field(default_factory=dict)
    channels_first: bool = False
    image: tuple[int, int, int] | None = None

    @property
    def is_channels_last(self) -> bool:
        """Whether a flattened feature map has its channels last."""
        return self.framework == "keras" and not self.channels_first


class Layer(NamedTuple):
    """The tensors of a layer by torch's names and in torch's layout; epsilon is that of a batch normalisation."""

    name: str
    kind: Kind
    tensors: dict[str, torch.Tensor]
    epsilon: float


def layers_of(foreign: Foreign, epsilon: float | None = None) -> list[Layer]:
    """Return the layers in their order; `epsilon` is that of every batch normalisation."""
    grouped: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in foreign.tensors.items():
        layer, _, role = name.rpartition(".")
        if role != "num_batches_tracked":
            grouped.setdefault(layer, {})[role_of(role)] = tensor
    return [_layer(foreign, name, tensors, epsilon) for name, tensors in grouped.items()]


def _layer(foreign: Foreign, name: str, tensors: dict[str, torch.Tensor], epsilon: float | None) -> Layer:
    weight = tensors.get("weight")
    if "running_mean" in tensors or (weight is not None and weight.ndim == 1):
        kind: Kind = "norm"
    elif weight is None or weight.ndim < 2:
        kind = "other"
    else:
        kind = "linear" if weight.ndim == 2 else "conv"
    return Layer(name, kind, dict(in_torchs_layout(foreign, kind, tensors)), epsilon or _epsilon(foreign, name))


def in_torchs_layout(
    foreign: Foreign, kind: Kind, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer of a kind by torch's names, laid out as torch's."""
    for role, tensor in tensors.items():
        if kind == "linear" and role == "weight" and foreign.framework != "torch":
            yield role, tensor.t()
        elif kind == "conv" and role == "weight" and foreign.framework == "keras":
            # [H, W, in, out] to [out, in, H, W], in any number of dimensions.
            yield role, tensor.permute(-1, -2, *range(tensor.ndim - 2))
        else:
            yield role, tensor


def _epsilon(foreign: Foreign, name: str) -> float:
    last = name.rpartition(".")[2]
    if last in foreign.epsilons:
        return foreign.epsilons[last]
    if foreign.framework == "keras" and _KERAS_RESNET.match(last):
        return _KERAS_RESNET_EPSILON
    return _EPSILON[foreign.framework]


def role_of(name: str) -> str:
    """Return torch's name for a tensor of a layer."""
    return _ROLES.get(name, name)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return numbers as a tensor of its own, in the byte order of this machine."""
    native = array.astype(array.dtype.newbyteorder("="), copy=True)
    if native.dtype in (np.uint16, np.uint32, np.uint64):
        native = native.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(native)).reshape(array.shape)
