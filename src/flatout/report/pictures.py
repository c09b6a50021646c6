"""The pictures of a run: 25 predictions, the curves of training, the confusion matrix.

Everything is drawn through matplotlib's object interface, never through pyplot: no global figure, style or backend
is touched, so that drawing inside somebody's notebook changes nothing there. Blue means right and red means wrong in
every picture; the colours are told apart by colour-blind readers, and lines differ in dash as well.

Shape letters: M pictures, H height, W width, C channels (1 or 3), K classes.
"""

import io
import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1d2329"
MUTED = "#66707b"
FAINT = "#d5dbe1"
RIGHT = "#0b62b0"
WRONG = "#c4331d"
EMPTY = "#f1f3f5"
LINES = {"train": ("#7c8894", "-"), "valid": ("#0b62b0", "-"), "test": ("#d2620a", (0, (4, 1.6)))}

GRID_COLUMNS = 5
SMOOTH_FROM_PIXELS = 96  # smaller images are enlarged by whole pixels, so that the reader sees what the model saw
NUMBERS_UP_TO_CLASSES = 15
LABELS_AT_MOST = 51
LABEL_WIDTH = 20
LOG_LOSS_FROM_RATIO = 50.0  # beyond this, a linear axis shows one spike and a flat line

# Fonts with Chinese, Japanese and Korean characters, for class names that the font matplotlib brings has no glyphs for.
CJK_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "PingFang SC", "Hiragino Sans GB",
    "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
)  # fmt: skip


def draw_predictions(
    path: Path, images: np.ndarray, actual: Sequence[int], predicted: Sequence[int], classes: Sequence[str]
) -> None:
    """Write a grid of pictures titled "actual / predicted", blue where right and red where wrong.

    Args:
        path: the PNG to write.
        images: uint8 [M, H, W, C]; 25 of them fill the grid.
        actual: M labels.
        predicted: M labels; -1 where the model's output was not a number.
        classes: K class names.

    Raises:
        InputError: the file cannot be written.
    """
    images = np.asarray(images)
    count = len(images)
    rows = max(1, math.ceil(count / GRID_COLUMNS))
    cell_inches, title_inches, head_inches = 1.5, 0.27, 0.36
    width, height = GRID_COLUMNS * cell_inches, rows * (cell_inches + title_inches) + head_inches
    figure = _figure(width, height, dpi=140)
    right = sum(int(a) == int(p) for a, p in zip(actual, predicted, strict=True))
    head = f"{right} of {count} right" if count else "No pictures: there was nothing to predict"
    y_head = 1 - 0.4 * head_inches / height
    figure.text(0.012, y_head, head, fontsize=10, weight="bold", color=INK, va="center")
    figure.text(0.988, y_head, "actual / predicted", fontsize=8.5, color=MUTED, va="center", ha="right")
    for index in range(count):
        row, column = divmod(index, GRID_COLUMNS)
        bottom = height - head_inches - (row + 1) * (cell_inches + title_inches) + 0.05
        axes = figure.add_axes(
            ((column + 0.04) / GRID_COLUMNS, bottom / height, 0.92 / GRID_COLUMNS, (cell_inches - 0.07) / height)
        )
        _show_image(axes, images[index])
        names = [classes[i] if i >= 0 else "none" for i in (int(actual[index]), int(predicted[index]))]
        figure.text(
            (column + 0.5) / GRID_COLUMNS,
            (bottom + cell_inches - 0.07 + 0.06) / height,
            _fitting_title(figure, names, 0.93 * cell_inches),
            color=RIGHT if int(actual[index]) == int(predicted[index]) else WRONG,
            ha="center", va="bottom", fontsize=7.5, family=_families(), parse_math=False,
        )  # fmt: skip
    _write(figure, path)


def draw_curves(path: Path, metrics: Sequence[Mapping[str, Any]], best_epoch: int | None = None) -> None:
    """Write loss and accuracy per epoch, and the learning rate below them where it changes.

    Args:
        path: the PNG to write.
        metrics: the lines of `metrics.jsonl`; values may be missing, None or not a number.
        best_epoch: the epoch to mark; by default the one with the highest validation accuracy.

    Raises:
        InputError: the file cannot be written.
    """
    if best_epoch is None:
        best_epoch = _best_epoch(metrics)
    with_rate = learning_rate_changes(metrics)
    figure = _figure(9.0, 4.5 if with_rate else 3.3, dpi=170, layout="constrained")
    grid = figure.add_gridspec(2 if with_rate else 1, 2, height_ratios=(4, 1) if with_rate else (1,))
    _draw_panel(figure.add_subplot(grid[0, 0]), metrics, "loss", best_epoch)
    _draw_panel(figure.add_subplot(grid[0, 1]), metrics, "accuracy", best_epoch)
    if with_rate:
        _draw_panel(figure.add_subplot(grid[1, :]), metrics, "learning_rate", best_epoch)
    _write(figure, path)


def curve_svg(metrics: Sequence[Mapping[str, Any]], quantity: str, best_epoch: int | None = None) -> str:
    """Return one panel of `draw_curves` as an SVG element whose colours are CSS variables, for light and dark pages.

    Args:
        metrics: the lines of `metrics.jsonl`.
        quantity: "loss", "accuracy" or "learning_rate".
        best_epoch: as for `draw_curves`.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    wide = quantity == "learning_rate"
    figure = _figure(9.6 if wide else 4.7, 1.5 if wide else 3.1, dpi=72, layout="constrained")
    _draw_panel(figure.add_subplot(), metrics, quantity, _best_epoch(metrics) if best_epoch is None else best_epoch)
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("#ffffff", "none")
    variables = {INK: "ink", MUTED: "muted", FAINT: "line", WRONG: "wrong"} | {
        c: name for name, (c, _) in LINES.items()
    }
    for colour, variable in variables.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{quantity}-", svg)  # several panels share one page


def draw_confusion(path: Path, matrix_KK: np.ndarray, classes: Sequence[str]) -> None:
    """Write the confusion matrix: a row per actual class, a column per predicted class.

    A cell's colour is its share of the row (blue on the diagonal, red off it, on a square-root scale so that rare
    mistakes can be seen); up to 15 classes the cells hold their counts, beyond 51 only some classes are labelled.

    Args:
        path: the PNG to write.
        matrix_KK: counts [K, K].
        classes: K class names.

    Raises:
        InputError: the file cannot be written.
    """
    matrix_KK = np.asarray(matrix_KK)
    K = len(classes)
    assert matrix_KK.shape == (K, K)
    row_totals = matrix_KK.sum(axis=1, keepdims=True)
    shares_KK = np.divide(matrix_KK, row_totals, out=np.zeros((K, K)), where=row_totals > 0)
    side = float(np.clip(2.6 + 0.42 * K, 4.2, 9.5))
    figure = _figure(side + 0.6, side + 0.5, dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(_confusion_colours(shares_KK, row_totals[:, 0] > 0))
    if K <= NUMBERS_UP_TO_CLASSES:
        for (row, column), count in np.ndenumerate(matrix_KK):
            if count:
                colour = "#ffffff" if shares_KK[row, column] > 0.35 else INK
                text = f"{int(count):,}" if count < 100_000 else f"{count:.0e}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5 if K > 5 else 10, color=colour)
    correct, total = int(np.trace(matrix_KK)), int(matrix_KK.sum())
    title = f"Accuracy {correct / total:.3f}: {correct:,} of {total:,} right" if total else "No predictions"
    axes.set_title(title, fontsize=11, weight="bold", color=INK, loc="left", pad=10)
    _label_classes(axes, classes)
    _write(figure, path)


def learning_rate_changes(metrics: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the learning rate differs between epochs, so that it is worth a picture."""
    return len({rate for line in metrics if (rate := finite(line.get("learning_rate"))) is not None}) > 1


def finite(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else (None, NaN, infinity, text)."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _not_a_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns (a Chinese character takes two), cut in the middle.

    Names of classes often share their beginning and differ at their end, so both ends are kept.
    """
    text = " ".join(text.split())
    if _columns(text) <= width:
        return text
    head, tail = text, ""
    keep = max(width - 1, 1)
    while _columns(head) > keep - keep // 3:
        head = head[:-1]
    for character in reversed(text):
        if _columns(head) + _columns(tail + character) > keep:
            break
        tail = character + tail
    return f"{head.rstrip()}…{tail.lstrip()}"


def _figure(width: float, height: float, dpi: int, layout: Any = None) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="#ffffff", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _write(figure: "Figure", path: Path) -> None:
    """Write the figure as a PNG."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A class name in a script that no installed font covers is drawn as boxes; that is no reason to alarm anyone.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomically(path, buffer.getvalue())


@cache
def _families() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in CJK_FONTS if name in installed)]


def _show_image(axes: "Axes", image_HWC: np.ndarray) -> None:
    image = image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC
    smooth = max(image.shape[:2]) >= SMOOTH_FROM_PIXELS
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="antialiased" if smooth else "nearest")
    axes.set_axis_off()


def _fitting_title(figure: "Figure", names: Sequence[str], limit_inches: float) -> str:
    """Return "actual / predicted" with names shortened, the longer one first, until the text fits the width."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family=_families(), size=7.5)  # pyright: ignore[reportArgumentType] (a list of families is fine)
    renderer = figure.canvas.get_renderer()  # pyright: ignore[reportAttributeAccessIssue]
    widths = [min(_columns(name), 40) for name in names]
    while True:
        title = " / ".join(shorten(name, width) for name, width in zip(names, widths, strict=True))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
            width_pixels, _, _ = renderer.get_text_width_height_descent(title, font, False)
        longest = widths.index(max(widths))
        if width_pixels / figure.dpi <= limit_inches or widths[longest] <= 3:
            return title
        widths[longest] -= 1


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _best_epoch(metrics: Iterable[Mapping[str, Any]]) -> int | None:
    scored = [(score, -line["epoch"]) for line in metrics if (score := finite(line.get("valid_accuracy"))) is not None]
    return -max(scored)[1] if scored else None


def _draw_panel(axes: "Axes", metrics: Sequence[Mapping[str, Any]], quantity: str, best_epoch: int | None) -> None:
    """Draw "loss", "accuracy" or "learning_rate" against the epoch."""
    from matplotlib.ticker import MaxNLocator

    epochs = [line["epoch"] for line in metrics]
    names = {"": quantity} if quantity == "learning_rate" else {split: f"{split}_{quantity}" for split in LINES}
    drawn: list[float] = []
    for split, key in names.items():
        values = [finite(line.get(key)) for line in metrics]
        known = [value for value in values if value is not None]
        if not known:
            continue
        drawn += known
        colour, dash = LINES.get(split, (MUTED, "-"))
        last = f"{split}  {known[-1]:.3f}" if split else None
        gaps = [math.nan if value is None else value for value in values]
        axes.plot(
            epochs, gaps, color=colour, linestyle=dash, linewidth=1.6, label=last,
            marker="o" if len(epochs) <= 12 else "", markersize=3.5, solid_capstyle="round",
        )  # fmt: skip
    _style_panel(axes, {"loss": "Loss", "accuracy": "Accuracy", "learning_rate": "Learning rate"}[quantity])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if epochs:
        axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
    if not drawn:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center", color=MUTED, fontsize=9)
        return
    if quantity == "loss" and min(drawn) > 0 and max(drawn) > LOG_LOSS_FROM_RATIO * min(drawn):
        axes.set_yscale("log")
    if len(epochs) == 1 and min(drawn) >= 0:  # one point gives no scale of its own
        axes.set_ylim(0, 1.02 if quantity == "accuracy" else 1.3 * max(drawn) or 1)
    if quantity == "learning_rate":
        axes.set_ylim(0, max(drawn) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        return
    broken = [line["epoch"] for line in metrics if any(_not_a_number(line.get(key)) for key in names.values())]
    if broken:
        axes.plot(
            broken, [0.04] * len(broken), transform=axes.get_xaxis_transform(), color=WRONG, marker="x", linestyle="",
            markersize=5, label="not a number",
        )  # fmt: skip
    if best_epoch is not None and best_epoch in epochs and len(epochs) > 1:
        axes.axvline(
            best_epoch, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0, label=f"best  epoch {best_epoch}"
        )
    axes.legend(framealpha=0.85, edgecolor="none", fontsize=8, labelcolor=INK, handlelength=1.8, borderaxespad=0.2)


def _style_panel(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=10, weight="bold", color=INK, loc="left")
    axes.set_facecolor("#ffffff")
    axes.set_xlabel("epoch", fontsize=8, color=MUTED)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _confusion_colours(shares_KK: np.ndarray, has_images_K: np.ndarray) -> np.ndarray:
    """Return float RGB [K, K, 3] for row shares [K, K]; rows of classes without images are grey."""
    from matplotlib.colors import to_rgb

    right, wrong, white = (np.array(to_rgb(colour)) for colour in (RIGHT, WRONG, "#ffffff"))
    full = np.where(np.eye(len(shares_KK), dtype=bool)[..., None], right, wrong)
    colours = white + (full - white) * np.sqrt(shares_KK)[..., None]
    colours[~has_images_K] = to_rgb(EMPTY)
    return colours


def _label_classes(axes: "Axes", classes: Sequence[str]) -> None:
    K = len(classes)
    ticks = range(0, K, math.ceil(K / LABELS_AT_MOST))
    labels = [shorten(classes[tick], LABEL_WIDTH) for tick in ticks]
    size = 8 if K <= NUMBERS_UP_TO_CLASSES else 6.5
    style: dict[str, Any] = {"fontsize": size, "family": _families(), "parse_math": False, "color": INK}
    slanted = len(ticks) <= NUMBERS_UP_TO_CLASSES
    lean: dict[str, Any] = (
        {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if slanted else {"rotation": 90, "ha": "center"}
    )
    axes.set_xticks(ticks, labels, **style, **lean)
    axes.set_yticks(ticks, labels, **style)
    axes.set_xlabel("predicted  (colour: share of the row, square-root scale)", fontsize=8, color=MUTED)
    axes.set_ylabel("actual", fontsize=8, color=MUTED)
    axes.tick_params(length=0, pad=3)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    if K <= NUMBERS_UP_TO_CLASSES:
        axes.set_xticks(np.arange(0.5, K - 1), minor=True)
        axes.set_yticks(np.arange(0.5, K - 1), minor=True)
        axes.grid(which="minor", color="#ffffff", linewidth=1.2)
        axes.tick_params(which="minor", length=0)
