"""Cross-validation: a run for each fold of the data, one after another on all devices, and their joint results."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from flatout.config import load_recipe
from flatout.data.batches import Split
from flatout.data.labels import count_classes
from flatout.data.pack import Pack
from flatout.data.splits import folds_of
from flatout.engine.base import Evaluation
from flatout.engine.factory import join, precisions
from flatout.inference.evaluate import scores_of
from flatout.inference.predictions import file_names, write_predictions
from flatout.report import page
from flatout.tasks import describe_metrics, task_of
from flatout.train import run_dir as folders
from flatout.train.finish import about_run
from flatout.train.request import RunLog, TrainRequest
from flatout.utils import run_files
from flatout.utils.console import Console
from flatout.utils.errors import InputError, TrainingFailed
from flatout.utils.run_files import JsonObject

TrainRun: TypeAlias = Callable[[TrainRequest], Path]
# Fields of a fold's summary that the cross-validation's summary also has.
_FIGURES = ("train_images", "epochs_trained", "train_loss", "train_seconds", "images_trained", "wall_seconds")


def cross_validate(request: TrainRequest, pack: Pack, console: Console, train_run: TrainRun) -> Path:
    """Train a run for each fold of `recipe.data.folds`, and return the folder of all, which is claimed.

    Every fold is a run in `fold-N`: trained on the other folds and validated on its own, which is not used to choose an
    epoch, thresholds or a learning rate. Finished folds are kept.
    """
    recipe, options, folder = request.recipe, request.options, request.run_dir
    assert folder is not None
    for key, value in (("keep", "last"), ("early_stopping", 0)):
        if recipe.flat()[key] != value:
            console.note(f"{key} = {value!r}: with folds, the held-out images choose nothing")
            recipe = recipe.override({key: value})
    request = replace(request, recipe=recipe.override({"data.bits": recipe.data.bits or pack.bits}))
    folds_of(pack, recipe.data.folds, recipe.seed)  # refuses too many, before an old run is removed
    if options.resume and (folder / run_files.RECIPE).is_file():
        folders.check_same(load_recipe(folder / run_files.RECIPE), request.recipe)
        summaries = (run_files.read_summary(path, {}) for path in folder.glob(run_files.FOLD.format("*")))
        if any(found.get("pack_fingerprint", pack.fingerprint) != pack.fingerprint for found in summaries):
            what = "the data has changed since some of its folds were trained"
            raise InputError(f"{folder}: {what}; restore the data, or train with --overwrite")
    folders.begin(folder, request.recipe, overwrite=options.overwrite)
    folders.write_devices(folder, options.devices)
    began = time.perf_counter()
    for fold in range(1, recipe.data.folds + 1):
        _train_fold(fold, folder, request, console, train_run)
    _finish(folder, request, pack, console, time.perf_counter() - began)
    return folder


def _train_fold(fold: int, folder: Path, request: TrainRequest, console: Console, train_run: TrainRun) -> None:
    recipe, options, out = request.recipe, request.options, folder / run_files.FOLD.format(fold)
    summary = run_files.read_summary(out, {})
    # A callback that ends a fold ends it for good.
    stopped = summary.get("stopped")
    has_ended = stopped is None or stopped.endswith("ended training")
    is_whole = bool(summary) and summary.get("epochs") == recipe.epochs and has_ended
    if is_whole and summary.get("max_steps", load_recipe(out / run_files.RECIPE).max_steps) == recipe.max_steps:
        if options.report and "pictures" not in (summary.get("time_seconds") or {}):
            page.draw_all(out)  # it was killed while they were drawn
        console.note(f"fold {fold} of {recipe.data.folds} has finished: {out}")
        return
    # All folds use the number format that the first one has measured, if this hardware has it.
    first = folder / run_files.FOLD.format(1) / run_files.RECIPE
    if recipe.precision == "auto" and fold > 1 and first.is_file():
        measured = load_recipe(first).precision
        formats = precisions(options.engine, join(options.devices, options.engine))
        if not formats or measured in formats:
            recipe = recipe.override({"precision": measured})
    is_begun = (out / run_files.RECIPE).is_file()
    options = replace(options, out=out, resume=is_begun, overwrite=False, began=time.perf_counter())
    recipe = recipe.override({"data.fold": fold})
    try:
        train_run(TrainRequest(recipe=recipe, data=request.data, options=options, module=request.module))
    except (InputError, TrainingFailed) as error:
        error.args = (f"fold {fold}: {error}", *error.args[1:])
        raise
    finally:
        console.close()  # the next fold has its own log


def _finish(folder: Path, request: TrainRequest, pack: Pack, console: Console, seconds: float) -> None:
    recipe = request.recipe
    numbers = range(1, recipe.data.folds + 1)
    names = [run_files.FOLD.format(number) for number in numbers]
    summaries = [run_files.read_summary(folder / name, {}) for name in names]
    saved = [_read_predictions(folder / name, found) for name, found in zip(names, summaries, strict=True)]
    joined = {key: np.concatenate([getattr(one, key) for one in saved]) for key in ("row", "labels", "probabilities")}
    order = np.argsort(joined["row"], kind="stable")
    rows, labels, probabilities = (values[order] for values in joined.values())
    task = replace(task_of(recipe), own_metrics=request.options.functions.metrics)
    losses = [s["valid_loss"] * s["valid_count"] if s["valid_loss"] is not None else np.nan for s in summaries]
    held_out = Evaluation(
        task=task,
        loss_sum=float(np.sum(losses)),
        predicted=task.predicted_from(probabilities),
        labels=labels,
        probabilities=probabilities,
    )
    figures = {"loss": held_out.loss, **held_out.metrics, "count": len(labels)}
    joint = {f"valid_{key}": value for key, value in figures.items()}
    more = {"fold": np.repeat(numbers, [len(one.labels) for one in saved])[order]}
    of_test = [one.test_probabilities for one in saved if one.test_probabilities is not None]
    if len(of_test) == len(saved):
        start, stop = pack.splits["test"]
        more["test_probabilities"] = np.mean(of_test, axis=0)
        predicted, actual = task.predicted_from(more["test_probabilities"]), pack.labels[start:stop]
        metrics = {**task.metrics(predicted, actual), **task.own(predicted, actual), "count": stop - start}
        joint |= {f"test_{key}": value for key, value in metrics.items()}
    samples, files = Split(images=pack.images, rows=rows, labels=labels), file_names(recipe, pack)
    write_predictions(
        folder, recipe, "held-out", held_out, samples, pack.classes, note=console.note, files=files, more=more
    )
    log = RunLog(console, request)
    log.seconds["folds"] = seconds
    summary = _summary(request, log, pack, summaries) | joint | scores_of("valid", held_out, pack.classes, None)
    run_files.write_json(folder / run_files.SUMMARY, summary)
    if request.options.report:
        page.draw_all(folder)
    name = task.metric_names[0]
    mean, std = (summary[key][f"valid_{name}"] for key in ("mean", "std"))
    console.note(f"{len(names)} folds: {name.replace('_', ' ')} {mean:.4f} ± {std:.4f} on the held-out images")
    console.note(describe_metrics("valid", summary).replace("valid", "all held-out images:", 1))
    if "test_count" in summary:
        console.note(f"{describe_metrics('test', summary)}, the folds together")
    if request.options.report:
        console.note(f"report: {folder / run_files.REPORT}")


def _read_predictions(folder: Path, summary: JsonObject) -> run_files.Predictions:
    missing = dict[str, str]()
    if found := run_files.read_predictions(folder, summary, missing):
        return found
    raise InputError(f"{folder}: {missing[run_files.PREDICTIONS]} Remove the folder and continue with --resume")


def _summary(request: TrainRequest, log: RunLog, pack: Pack, folds: list[JsonObject]) -> JsonObject:
    recipe, options = request.recipe, request.options
    own = [name for name, _ in options.functions.metrics]
    names = ("loss", *task_of(recipe).metric_names, *own, "count")
    metrics = [key for split in ("valid", "test") for key in (f"{split}_{name}" for name in names)]
    metrics = [key for key in metrics if all(fold.get(key) is not None for fold in folds)]
    spread = [key for key in metrics if not key.endswith(("_correct", "_count"))]
    total = {key: sum(fold[key] for fold in folds) for key in ("images_trained", "train_seconds")}
    pool = np.concatenate([pack.labels[a:b] for name, (a, b) in pack.splits.items() if name != "test"])
    common = ("devices", "world_size", "parameters", "trained_parameters", "test_images")
    return {
        **about_run(recipe, options.engine, pack),
        **{key: folds[0][key] for key in common if key in folds[0]},
        "train_images": len(pool),
        "train_class_counts": count_classes(pool, len(pack.classes)).tolist(),
        **total,
        "images_per_second": total["images_trained"] / total["train_seconds"] if total["train_seconds"] else None,
        # The time of earlier commands is unknown.
        "wall_seconds": None if options.resume else time.perf_counter() - options.began,
        "folds": [
            {"fold": i, "folder": run_files.FOLD.format(i), **{key: fold[key] for key in (*_FIGURES, *metrics)}}
            for i, fold in enumerate(folds, start=1)
        ],
        "mean": {key: statistics.fmean(fold[key] for fold in folds) for key in spread},
        "std": {key: statistics.stdev(fold[key] for fold in folds) for key in spread},
        "stopped": None,
        "notes": log.notes,
        "time_seconds": log.seconds,
    }
