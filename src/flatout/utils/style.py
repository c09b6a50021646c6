"""The style that all pictures share. Matplotlib is used without pyplot, which would change a notebook's global state.

Blue means right and red means wrong; colour-blind readers can tell these colours apart.
"""

import io
import math
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT, EMPTY = "#1d2329", "#66707b", "#d5dbe1", "#f1f3f5"
RIGHT, WRONG, ORANGE = "#0b62b0", "#c4331d", "#d2620a"

# Fonts with Chinese, Japanese and Korean characters; matplotlib's own font has none.
_CJK_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "PingFang SC", "Hiragino Sans GB",
    "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
)  # fmt: skip


def readable_on(colour: Any) -> str:
    """Return black or white, whichever is more readable on an RGB colour in 0..1, by WCAG 2's relative luminance."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def new_figure(
    width: float, height: float, *, dpi: int = 170, layout: Any = "constrained", title: str = ""
) -> "Figure":
    """Return an empty figure of a size in inches, white, with an optional title at the top left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="#ffffff", layout=layout)
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10.5, weight="bold", color=INK, x=0.01, ha="left", parse_math=False)
    return figure


def write_png(figure: "Figure", path: Path) -> None:
    """Write the figure as a PNG. Raises InputError if the file cannot be written."""
    buffer = io.BytesIO()
    with no_glyph_warnings():
        # Stronger compression takes half a second for photos, and saves a tenth.
        figure.savefig(buffer, format="png", metadata={"Software": None}, pil_kwargs={"compress_level": 1})
    write_atomically(path, buffer.getvalue())


def no_glyph_warnings() -> warnings.catch_warnings:
    """Return a context without warnings about characters that no installed font contains; they are drawn as boxes."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def style_panel(axes: "Axes", title: str, x_label: str = "") -> None:
    """Apply the common style: title at the left, horizontal grid lines, no frame."""
    axes.set_title(title, fontsize=10, weight="bold", color=INK, loc="left")
    axes.set_facecolor("#ffffff")
    axes.set_xlabel(x_label, fontsize=8, color=MUTED)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def add_legend(axes: "Axes", **options: object) -> None:
    """Add a legend if anything has a label."""
    if axes.get_legend_handles_labels()[0]:
        style = {"framealpha": 0.85, "edgecolor": "none", "fontsize": 8, "labelcolor": INK, "borderaxespad": 0.2}
        axes.legend(**(style | options))


def add_label(axes: "Axes", x: float, y: float, text: str) -> None:
    """Write a value above a point, on a white background because a line may pass there."""
    axes.annotate(
        text, (x, y), (0, 5), textcoords="offset points", fontsize=8, color=INK, ha="center", va="bottom",
        bbox={"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
    )  # fmt: skip


@cache
def families() -> list[str]:
    """Return the font families for names from data."""
    from matplotlib.font_manager import fontManager

    return ["DejaVu Sans", *(name for name in fontManager.get_font_names() if name in _CJK_FONTS)]


def finite(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else (None, NaN, infinity, text)."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def number(value: float, decimals: int = 3) -> str:
    """Format a number: with `decimals` below 10, four digits below 1,000, else as an integer."""
    size = abs(value)
    if size < 10:
        return f"{value:.{decimals}f}" if size >= 0.01 or not size else f"{value:.{decimals}g}"
    return f"{value:.4g}" if size < 999.95 else f"{value:,.0f}"


def plain(value: float) -> str:
    """Format a number with four digits, or as an integer; large numbers have no exponent."""
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, cut in the middle: class names often differ only at their ends."""
    from rich.cells import cell_len, set_cell_size  # a Chinese character takes two columns

    text = " ".join(text.split())
    if cell_len(text) <= width:
        return text
    keep = max(width - 1, 1)
    head, tail = set_cell_size(text, keep - keep // 3), set_cell_size(text[::-1], keep // 3)[::-1]
    return f"{head.rstrip()}…{tail.lstrip()}"
