"""The end of a network: the logits it returns, and the linear layers that compute them from its features.

Heads are found numerically: a layer is the head if its input explains the logits of two random images. So a head may be
a convolution, before or after the pooling, follow a norm or hidden layers, or be one of two whose logits are averaged.
Shape letters: N, B batch, C channels, F features, K outputs, H height, W width.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from flatout.config import Recipe
from flatout.config.settings import shown
from flatout.models.keras import KerasModule
from flatout.models.layers import Cut, head_modules, keep_modes, submodule
from flatout.utils.errors import InputError, first_line

Linear: TypeAlias = nn.Linear | nn.Conv2d

# The rounding error of float32 sums, relative to the largest logit.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Head:
    """The layers of a model that compute its logits: their mean over layers, each of its own features."""

    layers: tuple[str, ...]  # linear layers or 1x1 convolutions; more than one if the model averages several heads
    widths: tuple[int, ...]  # the number of features that each of them reads; the sum is F
    outputs: int  # K
    has_bias: bool  # whether any of them has a bias
    silent: tuple[str, ...] = ()  # not linear, but added to the logits, as auxiliary heads are; `set_head` makes them 0

    @property
    def width(self) -> int:
        """Return F."""
        return sum(self.widths)

    def of(self, model: nn.Module) -> list[Linear]:
        """Return the layers in a model, or in a copy of it."""
        return _layers(model, self.layers)


@torch.no_grad()
def find_head(model: nn.Module, sides: tuple[int, int], channels: int) -> Head | None:
    """Find the head of a classifier; None if its logits are not linear in the input of a layer of its head.

    Candidates in a copy of the model get random weights, since zeros, which some networks start with, match any
    features; and the logits of two random images of `sides`, height and width, are compared.
    """
    twin, device = copy.deepcopy(model).eval(), _device(model)
    try:
        heads = head_modules(twin)
    except InputError:
        return None
    within = [one for prefix, head in heads.items() for one in head.named_modules(prefix=prefix)]
    names: dict[nn.Module, str] = {module: name for name, module in within if _is_linear(module)}
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, channels, *sides, generator=generator).to(device)
    with _inputs_of(names) as inputs:
        try:
            outputs = twin(images[:1]).shape[-1]
        except Exception:  # third-party code may raise anything, and return anything
            return None
    once = [layer for layer, read in inputs.items() if len(read) == 1]
    called = [names[layer] for layer in once if len(layer.get_parameter("weight")) == outputs]
    # All first, so that none has its first weights when another is tried.
    choices = [(called, []), (called[-1:], []), *(([name], [one for one in called if one != name]) for name in called)]
    for chosen, silent in choices if called else []:
        layers = _layers(twin, chosen)
        widths, has_bias = tuple(one.weight.shape[1] for one in layers), any(one.bias is not None for one in layers)
        head = Head(tuple(chosen), widths, outputs, has_bias, tuple(silent))
        weight = torch.randn(outputs, head.width, generator=generator).to(device) * head.width**-0.5
        bias = torch.randn(outputs, generator=generator).to(device) * has_bias
        set_head(twin, head, weight, bias)
        with _inputs_of(layers) as inputs:
            logits = twin(images)
        features = [_averaged(inputs[layer][0], isinstance(layer, nn.Conv2d)) for layer in layers]
        found = functional.linear(torch.cat(features, dim=1), weight, bias)
        tolerance = _TOLERANCE * logits.abs().max().clamp_min(1e-6)
        if found.shape == logits.shape and logits.isfinite().all() and (found - logits).abs().max() <= tolerance:
            return head
    return None


@contextlib.contextmanager
def _inputs_of(layers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[torch.Tensor]]]:
    """Collect the inputs of layers that are called inside the block, in call order."""
    inputs: dict[nn.Module, list[torch.Tensor]] = {}

    def catch(layer: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.setdefault(layer, []).append(arguments[0])

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(catch))
        yield inputs


class FeatureNetwork(nn.Module):
    """A model up to its head: images [B, C, H, W] to [B, F], always in evaluation mode; it shares the parameters."""

    def __init__(self, model: nn.Module, head: Head) -> None:
        super().__init__()
        memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        memo |= {id(layer): _Skipped(layer) for layer in head.of(model)}
        self.body = copy.deepcopy(model, memo).eval()  # skip the computation of the layers
        self._layers, self.training = head.layers, False

    def train(self, mode: bool = True) -> "FeatureNetwork":
        """Stay in evaluation mode."""
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features, concatenated over layers."""
        layers: list[Any] = [self.body.get_submodule(name) for name in self._layers]
        with _inputs_of(layers) as inputs:
            self.body(images)
        found = [_averaged(inputs[layer][0], layer.is_convolution) for layer in layers]
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]


class HeadNetwork(nn.Module):
    """The layers of a head under the model's names, silent ones included: features [B, F] to logits [B, K]."""

    def __init__(self, model: nn.Module, head: Head) -> None:
        super().__init__()
        self._head = head
        names = (*head.layers, *head.silent)
        for name, layer in zip(names, _layers(model, names), strict=True):
            *path, last = name.split(".")
            submodule(self, path).add_module(last, layer)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        parts = zip(self._head.of(self), features.split(self._head.widths, dim=1), strict=True)
        found = [_logits_of_layer(layer, part) for layer, part in parts]
        return torch.stack(found).mean(0) if len(found) > 1 else found[0]


def before_head(model: nn.Module, head: Head) -> Cut:
    """Cut a model before its head; everything before must be frozen and deterministic."""
    suffix = HeadNetwork(model, head)
    return Cut(prefix=FeatureNetwork(model, head), train_suffix=suffix, eval_suffix=suffix)


@torch.no_grad()
def set_head(model: nn.Module, head: Head, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Make a model or a `HeadNetwork` return `features @ weight.T + bias`, [K, F] and [K]; zeros without `has_bias`."""
    layers = head.of(model)
    assert head.has_bias or not bias.any(), "the head has no bias"
    biased = sum(layer.bias is not None for layer in layers)
    for layer, columns in zip(layers, weight.split(head.widths, dim=1), strict=True):
        # The model takes the mean over its layers.
        layer.weight.copy_((columns * len(layers)).reshape(layer.weight.shape))
        if layer.bias is not None:
            layer.bias.copy_(bias * (len(layers) / biased))
    for layer in _layers(model, head.silent):
        for parameter in layer.parameters():
            parameter.zero_()


def _layers(model: nn.Module, names: Sequence[str]) -> list[Linear]:
    return [layer for name in names if isinstance(layer := model.get_submodule(name), Linear)]


def _is_linear(module: nn.Module) -> TypeGuard[Linear]:
    if {name for name, _ in module.named_parameters()} not in ({"weight"}, {"weight", "bias"}):
        return False
    if isinstance(module, nn.Conv2d):
        is_pointwise = module.kernel_size == (1, 1) and module.stride == (1, 1) and module.padding in ((0, 0), "valid")
        return is_pointwise and module.groups == 1
    return isinstance(module, nn.Linear)


def _averaged(read: torch.Tensor, is_convolution: bool) -> torch.Tensor:
    """Average the input of a layer over positions to [B, F]: heads before the pooling are linear in the mean."""
    if is_convolution:
        return read.flatten(2).mean(dim=2)
    return read.flatten(1, -2).mean(dim=1) if read.ndim > 2 else read


def _logits_of_layer(layer: Linear, features: torch.Tensor) -> torch.Tensor:
    return layer(features[:, :, None, None]).flatten(1) if isinstance(layer, nn.Conv2d) else layer(features)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _Skipped(nn.Module):
    """Replaces a layer by a tensor of its output's shape."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.is_convolution, self._outputs = isinstance(layer, nn.Conv2d), len(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_convolution:
            return x[:, :1].expand(-1, self._outputs, -1, -1)
        return x[..., :1].expand(*[-1] * (x.ndim - 1), self._outputs)


# ---- outputs of models that are not built in -------------------------------------------------------------------------


def ensure_logits(model: nn.Module, name: str, recipe: Recipe, num_outputs: int, report: Callable[[str], None]) -> None:
    """Check that a model takes the recipe's images; by a forward hook, make it return logits [N, num_outputs].

    Weights, statistics and mode of the model are not changed; outputs that are dropped or converted are reported.
    """
    described = f"{recipe.channels}-channel images of {'x'.join(map(str, recipe.image_sides))} pixels"
    images = torch.zeros(2, recipe.channels, *recipe.image_sides, device=_device(model))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    checked, found_last = (False,) if isinstance(model, KerasModule) else (False, True), list[Any]()
    *_, last = model.modules()
    # Not on a copy: the first batch may make layers, and some modules cannot be copied.
    handle = last.register_forward_hook(lambda module, arguments, output: found_last.append(output))
    try:
        with keep_modes(model), torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = [model.train(training)(images) for training in checked]
    except Exception as error:  # third-party code may raise anything
        raise InputError(f"model {name!r} fails on {described}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        handle.remove()
        for buffer, value in buffers:
            buffer.copy_(value)
    for output in reversed(outputs):
        logits = _select_logits(model, (), output)
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(output).__name__
        if found != [2, num_outputs]:
            need = f"must return logits [N, {num_outputs}] for a batch of N {described}"
            raise InputError(f"model {name!r} {need}; for N = 2 it returned {found}")
    logits = logits.float()
    # A last sigmoid that is not called is for the user's own predictions.
    ends_in_sigmoid = isinstance(last, nn.Sigmoid) and any(
        torch.equal(value.float().flatten(), logits.flatten()) for value in found_last
    )
    is_one_class, is_number = recipe.task in ("auto", "single-label"), recipe.task == "regression"
    sums_to_one = (logits >= 0).all() and torch.allclose(logits.sum(1), logits.new_ones(2), atol=1e-4)
    if is_one_class and num_outputs > 1 and sums_to_one:
        report(f"model {name!r} returns probabilities: log() undoes its softmax, since the loss takes logits")
        model.register_forward_hook(_undo_softmax)
    elif (not is_number if num_outputs == 1 else not is_one_class) and ends_in_sigmoid:
        report(f"model {name!r} returns probabilities: logit() undoes its sigmoid, since the loss takes logits")
        model.register_forward_hook(_undo_sigmoid)
    elif not all(isinstance(output, torch.Tensor) for output in outputs):
        report(f"model {name!r} returns several outputs: the logits are trained, the others are not")
        model.register_forward_hook(_select_logits)


def _select_logits(module: nn.Module, arguments: object, output: object) -> Any:
    """Forward hook: the logits of a dict, of an object, or the first of several outputs."""
    if isinstance(output, Mapping):
        return output.get("logits", output.get("out"))
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        return output[0]
    return getattr(output, "logits", output)


def _undo_softmax(module: nn.Module, arguments: object, output: object) -> Any:
    return _select_logits(module, arguments, output).float().clamp_min(torch.finfo(torch.float32).tiny).log()


def _undo_sigmoid(module: nn.Module, arguments: object, output: object) -> Any:
    return torch.logit(_select_logits(module, arguments, output).float(), eps=1e-7)


def check_size(model: nn.Module, name: str, recipe: Recipe, num_outputs: int) -> None:
    """Check that a model built for the recipe's `image_size` takes images of its `data.eval_size`."""
    try:
        with keep_modes(model), torch.no_grad():
            logits = model.eval()(torch.zeros(2, recipe.channels, *recipe.eval_sides, device=_device(model)))
        if logits.shape != (2, num_outputs):
            raise ValueError(f"it returns {list(logits.shape)}")
    except Exception as error:  # third-party code may raise anything
        raise InputError(
            f"data.eval_size = {shown(recipe.data.eval_size)}: the model {name!r}, built for images of "
            f"{shown(recipe.image_size)} pixels, does not take others ({first_line(error)}); leave the key out, or "
            "choose a model with global pooling, such as timm:resnet18"
        ) from error
