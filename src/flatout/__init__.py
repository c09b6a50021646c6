"""Train image classifiers flat out on whatever accelerators you have."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flatout.errors import InputError, TrainingFailed
    from flatout.recipe import SGD, Adagrad, Adam, AdamW, Augment, Data, Momentum, Optimizer, Recipe, Schedule
    from flatout.run.fit import fit
    from flatout.run.folder import Prediction, Run, load

# Where each public name lives. They are imported when first used: torch takes seconds to load.
_HOMES = {
    **dict.fromkeys(("InputError", "TrainingFailed"), "flatout.errors"),
    "fit": "flatout.run.fit",
    **dict.fromkeys(("SGD", "Momentum", "Adagrad", "Adam", "AdamW"), "flatout.recipe"),
    **dict.fromkeys(("Augment", "Data", "Optimizer", "Recipe", "Schedule"), "flatout.recipe"),
    **dict.fromkeys(("Prediction", "Run", "load"), "flatout.run.folder"),
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Augment",
    "Data",
    "InputError",
    "Momentum",
    "Optimizer",
    "Prediction",
    "Recipe",
    "Run",
    "Schedule",
    "TrainingFailed",
    "fit",
    "load",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")
