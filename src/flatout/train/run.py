"""A training run as one script; it reads top-down.

`train` decides which processes take part and starts them. Each of them calls `train_on_rank`: data, recipe, model,
engine (`set_up`), then the fitted head or a checkpoint, the time budget, the loop, the evaluation and the files.
"""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flatout.data.pack import Pack, share
from flatout.distributed.environment import launched
from flatout.distributed.world import World
from flatout.engine import optim
from flatout.engine.base import DeviceDataset
from flatout.engine.devices import parse_devices, spec_of
from flatout.engine.factory import Processes, choose_processes, kept_devices, run_on_devices
from flatout.train import claim
from flatout.train.budget import Budget, plan_minutes
from flatout.train.callbacks import CallbackRunner
from flatout.train.checkpoint import continued_recipe, restore
from flatout.train.context import Ended, RunLog, TrainContext
from flatout.train.finish import finish
from flatout.train.folds import cross_validate
from flatout.train.loop import run_loop
from flatout.train.monitor import Monitor, signals_noted, write_metrics
from flatout.train.prepare import (
    agree,
    build_model,
    claimed_run_dir,
    load_pack,
    prepare_host,
    resolve_auto_values,
    split_pack,
    start_engine,
)
from flatout.train.probes import check_sanity
from flatout.train.progress import Progress
from flatout.train.request import TrainRequest, check
from flatout.utils import run_files
from flatout.utils.console import Console, counted
from flatout.utils.errors import CallbackFailed, DiskFull, InputError, RankLost, Stopped, TrainingFailed
from flatout.utils.files import write_atomically

T = TypeVar("T")


# --- Which processes take part --------------------------------------------------------------------------------------


def train(request: TrainRequest, console: Console) -> Path:
    """Train according to a recipe and write the run folder.

    One device is used in this process; several have a process each. A process that another launcher, such as torchrun,
    has started as a rank joins the other ranks.

    Returns:
        The run folder; if a launcher started several processes, the first one has written it.

    Raises:
        InputError: an argument or the data is wrong; the message names it and the fix.
        TrainingFailed: training cannot continue; the weights of the last good epoch are in the run folder.
        Stopped: the process was told to end; the run folder is usable and can be resumed.
    """
    recipe, options = request.recipe, request.options
    check(recipe, options)
    if options.hosts.most > 1 and options.out is None:
        # All hosts use the first host's name, also after a restart.
        folder = Path("runs") / f"{recipe.job}-{datetime.now():%Y%m%d-%H%M%S}"
        request = replace(request, options=replace(options, out=folder))
    if recipe.data.folds and not recipe.data.fold:
        return cross_validate(request, console, train_on_rank)
    run_dir, attributes = run_on_all_ranks(request, console, _train_and_return_callbacks, begins=True)
    for callback, found in zip(options.callbacks, attributes, strict=False):
        vars(callback).update(found)
    return run_dir


def run_on_all_ranks(
    request: TrainRequest,
    console: Console,
    function: Callable[[Console, World, TrainRequest], T],
    *,
    begins: bool = False,
) -> T:
    """Call function(console, world, request) on every rank of the request; return the first rank's result.

    The folder is claimed, the pack made and the number of processes chosen before the processes start.

    Args:
        function: importable by other processes.
        begins: whether this begins a run: its folder can be resumed from then on, even if the run is killed soon.

    Raises:
        InputError, TrainingFailed, Stopped: see `train`.
    """
    recipe, options = request.recipe, request.options
    optim.class_of(recipe.optimizer)
    call = partial(run_on_devices, function, engine=options.engine, console=console, hang_timeout=options.hang_timeout)
    if launched() is not None:
        return call((request,), spec=options.devices)
    if options.devices != "auto":
        _check_batch(recipe.batch_size, len(parse_devices(options.devices, options.engine).ranks.names))
    with contextlib.ExitStack() as stack:
        request, pack = stack.enter_context(prepare_host(request, console, begins=begins))
        chosen, notes = _choose_processes(request, pack)
        for sentence in notes:
            console.note(sentence)
        options = replace(options, devices=str(chosen.devices), notes=(*options.notes, *notes))
        if begins and request.run_dir and not options.overwrite:
            # A run that is killed before its first epoch is resumed on the same number of processes.
            (request.run_dir / run_files.LOGS).mkdir(exist_ok=True)
            write_atomically(request.run_dir / run_files.DEVICES, options.devices.encode())
        is_alone = len(chosen.devices.ranks.names) == options.hosts.most == 1 and not options.restarts
        data = pack if is_alone else stack.enter_context(share(pack))
        return call(
            (replace(request, options=options, data=data),),
            spec=options.devices,
            hosts=options.hosts,
            restarts=options.restarts,
            threads=chosen.threads,
        )


def _choose_processes(request: TrainRequest, pack: Pack) -> tuple[Processes, list[str]]:
    """Return the processes of this host, and sentences about the choice; a resumed run keeps its devices."""
    options, notes = request.options, list[str]()
    spec = options.devices
    if spec == "auto" and options.resume and options.out:
        with contextlib.suppress(OSError):
            before = (options.out / run_files.DEVICES).read_text(errors="replace")
            spec, sentence = kept_devices(before, options.engine)
            notes.append(sentence)
    start, stop = pack.splits["train"]
    chosen = choose_processes(
        spec, request.recipe, stop - start, lambda: build_model(request, pack), options.engine, seconds=options.seconds
    )
    return chosen, [*notes, chosen.reason] if chosen.reason else notes


def _check_batch(batch: int, ranks: int) -> None:
    if batch < ranks:
        raise InputError(
            f"batch_size = {batch} is less than one sample for each of the {ranks} ranks: "
            "use a larger batch or fewer devices"
        )


# --- What each of them does ------------------------------------------------------------------------------------------


def train_on_rank(console: Console, world: World, request: TrainRequest) -> Path:
    """Train on one rank, and return the run folder. All ranks call this.

    Raises:
        InputError, TrainingFailed, Stopped: see `train`.
    """
    with set_up(console, world, request) as context:
        # Continue from a checkpoint, or begin with the fitted head
        checkpoint = restore(context)
        progress = checkpoint.progress if checkpoint else new_progress(context)
        begin_run_dir(context, overwrite=request.options.overwrite and checkpoint is None)
        write_metrics(context, progress)
        # Place images on the devices, compile steps, fit their number to the time
        if context.recipe.epochs:
            context = replace(context, datasets=place(context))
        context, budget = plan_minutes(context, progress)
        # Train, evaluate, write the run
        ended = Ended()
        with signals_noted(world.control):
            check_sanity(context, progress)
            callbacks = CallbackRunner(context, progress)
            if context.datasets:
                context, ended = run_epochs(context, progress, budget, callbacks)
            ended = finish(context, progress, ended)
            failure = callbacks.end(ended.failure)
        # Ranks that have left are not ended when another one fails.
        world.barrier()
        world.leave()
    if failure:
        raise failure
    return context.run_dir


@contextlib.contextmanager
def set_up(console: Console, world: World, request: TrainRequest) -> Iterator[TrainContext]:
    """Provide data, model and engine on one rank, while the run folder is locked. All ranks call this.

    Raises:
        InputError: see `train`.
    """
    log = RunLog(console, request)
    with claimed_run_dir(request, world) as run_dir:
        # Data and recipe
        pack = load_pack(request, world, log)
        splits = split_pack(pack, request.recipe, log)
        continued = continued_recipe(request, run_dir, world)
        recipe = resolve_auto_values(request.recipe, pack, splits, world, continued, log)
        _check_batch(min(recipe.batch_size, len(splits["train"])), world.size)
        agree(world, recipe, pack)
        log.lap("read")
        # Model and engine
        model = build_model(replace(request, recipe=recipe), pack, log.note)
        engine, recipe, stage = start_engine(model, recipe, splits, pack, world, request.options, continued, log)
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
    if stage.training_only is not None and context.recipe.keep == "best" and "valid" in stage.labels:
        weights = engine.snapshot(weights_only=True)
        stage.give(engine)
        progress.best = engine.snapshot(weights_only=True)
        engine.restore(weights)
    return progress


def begin_run_dir(context: TrainContext, *, overwrite: bool) -> None:
    """Write recipe and devices, after an old run is removed if that was requested, and open the logs."""
    world, console = context.world, context.log.console
    if world.is_main:
        claim.begin(context.run_dir, context.recipe, overwrite=overwrite)
    world.barrier()
    log_file = context.run_dir / run_files.LOGS / f"rank-{world.rank}.log"
    try:
        console.device = console.device or str(world.device)
        console.open_log(log_file)
    except OSError as error:
        raise InputError(f"{log_file}: cannot be written: {error.strerror}") from None
    if world.local_rank == 0:
        given = context.options.devices
        devices = context.devices if given == "auto" else given
        write_atomically(context.run_dir / run_files.DEVICES, devices.encode())


def place(context: TrainContext, *, only_train: bool = False) -> Mapping[str, DeviceDataset]:
    """Return the splits on the devices, with compiled steps."""
    datasets = context.stage.placed if context.stage else {}
    if not datasets:
        names = ["train"] if only_train else [*context.splits]
        datasets = {name: context.engine.place(context.splits[name]) for name in names}
    context.log.lap("place")
    datasets["train"].compile()
    context.log.lap("compile")
    return datasets


def run_epochs(
    context: TrainContext, progress: Progress, budget: Budget | None, callbacks: CallbackRunner
) -> tuple[TrainContext, Ended]:
    """Run the loop and save its end; return how it ended, and the context with the recipe's final length."""
    recipe, log = context.recipe, context.log
    images = len(context.splits["train"])
    log.console.note(
        f"training {recipe.model} ({context.parameters:,} parameters) on {images:,} images, "
        f"{counted(recipe.epochs, 'epoch')}, batch {recipe.batch_size}"
    )
    log.end_setup()
    monitor = Monitor(context, progress, budget, callbacks)
    reason, failure = "", None
    try:
        reason = run_loop(context.engine, context.world, recipe, context.datasets, progress, monitor)
    except (RankLost, DiskFull):
        raise  # the ranks can no longer communicate
    except CallbackFailed as error:
        # The training itself is sound: it can be resumed from here.
        reason, failure = f"failed: {error}", error
    except TrainingFailed as error:
        monitor.restore()
        reason, failure = f"failed: {error}", error
    except Stopped as stopped:
        reason, failure = f"{stopped.how} in epoch {progress.epoch + 1}, step {progress.step}", stopped
    log.console.finish()
    if isinstance(failure, CallbackFailed) or not isinstance(failure, TrainingFailed):
        monitor.checkpoint()
    if reason:
        log.note(reason)
    if isinstance(failure, Stopped):
        folder = context.run_dir.parent if recipe.data.fold else context.run_dir
        log.console.note(f"continue with: flatout train --resume --out {shlex.quote(str(folder))}")
    return monitor.context, Ended(reason=reason, failure=failure)


def _train_and_return_callbacks(
    console: Console, world: World, request: TrainRequest
) -> tuple[Path, list[dict[str, Any]]]:
    """Train on one rank; return the folder and, from child processes, the attributes of the callbacks."""
    folder, callbacks = train_on_rank(console, world, request), request.options.callbacks
    if launched() is None or not world.is_main or not callbacks:
        return folder, []
    import cloudpickle

    attributes = [vars(callback) for callback in callbacks]
    try:
        cloudpickle.dumps(attributes)
    except Exception as error:  # users' objects may raise anything
        console.note(f"the attributes of the callbacks stay in the process of rank 0: {error}")
        return folder, []
    return folder, attributes
