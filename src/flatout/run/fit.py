"""The public call `fit`: from data, a model and a recipe to a run folder."""

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import Console
from flatout.errors import InputError, Stopped
from flatout.recipe import Recipe
from flatout.run.folder import Run
from flatout.run.monitor import signals_stop
from flatout.run.session import Options, Session

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.pack import Pack
    from flatout.data.shared_pack import Handover
    from flatout.data.source import Found, Source


def fit(
    model: "nn.Module | str | None" = None,
    data: Any = None,
    *,
    job: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    devices: str = "auto",
    engine: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    cache: bool = True,
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Train a classifier and return the run.

    Args:
        model: a torch module or a Keras 3 model (trained as a copy; yours stays as it is), one of our names,
            `timm:NAME`, or `package.module:factory`. None takes the job's, or one that suits the data. The run's model
            then is a torch module; for a Keras model it is a `KerasModule`, whose `to_keras()` returns Keras's own.
        data: a path; a pair of arrays (images, labels) or a dict or tuple of such pairs for train, valid and test;
            torch map-style data sets in the same way. None takes the job's.
        job: a built-in job, a recipe file or a Recipe to start from; without it, a recipe is made from what is found.
        out: the run folder; by default a new one under `runs/`.
        devices: a device SPEC such as `auto`, `cpu`, `2xcpu`, `cuda:0,2`, `8xtpu`. Several devices work from a notebook
            cell, a REPL and a script without a main guard too.
        engine: `torch`, `xla`, or `auto`: XLA for TPUs and Keras models, and torch for everything else.
        resume: continue the run in `out`; overwrite: replace it; cache: keep the decoded images for the next run.
        quiet: print nothing.
        **changes: recipe fields, such as `epochs=5`, `batch_size=256`, `optimizer=flatout.SGD(lr=0.01)`,
            `augment=flatout.Augment(flip=True)`.

    Raises:
        InputError: something given is wrong; the message names it and the mend.
        TrainingFailed: training could not go on; the weights of the last good epoch are in the run folder.
    """
    import sys

    from flatout.dist.env import launched
    from flatout.engine.devices import engine_for, parse_devices
    from flatout.models.keras import KerasModule
    from flatout.run.resolve import resolve

    process = launched()
    rank = process.rank if process else 0
    console = Console(None if quiet or rank else sys.stdout, rank=rank)
    module = None if model is None or isinstance(model, str) else _copy(model)
    if isinstance(module, KerasModule):
        engine = "xla" if engine == "auto" else engine
        if module.num_outputs == 1:
            changes.setdefault("loss", "binary-cross-entropy")
        if module.left_out:
            console.note(f"the loss takes logits, so the model's last activation, {module.left_out}, is left out")
    engine = engine_for(devices, engine)
    if isinstance(model, str):
        changes["model"] = model
    elif module is not None:
        changes["model"] = f"python:{type(module).__qualname__}"
    flat = {}
    for key, value in changes.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            flat |= {f"{key}.{inner}": v for inner, v in dataclasses.asdict(value).items()}
        else:
            flat[key] = value
    options = Options(
        out=Path(out) if out else None,
        devices=devices,
        engine=engine,
        resume=resume,
        overwrite=overwrite,
        cache=cache,
        allow_code=isinstance(model, str),
    )
    try:
        recipe, found = resolve(
            job, data, flat, accelerated=parse_devices(devices, engine).is_accelerated, console=console
        )
        folder = train_recipe(recipe, found, options, console, module=module)
    except Stopped:
        raise KeyboardInterrupt from None
    finally:
        console.close()
    return Run(folder, model=module, allow_code=options.allow_code)


def _copy(model: "nn.Module") -> "nn.Module":
    """Return a copy on the CPU, which training and the finished run may change; of a Keras model a `KerasModule`."""
    from torch import nn

    from flatout.models.keras import KerasModule, is_keras

    if is_keras(model):
        return KerasModule(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: must be a torch module, a Keras 3 model or a name, not {model!r}")
    try:
        return copy.deepcopy(model).to("cpu")
    except Exception as error:  # what a user's module holds may raise anything
        raise InputError(
            f"model: {type(model).__qualname__} cannot be copied ({type(error).__name__}: {error}); "
            "keep locks, open files, generators and results of earlier computations out of it"
        ) from error


def train_recipe(
    recipe: Recipe, data: "Found | Source", options: Options, console: Console, *, module: "nn.Module | None" = None
) -> Path:
    """Train as a recipe says and write the run folder.

    One device is this process's; for several, a process is started for each. Where a launcher such as torchrun has
    started this process as one of several, it takes its place among them.

    Args:
        recipe: complete but for what is measured on the data.
        data: as `data.prepare.find` returns it.
        options: how to run.
        console: where to say what happens.
        module: the model, where it was given in Python.

    Returns:
        The run folder; where a launcher started several processes, the first one has written it.

    Raises:
        InputError, TrainingFailed: as `fit`.
        Stopped: the process was told to end; the run folder is usable and can be resumed.
    """
    from flatout.dist.env import launched
    from flatout.engine.factory import join

    if launched() is None:
        return _train_from_here(recipe, data, options, console, module)
    world = join(options.devices, options.engine)
    try:
        session = Session(recipe, options, console, module, world)
        session.claim_folder()
        out = _train(session, session.load_pack(data))
    finally:
        world.leave()
    return out


def _train_from_here(
    recipe: Recipe, data: "Found | Source", options: Options, console: Console, module: "nn.Module | None"
) -> Path:
    """Make the pack, then train in this process, or in one for each device."""
    from flatout.data.shared_pack import handed_over
    from flatout.dist.launcher import run_on_ranks
    from flatout.engine.devices import parse_devices
    from flatout.engine.factory import choose_processes, join

    parse_devices(options.devices, options.engine)
    session = Session(recipe, options, console, module)
    session.claim_folder()
    pack = session.load_pack(data)
    start, stop = pack.splits["train"]
    chosen = choose_processes(options.devices, recipe, stop - start, lambda: session.build_model(pack), options.engine)
    if chosen.reason:
        session.note(chosen.reason)
    options = dataclasses.replace(options, devices=str(chosen.devices))
    if len(chosen.devices.ranks.names) == 1 and options.hosts.nodes == 1:
        session.world = join(options.devices, options.engine)
        return _train(session, pack)
    if options.hosts.node_rank == 0:
        options = dataclasses.replace(options, out=session.out)
    before = {"notes": session.notes, "seconds": session.seconds}
    with handed_over(pack) as handover:
        return run_on_ranks(
            _train_on_rank,
            (recipe, handover, options, module, before),
            devices=chosen.devices.ranks,
            hosts=options.hosts,
            threads=chosen.threads,
            console=console,
        )


def _train_on_rank(
    console: Console,
    recipe: Recipe,
    handover: "Handover",
    options: Options,
    module: "nn.Module | None",
    before: dict[str, Any],
) -> Path:
    """Train in a process that `run_on_ranks` started; `before` is what its starter has noted so far."""
    from flatout.engine.factory import join

    world = join(options.devices, options.engine)
    try:
        session = Session(recipe, options, console, module, world)
        session.continue_from(**before)
        session.claim_folder()
        return _train(session, handover.open())
    finally:
        world.leave()


def _train(session: Session, pack: "Pack") -> Path:
    splits = session.read(pack)
    engine = session.make_engine(pack, splits)
    try:
        with signals_stop(session):
            return session.train(engine, pack, splits)
    finally:
        engine.close()
