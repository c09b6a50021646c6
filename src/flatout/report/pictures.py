"""The pictures of a run: predictions, curves of training, confusion matrix.

Shape letters: M images, H height, W width, C channels (1 or 3), K classes.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.report import style
from flatout.report.style import finite, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]

LINES = {"train": ("#7c8894", "-"), "valid": (style.RIGHT, "-"), "test": (style.ORANGE, (0, (4, 1.6)))}

GRID_COLUMNS = 5
SMOOTH_FROM_PIXELS = 96  # smaller images are enlarged by whole pixels, so that the reader sees what the model saw
NUMBERS_UP_TO_CLASSES = 15
LABELS_AT_MOST = 51
LABEL_WIDTH = 20
LOG_LOSS_FROM_RATIO = 50.0  # beyond this, a linear axis shows one spike and a flat line
# An axis that shows less than this makes noise look like a trend: in units of accuracy, and as a share of the loss.
LEAST_ACCURACY_SPAN, LEAST_LOSS_SPAN = 0.1, 0.25
# Up to so many epochs, the training loss is drawn by steps: a few means of whole epochs make no curve.
LOSS_BY_STEP_UP_TO_EPOCHS = 4


def draw_predictions(
    path: Path, images: np.ndarray, actual: Sequence[int], predicted: Sequence[int], classes: Sequence[str]
) -> None:
    """Write a grid of images titled "actual / predicted", blue where right and red where wrong.

    Args:
        path: the PNG to write.
        images: uint8 [M, H, W, C]; 25 of them fill the grid.
        actual: M labels.
        predicted: M labels; -1 where the model's output was not finite.
        classes: K class names.

    Raises:
        InputError: the file cannot be written.
    """
    count = len(images)
    rows = max(1, math.ceil(count / GRID_COLUMNS))
    cell_inches, title_inches, head_inches = 1.5, 0.27, 0.36
    width, height = GRID_COLUMNS * cell_inches, rows * (cell_inches + title_inches) + head_inches
    figure = style.new_figure(width, height, dpi=140, layout=None)
    right = sum(a == p for a, p in zip(actual, predicted, strict=True))
    head = f"{right} of {count} right" if count else "No images: there was nothing to predict"
    y_head = 1 - 0.4 * head_inches / height
    figure.text(0.012, y_head, head, fontsize=10, weight="bold", color=style.INK, va="center")
    figure.text(0.988, y_head, "actual / predicted", fontsize=8.5, color=style.MUTED, va="center", ha="right")
    for index, (image, a, p) in enumerate(zip(images, actual, predicted, strict=True)):
        row, column = divmod(index, GRID_COLUMNS)
        bottom = height - head_inches - (row + 1) * (cell_inches + title_inches) + 0.05
        axes = figure.add_axes(
            ((column + 0.04) / GRID_COLUMNS, bottom / height, 0.92 / GRID_COLUMNS, (cell_inches - 0.07) / height)
        )
        _show_image(axes, image)
        figure.text(
            (column + 0.5) / GRID_COLUMNS,
            (bottom + cell_inches - 0.07 + 0.06) / height,
            _fitting_title(figure, [classes[a], classes[p] if p >= 0 else "none"], 0.93 * cell_inches),
            color=style.RIGHT if a == p else style.WRONG,
            ha="center", va="bottom", fontsize=7.5, family=style.families(), parse_math=False,
        )  # fmt: skip
    style.write_png(figure, path)


def draw_curves(path: Path, metrics: Lines, summary: Mapping[str, Any]) -> None:
    """Write loss and accuracy per epoch, and the learning rate below them where it changes.

    Args:
        path: the PNG to write.
        metrics: the lines of `metrics.jsonl`; values may be missing, None or NaN.
        summary: the content of `summary.json`; the kept epoch and the losses by step are shown where it has them.

    Raises:
        InputError: the file cannot be written.
    """
    with_rate = learning_rate_changes(metrics)
    figure = style.new_figure(9.0, 4.5 if with_rate else 3.3)
    grid = figure.add_gridspec(2 if with_rate else 1, 2, height_ratios=(4, 1) if with_rate else (1,))
    _draw_panel(figure.add_subplot(grid[0, 0]), metrics, summary, "loss")
    _draw_panel(figure.add_subplot(grid[0, 1]), metrics, summary, "accuracy")
    if with_rate:
        _draw_panel(figure.add_subplot(grid[1, :]), metrics, summary, "learning_rate")
    style.write_png(figure, path)


def curve_svg(metrics: Lines, summary: Mapping[str, Any], quantity: str) -> str:
    """Return one panel of `draw_curves` as an SVG element whose colours are CSS variables, for light and dark pages.

    Args:
        metrics, summary: as for `draw_curves`.
        quantity: "loss", "accuracy" or "learning_rate".
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    wide = quantity == "learning_rate"
    figure = style.new_figure(9.6 if wide else 4.7, 1.5 if wide else 3.1, dpi=72)
    _draw_panel(figure.add_subplot(), metrics, summary, quantity)
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("#ffffff", "none")
    variables = {style.INK: "ink", style.MUTED: "muted", style.FAINT: "line", style.WRONG: "wrong"} | {
        c: n for n, (c, _) in LINES.items()
    }
    for colour, variable in variables.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{quantity}-", svg)  # several panels share one page


def draw_confusion(path: Path, matrix_KK: np.ndarray, classes: Sequence[str]) -> None:
    """Write the confusion matrix: a row per actual class, a column per predicted class.

    A cell's colour is its share of the row, blue on the diagonal and red off it, on a square-root scale so that rare
    mistakes can be seen. Up to 15 classes the cells contain their counts; beyond 51 only some classes are labelled.

    Args:
        path: the PNG to write.
        matrix_KK: counts [K, K].
        classes: K class names.

    Raises:
        InputError: the file cannot be written.
    """
    K = len(classes)
    assert matrix_KK.shape == (K, K)
    row_totals = matrix_KK.sum(axis=1, keepdims=True)
    shares_KK = np.divide(matrix_KK, row_totals, out=np.zeros((K, K)), where=row_totals > 0)
    side = float(np.clip(2.6 + 0.42 * K, 4.2, 9.5))
    figure = style.new_figure(side + 0.6, side + 0.5, dpi=150)
    axes = figure.add_subplot()
    axes.imshow(_confusion_colours(shares_KK, row_totals[:, 0] > 0))
    if K <= NUMBERS_UP_TO_CLASSES:
        for (row, column), count in np.ndenumerate(matrix_KK):
            if count:
                colour = "#ffffff" if shares_KK[row, column] > 0.35 else style.INK
                text = f"{int(count):,}" if count < 100_000 else f"{count:.0e}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5 if K > 5 else 10, color=colour)
    correct, total = int(np.trace(matrix_KK)), int(matrix_KK.sum())
    title = f"Accuracy {correct / total:.3f}: {correct:,} of {total:,} right" if total else "No predictions"
    axes.set_title(title, fontsize=11, weight="bold", color=style.INK, loc="left", pad=10)
    _label_classes(axes, classes)
    style.write_png(figure, path)


def learning_rate_changes(metrics: Lines) -> bool:
    """Return whether the learning rate differs between epochs."""
    return len({rate for line in metrics if (rate := finite(line.get("learning_rate"))) is not None}) > 1


def _show_image(axes: "Axes", image_HWC: np.ndarray) -> None:
    image = image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC
    smooth = max(image.shape[:2]) >= SMOOTH_FROM_PIXELS
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="antialiased" if smooth else "nearest")
    axes.set_axis_off()


def _fitting_title(figure: "Figure", names: Sequence[str], limit_inches: float) -> str:
    """Return "actual / predicted" with names shortened, the longer one first, until the text fits the width."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family=style.families(), size=7.5)  # pyright: ignore[reportArgumentType] (a list of style.families is fine)
    renderer = figure.canvas.get_renderer()  # pyright: ignore[reportAttributeAccessIssue]
    widths = [min(style.columns_of(name), 40) for name in names]
    while True:
        title = " / ".join(shorten(name, width) for name, width in zip(names, widths, strict=True))
        with style.no_glyph_warnings():
            width_pixels, _, _ = renderer.get_text_width_height_descent(title, font, False)
        longest = widths.index(max(widths))
        if width_pixels / figure.dpi <= limit_inches or widths[longest] <= 3:
            return title
        widths[longest] -= 1


def _draw_panel(axes: "Axes", metrics: Lines, summary: Mapping[str, Any], quantity: str) -> None:
    """Draw "loss", "accuracy" or "learning_rate" against the epoch."""
    from matplotlib.ticker import MaxNLocator

    is_rate = quantity == "learning_rate"
    style.style_panel(axes, quantity.replace("_", " ").capitalize(), "epoch")
    epochs = [line["epoch"] for line in metrics]
    keys = {"": quantity} if is_rate else {split: f"{split}_{quantity}" for split in LINES}
    series = {split: [finite(line.get(key)) for line in metrics] for split, key in keys.items()}
    series = {split: values for split, values in series.items() if any(value is not None for value in values)}
    by_step = _loss_by_step(metrics, summary) if quantity == "loss" else []
    if quantity == "accuracy" and len(epochs) == 1:
        _draw_bars(axes, series)
        return
    drawn = [loss for _, loss in by_step]
    if by_step:
        axes.plot(*zip(*by_step, strict=True), color=LINES["train"][0], linewidth=1.2, label="train, by step")
        series.pop("train", None)
    for split, values in series.items():
        known = [value for value in values if value is not None]
        drawn += known
        colour, dash = LINES.get(split, (style.MUTED, "-"))
        axes.plot(
            epochs, [math.nan if value is None else value for value in values], color=colour, linestyle=dash,
            linewidth=1.6, label=f"{split}  {known[-1]:.3f}" if split else None,
            marker="o" if len(epochs) <= 12 else "", markersize=3.5, solid_capstyle="round",
        )  # fmt: skip
    if not drawn:
        style.add_message(axes, "no finite values")
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.1 if by_step else epochs[0] - 0.5, epochs[-1] + (0.1 if by_step else 0.5))
    if is_rate:
        axes.set_ylim(0, max(drawn) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        return
    _scale_axis(axes, quantity, min(drawn), max(drawn))
    _mark_epochs(axes, metrics, summary, keys)
    style.add_legend(axes, handlelength=1.8)


def _loss_by_step(metrics: Lines, summary: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (epoch, training loss) by steps in a run of few epochs; empty in a long one, or where none were kept."""
    points = summary.get("train_loss_by_step") or []
    if not metrics or len(metrics) > LOSS_BY_STEP_UP_TO_EPOCHS or not metrics[-1].get("step"):
        return []
    steps_per_epoch = metrics[-1]["step"] / metrics[-1]["epoch"]
    return [(step / steps_per_epoch, loss) for step, loss in points if finite(loss) is not None]


def _draw_bars(axes: "Axes", series: Mapping[str, Sequence[float | None]]) -> None:
    """Draw the accuracies of a run of one epoch."""
    accuracies = {split: values[0] for split, values in series.items() if values[0] is not None}
    if not accuracies:
        style.add_message(axes, "no finite values")
        return
    axes.set_xlabel("")
    axes.bar(list(accuracies), list(accuracies.values()), width=0.5, color=[LINES[split][0] for split in accuracies])
    for position, accuracy in enumerate(accuracies.values()):
        style.add_label(axes, position, accuracy, f"{accuracy:.3f}")
    axes.set_ylim(0, 1.1)
    axes.set_xlim(-0.8, len(accuracies) - 0.2)


def _scale_axis(axes: "Axes", quantity: str, least: float, most: float) -> None:
    if quantity == "loss" and least > 0 and most > LOG_LOSS_FROM_RATIO * least:
        axes.set_yscale("log")
        return
    span = LEAST_ACCURACY_SPAN if quantity == "accuracy" else LEAST_LOSS_SPAN * most
    missing = max(0.0, span - (most - least)) / 2
    margin = 0.05 * max(span, most - least) or 0.5
    low, high = least - missing, most + missing
    if quantity == "accuracy":
        low, high = (1 - span, 1.0) if high > 1 else (0.0, span) if low < 0 else (low, high)
        low, high = min(low, least), max(high, most)
    axes.set_ylim(low - margin, high + margin)


def _mark_epochs(axes: "Axes", metrics: Lines, summary: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Mark the epochs with a value that is not a number, and the one whose weights were kept."""
    broken = [line["epoch"] for line in metrics if not all(_is_number(line.get(key)) for key in keys.values())]
    if broken:
        axes.plot(
            broken, [0.04] * len(broken), transform=axes.get_xaxis_transform(), color=style.WRONG, marker="x",
            linestyle="", markersize=5, label="not a number",
        )  # fmt: skip
    epoch = summary.get("kept_epoch") or summary.get("best_epoch")
    kept = next((line for line in metrics if line["epoch"] == epoch), None)
    if kept is not None and len(metrics) > 1:
        score = finite(kept.get(keys["valid"]))
        label = f"kept: epoch {kept['epoch']}" + (f", valid {score:.3f}" if score is not None else "")
        axes.axvline(kept["epoch"], color=style.MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0, label=label)


def _is_number(value: object) -> bool:
    """Return False for NaN and infinity; None is a split that does not exist."""
    return not isinstance(value, float) or math.isfinite(value)


def _confusion_colours(shares_KK: np.ndarray, has_images_K: np.ndarray) -> np.ndarray:
    """Return float RGB [K, K, 3] for row shares [K, K]; rows of classes without images are grey."""
    from matplotlib.colors import to_rgb

    right, wrong, white = (np.array(to_rgb(colour)) for colour in (style.RIGHT, style.WRONG, "#ffffff"))
    full = np.where(np.eye(len(shares_KK), dtype=bool)[..., None], right, wrong)
    colours = white + (full - white) * np.sqrt(shares_KK)[..., None]
    colours[~has_images_K] = to_rgb(style.EMPTY)
    return colours


def _label_classes(axes: "Axes", classes: Sequence[str]) -> None:
    K = len(classes)
    ticks = range(0, K, math.ceil(K / LABELS_AT_MOST))
    labels = [shorten(classes[tick], LABEL_WIDTH) for tick in ticks]
    size = 8 if K <= NUMBERS_UP_TO_CLASSES else 6.5
    text: dict[str, Any] = {"fontsize": size, "family": style.families(), "parse_math": False, "color": style.INK}
    slanted = len(ticks) <= NUMBERS_UP_TO_CLASSES
    lean: dict[str, Any] = (
        {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if slanted else {"rotation": 90, "ha": "center"}
    )
    axes.set_xticks(ticks, labels, **text, **lean)
    axes.set_yticks(ticks, labels, **text)
    axes.set_xlabel("predicted  (colour: share of the row, square-root scale)", fontsize=8, color=style.MUTED)
    axes.set_ylabel("actual", fontsize=8, color=style.MUTED)
    axes.tick_params(length=0, pad=3)
    for spine in axes.spines.values():
        spine.set_color(style.FAINT)
    if K <= NUMBERS_UP_TO_CLASSES:
        axes.set_xticks(np.arange(0.5, K - 1), minor=True)
        axes.set_yticks(np.arange(0.5, K - 1), minor=True)
        axes.grid(which="minor", color="#ffffff", linewidth=1.2)
        axes.tick_params(which="minor", length=0)
