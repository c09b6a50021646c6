"""The chart of `flatout lr`: the loss over the learning rate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout import style
from flatout.style import shorten

RESULT, CHART = "lr.json", "lr.png"
# What exceeds this multiple of the first loss would flatten the rest of the curve.
HIGHEST_LOSS = 1.25


def draw_rates(path: Path, result: Mapping[str, Any]) -> None:
    """Write the curve of lr.json as a PNG: the loss of each step, its average, and the suggested rate."""
    rates, losses, smoothed = zip(*result["points"], strict=True)
    title = (
        f"{shorten(result['job'], 40)}: learning-rate range test, {result['optimizer']}, batch {result['batch_size']:,}"
    )
    figure = style.new_figure(7.2, 3.9, title=title)
    axes = figure.add_subplot()
    style.style_panel(axes, "", "learning rate")
    axes.set_ylabel("training loss", fontsize=8, color=style.MUTED)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.plot(rates, losses, color=style.FAINT, linewidth=1.0, label="loss of a step")
    axes.plot(rates, smoothed, color=style.RIGHT, linewidth=1.8, label="smoothed")
    if result["diverged"]:
        axes.axvline(result["diverged"], color=style.WRONG, linewidth=1.2, label=f"diverged: {result['diverged']:.2g}")
    dashes: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (4, 2))}
    axes.axvline(result["recipe_rate"], color=style.MUTED, label=f"recipe: {result['recipe_rate']:.2g}", **dashes)
    if result["rate"]:
        axes.axvline(result["rate"], color=style.ORANGE, label=f"suggested: {result['rate']:.2g}", **dashes)
    low, high = min(losses), min(max(losses), HIGHEST_LOSS * smoothed[0])
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    style.add_legend(axes, loc="lower left")
    style.write_png(figure, path)
