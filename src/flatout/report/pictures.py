"""The pictures of a run: predictions, curves of training, all answers and their trust. Values may be missing or NaN.

Shape letters: M images, H height, W width, C channels, K classes.
"""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.tasks import Task, confusion
from flatout.utils import style
from flatout.utils.run_files import JsonObject, Predictions
from flatout.utils.style import finite, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[JsonObject]

SHARES = ("accuracy", "map")  # in 0..1
LINES = {"train": ("#7c8894", "-"), "valid": (style.RIGHT, "-"), "test": (style.ORANGE, (0, (4, 1.6)))}

GRID_COLUMNS, CELL_INCHES = 5, 1.5
SMOOTH_FROM_PIXELS = 96  # smaller images are enlarged by whole pixels, so that the model's input is visible
# Maximum opacity of a heatmap.
OPACITY = 0.8
LOG_LOSS_FROM_RATIO = 50.0  # beyond this, a linear axis shows one spike and a flat line
# An axis that shows less than this makes noise look like a trend: in units of accuracy, and as a share of the loss.
MIN_ACCURACY_SPAN, MIN_LOSS_SPAN = 0.1, 0.25
# Up to this many epochs, the training loss is drawn by steps: a few epoch means are not a curve.
LOSS_BY_STEP_UP_TO_EPOCHS = 4
# Up to this many classes, the cells of a confusion matrix have numbers.
NUMBERS_UP_TO_CLASSES = 15
LABELS_AT_MOST, LABEL_WIDTH = 51, 20
# Maximum number of classes drawn as bars, those with the lowest F1.
CLASSES_DRAWN = 40
# Maximum points of an ROC or precision-recall curve, and maximum curves of single classes.
POINTS, CURVES = 200, 40
UNIT_SQUARE: dict[str, Any] = {"xlim": (-0.02, 1.02), "ylim": (-0.02, 1.04)}


def draw_predictions(
    path: Path, images_MHWC: np.ndarray, actual: np.ndarray, predicted: np.ndarray, classes: Sequence[str], task: Task
) -> None:
    """Write a grid of images uint8 [M, H, W, 1 or 3] titled "actual / predicted", blue if right, red if wrong."""
    rows = max(1, math.ceil(len(images_MHWC) / GRID_COLUMNS))
    # Images that are not square are up to twice as high or wide.
    shape = np.clip(images_MHWC.shape[1] / images_MHWC.shape[2], 0.5, 2)
    height = rows * (CELL_INCHES * shape + 0.27) + 0.36
    right_M = task.is_right(predicted, actual)
    count = f"{len(actual)} images" if right_M is None else f"{right_M.sum()} of {len(actual)} right"
    title = f"{count} (actual / predicted)"
    figure = style.new_figure(GRID_COLUMNS * CELL_INCHES, height, dpi=140, layout=None, title=title)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.05 / height, top=1 - 0.6 / height, wspace=0.05, hspace=0.2)
    for number, (image_HWC, a, p) in enumerate(zip(images_MHWC, actual, predicted, strict=True), start=1):
        axes = figure.add_subplot(rows, GRID_COLUMNS, number)
        axes.set_axis_off()
        image = image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC
        smooth = max(image.shape[:2]) >= SMOOTH_FROM_PIXELS
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="antialiased" if smooth else "nearest")
        colour = style.INK if right_M is None else style.RIGHT if right_M[number - 1] else style.WRONG
        text = axes.set_title("", fontsize=7.5, color=colour, family=style.families(), parse_math=False, pad=3)
        names = task.text(a, classes), task.text(p, classes)
        for columns in range(40, 2, -1):
            text.set_text(" / ".join(shorten(name, columns) for name in names))
            with style.no_glyph_warnings():
                if text.get_window_extent().width <= 0.93 * CELL_INCHES * figure.dpi:
                    break
    style.write_png(figure, path)


def draw_curves(path: Path, metrics: Lines, summary: JsonObject, task: Task) -> None:
    """Write loss and the task's metric per epoch as a PNG, and the learning rate below them if it changes."""
    panels: Any = [["loss", task.metric_names[0]]] + [["learning_rate"] * 2] * learning_rate_changes(metrics)
    figure = style.new_figure(9.0, 2.1 + 1.2 * len(panels))
    for quantity, axes in figure.subplot_mosaic(panels, height_ratios=(4, 1)[: len(panels)]).items():
        draw_panel(axes, metrics, summary, quantity, task)
    style.write_png(figure, path)


def curve_svg(metrics: Lines, summary: JsonObject, quantity: str, task: Task) -> str:
    """Return one panel of `draw_curves` as an SVG element whose colours are CSS variables, for light and dark pages."""
    figure = style.new_figure(4.7, 2.0 if quantity == "learning_rate" else 3.1, dpi=72)
    draw_panel(figure.add_subplot(), metrics, summary, quantity, task)
    return as_svg(figure, quantity)


def as_svg(figure: "Figure", name: str) -> str:
    """Return a figure as an SVG element whose colours are CSS variables; `name` is unique on the page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    # Element ids use a fixed salt, so that equal runs have equal pages.
    with style.no_glyph_warnings(), rc_context({"svg.hashsalt": "flatout"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("#ffffff", "none")
    variables = {style.INK: "ink", style.MUTED: "muted", style.FAINT: "line", style.WRONG: "wrong"}
    for colour, variable in [*variables.items(), *((colour, name) for name, (colour, _) in LINES.items())]:
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)  # several panels share one page


def overlaid(image_HWC: np.ndarray, heatmap_HW: np.ndarray) -> np.ndarray:
    """Return an image uint8 [H, W, 1 or 3] in grey under its heatmap in colour, uint8 [H, W, 3]."""
    import matplotlib

    # The darkest colours of the map would look like shadows of the image.
    colours = matplotlib.colormaps["plasma"](0.3 + 0.7 * heatmap_HW)[..., :3] * 255
    opacity = OPACITY * heatmap_HW[..., None] ** 0.7
    return ((1 - opacity) * image_HWC.mean(axis=2, keepdims=True) + opacity * colours).round().astype(np.uint8)


def heat_scale(steps: int = 9) -> np.ndarray:
    """Return the colours of a heatmap on medium grey, from none to the most, uint8 [1, steps, 3]."""
    return overlaid(np.full((1, steps, 1), 128, np.uint8), np.linspace(0, 1, steps)[None])


def learning_rate_changes(metrics: Lines) -> bool:
    """Whether the learning rate differs between epochs."""
    return len({rate for line in metrics if (rate := finite(line.get("learning_rate"))) is not None}) > 1


def draw_panel(axes: "Axes", metrics: Lines, summary: JsonObject, quantity: str, task: Task) -> None:
    """Draw "loss", "accuracy", another metric of a task, or "learning_rate" against the epoch."""
    from matplotlib.ticker import MaxNLocator

    title = task.metric_title if quantity == task.metric_names[0] else quantity.replace("_", " ").capitalize()
    style.style_panel(axes, title, "epoch")
    is_rate = quantity == "learning_rate"
    epochs = [line["epoch"] for line in metrics]
    keys = {"": quantity} if is_rate else {split: f"{split}_{quantity}" for split in LINES}
    by_step = _loss_by_step(metrics, summary) if quantity == "loss" else []
    drawn = [loss for _, loss in by_step]
    if by_step:
        axes.plot(*zip(*by_step, strict=True), color=LINES["train"][0], linewidth=1.2, label="train, by step")
    for split, key in keys.items():
        values = [finite(line.get(key)) for line in metrics]
        known = [value for value in values if value is not None]
        drawn += known
        if not known or (by_step and split == "train"):
            continue
        colour, dash = LINES.get(split, (style.MUTED, "-"))
        axes.plot(
            epochs, [math.nan if value is None else value for value in values], color=colour, linestyle=dash,
            linewidth=1.6, label=f"{split}  {style.number(known[-1])}" if split else None,
            marker="o" if len(epochs) <= 12 else "", markersize=3.5, solid_capstyle="round",
        )  # fmt: skip
    if not drawn:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center", va="center", color=style.MUTED)
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.1 if by_step else epochs[0] - 0.5, epochs[-1] + (0.1 if by_step else 0.5))
    if is_rate:
        axes.set_ylim(0, max(drawn) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        return
    _scale_axis(axes, quantity, min(drawn), max(drawn))
    _mark_kept(axes, metrics, summary, quantity)
    style.add_legend(axes, handlelength=1.8)


def _loss_by_step(metrics: Lines, summary: JsonObject) -> list[tuple[float, float]]:
    """Return (epoch, training loss) by steps in a run of few epochs; empty in a long one, or if none were recorded."""
    if not metrics or len(metrics) > LOSS_BY_STEP_UP_TO_EPOCHS or not metrics[-1].get("step"):
        return []
    first = next(line for line in metrics if line["epoch"])  # the last one may be shorter
    steps_per_epoch = first["step"] / first["epoch"]
    points = summary.get("train_loss_by_step") or []
    return [(step / steps_per_epoch, loss) for step, loss in points if finite(loss) is not None]


def _scale_axis(axes: "Axes", quantity: str, least: float, most: float) -> None:
    if quantity not in SHARES and least > 0 and most > LOG_LOSS_FROM_RATIO * least:
        axes.set_yscale("log")
        return
    span = MIN_ACCURACY_SPAN if quantity in SHARES else MIN_LOSS_SPAN * most
    missing = max(0.0, span - (most - least)) / 2
    margin = 0.05 * max(span, most - least) or 0.5
    low, high = least - missing, most + missing
    if quantity in SHARES:
        low, high = (1 - span, 1.0) if high > 1 else (0.0, span) if low < 0 else (low, high)
        low, high = min(low, least), max(high, most)
    axes.set_ylim(low - margin, high + margin)


def _mark_kept(axes: "Axes", metrics: Lines, summary: JsonObject, quantity: str) -> None:
    kept: Any = summary.get("kept_epoch") or summary.get("best_epoch")
    scores = {line["epoch"]: finite(line.get(f"valid_{quantity}")) for line in metrics}
    if kept in scores and len(metrics) > 1:
        score = scores[kept]
        label = f"kept: epoch {kept}" + ("" if score is None else f", valid {style.number(score)}")
        axes.axvline(kept, color=style.MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0, label=label)


def draw_answers(path: Path, shown: Predictions, classes: Sequence[str], task: Task) -> None:
    """Write the picture of all predictions of a run: `confusion.png`."""
    if task.name == "regression":
        found = task.metrics(shown.predicted, shown.labels)
        title = f"Mean absolute error {style.plain(found['mae'])}, R² {found['r2']:.3f}"
        draw_numbers(path, shown.predicted, shown.labels, title)
    elif task.name == "multi-label":
        draw_class_scores(path, task.per_class(shown.predicted, shown.labels, classes))
    else:
        matrix_KK = confusion(shown.predicted, shown.labels, len(classes))
        draw_confusion(path, matrix_KK, classes, len(shown.labels))


def draw_confusion(path: Path, matrix_KK: np.ndarray, classes: Sequence[str], total: int) -> None:
    """Write the confusion matrix: counts [K, K], a row per actual class, a column per predicted class.

    A cell's colour is its share of the row, blue on the diagonal and red off it, on a square-root scale so that rare
    mistakes are visible; rows of classes without images are grey.
    """
    from matplotlib.colors import to_rgb

    K = len(classes)
    row_totals = matrix_KK.sum(axis=1, keepdims=True)
    shares_KK = matrix_KK / np.maximum(row_totals, 1)
    full_KKC = np.where(np.eye(K, dtype=bool)[..., None], to_rgb(style.RIGHT), to_rgb(style.WRONG))
    colours_KKC = 1 + (full_KKC - 1) * np.sqrt(shares_KK)[..., None]
    colours_KKC[row_totals[:, 0] == 0] = to_rgb(style.EMPTY)
    side = float(np.clip(2.6 + 0.42 * K, 4.2, 9.5))
    figure = style.new_figure(side + 0.6, side + 0.5, dpi=150)
    axes = figure.add_subplot()
    axes.imshow(colours_KKC)
    correct = int(np.trace(matrix_KK))
    title = f"Accuracy {correct / total:.3f}: {correct:,} of {total:,} right" if total else "No predictions"
    axes.set_title(title, fontsize=11, weight="bold", color=style.INK, loc="left", pad=10)
    _label_classes(axes, classes)
    if K <= NUMBERS_UP_TO_CLASSES:
        for (row, column), count in np.ndenumerate(matrix_KK):
            colour = style.readable_on(colours_KKC[row, column])
            text = "" if not count else f"{int(count):,}" if count < 100_000 else f"{count:.0e}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5 if K > 5 else 10, color=colour)
        axes.set_xticks(np.arange(0.5, K - 1), minor=True)
        axes.set_yticks(np.arange(0.5, K - 1), minor=True)
        axes.grid(which="minor", color="#ffffff", linewidth=1.2)
        axes.tick_params(which="minor", length=0)
    style.write_png(figure, path)


def _label_classes(axes: "Axes", classes: Sequence[str]) -> None:
    K, few = len(classes), len(classes) <= NUMBERS_UP_TO_CLASSES
    ticks = range(0, K, math.ceil(K / LABELS_AT_MOST))
    labels = [shorten(classes[tick], LABEL_WIDTH) for tick in ticks]
    text: dict[str, Any] = {"family": style.families(), "parse_math": False, "color": style.INK}
    text["fontsize"] = 8 if few else 6.5
    slant: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if few else {"rotation": 90}
    axes.set_xticks(ticks, labels, **text, **slant)
    axes.set_yticks(ticks, labels, **text)
    axes.set_xlabel("predicted  (colour: share of the row, square-root scale)", fontsize=8, color=style.MUTED)
    axes.set_ylabel("actual", fontsize=8, color=style.MUTED)
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_color(style.FAINT)


def draw_class_scores(path: Path, every: Sequence[JsonObject]) -> None:
    """Write precision, recall and F1 as bars, lowest F1 first; `every` is from `Task.per_class`, of which the worst."""
    rows = sorted((row for row in every if row["support"]), key=lambda row: row["f1"])[:CLASSES_DRAWN]
    figure = style.new_figure(7.0, 1.8 + 0.36 * len(rows), dpi=150)
    axes = figure.add_subplot()
    shown = f", the {len(rows)} worst of {len(every)} classes" if len(rows) < len(every) else ""
    style.style_panel(axes, f"Precision, recall and F1{shown}")
    axes.grid(visible=False, axis="y")
    colours = {"precision": style.ORANGE, "recall": style.MUTED, "f1": style.RIGHT}
    for number, (key, colour) in enumerate(colours.items()):
        heights = [position + 0.26 * (number - 1) for position in range(len(rows))]
        axes.barh(heights, [row[key] for row in rows], height=0.24, color=colour, label=key.replace("f1", "F1"))
    names = [f"{shorten(row['class'], LABEL_WIDTH)} ({row['support']:,})" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8, family=style.families(), parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    style.write_png(figure, path)


def draw_numbers(path: Path, answers: np.ndarray, labels: np.ndarray, title: str) -> None:
    """Write a scatter plot of predicted against actual numbers."""
    figure = style.new_figure(5.4, 5.4, dpi=150)
    axes = figure.add_subplot()
    style.style_panel(axes, title, "actual")
    axes.set_ylabel("predicted", fontsize=8, color=style.MUTED)
    is_finite = np.isfinite(answers)
    known = np.concatenate([labels, answers[is_finite]])
    ends = [float(known.min()), float(known.max())]
    axes.plot(ends, ends, color=style.FAINT, linewidth=1.2, zorder=1)
    axes.scatter(labels[is_finite], answers[is_finite], s=8, alpha=0.5, color=style.RIGHT, linewidths=0, zorder=2)
    axes.set_aspect("equal", adjustable="datalim")
    if max(map(abs, ends)) >= 10_000:  # 400,000 in place of 0.4 and a factor of 1e6 at the end of the axis
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
    style.write_png(figure, path)


def trust_charts(found: JsonObject, shown: Predictions, task: Task, names: Sequence[str]) -> dict[str, str]:
    """Return SVG elements by their names: the reliability diagram of `trust`, and ROC and precision-recall curves."""
    drawn = {}
    if "reliability_after" in found:
        figure = style.new_figure(4.7, 3.4, dpi=72)
        _draw_reliability(figure.add_subplot(), found)
        drawn["reliability diagram"] = as_svg(figure, "reliability")
    if decisions := task.decisions(shown.labels, shown.probabilities, names):
        roc, precision = (style.new_figure(4.7, 3.4, dpi=72) for _ in range(2))
        _draw_decisions(roc.add_subplot(), precision.add_subplot(), decisions)
        drawn |= {"ROC curve": as_svg(roc, "ROC"), "precision-recall curve": as_svg(precision, "precision")}
    return drawn


def _draw_reliability(axes: "Axes", found: JsonObject) -> None:
    style.style_panel(axes, "Reliability: accuracy by probability", "probability of the answer")
    axes.plot([0, 1], [0, 1], color=style.FAINT, linewidth=1.2, label="perfect")
    for name, colour in (("before", style.MUTED), ("after", style.RIGHT)):
        rows, label = found[f"reliability_{name}"], f"{name} scaling, error {found[f'ece_{name}']:.3f}"
        x, y, counts = (np.array([row[key] for row in rows]) for key in ("confidence", "accuracy", "count"))
        axes.plot(x, y, color=colour, linewidth=0.9, label=label)
        # The area of a point is its share of the images, so that noisy bins look small.
        axes.scatter(x, y, s=4 + 220 * counts / counts.sum(), color=colour, linewidths=0, alpha=0.85, zorder=3)
    axes.set(**UNIT_SQUARE)
    style.add_legend(axes, loc="lower right")


def _draw_decisions(roc: "Axes", precision: "Axes", decisions: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Draw ROC and precision-recall curves: the main one, labelled with its area, and those of single classes."""
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

    style.style_panel(roc, "ROC curve: true positive rate", "false positive rate")
    style.style_panel(precision, "Precision-recall curve: precision", "recall")
    roc.plot([0, 1], [0, 1], color=style.FAINT, linewidth=1.2)
    for number, (name, *both) in enumerate(decisions[: CURVES + 1]):
        false_positive_rate, true_positive_rate, _ = roc_curve(*both)
        shares, recall, _ = precision_recall_curve(*both)
        for axes, x, y, area in (
            (roc, false_positive_rate, true_positive_rate, roc_auc_score),
            (precision, recall, shares, average_precision_score),
        ):
            looks: dict[str, Any] = {"color": style.MUTED, "linewidth": 0.5, "label": "each class" * (number == 1)}
            if number == 0:
                label = f"{shorten(name, 24)}, area {area(*both):.3f}"
                looks = {"color": style.RIGHT, "linewidth": 1.8, "zorder": 3, "label": label}
            kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(np.int64))
            axes.plot(x[kept], y[kept], **looks)
    for axes, place in ((roc, "lower right"), (precision, "lower left")):
        axes.set(**UNIT_SQUARE)
        style.add_legend(axes, loc=place)
