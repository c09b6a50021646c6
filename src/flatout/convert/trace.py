"""What a model does with an image, as far as weights laid out otherwise have to know.

Shape letters: N images, C channels, H height, W width.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from flatout.convert.foreign import Kind

_CONVS = (nn.modules.conv._ConvNd,)


class Trace(NamedTuple):
    """The layers of a model by name.

    layers: those with weights, in the order in which an image meets them; the kind of each.
    flattened: linear layer -> (C, H, W) of the feature map whose flattened values it takes.
    norms: convolution -> the batch normalisation that takes its output.
    """

    layers: dict[str, Kind]
    flattened: dict[str, tuple[int, int, int]]
    norms: dict[str, str]


def kind_of(module: nn.Module) -> Kind:
    """Return what kind of layer a module is."""
    if isinstance(module, _CONVS):
        return "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    weight = getattr(module, "weight", None)
    is_norm = hasattr(module, "running_mean") or (isinstance(weight, torch.Tensor) and weight.ndim == 1)
    return "norm" if is_norm else "other"


def registered(model: nn.Module) -> dict[str, Kind]:
    """Return the modules that hold weights themselves, in the order of the state dict."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in model.state_dict())
    return {name: kind_of(model.get_submodule(name)) for name in owners}


def trace(model: nn.Module, channels: int, height: int, width: int) -> Trace:
    """Run a model on one black image, in evaluation; its state does not change.

    A model that fails has the order of its registration, and nothing else is known of it.
    """
    names = {model.get_submodule(name): name for name in registered(model)}
    watch = _Watch(names)
    modes = {module: module.training for module in model.modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    handles: list[RemovableHandle] = [module.register_forward_hook(watch.leave) for module in names]
    handles += [module.register_forward_pre_hook(watch.enter) for module in names]
    try:
        with torch.no_grad(), watch:
            model.eval()(torch.zeros(1, channels, height, width, device=device))
    except Exception:  # the model may be anyone's; that it cannot be used is said where it is used
        watch = _Watch(names)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    every = registered(model)
    order = [*watch.order, *(name for name in every if name not in watch.order)]
    return Trace({name: every[name] for name in order}, watch.flattened, watch.norms)


class _Watch(TorchFunctionMode):
    """Follows flattened feature maps, and notes the order of layers."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        super().__init__()
        self._names = names
        self._shapes: dict[int, tuple[int, int, int]] = {}
        self._convs: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is given twice
        self.order: list[str] = []
        self.flattened: dict[str, tuple[int, int, int]] = {}
        self.norms: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if isinstance(result, torch.Tensor) and given is not None and result.ndim == 2:
            if given.ndim == 4 and given.numel() == result.numel() and len(result) == 1:
                self._note(result, (given.shape[1], given.shape[2], given.shape[3]))
            elif id(given) in self._shapes and given.shape == result.shape:
                self._note(result, self._shapes[id(given)])
        return result

    def _note(self, result: torch.Tensor, shape: tuple[int, int, int]) -> None:
        self._kept.append(result)
        self._shapes[id(result)] = shape

    def enter(self, module: nn.Module, arguments: Any) -> None:
        name = self._names[module]
        if name not in self.order:
            self.order.append(name)
        given = arguments[0] if arguments else None
        if isinstance(module, nn.Linear) and id(given) in self._shapes:
            self.flattened[name] = self._shapes[id(given)]
        if hasattr(module, "running_mean") and id(given) in self._convs:
            self.norms[self._convs[id(given)]] = name

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(module, _CONVS) and isinstance(output, torch.Tensor):
            self._kept.append(output)
            self._convs[id(output)] = self._names[module]
