"""A plan in words: what `flatout plan` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.console import duration


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Return a plan as lines for people; `result` is what `flatout.plan.plan.plan` returned."""
    lines = [
        f"{result['job']}: {result['model']}, batch {result['batch_size']:,}, {counted(result['epochs'], 'epoch')} of "
        f"{result['images']:,} images of {result['classes']} classes ({result['data']})",
        "",
    ]
    lines += _compiled_lines(result) if result["estimate"] else _measured_lines(result)
    return [*lines, f"{result['out']}: plan.json, plan.png"]


def _compiled_lines(result: Mapping[str, Any]) -> list[str]:
    priced = result["price_per_chip_hour"] is not None
    head = ["topology", "chips", "memory of each", "compute", "memory", "links", "step", "images/s", "job"]
    table = [[*head, "cost"] if priced else head]
    for row in result["topologies"]:
        memory = f"{size(row['needed_bytes']) if row['needed_bytes'] else '?'} of {size(row['memory_bytes'])}"
        if not row["fits"]:
            table.append([row["topology"], str(row["chips"]), memory, "does not fit"])
            continue
        times, shown = row["seconds"], ("compute", "memory", "interconnect")
        cells = [row["topology"], str(row["chips"]), memory]
        cells += [f"{short(times[name])}{'*' if name == row['limit'] else ' '}" for name in shown]
        cells += [short(times["step"]), number(row["images_per_second"]), span(row["job_seconds"])]
        table.append(
            [*cells, f"{row['cost']:,.2f}" if row["cost"] >= 0.1 else f"{row['cost']:.2g}"] if priced else cells
        )
    lines = [
        *_aligned(table),
        "",
        "* decides. An estimate of the best case: what the compiler counts, by the chip's published peaks. Real steps",
        "  take longer; reading images, starting steps and evaluation come on top: docs/plan.md.",
    ]
    for row in result["topologies"]:
        lines += _remarks(result, row)
    if result["scaling"]:
        shown = [r for r in result["scaling"] if r["chips"] in (1, 4, 16, 64, 256)]
        parts = ", ".join(f"{r['chips']}: {r['efficiency']:.0%}" for r in shown)
        generation = result["scaling_of"].partition(":")[0]
        lines.append(f"Efficiency with the same batch on so many chips of {generation}: {parts}.")
    return lines


def _measured_lines(result: Mapping[str, Any]) -> list[str]:
    head = ["devices", "processes x threads", "memory", "step", "images/s", "least to most", "job", "least to most"]
    table, remarks = [head], []
    for row in result["devices"]:
        rate, job = row["images_per_second"], row["job_seconds"]
        memory = row["peak_device_bytes"] or row["peak_rss_bytes"]
        table.append(
            [
                row["devices"],
                f"{row['processes']} x {row['threads_per_process']}",
                size(memory),
                short(row["step_seconds"]["median"]),
                number(rate["median"]),
                f"{number(rate['min'])} to {number(rate['max'])}",
                span(job["median"]),
                f"{span(job['min'])} to {span(job['max'])}",
            ]
        )
        remarks += _measured_remarks(result, row)
    sampled = (
        "Measured on random images, for the steps alone: reading and decoding, evaluation and reports come on top."
    )
    return [*_aligned(table), "", sampled, *remarks]


def _measured_remarks(result: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of one SPEC, sentences."""
    name = row["devices"]
    steps, warm_up = counted(row["steps_each"], "step"), span(row["warmup_seconds"])
    held, every = row["images_measured"], result["images"]
    rest = f"; all {every:,} take {size(row['image_bytes'])}" if held < every else ""
    of = "the device that took most" if row["peak_device_bytes"] else "all processes"
    found = [
        f"{name}: {row['repeats']} times {steps}, after {warm_up} of start and warm-up; "
        f"memory of {of}, with {held:,} images{rest}."
    ]
    if row["once_seconds"] > 0.01 * row["job_seconds"]["median"]:
        found.append(f"{name}: {span(row['once_seconds'])} of the job is the frozen layers, computed once and cached.")
    return found


def _remarks(result: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of one topology, sentences."""
    name, found = row["topology"], []
    if "largest_batch" in row:
        largest = row["largest_batch"]
        if largest is None:
            found.append(f"{name}: no batch was found to fit; try a generation with more memory, or --set shard=full.")
        elif row["fits"]:
            found.append(f"{name}: the largest batch that fits is about {largest:,}.")
        else:
            batch = f"{result['batch_size']:,}"
            found.append(f"{name}: a batch of {batch} does not fit; the largest that does is about {largest:,}.")
    if row["padding_fraction"] > 0:
        found.append(
            f"{name}: {row['devices']} devices cannot share a batch of {result['batch_size']:,} evenly; "
            f"{row['padding_fraction']:.1%} of the work is padding. A batch of {row['batch_padded']:,} costs the same."
        )
    if row.get("host_transfers"):
        found.append(f"{name}: the program waits for the host {len(row['host_transfers'])} times in each step.")
    return found


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows with each column as wide as its widest cell; the last cell of a short row may be longer."""
    columns = max(map(len, table))
    widths = [max((len(r[i]) for r in table if i < len(r) - (len(r) < columns)), default=0) for i in range(columns)]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=False)))
        for r in table
    ]


def size(count: float) -> str:
    """Return a number of bytes in words: `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if count < 1000 else f"{count / 1024:.3g} TiB"


def number(value: float) -> str:
    """Return a rate in words: `12,345`, `8.25`."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """Return so many of something: `1 step`, `2,000 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def span(seconds: float) -> str:
    """Return a time in words, one below a second too: `0.31 s`, `4 min 29 s`."""
    return duration(seconds) if seconds >= 1 else short(seconds)


def short(seconds: float) -> str:
    """Return a short time in words: `1.23 ms`, `45 us`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if factor * seconds < 999.5:
            return f"{factor * seconds:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
