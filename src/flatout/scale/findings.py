"""What the figures of `flatout scale` say, in plain sentences: how much faster, where the rest went, the same answer?

Each rule is one function of the content of scaling.json, and its threshold is a named constant with the reason
beside it. A row is one SPEC; its base is the SPEC of the same kind with the fewest devices.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# Above nine tenths there is little left to explain.
GOOD_EFFICIENCY = 0.9
# A share below a twentieth explains less than runs of the same command differ by.
NOTABLE_SHARE = 0.05
# With fewer images per device and step, starting the work takes longer than the work.
FEW_IMAGES = 16
# Warm-up that takes a tenth of the training time hides what a longer run would reach.
NOTABLE_WARMUP = 0.1
# Repeats on an idle machine differ by a few per cent; from a quarter on, something else was at work on it.
DISTURBED = 1.25


def findings(result: Mapping[str, Any]) -> list[str]:
    """Return what the figures say, a sentence or two for each finding.

    Args:
        result: the content of scaling.json; figures that were not measured are None.
    """
    rows = result["specs"]
    bases = {row["base"]: row for row in rows if row["base"] == row["devices"]}
    sentences = []
    for row in rows:
        base = bases[row["base"]]
        if row is not base:
            sentences += _against_base(row, base, result)
    sentences += _between_kinds(list(bases.values()))
    for row in rows:
        sentences += _warmup(row) + _setup(row, bases[row["base"]])
    return sentences + _answers(rows, result) + _repeats(result)


def _against_base(row: Row, base: Row, result: Mapping[str, Any]) -> list[str]:
    if row["speed_up"] is None:
        return []
    told = (
        f"{row['devices']} ({_size(row)}) trains {_times(row['speed_up'])} as fast as {base['devices']} ({_size(base)})"
    )
    if overlapping(row, base):
        return [f"{told}, but their repeats overlap: that is within the noise of this machine."]
    efficiency, cores = row["efficiency"], [_cores(r) for r in (row, base)]
    told += f", an efficiency of {efficiency:.0%}"
    if all(cores) and row["threads_per_rank"] != base["threads_per_rank"]:
        # Processes with fewer threads each are less than the processes they are compared with: count what works.
        efficiency = row["speed_up"] / ideal_speed_up(row, base)
        told += f" counted by processes, and of {efficiency:.0%} counted by threads"
    told += "."
    if efficiency >= GOOD_EFFICIENCY or row["world_size"] == base["world_size"]:
        return [told]
    reasons = _reasons(row, base, result)
    if reasons:
        return [f"{told} Where the rest went: {'; '.join(reasons)}."]
    if row["communication_fraction"] is None:
        return [f"{told} Where the rest went was not measured."]
    return [
        f"{told} Communication and input explain little of the rest;"
        " devices of one machine also share its memory, power and cooling."
    ]


def _reasons(row: Row, base: Row, result: Mapping[str, Any]) -> list[str]:
    """Return what keeps a SPEC from its ideal speed, as parts of a sentence."""
    reasons = []
    cores, threads = result["machine"]["cores"], _cores(row)
    if row["kind"] == "cpu" and threads is not None and threads > cores:
        reasons.append(f"{threads} threads take turns on {cores} cores")
    communication, waiting = (_median(row, f"{name}_fraction") or 0.0 for name in ("communication", "input_wait"))
    if communication >= NOTABLE_SHARE:
        reasons.append(f"{communication:.0%} of the time is communication and waiting for one another")
    if waiting >= NOTABLE_SHARE:
        reasons.append(f"{waiting:.0%} is waiting for images")
    batch, ranks = row["batch_size"], row["world_size"]
    largest = math.ceil(batch / ranks)
    idle = 1 - batch / ranks / largest
    if idle >= NOTABLE_SHARE:
        reasons.append(
            f"a batch of {batch} does not divide by {ranks}, and the devices with fewer images wait, {idle:.0%} of all"
        )
    if largest < FEW_IMAGES <= base["batch_size"] / base["world_size"]:
        reasons.append(f"{largest} images per device and step are too few to keep it busy; try a larger --batch-size")
    return reasons


def _between_kinds(bases: Sequence[Row]) -> list[str]:
    """Compare the smallest choice of each kind with that of the slowest kind."""
    measured = [row for row in bases if row["images_per_second"]]
    if len(measured) < 2:
        return []
    slowest = min(measured, key=lambda row: row["images_per_second"]["median"])
    sentences = []
    for row in measured:
        if row is not slowest:
            ratio = row["images_per_second"]["median"] / slowest["images_per_second"]["median"]
            told = f"{row['devices']} trains {_times(ratio)} as fast as {slowest['devices']} ({_size(slowest)})"
            noise = ", but their repeats overlap" if overlapping(row, slowest) else ""
            sentences.append(f"{told}{noise}.")
    return sentences


def _warmup(row: Row) -> list[str]:
    train, warmup = _median(row, "train_seconds"), _median(row, "warmup_seconds")
    if not train or warmup is None or warmup < NOTABLE_WARMUP * train:
        return []
    rate = row["images_per_second"]["median"] * train / max(train - warmup, 1e-9)
    return [
        f"Warm-up is {warmup / train:.0%} of the training time on {row['devices']};"
        f" beyond it, {rate:,.0f} images per second."
    ]


def _setup(row: Row, base: Row) -> list[str]:
    """Say when more devices train faster but are done later, as they are on little data."""
    times = [_median(r, name) for r in (row, base) for name in ("train_seconds", "wall_seconds")]
    if row is base or None in times:
        return []
    train, wall, base_train, base_wall = (time or 0.0 for time in times)
    if train >= base_train or wall < base_wall:
        return []
    return [
        f"Everything included, {row['devices']} takes {wall:.1f} s and {base['devices']} {base_wall:.1f} s:"
        " the run is too short for the time it takes to start. More epochs or more data would show the gain."
    ]


def _answers(rows: Sequence[Row], result: Mapping[str, Any]) -> list[str]:
    """Say whether every SPEC gave the same answer, and if not, whether that is as it should be."""
    answers = [n for row in rows for n in row["correct"] if n is not None]
    if len(answers) < 2:
        return []
    least, most, count, split = min(answers), max(answers), rows[0]["count"], rows[0]["split"]
    if least == most:
        return [f"Every run gives the same answer: {most:,} of {count:,} {split} images right."]
    told = f"The runs differ by {most - least:,} of {count:,} {split} images ({least:,} to {most:,} right)"
    if result["scaling"] == "weak":
        return [f"{told}: with --weak the batch grows with the devices, and so training itself differs."]
    if result["norm"] == "per-device" and len({row["world_size"] for row in rows}) > 1:
        return [f'{told}: norm = "per-device" normalises over each device\'s share, so that devices change the result.']
    if most - least <= explained_by_rounding(least, most, count):
        return [f"{told}: no more than rounding in another order of summation explains."]
    return [
        f"{told}: more than rounding in another order of summation explains."
        " Compare the notes in the run folders; --set precision=fp32 makes all devices compute alike."
    ]


def explained_by_rounding(least: int, most: int, count: int) -> float:
    """Return how many answers may differ between runs of one recipe that only sum in another order.

    Rounding differences grow over the steps until the runs are as far apart as two seeds at most, whose accuracies
    scatter by less than the binomial standard error of an accuracy on as many images; that is taken as the limit, and
    one image always.
    """
    share = (least + most) / 2 / count
    return max(1.0, math.sqrt(count * share * (1 - share)))


def _repeats(result: Mapping[str, Any]) -> list[str]:
    if result["repeats"] > 1:
        rates = [row["images_per_second"] for row in result["specs"] if row["images_per_second"]]
        worst = max((rate["max"] / rate["min"] for rate in rates), default=1.0)
        if worst < DISTURBED:
            return []
        return [f"Repeats differ by a factor of up to {worst:.1f}: the machine was busy with other work as well."]
    if len(result["specs"]) < 2:
        return []
    return ["Each was run once, so that nothing says how much of a difference is noise: --repeats 3 would."]


def overlapping(row: Row, other: Row) -> bool:
    """Whether the images per second of two SPECs, several repeats each, overlap."""
    first, second = row["images_per_second"], other["images_per_second"]
    repeated = len(row["correct"]) > 1 and len(other["correct"]) > 1
    return repeated and first["min"] <= second["max"] and second["min"] <= first["max"]


def ideal_speed_up(row: Row, base: Row) -> float:
    """Return how much more hardware a SPEC has than its base: devices, or threads on CPUs where they are known."""
    cores, base_cores = _cores(row), _cores(base)
    return cores / base_cores if cores and base_cores else row["world_size"] / base["world_size"]


def _median(row: Row, name: str) -> float | None:
    return row[name]["median"] if row[name] else None


def _cores(row: Row) -> int | None:
    """Return how many threads a SPEC works with on CPUs; None elsewhere, or where it is not known."""
    if row["kind"] != "cpu" or row["threads_per_rank"] is None:
        return None
    return row["world_size"] * row["threads_per_rank"]


def _size(row: Row) -> str:
    if row["threads_per_rank"] is None or row["kind"] != "cpu":
        return f"{row['world_size']} device{'s' if row['world_size'] > 1 else ''}"
    threads = f"{row['threads_per_rank']} thread{'s' if row['threads_per_rank'] > 1 else ''}"
    return f"{row['world_size']} x {threads}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:,.0f} times"
