"""The public call `fit`: from data, a model and a recipe to a run folder."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import Console
from flatout.errors import InputError
from flatout.recipe import Recipe
from flatout.run import Run
from flatout.session import Options, Session
from flatout.train import Stopped
from flatout.watch import signals_stop

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.source import Found, Source


def fit(
    model: "nn.Module | str | None" = None,
    data: Any = None,
    *,
    job: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    devices: str = "auto",
    engine: str = "torch",
    resume: bool = False,
    overwrite: bool = False,
    cache: bool = True,
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Train a classifier and return the run.

    Args:
        model: a torch module (trained as a copy; yours stays as it is), one of our names, `timm:NAME`, or
            `package.module:factory`. None takes the job's, or one that suits the data.
        data: a path; a pair of arrays (images, labels) or a dict or tuple of such pairs for train, valid and test;
            torch map-style data sets in the same way. None takes the job's.
        job: a built-in job, a recipe file or a Recipe to start from; without it, a recipe is made from what is found.
        out: the run folder; by default a new one under `runs/`.
        devices: a device SPEC such as `auto`, `cpu`, `cuda:1`.
        engine: `torch`.
        resume: continue the run in `out`; overwrite: replace it; cache: keep the decoded images for the next run.
        quiet: print nothing.
        **changes: recipe fields, such as `epochs=5`, `batch_size=256`, `optimizer=flatout.SGD(lr=0.01)`,
            `augment=flatout.Augment(flip=True)`.

    Raises:
        InputError: something given is wrong; the message names it and the mend.
        TrainingFailed: training could not go on; the weights of the last good epoch are in the run folder.
    """
    import sys

    from flatout.engine.choose import is_accelerated
    from flatout.resolve import resolve

    console = Console(None if quiet else sys.stdout)
    module = None if model is None or isinstance(model, str) else model
    if isinstance(model, str):
        changes["model"] = model
    elif module is not None:
        from torch import nn

        if not isinstance(module, nn.Module):
            raise InputError(f"model: must be a torch module or a name, not {module!r}")
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
        recipe, found = resolve(job, data, flat, accelerated=is_accelerated(devices), console=console)
        return train_recipe(recipe, found, options, console, module=module)
    except Stopped as stopped:
        raise KeyboardInterrupt from stopped
    finally:
        console.close()


def train_recipe(
    recipe: Recipe, data: "Found | Source", options: Options, console: Console, *, module: "nn.Module | None" = None
) -> Run:
    """Train as a recipe says and write the run folder.

    Args:
        recipe: complete but for what is measured on the data.
        data: as `data.prepare.find` returns it.
        options: how to run.
        console: where to say what happens.
        module: the model, where it was given in Python.

    Raises:
        InputError, TrainingFailed: as `fit`.
        Stopped: the process was told to end; the run folder is usable and can be resumed.
    """
    session = Session(recipe, options, console, module)
    session.claim_folder()
    pack, splits = session.read(data)
    engine = session.make_engine(pack, splits)
    try:
        with signals_stop(session):
            return session.train(engine, pack, splits)
    finally:
        engine.close()
