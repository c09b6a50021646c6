"""What callers of `flatout.fit` write, in terms of recipe keys and data."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.errors import InputError
from flatout.recipe import Augment, known_keys

_OBJECTS = {
    "optimizer": 'flatout builds it for every device: optimizer="adam", or flatout.Adam(lr=0.001)',
    "schedule": 'give a name or a section: schedule="cosine", or flatout.Schedule(name="cosine", warmup_epochs=1)',
    "loss": 'give a name: loss="cross-entropy" or "binary-cross-entropy"',
    "augment": "give amounts: flatout.Augment(flip=True, rotate=10)",
}


def recipe_changes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted recipe keys for the keyword arguments of `fit`.

    A section is a `flatout.Optimizer` or the like, a dict, or its name (`optimizer="adam"`). The last part of a dotted
    key will do where only one ends in it: `lr=0.01`, `weight_decay=0.01`, `flip=True`.
    """
    changes: dict[str, Any] = {}
    for key, value in arguments.items():
        full = [known for known in known_keys() if known.rpartition(".")[2] == key]
        if key == "augment" and (value is None or value is False):
            value = Augment()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of NumPy or torch
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        elif key in _OBJECTS and not isinstance(value, str | Mapping):
            raise InputError(f"{key} = {value!r}: {_OBJECTS[key]}")
        if isinstance(value, Mapping):
            added = {f"{key}.{inner}": v for inner, v in value.items()}
        elif key in ("optimizer", "schedule"):
            added = {f"{key}.name": value}
        else:
            added = {full[0] if len(full) == 1 else key: str(value) if isinstance(value, Path) else value}
        if twice := changes.keys() & added.keys():
            raise InputError(f"{key}: {twice.pop()} is given twice")
        changes |= added
    return changes


def join_data(data: Any, labels: Any, validation_data: Any) -> Any:
    """Return the data of `fit(model, images, labels, validation_data=...)` as one value."""
    for value in (data, validation_data):
        if hasattr(value, "dataset") and hasattr(value, "batch_size"):
            raise InputError("data: give the data set of the DataLoader, loader.dataset, and batch_size=...")
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
