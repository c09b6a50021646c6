"""The chart of `flatout scale`: lines over the number of devices where only that differs, else bars side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import style
from flatout.console import duration
from flatout.scale.findings import Row, ideal_speed_up, is_plausible, median
from flatout.style import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING = {"median": 0.0, "min": 0.0, "max": 0.0}


def draw_scaling(path: Path, result: Mapping[str, Any]) -> None:
    """Write the chart of scaling.json as a PNG: on the left images per second, on the right time."""
    rows = result["specs"]
    counts = {row["world_size"] for row in rows}
    as_lines = len(rows) > 1 and len({row["kind"] for row in rows}) == 1 and len(counts) == len(rows)
    batch = f"{'per device' if result['scaling'] == 'weak' else 'global'} batch {result['batch_size']}"
    title = f"{shorten(result['job'], 40)}: {result['scaling']} scaling, {batch}, {result['epochs']} epochs"
    figure = style.new_figure(9.0, 3.9, title=title)
    throughput, time = figure.subplots(1, 2)
    repeats = f", median of {result['repeats']} (least and most)" if result["repeats"] > 1 else ", a single run"
    unit = "" if not as_lines else "devices" if rows[0]["threads_per_rank"] is None else "processes"
    style.style_panel(throughput, f"Images per second{repeats}", unit)
    style.style_panel(time, "Seconds: training, and everything included", unit)
    if as_lines:
        rows = sorted(rows, key=lambda row: row["world_size"])
        _throughput_lines(throughput, [row for row in rows if row["images_per_second"]])
        _time_lines(time, rows)
    else:
        rates = [row["images_per_second"] or NOTHING for row in rows]
        style.draw_bars(throughput, [row["devices"] for row in rows], rates, "{:,.0f}".format)
        _time_bars(time, rows)
    for axes in (throughput, time):
        style.start_at_zero(axes, headroom=0.25)
        style.add_legend(axes, loc="upper left", ncols=3)
    style.write_png(figure, path)


def _throughput_lines(axes: "Axes", rows: Sequence[Row]) -> None:
    if not rows:
        return
    counts, figures = [row["world_size"] for row in rows], [row["images_per_second"] for row in rows]
    rates = [figure["median"] for figure in figures]
    ideal = [rates[0] * ideal_speed_up(row, rows[0]) for row in rows]
    label = "ideal by threads" if len({row["threads_per_rank"] for row in rows}) > 1 else "ideal"
    axes.plot(counts, ideal, color=style.MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label=label)
    axes.errorbar(
        counts, rates, yerr=style.whiskers(figures), color=style.RIGHT, linewidth=1.8, marker="o", markersize=4.5,
        capsize=3, label="measured",
    )  # fmt: skip
    for row, figure in zip(rows, figures, strict=True):
        text = f"{figure['median']:,.0f}"
        if row["speed_up"] and row["devices"] != row["base"]:
            text += f" (x {row['speed_up']:.2f})" if is_plausible(row, rows[0]) else "\nunreliable"
        style.add_label(axes, row["world_size"], figure["min"], text, below=True)
    _count_ticks(axes, counts)


def _time_lines(axes: "Axes", rows: Sequence[Row]) -> None:
    counts = [row["world_size"] for row in rows]
    lines = (("wall_seconds", "everything", style.MUTED, "s"), ("train_seconds", "training", style.RIGHT, "o"))
    for name, label, colour, marker in lines:
        seconds = [row[name]["median"] for row in rows]
        axes.plot(counts, seconds, color=colour, linewidth=1.8, marker=marker, markersize=4.5, label=label)
        for count, value in zip(counts, seconds, strict=True):
            style.add_label(axes, count, value, duration(value), below=name == "train_seconds")
    _count_ticks(axes, counts)


def _time_bars(axes: "Axes", rows: Sequence[Row]) -> None:
    """Draw everything, training and warm-up over each other: each is a part of the one before."""
    parts = (
        ("wall_seconds", "set-up and the rest", style.FAINT),
        ("train_seconds", "training", style.RIGHT),
        ("warmup_seconds", "warm-up", style.ORANGE),
    )
    for name, label, colour in parts:
        seconds = [median(row, name) or 0.0 for row in rows]
        axes.bar(range(len(rows)), seconds, width=0.55, color=colour, label=label if any(seconds) else "")
    for position, row in enumerate(rows):
        train, wall = median(row, "train_seconds") or 0.0, median(row, "wall_seconds") or 0.0
        style.add_label(axes, position, wall, f"{duration(train)} of {duration(wall)}")
    style.name_ticks(axes, [row["devices"] for row in rows])


def _count_ticks(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    margin = 0.18 * (max(counts) - min(counts)) or 0.5
    axes.set_xlim(min(counts) - margin, max(counts) + margin)
