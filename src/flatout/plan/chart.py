"""The chart of `flatout plan`: images per second, and the time of a step or of the job."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import style
from flatout.console import counted
from flatout.plan.text import number, span
from flatout.style import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The three limits of a step: their names and colours.
LIMITS = {
    "compute": ("compute", style.RIGHT),
    "memory": ("memory", style.ORANGE),
    "interconnect": ("links between chips", style.PURPLE),
}


def draw_plan(path: Path, result: Mapping[str, Any]) -> None:
    """Write the chart of plan.json as a PNG; an estimate is labelled as an upper bound."""
    how = "estimate, upper bound" if result["estimate"] else "measured"
    title = f"{shorten(result['job'], 40)}: {how}, global batch {result['batch_size']:,}"
    figure = style.new_figure(9.0, 3.9, title=title)
    left, right = figure.subplots(1, 2)
    if result["estimate"]:
        _draw_throughput(left, result)
        _draw_steps(right, result)
    else:
        rows = result["devices"]
        repeats = max(row["repeats"] for row in rows)
        rate = "Images per second" + f", median of {repeats} (least and most)" * (repeats > 1)
        job = f"Time of {counted(result['epochs'], 'epoch')}, seconds"
        panels = ((left, rate, "images_per_second", number), (right, job, "job_seconds", span))
        for axes, head, figure_name, text in panels:
            style.style_panel(axes, head)
            style.draw_bars(axes, [row["devices"] for row in rows], [row[figure_name] for row in rows], text)
            style.start_at_zero(axes, headroom=0.1)
    style.write_png(figure, path)


def _draw_throughput(axes: "Axes", result: Mapping[str, Any]) -> None:
    style.style_panel(axes, "Images per second, upper bound", "chips")
    fitting, curve = [row for row in result["topologies"] if row["fits"]], result["scaling"]
    if not fitting:
        style.add_message(axes, "does not fit")
        return
    generation = (result["scaling_of"] or fitting[0]["topology"]).partition(":")[0]
    chips = sorted({row["chips"] for row in curve or fitting})
    if curve:
        rates = [row["images_per_second"] for row in curve]
        ideal = [rates[0] * row["chips"] / curve[0]["chips"] for row in curve]
        axes.plot(chips, ideal, color=style.MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label="ideal")
        axes.plot(chips, rates, color=style.RIGHT, linewidth=1.8, label=generation)
    # Values are in the legend: labels at the points would hide the curve.
    for marker, row in zip(cycle("os^Dv"), fitting, strict=False):
        of_curve = row["topology"].startswith(f"{generation}:")
        axes.plot(
            row["chips"], row["images_per_second"], marker, color=style.RIGHT, markersize=5.5,
            markerfacecolor=style.RIGHT if of_curve else "#ffffff",
            label=f"{row['topology']}  ≤ {number(row['images_per_second'])}",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(chips, [str(n) for n in chips])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    style.add_legend(axes, loc="upper left")


def _draw_steps(axes: "Axes", result: Mapping[str, Any]) -> None:
    style.style_panel(axes, "Step time by limit; the longest decides")
    rows = result["topologies"]
    known = [row["seconds"] for row in rows if row["fits"]]
    if not known:
        text = "\n".join(f"{row['topology']}: the largest batch is {row['largest_batch'] or 0:,}" for row in rows)
        style.add_message(axes, text)
        return
    unit, factor = ("ms", 1e3) if max(s["step"] for s in known) >= 1e-3 else ("µs", 1e6)
    for side, (limit, (name, colour)) in zip((-1, 0, 1), LIMITS.items(), strict=True):
        places = [index + 0.25 * side for index, row in enumerate(rows) if row["fits"]]
        bars = axes.bar(places, [factor * s[limit] for s in known], width=0.22, color=colour, label=name)
        axes.bar_label(bars, fmt="{:,.3g}", fontsize=7.5, color=style.INK, padding=2)
    for index, row in enumerate(rows):
        if not row["fits"]:
            axes.text(index, 0, "does not fit", ha="center", va="bottom", fontsize=8, color=style.WRONG)
    style.name_ticks(axes, [row["topology"] for row in rows])
    axes.set_ylabel(unit, fontsize=8, color=style.MUTED)
    style.start_at_zero(axes, headroom=0.2)
    style.add_legend(axes, loc="upper left", ncols=3)
