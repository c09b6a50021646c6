"""Objects of torch that users know, an optimizer or a loss, in terms of recipe keys."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from flatout.errors import InputError
from flatout.recipe import OPTIMIZERS

_KEYS = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "betas", "eps")
# Options of torch's optimizers that choose an implementation, not a result.
_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")


def optimizer_keys(value: Any) -> dict[str, Any] | None:
    """Return the keys of the `optimizer` section for a class of torch or timm, a partial of it, or an optimizer.

    None for anything else. The parameters of an optimizer are not used, only its options: flatout makes one on every
    device.

    Raises:
        InputError: the class is of neither library, or an option has no key and another value than its default.
    """
    import torch

    partial = value if isinstance(value, functools.partial) else functools.partial(value) if callable(value) else None
    cls = partial.func if partial is not None and not isinstance(value, torch.optim.Optimizer) else type(value)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        return None
    name = _name_of(cls)
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    if isinstance(value, torch.optim.Optimizer):
        groups = [{key: group[key] for key in value.defaults} for group in value.param_groups]
        if any(group != groups[0] for group in groups):
            raise InputError(
                f"optimizer: the groups of {cls.__name__} differ; rates by layer are set by optimizer.layer_decay"
            )
        options = {**defaults, **groups[0]}
    else:
        assert partial is not None
        options = {**defaults, **partial.keywords}
    for key, given in options.items():
        if key not in (*_KEYS, *_IMPLEMENTATION) and given != defaults.get(key):
            raise InputError(f"optimizer: {cls.__name__}({key}={given!r}) has no recipe key; leave {key} out")
    keys = {key: _plain(options[key]) for key in _KEYS if options.get(key) is not None}
    if name == "adagrad" or name.startswith(("torch:", "timm:")):
        known = inspect.signature(cls).parameters
        keys = {key: value for key, value in keys.items() if key in known}
    return {"name": name, **keys}


def _name_of(cls: type) -> str:
    """Return the name that a recipe has for an optimizer's class."""
    import torch

    if getattr(torch.optim, cls.__name__, None) is cls:
        return name if (name := cls.__name__.lower()) in OPTIMIZERS else f"torch:{cls.__name__}"
    if cls.__module__.startswith("timm."):
        # timm lacks the aliases that mark re-exports.
        from timm.optim import get_optimizer_class, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

        for name in map(str, list_optimizers(exclude_filters=["fused*", "bnb*"])):
            if get_optimizer_class(name) is cls:
                return f"timm:{name}"
    raise InputError(
        f"optimizer: {cls.__module__}.{cls.__name__} is of neither torch nor timm; flatout makes one on every device "
        "by its name, such as torch:RAdam or timm:lion"
    )


def loss_keys(value: Any) -> dict[str, Any] | None:
    """Return recipe keys for a loss of torch; None for anything else.

    Raises:
        InputError: an option has no key and another value than its default.
    """
    from torch import nn

    names = {
        nn.CrossEntropyLoss: "cross-entropy",
        nn.BCEWithLogitsLoss: "binary-cross-entropy",
        nn.MSELoss: "mse",
        nn.HuberLoss: "huber",
        nn.SmoothL1Loss: "huber",
    }
    if type(value) not in names:
        return None
    keys: dict[str, Any] = {"loss": names[type(value)]}
    if smoothing := getattr(value, "label_smoothing", 0.0):
        keys["label_smoothing"] = float(smoothing)
    for name in ("weight", "pos_weight"):
        if (weights := getattr(value, name, None)) is not None:
            keys["class_weights"] = weights.reshape(-1).tolist()
    rejected = {"reduction": "mean", "ignore_index": -100, "delta": 1.0, "beta": 1.0}
    for option, default in rejected.items():
        if getattr(value, option, default) != default:
            raise InputError(
                f"loss: {type(value).__name__}({option}={getattr(value, option)!r}) has no recipe key; leave it out, "
                "or give a function of logits and targets that returns a loss for each image"
            )
    return keys


def class_weights(value: Mapping[Any, Any]) -> list[float] | dict[str, Any]:
    """Return weights by class name as they are, and those of classes 0, 1, 2 and so on, as Keras has them, as a list.

    Raises:
        InputError: its keys are neither.
    """
    if all(isinstance(name, str) for name in value):
        return dict(value)
    if sorted(value, key=str) != sorted(range(len(value)), key=str):
        raise InputError(
            f"class_weights: the keys are {', '.join(map(str, list(value)[:5]))}; they must be class names, or 0 to "
            f"{len(value) - 1} in the order of run.classes, which is alphabetical for folders"
        )
    return [float(value[index]) for index in range(len(value))]


def _plain(value: Any) -> Any:
    """Return a number, or a tuple of numbers, of Python."""
    if isinstance(value, tuple | list):
        return tuple(map(float, value))
    return value.item() if hasattr(value, "item") else value
