"""The end of a run: the chosen weights, their evaluation, and the files that explain them."""

import json
import platform
import signal
import time
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from flatout import __version__
from flatout.config import Recipe
from flatout.config.settings import collapse_size
from flatout.data.labels import count_classes
from flatout.data.pack import Pack
from flatout.engine.augment import tta_views
from flatout.engine.base import Evaluation
from flatout.engine.devices import machine
from flatout.inference.calibration import Calibration, FeatureStats, feature_samples, why_uncalibrated
from flatout.inference.evaluate import scores_of
from flatout.inference.predictions import file_names, write_predictions, write_splits
from flatout.models.weights import save_tensors
from flatout.report import page
from flatout.report.verdict import stages, verdict
from flatout.tasks import Task, describe_metrics
from flatout.train.head import HeadStage, refit_to_validation
from flatout.train.request import Progress, TrainContext
from flatout.utils import run_files
from flatout.utils.errors import Stopped
from flatout.utils.host import installed, peak_rss_bytes
from flatout.utils.run_files import JsonObject


def finish(context: TrainContext, progress: Progress) -> None:
    """Evaluate and write the run. All ranks call this."""
    if progress.best:
        context.engine.restore(progress.best)
    evaluations, known, began, log = dict[str, Evaluation](), None, time.perf_counter(), context.log
    if isinstance(log.failure, Stopped):
        # Some ranks receive the signal that ended training only now.
        context.world.control.ignore_interrupts()
    try:
        # A terminated run skips the evaluation.
        if not (isinstance(log.failure, Stopped) and log.failure.signal_number == signal.SIGTERM):
            known = _evaluate(context, progress, evaluations)
    except Stopped as error:
        log.end(f"{error.how} during evaluation", error)
        log.note(log.stopped)
    progress.evaluate_seconds += time.perf_counter() - began
    # All processes take part in these two.
    state = context.engine.state()
    peaks = context.world.all_gather_object((peak_rss_bytes(), context.engine.peak_memory_bytes()))
    device = [peak for _, peak in peaks if peak is not None]
    memory = {"peak_rss_bytes": sum(peak for peak, _ in peaks), "peak_device_bytes": max(device) if device else None}
    # No process ends before the run is complete.
    context.world.from_main(lambda: _write(context, progress, evaluations, known, state, memory))


def _shown_split(context: TrainContext) -> str | None:
    """Return the split whose predictions are saved and shown: a fold's held-out images, else the test images."""
    wanted = ("valid", "test") if context.recipe.data.fold else ("test", "valid")
    return next((name for name in wanted if name in context.splits), None)


def _head_kept(context: TrainContext, progress: Progress) -> HeadStage | None:
    """Return the fitted head if it is the result: fine-tuning has not begun, or has made the weights worse."""
    return context.stage if not context.datasets or (progress.best and not progress.best_epoch) else None


def _evaluate(context: TrainContext, progress: Progress, evaluations: dict[str, Evaluation]) -> FeatureStats | None:
    """Fill `evaluations` of the held-out splits, and return the distribution of training features, if wanted."""
    recipe, log, known, head = context.recipe, context.log, None, _head_kept(context, progress)
    if reason := why_uncalibrated(recipe, context.splits):
        log.note(reason)
    # Nothing is tuned on the images of a fold.
    is_calibrated = recipe.task == "single-label" and not recipe.data.fold and not reason
    if recipe.tta and (views := len(tta_views(recipe))) > 1:
        log.note(f"test-time augmentation: evaluated on {views} views of each image")
    if is_calibrated:
        known = head.known if head else _known_features(context)
    head = head or refit_to_validation(context)
    for name in [name for name in context.splits if name != "train"]:
        if head and name in head.features:
            evaluations[name] = head.evaluation(name, context.engine.task, with_logits=is_calibrated, known=known)
        else:
            evaluations[name] = context.datasets[name].evaluate(
                with_probabilities=recipe.data.fold > 0 or name == _shown_split(context),
                with_logits=is_calibrated,
                keep_features=known.distances if known else None,
                tta=recipe.tta,
            )
    return known


def _known_features(context: TrainContext) -> FeatureStats | None:
    train = context.datasets["train"]
    some = feature_samples(train.samples, len(context.pack.classes))
    placed = train if len(some) == len(train.samples) else context.engine.place(some)
    # With a large network, as behind a fitted head, unaugmented images are enough.
    found = placed.evaluate(keep_features=np.array, tta=context.recipe.tta and context.stage is None)
    return context.world.from_main(lambda: FeatureStats.of(found.features, found.labels))


def _write(
    context: TrainContext,
    progress: Progress,
    evaluations: dict[str, Evaluation],
    known: FeatureStats | None,
    state: dict[str, Any],
    memory: dict[str, int | None],
) -> None:
    recipe, classes, shown = context.recipe, context.pack.classes, _shown_split(context)
    task, valid, is_fold = context.engine.task, evaluations.get("valid"), recipe.data.fold > 0
    found = Calibration.fit(known, valid) if valid and valid.logits is not None else None
    if valid and not is_fold:
        task = task.tuned(valid.predicted, valid.labels)
        task = replace(task, temperature=found.temperature if found else 1.0)
        evaluations = {name: evaluation.of_task(task) for name, evaluation in evaluations.items()}
    _write_weights(context, state, task, found)
    if found:
        found.write(context.run_dir / run_files.KNOWN)
    files = file_names(recipe, context.pack)
    if files:
        write_splits(context.run_dir, context.splits, files, task, classes)
    scores: JsonObject = {}
    if shown not in evaluations:
        # Those of a resumed run are of earlier weights.
        for name in (run_files.PREDICTIONS, *run_files.PICTURES):
            (context.run_dir / name).unlink(missing_ok=True)
    else:
        kept, more = evaluations[shown], {}
        if is_fold and "test" in evaluations:
            more["test_probabilities"] = evaluations["test"].probabilities
        if found and found.detector and kept.logits is not None:
            more["unknown"] = found.detector.score_at(kept.logits, kept.features)
        write_predictions(
            context.run_dir,
            recipe,
            shown,
            kept,
            context.splits[shown],
            classes,
            note=context.log.note,
            files=files,
            module=context.request.module,
            allow_code=context.options.allow_code,
            more=more,
        )
        scores = scores_of(shown, kept, classes, found)
    summary: JsonObject = _summary(context, progress, evaluations) | memory | scores
    summary["verdict"] = verdict(summary, progress.records, context.recipe)
    run_files.write_json(context.run_dir / run_files.SUMMARY, summary)
    began = time.perf_counter()
    if context.options.report:
        page.draw_all(context.run_dir)
    summary["time_seconds"]["pictures"] = time.perf_counter() - began
    summary["wall_seconds"] = context.log.wall_seconds(progress)
    run_files.write_json(context.run_dir / run_files.SUMMARY, summary)
    _print_results(context, summary)


def _write_weights(context: TrainContext, state: dict[str, Any], task: Task, found: Calibration | None) -> None:
    recipe = context.recipe
    # Averaged weights replace the last ones.
    tensors = {
        name.removeprefix(prefix): value
        for prefix in ("model.", "ema.")
        for name, value in state.items()
        if name.startswith(prefix)
    }
    metadata = {
        "format": "pt",
        "flatout": __version__,
        "model": recipe.model,
        "classes": json.dumps(context.pack.classes),
        "image_size": json.dumps(recipe.image_size),
        "stored_size": json.dumps(collapse_size(recipe.stored_sides)),
        "eval_size": json.dumps(collapse_size(recipe.eval_sides)),
        "channels": str(recipe.channels),
        "bits": str(recipe.data.bits),
        "mean": json.dumps(recipe.data.mean),
        "std": json.dumps(recipe.data.std),
        "resize": recipe.data.resize,
        "task": recipe.task,
        "loss": recipe.loss,
        "thresholds": json.dumps(task.thresholds),
        "label_mean": str(task.label_mean),
        "label_std": str(task.label_std),
        **(found.metadata() if found else {}),
    }
    save_tensors(context.run_dir / run_files.WEIGHTS, tensors, metadata)


def _summary(context: TrainContext, progress: Progress, results: dict[str, Evaluation]) -> JsonObject:
    recipe, engine, pack, log = context.recipe, context.engine, context.pack, context.log
    chosen = progress.best_epoch if progress.best else len(progress.history)
    head, task, trained_parameters = _head_kept(context, progress), engine.task, context.trained_parameters
    record = progress.history[chosen - 1] if chosen else head and head.record
    if head and not progress.history:
        # The run has trained the head's parameters only.
        trained_parameters = head.fitted.weight.size + head.fitted.bias.size * head.head.has_bias
    figures: JsonObject = {key: record and record[key] for key in ("train_loss", f"train_{task.step_metric}")}
    for name in ("valid", "test"):
        found: JsonObject = dict.fromkeys(("loss", *task.metric_names, "count"))
        if name in results:
            found |= {"loss": results[name].loss, **results[name].metrics, "count": len(results[name].labels)}
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    for name, samples in context.splits.items():
        figures[f"{name}_images"] = len(samples)
        figures[f"{name}_class_counts"] = count_classes(samples.labels, len(pack.classes)).tolist()
    trained_for, waited, shared = progress.train_seconds, progress.wait_seconds, progress.communication_seconds
    return {
        **about_run(recipe, context.options.engine, pack),
        "devices": context.devices,
        "world_size": context.device_count,
        "threads_per_rank": engine.threads,
        "epochs_trained": progress.epoch,
        "best_epoch": progress.best_epoch or None,
        "kept_epoch": chosen if chosen or head else None,
        "parameters": context.parameters,
        "trained_parameters": trained_parameters,
        "images_trained": progress.images_trained,
        "images_per_second": progress.images_trained / trained_for if trained_for else None,
        "train_seconds": trained_for,
        "setup_seconds": sum(log.seconds.values()),
        "wall_seconds": log.wall_seconds(progress),
        **figures,
        "train_loss_by_step": progress.step_losses,
        "input_wait_fraction": waited / trained_for if trained_for else None,
        # NaN if the device shares its sums itself.
        "communication_fraction": shared / trained_for if trained_for and np.isfinite(shared) else None,
        "warmup_seconds": progress.warmup_seconds,
        "stopped": log.stopped or None,
        "notes": log.notes,
        "time_seconds": log.seconds | {"train": trained_for, "evaluate": progress.evaluate_seconds},
        "runs_on": engine.describe(),
    }


def about_run(recipe: Recipe, engine: str, pack: Pack) -> JsonObject:
    """Return the fields of `summary.json` that do not depend on the training."""
    packages = ("torch", "numpy", "timm", "pillow", "simplejpeg", "safetensors")
    keys = ("job", "model", "batch_size", "epochs", "max_steps", "tta", "task", "seed")
    return {
        **{key: getattr(recipe, key) for key in keys},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "engine": engine,
        "classes": list(pack.classes),
        "pack": str(pack.path.absolute()) if pack.path else None,
        "pack_fingerprint": pack.fingerprint,
        "pack_was_cached": pack.was_cached,
        "skipped_images": pack.skipped,
        "machine": machine(),
        "versions": {"flatout": __version__, "python": platform.python_version(), **installed(*packages)},
    }


def _print_results(context: TrainContext, summary: JsonObject) -> None:
    say = context.log.console.note
    for name in ("test", "valid"):
        if summary[f"{name}_count"]:
            say(describe_metrics(name, summary))
            break
    if summary["images_per_second"]:
        say(
            f"trained {summary['images_trained']:,} images in {summary['train_seconds']:.1f} s: "
            f"{summary['images_per_second']:,.0f} per second"
        )
    for stage, layers, seconds in stages(summary, context.recipe.to_dict()):
        say(f"{stage}: {layers}" + f" ({seconds})" * bool(seconds))
    for sentence in summary["verdict"]:
        say(sentence)
    if context.options.report:
        say(f"report: {context.run_dir / run_files.REPORT}")
