"""Evaluate a finished run, on its own test data or on other data; and compare two runs on the same images."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import scipy

from flatout.data.batches import Split
from flatout.data.build import load
from flatout.data.detect import find
from flatout.data.pack import Pack, load_once_per_host
from flatout.data.splits import splits_of
from flatout.distributed.environment import launched
from flatout.distributed.world import World
from flatout.engine.base import Evaluation
from flatout.engine.devices import XLA_PRECISIONS, engine_for, parse_devices, spec_of
from flatout.engine.factory import make_engine, precisions, run_on_devices
from flatout.models.build import copied
from flatout.tasks import task_named, wilson
from flatout.utils.console import Console
from flatout.utils.errors import InputError
from flatout.utils.run_files import PREDICTIONS, JsonObject, Predictions, RunFiles, read_run
from flatout.utils.style import plain

if TYPE_CHECKING:
    from flatout.inference.calibration import Calibration
    from flatout.inference.run import Run

# Significance level: runs differ if chance gives such a difference less often.
SIGNIFICANCE = 0.05
# The same images in another size or crop have nearly the same brightness; other images do not.
MIN_CORRELATION = 0.7


def evaluate(run: "Run", data: object, *, devices: str, engine: str, console: Console, tta: bool = False) -> JsonObject:
    """See `Run.evaluate`. Several devices have one process each, as in training."""
    engine = engine_for(devices, engine)
    if devices == "auto" and launched() is None:
        # Starting a process per device would take longer than it saves.
        devices = parse_devices("auto", engine).names[0]
    arguments = (run, data, devices, engine, tta or run.recipe.tta)
    return run_on_devices(_evaluate, arguments, spec=devices, engine=engine, console=console)


def _evaluate(
    console: Console, world: World, run: "Run", data: object, devices: str, engine: str, tta: bool
) -> JsonObject:
    other = data is not None
    pack, labels = labelled(run, data, console, lambda load: load_once_per_host(world, load))
    calibration = run.calibration
    if calibration and calibration.remark:
        console.note(calibration.remark)
    stats = calibration.detector.stats if calibration and calibration.detector else None
    results: list[Evaluation] = []
    split, formats, names = "all", precisions(engine, world), list[str]()
    for member in run.members:
        recipe = member.recipe
        split, samples = held_out(member, pack, labels, other=other)
        if recipe.precision not in (formats or XLA_PRECISIONS["cpu"]):
            # Trained on other hardware.
            recipe = recipe.override({"precision": "auto"})
        built = make_engine(
            copied(member.model),  # the engine moves the model to a device and changes its mode
            recipe.override({"tta": tta}),
            engine=engine,
            devices=devices,
            world=world,
            report=console.note,
            cache_prefix=False,  # nothing is trained, so frozen layers do not matter
        )
        with contextlib.closing(built):
            results.append(
                built.place(samples).evaluate(
                    tta=tta,
                    with_probabilities=True,
                    with_logits=calibration is not None,
                    keep_features=stats.distances if stats else None,
                )
            )
            names = built.device_names
    name = prefix_of(split)
    loss, result = _joined([one.of_task(run.task) for one in results], own_parts=not other and split == "valid")
    figures = {"loss": loss, **result.metrics, "count": len(result.labels)}
    return {
        "run": str(run.path),
        "task": run.recipe.task,
        "split": split,
        **{f"{name}_{key}": value for key, value in figures.items()},
        **scores_of(name, result, run.classes, calibration),
        "tta": tta,
        "devices": spec_of([name for names in world.all_gather_object(names) for name in names]),
        "engine": engine,
    }


def prefix_of(split: str) -> str:
    """Return the prefix of the metrics of a split that `held_out` names; those of other data are called test."""
    return split if split in ("valid", "train") else "test"


def labelled(
    run: "Run", data: object, console: Console, once: Callable[[Callable[[], Pack]], Pack] = lambda load: load()
) -> tuple[Pack, np.ndarray]:
    """Return the pack of a run, or of other data in the form of its model, and labels as the run's class indices.

    `once` calls the function that loads the pack on one of several ranks.
    """
    recipe, other = run.recipe, data is not None
    if not other and not recipe.data.path:
        raise InputError(f"{run.path}: its data was given in Python; name other data with --data PATH")
    options = replace(recipe.data, images="", group_column="") if other else recipe.data

    def load_alone() -> Pack:
        found = find(data if other else recipe.data.path, options, recipe.task, console=console)
        return load(found, replace(recipe, data=options), cache=True, report=console)

    pack = once(load_alone)
    console.finish()
    console.note(pack.describe())
    return pack, pack.labels_among(run.classes, where=data if other else recipe.data.path)


def held_out(run: "Run", pack: Pack, labels: np.ndarray, *, other: bool) -> tuple[str, Split]:
    """Return name and samples of the split that evaluates a run: test, else validation, else train.

    `labels` and `other` are those of `labelled`: other data has only its own splits, or is one, "all".
    """
    split, rows = "all", np.arange(len(labels))
    if not other or len(pack.splits) > 1:
        data = replace(run.recipe.data, fold=0, folds=0) if other else run.recipe.data
        splits = splits_of(pack, data, run.recipe.seed)
        split = next((name for name in ("test", "valid") if name in splits), "train")
        rows = splits[split].rows
    return split, Split(images=pack.images, rows=rows, labels=labels[rows])


def scores_of(split: str, result: Evaluation, classes: Sequence[str], calibration: "Calibration | None") -> JsonObject:
    """Return the metrics of `summary.json` and `evaluate` that are computed once, after training.

    `result` has probabilities, and logits if `calibration` is given; `split` is the prefix of single metrics.
    """
    task, labels = result.task, result.labels
    assert result.probabilities is not None
    answers = task.decided(result.predicted)
    scores = task.scores(result.predicted, labels, result.probabilities)
    return {
        **{f"{split}_{name}": value for name, value in scores.items()},
        "per_class": task.per_class(answers, labels, classes),
        "confused_pairs": task.confused_pairs(answers, labels, classes),
        "trust": calibration.figures(result) if calibration else None,
    }


def _joined(results: list[Evaluation], *, own_parts: bool) -> tuple[float | None, Evaluation]:
    """Return the loss and the results of a run, or of a cross-validation, of whose folds each has a result.

    With `own_parts`, each fold was evaluated on its held-out images. Otherwise all were evaluated on the same images,
    and the mean of their probabilities is used, which has no loss.
    """
    first = results[0]
    if len(results) == 1:
        return first.loss, first
    if own_parts:
        names = ("labels", "predicted", "probabilities")
        parts: dict[str, object] = {name: np.concatenate([getattr(r, name) for r in results]) for name in names}
        joined = replace(first, **parts, loss_sum=sum(result.loss_sum for result in results))
        return joined.loss, joined
    mean = np.mean([p for result in results if (p := result.probabilities) is not None], axis=0)
    return None, replace(first, probabilities=mean, predicted=first.task.predicted_from(mean))


# --- two runs ---------------------------------------------------------------------------------------------------------


def compare(first: Path, second: Path) -> JsonObject:
    """Return the results of two runs on the same images, and the p-value of their difference.

    One class or several: McNemar's exact test of how many images only one run got right. Numbers: Wilcoxon's
    signed-rank test of the absolute errors.
    """
    if first.resolve() == second.resolve():
        raise InputError(f"{first} and {second}: are the same run; name two")
    files, saved = [read_run(run) for run in (first, second)], list[Predictions]()
    for one in files:
        if one.predictions is None:
            raise InputError(f"{one.run}: has no predictions to compare. {one.missing.get(PREDICTIONS, '')}")
        saved.append(one.predictions)
    _check_same(files, saved)
    task, a = task_named(files[0].summary.get("task")), saved[0]
    found = {"runs": [str(first), str(second)], "task": task.name, "split": a.split, "count": len(a.labels)}
    right = [task.is_right(one.predicted, one.labels) for one in saved]
    if right[0] is None or right[1] is None:
        errors = [np.abs(one.predicted.astype(np.float64) - one.labels) for one in saved]
        fewer = [int((errors[i] < errors[1 - i]).sum()) for i in (0, 1)]
        p_value = float(scipy.stats.wilcoxon(*errors).pvalue) if sum(fewer) else 1.0  # pyright: ignore
        found |= {"test": "Wilcoxon", "metric": "mae", "values": [float(e.mean()) for e in errors]}
        found |= {"only_right": None, "smaller_errors": fewer}
    else:
        *only, p_value = mcnemar(right[0], right[1])
        counts = [int(one.sum()) for one in right if one is not None]
        found |= {"test": "McNemar", "metric": task.step_metric, "values": [n / len(a.labels) for n in counts]}
        found |= {"intervals": [wilson(n, len(a.labels)) for n in counts], "only_right": only}
    return {**found, "p_value": p_value, "differ": p_value < SIGNIFICANCE}


def mcnemar(is_right: np.ndarray, is_right_too: np.ndarray) -> tuple[int, int, float]:
    """Return the numbers that only the first and only the second got right, and McNemar's exact p-value."""
    first, second = int((is_right & ~is_right_too).sum()), int((~is_right & is_right_too).sum())
    return first, second, float(scipy.stats.binomtest(first, first + second).pvalue) if first + second else 1.0


def _check_same(files: Sequence[RunFiles], saved: Sequence[Predictions]) -> None:
    """Raise InputError unless the predictions are for the same images, with the same labels and classes."""
    a, b = saved
    is_same_image = np.array_equal(a.labels, b.labels)
    if a.row is not None and b.row is not None:
        is_same_image &= np.array_equal(a.row, b.row)
    if a.brightness is not None and b.brightness is not None:
        is_same_image &= len(a.brightness) == len(b.brightness) and _look_alike(a.brightness, b.brightness)
    same = {key: files[0].summary.get(key) == files[1].summary.get(key) for key in ("task", "classes")}
    same |= {"split": a.split == b.split, f"{a.split} images": is_same_image}
    if different := [name for name, is_same in same.items() if not is_same]:
        fix = "compare runs with the same test data, and the same seed if it is split off"
        what = f"not the same {', '.join(different)}"
        raise InputError(f"{files[0].run} and {files[1].run}: cannot be compared: {what}; {fix}")


def _look_alike(a: np.ndarray, b: np.ndarray) -> bool:
    if np.allclose(a, b, atol=1e-3):
        return True
    return bool(a.std() > 0 and b.std() > 0 and np.corrcoef(a, b)[0, 1] >= MIN_CORRELATION)


def format_comparison(result: JsonObject) -> list[str]:
    """Return the result of `compare` in words."""
    names, values = result["runs"], result["values"]
    metric = task_named(result["task"]).metric_title.lower() if result["metric"] == "mae" else result["metric"]
    metric, images = metric.replace("_", " "), f"{result['count']:,} {result['split']} images"
    if result["only_right"] is None:
        lines = [f"{n}: {metric} {plain(v)}" for n, v in zip(names, values, strict=True)]
        fewer = zip(names, result["smaller_errors"], strict=True)
        counts = [f"the errors of {n} are smaller on {c:,}" for n, c in fewer]
    else:
        rows = zip(names, values, result["intervals"], strict=True)
        lines = [f"{n}: {metric} {v:.4f}, 95 % interval {low:.4f} to {high:.4f}" for n, v, (low, high) in rows]
        counts = [f"only {n} is right on {c:,}" for n, c in zip(names, result["only_right"], strict=True)]
    verdict = "they differ" if result["differ"] else "the difference may be chance"
    return [
        *lines,
        f"of {images}, {', '.join(counts)}",
        f"{result['test']} test: p = {result['p_value']:.3g}, {verdict}",
    ]
