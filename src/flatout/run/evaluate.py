"""Evaluate a finished run, on its own test data or on other data."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.console import Console
from flatout.data.batches import Samples
from flatout.errors import InputError

if TYPE_CHECKING:
    from flatout.data.pack import Pack
    from flatout.distributed.world import World
    from flatout.engine.base import Evaluation
    from flatout.run.folder import Run


def evaluate(
    run: "Run", data: Any, *, devices: str, engine: str, console: Console, tta: bool = False
) -> dict[str, Any]:
    """See `Run.evaluate`. Several devices have a process each, as in training."""
    from flatout.distributed.environment import launched
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
    from flatout.data.pack import load_once_per_host
    from flatout.engine.devices import spec_of
    from flatout.engine.factory import make_engine, precisions
    from flatout.models.build import copied
    from flatout.run.trust import keep_of, scores_of

    other = data is not None
    pack, labels = labelled(run, data, console, lambda load: load_once_per_host(world, load))
    if run.trust and run.trust.remark:
        console.note(run.trust.remark)
    results: list[Evaluation] = []
    keep = keep_of(run.trust.novelty.known) if run.trust and run.trust.novelty else None
    split, formats = "all", precisions(engine, world)
    names: list[str] = []
    for member in run.members:
        recipe = member.recipe
        split, samples = held_out(member, pack, labels, other=other)
        # The engine trains nothing here, so what is frozen does not matter, and nothing is worth caching.
        # It works on a copy, since it moves the model to a device and changes its mode.
        model = copied(member.model)
        if formats and recipe.precision not in formats:
            # Trained on other hardware.
            recipe = recipe.override({"precision": "auto"})
        recipe = recipe.override({"tta": tta})
        built = make_engine(
            model, recipe, engine=engine, devices=devices, world=world, report=console.note, cache_prefix=False
        )
        with contextlib.closing(built):
            placed = built.place(samples)
            is_trusted = run.trust is not None
            results.append(
                placed.evaluate(tta=tta, with_probabilities=True, with_logits=is_trusted, keep_features=keep)
            )
            names = built.device_names
    name, task = "valid" if split == "valid" else "test", run.task
    loss, result = _joined([one.of_task(task) for one in results], own_parts=not other and split == "valid")
    figures = {"loss": loss, **result.metrics, "count": len(result.labels)}
    named = {f"{name}_{key}": value for key, value in figures.items()}
    named |= scores_of(name, result, run.classes, run.trust)
    devices = spec_of([name for names in world.all_gather_object(names) for name in names])
    about = {"run": str(run.path), "task": run.recipe.task, "split": split}
    return {**about, **named, "tta": tta, "devices": devices, "engine": engine}


def labelled(
    run: "Run", data: Any, console: Console, once: "Callable[[Callable[[], Pack]], Pack]" = lambda load: load()
) -> "tuple[Pack, np.ndarray]":
    """Return the pack of a run, or of other data as the run's model takes it, and the labels as the run numbers them.

    Args:
        run: its recipe decides the form of the images.
        data: as for `Run.evaluate`.
        once: calls the function that loads the pack, on one of several ranks.

    Raises:
        InputError: there is no data, it cannot be read, or has other classes.
    """
    from flatout.data.build import find, load

    recipe, other = run.recipe, data is not None
    if not other and not recipe.data.path:
        raise InputError(f"{run.path}: its data was given in Python; name other data with --data PATH")
    options = replace(recipe.data, images="", group_column="") if other else recipe.data

    def load_alone() -> "Pack":
        found = find(data if other else recipe.data.path, options, recipe.task, console=console)
        return load(found, replace(recipe, data=options), cache=True, report=console)

    pack = once(load_alone)
    console.finish()
    console.note(pack.describe())
    return pack, pack.labels_among(run.classes, where=data if other else recipe.data.path)


def held_out(run: "Run", pack: "Pack", labels: np.ndarray, *, other: bool) -> tuple[str, Samples]:
    """Return the name and the samples of the split that a run is judged by: test, else validation; else "all".

    `labels` and `other` are those of `labelled`: data that is not the run's own has only the splits that it brings.
    """
    from flatout.data.splits import splits_of

    split, rows = "all", np.arange(len(labels))
    if not other or len(pack.splits) > 1:
        data = replace(run.recipe.data, fold=0, folds=0) if other else run.recipe.data
        splits = splits_of(pack, data, run.recipe.seed)
        split = next((name for name in ("test", "valid") if name in splits), "train")
        rows = splits[split].rows
    return split, Samples(images=pack.images, rows=rows, labels=labels[rows])


def _joined(results: "list[Evaluation]", *, own_parts: bool) -> "tuple[float | None, Evaluation]":
    """Return the loss and the results of a run, or of a cross-validation.

    Args:
        results: of the run, or of each fold, with probabilities.
        own_parts: whether each fold was evaluated on the images that it has not been trained on. Else all were on the
            same images, and the mean of their probabilities is judged, which has no loss.
    """
    first = results[0]
    if len(results) == 1:
        return first.loss, first
    if own_parts:
        names = ("labels", "predicted", "probabilities")
        parts: dict[str, Any] = {name: np.concatenate([getattr(r, name) for r in results]) for name in names}
        joined = replace(first, **parts, loss_sum=sum(result.loss_sum for result in results))
        return joined.loss, joined
    mean = np.mean([p for result in results if (p := result.probabilities) is not None], axis=0)
    return None, replace(first, probabilities=mean, predicted=first.task.predicted_from(mean))
