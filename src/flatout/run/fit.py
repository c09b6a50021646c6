"""The public call `fit`: from data, a model and a recipe to a run folder."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flatout.console import Console
from flatout.errors import InputError, Stopped
from flatout.inference.run import Ensemble, Run, load
from flatout.recipe import Recipe
from flatout.run.options import Options
from flatout.run.session import Session
from flatout.settings import in_python, python_words

if TYPE_CHECKING:
    from torch import nn

    from flatout.callbacks.base import Callback
    from flatout.data.source import DataRef, Source
    from flatout.dist.world import World

T = TypeVar("T")


@in_python
def fit(
    model: "nn.Module | str | Any" = None,
    data: Any = None,
    labels: Any = None,
    *,
    validation_data: Any = None,
    job: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    devices: str = "auto",
    engine: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    cache: bool = True,
    restarts: int | None = None,
    minutes: float | None = None,
    callbacks: "Callback | str | Sequence[Callback | str]" = (),
    metrics: Any = (),
    transform: Any = (),
    batch_transforms: Any = (),
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Train a classifier and return the run.

    A module or Keras model given is trained: afterwards it has the weights of the run, and a module is in evaluation
    mode on the CPU. This holds for several devices too. After an error or an interruption it is as it was before;
    `flatout.load(out, model=model).model` then loads what was trained. With `folds=K` (cross-validation) copies are
    trained, the model given stays as it was, and the run is an `Ensemble`.

    Args:
        model: a torch module, a Keras 3 model, one of our names, `timm:NAME`, `package.module:factory` or
            `file.py:factory`; None for the job's model, or one that suits the data.
        data: a path; images as an array, with `labels`; a pair (images, labels), or a dict or tuple of such pairs for
            train, valid and test; torch data sets and DataLoaders in the same way. None for the job's data.
        labels: the labels of `data`, if that is an array of images.
        validation_data: a pair or a data set for validation.
        job: a built-in job, a recipe file or a Recipe to start from; by default a recipe is made for the data.
        out: the run folder; by default a new one under `runs/`.
        devices: a device SPEC such as `auto`, `cpu`, `2xcpu`, `cuda:0,2`, `8xtpu`. Several devices also work in
            notebooks, in a REPL, and in scripts without `if __name__ == "__main__"`.
        engine: `torch`, `xla`, or `auto`: XLA for TPUs and Keras models, torch otherwise.
        resume: continue the run in `out`.
        overwrite: replace the run in `out`.
        cache: keep the decoded images for the next run.
        restarts: how often the ranks of several devices restart from the newest checkpoint after one was lost.
        minutes: train as many steps as fit into this time, from this call to the report.
        callbacks: `flatout.Callback` objects, and names of experiment trackers: `tensorboard`, `wandb`, `trackio`,
            `mlflow`.
        metrics: functions of labels and answers, such as `sklearn.metrics.cohen_kappa_score`, in a list or a dict by
            name. They are computed on the validation and test images, and named as in `valid_cohen_kappa_score`.
        transform: a function of one training image, float32 [C, H, W] in 0..1, augmented, on the device; or several.
            Each is called anew in every epoch and returns a changed image; validation and test images stay as they
            are. Only the torch engine has them.
        batch_transforms: functions of training images, float32 [B, C, H, W], augmented and normalised, on the device;
            each returns changed images. Only the torch engine has them.
        quiet: print nothing.
        **changes: recipe keys, such as `epochs=5`, `batch_size=256`, `lr=0.01`, `optimizer="adam"` or
            `optimizer=flatout.SGD(lr=0.01)`, `augment=flatout.Augment(flip=True)` or `augment={"flip": True}`. Objects
            of torch stand for keys: `optimizer=torch.optim.RAdam`, `loss=nn.CrossEntropyLoss(label_smoothing=0.1)`.
            `loss` may also be a function of logits and targets that returns a loss for each image, [B], on the torch
            engine.

    Raises:
        InputError: an argument or the data is wrong; the message names it and the fix.
        TrainingFailed: training cannot continue; the weights of the last good epoch are in the run folder.
    """
    began = time.perf_counter()
    import sys

    from flatout.callbacks.trackers import callbacks_of
    from flatout.dist.env import launched
    from flatout.engine.devices import engine_for, parse_devices
    from flatout.engine.factory import speeds_on
    from flatout.models.keras import KerasModule, is_keras
    from flatout.models.load import copied
    from flatout.run import claim
    from flatout.run.arguments import check_names, is_own_loss, join_data, loader_batch_size, recipe_changes
    from flatout.run.own import own_functions
    from flatout.run.resolve import resolve

    check_names(changes, fit)
    process = launched()
    rank = process.rank if process else 0
    console = Console(None if quiet or rank else sys.stdout, rank=rank)
    own_loss = changes.pop("loss") if is_own_loss(changes.get("loss")) else None
    own, flat = own_functions(own_loss, transform, batch_transforms, metrics), recipe_changes(changes)
    if (loaded := loader_batch_size(data)) is not None:
        flat.setdefault("batch_size", loaded)
    data = join_data(data, labels, validation_data)
    module = None
    if isinstance(model, str):
        flat["model"] = model
    elif model is not None:
        module = KerasModule(model) if is_keras(model) else copied(model)
        flat["model"] = f"python:{type(module).__qualname__}"
    if isinstance(module, KerasModule):
        engine = "xla" if engine == "auto" else engine
        flat = {**module.conventions(console.note), **flat}
    engine = engine_for(devices, engine)
    options = Options(
        out=Path(out) if out else None,
        devices=devices,
        engine=engine,
        resume=resume,
        overwrite=overwrite,
        cache=cache,
        restarts=restarts,
        minutes=minutes,
        began=began,
        allow_code=isinstance(model, str),
        callbacks=callbacks_of(callbacks),
        own=own,
    )
    reasons: list[str] = []
    try:
        claim.check(options)
        recipe, found = resolve(
            job,
            data,
            flat,
            accelerated=parse_devices(devices, engine).is_accelerated,
            console=console,
            seconds=options.seconds,
            began=began,
            speeds=speeds_on(devices, engine),
            words=python_words,
            explain=reasons.append,
        )
        own.check(recipe, engine)
        options = dataclasses.replace(options, notes=(*reasons, *own.notes()))
        folder = train_recipe(recipe, found, options, console, module=module)
    except Stopped:
        raise KeyboardInterrupt from None
    finally:
        console.close()
    run = load(folder, model=None if isinstance(model, str) else model, allow_code=options.allow_code)
    if module is not None and not isinstance(run, Ensemble):
        _ = run.model  # loads the weights into the model given
    return run


def train_recipe(
    recipe: Recipe, data: "DataRef | Source", options: Options, console: Console, *, module: "nn.Module | None" = None
) -> Path:
    """Train as a recipe says and write the run folder.

    One device is used in this process; several get a process each. A process that another launcher, such as torchrun,
    has started as a rank joins the other ranks.

    Args:
        recipe: complete but for what is measured on the data.
        data: as `data.prepare.find` returns it.
        module: the model, where it was given in Python.

    Returns:
        The run folder; where a launcher started several processes, the first one has written it.

    Raises:
        InputError, TrainingFailed: as `fit`.
        Stopped: the process was told to end; the run folder is usable and can be resumed.
    """
    if options.hosts.most > 1 and options.out is None:
        # The first host's name is used by all, and again after a restart.
        options = dataclasses.replace(options, out=Path("runs") / f"{recipe.job}-{datetime.now():%Y%m%d-%H%M%S}")
    if recipe.data.folds and not recipe.data.fold:
        from flatout.run.folds import cross_validate

        return cross_validate(recipe, data, options, console, module)
    folder, attributes = run_session(Session(recipe, data, options, module), console, _run)
    for callback, found in zip(options.callbacks, attributes, strict=False):
        vars(callback).update(found)
    return folder


def run_session(session: Session, console: Console, function: "Callable[[Console, World, Session], T]") -> T:
    """Call function(console, world, session) on every rank of the session's devices; return what the first one returns.

    The folder is claimed and the pack made before the processes start. `function` must be importable by them.

    Raises:
        InputError, TrainingFailed, Stopped: as `train_recipe`.
    """
    from flatout.dist.env import launched
    from flatout.engine.devices import parse_devices
    from flatout.engine.factory import choose_processes, kept_devices
    from flatout.run.launch import check_batch, run_on_devices

    recipe, options, engine = session.recipe, session.options, session.options.engine
    if options.minutes is not None and recipe.augment.start_size:
        given = f"--minutes {options.minutes:g}"
        raise InputError(f"{given}: cannot plan steps on images that grow; set augment.start_size = 0")
    if recipe.optimizer.is_of_library:
        from flatout.numerics import optim

        # Its name and keys are checked before the data is read.
        optim.of_library(recipe.optimizer)
    if launched() is not None:
        return run_on_devices(function, (session,), spec=options.devices, engine=engine, console=console)
    devices = parse_devices(options.devices, engine)
    if options.devices != "auto":
        # Before the data is read and the ranks start.
        check_batch(recipe.batch_size, len(devices.ranks.names))
    begins = function is _run
    with session.prepared(console, begins=begins) as pack:
        start, stop = pack.splits["train"]
        spec = options.devices
        if spec == "auto" and (before := session.devices_before()):
            spec, sentence = kept_devices(before, engine)
            session.note(sentence)
        chosen = choose_processes(
            spec,
            recipe,
            stop - start,
            lambda: session.build_model(pack),
            engine,
            has_budget=options.minutes is not None,
        )
        if chosen.reason:
            session.note(chosen.reason)
        session.options = dataclasses.replace(options, devices=str(chosen.devices))
        if begins and options.hosts.most == 1 and not options.overwrite:
            session.keep_devices()
        return run_on_devices(
            function,
            (session,),
            spec=session.options.devices,
            engine=engine,
            console=console,
            hosts=options.hosts,
            restarts=options.restarts,
            threads=chosen.threads,
        )


def _run(console: Console, world: "World", session: Session) -> "tuple[Path, list[dict[str, Any]]]":
    """Train on one of the ranks; return the folder and, from the process of a device, attributes of the callbacks."""
    from flatout.dist.env import launched

    folder, attributes = session.run(console, world), []
    if launched() is not None and world.is_main and session.options.callbacks:
        import cloudpickle

        attributes = [vars(callback) for callback in session.options.callbacks]
        try:
            cloudpickle.dumps(attributes)
        except Exception as error:  # users' objects may raise anything
            console.note(f"the attributes of the callbacks stay in the process of rank 0: {error}")
            attributes = []
    return folder, attributes
