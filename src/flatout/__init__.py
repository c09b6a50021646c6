"""Train image classifiers flat out on whatever accelerators you have."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flatout.analysis.look import Look, look
    from flatout.config import SGD, Adagrad, Adam, AdamW, Augment, Data, Momentum, Optimizer, Recipe, Schedule
    from flatout.inference.predict import Prediction
    from flatout.inference.run import Ensemble, Run, load
    from flatout.train.callbacks import Callback, RunInfo, TensorBoard, WandB
    from flatout.train.fit import fit
    from flatout.utils.errors import InputError, TrainingFailed

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Augment",
    "Callback",
    "Data",
    "Ensemble",
    "InputError",
    "Look",
    "Momentum",
    "Optimizer",
    "Prediction",
    "Recipe",
    "Run",
    "RunInfo",
    "Schedule",
    "TensorBoard",
    "TrainingFailed",
    "WandB",
    "fit",
    "load",
    "look",
]


# Where the public names are, those that load least first.
_PLACES = ("flatout.utils.errors", "flatout.config", "flatout.train.callbacks", "flatout.inference.run")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds to load."""
    import importlib

    if name in ("Look", "look"):
        return getattr(importlib.import_module("flatout.analysis.look"), name)
    if name in __all__:
        for module in map(importlib.import_module, _PLACES):
            if hasattr(module, name):
                return getattr(module, name)
        return importlib.import_module("flatout.train.fit").fit
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")
