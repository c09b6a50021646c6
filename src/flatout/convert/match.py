"""Which layer of a file belongs to which layer of a model, and its tensors as the model has them."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from flatout.convert.families import (
    efficientnet_namer,
    in_kerass_order,
    is_efficientnet,
    is_keras_resnet,
    is_resnet,
    resnet_namer,
)
from flatout.convert.foreign import Foreign, Layer, in_torchs_layout, layers_of, role_of
from flatout.convert.trace import Trace
from flatout.errors import InputError
from flatout.settings import nearest

# Model's layer -> the file's.
Pairs = dict[str, Layer]


class Candidate(NamedTuple):
    """The tensors of a file by the names of a model's state dict; those that fit nowhere keep their own names.

    how: how the layers were found.
    pairs: the model's layer -> the file's, by name.
    """

    how: str
    tensors: dict[str, torch.Tensor]
    pairs: dict[str, str]


def candidates(
    foreign: Foreign,
    model: nn.Module,
    trace: Trace,
    heads: Mapping[str, object],
    *,
    mapping: Mapping[str, str] | None = None,
    epsilon: float | None = None,
) -> Iterator[Candidate]:
    """Yield the ways to match the layers of a file with those of a model, the most certain first.

    Args:
        model: only names, types and shapes of its layers are used.
        heads: the layers whose weights the file may lack, or have in another number.
        mapping: the model's layer or tensor -> the file's; these pairs are certain.
        epsilon: of the file's batch normalisation, if it differs from what the file and its framework say.

    Raises:
        InputError: the mapping names something that the file or the model does not have.
    """
    layers = {layer.name: layer for layer in layers_of(foreign, epsilon)}
    fixed = _mapped(foreign, layers, trace, mapping or {})
    used = {name for layer in fixed.values() for name in layer.name.split(" + ")}
    free = [layer for name, layer in layers.items() if name not in used]
    adapter = _Adapter(foreign, model, trace)
    if is_resnet(model) and foreign.framework == "keras":
        trace = trace._replace(layers={name: trace.layers[name] for name in in_kerass_order(trace.layers)})
    if is_resnet(model) and not mapping:
        namer = resnet_namer(model)
        named = {own: layer for layer in free if (own := namer(layer.name))}
        if len(named) > 2 and len(named) == len(free):
            # A deeper network has layers that this one lacks.
            known = {own: layer for own, layer in named.items() if own in trace.layers}
            rest = [layer for own, layer in named.items() if own not in known]
            yield adapter.candidate("by the names of ResNet's layers", known, rest)
            if is_keras_resnet(layers):
                return
    if is_efficientnet(model) and not mapping:
        namer = efficientnet_namer(model)
        named = {own: layer for layer in free if (own := namer(layer.name)) in trace.layers}
        if len(named) == len(free):
            yield adapter.candidate("by the names of EfficientNet's layers", named, [])
    # Without its scopes, whose number differs: `model.net.conv1`.
    by_name = {own: layer for layer in free if (own := _own_name(layer.name, trace)) and own not in fixed}
    if by_name or fixed:
        rest = [layer for layer in free if layer.name not in {paired.name for paired in by_name.values()}]
        linear = [layer for layer in rest if layer.kind == "linear"]
        if len(linear) == len(heads) == 1 and foreign.framework != "torch" and not heads.keys() & by_name.keys():
            by_name[next(iter(heads))] = linear[0]
            rest.remove(linear[0])
        yield adapter.candidate("by name", {**fixed, **by_name}, rest)
    if 2 * len(by_name) >= len(free) > 0:
        # Where most names are the model's, an order says nothing of the others.
        fixed, free = {**fixed, **by_name}, rest
    else:
        ordered, rest = _in_order(free, fixed, trace, heads)
        yield adapter.candidate("by order and shape", {**fixed, **ordered}, rest)
    shaped, rest = _by_shape(free, fixed, trace, model, heads)
    if trace.layers.keys() <= {*shaped, *fixed, *heads} and all(layer.kind == "linear" for layer in rest):
        yield adapter.candidate("by shape: verify the result with --check", {**fixed, **shaped}, rest)


def _own_name(name: str, trace: Trace) -> str | None:
    while name:
        if name in trace.layers:
            return name
        name = name.partition(".")[2]
    return None


def _mapped(foreign: Foreign, layers: dict[str, Layer], trace: Trace, mapping: Mapping[str, str]) -> Pairs:
    """Return the pairs of a mapping file: layers, or single tensors put together to layers."""
    pairs: Pairs = {}
    for target, source in mapping.items():
        source = source.partition(":")[0].replace("/", ".")
        if target in trace.layers:
            if source not in layers:
                near = _near(source, layers)
                raise InputError(f"--mapping: {target} = {source!r}: the file has no such layer; {near}")
            pairs[target] = layers[source]
            continue
        (own, _, own_role), (layer, _, role) = target.rpartition("."), source.rpartition(".")
        if own not in trace.layers:
            raise InputError(f"--mapping: the model has no layer or tensor {target!r}; {_near(target, trace.layers)}")
        known = layers.get(layer)
        tensor = known.tensors.get(role_of(role)) if known else None
        if known is None or tensor is None:
            raise InputError(f"--mapping: {target} = {source!r}: the file has no such tensor; {_near(layer, layers)}")
        if role_of(role) not in ("weight", "bias", "running_mean", "running_var"):
            # Variables that are not a layer's, as those of a tf.Module, are laid out as what they become.
            kind = "linear" if tensor.ndim == 2 else "conv" if tensor.ndim > 2 else "other"
            tensor = dict(in_torchs_layout(foreign, kind, {own_role: tensor}))[own_role]
        before = pairs.get(own, Layer(known.name, trace.layers[own], {}, known.epsilon))
        names = before.name if known.name in before.name.split(" + ") else f"{before.name} + {known.name}"
        pairs[own] = Layer(names, before.kind, {**before.tensors, own_role: tensor}, known.epsilon)
    return pairs


def _near(name: str, names: Mapping[str, object]) -> str:
    return nearest(name, list(names)[:2000])


def _in_order(free: list[Layer], fixed: Pairs, trace: Trace, heads: Mapping[str, object]) -> tuple[Pairs, list[Layer]]:
    """Return the layers of each kind in their order, and those of the file that are left."""
    pairs: Pairs = {}
    rest: list[Layer] = []
    for kind in ("conv", "norm", "linear", "other"):
        theirs = [layer for layer in free if layer.kind == kind]
        own = [name for name, own_kind in trace.layers.items() if own_kind == kind and name not in fixed]
        body = [name for name in own if name not in heads]
        if len(theirs) != len(own) and len(body) < len(own):
            # The file has no head, or one of several layers.
            own = body
        pairs |= dict(zip(own, theirs, strict=False))
        rest += theirs[len(own) :]
    return pairs, rest


def _by_shape(
    free: list[Layer], fixed: Pairs, trace: Trace, model: nn.Module, heads: Mapping[str, object]
) -> tuple[Pairs, list[Layer]]:
    """Return for each layer the first of the file's that has its shape, and those that are left."""
    pairs: Pairs = {}
    rest = list(free)
    for name, kind in trace.layers.items():
        if name not in fixed and (found := next((one for one in rest if _fits(model, name, kind, one)), None)):
            pairs[name] = found
            rest.remove(found)
    # A head of another size.
    linear = [layer for layer in rest if layer.kind == "linear"]
    if len(heads) == len(linear) == 1 and not heads.keys() & {*pairs, *fixed}:
        pairs[next(iter(heads))] = linear[0]
        rest.remove(linear[0])
    return pairs, rest


def _fits(model: nn.Module, name: str, kind: str, layer: Layer) -> bool:
    """Return whether a layer has a shape; a linear layer is also a convolution as large as the feature map."""
    module = model.get_submodule(name)
    own, theirs = (next(iter(tensors.values())) for tensors in (module.state_dict(), layer.tensors))
    weight = _as_convolution(module, layer.tensors.get("weight", theirs), False)
    return kind in (layer.kind, "conv") and own.shape == weight.shape


def _as_convolution(module: nn.Module, weight: torch.Tensor, is_channels_last: bool) -> torch.Tensor:
    """Return a weight in the shape of a convolution's: one of Keras's depthwise, or linear over a whole feature map."""
    if not isinstance(module, nn.Conv2d):
        return weight
    outputs, inputs, height, width = module.weight.shape
    if inputs == 1 and weight.ndim == 4 and weight.shape[:2] == (outputs // module.groups, module.groups):
        return weight.transpose(0, 1).reshape(outputs, 1, *weight.shape[2:])
    if weight.shape != (outputs, inputs * height * width):
        return weight
    maps = weight.reshape(outputs, height, width, inputs).permute(0, 3, 1, 2)
    return maps if is_channels_last else weight.reshape(module.weight.shape)


class _Adapter:
    """Lays tensors out as a model needs them."""

    def __init__(self, foreign: Foreign, model: nn.Module, trace: Trace) -> None:
        self._foreign, self._model, self._trace = foreign, model, trace

    def candidate(self, how: str, pairs: Pairs, rest: list[Layer]) -> Candidate:
        """Return the tensors of pairs of layers; those of the rest under their own names."""
        tensors: dict[str, torch.Tensor] = {}
        for own, layer in pairs.items():
            found = self._tensors(own, layer)
            tensors |= {f"{own}.{role}" if own else role: tensor for role, tensor in found.items()}
        for own, layer in pairs.items():
            self._fold_bias(own, layer, tensors)
        # Under the head's name, layers of another head are no body's.
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
        if shape and weight is not None and weight.ndim == 2 and self._foreign.is_channels_last:
            channels, height, width = shape
            if weight.shape[1] == channels * height * width:
                maps = weight.reshape(len(weight), height, width, channels)
                tensors["weight"] = maps.permute(0, 3, 1, 2).reshape(weight.shape)
        if weight is not None and layer.kind in ("conv", "linear"):
            tensors["weight"] = _as_convolution(module, tensors["weight"], self._foreign.is_channels_last)
        if self._foreign.framework == "torch":
            pass
        elif layer.kind == "norm":
            tensors = self._norm(module, layer, tensors)
        elif layer.kind in ("conv", "linear") and "bias" not in tensors and getattr(module, "bias", None) is not None:
            tensors["bias"] = torch.zeros(len(tensors["weight"])) if "weight" in tensors else torch.zeros(0)
        return {role: tensor.contiguous() for role, tensor in tensors.items()}

    def _norm(self, module: nn.Module, layer: Layer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a normalisation with the epsilon of the model's, and the scale and shift that Keras may leave out."""
        like = next(iter(tensors.values()))
        for role, value in (("weight", 1.0), ("bias", 0.0)):
            if isinstance(getattr(module, role, None), torch.Tensor):
                tensors.setdefault(role, torch.full_like(like, value))
        shift = layer.epsilon - float(getattr(module, "eps", layer.epsilon))
        if "running_var" in tensors and shift:
            # Variance and epsilon are only ever used as their sum.
            tensors["running_var"] = (tensors["running_var"].double() + shift).float()
        return tensors

    def _fold_bias(self, own: str, layer: Layer, tensors: dict[str, torch.Tensor]) -> None:
        """Subtract the bias of a convolution from the mean of the norm behind it where the model's has no bias."""
        bias, mean = f"{own}.bias", f"{self._trace.norms.get(own)}.running_mean"
        has_none = getattr(self._model.get_submodule(own), "bias", None) is None
        if layer.kind != "conv" or not has_none or bias not in tensors or mean not in tensors:
            return
        if tensors[mean].shape == tensors[bias].shape:
            tensors[mean] = tensors[mean] - tensors.pop(bias)
