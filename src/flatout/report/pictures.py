"""The pictures of a run: predictions and curves of training. Values to draw may be missing, None or NaN.

Shape letters: M images, H height, W width, C channels, K classes.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.report.html import SMOOTH_FROM_PIXELS
from flatout.tasks import task_named
from flatout.tasks.base import Task
from flatout.utils import style
from flatout.utils.style import finite, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]

SHARES = ("accuracy", "map")  # in 0..1
LINES = {"train": ("#7c8894", "-"), "valid": (style.RIGHT, "-"), "test": (style.ORANGE, (0, (4, 1.6)))}

GRID_COLUMNS, CELL_INCHES = 5, 1.5
# Maximum opacity of a heatmap.
OPACITY = 0.8
LOG_LOSS_FROM_RATIO = 50.0  # beyond this, a linear axis shows one spike and a flat line
# An axis that shows less than this makes noise look like a trend: in units of accuracy, and as a share of the loss.
MIN_ACCURACY_SPAN, MIN_LOSS_SPAN = 0.1, 0.25
# Up to this many epochs, the training loss is drawn by steps: a few epoch means are not a curve.
LOSS_BY_STEP_UP_TO_EPOCHS = 4


def draw_predictions(
    path: Path, images_MHWC: np.ndarray, actual: np.ndarray, predicted: np.ndarray, classes: Sequence[str], task: Task
) -> None:
    """Write a grid of images titled "actual / predicted", blue where right and red where wrong.

    Images are uint8 with 1 or 3 channels. `actual` and `predicted` are labels of the task; a class is -1 if the model's
    output was not finite.
    """
    rows = max(1, math.ceil(len(images_MHWC) / GRID_COLUMNS))
    # Images that are not square are up to twice as high or wide.
    shape = np.clip(images_MHWC.shape[1] / images_MHWC.shape[2], 0.5, 2)
    height = rows * (CELL_INCHES * shape + 0.27) + 0.36
    right_M = task.is_right(predicted, actual)
    title = f"{len(actual)} images (actual / predicted)"
    if right_M is not None:
        title = f"{right_M.sum()} of {len(actual)} right (actual / predicted)"
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


def draw_curves(path: Path, metrics: Lines, summary: Mapping[str, Any]) -> None:
    """Write loss and the task's metric per epoch as a PNG, and the learning rate below them if it changes.

    Args:
        metrics: the lines of `metrics.jsonl`.
        summary: the content of `summary.json`; the kept epoch and the losses by step are shown if present.
    """
    metric = task_named(summary.get("task")).metric_names[0]
    panels: Any = [["loss", metric]] + [["learning_rate"] * 2] * learning_rate_changes(metrics)
    figure = style.new_figure(9.0, 2.1 + 1.2 * len(panels))
    for quantity, axes in figure.subplot_mosaic(panels, height_ratios=(4, 1)[: len(panels)]).items():
        draw_panel(axes, metrics, summary, quantity)
    style.write_png(figure, path)


def curve_svg(metrics: Lines, summary: Mapping[str, Any], quantity: str) -> str:
    """Return one panel of `draw_curves` as an SVG element whose colours are CSS variables, for light and dark pages."""
    figure = style.new_figure(4.7, 2.0 if quantity == "learning_rate" else 3.1, dpi=72)
    draw_panel(figure.add_subplot(), metrics, summary, quantity)
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


def draw_panel(axes: "Axes", metrics: Lines, summary: Mapping[str, Any], quantity: str) -> None:
    """Draw "loss", "accuracy", another metric of a task, or "learning_rate" against the epoch."""
    from matplotlib.ticker import MaxNLocator

    task = task_named(summary.get("task"))
    title = quantity.replace("_", " ").capitalize()
    if quantity == task.metric_names[0]:
        title = task.metric_title
    style.style_panel(axes, title, "epoch")
    is_rate = quantity == "learning_rate"
    epochs = [line["epoch"] for line in metrics]
    keys = {"": quantity} if is_rate else {split: f"{split}_{quantity}" for split in LINES}
    series = {split: [finite(line.get(key)) for line in metrics] for split, key in keys.items()}
    series = {split: values for split, values in series.items() if any(value is not None for value in values)}
    by_step = _loss_by_step(metrics, summary) if quantity == "loss" else []
    drawn = [value for values in series.values() for value in values if value is not None]
    if not drawn and not by_step:
        style.add_message(axes, "no finite values")
        return
    if quantity in SHARES and len(epochs) == 1:
        axes.set_xlabel("")
        axes.bar(list(series), drawn, width=0.5, color=[LINES[split][0] for split in series])
        for position, accuracy in enumerate(drawn):
            style.add_label(axes, position, accuracy, f"{accuracy:.3f}")
        axes.set_ylim(0, 1.1)
        axes.set_xlim(-0.8, len(series) - 0.2)
        return
    if by_step:
        drawn += [loss for _, loss in by_step]
        axes.plot(*zip(*by_step, strict=True), color=LINES["train"][0], linewidth=1.2, label="train, by step")
        series.pop("train", None)
    for split, values in series.items():
        last = next(value for value in reversed(values) if value is not None)
        colour, dash = LINES.get(split, (style.MUTED, "-"))
        axes.plot(
            epochs, [math.nan if value is None else value for value in values], color=colour, linestyle=dash,
            linewidth=1.6, label=f"{split}  {style.number(last)}" if split else None,
            marker="o" if len(epochs) <= 12 else "", markersize=3.5, solid_capstyle="round",
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.1 if by_step else epochs[0] - 0.5, epochs[-1] + (0.1 if by_step else 0.5))
    if is_rate:
        axes.set_ylim(0, max(drawn) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        return
    _scale_axis(axes, quantity, min(drawn), max(drawn))
    _mark_epochs(axes, metrics, summary, quantity)
    style.add_legend(axes, handlelength=1.8)


def _loss_by_step(metrics: Lines, summary: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (epoch, training loss) by steps in a run of few epochs; empty in a long one, or if none were recorded."""
    if not metrics or len(metrics) > LOSS_BY_STEP_UP_TO_EPOCHS or not metrics[-1].get("step"):
        return []
    steps_per_epoch = metrics[-1]["step"] / metrics[-1]["epoch"]
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


def _mark_epochs(axes: "Axes", metrics: Lines, summary: Mapping[str, Any], quantity: str) -> None:
    """Mark the epochs with a value that is not a number, and the one whose weights were kept."""
    rows = [(line["epoch"], [line.get(f"{split}_{quantity}") for split in LINES]) for line in metrics]
    broken = [epoch for epoch, row in rows if any(isinstance(v, float) and not math.isfinite(v) for v in row)]
    if broken:
        axes.plot(
            broken, [0.04] * len(broken), transform=axes.get_xaxis_transform(), color=style.WRONG, marker="x",
            linestyle="", markersize=5, label="not a number",
        )  # fmt: skip
    kept: Any = summary.get("kept_epoch") or summary.get("best_epoch")
    scores = {line["epoch"]: finite(line.get(f"valid_{quantity}")) for line in metrics}
    if kept in scores and len(metrics) > 1:
        score = scores[kept]
        label = f"kept: epoch {kept}" + ("" if score is None else f", valid {style.number(score)}")
        axes.axvline(kept, color=style.MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0, label=label)
