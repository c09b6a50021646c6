"""A plan in words: what `flatout plan` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.console import duration


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Return a plan as lines for people."""
    lines = [
        f"{result['job']}: {result['model']}, batch {result['batch_size']:,}, {result['epochs']} epochs of "
        f"{result['images']:,} images of {result['classes']} classes ({result['data']})",
        "",
    ]
    priced = result["price_per_chip_hour"] is not None
    head = ["topology", "chips", "memory of each", "compute", "memory", "links", "step", "images/s", "job"]
    table = [[*head, "cost"] if priced else head]
    for row in result["topologies"]:
        memory = f"{size(row['needed_bytes'])} of {size(row['memory_bytes'])}"
        if "seconds" not in row:
            table.append([row["topology"], str(row["chips"]), memory, "does not fit"])
            continue
        times = row["seconds"]
        cells = [row["topology"], str(row["chips"]), memory if row["fits"] else f"{memory}: does not fit"]
        shown = ("compute", "memory", "interconnect", "step")
        cells += [f"{short(times[name])}{'*' if name == row['limit'] else ''}" for name in shown]
        cells += [f"{row['images_per_second']:,.0f}", duration(row["job_seconds"])]
        table.append([*cells, f"{row['cost']:,.2f}"] if priced else cells)
    lines += _aligned(table)
    lines += [
        "",
        "* decides. An estimate: what the compiler counts, by the chip's published peaks; see docs/plan.md.",
    ]
    for row in result["topologies"]:
        lines += _remarks(result, row)
    if result["scaling"]:
        shown = [r for r in result["scaling"] if r["chips"] in (1, 4, 16, 64, 256)]
        parts = ", ".join(f"{r['chips']} {r['efficiency']:.0%}" for r in shown)
        lines.append(f"Efficiency with the same batch on so many chips: {parts}.")
    return lines


def _remarks(result: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of one topology, sentences."""
    name, found = row["topology"], []
    if "largest_batch" in row:
        largest = row["largest_batch"]
        if largest is None:
            found.append(f"{name}: not even one image a chip fits; try a larger generation, or --set shard=full.")
        elif row["fits"]:
            found.append(f"{name}: the largest batch that fits is about {largest:,}.")
        else:
            found.append(
                f"{name}: a batch of {result['batch_size']:,} does not fit; the largest that does: {largest:,}."
            )
    if row["padding_fraction"] > 0:
        found.append(
            f"{name}: {row['chips']} chips cannot share {result['batch_size']:,} evenly; "
            f"{row['padding_fraction']:.0%} of the work is padding. A batch of {row['batch_padded']:,} costs the same."
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
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} GiB"


def short(seconds: float) -> str:
    """Return a short time in words: `1.23 ms`, `45 us`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
