"""Match the layers of a file with those of a model, and convert their tensors to its layout.

Shape letters: N images, C channels, H height, W width.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.models.convert.readers import SourceCheckpoint, last_part
from flatout.models.layers import keep_modes

Kind = Literal["conv", "linear", "norm", "other"]
_Value = TypeVar("_Value")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# The frameworks' names for the tensors of a layer, and torch's. Paddle's static graphs number them: w_0, b_0, w_1.
_ROLES = {
    **dict.fromkeys(("weight", "kernel", "_kernel", "depthwise_kernel", "weights", "gamma", "w_0"), "weight"),
    **dict.fromkeys(("bias", "biases", "beta", "b_0"), "bias"),
    **dict.fromkeys(("running_mean", "moving_mean", "_mean", "w_1"), "running_mean"),
    **dict.fromkeys(("running_var", "moving_variance", "moving_var", "_variance", "w_2"), "running_var"),
}
# Epsilon of batch normalisation, if a file lacks it: the defaults of the frameworks, and of Keras's own ResNets, which
# have special names.
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
    grouped: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in source.tensors.items():
        layer, _, role = name.rpartition(".")
        if role != "num_batches_tracked":
            grouped.setdefault(layer, {})[_ROLES.get(role, role)] = tensor
    layers = []
    for name, tensors in grouped.items():
        weight = tensors.get("weight")
        if "running_mean" in tensors or (weight is not None and weight.ndim == 1):
            kind: Kind = "norm"
        elif weight is None or weight.ndim < 2:
            kind = "other"
        else:
            kind = "linear" if weight.ndim == 2 else "conv"
        if kind == "linear" and weight is not None and source.framework != "torch":
            tensors["weight"] = weight.t()
        elif kind == "conv" and weight is not None and source.framework == "keras":
            # [H, W, in, out] to [out, in, H, W], in any number of dimensions.
            tensors["weight"] = weight.permute(-1, -2, *range(weight.ndim - 2))
        layers.append(Layer(name, kind, tensors, _epsilon(source, last_part(name))))
    return layers


def _epsilon(source: SourceCheckpoint, layer: str) -> float:
    if layer in source.epsilons:
        return source.epsilons[layer]
    is_resnet = source.framework == "keras" and _KERAS_RESNET_NORM.match(layer)
    return _KERAS_RESNET_EPSILON if is_resnet else _EPSILON[source.framework]


# ---- the layers of a model -------------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """The layers of a model by name.

    layers: those with weights, in forward order; the kind of each.
    flattened: linear layer -> (C, H, W) of the feature map whose flattened values it takes.
    norms: convolution -> the batch normalisation that takes its output.
    """

    layers: dict[str, Kind]
    flattened: dict[str, tuple[int, int, int]]
    norms: dict[str, str]


def trace(model: nn.Module, channels: int, height: int, width: int) -> Trace:
    """Run a model on one black image in evaluation mode, without changing its state.

    If the model fails, the order is that of registration.
    """
    owners = dict.fromkeys(name.rpartition(".")[0] for name in model.state_dict())
    registered: dict[str, Kind] = {name: _kind_of(model.get_submodule(name)) for name in owners}
    names = {model.get_submodule(name): name for name in registered}
    watch = _Watch(names)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    handles = [module.register_forward_hook(watch.leave) for module in names]
    handles += [module.register_forward_pre_hook(watch.enter) for module in names]
    try:
        with keep_modes(model), torch.no_grad(), watch:
            model.eval()(torch.zeros(1, channels, height, width, device=device))
    except Exception:  # a user's model may raise anything; its later use reports the error
        watch = _Watch(names)
    finally:
        for handle in handles:
            handle.remove()
    return Trace({name: registered[name] for name in {**watch.order, **registered}}, watch.flattened, watch.norms)


def _kind_of(module: nn.Module) -> Kind:
    if isinstance(module, _CONVOLUTIONS):
        return "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    weight = getattr(module, "weight", None)
    is_norm = hasattr(module, "running_mean") or (isinstance(weight, torch.Tensor) and weight.ndim == 1)
    return "norm" if is_norm else "other"


class _Watch(TorchFunctionMode):
    """Follows flattened feature maps, and notes the order of layers."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        super().__init__()
        self._names = names
        self._shapes: dict[int, tuple[int, int, int]] = {}
        self._convs: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # so that ids stay unique
        self.order: dict[str, None] = {}
        self.flattened: dict[str, tuple[int, int, int]] = {}
        self.norms: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if isinstance(result, torch.Tensor) and given is not None and result.ndim == 2:
            if given.ndim == 4 and given.numel() == result.numel() and len(result) == 1:
                self._shapes[id(result)] = given.shape[1], given.shape[2], given.shape[3]
                self._kept.append(result)
            elif id(given) in self._shapes and given.shape == result.shape:
                self._shapes[id(result)] = self._shapes[id(given)]
                self._kept.append(result)
        return result

    def enter(self, module: nn.Module, arguments: Any) -> None:
        name = self._names[module]
        self.order[name] = None
        given = arguments[0] if arguments else None
        if isinstance(module, nn.Linear) and id(given) in self._shapes:
            self.flattened[name] = self._shapes[id(given)]
        if hasattr(module, "running_mean") and id(given) in self._convs:
            self.norms[self._convs[id(given)]] = name

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(module, _CONVOLUTIONS) and isinstance(output, torch.Tensor):
            self._kept.append(output)
            self._convs[id(output)] = self._names[module]


# ---- families of networks, whose layers others name in other ways ----------------------------------------------------

# conv2_block1_1_conv, conv2_block1_0_bn
_KERAS = re.compile(r"conv(?P<stage>[2-5])_block(?P<block>\d+)_(?P<part>[0-3])_(?P<kind>conv|bn)")
# Keras until 2.2: res2a_branch2a
_OLD_KERAS = re.compile(r"(res|bn)[2-5][a-z]_branch(1|2[abc])")
_STEM = {"conv1_conv": "conv1", "conv1_bn": "bn1", "predictions": "fc"}
# _blocks.3._bn0: EfficientNet-PyTorch and EfficientNet-Lite, which is made from it. Blocks are counted over all stages.
_EFFICIENTNET = re.compile(r"_blocks\.(?P<block>\d+)\.(?P<part>_\w+)")
_AROUND_BLOCKS = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDING_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_PLAIN_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def _is_resnet(model: nn.Module) -> bool:
    """Whether a model has timm's ResNet layers with a plain stem."""
    names = {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}
    return names <= dict(model.named_children()).keys() and isinstance(model.get_submodule("conv1"), nn.Conv2d)


def has_other_strides(model: nn.Module, names: Collection[str]) -> bool:
    """Whether a model has its strides in other layers than Keras's ResNet with these names."""
    parts = map(last_part, names)
    if not _is_resnet(model) or not any(_KERAS.fullmatch(part) or _OLD_KERAS.fullmatch(part) for part in parts):
        return False
    first = model.get_submodule("layer2.0.conv1")
    return isinstance(first, nn.Conv2d) and first.stride == (1, 1)


def _resnet_name(name: str) -> str | None:
    """Convert the name of a layer of Keras's ResNet to that of timm's."""
    match = _KERAS.fullmatch(last_part(name))
    if match is None:
        return _STEM.get(last_part(name))
    block, part = f"layer{int(match['stage']) - 1}.{int(match['block']) - 1}", int(match["part"])
    is_norm = match["kind"] == "bn"
    return f"{block}.{'bn' if is_norm else 'conv'}{part}" if part else f"{block}.downsample.{int(is_norm)}"


def _is_efficientnet(model: nn.Module) -> bool:
    names = {"conv_stem", "bn1", "blocks", "conv_head", "bn2", "classifier"}
    return names <= dict(model.named_children()).keys()


def _efficientnet_namer(model: nn.Module) -> Callable[[str], str | None]:
    """Make a function from the name of a layer of EfficientNet-PyTorch to that of timm's EfficientNet, or None."""
    stages = model.get_submodule("blocks").named_children()
    blocks = [(f"blocks.{stage}.{name}", block) for stage, inner in stages for name, block in inner.named_children()]

    def name_of(name: str) -> str | None:
        match = _EFFICIENTNET.fullmatch(name)
        if match is None:
            return _AROUND_BLOCKS.get(name)
        if int(match["block"]) >= len(blocks):
            return None
        place, block = blocks[int(match["block"])]
        part = (_EXPANDING_BLOCK if hasattr(block, "conv_pwl") else _PLAIN_BLOCK).get(match["part"])
        return part and f"{place}.{part}"

    return name_of


def to_timm_names(model: nn.Module, tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """Rename tensors as in a model of timm's; names of no known family are kept."""
    namer = _efficientnet_namer(model) if _is_efficientnet(model) else lambda name: None
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, role = name.rpartition(".")
        own = namer(layer)
        renamed[f"{own}.{role}" if own else name] = tensor
    return renamed


# ---- matching --------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """The tensors of a file by the names of a model's state dict; unmatched ones keep their own names.

    how: the method of the matching.
    pairs: the model's layer -> the file's, by name.
    """

    how: str
    tensors: dict[str, torch.Tensor]
    pairs: dict[str, str]


def candidates(source: SourceCheckpoint, model: nn.Module, trace: Trace, heads: Collection[str]) -> Iterator[Candidate]:
    """Yield the ways to match the layers of a file with those of a model, the most certain first.

    Args:
        model: only names, types and shapes of its layers are used.
        heads: the layers that may be missing in the file, or have another number of outputs.
    """
    layers = layers_of(source)
    adapter = _Adapter(source, model, trace)
    if _is_resnet(model):
        named = {own: layer for layer in layers if (own := _resnet_name(layer.name))}
        if len(named) > 2 and len(named) == len(layers):
            # A deeper network has layers that this one lacks.
            known = {own: layer for own, layer in named.items() if own in trace.layers}
            rest = [layer for own, layer in named.items() if own not in known]
            yield adapter.candidate("by the names of ResNet's layers", known, rest)
            return
    if _is_efficientnet(model):
        namer = _efficientnet_namer(model)
        named = {own: layer for layer in layers if (own := namer(layer.name)) in trace.layers}
        if len(named) == len(layers):
            yield adapter.candidate("by the names of EfficientNet's layers", named, [])
    # Without scopes, whose number differs: `model.net.conv1`.
    by_name = {own: layer for layer in layers if (own := _own_name(layer.name, trace))}
    if by_name:
        rest = [layer for layer in layers if layer.name not in {paired.name for paired in by_name.values()}]
        linear = [layer for layer in rest if layer.kind == "linear"]
        if source.framework != "torch" and len(linear) == len(heads) == 1 and not {*heads} & {*by_name}:
            # The only linear layer that remains is the head.
            by_name |= dict(zip(heads, linear, strict=True))
            rest = [layer for layer in rest if layer is not linear[0]]
        yield adapter.candidate("by name", by_name, rest)
    if not by_name or 2 * len(by_name) < len(layers):
        # Where most names are the model's, the order of the others has no meaning.
        yield adapter.candidate("by order and shape", *_in_order(layers, trace, heads))


def _own_name(name: str, trace: Trace) -> str | None:
    while name:
        if name in trace.layers:
            return name
        name = name.partition(".")[2]
    return None


def _in_order(layers: list[Layer], trace: Trace, heads: Collection[str]) -> tuple[Pairs, list[Layer]]:
    """Pair the layers of each kind in order; also return the file's remaining layers."""
    pairs: Pairs = {}
    rest: list[Layer] = []
    for kind in ("conv", "norm", "linear", "other"):
        theirs = [layer for layer in layers if layer.kind == kind]
        own = [name for name, own_kind in trace.layers.items() if own_kind == kind]
        body = [name for name in own if name not in heads]
        if len(theirs) != len(own) and len(body) < len(own):
            # The file has no head, or one of several layers.
            own = body
        pairs |= dict(zip(own, theirs, strict=False))
        rest += theirs[len(own) :]
    return pairs, rest


class _Adapter:
    """Converts tensors to a model's layout."""

    def __init__(self, source: SourceCheckpoint, model: nn.Module, trace: Trace) -> None:
        self._source, self._model, self._trace = source, model, trace

    def candidate(self, how: str, pairs: Pairs, rest: list[Layer]) -> Candidate:
        """Convert the tensors of pairs of layers; the rest keep their own names."""
        tensors: dict[str, torch.Tensor] = {}
        for own, layer in pairs.items():
            found = self._tensors(own, layer)
            tensors |= {f"{own}.{role}" if own else role: tensor for role, tensor in found.items()}
        for own, layer in pairs.items():
            self._fold_bias(own, layer, tensors)
        # Under the head's name, layers of another head do not count as the body's.
        heads = [own for own, kind in self._trace.layers.items() if kind == "linear"][-1:]
        for layer in rest:
            prefix = f"{heads[0]}.{layer.name}" if heads and layer.kind == "linear" else layer.name
            tensors |= {f"{prefix}.{role}".removeprefix("."): tensor for role, tensor in layer.tensors.items()}
        return Candidate(how, tensors, {own: layer.name for own, layer in pairs.items()})

    def _tensors(self, own: str, layer: Layer) -> dict[str, torch.Tensor]:
        module = self._model.get_submodule(own)
        tensors = dict(layer.tensors)
        shape = self._trace.flattened.get(own)
        weight = tensors.get("weight")
        if weight is not None and weight.ndim == 2 and shape and self._source.is_channels_last:
            channels, height, width = shape
            if weight.shape[1] == channels * height * width:
                maps = weight.reshape(len(weight), height, width, channels)
                tensors["weight"] = maps.permute(0, 3, 1, 2).reshape(weight.shape)
        if weight is not None and weight.ndim == 4 and isinstance(module, nn.Conv2d):
            outputs, inputs = module.weight.shape[:2]
            if inputs == 1 and weight.shape[:2] == (outputs // module.groups, module.groups):
                # A depthwise kernel of Keras's.
                tensors["weight"] = weight.transpose(0, 1).reshape(outputs, 1, *weight.shape[2:])
        lacks_bias = "bias" not in tensors and getattr(module, "bias", None) is not None
        if self._source.framework != "torch" and layer.kind == "norm":
            self._complete_norm(module, layer, tensors)
        elif self._source.framework != "torch" and layer.kind in ("conv", "linear") and lacks_bias:
            tensors["bias"] = torch.zeros(len(tensors["weight"]) if "weight" in tensors else 0)
        return {role: tensor.contiguous() for role, tensor in tensors.items()}

    def _complete_norm(self, module: nn.Module, layer: Layer, tensors: dict[str, torch.Tensor]) -> None:
        """Convert to the epsilon of the model's normalisation, and add the scale and shift that Keras may leave out."""
        like = next(iter(tensors.values()))
        for role, value in (("weight", 1.0), ("bias", 0.0)):
            if isinstance(getattr(module, role, None), torch.Tensor):
                tensors.setdefault(role, torch.full_like(like, value))
        shift = layer.epsilon - float(getattr(module, "eps", layer.epsilon))
        if "running_var" in tensors and shift:
            # Only the sum of variance and epsilon matters.
            tensors["running_var"] = (tensors["running_var"].double() + shift).float()

    def _fold_bias(self, own: str, layer: Layer, tensors: dict[str, torch.Tensor]) -> None:
        """Subtract a convolution's bias from the mean of the following norm if the model's convolution has no bias."""
        bias, mean = f"{own}.bias", f"{self._trace.norms.get(own)}.running_mean"
        has_none = getattr(self._model.get_submodule(own), "bias", None) is None
        if layer.kind != "conv" or not has_none or bias not in tensors or mean not in tensors:
            return
        if tensors[mean].shape == tensors[bias].shape:
            tensors[mean] = tensors[mean] - tensors.pop(bias)
