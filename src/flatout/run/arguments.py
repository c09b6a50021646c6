"""What callers of `flatout.fit` write, in terms of recipe keys and data."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatout.errors import InputError
from flatout.recipe import Augment, Optimizer, known_keys
from flatout.run import torch_objects
from flatout.settings import nearest

_OBJECTS = {
    "optimizer": 'flatout makes it on every device: optimizer="adam", or flatout.Adam(lr=0.001), or torch.optim.RAdam',
    "schedule": 'give a name or a section: schedule="cosine", or flatout.Schedule(name="cosine", warmup_epochs=1)',
    "loss": 'give a name, loss="cross-entropy" or "binary-cross-entropy", or a loss of torch, nn.CrossEntropyLoss()',
    "augment": "give amounts: flatout.Augment(flip=True, rotate=10); functions go into transform= or batch_transforms=",
}


def check_names(arguments: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise InputError for a keyword argument that is neither a recipe key nor an argument of the function."""
    own = [name for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD]
    keys = known_keys()
    known = {*own, "class_weight", *(part for key in keys for part in (key, *key.partition(".")))}
    for name in arguments.keys() - known:
        raise InputError(f"{name}: {function.__name__} has no such argument; {nearest(name, [*own, *keys])}")


def recipe_changes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted recipe keys for the keyword arguments of `fit`.

    A section is a `flatout.Optimizer` or the like, a dict, or its name (`optimizer="adam"`). The last part of a dotted
    key will do where only one ends in it: `lr=0.01`, `weight_decay=0.01`, `flip=True`.
    """
    changes: dict[str, Any] = {}
    for key, value in _without_objects(arguments).items():
        full = [known for known in known_keys() if known.rpartition(".")[2] == key]
        if key == "augment" and (value is None or value is False):
            value = Augment()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of NumPy or torch
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
    """Return the arguments with recipe keys in place of torch's optimizers and losses and of dicts of class weights."""
    given = dict(arguments)
    optimizer = given.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, str | Mapping | Optimizer):
        given["optimizer"] = torch_objects.optimizer_keys(optimizer) or optimizer
    loss = given.get("loss")
    if loss is not None and not isinstance(loss, str) and (keys := torch_objects.loss_keys(loss)) is not None:
        if twice := keys.keys() & (given.keys() - {"loss"}):
            raise InputError(f"{twice.pop()}: is given twice, also by the loss")
        given |= keys
    # Keras has it in the singular.
    for name in [name for name in ("class_weight", "class_weights") if isinstance(given.get(name), Mapping)]:
        given["class_weights"] = torch_objects.class_weights(given.pop(name))
    return given


def is_own_loss(loss: Any) -> bool:
    """Whether a loss is a function, or a module, that no recipe key stands for."""
    return callable(loss) and not isinstance(loss, type) and torch_objects.loss_keys(loss) is None


def loader_batch_size(data: Any) -> int | None:
    """Return the batch size of a DataLoader, or of that for training, if one is given."""
    for value in (data, *(data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else ())):
        if _is_loader(value):
            return value.batch_size
    return None


def _is_loader(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("dataset", "batch_size", "collate_fn"))


def _data_set_of(value: Any) -> Any:
    """Return the data set of a DataLoader; that of each part of a dict or tuple; anything else as it is.

    Raises:
        InputError: the loader does what flatout would not: it draws with weights, or makes batches of its own kind.
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
