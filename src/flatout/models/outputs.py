"""The outputs of a model that is not ours: checked on two images, and turned into logits where they are more or else.

Shape letters: N images, K outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flatout.errors import InputError, first_line
from flatout.recipe import Recipe
from flatout.settings import Size, shown, sides


def _logits(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Select the logits: forward hook for models that return a dict, an object with `.logits`, or several outputs."""
    if isinstance(output, Mapping):
        return output.get("logits", output.get("out"))
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        return output[0]
    return getattr(output, "logits", output)


def _log_of_softmax(module: nn.Module, arguments: Any, output: Any) -> Any:
    return _logits(module, arguments, output).float().clamp_min(torch.finfo(torch.float32).tiny).log()


def _logit_of_sigmoid(module: nn.Module, arguments: Any, output: Any) -> Any:
    return torch.logit(_logits(module, arguments, output).float(), eps=1e-7)


def ensure_logits(model: nn.Module, name: str, recipe: Recipe, num_outputs: int, report: Callable[[str], None]) -> None:
    """Check that a model takes the recipe's images, and let it return logits [N, num_outputs] alone, by a forward hook.

    Weights, statistics and mode of the model are not changed. `name` is for messages; `report` takes a sentence about
    outputs that are left out or converted.

    Raises:
        InputError: the model fails on such images, or returns something else.
    """
    from flatout.models.keras import KerasModule

    (height, width), channels = recipe.image_sides, recipe.channels
    shown = f"{channels}-channel images of {height}x{width} pixels"
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    images = torch.zeros(2, channels, height, width, device=device)
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    checked = (False,) if isinstance(model, KerasModule) else (False, True)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = [model.train(training)(images) for training in checked]
    except Exception as error:  # someone else's code may raise anything
        raise InputError(f"model {name!r} fails on {shown}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        for module, training in modes.items():
            module.training = training
        for buffer, value in buffers:
            buffer.copy_(value)
    for output in reversed(outputs):
        logits = _logits(model, (), output)
        if not isinstance(logits, torch.Tensor) or logits.shape != (2, num_outputs):
            found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(output).__name__
            need = f"must return logits [N, {num_outputs}] for a batch of N {shown}"
            raise InputError(f"model {name!r} {need}; for N = 2 it returned {found}")
    logits = logits.float()
    last = list(model.modules())[-1]
    is_one_class, is_number = recipe.task in ("auto", "single-label"), recipe.task == "regression"
    if (
        is_one_class
        and num_outputs > 1
        and (logits >= 0).all()
        and torch.allclose(logits.sum(1), logits.new_ones(2), atol=1e-4)
    ):
        report(f"model {name!r} returns probabilities: log() undoes its softmax, since the loss takes logits")
        model.register_forward_hook(_log_of_softmax)
    elif (not is_number if num_outputs == 1 else not is_one_class) and isinstance(last, nn.Sigmoid):
        report(f"model {name!r} returns probabilities: logit() undoes its sigmoid, since the loss takes logits")
        model.register_forward_hook(_logit_of_sigmoid)
    elif not all(isinstance(output, torch.Tensor) for output in outputs):
        report(f"model {name!r} returns several outputs: the logits are trained, the others are not")
        model.register_forward_hook(_logits)


def check_size(model: nn.Module, name: str, recipe: Recipe, num_outputs: int, size: Size, key: str) -> None:
    """Check that a model built for images of the recipe's `image_size` takes images of another, which `key` names.

    Raises:
        InputError: it does not.
    """
    modes = {module: module.training for module in model.modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(2, recipe.channels, *sides(size), device=device))
        reason = "" if logits.shape == (2, num_outputs) else f"it returns {list(logits.shape)}"
    except Exception as error:  # someone else's code may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
    finally:
        for module, training in modes.items():
            module.training = training
    if reason:
        raise InputError(
            f"{key} = {shown(size)}: the model {name!r}, built for images of {shown(recipe.image_size)} pixels, does "
            f"not take others ({reason}); leave the key out, or choose a model with global pooling, such as "
            "timm:resnet18"
        )
