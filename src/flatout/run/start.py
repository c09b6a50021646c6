"""The engine of a run before its first step: the weights to start from, a fitted head, the number format."""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.errors import InputError
from flatout.recipe import Augment, Recipe
from flatout.run.options import Options
from flatout.tasks import task_of, weights_of

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.feed import Samples
    from flatout.dist.world import World
    from flatout.engine.base import Engine


def start_engine(
    model: "nn.Module",
    recipe: Recipe,
    splits: "Mapping[str, Samples]",
    classes: Sequence[str],
    *,
    world: "World",
    options: Options,
    kept_precision: str,
    fits_head: bool,
    note: Callable[[str], None],
) -> "tuple[Engine, Recipe]":
    """Return the engine with the weights to start from, and the recipe with the number format of the run.

    All ranks call this.

    Args:
        model: with fresh weights; it is changed.
        kept_precision: of the run that is continued, for precision = "auto"; "" in a new run.

    Raises:
        InputError: weights cannot be loaded, the head cannot be fitted, or the device lacks what the recipe asks for.
    """
    from flatout.engine.factory import make_engine, precisions

    if recipe.pretrained or recipe.weights:
        _load_weights(model, recipe, world, note)
    elif recipe.freeze:
        note("frozen layers keep their random weights: no pre-trained weights were requested")
    own = options.own
    make = functools.partial(
        make_engine,
        engine=options.engine,
        devices=options.devices,
        world=world,
        class_weights=weights_of(recipe, task_of(recipe), splits["train"].labels, classes),
        # Only the torch engine takes functions of the user's; `check` has refused them elsewhere.
        **own.for_engine(recipe),
    )
    formats = precisions(options.engine, world)
    if recipe.precision == "auto" and kept_precision:
        recipe = recipe.override({"precision": kept_precision if kept_precision in formats else "auto"})
    elif recipe.precision == "auto" and "bf16" in formats and not recipe.exact_sums:
        from flatout.run.precision import fastest_precision

        chosen, reason = fastest_precision(
            lambda one: make(copy.deepcopy(model), one, report=lambda sentence: None),
            splits["train"],
            recipe,
            world,
            formats,
        )
        note(reason)
        recipe = recipe.override({"precision": chosen})
    if fits_head:
        _fit_head(model, recipe, splits, make, world, note)
    engine = make(model, recipe, report=note)
    engine.task = replace(engine.task, own_metrics=own.metrics)
    return engine, recipe


def _load_weights(model: "nn.Module", recipe: Recipe, world: "World", note: Callable[[str], None]) -> None:
    """Load the weights to start from into rank 0's model, which the engine distributes: one rank downloads them."""
    from flatout.models.pretrained import load_pretrained

    def load() -> None:
        with world.heartbeat.alone("loading the weights"):
            load_pretrained(model, recipe, note)

    world.from_main(load)


def _fit_head(
    model: "nn.Module",
    recipe: Recipe,
    splits: "Mapping[str, Samples]",
    make: "Callable[..., Engine]",
    world: "World",
    note: Callable[[str], None],
) -> None:
    """Fit the head to the output of the layers before it, computed on the devices of the run."""
    from flatout.models.layers import freeze
    from flatout.run.linear_probe import fit_head, linear_head

    head, backbone = linear_head(model), copy.deepcopy(model)
    freeze(backbone, "all-but-last-0")
    plain = replace(recipe, augment=Augment(), shard="none")
    with contextlib.closing(make(backbone, plain, report=lambda sentence: None)) as engine:
        # The images of a fold choose nothing.
        names = ("train",) if recipe.data.fold else ("train", "valid")
        chosen = {name: samples for name, samples in splits.items() if name in names}
        features = {name: engine.place(samples).features() for name, samples in chosen.items()}
    found = {name: values for name, values in features.items() if values is not None and values.ndim == 2}
    if head is None or len(found) < len(chosen) or found["train"].shape[1] != head.in_features:
        raise InputError(
            f"linear_probe = true: {recipe.model} has no single linear layer as its head, or torch.fx cannot "
            "trace what is before it; set linear_probe = false"
        )
    if world.is_main:
        # The engine takes the main process's weights.
        labels = {name: samples.labels for name, samples in chosen.items()}
        note(fit_head(head, found, labels, recipe))
