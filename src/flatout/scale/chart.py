"""The chart of `flatout scale`: throughput and time, against the number of devices or side by side.

Several numbers of devices of one kind are drawn as lines over that number, the throughput with the line it would follow
if every device added as much as the first. Anything else, such as a CPU beside a GPU, is drawn as bars.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import duration
from flatout.report.pictures import INK, LINES, MUTED, RIGHT, _figure, _style_panel, _write, shorten
from flatout.scale.findings import ideal_speed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARMUP = LINES["test"][0]
OTHER = "#c3cbd3"
NAME_WIDTH = 16


def draw_scaling(path: Path, result: Mapping[str, Any]) -> None:
    """Write the chart as a PNG: on the left images per second, on the right time.

    Args:
        path: the PNG to write.
        result: the content of scaling.json; SPECs without a rate are left out of the left panel.

    Raises:
        InputError: the file cannot be written.
    """
    rows = result["specs"]
    counts = [row["world_size"] for row in rows]
    as_lines = len(rows) > 1 and len({row["kind"] for row in rows}) == 1 and len(set(counts)) == len(counts)
    figure = _figure(9.0, 3.9, dpi=170, layout="constrained")
    throughput, time = figure.subplots(1, 2)
    if as_lines:
        rows = sorted(rows, key=lambda row: row["world_size"])
        _throughput_lines(throughput, rows)
        _time_lines(time, rows)
        unit = "processes" if rows[0]["kind"] == "cpu" else "devices"
    else:
        _throughput_bars(throughput, rows)
        _time_bars(time, rows)
        unit = ""
    repeats = f", median of {result['repeats']} (least and most)" if result["repeats"] > 1 else ""
    _finish_panel(throughput, f"Images per second{repeats}", unit)
    _finish_panel(time, "Seconds: training, and everything included", unit)
    batch = f"{'per device' if result['scaling'] == 'weak' else 'global'} batch {result['batch_size']}"
    figure.suptitle(
        f"{shorten(result['job'], 40)}: {result['scaling']} scaling, {batch}, {result['epochs']} epochs",
        fontsize=10.5, weight="bold", color=INK, x=0.01, ha="left", parse_math=False,
    )  # fmt: skip
    _write(figure, path)


def _throughput_lines(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    rows = [row for row in rows if row["images_per_second"]]
    counts = [row["world_size"] for row in rows]
    rates = [row["images_per_second"]["median"] for row in rows]
    if rates:
        by_threads = rows[0]["kind"] == "cpu" and len({row["threads_per_rank"] for row in rows}) > 1
        ideal = [rates[0] * ideal_speed_up(row, rows[0]) for row in rows]
        label = "ideal by threads" if by_threads else "ideal"
        axes.plot(counts, ideal, color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label=label)
        axes.errorbar(
            counts, rates, yerr=_whiskers(rows), color=RIGHT, linewidth=1.8, marker="o", markersize=4.5, capsize=3,
            label="measured",
        )  # fmt: skip
        for row, rate in zip(rows, rates, strict=True):
            gain = f" (x {row['speed_up']:.2f})" if row["speed_up"] and row["devices"] != row["base"] else ""
            _number(axes, row["world_size"], row["images_per_second"]["min"], f"{rate:,.0f}{gain}", above=False)
    _counts_axis(axes, counts)


def _time_lines(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    counts = [row["world_size"] for row in rows]
    lines = (("wall_seconds", "everything", MUTED, "s"), ("train_seconds", "training", RIGHT, "o"))
    for name, label, colour, marker in lines:
        seconds = [row[name]["median"] for row in rows]
        axes.plot(counts, seconds, color=colour, linewidth=1.8, marker=marker, markersize=4.5, label=label)
        for count, value in zip(counts, seconds, strict=True):
            _number(axes, count, value, duration(value), above=name == "wall_seconds")
    _counts_axis(axes, counts)


def _throughput_bars(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    rates = [row["images_per_second"]["median"] if row["images_per_second"] else 0.0 for row in rows]
    whiskers = _whiskers(rows)
    axes.bar(range(len(rows)), rates, width=0.55, color=RIGHT, yerr=whiskers, error_kw={"ecolor": MUTED, "capsize": 3})
    for position, rate in enumerate(rates):
        top = rate + (whiskers[1][position] if whiskers else 0.0)
        _number(axes, position, top, f"{rate:,.0f}")
    _names_axis(axes, rows)


def _time_bars(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """Stack training after warm-up, warm-up, and everything else."""
    train = [row["train_seconds"]["median"] for row in rows]
    warmup = [row["warmup_seconds"]["median"] if row["warmup_seconds"] else 0.0 for row in rows]
    wall = [row["wall_seconds"]["median"] for row in rows]
    steady = [t - w for t, w in zip(train, warmup, strict=True)]
    rest = [max(0.0, w - t) for w, t in zip(wall, train, strict=True)]
    bottom = [0.0] * len(rows)
    parts = (
        ("training", steady, RIGHT, ""),
        ("warm-up", warmup, WARMUP, "///"),
        ("set-up and the rest", rest, OTHER, ""),
    )
    for label, seconds, colour, hatch in parts:
        if any(seconds):
            axes.bar(
                range(len(rows)), seconds, bottom=bottom, width=0.55, color=colour, hatch=hatch, edgecolor="#ffffff",
                linewidth=0.5, label=label,
            )  # fmt: skip
        bottom = [b + s for b, s in zip(bottom, seconds, strict=True)]
    for position, (trained, top) in enumerate(zip(train, bottom, strict=True)):
        _number(axes, position, top, f"{duration(trained)} of {duration(top)}")
    _names_axis(axes, rows)


def _whiskers(rows: Sequence[Mapping[str, Any]]) -> list[list[float]] | None:
    """Return how far the least and the most lie from the median; None where nothing was repeated."""
    rates = [row["images_per_second"] or {"median": 0.0, "min": 0.0, "max": 0.0} for row in rows]
    if all(rate["min"] == rate["max"] for rate in rates):
        return None
    return [[rate["median"] - rate["min"] for rate in rates], [rate["max"] - rate["median"] for rate in rates]]


def _number(axes: "Axes", x: float, y: float, text: str, *, above: bool = True) -> None:
    offset = (0, 5 if above else -13)
    behind = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}  # a line may pass there
    axes.annotate(text, (x, y), offset, textcoords="offset points", fontsize=8, color=INK, ha="center", bbox=behind)


def _counts_axis(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    if counts:
        margin = 0.18 * (max(counts) - min(counts)) or 0.5
        axes.set_xlim(min(counts) - margin, max(counts) + margin)


def _names_axis(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xticks(range(len(rows)), [shorten(row["devices"], NAME_WIDTH) for row in rows])
    axes.set_xlim(-0.7, len(rows) - 0.3)


def _finish_panel(axes: "Axes", title: str, unit: str) -> None:
    _style_panel(axes, title)
    axes.set_xlabel(unit, fontsize=8, color=MUTED)
    # Room for the legend above the highest mark.
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    axes.yaxis.set_major_formatter("{x:,.4g}" if axes.get_ylim()[1] < 10 else "{x:,.0f}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left", ncols=3, framealpha=0.85, edgecolor="none", fontsize=8, labelcolor=INK, borderaxespad=0.2
        )
