"""The linear layers that end a network, and the network as two parts: the features that they read, and their logits.

Heads are found by computing: a layer is the head if the logits of two random images follow from its input. So a head
may be a convolution, follow or precede the pooling, stand behind a norm or hidden layers, or be one of two whose logits
are averaged.

Shape letters: B batch, F features, K outputs, H height, W width.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from flatout.errors import InputError
from flatout.models.layers import head_modules

Linear: TypeAlias = nn.Linear | nn.Conv2d

# The error of 32-bit floats, in parts of the largest logit, from another order of sums.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Head:
    """The layers of a model that compute its logits: their mean over layers, each of its own features.

    Attributes:
        layers: names of linear layers or 1x1 convolutions; more than one where the model averages several heads.
        widths: how many features each of them reads.
        outputs: K.
        has_bias: whether any of them has a bias.
        silent: other layers with logits, in which the model's are not linear, as of auxiliary heads: the head is one
            while these are zero, as `set_head` makes them.
    """

    layers: tuple[str, ...]
    widths: tuple[int, ...]
    outputs: int
    has_bias: bool
    silent: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """F: the features of all layers."""
        return sum(self.widths)

    def of(self, model: nn.Module) -> list[Linear]:
        """Return the layers in a model, or in a copy of it."""
        return _layers(model, self.layers)


def find_head(model: nn.Module, sides: tuple[int, int], channels: int) -> Head | None:
    """Return the head of a classifier; None where its logits are not linear in what a layer of its head reads.

    The model computes two random images in evaluation mode, its candidates with random weights; it is not changed.

    Args:
        model: returns logits [B, K].
        sides: height and width of its images.
    """
    try:
        heads = head_modules(model)
    except InputError:
        return None
    candidates = {
        name: module
        for prefix, head in heads.items()
        for name, module in head.named_modules(prefix=prefix)
        if _is_linear(module)
    }
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, channels, *sides, generator=generator).to(device)
    with _in_evaluation(model), _random_weights([*candidates.values()], generator), torch.no_grad():
        inputs, logits = _computed(model, candidates, images)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or len(logits) != 2:
            return None
        outputs = logits.shape[1]
        last = [name for name, read in inputs.items() if len(read) == 1 and _outputs(candidates[name]) == outputs]
        for names in (last[-1:], last):
            if head := _head_of(candidates, names, inputs, logits):
                return head
        for name in last if len(last) > 1 else ():
            others = tuple(other for other in last if other != name)
            with _zeros([candidates[other] for other in others]):
                inputs, logits = _computed(model, candidates, images)
            if head := _head_of(candidates, [name], inputs, logits):
                return replace(head, silent=others)
    return None


def _head_of(
    candidates: dict[str, Linear], names: list[str], inputs: dict[str, list[torch.Tensor]], logits: torch.Tensor
) -> Head | None:
    """Return layers as a head, if the logits are the mean of theirs."""
    layers = [candidates[name] for name in names]
    features = [
        _averaged(inputs[name][0], isinstance(layer, nn.Conv2d)) for name, layer in zip(names, layers, strict=True)
    ]
    if not layers or not _is_close(_mean_logits(layers, features), logits):
        return None
    has_bias = any(layer.bias is not None for layer in layers)
    return Head(tuple(names), tuple(f.shape[1] for f in features), logits.shape[1], has_bias)


class FeatureNetwork(nn.Module):
    """A model without the layers of its head: images [B, C, H, W] to what these layers read, [B, F].

    It shares parameters and buffers with the model, and computes in evaluation mode.
    """

    def __init__(self, model: nn.Module, head: Head) -> None:
        super().__init__()
        memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        memo |= {id(layer): _Skipped(layer) for layer in head.of(model)}
        self.body = copy.deepcopy(model, memo).eval()  # no time is spent on the layers
        self._layers = head.layers
        super().train(False)

    def train(self, mode: bool = True) -> "FeatureNetwork":
        """Stay in evaluation mode, whatever the mode of the model."""
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features of images, those of all layers side by side."""
        found: dict[nn.Module, torch.Tensor] = {}
        layers = [self.body.get_submodule(name) for name in self._layers]

        def catch(layer: Any, arguments: tuple[Any, ...]) -> None:
            found[layer] = _averaged(arguments[0], layer.is_convolution)

        hooks = [layer.register_forward_pre_hook(catch) for layer in layers]
        try:
            self.body(images)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[layer] for layer in layers], dim=1) if len(layers) > 1 else found[layers[0]]


class HeadNetwork(nn.Module):
    """The head of a model alone: features [B, F] to logits [B, K].

    The layers are those of the model, under the same names; silent ones are there, but are not computed.
    """

    def __init__(self, model: nn.Module, head: Head) -> None:
        super().__init__()
        self._head = head
        names = (*head.layers, *head.silent)
        for name, layer in zip(names, _layers(model, names), strict=True):
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.add_module(last, layer)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        layers = self._head.of(self)
        if len(layers) == 1:
            return _logits(layers[0], features)
        parts = features.split(self._head.widths, dim=1)
        return torch.stack([_logits(layer, part) for layer, part in zip(layers, parts, strict=True)]).mean(dim=0)


@torch.no_grad()
def set_head(
    model: nn.Module, head: Head, weight: torch.Tensor, bias: torch.Tensor, rows: Sequence[int] | None = None
) -> None:
    """Let the logits of a model, or of its `HeadNetwork`, be `features @ weight.T + bias`.

    Args:
        weight: [K, F], for the features of `FeatureNetwork`.
        bias: [K]; zeros where no layer has one (`Head.has_bias`).
        rows: the outputs that weight and bias are of, K of them; all where it is None. Others keep their weights.
    """
    chosen = slice(None) if rows is None else list(rows)
    layers = head.of(model)
    assert head.has_bias or not bias.any(), "the head has no bias"
    biased = sum(layer.bias is not None for layer in layers)
    for layer, columns in zip(layers, weight.split(head.widths, dim=1), strict=True):
        # The model takes the mean over its layers.
        layer.weight[chosen] = (columns * len(layers)).reshape(-1, *layer.weight.shape[1:]).to(layer.weight)
        if layer.bias is not None:
            layer.bias[chosen] = (bias * (len(layers) / biased)).to(layer.bias)
    for layer in _layers(model, head.silent):
        for parameter in layer.parameters():
            parameter[chosen] = 0


def _layers(model: nn.Module, names: Sequence[str]) -> list[Linear]:
    found = [model.get_submodule(name) for name in names]
    return [layer for layer in found if isinstance(layer, Linear)]


def _is_linear(module: nn.Module) -> TypeGuard[Linear]:
    """Whether a module computes `x @ weight.T + bias`, with parameters of these names."""
    if {name for name, _ in module.named_parameters()} not in ({"weight"}, {"weight", "bias"}):
        return False
    if isinstance(module, nn.Conv2d):
        is_pointwise = module.kernel_size == (1, 1) and module.stride == (1, 1) and module.padding in ((0, 0), "valid")
        return is_pointwise and module.groups == 1
    return isinstance(module, nn.Linear)


def _outputs(layer: Linear) -> int:
    return layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features


def _averaged(read: torch.Tensor, is_convolution: bool) -> torch.Tensor:
    """Return what a layer reads as [B, F]: the mean over places, as heads before the pooling are linear in it."""
    if is_convolution:
        return read.flatten(2).mean(dim=2)
    return read.flatten(1, -2).mean(dim=1) if read.ndim > 2 else read


def _logits(layer: Linear, features: torch.Tensor) -> torch.Tensor:
    is_convolution = isinstance(layer, nn.Conv2d)
    return layer(features[:, :, None, None]).flatten(1) if is_convolution else layer(features)


def _mean_logits(layers: Sequence[Linear], features: Sequence[torch.Tensor]) -> torch.Tensor:
    pairs = zip(layers, features, strict=True)
    return torch.stack([functional.linear(read, layer.weight.flatten(1), layer.bias) for layer, read in pairs]).mean(
        dim=0
    )


def _is_close(found: torch.Tensor, logits: torch.Tensor) -> bool:
    if found.shape != logits.shape or not logits.isfinite().all():
        return False
    return bool((found - logits).abs().max() <= _TOLERANCE * logits.abs().max().clamp_min(1e-6))


def _computed(
    model: nn.Module, layers: dict[str, Linear], images: torch.Tensor
) -> tuple[dict[str, list[torch.Tensor]], Any]:
    """Return what each layer reads, in the order of their calls, and what the model returns."""
    names = {layer: name for name, layer in layers.items()}
    inputs: dict[str, list[torch.Tensor]] = {}

    def catch(layer: Any, arguments: tuple[Any, ...]) -> None:
        inputs.setdefault(names[layer], []).append(arguments[0])

    hooks = [layer.register_forward_pre_hook(catch) for layer in layers.values()]
    try:
        return inputs, model(images)
    except Exception:  # someone else's code may raise anything
        return {}, None
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _random_weights(layers: Sequence[Linear], generator: torch.Generator) -> Iterator[None]:
    """Give layers random weights inside the block: some networks start with zeros, which any features explain."""
    with _restored(layers):
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * max(parameter[0].numel(), 1) ** -0.5)
        yield


@contextlib.contextmanager
def _zeros(layers: Sequence[Linear]) -> Iterator[None]:
    with _restored(layers):
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            parameter.zero_()
        yield


@contextlib.contextmanager
def _restored(layers: Sequence[Linear]) -> Iterator[None]:
    """Restore the weights of layers after the block."""
    own = [(parameter, parameter.detach().clone()) for layer in layers for parameter in layer.parameters()]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for parameter, value in own:
                parameter.copy_(value)


class _Skipped(nn.Module):
    """In the place of a layer: passes on something of its output's shape."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.is_convolution, self._outputs = isinstance(layer, nn.Conv2d), _outputs(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_convolution:
            return x[:, :1].expand(-1, self._outputs, -1, -1)
        return x[..., :1].expand(*[-1] * (x.ndim - 1), self._outputs)
