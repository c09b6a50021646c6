"""Convert the arguments of `flatout.fit` to recipe keys and data."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatout.config import OPTIMIZERS, Augment, Optimizer, known_keys
from flatout.config.settings import nearest
from flatout.utils.errors import InputError

_OBJECTS = {
    "optimizer": 'flatout makes it on every device: optimizer="adam", or flatout.Adam(lr=0.001), or torch.optim.RAdam',
    "schedule": 'give a name or a section: schedule="cosine", or flatout.Schedule(name="cosine", warmup_epochs=1)',
    "loss": 'give a name, loss="cross-entropy" or "binary-cross-entropy", or a loss of torch, nn.CrossEntropyLoss()',
    "augment": "give amounts: flatout.Augment(flip=True, rotate=10); functions go into transform= or batch_transforms=",
}
_KEYS = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "betas", "eps")
# Options of torch's optimizers that choose an implementation, not a result.
_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")


def check_names(arguments: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise InputError for a keyword argument that is neither a recipe key nor an argument of the function."""
    own = [name for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD]
    keys = known_keys()
    known = {*own, "class_weight", *(part for key in keys for part in (key, *key.partition(".")))}
    for name in arguments.keys() - known:
        raise InputError(f"{name}: {function.__name__} has no such argument; {nearest(name, [*own, *keys])}")


def recipe_changes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keyword arguments of `fit` to dotted recipe keys.

    A section is a `flatout.Optimizer` or the like, a dict, or its name (`optimizer="adam"`). The last part of a dotted
    key is enough if it is unique: `lr=0.01`, `weight_decay=0.01`, `flip=True`.
    """
    changes: dict[str, Any] = {}
    for key, value in _without_objects(arguments).items():
        full = [known for known in known_keys() if known.rpartition(".")[2] == key]
        if key == "augment" and (value is None or value is False):
            value = Augment()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif hasattr(value, "item") and not getattr(value, "shape", ()):  # a NumPy or torch number
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        elif key in _OBJECTS and not isinstance(value, str | Mapping):
            raise InputError(f"{key} = {value!r}: {_OBJECTS[key]}")
        if isinstance(value, Mapping) and key != "class_weights":
            added = {f"{key}.{inner}": v for inner, v in value.items()}
        elif key in ("optimizer", "schedule"):
            added = {f"{key}.name": value}
        else:
            added = {full[0] if len(full) == 1 else key: str(value) if isinstance(value, Path) else value}
        if twice := changes.keys() & added.keys():
            raise InputError(f"{key}: {twice.pop()} is given twice")
        changes |= added
    return changes


def _without_objects(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replace torch's optimizers and losses, and dicts of class weights, by recipe keys."""
    given = dict(arguments)
    optimizer = given.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, str | Mapping | Optimizer):
        given["optimizer"] = optimizer_keys(optimizer) or optimizer
    loss = given.get("loss")
    if loss is not None and not isinstance(loss, str) and (keys := loss_keys(loss)) is not None:
        if twice := keys.keys() & (given.keys() - {"loss"}):
            raise InputError(f"{twice.pop()}: is given twice, also by the loss")
        given |= keys
    # Keras uses the singular.
    for name in [name for name in ("class_weight", "class_weights") if isinstance(given.get(name), Mapping)]:
        given["class_weights"] = class_weights_of(given.pop(name))
    return given


def is_own_loss(loss: Any) -> bool:
    """Whether a loss is a function or module without a recipe key."""
    return callable(loss) and not isinstance(loss, type) and loss_keys(loss) is None


def loader_batch_size(data: Any) -> int | None:
    """Return the batch size of the (training) DataLoader, if one is given."""
    for value in (data, *(data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else ())):
        if _is_loader(value):
            return value.batch_size
    return None


def _is_loader(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("dataset", "batch_size", "collate_fn"))


def _data_set_of(value: Any) -> Any:
    """Return the data set of a DataLoader, or those in a dict or tuple; other values are unchanged.

    Raises:
        InputError: the loader does what flatout does not support: weighted sampling, or custom batches.
    """
    if isinstance(value, Mapping):
        return {key: _data_set_of(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_data_set_of, value))
    if not _is_loader(value):
        return value
    from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler, default_collate

    sampler = value.sampler
    is_plain = isinstance(sampler, SequentialSampler | RandomSampler) and not getattr(sampler, "replacement", False)
    if hasattr(value.dataset, "__getitem__") and hasattr(value.dataset, "__len__") and not is_plain:
        instead = ' For rare classes, class_weights="balanced".' * isinstance(sampler, WeightedRandomSampler)
        raise InputError(
            f"data: the sampler of the DataLoader, {type(sampler).__name__}, cannot be used: flatout shuffles by "
            f"itself, so that results do not depend on the devices; give loader.dataset.{instead}"
        )
    if value.collate_fn is not default_collate:
        raise InputError(
            "data: the collate_fn of the DataLoader cannot be used: flatout makes the batches; give loader.dataset, "
            "whose items are (image, label)"
        )
    return value.dataset


def join_data(data: Any, labels: Any, validation_data: Any) -> Any:
    """Return the data of `fit(model, images, labels, validation_data=...)` as one value."""
    data, validation_data = _data_set_of(data), _data_set_of(validation_data)
    if labels is not None:
        if isinstance(data, str | Path | Mapping | tuple):
            raise InputError("labels: go with an array of images only: flatout.fit(model, images, labels)")
        data = (data, labels)
    if validation_data is None:
        return data
    if data is None or isinstance(data, str | Path):
        raise InputError(
            "validation_data: goes with arrays and data sets only; images in files need a folder valid/ beside train/"
        )
    return {**(data if isinstance(data, Mapping) else {"train": data}), "valid": validation_data}


# --- Objects of torch as recipe keys ---------------------------------------------------------------------------------


def optimizer_keys(value: Any) -> dict[str, Any] | None:
    """Return `optimizer` keys for a torch or timm class, a partial of one, or an optimizer.

    None for anything else. Only the options of an optimizer are used: flatout makes one on every device.

    Raises:
        InputError: the class is from neither library, or an option without a key is not at its default.
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
    """Return the recipe name of an optimizer class."""
    import torch

    if getattr(torch.optim, cls.__name__, None) is cls:
        return name if (name := cls.__name__.lower()) in OPTIMIZERS else f"torch:{cls.__name__}"
    if cls.__module__.startswith("timm."):
        from timm.optim import get_optimizer_class, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

        for name in map(str, list_optimizers(exclude_filters=["fused*", "bnb*"])):
            if get_optimizer_class(name) is cls:
                return f"timm:{name}"
    raise InputError(
        f"optimizer: {cls.__module__}.{cls.__name__} is of neither torch nor timm; flatout makes one on every device "
        "by its name, such as torch:RAdam or timm:lion"
    )


def loss_keys(value: Any) -> dict[str, Any] | None:
    """Return recipe keys for a torch loss; None for anything else.

    Raises:
        InputError: an option without a key is not at its default.
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


def class_weights_of(value: Mapping[Any, Any]) -> list[float] | dict[str, Any]:
    """Return weights by class name unchanged, and weights by index, as in Keras, as a list.

    Raises:
        InputError: its keys are neither names nor indices.
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
    """Convert numbers, or tuples of numbers, to Python's."""
    if isinstance(value, tuple | list):
        return tuple(map(float, value))
    return value.item() if hasattr(value, "item") else value
