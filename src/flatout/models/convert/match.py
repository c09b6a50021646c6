"""Match the layers of a file with those of a model, and convert their tensors to its layout.

Shape letters: N images, C channels, H height, W width.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.models.convert.readers import SourceCheckpoint, last_part
from flatout.models.layers import keep_modes
from flatout.models.weights import Tensors

Kind = Literal["conv", "linear", "norm", "other"]

# The frameworks' names for the tensors of a layer, and torch's. Paddle's static graphs number them: w_0, b_0, w_1.
_ROLES = {
    **dict.fromkeys(("weight", "kernel", "_kernel", "depthwise_kernel", "weights", "gamma", "w_0"), "weight"),
    **dict.fromkeys(("bias", "biases", "beta", "b_0"), "bias"),
    **dict.fromkeys(("running_mean", "moving_mean", "_mean", "w_1"), "running_mean"),
    **dict.fromkeys(("running_var", "moving_variance", "moving_var", "_variance", "w_2"), "running_var"),
}
# Epsilon of batch normalisation, if a file lacks it: the defaults of the frameworks, and of Keras's own ResNets.
_EPSILON = {"keras": 1e-3, "paddle": 1e-5, "torch": 1e-5}
_KERAS_RESNET_NORM, _KERAS_RESNET_EPSILON = re.compile(r"conv\d_(block\d+_\d_)?bn$"), 1.001e-5


# ---- the layers of a file --------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """The tensors of a layer by torch's names and in torch's layout; epsilon is that of a batch normalisation."""

    name: str
    kind: Kind
    tensors: dict[str, torch.Tensor]
    epsilon: float


# Model's layer -> the file's.
Pairs = dict[str, Layer]


def layers_of(source: SourceCheckpoint) -> list[Layer]:
    """Group the tensors of a file into layers, in their order."""
    layers = []
    for name, tensors in _grouped(source.tensors).items():
        kind = _kind_of(tensors)
        if kind == "linear" and source.framework != "torch":
            tensors["weight"] = tensors["weight"].t()
        elif kind == "conv" and source.framework == "keras":
            # [H, W, in, out] to [out, in, H, W], in any number of dimensions.
            tensors["weight"] = tensors["weight"].permute(-1, -2, *range(tensors["weight"].ndim - 2))
        is_resnet = source.framework == "keras" and _KERAS_RESNET_NORM.match(last_part(name))
        usual = _KERAS_RESNET_EPSILON if is_resnet else _EPSILON[source.framework]
        layers.append(Layer(name, kind, tensors, source.epsilons.get(last_part(name), usual)))
    return layers


def _grouped(tensors: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    grouped: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, role = name.rpartition(".")
        if role != "num_batches_tracked":
            grouped.setdefault(layer, {})[_ROLES.get(role, role)] = tensor
    return grouped


def _kind_of(tensors: Tensors) -> Kind:
    weight = tensors.get("weight")
    if "running_mean" in tensors or (weight is not None and weight.ndim == 1):
        return "norm"
    if weight is None or weight.ndim < 2:
        return "other"
    return "linear" if weight.ndim == 2 else "conv"


# ---- the layers of a model -------------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """The layers of a model by name."""

    layers: dict[str, Kind]  # those with weights, in forward order
    flattened: dict[str, tuple[int, int, int]]  # linear layer -> (C, H, W) of the map whose flattened values it takes
    norms: dict[str, str]  # convolution -> the batch normalisation that takes its output


class _FollowMaps(TorchFunctionMode):
    """Marks flattened feature maps, and what is computed from them in the same shape, with the shape of the map."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        given = args[0] if args else None
        if isinstance(result, torch.Tensor) and isinstance(given, torch.Tensor) and result.ndim == 2:
            if given.ndim == 4 and given.numel() == result.numel() and len(result) == 1:
                vars(result)["map_shape"] = tuple(given.shape[1:])
            elif "map_shape" in vars(given) and given.shape == result.shape:
                vars(result)["map_shape"] = vars(given)["map_shape"]
        return result


def trace(model: nn.Module, channels: int, height: int, width: int) -> Trace:
    """Run a model on one black image, without changing its state; if it fails, the order is that of registration."""
    kinds: dict[str, Kind] = {name: _kind_of(tensors) for name, tensors in _grouped(model.state_dict()).items()}
    names = {model.get_submodule(name): name for name in kinds}
    found = Trace({}, {}, {})

    def enter(module: nn.Module, arguments: tuple[object, ...]) -> None:
        name = names[module]
        found.layers[name] = kinds[name]
        marks = vars(arguments[0]) if arguments and isinstance(arguments[0], torch.Tensor) else {}
        if isinstance(module, nn.Linear) and "map_shape" in marks:
            found.flattened[name] = marks["map_shape"]
        if hasattr(module, "running_mean") and "convolution" in marks:
            found.norms[marks["convolution"]] = name

    def leave(module: nn.Module, arguments: object, output: object) -> None:
        if kinds[names[module]] == "conv" and isinstance(output, torch.Tensor):
            vars(output)["convolution"] = names[module]

    try:
        with ExitStack() as hooks, keep_modes(model), torch.no_grad(), _FollowMaps():
            for module in names:
                hooks.enter_context(module.register_forward_hook(leave))
                hooks.enter_context(module.register_forward_pre_hook(enter))
            model.eval()(torch.zeros(1, channels, height, width))
    except Exception:  # a user's model may raise anything; its later use reports the error
        return Trace(kinds, {}, {})
    return found._replace(layers={**found.layers, **kinds})


# ---- families of networks, whose layers others name in other ways ----------------------------------------------------

# conv2_block1_1_conv, conv2_block1_0_bn; res2a_branch2a until Keras 2.2
_KERAS = re.compile(r"conv([2-5])_block(\d+)_([0-3])_(conv|bn)")
_OLD_KERAS = re.compile(r"(res|bn)[2-5][a-z]_branch(1|2[abc])")
_STEM = {"conv1_conv": "conv1", "conv1_bn": "bn1", "predictions": "fc"}
# _blocks.3._bn0: EfficientNet-PyTorch and EfficientNet-Lite, which is made from it. Blocks are counted over all stages.
_EFFICIENTNET = re.compile(r"_blocks\.(?P<block>\d+)\.(?P<part>_\w+)")
_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_EXPANDING_BLOCK = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
_EXPANDING_BLOCK |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
_PLAIN_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def _family(model: nn.Module) -> tuple[str, Callable[[str], str | None]]:
    """Name the family of a model of timm's; and make a function from others' name of a layer to timm's, or None."""
    parts = dict(model.named_children())
    is_resnet = {"bn1", "layer1", "layer2", "layer3", "layer4", "fc"} <= parts.keys()
    if is_resnet and isinstance(parts.get("conv1"), nn.Conv2d):
        return "ResNet", _resnet_name
    if not {"conv_stem", "bn1", "blocks", "conv_head", "bn2", "classifier"} <= parts.keys():
        return "", lambda name: None
    stages = parts["blocks"].named_children()
    blocks = [(f"blocks.{stage}.{name}", block) for stage, inner in stages for name, block in inner.named_children()]

    def efficientnet_name(name: str) -> str | None:
        match = _EFFICIENTNET.fullmatch(name)
        if match is None:
            return _OUTSIDE.get(name)
        if int(match["block"]) >= len(blocks):
            return None
        place, block = blocks[int(match["block"])]
        part = (_EXPANDING_BLOCK if hasattr(block, "conv_pwl") else _PLAIN_BLOCK).get(match["part"])
        return part and f"{place}.{part}"

    return "EfficientNet", efficientnet_name


def _resnet_name(name: str) -> str | None:
    match = _KERAS.fullmatch(last_part(name))
    if match is None:
        return _STEM.get(last_part(name))
    stage, block, part, is_norm = int(match[1]), int(match[2]), match[3], match[4] == "bn"
    place = f"downsample.{int(is_norm)}" if part == "0" else f"{'bn' if is_norm else 'conv'}{part}"
    return f"layer{stage - 1}.{block - 1}.{place}"


def has_other_strides(model: nn.Module, names: Collection[str]) -> bool:
    """Whether a model has its strides in other layers than Keras's ResNet with these names."""
    parts = map(last_part, names)
    if _family(model)[0] != "ResNet" or not any(_KERAS.fullmatch(part) or _OLD_KERAS.fullmatch(part) for part in parts):
        return False
    first = model.get_submodule("layer2.0.conv1")
    return isinstance(first, nn.Conv2d) and first.stride == (1, 1)


def to_timm_names(model: nn.Module, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Rename tensors as in a model of timm's; names of no known family are kept."""
    _, name_of = _family(model)
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, role = name.rpartition(".")
        own = name_of(layer)
        renamed[f"{own}.{role}" if own else name] = tensor
    return renamed


# ---- matching --------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """The tensors of a file by the names of a model, or their own; the method; the model's layer -> the file's."""

    how: str
    tensors: dict[str, torch.Tensor]
    pairs: dict[str, str]


def candidates(source: SourceCheckpoint, model: nn.Module, trace: Trace, heads: Collection[str]) -> Iterator[Candidate]:
    """Yield the ways to match the layers of a file with those of a model, the most certain first.

    `heads` are the layers that may be missing in the file, or have another number of outputs.
    """

    def candidate(how: str, pairs: Pairs) -> Candidate:
        paired = {layer.name for layer in pairs.values()}
        rest = [layer for layer in layers if layer.name not in paired]
        tensors = _adapted(source, model, trace, pairs) | _unpaired(rest, trace)
        return Candidate(how, tensors, {own: layer.name for own, layer in pairs.items()})

    layers = layers_of(source)
    family, name_of = _family(model)
    named = {own: layer for layer in layers if (own := name_of(layer.name))}
    if len(named) == len(layers) > 2:
        # A deeper network has layers that this one lacks.
        known = {own: layer for own, layer in named.items() if own in trace.layers}
        yield candidate(f"by the names of {family}'s layers", known)
        return
    # Without scopes, whose number differs: `model.net.conv1`.
    by_name = {own: layer for layer in layers if (own := _own_name(layer.name, trace))}
    if by_name:
        paired = {layer.name for layer in by_name.values()}
        linear = [layer for layer in layers if layer.kind == "linear" and layer.name not in paired]
        if source.framework != "torch" and len(linear) == len(heads) == 1 and not {*heads} & {*by_name}:
            # The only linear layer that remains is the head.
            by_name |= dict(zip(heads, linear, strict=True))
        yield candidate("by name", by_name)
    if not by_name or 2 * len(by_name) < len(layers):
        # Where most names are the model's, the order of the others has no meaning.
        yield candidate("by order and shape", _in_order(layers, trace, heads))


def _own_name(name: str, trace: Trace) -> str | None:
    while name and name not in trace.layers:
        name = name.partition(".")[2]
    return name or None


def _in_order(layers: list[Layer], trace: Trace, heads: Collection[str]) -> Pairs:
    """Pair the layers of each kind in order."""
    pairs: Pairs = {}
    for kind in ("conv", "norm", "linear", "other"):
        theirs = [layer for layer in layers if layer.kind == kind]
        own = [name for name, own_kind in trace.layers.items() if own_kind == kind]
        body = [name for name in own if name not in heads]
        # If the numbers differ, the file has no head, or one of several layers.
        pairs |= dict(zip(own if len(theirs) == len(own) else body, theirs, strict=False))
    return pairs


def _unpaired(layers: list[Layer], trace: Trace) -> dict[str, torch.Tensor]:
    """Name the tensors of other layers: linear ones under the last linear layer, as parts of another head."""
    head = "".join([f"{own}." for own, kind in trace.layers.items() if kind == "linear"][-1:])
    return {
        f"{head if layer.kind == 'linear' else ''}{layer.name}.{role}".removeprefix("."): tensor
        for layer in layers
        for role, tensor in layer.tensors.items()
    }


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _adapted(source: SourceCheckpoint, model: nn.Module, trace: Trace, pairs: Pairs) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for own, layer in pairs.items():
        module = model.get_submodule(own)
        found = _in_layout(layer.tensors, module, trace.flattened.get(own), source.channels_last)
        if source.framework != "torch":
            _complete(found, module, layer)
        tensors |= {f"{own}.{role}" if own else role: tensor.contiguous() for role, tensor in found.items()}
    for own, layer in pairs.items():
        # A bias before a norm becomes part of its mean if the model's convolution has none.
        bias, mean = f"{own}.bias", f"{trace.norms.get(own)}.running_mean"
        has_none = layer.kind == "conv" and getattr(model.get_submodule(own), "bias", None) is None
        if has_none and bias in tensors and mean in tensors and tensors[mean].shape == tensors[bias].shape:
            tensors[mean] = tensors[mean] - tensors.pop(bias)
    return tensors


def _in_layout(
    tensors: dict[str, torch.Tensor], module: nn.Module, flattened: tuple[int, int, int] | None, is_channels_last: bool
) -> dict[str, torch.Tensor]:
    weight = tensors.get("weight")
    if weight is None:
        return dict(tensors)
    if weight.ndim == 2 and flattened and is_channels_last and weight.shape[1] == math.prod(flattened):
        channels, height, width = flattened
        weight = weight.reshape(-1, height, width, channels).permute(0, 3, 1, 2).reshape(weight.shape)
    if weight.ndim == 4 and isinstance(module, nn.Conv2d):
        outputs, inputs = module.weight.shape[:2]
        if inputs == 1 and weight.shape[:2] == (outputs // module.groups, module.groups):  # depthwise, of Keras's
            weight = weight.transpose(0, 1).reshape(outputs, 1, *weight.shape[2:])
    return {**tensors, "weight": weight}


def _complete(tensors: dict[str, torch.Tensor], module: nn.Module, layer: Layer) -> None:
    """Add what other frameworks may leave out, and convert to the epsilon of the model's normalisation."""
    if layer.kind == "norm":
        like = next(iter(tensors.values()))
        for role, value in (("weight", 1.0), ("bias", 0.0)):
            if isinstance(getattr(module, role, None), torch.Tensor):
                tensors.setdefault(role, torch.full_like(like, value))
        shift = layer.epsilon - float(getattr(module, "eps", layer.epsilon))
        if "running_var" in tensors and shift:
            # Only the sum of variance and epsilon matters.
            tensors["running_var"] = (tensors["running_var"].double() + shift).float()
    elif layer.kind != "other" and getattr(module, "bias", None) is not None:
        tensors.setdefault("bias", torch.zeros(len(tensors["weight"])))
