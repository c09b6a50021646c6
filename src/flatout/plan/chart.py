"""The chart of `flatout plan`: images per second, and what a step or the job takes; estimated or measured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.plan.text import counted, number, span
from flatout.report.pictures import INK, LINES, MUTED, RIGHT, WRONG, _figure, _style_panel, _write, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The three limits of a step: their names and colours.
LIMITS = {
    "compute": ("compute", RIGHT),
    "memory": ("memory", LINES["test"][0]),
    "interconnect": ("links between chips", "#8a6fb0"),
}


def draw_plan(path: Path, result: Mapping[str, Any]) -> None:
    """Write the chart as a PNG: on the left images per second, on the right the time of a step by each limit.

    Args:
        path: the PNG to write.
        result: the content of plan.json.

    Raises:
        InputError: the file cannot be written.
    """
    figure = _figure(9.0, 3.9, dpi=170, layout="constrained")
    left, right = figure.subplots(1, 2)
    if result["estimate"]:
        _draw_throughput(left, result)
        _draw_steps(right, result)
        how = "estimate"
    else:
        repeats = max(row["repeats"] for row in result["devices"])
        of = f", median of {repeats} (least and most)" if repeats > 1 else ""
        _draw_bars(left, result, "images_per_second", f"Images per second{of}", number)
        _draw_bars(right, result, "job_seconds", f"Time of {counted(result['epochs'], 'epoch')}, seconds", span)
        how = "measured"
    figure.suptitle(
        f"{shorten(result['job'], 40)}: {how}, global batch {result['batch_size']:,}",
        fontsize=10.5, weight="bold", color=INK, x=0.01, ha="left", parse_math=False,
    )  # fmt: skip
    _write(figure, path)


def _draw_bars(
    axes: "Axes", result: Mapping[str, Any], figure: str, title: str, written: Callable[[float], str]
) -> None:
    """Draw a figure of every SPEC, its median as a bar with a whisker from the least to the most."""
    _style_panel(axes, title)
    rows = [row[figure] for row in result["devices"]]
    tops = [row["median"] for row in rows]
    whiskers = [[r["median"] - r["min"] for r in rows], [r["max"] - r["median"] for r in rows]]
    axes.bar(range(len(rows)), tops, width=0.55, color=RIGHT, yerr=whiskers, error_kw={"ecolor": MUTED, "capsize": 3})
    for place, row in enumerate(rows):
        axes.annotate(
            written(row["median"]), (place, row["max"]), (0, 5), textcoords="offset points", fontsize=8, color=INK,
            ha="center",
        )  # fmt: skip
    axes.set_xticks(range(len(rows)), [shorten(row["devices"], 16) for row in result["devices"]])
    axes.set_xlim(-0.8, len(rows) - 0.2)
    axes.set_xlabel("")
    axes.set_ylim(0, 1.15 * max(row["max"] for row in rows))
    axes.yaxis.set_major_formatter("{x:,.4g}" if axes.get_ylim()[1] < 10 else "{x:,.0f}")


def _draw_throughput(axes: "Axes", result: Mapping[str, Any]) -> None:
    _style_panel(axes, "Images per second")
    fitting = [row for row in result["topologies"] if row["fits"]]
    if not fitting:
        _say(axes, "does not fit")
        return
    curve = result["scaling"]
    chips = [row["chips"] for row in curve or fitting]
    generation = (result["scaling_of"] or fitting[0]["topology"]).partition(":")[0]
    if curve:
        rates = [row["images_per_second"] for row in curve]
        ideal = [rates[0] * n for n in chips]
        axes.plot(chips, ideal, color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label="ideal")
        axes.plot(chips, rates, color=RIGHT, linewidth=1.8, label=f"{generation}, estimate")
        axes.legend(loc="upper left", framealpha=0.85, edgecolor="none", fontsize=8, labelcolor=INK)
    behind = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85, "pad": 0.6}  # a line may pass there
    for row in fitting:
        is_of_curve = row["topology"].partition(":")[0] == generation
        place = (row["chips"], row["images_per_second"])
        axes.plot(*place, "o", color=RIGHT, markerfacecolor=RIGHT if is_of_curve else "#ffffff", markersize=5)
        axes.annotate(
            f"{row['topology']}\n{number(row['images_per_second'])}", place, (0, -26), textcoords="offset points",
            fontsize=7.5, color=INK, ha="center", bbox=behind,
        )  # fmt: skip
    axes.set_xlabel("chips", fontsize=8, color=MUTED)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(chips, [str(n) for n in chips])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_steps(axes: "Axes", result: Mapping[str, Any]) -> None:
    _style_panel(axes, "Step time by each limit; the longest decides")
    rows = result["topologies"]
    known = [row["seconds"] for row in rows if row["fits"]]
    if not known:
        _say(axes, "\n".join(f"{row['topology']}: the largest batch is {row['largest_batch'] or 0:,}" for row in rows))
        return
    unit, factor = ("ms", 1e3) if max(s["step"] for s in known) >= 1e-3 else ("µs", 1e6)
    for side, (limit, (name, colour)) in zip((-1, 0, 1), LIMITS.items(), strict=True):
        places = [index + 0.25 * side for index, row in enumerate(rows) if row["fits"]]
        bars = axes.bar(places, [factor * s[limit] for s in known], width=0.22, color=colour, label=name)
        axes.bar_label(bars, fmt="{:,.3g}", fontsize=7.5, color=INK, padding=2)
    for index, row in enumerate(rows):
        if not row["fits"]:
            axes.text(index, 0, "does not fit", ha="center", va="bottom", fontsize=8, color=WRONG)
    axes.set_xticks(range(len(rows)), [shorten(row["topology"], 14) for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("")
    axes.set_ylabel(unit, fontsize=8, color=MUTED)
    axes.set_ylim(0, 1.3 * factor * max(s["step"] for s in known))
    axes.legend(loc="upper left", ncols=3, framealpha=0.85, edgecolor="none", fontsize=8, labelcolor=INK)


def _say(axes: "Axes", text: str) -> None:
    """Put words where there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, color=MUTED)
