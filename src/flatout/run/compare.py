"""Whether two runs differ by more than chance, from the answers for the same images that both have saved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import InputError
from flatout.numerics.calibration import mcnemar, smaller_errors, wilson
from flatout.report.run_files import PREDICTIONS, Predictions, RunFiles, read_run
from flatout.style import plain
from flatout.tasks import task_named

# Runs differ if chance alone gives such a difference less often.
SIGNIFICANCE = 0.05
# Of images in other sizes or crops, the brightness is nearly the same; that of other images is not.
LEAST_CORRELATION = 0.7


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return the results of two runs on the same images, and the p-value of their difference.

    One class or several: McNemar's exact test of how many images only one run got right. Numbers: Wilcoxon's
    signed-rank test of the absolute errors.

    Raises:
        InputError: a folder is no run, has no predictions, or has those of other images.
    """
    runs = (first, second)
    if first.resolve() == second.resolve():
        raise InputError(f"{first} and {second}: are the same run; name two")
    files = [read_run(run) for run in runs]
    saved = [_predictions(one) for one in files]
    _check_same(runs, files, saved)
    task, a = task_named(files[0].summary.get("task")), saved[0]
    found = {"runs": [str(run) for run in runs], "task": task.name, "split": a.split, "count": len(a.labels)}
    right = [task.is_right(one.predicted, one.labels) for one in saved]
    if right[0] is None or right[1] is None:
        errors = [np.abs(one.predicted.astype(np.float64) - one.labels) for one in saved]
        fewer, p_value = smaller_errors(*errors)
        found |= {"test": "Wilcoxon", "metric": "mae", "values": [float(e.mean()) for e in errors]}
        found |= {"only_right": None, "smaller_errors": fewer}
    else:
        *only, p_value = mcnemar(right[0], right[1])
        counts = [int(one.sum()) for one in right if one is not None]
        found |= {"test": "McNemar", "metric": task.step_metric, "values": [n / len(a.labels) for n in counts]}
        found |= {"intervals": [wilson(n, len(a.labels)) for n in counts], "only_right": only}
    return {**found, "p_value": p_value, "differ": p_value < SIGNIFICANCE}


def _predictions(files: RunFiles) -> Predictions:
    if files.predictions is None:
        reason = files.missing.get(PREDICTIONS, "")
        raise InputError(f"{files.run}: has no predictions to compare. {reason}")
    return files.predictions


def _check_same(runs: Sequence[Path], files: Sequence[RunFiles], saved: Sequence[Predictions]) -> None:
    """Raise InputError unless the predictions are for the same images, with the same labels."""
    a, b = saved
    both = f"{runs[0]} and {runs[1]}: cannot be compared"
    fix = "compare runs with the same test data"
    for what, found in (
        ("task", [one.summary.get("task") for one in files]),
        ("split", [one.split for one in saved]),
        ("number of images", [len(one.labels) for one in saved]),
    ):
        if found[0] != found[1]:
            raise InputError(f"{both}: {what} is {found[0]} in the first, {found[1]} in the second; {fix}")
    if files[0].summary.get("classes") != files[1].summary.get("classes"):
        raise InputError(f"{both}: their classes differ; {fix}")
    is_same = np.array_equal(a.labels, b.labels)
    if a.row is not None and b.row is not None:
        is_same &= np.array_equal(a.row, b.row)
    if a.brightness is not None and b.brightness is not None:
        is_same &= _look_alike(a.brightness, b.brightness)
    if not is_same:
        raise InputError(
            f"{both}: their {a.split} images are not the same; {fix}, and the same seed if it is split off"
        )


def _look_alike(a: np.ndarray, b: np.ndarray) -> bool:
    if np.allclose(a, b, atol=1e-3):
        return True
    return bool(a.std() > 0 and b.std() > 0 and np.corrcoef(a, b)[0, 1] >= LEAST_CORRELATION)


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the result of `compare` in words."""
    names, values = result["runs"], result["values"]
    metric = task_named(result["task"]).metric_title.lower() if result["metric"] == "mae" else result["metric"]
    metric, images = metric.replace("_", " "), f"{result['count']:,} {result['split']} images"
    if result["only_right"] is None:
        lines = [f"{n}: {metric} {plain(v)}" for n, v in zip(names, values, strict=True)]
        counts = [
            f"the errors of {n} are smaller on {c:,}" for n, c in zip(names, result["smaller_errors"], strict=True)
        ]
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
