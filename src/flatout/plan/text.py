"""The text that `flatout plan` prints."""

from collections.abc import Mapping
from typing import Any

from flatout.console import aligned, counted, duration

Row = Mapping[str, Any]


def lines_of(result: Row) -> list[str]:
    """Return a plan as lines for people; `result` is what `flatout.plan.plan.plan` returned."""
    head = (
        f"{result['job']}: {result['model']}, batch {result['batch_size']:,}, {counted(result['epochs'], 'epoch')} of "
        f"{result['images']:,} images of {result['classes']} classes ({result['data']})"
    )
    lines = _estimated_lines(result) if result["estimate"] else _measured_lines(result)
    return [head, "", *lines, f"{result['out']}: plan.json, plan.png"]


def _estimated_lines(result: Row) -> list[str]:
    head = ["topology", "chips", "memory of each", "compute", "memory", "links", "step", "images/s", "job"]
    table = [[*head, "cost"] if result["price_per_chip_hour"] is not None else head]
    for row in result["topologies"]:
        memory = f"{size(row['needed_bytes']) if row['needed_bytes'] else '?'} of {size(row['memory_bytes'])}"
        cells = [row["topology"], str(row["chips"]), memory]
        if row["fits"]:
            times = row["seconds"]
            limits = ("compute", "memory", "interconnect")
            cells += [f"{short(times[name])}{'*' if name == row['limit'] else ' '}" for name in limits]
            cells += [short(times["step"]), f"≤ {number(row['images_per_second'])}", span(row["job_seconds"])]
            if len(table[0]) > len(cells):
                cells.append(f"{row['cost']:,.2f}" if row["cost"] >= 0.1 else f"{row['cost']:.2g}")
        else:
            cells.append("does not fit")
        table.append(cells)
    lines = [
        *aligned(table),
        "",
        "* limits the step. All figures are upper bounds of the speed: the compiler's counts at the chip's peak rates.",
        "  Real steps take longer; reading images, starting steps and evaluation are not included: docs/plan.md.",
    ]
    for row in result["topologies"]:
        lines += [f"{row['topology']}: {remark}." for remark in _remarks(result, row)]
    if result["scaling"]:
        shown = [r for r in result["scaling"] if r["chips"] in (1, 4, 16, 64, 256)]
        parts = ", ".join(f"{r['chips']}: {r['efficiency']:.0%}" for r in shown)
        generation = result["scaling_of"].partition(":")[0]
        lines.append(f"Efficiency of the same batch by number of {generation} chips: {parts}.")
    return lines


def _remarks(result: Row, row: Row) -> list[str]:
    found, batch, largest = [], f"{result['batch_size']:,}", row.get("largest_batch")
    if "largest_batch" in row and largest is None:
        found.append("no batch was found to fit; try a generation with more memory, or --set shard=full")
    elif largest is not None and row["fits"]:
        found.append(f"the largest batch that fits is about {largest:,}")
    elif largest is not None:
        found.append(f"a batch of {batch} does not fit; the largest that does is about {largest:,}")
    if row["padding_fraction"] > 0:
        found.append(
            f"{row['devices']} devices cannot share a batch of {batch} evenly; {row['padding_fraction']:.1%} of the"
            f" work is padding. A batch of {row['batch_padded']:,} costs the same"
        )
    if row.get("host_transfers"):
        found.append(f"the program waits for the host {len(row['host_transfers'])} times in each step")
    return found


def _measured_lines(result: Row) -> list[str]:
    head = ["devices", "processes x threads", "memory", "step", "images/s", "least to most", "job", "least to most"]
    table, remarks = [head], []
    for row in result["devices"]:
        rate, job = row["images_per_second"], row["job_seconds"]
        cells = [row["devices"], f"{row['processes']} x {row['threads_per_process']}"]
        cells += [size(row["peak_device_bytes"] or row["peak_rss_bytes"]), short(row["step_seconds"]["median"])]
        for figure, text in ((rate, number), (job, span)):
            cells += [text(figure["median"]), f"{text(figure['min'])} to {text(figure['max'])}"]
        table.append(cells)
        held, every = row["images_measured"], result["images"]
        rest = f"; all {every:,} take {size(row['image_bytes'])}" if held < every else ""
        whose = "the device with the most" if row["peak_device_bytes"] else "all processes"
        remarks.append(
            f"{row['devices']}: {row['repeats']} times {counted(row['steps_each'], 'step')}, after "
            f"{span(row['warmup_seconds'])} of start and warm-up; memory of {whose}, with {held:,} images{rest}."
        )
        if row["once_seconds"] > 0.01 * job["median"]:
            once = span(row["once_seconds"])
            remarks.append(f"{row['devices']}: {once} of the job is the frozen layers, computed once and cached.")
    note = "Training steps on random images; reading and decoding, evaluation and reports are not included."
    return [*aligned(table), "", note, *remarks]


def size(count: float) -> str:
    """Return a number of bytes as text: `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if count < 1000 else f"{count / 1024:.3g} TiB"


def number(value: float) -> str:
    """Return a rate as text: `12,345`, `8.25`."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def span(seconds: float) -> str:
    """Return a duration as text: `0.31 s`, `4 min 29 s`."""
    return duration(seconds) if seconds >= 1 else short(seconds)


def short(seconds: float) -> str:
    """Return a short duration as text: `1.23 ms`, `45 us`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if factor * seconds < 999.5:
            return f"{factor * seconds:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
