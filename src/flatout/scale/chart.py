"""The chart of `flatout scale`: throughput and time, as lines over the number of devices or as bars side by side.

Lines are drawn where only the number of devices differs, with the throughput of ideal scaling for comparison.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import duration
from flatout.report import style
from flatout.report.style import shorten
from flatout.scale.findings import ideal_speed_up, is_plausible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
NOTHING = {"median": 0.0, "min": 0.0, "max": 0.0}


def draw_scaling(path: Path, result: Mapping[str, Any]) -> None:
    """Write the chart as a PNG: on the left images per second, on the right time.

    Args:
        path: the PNG to write.
        result: the content of scaling.json.

    Raises:
        InputError: the file cannot be written.
    """
    rows = result["specs"]
    counts = {row["world_size"] for row in rows}
    as_lines = len(rows) > 1 and len({row["kind"] for row in rows}) == 1 and len(counts) == len(rows)
    batch = f"{'per device' if result['scaling'] == 'weak' else 'global'} batch {result['batch_size']}"
    title = f"{shorten(result['job'], 40)}: {result['scaling']} scaling, {batch}, {result['epochs']} epochs"
    figure = style.new_figure(9.0, 3.9, title=title)
    throughput, time = figure.subplots(1, 2)
    unit = ""
    if as_lines:
        unit = "devices" if rows[0]["threads_per_rank"] is None else "processes"
        rows = sorted(rows, key=lambda row: row["world_size"])
    repeats = f", median of {result['repeats']} (least and most)" if result["repeats"] > 1 else ", a single run"
    style.style_panel(throughput, f"Images per second{repeats}", unit)
    style.style_panel(time, "Seconds: training, and everything included", unit)
    if as_lines:
        _throughput_lines(throughput, rows)
        _time_lines(time, rows)
    else:
        rates = [row["images_per_second"] or NOTHING for row in rows]
        style.draw_bars(throughput, [row["devices"] for row in rows], rates)
        _time_bars(time, rows)
    for axes in (throughput, time):
        style.start_at_zero(axes, headroom=0.25)
        style.add_legend(axes, loc="upper left", ncols=3)
    style.write_png(figure, path)


def _throughput_lines(axes: "Axes", rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["images_per_second"]]
    counts = [row["world_size"] for row in rows]
    if not rows:
        return
    rates = [row["images_per_second"]["median"] for row in rows]
    by_threads = len({row["threads_per_rank"] for row in rows}) > 1
    ideal = [rates[0] * ideal_speed_up(row, rows[0]) for row in rows]
    label = "ideal by threads" if by_threads else "ideal"
    axes.plot(counts, ideal, color=style.MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label=label)
    axes.errorbar(
        counts, rates, yerr=style.whiskers([row["images_per_second"] for row in rows]), color=style.RIGHT,
        linewidth=1.8, marker="o", markersize=4.5, capsize=3, label="measured",
    )  # fmt: skip
    for row, rate in zip(rows, rates, strict=True):
        text = f"{rate:,.0f}"
        if row["speed_up"] and row["devices"] != row["base"]:
            text += f" (x {row['speed_up']:.2f})" if is_plausible(row, rows[0]) else "\nunreliable"
        style.add_label(axes, row["world_size"], row["images_per_second"]["min"], text, below=True)
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
    """Stack training after warm-up, warm-up, and everything else."""
    train, wall, warmup = (
        [(row[name] or NOTHING)["median"] for row in rows]
        for name in ("train_seconds", "wall_seconds", "warmup_seconds")
    )
    parts = (
        ("training", [t - w for t, w in zip(train, warmup, strict=True)], style.RIGHT),
        ("warm-up", warmup, style.ORANGE),
        ("set-up and the rest", [max(0.0, w - t) for w, t in zip(wall, train, strict=True)], style.FAINT),
    )
    bottom = [0.0] * len(rows)
    for label, seconds, colour in parts:
        axes.bar(
            range(len(rows)), seconds, bottom=bottom, width=0.55, color=colour, label=label if any(seconds) else ""
        )
        bottom = [b + s for b, s in zip(bottom, seconds, strict=True)]
    for position, (trained, top) in enumerate(zip(train, bottom, strict=True)):
        style.add_label(axes, position, top, f"{duration(trained)} of {duration(top)}")
    style.name_ticks(axes, [row["devices"] for row in rows])


def _count_ticks(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    margin = 0.18 * (max(counts) - min(counts)) or 0.5
    axes.set_xlim(min(counts) - margin, max(counts) + margin)
