"""Cross-validation: a run for each fold of the data, on all the devices, and their joint results."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.config import Recipe, load_recipe
from flatout.data.batches import Split
from flatout.data.labels import count_classes
from flatout.data.pack import Pack, share
from flatout.data.splits import folds_of
from flatout.distributed.environment import launched
from flatout.distributed.launch import launch
from flatout.distributed.world import World
from flatout.engine.base import Evaluation
from flatout.engine.devices import parse_devices, spec_of
from flatout.engine.factory import precisions
from flatout.engine.torch.accelerator import cpu_threads
from flatout.inference.evaluate import scores_of
from flatout.inference.predictions import file_names, write_predictions
from flatout.tasks import describe_metrics, task_of
from flatout.train import claim
from flatout.train.checkpoint import check_same
from flatout.train.context import RunLog
from flatout.train.finish import about_run
from flatout.train.prepare import build_model, prepare_host
from flatout.train.request import Options, TrainRequest
from flatout.utils import run_files
from flatout.utils.console import Console
from flatout.utils.errors import InputError, TrainingFailed

# Trains one run on one rank.
TrainRun = Callable[[Console, World, TrainRequest], Path]
# Fields of a fold's summary that the cross-validation's summary also has.
_FIGURES = ("train_images", "epochs_trained", "train_loss", "train_seconds", "images_trained", "wall_seconds")


def cross_validate(request: TrainRequest, console: Console, train_run: TrainRun) -> Path:
    """Train a run for each fold of `recipe.data.folds`, and return the folder of all.

    Every fold is an ordinary run in `fold-1`, `fold-2` and so on: it is trained on the other folds and validated on its
    own, which is not used to choose an epoch, thresholds or a learning rate. Each is trained on one device, as many at
    a time as there are devices; XLA's devices train one together. Finished folds are kept.

    Args:
        train_run: trains one run on one rank.

    Raises:
        InputError, TrainingFailed, Stopped: see `run.train`; an error of a fold begins with its number.
    """
    recipe, options = request.recipe, request.options
    for key, value in (("keep", "last"), ("early_stopping", 0)):
        if recipe.flat()[key] != value:
            console.note(f"{key} = {value!r}: with folds, the held-out images choose nothing")
            recipe = recipe.override({key: value})
    with prepare_host(replace(request, recipe=recipe), console) as (request, pack):
        recipe = request.recipe.override({"data.bits": recipe.data.bits or pack.bits})
        request = replace(request, recipe=recipe)
        assert request.run_dir is not None
        pool = _divide(pack, recipe, console)
        # Check the model before an old run is removed.
        build_model(request, pack)
        if options.resume and (request.run_dir / run_files.RECIPE).is_file():
            check_same(load_recipe(request.run_dir / run_files.RECIPE), recipe)
        claim.begin(request.run_dir, recipe, overwrite=options.overwrite)
        began = time.perf_counter()
        _train_all(request, pack, console, train_run)
        _finish(request, pack, pool, console, time.perf_counter() - began)
    return request.run_dir


def _divide(pack: Pack, recipe: Recipe, console: Console) -> np.ndarray:
    """Return the rows to divide into folds, and note classes that are missing in some."""
    rows, folds = folds_of(pack, recipe.data.folds, recipe.seed)
    labels = pack.labels[rows]
    counts = np.array([count_classes(labels[folds == fold], len(pack.classes)) for fold in np.unique(folds)])
    if missing := [name for name, least in zip(pack.classes, counts.min(axis=0), strict=True) if not least]:
        names = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5)
        console.note(f"{len(missing):,} of {len(pack.classes):,} classes have no images in some folds: {names}")
    return rows


def _train_all(request: TrainRequest, pack: Pack, console: Console, train_run: TrainRun) -> None:
    """Train the unfinished folds, in this process or in one per device."""
    specs, options = _specs(request.recipe, request.options), request.options
    if len(specs) == 1 and not options.restarts:
        _train_share(console, request, specs, train_run)
        return
    folds = request.recipe.data.folds
    console.note(f"{folds} folds on {len(specs)} devices at a time; each has its log in its folder")
    with share(pack) as shared:
        call = (replace(request, data=shared), specs, train_run)
        threads = cpu_threads(len(specs))
        restarts = options.restarts or 0
        launch(_train_share, call, names=specs, threads=threads, console=console, restarts=restarts)


def _specs(recipe: Recipe, options: Options) -> list[str]:
    """Return the SPEC of each process."""
    devices = parse_devices(options.devices, options.engine)
    return [options.devices] if options.engine == "xla" else list(devices.names[: recipe.data.folds])


def _train_share(console: Console, request: TrainRequest, specs: Sequence[str], train_run: TrainRun) -> None:
    """Train this process's share of the folds in turn on its device."""
    process, folder, folds = launched(), request.run_dir, request.recipe.data.folds
    rank = process.rank if process else 0
    assert folder is not None
    for fold in range(rank + 1, folds + 1, len(specs)):
        out = folder / run_files.FOLD.format(fold)
        if _has_finished(out, request.recipe):
            console.note(f"fold {fold} of {folds} has finished: {out}")
            continue
        options = replace(
            request.options,
            out=out,
            devices=specs[rank],
            resume=(out / run_files.RECIPE).is_file(),
            overwrite=False,
            began=time.perf_counter(),
        )
        # The processes share cores and memory.
        world = World(device=torch.device("cpu" if options.engine == "xla" else specs[rank]), local_size=len(specs))
        recipe = _in_one_format(request.recipe, folder, precisions(options.engine, world))
        of_fold = TrainRequest(
            recipe=recipe.override({"data.fold": fold}),
            data=request.data,
            options=options,
            module=request.module,
        )
        try:
            train_run(console, world, of_fold)
        except (InputError, TrainingFailed) as error:
            error.args = (f"fold {fold}: {error}", *error.args[1:])
            raise
        finally:
            console.close()  # the next fold has its own log


def _in_one_format(recipe: Recipe, folder: Path, formats: Sequence[str]) -> Recipe:
    """Return the recipe with the number format of the fold that measured it, so that all folds use the same."""
    begun = (folder / run_files.FOLD.format(fold) / run_files.RECIPE for fold in range(1, recipe.data.folds + 1))
    path = next((path for path in begun if path.is_file()), None)
    found = load_recipe(path).precision if path else "auto"
    return recipe.override({"precision": found}) if recipe.precision == "auto" and found in formats else recipe


def _has_finished(out: Path, recipe: Recipe) -> bool:
    """Whether a fold was trained to the end of its recipe."""
    summary = run_files.read_summary(out, {})
    length = ("epochs", recipe.epochs), ("stopped", None)
    is_whole = bool(summary) and all(summary.get(key) == value for key, value in length)
    return is_whole and load_recipe(out / run_files.RECIPE).max_steps == recipe.max_steps


def _finish(request: TrainRequest, pack: Pack, pool: np.ndarray, console: Console, seconds: float) -> None:
    """Write predictions, summary and report of all folds; `pool` has the rows of their images."""
    from flatout.report.page import draw_all

    recipe, folder = request.recipe, request.run_dir
    assert folder is not None
    numbers = range(1, recipe.data.folds + 1)
    names = [run_files.FOLD.format(number) for number in numbers]
    summaries = [run_files.read_summary(folder / name, {}) for name in names]
    saved = [_read_predictions(folder / name) for name in names]
    order = np.argsort(np.concatenate([arrays["row"] for arrays in saved]), kind="stable")
    rows, labels, probabilities = (
        np.concatenate([arrays[key] for arrays in saved])[order] for key in ("row", "labels", "probabilities")
    )
    if not (np.array_equal(rows, pool) and np.array_equal(labels, pack.labels[pool])):
        raise InputError(f"{folder}: the data has changed since some of its folds were trained; train with --overwrite")
    task = task_of(recipe)
    losses = [s["valid_loss"] * s["valid_count"] if s["valid_loss"] is not None else np.nan for s in summaries]
    held_out = Evaluation(
        task=task,
        loss_sum=float(np.sum(losses)),
        predicted=task.predicted_from(probabilities),
        labels=labels,
        probabilities=probabilities,
    )
    figures = {"loss": held_out.loss, **held_out.metrics, "count": len(labels)}
    summary = {f"valid_{key}": value for key, value in figures.items()}
    more = {"fold": np.repeat(numbers, [len(arrays["row"]) for arrays in saved])[order]}
    if all("test_probabilities" in arrays for arrays in saved):
        start, stop = pack.splits["test"]
        more["test_probabilities"] = np.mean([arrays["test_probabilities"] for arrays in saved], axis=0)
        metrics = task.metrics(task.predicted_from(more["test_probabilities"]), pack.labels[start:stop])
        summary |= {f"test_{key}": value for key, value in ({**metrics, "count": stop - start}).items()}
    log = RunLog(console, request)
    samples = Split(images=pack.images, rows=rows, labels=labels)
    files = file_names(recipe, pack)
    write_predictions(
        folder, recipe, "held-out", held_out, samples, pack.classes, note=console.note, files=files, more=more
    )
    summary |= scores_of("valid", held_out, pack.classes, None)
    summary = _summary(request, log, pack, summaries, seconds) | summary
    run_files.write_json(folder / run_files.SUMMARY, summary)
    if request.options.report:
        draw_all(folder)
    _print_results(request, console, summary)


def _read_predictions(folder: Path) -> dict[str, np.ndarray]:
    path = folder / run_files.PREDICTIONS
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read: {error}; remove {folder} and continue with --resume") from None


def _summary(
    request: TrainRequest, log: RunLog, pack: Pack, folds: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Return the fields of `summary.json` other than joint metrics; `folds` are the folds' summaries."""
    recipe, options = request.recipe, request.options
    task, specs = task_of(recipe), _specs(recipe, options)
    metrics = [f"{split}_{name}" for split in ("valid", "test") for name in ("loss", *task.metric_names, "count")]
    metrics = [key for key in metrics if all(fold.get(key) is not None for fold in folds)]
    spread = [key for key in metrics if not key.endswith(("_correct", "_count"))]
    total = {key: sum(fold[key] for fold in folds) for key in ("images_trained", "train_seconds")}
    pool = np.concatenate([pack.labels[a:b] for name, (a, b) in pack.splits.items() if name != "test"])
    return {
        **about_run(recipe, options.engine, pack),
        # One device trains a fold; XLA's train one together.
        "devices": spec_of(specs) if len(specs) > 1 else folds[0]["devices"],
        "world_size": len(specs) if len(specs) > 1 else folds[0]["world_size"],
        **{key: folds[0][key] for key in ("parameters", "trained_parameters", "test_images") if key in folds[0]},
        "train_images": len(pool),
        "train_class_counts": count_classes(pool, len(pack.classes)).tolist(),
        **total,
        "images_per_second": total["images_trained"] / total["train_seconds"] if total["train_seconds"] else None,
        # The time of earlier commands is unknown.
        "wall_seconds": None if options.resume else time.perf_counter() - options.began,
        "folds": [
            {
                "fold": number,
                "folder": run_files.FOLD.format(number),
                **{key: fold[key] for key in (*_FIGURES, *metrics)},
            }
            for number, fold in enumerate(folds, start=1)
        ],
        "mean": {key: statistics.fmean(fold[key] for fold in folds) for key in spread},
        "std": {key: statistics.stdev(fold[key] for fold in folds) for key in spread},
        "stopped": None,
        "notes": log.notes,
        "time_seconds": log.seconds | {"folds": seconds},
    }


def _print_results(request: TrainRequest, console: Console, summary: dict[str, Any]) -> None:
    name = task_of(request.recipe).metric_names[0]
    mean, std = (summary[key][f"valid_{name}"] for key in ("mean", "std"))
    console.note(
        f"{len(summary['folds'])} folds: {name.replace('_', ' ')} {mean:.4f} ± {std:.4f} on the held-out images"
    )
    console.note(describe_metrics("valid", summary).replace("valid", "all held-out images:", 1))
    if "test_count" in summary:
        console.note(f"{describe_metrics('test', summary)}, the folds together")
    if request.options.report and request.run_dir:
        console.note(f"report: {request.run_dir / run_files.REPORT}")
