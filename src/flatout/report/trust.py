"""The report's section on calibration: numbers and charts."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.report.pictures import as_svg
from flatout.tasks.base import Curve, Task
from flatout.utils import style
from flatout.utils.run_files import Predictions
from flatout.utils.style import finite, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Maximum points of a curve, and maximum curves of single classes.
POINTS, CURVES = 200, 40
SET_COLUMNS = ("wanted", "sets with the right class", "sets of one class", "classes per set")


def facts(summary: Mapping[str, Any], split: str) -> list[tuple[str, str]]:
    """Return names and values, as text; `split` is `test` or `valid`."""
    found = summary.get("trust") or {}
    rows: list[tuple[str, str]] = []
    interval = summary.get(f"{split}_accuracy_interval")
    if isinstance(interval, list) and len(interval) == 2:
        rows.append(("95 % confidence interval", "–".join(f"{end:.3f}" for end in interval)))
    names = {
        "balanced_accuracy": "balanced accuracy",
        "top5_accuracy": "top-5 accuracy",
        "roc_auc": "area under ROC",
    }
    values = {name: finite(summary.get(f"{split}_{key}")) for key, name in names.items()}
    rows += [(name, f"{value:.3f}") for name, value in values.items() if value is not None]
    before, after = finite(found.get("ece_before")), finite(found.get("ece_after"))
    if before is not None and after is not None:
        rows += [("calibration error", f"{after:.3f}"), ("before temperature scaling", f"{before:.3f}")]
    if (temperature := finite(found.get("temperature"))) is not None:
        rows.append(("temperature", f"{temperature:.3g}"))
    if (share := finite((found.get("unknown") or {}).get("flagged"))) is not None:
        rows.append(("images answered “unknown”", f"{100 * share:.1f}\u00a0%"))
    return rows


def sets(summary: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return a row for each coverage of prediction sets, with the columns `SET_COLUMNS`."""
    found = (summary.get("trust") or {}).get("prediction_sets") or ()
    keys = {"coverage", "covered", "single", "mean_size"}
    return [
        (f"{100 * row['coverage']:g}\u00a0%", row["covered"], row["single"], Decimal(f"{row['mean_size']:.2f}"))
        for row in found
        if keys <= row.keys()
    ]


def charts(summary: Mapping[str, Any], shown: Predictions | None, task: Task, names: Sequence[str]) -> dict[str, str]:
    """Return SVG elements by their names: the reliability diagram, and ROC and precision-recall curves."""
    found, drawn = summary.get("trust") or {}, {}
    if all(_bins(found, name) for name in ("before", "after")):
        figure = style.new_figure(4.7, 3.4, dpi=72)
        _draw_reliability(figure.add_subplot(), found)
        drawn["reliability diagram"] = as_svg(figure, "reliability")
    curves = task.curves(shown.labels, shown.probabilities, names) if shown else []
    for name, draw in (("ROC curve", _draw_roc), ("precision-recall curve", _draw_precision)) if curves else ():
        figure = style.new_figure(4.7, 3.4, dpi=72)
        draw(figure.add_subplot(), curves)
        drawn[name] = as_svg(figure, name.partition(" ")[0].partition("-")[0])
    return drawn


def _bins(found: Mapping[str, Any], name: str) -> list[Mapping[str, float]]:
    """Return the bins of the reliability diagram that are complete."""
    rows = found.get(f"reliability_{name}") or ()
    return [row for row in rows if {"confidence", "accuracy", "count"} <= row.keys()]


def _draw_reliability(axes: "Axes", found: Mapping[str, Any]) -> None:
    style.style_panel(axes, "Reliability: accuracy by probability", "probability of the answer")
    axes.plot([0, 1], [0, 1], color=style.FAINT, linewidth=1.2, label="perfect")
    for name, colour in (("before", style.MUTED), ("after", style.RIGHT)):
        rows, error = _bins(found, name), finite(found.get(f"ece_{name}"))
        label = f"{name} scaling" + (f", error {error:.3f}" if error is not None else "")
        x, y, counts = (np.array([row[key] for row in rows]) for key in ("confidence", "accuracy", "count"))
        axes.plot(x, y, color=colour, linewidth=0.9, label=label)
        # The area of a point is its share of the images, so that noisy bins look small.
        axes.scatter(x, y, s=4 + 220 * counts / counts.sum(), color=colour, linewidths=0, alpha=0.85, zorder=3)
    _unit_square(axes)
    style.add_legend(axes, loc="lower right")


def _draw_roc(axes: "Axes", curves: Sequence[Curve]) -> None:
    style.style_panel(axes, "ROC curve: true positive rate", "false positive rate")
    axes.plot([0, 1], [0, 1], color=style.FAINT, linewidth=1.2)
    for one, looks in _looks(curves, "roc_auc"):
        axes.plot(*_thinned(one.false_positive_rate, one.true_positive_rate), **looks)
    _unit_square(axes)
    style.add_legend(axes, loc="lower right")


def _draw_precision(axes: "Axes", curves: Sequence[Curve]) -> None:
    style.style_panel(axes, "Precision-recall curve: precision", "recall")
    for one, looks in _looks(curves, "average_precision"):
        axes.plot(*_thinned(one.recall, one.precision), **looks)
    _unit_square(axes)
    style.add_legend(axes, loc="lower left")


def _looks(curves: Sequence[Curve], area: str) -> list[tuple[Curve, dict[str, Any]]]:
    """Return the curves with their styles: the main one, labelled with its area, and those of single classes."""
    name = f"{shorten(curves[0].name, 24)}, area {getattr(curves[0], area):.3f}"
    main: dict[str, Any] = {"color": style.RIGHT, "linewidth": 1.8, "zorder": 3, "label": name}
    thin: dict[str, Any] = {"color": style.MUTED, "linewidth": 0.5}
    looks = [main, thin | {"label": "each class"}, *[thin] * CURVES]
    return list(zip(curves[: CURVES + 1], looks, strict=False))


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(np.int64))
    return x[kept], y[kept]


def _unit_square(axes: "Axes") -> None:
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.04)
