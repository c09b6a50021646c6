"""Preparation of a run: the pack, the automatic values of the recipe, the model, its weights, the engine."""

import contextlib
import copy
import functools
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import __version__
from flatout.config import FREE_KEYS, Recipe
from flatout.data.batches import Split, measure
from flatout.data.build import load
from flatout.data.pack import Pack, SharedPack, load_once_per_host
from flatout.data.splits import splits_of
from flatout.distributed.environment import restart_count
from flatout.distributed.world import World
from flatout.engine.base import Engine
from flatout.engine.factory import make_engine, precisions
from flatout.engine.schedule import describe_scaling
from flatout.engine.torch.accelerator import precision_of_gpu
from flatout.models import build
from flatout.models.pretrained import load_pretrained
from flatout.tasks import statistics, task_of, weights_of, with_task
from flatout.train import claim
from flatout.train.checkpoint import data_facts
from flatout.train.context import RunLog
from flatout.train.head_stage import HeadStage, fit_to_features
from flatout.train.probes import fastest_precision
from flatout.train.request import Options, TrainRequest
from flatout.utils import run_files
from flatout.utils.console import Console
from flatout.utils.errors import InputError
from flatout.utils.host import available_memory

if TYPE_CHECKING:
    from torch import nn

# --- Run folder and pack --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed_run_dir(request: TrainRequest, world: World) -> Iterator[Path]:
    """Claim the run folder in the main process, unless the process that started it has; agree on its name."""
    options = request.options
    resume = options.resume or (restart_count() > 0 and not options.overwrite)
    held = claim.claimed(options.out, request.recipe.job, resume=resume, overwrite=options.overwrite)
    with contextlib.ExitStack() as stack:
        yield world.from_main(lambda: request.run_dir or stack.enter_context(held))


@contextlib.contextmanager
def prepare_host(
    request: TrainRequest, console: Console, *, begins: bool = False
) -> Iterator[tuple[TrainRequest, Pack]]:
    """Claim the run folder and make the pack for the ranks of this host, in this process or in others."""
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


def load_pack(request: TrainRequest, world: World, log: RunLog) -> Pack:
    """Return the pack: one process per host makes it, and the others map the same file."""
    data = request.data
    if isinstance(data, Pack):
        return data
    if isinstance(data, SharedPack):
        log.lap("launch")
        return data.open()
    log.lap("start")
    pack = load_once_per_host(
        world, lambda: load(data, request.recipe, cache=request.options.cache, report=log.console)
    )
    log.console.finish()
    log.lap("pack")
    return pack


# --- Data and recipe ------------------------------------------------------------------------------------------------


def split_pack(pack: Pack, recipe: Recipe, log: RunLog) -> dict[str, Split]:
    """Return the images of each split, and note how the data was split."""
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
    pack: Pack,
    splits: Mapping[str, Split],
    world: World,
    continued: Recipe | None,
    log: RunLog,
) -> Recipe:
    """Fill in the values that depend on the data: normalisation, bits, task, loss and order.

    All ranks call this.

    Args:
        continued: the recipe of the continued run; None in a new run.
    """
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


def _order_for_memory(train: Split, world: World, log: RunLog) -> str:
    """Return "blocks" if the images on disk exceed the memory of a host, else "full"."""
    free = min(world.all_gather_object(available_memory()))
    if not train.is_on_disk or train.nbytes <= free:
        return "full"
    log.note(
        f"data.order = blocks: {train.nbytes / 2**30:.1f} GiB of training images are more than the "
        f"{free / 2**30:.1f} GiB of available memory"
    )
    return "blocks"


def agree(world: World, recipe: Recipe, pack: Pack) -> None:
    """Check before the first step that all ranks have the same versions, recipe and data.

    Raises:
        InputError: one differs. The message names it and the difference, and is the same on all ranks.
    """
    fixes = {"version": "install the same version on all hosts", "data": "give all hosts the same data"}
    facts: dict[tuple[str, str], Any] = {("version", name): version(name) for name in ("torch", "numpy", "safetensors")}
    facts |= {("version", "flatout"): __version__, ("version", "Python"): platform.python_version()}
    free = {*FREE_KEYS, "data.path"} - {"epochs", "early_stopping", "micro_batch", "precision", "shard"}
    facts |= {("recipe", key): value for key, value in recipe.flat().items() if key not in free}
    if world.local_size < world.size:
        # The ranks of one host read the same file.
        facts |= {("data", name): value for name, value in data_facts(pack).items()}
    everyone = world.all_gather_object((socket.gethostname(), facts))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for (kind, name), value in other.items():
            if value != first[kind, name]:
                raise InputError(
                    f"rank {rank} (host {host}) has {kind} {name} = {value!r}, but rank 0 (host {first_host}) has "
                    f"{first[kind, name]!r}: {fixes.get(kind, 'start all hosts with the same recipe and flags')}"
                )


# --- Model and engine -----------------------------------------------------------------------------------------------


def build_model(
    request: TrainRequest, pack: Pack, report: Callable[[str], None] = lambda sentence: None
) -> "nn.Module":
    """Return the model of a request with fresh weights; a model object is copied."""
    return build.build_model(
        request.recipe,
        len(pack.classes),
        module=request.module,
        allow_code=request.options.allow_code,
        report=report,
    )


def start_engine(
    model: "nn.Module",
    recipe: Recipe,
    splits: Mapping[str, Split],
    pack: Pack,
    world: World,
    options: Options,
    continued: Recipe | None,
    log: RunLog,
) -> tuple[Engine, Recipe, HeadStage | None]:
    """Return the engine with initial weights, the recipe with its number format, and the fitted head if any.

    All ranks call this.

    Args:
        model: with fresh weights; it is changed.
        continued: the recipe of the continued run; None in a new run.

    Raises:
        InputError: weights cannot be loaded, the head cannot be fitted, or the device lacks what the recipe asks for.
    """
    if recipe.pretrained or recipe.weights:
        # Rank 0 alone loads, and perhaps downloads them; its engine distributes them.
        world.from_main(lambda: load_pretrained(model, recipe, log.note))
    elif recipe.freeze:
        log.note("frozen layers keep their random weights: no pre-trained weights were requested")
    task, functions = task_of(recipe), options.functions
    class_weights = weights_of(recipe, task, splits["train"].labels, pack.classes)
    make = functools.partial(
        make_engine,
        engine=options.engine,
        devices=options.devices,
        world=world,
        task=replace(task, own_metrics=functions.metrics),
        class_weights=class_weights,
        # Only the torch engine supports user functions; `UserFunctions.check` has refused them elsewhere.
        **functions.for_engine(recipe),
    )

    def fit(recipe: Recipe, engine: Engine | None = None) -> tuple[HeadStage, Recipe]:
        """Fit the head. With a time budget, drop fine-tuning if the head alone is good enough."""
        stage = fit_to_features(
            model, recipe, splits, pack, make, world, class_weights=class_weights, report=log.note, engine=engine
        )
        if options.minutes is not None and stage.is_enough():
            log.note(
                ("fine-tuning is left out: " if recipe.epochs else "")
                + f"heads that have not seen them answer {stage.share_right:.2%} of the images rightly; more images, "
                "or other ones, would help more than minutes"
            )
            recipe = recipe.without_fine_tuning() if recipe.epochs else recipe
        if not recipe.epochs:
            stage.give(engine) if engine else stage.give_to(model)
        return stage, recipe

    stage: HeadStage | None = None
    # The engine's frozen layers compute features, too. A sharded model cannot be passed to another engine.
    shares_features = recipe.epochs > 0 and bool(recipe.freeze) and recipe.shard == "none"
    if recipe.linear_probe and not shares_features:
        stage, recipe = fit(recipe)
    recipe = _choose_precision(recipe, continued, model, splits, world, options, make, log)
    engine = make(model, recipe, report=log.note)
    if recipe.linear_probe and shares_features:
        stage, recipe = fit(recipe, engine)
    log.lap("model", stage.seconds if stage else {})
    return engine, recipe, stage


def _choose_precision(
    recipe: Recipe,
    continued: Recipe | None,
    model: "nn.Module",
    splits: Mapping[str, Split],
    world: World,
    options: Options,
    make: Callable[..., Engine],
    log: RunLog,
) -> Recipe:
    """Return the recipe with its number format: that of the continued run, or the fastest."""
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
        chosen, reason = found[0], f"{found[1] / 1e6:,.1f} million multiply-adds per image"
    else:

        def quiet(one: Recipe) -> Engine:
            return make(copy.deepcopy(model), one, report=lambda sentence: None)

        chosen, reason = fastest_precision(quiet, splits["train"], recipe, world, formats)
    log.note(f"precision = {chosen}: {reason}")
    return recipe.override({"precision": chosen})
