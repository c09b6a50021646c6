"""Functions of the user's in training: a loss, changes to whole batches, and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.errors import InputError
from flatout.recipe import Recipe
from flatout.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class OwnFunctions:
    """What a caller of `fit` gives as functions.

    Attributes:
        loss: of logits [B, K] and targets; returns a loss for each image, [B]. None for that of the recipe.
        batch_transforms: of images float32 [B, C, H, W], augmented and normalised; each returns such images.
        metrics: pairs of a name and a function of labels and answers, as those of scikit-learn.
    """

    loss: Callable[..., Any] | None = None
    batch_transforms: tuple[Callable[..., Any], ...] = ()
    metrics: tuple[tuple[str, Callable[..., Any]], ...] = ()

    def check(self, recipe: Recipe, engine: str) -> None:
        """Raise InputError where the engine or the recipe cannot use them. Metrics are always possible."""
        given = "loss" if self.loss else "batch_transforms" if self.batch_transforms else ""
        reasons = {
            "the XLA engine compiles its own losses and augmentations; use engine='torch'": engine == "xla",
            "a sharded model is trained by FSDP with built-in functions; set shard='none'": recipe.shard == "full",
            "exact sums are known for built-in functions only; set exact_sums=False": recipe.exact_sums,
        }
        for reason, applies in reasons.items():
            if given and applies:
                raise InputError(f"{given}: a function of your own cannot be used here: {reason}")

    def notes(self) -> list[str]:
        """Return sentences about what a recipe cannot hold."""
        names = ["loss"] * (self.loss is not None) + ["batch_transforms"] * bool(self.batch_transforms)
        return [f"{name} is a function given in Python: recipe.toml does not contain it" for name in names]


def own_functions(loss: Any, batch_transforms: Any, metrics: Any) -> OwnFunctions:
    """Return the functions that a caller of `fit` gives.

    Raises:
        InputError: one is no function, or a metric has no name or that of a built-in one.
    """
    transforms = (batch_transforms,) if callable(batch_transforms) else tuple(batch_transforms)
    for transform in transforms:
        if not callable(transform):
            raise InputError(f"batch_transforms: {transform!r} is no function of images [B, C, H, W]")
    return OwnFunctions(loss=loss, batch_transforms=transforms, metrics=_named(metrics))


def _named(metrics: Any) -> tuple[tuple[str, Callable[..., Any]], ...]:
    if callable(metrics) or isinstance(metrics, str):
        metrics = [metrics]
    pairs = metrics.items() if isinstance(metrics, Mapping) else [(getattr(m, "__name__", ""), m) for m in metrics]
    taken = {"loss", "count", *(name for task in TASKS.values() for name in task.metric_names)}
    found = []
    for name, function in pairs:
        if not callable(function):
            known = ", ".join(sorted(taken - {"loss", "count"}))
            raise InputError(f"metrics: {function!r} is no function of labels and answers; always computed: {known}")
        if not str(name).isidentifier():
            raise InputError('metrics: a function without a name; give a dict: metrics={"name": function}')
        if name in taken:
            raise InputError(f"metrics: {name} is the name of a built-in metric; give the function another name")
        found.append((str(name), function))
    return tuple(found)
