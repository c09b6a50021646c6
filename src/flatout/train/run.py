"""A training run, top-down: `train` starts the processes that take part, and each of them calls `train_on_rank`."""

import contextlib
import copy
import functools
import platform
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
from torch import nn

from flatout import __version__
from flatout.config import Recipe
from flatout.data.batches import Split, measure, steps_per_epoch
from flatout.data.build import load
from flatout.data.pack import Pack, SharedPack, load_once_per_host, share
from flatout.data.splits import splits_of
from flatout.distributed.environment import launched, restart_count
from flatout.distributed.world import World
from flatout.engine import factory, optim
from flatout.engine.base import DeviceDataset, Engine
from flatout.engine.devices import parse_devices, spec_of
from flatout.engine.factory import choose_processes, kept_devices, make_engine, precisions, run_on_devices
from flatout.engine.schedule import describe_scaling
from flatout.engine.torch.accelerator import is_worth_tuning, multiply_adds, precision_of_gpu
from flatout.models.build import build_model
from flatout.models.pretrained import load_pretrained
from flatout.tasks import statistics, task_of, weights_of, with_task
from flatout.train import run_dir as folders
from flatout.train.budget import Budget, fastest_precision, plan_minutes
from flatout.train.callbacks import call_on_end, call_on_start
from flatout.train.finish import finish
from flatout.train.folds import cross_validate
from flatout.train.head import ENOUGH, HeadStage, fit_to_features
from flatout.train.loop import TrainingLoop
from flatout.train.monitor import Monitor, signals_noted, write_metrics
from flatout.train.recipes import resolve
from flatout.train.request import Options, Progress, RunLog, TrainContext, TrainRequest, check_request
from flatout.utils import run_files
from flatout.utils.console import Console, counted
from flatout.utils.errors import CallbackFailed, DiskFull, InputError, RankLost, Stopped, TrainingFailed
from flatout.utils.files import default_folder
from flatout.utils.host import available_memory

T = TypeVar("T")


# --- Which processes take part --------------------------------------------------------------------------------------


def train_job(
    job: str | Path | Recipe | None,
    data: object,
    changes: Mapping[str, object],
    options: Options,
    console: Console,
    *,
    module: nn.Module | None = None,
) -> Path:
    """Resolve a job and its data, see `resolve`; train, and return the run folder."""
    reasons = list[str]()
    recipe, found = resolve(
        job,
        data,
        changes,
        accelerated=parse_devices(options.devices, options.engine).is_accelerated,
        console=console,
        seconds=options.seconds,
        began=options.began,
        # Hosts would measure different speeds, and so generate different recipes.
        speeds=None if options.hosts.most > 1 else factory.speeds_on(options.devices, options.engine),
        explain=reasons.append,
    )
    options.functions.check(recipe, options.engine)
    for name in options.functions.in_training:
        reasons.append(f"{name} is a function given in Python: recipe.toml does not contain it")
    options = replace(options, notes=tuple(reasons))
    return train(TrainRequest(recipe=recipe, data=found, options=options, module=module), console)


def train(request: TrainRequest, console: Console) -> Path:
    """Train according to a recipe, and return the run folder; join other ranks if a launcher has started this one."""
    recipe, options = request.recipe, request.options
    check_request(recipe, options)
    if launched() is None and options.devices != "auto":
        _check_batch(recipe.batch_size, len(parse_devices(options.devices, options.engine).ranks.names))
    if options.hosts.most > 1 and options.out is None:
        # All hosts use the first host's name, also after a restart.
        request = replace(request, options=replace(options, out=default_folder(recipe.job)))
    if not recipe.data.folds or recipe.data.fold:
        return _train_one(console, request)
    with prepare_host(request, console) as (request, pack):
        # Check optimizer, model, weights and devices before an old run is removed.
        optim.class_of(recipe.optimizer)
        model = fresh_model(request, pack)
        if recipe.pretrained or recipe.weights:
            load_pretrained(model, recipe, lambda sentence: None)
        return cross_validate(request, pack, console, functools.partial(_train_one, console))


def _train_one(console: Console, request: TrainRequest) -> Path:
    run_dir, attributes = run_on_all_ranks(request, console, _train_and_return_callbacks, begins=True)
    for callback, found in zip(request.options.callbacks, attributes, strict=False):
        vars(callback).update(found)
    return run_dir


def run_on_all_ranks(
    request: TrainRequest,
    console: Console,
    function: Callable[[Console, World, TrainRequest], T],
    *,
    begins: bool = False,
) -> T:
    """Call an importable function on every rank, and return the first rank's result.

    With `begins`, it begins a run: its folder can be resumed from then on, even if the run is killed soon.
    """
    optim.class_of(request.recipe.optimizer)  # refuses one that cannot train, before the data is read
    with contextlib.ExitStack() as stack:
        if launched() is None:
            request, pack = stack.enter_context(prepare_host(request, console, begins=begins))
            ranks = parse_devices(request.options.devices, request.options.engine).ranks
            is_alone = len(ranks.names) == request.options.hosts.most == 1 and not request.options.restarts
            if not is_alone:
                request = replace(request, data=stack.enter_context(share(pack)))
        options = request.options
        return run_on_devices(
            function,
            (request,),
            spec=options.devices,
            engine=options.engine,
            console=console,
            hosts=options.hosts,
            restarts=options.restarts,
            hang_timeout=options.hang_timeout,
        )


def _check_batch(batch: int, ranks: int) -> None:
    if batch < ranks:
        raise InputError(
            f"batch_size = {batch} is less than one sample for each of the {ranks} ranks: "
            "use a larger batch or fewer devices"
        )


def _choose_processes(request: TrainRequest, pack: Pack, log: RunLog) -> TrainRequest:
    """Choose the processes of this host; a resumed run keeps its devices."""
    options, spec = request.options, request.options.devices
    if spec == "auto" and options.resume and options.out:
        with contextlib.suppress(OSError):
            spec, sentence = kept_devices((options.out / run_files.DEVICES).read_text(errors="replace"), options.engine)
            log.note(sentence)
    start, stop = pack.splits["train"]
    devices, reason = choose_processes(
        spec, request.recipe, stop - start, lambda: fresh_model(request, pack), options.engine, seconds=options.seconds
    )
    if reason:
        log.note(reason)
    return replace(request, options=replace(options, devices=str(devices), notes=tuple(log.notes)))


@contextlib.contextmanager
def prepare_host(
    request: TrainRequest, console: Console, *, begins: bool = False
) -> Iterator[tuple[TrainRequest, Pack]]:
    """Claim the run folder, make the pack for the ranks of this host, and choose these."""
    alone, log = World(), RunLog(console, request)
    with contextlib.ExitStack() as stack:
        if request.options.hosts.most == 1:
            run_dir = stack.enter_context(claimed_run_dir(request, alone))
            request = replace(request, run_dir=run_dir)
            if begins and not (run_dir / run_files.RECIPE).is_file():
                folders.write_recipe(run_dir, request.recipe)
                if request.options.devices != "auto":
                    folders.write_devices(run_dir, request.options.devices)
        prepared_at = time.time()
        pack = pack_of_host(request, alone, log)
        recipe = with_task(request.recipe, pack.task, log.note)
        request = replace(request, recipe=recipe, data=pack, phase_seconds=log.seconds, prepared_at=prepared_at)
        request = _choose_processes(request, pack, log)
        if begins and request.run_dir and not (request.run_dir / run_files.DEVICES).is_file():
            folders.write_devices(request.run_dir, request.options.devices)
        yield request, pack


@contextlib.contextmanager
def claimed_run_dir(request: TrainRequest, world: World) -> Iterator[Path]:
    """Claim the run folder in the main process, unless the process that started it has; agree on its name."""
    options = request.options
    resume = options.resume or (restart_count() > 0 and not options.overwrite)
    held = folders.claimed(options.out, request.recipe.job, resume=resume, overwrite=options.overwrite)
    with contextlib.ExitStack() as stack:
        yield world.from_main(lambda: request.run_dir or stack.enter_context(held))


# --- What each of them does ------------------------------------------------------------------------------------------


def train_on_rank(console: Console, world: World, request: TrainRequest) -> Path:
    """Train on one rank, and return the run folder. All ranks call this."""
    with set_up(console, world, request) as context:
        # Continue from a checkpoint, or begin with the fitted head
        checkpoint = context.checkpoint
        progress = folders.restore(context, checkpoint) if checkpoint else new_progress(context)
        # Place images on the devices, compile steps, fit their number to the time
        if context.recipe.epochs:
            context = replace(context, datasets=place(context))
        context, budget = plan_minutes(context, progress)
        # An old run is removed when nothing is left that could be refused
        begin_run_dir(context, overwrite=request.options.overwrite and not checkpoint)
        write_metrics(context, progress)
        # Train, evaluate, write the run
        with signals_noted(world.control):
            call_on_start(context, progress)
            if context.datasets:
                context = run_epochs(context, progress, budget)
            finish(context, progress)
            call_on_end(context)
        # Ranks that have left are not ended when another one fails.
        world.barrier()
        world.leave()
    if context.log.failure:
        raise context.log.failure
    return context.run_dir


@contextlib.contextmanager
def set_up(console: Console, world: World, request: TrainRequest) -> Iterator[TrainContext]:
    """Provide data, model and engine on one rank, while the run folder is locked. All ranks call this."""
    log = RunLog(console, request)
    with claimed_run_dir(request, world) as run_dir:
        pack = pack_of_host(request, world, log)
        splits = split_pack(pack, request.recipe, log)
        checkpoint = folders.continued(request, run_dir, world, log.note)
        recipe = keep_choices(request, checkpoint.recipe, world) if checkpoint else request.recipe
        recipe = resolve_auto_values(recipe, pack, splits, world, log)
        _check_batch(min(recipe.batch_size, len(splits["train"])), world.size)
        agree(world, recipe, pack)
        log.lap("read")
        request = replace(request, recipe=recipe)
        model = fresh_model(request, pack, log.note)
        engine, recipe, stage = start_engine(model, request, splits, pack, world, log, is_new=not checkpoint)
        with contextlib.closing(engine):
            names = [name for of_rank in world.all_gather_object(engine.device_names) for name in of_rank]
            for sentence in engine.describe():
                console.note(sentence)
            yield TrainContext(
                request=request,
                recipe=recipe,
                run_dir=run_dir,
                world=world,
                log=log,
                pack=pack,
                splits=splits,
                engine=engine,
                stage=stage,
                checkpoint=checkpoint,
                parameters=sum(p.numel() for p in model.parameters()),
                trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
                devices=spec_of(names),
                device_count=len(names),
            )


def new_progress(context: TrainContext) -> Progress:
    """Return the progress of a new run; a fitted head is the best so far."""
    engine, stage = context.engine, context.stage
    if stage is None:
        return Progress()
    progress = Progress(head=stage.record)
    if context.recipe.epochs and context.recipe.keep == "best" and "valid" in stage.labels:
        weights = engine.snapshot(weights_only=True)
        stage.give(engine)
        progress.best = engine.snapshot(weights_only=True)
        engine.restore(weights)
    return progress


def begin_run_dir(context: TrainContext, *, overwrite: bool) -> None:
    """Write recipe and devices, after an old run is removed if that was requested, and open the logs."""
    world, console = context.world, context.log.console
    if world.is_main:
        folders.begin(context.run_dir, context.recipe, overwrite=overwrite)
    world.barrier()
    log_file = context.run_dir / run_files.LOGS / f"rank-{world.rank}.log"
    try:
        console.open_log(log_file, str(world.device))
    except OSError as error:
        raise InputError(f"{log_file}: cannot be written: {error.strerror}") from None
    if world.local_rank == 0:
        given = context.options.devices
        folders.write_devices(context.run_dir, context.devices if given == "auto" else given)


def place(context: TrainContext, *, only_train: bool = False) -> Mapping[str, DeviceDataset]:
    """Return the splits on the devices, ready for the first step."""
    datasets = context.stage.placed if context.stage else {}
    if not datasets:
        names = ["train"] if only_train else [*context.splits]
        datasets = {name: context.engine.place(context.splits[name]) for name in names}
    context.log.lap("place")
    datasets["train"].compile()
    context.log.lap("compile")
    return datasets


def run_epochs(context: TrainContext, progress: Progress, budget: Budget | None) -> TrainContext:
    """Run the loop and save its end; return the context with the recipe's final length."""
    recipe, log = context.recipe, context.log
    what = f"{recipe.model} ({context.parameters:,} parameters) on {len(context.splits['train']):,} images"
    log.console.note(f"training {what}, {counted(recipe.epochs, 'epoch')}, batch {recipe.batch_size}")
    monitor = Monitor(context, progress, budget)
    is_sound = True
    try:
        log.end(TrainingLoop(context.engine, context.world, recipe, context.datasets, progress, monitor).run())
    except (RankLost, DiskFull):
        raise  # the ranks can no longer communicate
    except TrainingFailed as error:
        log.end(f"failed: {error}", error)
        is_sound = isinstance(error, CallbackFailed)
    except Stopped as stopped:
        log.end(f"{stopped.how} in epoch {progress.epoch + 1}, step {progress.step}", stopped)
    log.console.finish()
    if is_sound:
        monitor.checkpoint()
    else:
        monitor.restore()
    if log.stopped:
        log.note(log.stopped)
    if isinstance(log.failure, Stopped):
        # A single fold may be trained on its own.
        whole = context.run_dir.parent
        is_part = recipe.data.fold and (whole / run_files.RECIPE).is_file()
        folder = shlex.quote(str(whole if is_part else context.run_dir))
        in_python = context.options.functions.in_training or context.request.module or not recipe.data.path
        command = "flatout.fit(..., resume=True) with the same arguments"
        log.console.note(f"continue with: {command if in_python else f'flatout train --resume --out {folder}'}")
    return monitor.context


def _train_and_return_callbacks(
    console: Console, world: World, request: TrainRequest
) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder and, from a child process, the attributes of the callbacks."""
    folder = train_on_rank(console, world, request)
    if launched() is None or not world.is_main:
        return folder, []
    attributes = [vars(one) for one in request.options.callbacks]
    try:
        cloudpickle.dumps(attributes)
    except Exception as error:  # users' objects may raise anything
        console.note(f"the attributes of the callbacks stay in the process of rank 0: {error}")
        return folder, []
    return folder, attributes


# --- Data and recipe ------------------------------------------------------------------------------------------------


def pack_of_host(request: TrainRequest, world: World, log: RunLog) -> Pack:
    """Return the pack: one process per host makes it, and the others map the same file."""
    data = request.data
    if isinstance(data, Pack):
        return data
    if isinstance(data, SharedPack):
        log.lap("launch")
        return data.open()
    log.lap("start")
    make = functools.partial(load, data, request.recipe, cache=request.options.cache, report=log.console)
    pack = load_once_per_host(world, make)
    log.console.finish()
    log.lap("pack")
    return pack


def split_pack(pack: Pack, recipe: Recipe, log: RunLog) -> dict[str, Split]:
    """Return the images of each split, and note how the data was split."""
    log.console.note(pack.describe())
    for sentence in pack.notes:
        log.note(sentence)
    if pack.skipped:
        log.note(f"{len(pack.skipped):,} unreadable images were left out")
    splits = splits_of(pack, recipe.data, recipe.seed)
    taken = [f"{name} {len(s):,}" for name, s in splits.items() if name not in pack.splits]
    train = f"train {len(splits['train']):,}"
    if fold := recipe.data.fold:
        log.note(f"fold {fold} of {recipe.data.folds}: {train}, held out {len(splits['valid']):,}")
    elif taken:
        how = "evenly over the range of the labels" if pack.task == "regression" else "by class"
        how += " and group" * (pack.groups is not None)
        log.note(f"taken from the training images, {how}: {', '.join(taken)}; {train}")
    if len(splits) == 1:
        log.note("no held-out data: accuracy will not be measured")
    return splits


def keep_choices(request: TrainRequest, continued: Recipe, world: World) -> Recipe:
    """Return the recipe of a request, with what the continued run has chosen: order, format, tuning, perhaps length."""
    keys = [key for key in ("data.order", "tune", "precision") if request.recipe.flat()[key] == "auto"]
    if continued.precision not in precisions(request.options.engine, world):
        keys = [key for key in keys if key != "precision"]
    if request.options.minutes is not None:  # such as after a restart
        keys += ["epochs", "max_steps", "schedule.corrections"]
    return request.recipe.override({key: continued.flat()[key] for key in keys})


def resolve_auto_values(recipe: Recipe, pack: Pack, splits: Mapping[str, Split], world: World, log: RunLog) -> Recipe:
    """Fill in the values that depend on the data: normalisation, bits, task, loss and order. All ranks call this."""
    found, train = dict[str, object](), splits["train"]
    if not recipe.data.bits:
        found["data.bits"] = pack.bits
    if not recipe.data.mean:
        found["data.mean"], found["data.std"] = measure(train)
    if pack.task == "regression" and not recipe.data.label_std:
        found["data.label_mean"], found["data.label_std"] = statistics(train.labels)
    if recipe.data.order == "auto":
        free = min(world.all_gather_object(available_memory()))
        exceeds_memory = train.is_on_disk and train.nbytes > free
        if exceeds_memory:
            needed, available = (f"{size / 2**30:.1f} GiB of" for size in (train.nbytes, free))
            log.note(f"data.order = blocks: {needed} training images are more than the {available} available memory")
        found["data.order"] = world.broadcast_object("blocks" if exceeds_memory else "full")
    recipe = with_task(recipe.override(found), pack.task, log.note)
    if recipe.optimizer.lr_base_batch not in (0, recipe.batch_size):
        steps = steps_per_epoch(len(splits["train"]), recipe.batch_size, recipe.drop_last)
        log.note(describe_scaling(recipe, recipe.length_at(0, steps)[0]))
    return recipe


def agree(world: World, recipe: Recipe, pack: Pack) -> None:
    """Check before the first step that all ranks have the same versions, recipe and data."""
    facts = {f"version {name}": version(name) for name in ("torch", "numpy", "safetensors")}
    facts |= {"version flatout": __version__, "version Python": platform.python_version()}
    free = {"log_every", "tune", "data.path", "data.placement", "data.images", "data.classes"}
    facts |= {f"recipe {key}": value for key, value in recipe.flat().items() if key not in free}
    if world.local_size < world.size:
        # The ranks of one host read the same file.
        facts |= {f"data {name}": value for name, value in folders.data_facts(pack).items()}
    everyone = world.all_gather_object((socket.gethostname(), facts))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name, value in other.items():
            if value != first[name]:
                raise InputError(
                    f"rank {rank} (host {host}) has {name} = {value!r}, but rank 0 (host {first_host}) has "
                    f"{first[name]!r}: start all hosts with the same versions, data, flags and recipe; a generated "
                    "recipe depends on the host: give all of them one recipe.toml"
                )


# --- Model and engine -----------------------------------------------------------------------------------------------


def fresh_model(request: TrainRequest, pack: Pack, report: Callable[[str], None] = lambda sentence: None) -> nn.Module:
    """Return the model of a request with fresh weights; a model object is copied."""
    code = {"module": request.module, "allow_code": request.options.allow_code}
    return build_model(request.recipe, len(pack.classes), **code, report=report)


def start_engine(
    model: nn.Module,
    request: TrainRequest,
    splits: Mapping[str, Split],
    pack: Pack,
    world: World,
    log: RunLog,
    *,
    is_new: bool,
) -> tuple[Engine, Recipe, HeadStage | None]:
    """Return the engine with initial weights, the recipe with its number format, and the fitted head if any."""
    recipe, options = request.recipe, request.options
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
        if recipe.epochs and options.minutes is not None and is_new and stage.share_right >= ENOUGH:
            right = f"cross-validated heads classify {stage.share_right:.2%} of the images correctly"
            log.note(f"fine-tuning is left out: {right}; more or different images would help more than time")
            recipe = recipe.without_fine_tuning()
        if not recipe.epochs:
            stage.give(engine or model)
        return stage, recipe

    stage: HeadStage | None = None
    # The engine's frozen layers compute features, too. A sharded model cannot be passed to another engine.
    shares_features = recipe.epochs > 0 and bool(recipe.freeze) and recipe.shard == "none"
    if recipe.linear_probe and not shares_features:
        stage, recipe = fit(recipe)

    formats, operations = precisions(options.engine, world), 0
    if not recipe.epochs:
        recipe = recipe.override({"precision": "fp32"})
    elif is_new and recipe.precision == "auto" and "bf16" in formats:
        if found := precision_of_gpu(formats, model, recipe):
            chosen, operations = found
            reason = f"{operations / 1e6:,.1f} million multiply-adds per image"
        else:
            silent = functools.partial(make, report=lambda sentence: None)
            chosen, reason = fastest_precision(
                lambda one: silent(copy.deepcopy(model), one), splits["train"], recipe, world, formats
            )
        log.note(f"precision = {chosen}: {reason}")
        recipe = recipe.override({"precision": chosen})
    if is_new and recipe.tune == "auto" and recipe.epochs and formats[:1] == ["tf32"]:
        operations = operations or multiply_adds(model, recipe.image_sides, recipe.channels)
        steps = recipe.total_steps(steps_per_epoch(len(splits["train"]), recipe.batch_size, recipe.drop_last))
        is_long = is_worth_tuning(operations, steps * recipe.batch_size, options.seconds)
        if is_long:
            log.note("tune = always: the run is long enough to gain more than tuning takes")
        recipe = recipe.override({"tune": "always" if is_long else "never"})
    engine = make(model, recipe, report=log.note)
    if recipe.linear_probe and shares_features:
        stage, recipe = fit(recipe, engine)
    log.lap("model", **(stage.seconds if stage else {}))
    return engine, recipe, stage
