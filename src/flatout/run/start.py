"""The engine of a run before its first step: the weights to start from, a fitted head, the number format."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.recipe import Recipe
from flatout.run.options import Options
from flatout.tasks import task_of, weights_of

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.feed import Samples
    from flatout.data.pack import Pack
    from flatout.distributed.world import World
    from flatout.engine.base import Engine
    from flatout.run.head_stage import HeadStage


def start_engine(
    model: "nn.Module",
    recipe: Recipe,
    splits: "Mapping[str, Samples]",
    *,
    world: "World",
    options: Options,
    pack: "Pack",
    kept_precision: str,
    note: Callable[[str], None],
) -> "tuple[Engine, Recipe, HeadStage | None]":
    """Return the engine with the weights to start from, the recipe with its number format, and the fitted head if any.

    All ranks call this.

    Args:
        model: with fresh weights; it is changed.
        kept_precision: of the run that is continued, for precision = "auto"; "" in a new run.

    Raises:
        InputError: weights cannot be loaded, the head cannot be fitted, or the device lacks what the recipe asks for.
    """
    from flatout.engine.factory import make_engine
    from flatout.run.head_stage import fit_to_features

    if recipe.pretrained or recipe.weights:
        _load_weights(model, recipe, world, note)
    elif recipe.freeze:
        note("frozen layers keep their random weights: no pre-trained weights were requested")
    own = options.own
    stage: HeadStage | None = None
    class_weights = weights_of(recipe, task_of(recipe), splits["train"].labels, pack.classes)
    make = functools.partial(
        make_engine,
        engine=options.engine,
        devices=options.devices,
        world=world,
        class_weights=class_weights,
        # Only the torch engine takes functions of the user's; `check` has refused them elsewhere.
        **own.for_engine(recipe),
    )
    fit = functools.partial(
        fit_to_features, splits=splits, pack=pack, make=make, world=world, class_weights=class_weights, report=note
    )
    # The layers that an engine has cut off compute features, too. A sharded model cannot be given to another engine.
    is_shared = recipe.epochs > 0 and bool(recipe.freeze) and recipe.shard == "none"
    if recipe.linear_probe and not is_shared:
        stage = fit(model, recipe)
        recipe = _without_epochs(recipe, stage, options, note)
        if not recipe.epochs:
            stage.give_to(model)
    recipe = _with_precision(recipe, kept_precision, model, splits, world, options, make, note)
    engine = make(model, recipe, report=note)
    if recipe.linear_probe and is_shared:
        stage = fit(model, recipe, engine=engine)
        recipe = _without_epochs(recipe, stage, options, note)
        if not recipe.epochs:
            stage.give(engine)
    engine.task = replace(engine.task, own_metrics=own.metrics)
    return engine, recipe, stage


def _without_epochs(recipe: Recipe, stage: "HeadStage", options: Options, note: Callable[[str], None]) -> Recipe:
    """Return the recipe without fine-tuning where minutes decide and the head alone is enough."""
    if not recipe.epochs or options.minutes is None or not stage.is_enough():
        return recipe
    note(
        f"fine-tuning is left out: heads that have not seen them answer {stage.share_right:.2%} of the images "
        "rightly; more images, or other ones, would help more than minutes"
    )
    return recipe.override({"epochs": 0, "freeze": "", "norm": "global"})


def _with_precision(
    recipe: Recipe,
    kept: str,
    model: "nn.Module",
    splits: "Mapping[str, Samples]",
    world: "World",
    options: Options,
    make: "Callable[..., Engine]",
    note: Callable[[str], None],
) -> Recipe:
    """Return the recipe with its number format: that of the run that is continued, or the fastest by measured steps."""
    from flatout.engine.factory import precisions
    from flatout.run.precision import fastest_precision

    formats = precisions(options.engine, world)
    if not recipe.epochs:
        return recipe.override({"precision": "fp32"})
    if recipe.precision != "auto":
        return recipe
    if kept:
        return recipe.override({"precision": kept if kept in formats else "auto"})
    if "bf16" not in formats:
        return recipe
    chosen, reason = fastest_precision(
        lambda one: make(copy.deepcopy(model), one, report=lambda sentence: None),
        splits["train"],
        recipe,
        world,
        formats,
    )
    note(reason)
    return recipe.override({"precision": chosen})


def _load_weights(model: "nn.Module", recipe: Recipe, world: "World", note: Callable[[str], None]) -> None:
    """Load the weights to start from into rank 0's model, which the engine distributes: one rank downloads them."""
    from flatout.models.pretrained import load_pretrained

    world.from_main(lambda: load_pretrained(model, recipe, note))
