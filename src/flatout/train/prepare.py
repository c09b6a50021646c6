"""Preparation of a run: the pack, the automatic values of the recipe, the model, its weights, the engine."""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config import Recipe
from flatout.distributed.environment import restart_count
from flatout.engine.schedule import describe_scaling
from flatout.tasks import task_of, weights_of, with_task
from flatout.train import claim
from flatout.train.probes import fastest_precision
from flatout.train.run_log import RunLog
from flatout.utils import run_files
from flatout.utils.host import available_memory

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.batches import Split
    from flatout.data.pack import Pack
    from flatout.distributed.world import World
    from flatout.engine.base import Engine
    from flatout.train.head_stage import HeadStage
    from flatout.train.request import Options, TrainRequest
    from flatout.utils.console import Console

# --- Run folder and pack --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed_run_dir(request: "TrainRequest", world: "World") -> Iterator[Path]:
    """Claim the run folder in the main process, unless the process that started it has; agree on its name."""
    options = request.options
    resume = options.resume or (restart_count() > 0 and not options.overwrite)
    held = claim.claimed(options.out, request.recipe.job, resume=resume, overwrite=options.overwrite)
    with contextlib.ExitStack() as stack:
        yield world.from_main(lambda: request.run_dir or stack.enter_context(held))


@contextlib.contextmanager
def prepare_host(
    request: "TrainRequest", console: "Console", *, begins: bool = False
) -> "Iterator[tuple[TrainRequest, Pack]]":
    """Claim the run folder and make the pack for the ranks of this host, in this process or in others."""
    from flatout.distributed.world import World

    alone, log = World(), RunLog(console, request)
    with contextlib.ExitStack() as stack:
        if request.options.hosts.most == 1:
            run_dir = stack.enter_context(claimed_run_dir(request, alone))
            request = replace(request, run_dir=run_dir)
            if begins and not (run_dir / run_files.RECIPE).is_file():
                claim.begin(run_dir, request.recipe, overwrite=False)
        prepared_at = time.time()
        pack = load_pack(request, alone, log)
        request = replace(
            request,
            recipe=with_task(request.recipe, pack.task),
            data=pack,
            phase_seconds=log.seconds,
            prepared_at=prepared_at,
        )
        yield request, pack


def load_pack(request: "TrainRequest", world: "World", log: RunLog) -> "Pack":
    """Return the pack: one process per host makes it, and the others map the same file."""
    from flatout.data.build import load
    from flatout.data.pack import Pack, SharedPack, load_once_per_host

    data = request.data
    if isinstance(data, Pack):
        return data
    if isinstance(data, SharedPack):
        log.lap("launch")
        return data.open()
    source = data

    def load_alone() -> Pack:
        pack = load(source, request.recipe, cache=request.options.cache, report=log.console)
        log.console.finish()
        return pack

    log.lap("start")
    pack = load_once_per_host(world, load_alone)
    log.lap("pack")
    return pack


# --- Data and recipe ------------------------------------------------------------------------------------------------


def split_pack(pack: "Pack", recipe: Recipe, log: RunLog) -> "dict[str, Split]":
    """Return the images of each split, and note how the data was split."""
    from flatout.data.splits import splits_of

    log.console.note(pack.describe())
    for sentence in pack.notes:
        log.note(sentence)
    if pack.skipped:
        log.note(f"{len(pack.skipped):,} unreadable images were left out")
    splits = splits_of(pack, recipe.data, recipe.seed)
    taken = [f"{name} {len(s):,}" for name, s in splits.items() if name not in pack.splits]
    if fold := recipe.data.fold:
        held_out = f"train {len(splits['train']):,}, held out {len(splits['valid']):,}"
        log.note(f"fold {fold} of {recipe.data.folds}: {held_out}")
    elif taken:
        how = "the same share of all numbers" if pack.task == "regression" else "by class"
        how += " and group" * (pack.groups is not None)
        train = f"train {len(splits['train']):,}"
        log.note(f"taken from the training images, {how}: {', '.join(taken)}; {train}")
    if len(splits) == 1:
        log.note("no held-out data: accuracy will not be measured")
    return splits


def resolve_auto_values(
    recipe: Recipe,
    pack: "Pack",
    splits: "Mapping[str, Split]",
    world: "World",
    continued: Recipe | None,
    log: RunLog,
) -> Recipe:
    """Fill in the values that depend on the data: normalisation, bits, task, loss and order.

    All ranks call this.

    Args:
        continued: the recipe of the continued run; None in a new run.
    """
    from flatout.data.batches import measure
    from flatout.tasks import statistics

    if not recipe.data.bits:
        recipe = recipe.override({"data.bits": pack.bits})
    if not recipe.data.mean:
        mean, std = measure(splits["train"])
        recipe = recipe.override({"data.mean": mean, "data.std": std})
    before, recipe = recipe.loss, with_task(recipe, pack.task)
    if recipe.loss != before:
        log.note(f"loss = {recipe.loss}: the labels are {pack.task}")
    if pack.task == "regression" and not recipe.data.label_std:
        label_mean, label_std = statistics(splits["train"].labels)
        recipe = recipe.override({"data.label_mean": label_mean, "data.label_std": label_std})
    if recipe.data.order == "auto":
        order = continued.data.order if continued else _order_for_memory(splits["train"], world, log)
        recipe = recipe.override({"data.order": world.broadcast_object(order)})
    if recipe.optimizer.lr_base_batch not in (0, recipe.batch_size):
        log.note(describe_scaling(recipe))
    return recipe


def _order_for_memory(train: "Split", world: "World", log: RunLog) -> str:
    """Return "blocks" if the images on disk exceed the memory of a host, else "full"."""
    free = min(world.all_gather_object(available_memory()))
    if not train.is_on_disk or train.nbytes <= free:
        return "full"
    log.note(
        f"data.order = blocks: {train.nbytes / 2**30:.1f} GiB of training images are more than the "
        f"{free / 2**30:.1f} GiB of available memory"
    )
    return "blocks"


# --- Model and engine -----------------------------------------------------------------------------------------------


def build_model(
    request: "TrainRequest", pack: "Pack", report: Callable[[str], None] = lambda sentence: None
) -> "nn.Module":
    """Return the model of a request with fresh weights; a model object is copied."""
    from flatout.models.build import build_model

    return build_model(
        request.recipe,
        len(pack.classes),
        module=request.module,
        allow_code=request.options.allow_code,
        report=report,
    )


def start_engine(
    model: "nn.Module",
    recipe: Recipe,
    splits: "Mapping[str, Split]",
    pack: "Pack",
    world: "World",
    options: "Options",
    continued: Recipe | None,
    log: RunLog,
) -> "tuple[Engine, Recipe, HeadStage | None]":
    """Return the engine with initial weights, the recipe with its number format, and the fitted head if any.

    All ranks call this.

    Args:
        model: with fresh weights; it is changed.
        continued: the recipe of the continued run; None in a new run.

    Raises:
        InputError: weights cannot be loaded, the head cannot be fitted, or the device lacks what the recipe asks for.
    """
    from flatout.engine.factory import make_engine
    from flatout.train.head_stage import fit_to_features

    _load_initial_weights(model, recipe, world, log)
    class_weights = weights_of(recipe, task_of(recipe), splits["train"].labels, pack.classes)
    make = functools.partial(
        make_engine,
        engine=options.engine,
        devices=options.devices,
        world=world,
        class_weights=class_weights,
        # Only the torch engine supports user functions; `UserFunctions.check` has refused them elsewhere.
        **options.functions.for_engine(recipe),
    )
    fit = functools.partial(
        fit_to_features, splits=splits, pack=pack, make=make, world=world, class_weights=class_weights, report=log.note
    )
    # The engine's frozen layers compute features, too. A sharded model cannot be passed to another engine.
    shares_features = recipe.epochs > 0 and bool(recipe.freeze) and recipe.shard == "none"
    stage: HeadStage | None = None
    if recipe.linear_probe and not shares_features:
        stage = fit(model, recipe)
        recipe = _without_needless_epochs(recipe, stage, options, log)
        if not recipe.epochs:
            stage.give_to(model)
    recipe = _choose_precision(recipe, continued, model, splits, world, options, make, log)
    engine = make(model, recipe, report=log.note)
    if recipe.linear_probe and shares_features:
        stage = fit(model, recipe, engine=engine)
        recipe = _without_needless_epochs(recipe, stage, options, log)
        if not recipe.epochs:
            stage.give(engine)
    engine.task = replace(engine.task, own_metrics=options.functions.metrics)
    log.lap("model", stage.seconds if stage else {})
    return engine, recipe, stage


def _without_needless_epochs(recipe: Recipe, stage: "HeadStage", options: "Options", log: RunLog) -> Recipe:
    """With a time budget, drop fine-tuning if the head alone is good enough, and say what would help."""
    if options.minutes is None or not stage.is_enough():
        return recipe
    log.note(
        ("fine-tuning is left out: " if recipe.epochs else "")
        + f"heads that have not seen them answer {stage.share_right:.2%} of the images rightly; more images, or other "
        "ones, would help more than minutes"
    )
    return recipe.without_fine_tuning() if recipe.epochs else recipe


def _load_initial_weights(model: "nn.Module", recipe: Recipe, world: "World", log: RunLog) -> None:
    """Load the initial weights into rank 0's model, which the engine distributes: only one rank downloads them."""
    from flatout.models.pretrained import load_pretrained

    if recipe.pretrained or recipe.weights:
        world.from_main(lambda: load_pretrained(model, recipe, log.note))
    elif recipe.freeze:
        log.note("frozen layers keep their random weights: no pre-trained weights were requested")


def _choose_precision(
    recipe: Recipe,
    continued: Recipe | None,
    model: "nn.Module",
    splits: "Mapping[str, Split]",
    world: "World",
    options: "Options",
    make: "Callable[..., Engine]",
    log: RunLog,
) -> Recipe:
    """Return the recipe with its number format: that of the continued run, or the fastest."""
    from flatout.engine.factory import precisions
    from flatout.engine.torch.accelerator import precision_of_gpu

    formats = precisions(options.engine, world)
    if not recipe.epochs:
        return recipe.override({"precision": "fp32"})
    if recipe.precision != "auto":
        return recipe
    if continued:
        return recipe.override({"precision": continued.precision if continued.precision in formats else "auto"})
    if "bf16" not in formats:
        return recipe
    if found := precision_of_gpu(formats, model, recipe):
        log.note(f"precision = {found[0]}: {found[1] / 1e6:,.1f} million multiply-adds per image")
        return recipe.override({"precision": found[0]})
    chosen, reason = fastest_precision(
        lambda one: make(copy.deepcopy(model), one, report=lambda sentence: None),
        splits["train"],
        recipe,
        world,
        formats,
    )
    log.note(reason)
    return recipe.override({"precision": chosen})
