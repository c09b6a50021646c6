"""The end of a run: the chosen weights, their evaluation, and the files that explain them."""

import dataclasses
import json
import platform
import signal
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout import __version__
from flatout.data.feed import Samples
from flatout.data.labels import count_classes
from flatout.dist.control import Flag
from flatout.errors import Stopped
from flatout.host import installed, peak_rss_bytes
from flatout.inference.calibration import Calibration, FeatureStats, feature_samples, why_uncalibrated
from flatout.inference.evaluate import scores_of
from flatout.inference.predictions import file_names, write_predictions, write_splits
from flatout.numerics.augment import tta_views
from flatout.report import run_files
from flatout.report.stages import stages
from flatout.run.progress import Progress
from flatout.settings import one_or_both
from flatout.tasks import describe_metrics

if TYPE_CHECKING:
    from flatout.data.pack import Pack
    from flatout.engine.base import DeviceSplit, Engine, Evaluation
    from flatout.run.session import Session
    from flatout.tasks.base import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ended:
    """What a run has when its last evaluation is over.

    Attributes:
        samples: of each split.
        results: of the evaluated splits.
        known: where the features of training images are; None where that is not known, or not wanted.
        reason: why training ended early; empty if it did not.
        state: of the engine.
        memory: the figures of `summary.json` about it.
    """

    session: "Session"
    engine: "Engine"
    pack: "Pack"
    progress: Progress
    samples: dict[str, Samples]
    results: "dict[str, Evaluation]"
    known: FeatureStats | None
    reason: str
    state: dict[str, Any]
    memory: dict[str, int | None]


def finish(
    session: "Session",
    engine: "Engine",
    pack: "Pack",
    splits: dict[str, Samples],
    placed: "dict[str, DeviceSplit]",
    progress: Progress,
    ended: str,
    failure: Exception | None,
) -> Exception | None:
    """Write weights, summary, predictions, pictures and report; every process evaluates, the main one writes.

    Args:
        engine: the last weights; afterwards the chosen ones.
        placed: the splits on the devices; empty where nothing was trained.
        ended: why training ended early; empty if it did not.
        failure: the same as an exception.

    Returns:
        `failure`, or the signal that ended the evaluation.
    """
    if progress.best:
        engine.restore(progress.best)
    # The head that was fitted, unless fine-tuning has made something better.
    stage = session.stage if not progress.history or (progress.best and not progress.best_epoch) else None
    is_fold = session.recipe.data.fold > 0
    shown = _shown(session, splits)
    results: dict[str, Evaluation] = {}
    known: FeatureStats | None = None
    began = time.perf_counter()
    is_trusted = session.recipe.task == "single-label" and not is_fold and "valid" in splits
    if reason := why_uncalibrated(session.recipe, splits):
        is_trusted = False
        session.note(reason)
    if session.recipe.tta:
        session.note(f"test-time augmentation: evaluated on {len(tta_views(session.recipe))} views of each image")
    if isinstance(failure, Stopped):
        # The signal that ended training reaches some ranks only now.
        session.world.control.heeded = Flag.TERMINATE
    try:
        # Whoever terminates a run does not wait for an evaluation.
        if not (isinstance(failure, Stopped) and failure.signal_number == signal.SIGTERM):
            if is_trusted and stage:
                known = stage.known()
            elif is_trusted:
                some = feature_samples(placed["train"].samples, len(pack.classes))
                is_all = len(some) == len(placed["train"].samples)
                known = _known(session, placed["train"] if is_all else engine.place(some))
            for name in [name for name in splits if name != "train"]:
                if stage:
                    results[name] = stage.evaluation(name, engine.task)
                    continue
                results[name] = placed[name].evaluate(
                    with_probabilities=is_fold or name == shown,
                    with_logits=is_trusted,
                    keep_features=known.distances if known else None,
                    tta=session.recipe.tta,
                )
    except Stopped as stopped:
        failure = failure or stopped
        ended = ended or f"{stopped.how} during evaluation"
        session.note(ended)
    progress.evaluate_seconds += time.perf_counter() - began
    run = _Ended(
        session=session,
        engine=engine,
        pack=pack,
        progress=progress,
        samples=splits,
        results=results,
        known=known,
        reason=ended,
        # All processes take part in these two.
        state=engine.state(),
        memory=_memory(session, engine),
    )
    if session.world.is_main:
        with session.world.heartbeat.alone("writing the report"):
            _write(run, shown)
    # No process ends before the run is whole.
    session.world.barrier()
    return failure


def _known(session: "Session", some: "DeviceSplit") -> FeatureStats | None:
    """Return where the features of training images are: the same numbers on all ranks."""
    # Where the network is large, as behind a fitted head, the images themselves show enough.
    found = some.evaluate(keep_features=np.array, tta=session.recipe.tta and session.stage is None)
    return session.world.from_main(lambda: FeatureStats.of(found.features, found.labels))


def _shown(session: "Session", splits: dict[str, Samples]) -> str | None:
    """Return the split whose answers are kept and shown: that of a fold is held out."""
    wanted = ("valid", "test") if session.recipe.data.fold > 0 else ("test", "valid")
    return next((name for name in wanted if name in splits), None)


def _write(run: _Ended, shown: str | None) -> None:
    """Write all files of a run; `shown` is the split whose answers are kept."""
    session, results = run.session, run.results
    is_fold = session.recipe.data.fold > 0
    task = run.engine.task
    is_trusted = "valid" in results and results["valid"].logits is not None
    found = Calibration.fit(run.known, results["valid"]) if is_trusted else None
    # The images of a fold choose nothing.
    if "valid" in results and not is_fold:
        task = task.tuned(results["valid"].predicted, results["valid"].labels)
        task = dataclasses.replace(task, temperature=found.temperature if found else 1.0)
        results = {name: result.of_task(task) for name, result in results.items()}
    _write_weights(run, task, found)
    if found:
        found.write(session.out / run_files.KNOWN)
    if files := file_names(session.recipe, run.pack):
        write_splits(session.out, run.samples, files, task, run.pack.classes)
    scores: dict[str, Any] = {}
    if shown in results:
        more = {"test_probabilities": results["test"].probabilities} if is_fold and "test" in results else {}
        logits = results[shown].logits
        if found and found.detector and logits is not None:
            more["unknown"] = found.detector.score_at(logits, results[shown].features)
        write_predictions(
            session.out,
            session.recipe,
            shown,
            results[shown],
            run.samples[shown],
            run.pack.classes,
            note=session.note,
            files=files,
            module=session.module,
            allow_code=session.options.allow_code,
            more=more,
        )
        scores = scores_of(shown, results[shown], run.pack.classes, found)
    summary = _summary(run, results) | run.memory | scores
    _write_report(session, summary, run.progress)


def _write_report(session: "Session", summary: dict[str, Any], progress: Progress) -> None:
    from flatout.report.page import draw_all
    from flatout.report.verdict import verdict

    summary["verdict"] = verdict(summary, [record.to_plain() for record in progress.records], session.recipe)
    run_files.write_json(session.out / run_files.SUMMARY, summary)
    began = time.perf_counter()
    if session.options.report:
        draw_all(session.out)
    summary["time_seconds"]["pictures"] = time.perf_counter() - began
    summary["wall_seconds"] = session.wall_seconds(progress)
    run_files.write_json(session.out / run_files.SUMMARY, summary)
    _say(session, summary)


def _memory(session: "Session", engine: "Engine") -> dict[str, int | None]:
    """Return the host memory of all processes together, and the most of any device."""
    peaks = session.world.all_gather_object((peak_rss_bytes(), engine.peak_memory_bytes()))
    device = [d for _, d in peaks if d is not None]
    return {"peak_rss_bytes": sum(host for host, _ in peaks), "peak_device_bytes": max(device) if device else None}


def _write_weights(run: _Ended, task: "Task", found: Calibration | None) -> None:
    from flatout.models.weights import save_tensors

    recipe = run.session.recipe
    # Averaged weights take the place of the last ones.
    tensors = {
        name.removeprefix(prefix): value
        for prefix in ("model.", "ema.")
        for name, value in run.state.items()
        if name.startswith(prefix)
    }
    metadata = {
        "format": "pt",
        "flatout": __version__,
        "model": recipe.model,
        "classes": json.dumps(run.pack.classes),
        "image_size": json.dumps(recipe.image_size),
        "stored_size": json.dumps(one_or_both(recipe.stored_sides)),
        "eval_size": json.dumps(one_or_both(recipe.eval_sides)),
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
    save_tensors(run.session.out / run_files.WEIGHTS, tensors, metadata)


def _summary(run: _Ended, results: "dict[str, Evaluation]") -> dict[str, Any]:
    """Return the content of summary.json; `results` are those of the run, with thresholds and temperature."""
    from flatout.engine.devices import machine

    session, engine, pack, progress = run.session, run.engine, run.pack, run.progress
    recipe = session.recipe
    chosen = progress.best_epoch if progress.best else len(progress.history)
    record, task = progress.history[chosen - 1] if chosen else progress.head, engine.task
    trained_parameters = session.trained_parameters
    if session.stage and not progress.history:
        # The run has chosen the parameters of the head alone.
        fitted = session.stage.fitted
        trained_parameters = fitted.weight.size + fitted.bias.size * session.stage.head.has_bias
    figures: dict[str, Any] = {"train_loss": record.train_loss if record else None}
    figures[f"train_{task.step_metric}"] = record.of("train")[task.step_metric] if record else None
    for name in ("valid", "test"):
        found: dict[str, Any] = dict.fromkeys(("loss", *task.metric_names, "count"))
        if name in results:
            found |= {"loss": results[name].loss, **results[name].metrics, "count": len(results[name].labels)}
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    class_counts = {
        f"{n}_class_counts": count_classes(s.labels, len(pack.classes)).tolist() for n, s in run.samples.items()
    }
    if "test" in results:
        answers = results["test"].task.decided(results["test"].predicted)
        answers = answers if answers.ndim == 2 else answers[answers >= 0]
        class_counts["test_predicted_counts"] = count_classes(answers, len(pack.classes)).tolist()
    seconds = session.seconds | {"train": progress.train_seconds, "evaluate": progress.evaluate_seconds}
    trained_for = progress.train_seconds
    return {
        "job": recipe.job,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": recipe.model,
        "engine": session.options.engine,
        "devices": session.devices,
        "world_size": session.device_count,
        "threads_per_rank": engine.threads,
        "batch_size": recipe.batch_size,
        "epochs": recipe.epochs,
        "epochs_trained": progress.epoch,
        "best_epoch": progress.best_epoch or None,
        "kept_epoch": chosen if chosen or progress.head else None,
        "tta": recipe.tta,
        "task": recipe.task,
        "seed": recipe.seed,
        "parameters": session.parameters,
        "trained_parameters": trained_parameters,
        "classes": list(pack.classes),
        **{f"{name}_images": len(samples) for name, samples in run.samples.items()},
        "images_trained": progress.images_trained,
        "images_per_second": progress.images_trained / trained_for if trained_for else None,
        "train_seconds": trained_for,
        "setup_seconds": session.setup_seconds,
        "wall_seconds": session.wall_seconds(progress),
        **figures,
        "train_loss_by_step": progress.step_losses,
        **class_counts,
        "input_wait_fraction": progress.wait_seconds / trained_for if trained_for else None,
        "communication_fraction": _communication(progress),
        "warmup_seconds": progress.warmup_seconds,
        "stopped": run.reason or None,
        "notes": session.notes,
        "time_seconds": seconds,
        "pack": str(pack.folder.absolute()) if pack.folder else None,
        "pack_fingerprint": pack.fingerprint,
        "pack_was_cached": pack.was_cached,
        "skipped_images": pack.skipped,
        "machine": machine(),
        "runs_on": engine.describe(),
        "versions": versions(),
    }


def _communication(progress: Progress) -> float | None:
    """Return the share of the training time spent on adding up; None where the device does that by itself."""
    if not progress.train_seconds or not np.isfinite(progress.communication_seconds):
        return None
    return progress.communication_seconds / progress.train_seconds


def versions() -> dict[str, str]:
    """Return the versions of Python and of what determines results."""
    packages = ("torch", "numpy", "timm", "pillow", "simplejpeg", "safetensors")
    return {"flatout": __version__, "python": platform.python_version(), **installed(*packages)}


def _say(session: "Session", summary: dict[str, Any]) -> None:
    say = session.console.note
    for name in ("test", "valid"):
        if summary[f"{name}_count"]:
            say(describe_metrics(name, summary))
            break
    if summary["images_per_second"]:
        say(
            f"trained {summary['images_trained']:,} images in {summary['train_seconds']:.1f} s: "
            f"{summary['images_per_second']:,.0f} per second"
        )
    for stage, layers, seconds in stages(summary, session.recipe.to_dict()):
        say(f"{stage}: {layers}" + f" ({seconds})" * bool(seconds))
    for sentence in summary["verdict"]:
        say(sentence)
    if session.options.report:
        say(f"report: {session.out / run_files.REPORT}")
