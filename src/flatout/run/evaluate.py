"""Evaluate a finished run, on its own test data or on other data."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.console import Console
from flatout.data.feed import Samples
from flatout.errors import InputError

if TYPE_CHECKING:
    from flatout.data.pack import Pack
    from flatout.dist.world import World
    from flatout.run.folder import Run


def evaluate(
    run: "Run", data: Any, *, devices: str, engine: str, console: Console, tta: bool = False
) -> dict[str, Any]:
    """See `Run.evaluate`. Several devices have a process each, as in training."""
    from flatout.dist.env import launched
    from flatout.engine.devices import engine_for, parse_devices
    from flatout.run.launch import run_on_devices

    engine = engine_for(devices, engine)
    if devices == "auto" and launched() is None:
        # Starting a process for each device would take longer than they would save.
        devices = parse_devices("auto", engine).names[0]
    return run_on_devices(
        _evaluate, (run, data, devices, engine, tta or run.recipe.tta), spec=devices, engine=engine, console=console
    )


def _evaluate(
    console: Console, world: "World", run: "Run", data: Any, devices: str, engine: str, tta: bool
) -> dict[str, Any]:
    from flatout.data.load import find, load, match_classes, splits_of
    from flatout.data.shared_pack import load_once_per_host
    from flatout.engine.devices import spec_of
    from flatout.engine.factory import make_engine, precisions
    from flatout.models.load import copied

    recipe = run.recipe
    other = data is not None
    if not other and not recipe.data.path:
        raise InputError(f"{run.path}: its data was given in Python; say what to evaluate on")
    options = replace(recipe.data, images="") if other else recipe.data

    def load_alone() -> "Pack":
        found = find(data if other else recipe.data.path, options, recipe.task, console=console)
        return load(found, recipe, cache=True, report=console)

    with world.heartbeat.alone("making the pack"):
        pack = load_once_per_host(world, load_alone)
    console.finish()
    console.note(pack.describe())
    labels = match_classes(pack, run.classes, where=data if other else recipe.data.path)
    if other and len(pack.splits) == 1:
        split, samples = "all", Samples(images=pack.images, rows=np.arange(len(labels)), labels=labels)
    else:
        splits = splits_of(pack, recipe.data, recipe.seed)
        split = next((name for name in ("test", "valid") if name in splits), "train")
        rows = splits[split].rows
        samples = Samples(images=pack.images, rows=rows, labels=labels[rows])
    # The engine trains nothing here, so what is frozen does not matter, and nothing is worth caching.
    # It works on a copy, since it moves the model to a device and changes its mode.
    model = copied(run.model)
    formats = precisions(engine, world)
    if formats and recipe.precision not in formats:
        # Trained on other hardware.
        recipe = recipe.override({"precision": "auto"})
    recipe = recipe.override({"tta": tta})
    built = make_engine(
        model, recipe, engine=engine, devices=devices, world=world, report=console.note, cache_prefix=False
    )
    try:
        result = built.place(samples).evaluate(tta=tta)
    finally:
        built.close()
    name, task = "valid" if split == "valid" else "test", run.task
    figures = {"loss": result.loss, **task.metrics(result.predicted, labels := result.labels), "count": len(labels)}
    named = {f"{name}_{key}": value for key, value in figures.items()}
    named["per_class"] = task.per_class(task.decided(result.predicted), labels, run.classes)
    devices = spec_of([name for names in world.all_gather_object(built.device_names) for name in names])
    about = {"run": str(run.path), "task": recipe.task, "split": split}
    return {**about, **named, "tta": tta, "devices": devices, "engine": engine}
