"""What the figures of `flatout scale` mean, in plain sentences.

A row is one SPEC; its base is the SPEC of the same kind with the fewest devices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# Above nine tenths there is little left to explain.
GOOD_EFFICIENCY = 0.9
# Caches may make a little more than ideal possible; anything beyond is a measurement that is too short or disturbed.
LARGEST_EFFICIENCY = 1.05
# A share below a twentieth is less than runs of the same command differ by.
NOTABLE_SHARE = 0.05
# With fewer images per device and step, starting the work takes longer than the work.
FEW_IMAGES = 16
# Warm-up that takes a tenth of the training time hides what a longer run would reach.
NOTABLE_WARMUP = 0.1
# Repeats on an idle machine differ by a few per cent; from a quarter on, something else was running on it.
DISTURBED = 1.25


def findings(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence or two for each finding on the content of scaling.json; unknown figures are None."""
    rows = result["specs"]
    bases = {row["base"]: row for row in rows if row["base"] == row["devices"]}
    larger = [row for row in rows if row["base"] != row["devices"] and row["speed_up"] is not None]
    return [
        *(_against_base(row, bases[row["base"]], result) for row in larger),
        *_between_kinds([row for row in bases.values() if row["images_per_second"]]),
        *(sentence for row in rows for sentence in _times_of(row, bases[row["base"]])),
        *_answers(rows, result),
        *_repeats(result),
    ]


def _against_base(row: Row, base: Row, result: Mapping[str, Any]) -> str:
    sentence = _compared(row, base, row["speed_up"], with_size=True)
    if overlapping(row, base):
        return f"{sentence}, but their repeats overlap: the difference is within the noise of this machine."
    efficiency = row["speed_up"] / ideal_speed_up(row, base)
    sentence += f", an efficiency of {row['efficiency']:.0%}"
    if not math.isclose(efficiency, row["efficiency"]):
        # Processes with fewer threads each are compared with fewer processes of more threads.
        sentence += f" counted by processes, and of {efficiency:.0%} counted by threads"
    if not is_plausible(row, base):
        return (
            f"{sentence}. More than 100% is not plausible: the runs were too short or disturbed."
            " Measure again with --repeats 3 and more --epochs."
        )
    if efficiency >= GOOD_EFFICIENCY or row["world_size"] == base["world_size"]:
        return f"{sentence}."
    if reasons := "; ".join(_reasons(row, base, result)):
        return f"{sentence}. Causes: {reasons}."
    if row["communication_fraction"] is None:
        return f"{sentence}. The causes were not measured."
    return (
        f"{sentence}. Communication and input explain little of the loss; devices of one machine also share its memory,"
        " power and cooling."
    )


def _reasons(row: Row, base: Row, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keeps a SPEC from its ideal speed, as parts of a sentence."""
    cores, threads = result["machine"]["cores"], _threads(row)
    if threads is not None and threads > cores:
        yield f"{threads} threads share {cores} cores"
    if (share := median(row, "communication_fraction") or 0.0) >= NOTABLE_SHARE:
        yield f"{share:.0%} of the time is communication and waiting for other devices"
    if (share := median(row, "input_wait_fraction") or 0.0) >= NOTABLE_SHARE:
        yield f"{share:.0%} is waiting for images"
    batch, ranks = row["batch_size"], row["world_size"]
    largest = math.ceil(batch / ranks)
    if (share := 1 - batch / ranks / largest) >= NOTABLE_SHARE:
        yield f"a batch of {batch} does not divide by {ranks}: devices are idle for {share:.0%} of the time"
    if largest < FEW_IMAGES <= base["batch_size"] / base["world_size"]:
        yield f"{largest} images per device and step are too few to keep it busy; try a larger --batch-size"


def _between_kinds(bases: Sequence[Row]) -> Iterator[str]:
    """Compare the smallest choice of each kind with that of the slowest kind."""
    rates = [row["images_per_second"]["median"] for row in bases]
    for row, rate in zip(bases, rates, strict=True):
        slowest = bases[rates.index(min(rates))]
        if row is not slowest:
            noise = ", but their repeats overlap" if overlapping(row, slowest) else ""
            yield f"{_compared(row, slowest, rate / min(rates))}{noise}."


def _compared(row: Row, base: Row, ratio: float, *, with_size: bool = False) -> str:
    name = f"{row['devices']} ({_size(row)})" if with_size else row["devices"]
    times = f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
    return f"{name} trains {times} times as fast as {base['devices']} ({_size(base)})"


def _times_of(row: Row, base: Row) -> Iterator[str]:
    """Report a long warm-up, and more devices that train faster but finish later, as they do on little data."""
    train, base_train = median(row, "train_seconds") or 0.0, median(base, "train_seconds") or 0.0
    wall, base_wall = median(row, "wall_seconds") or 0.0, median(base, "wall_seconds") or 0.0
    warmup = median(row, "warmup_seconds") or 0.0
    if train and warmup >= NOTABLE_WARMUP * train:
        rate = row["images_per_second"]["median"] * train / max(train - warmup, 1e-9)
        yield (
            f"Warm-up is {warmup / train:.0%} of the training time on {row['devices']};"
            f" without it: {rate:,.0f} images per second."
        )
    if train < base_train and wall >= base_wall:
        yield (
            f"Everything included, {row['devices']} takes {wall:.1f} s and {base['devices']} {base_wall:.1f} s:"
            " starting takes longer than training saves. More epochs or more data would show the gain."
        )


def _answers(rows: Sequence[Row], result: Mapping[str, Any]) -> Iterator[str]:
    """Report whether every SPEC gave the same answers, and if not, why."""
    answers = [n for row in rows for n in row["correct"] if n is not None]
    if len(answers) < 2:
        return
    least, most, count, split = min(answers), max(answers), rows[0]["count"], rows[0]["split"]
    if least == most:
        yield f"Every run gives the same answer: {most:,} of {count:,} {split} images right."
        return
    if result["scaling"] == "weak":
        reason = "with --weak the batch grows with the devices, which changes training itself"
    elif result["norm"] == "per-device" and len({row["world_size"] for row in rows}) > 1:
        reason = 'norm = "per-device" normalises over each device\'s share, so the number of devices changes the result'
    elif most - least <= explained_by_rounding(least, most, count):
        reason = "the order of summation explains that"
    else:
        reason = (
            "more than the order of summation explains. Compare the notes in the run folders;"
            " --set precision=fp32 makes all devices compute alike"
        )
    yield f"The runs differ by {most - least:,} of {count:,} {split} images ({least:,} to {most:,} right): {reason}."


def explained_by_rounding(least: int, most: int, count: int) -> float:
    """Return how many answers may differ between runs of one recipe that only sum in another order.

    Rounding differences grow over the steps until the runs are as far apart as two seeds at most, whose accuracies
    scatter by less than the binomial standard error of an accuracy on as many images. One image is always allowed.
    """
    share = (least + most) / 2 / count
    return max(1.0, math.sqrt(count * share * (1 - share)))


def _repeats(result: Mapping[str, Any]) -> Iterator[str]:
    rates = [row["images_per_second"] for row in result["specs"] if row["images_per_second"]]
    worst = max((rate["max"] / rate["min"] for rate in rates), default=1.0)
    if worst >= DISTURBED:
        yield f"Repeats differ by a factor of up to {worst:.1f}: the machine was busy with other work as well."
    if result["repeats"] == 1 and len(result["specs"]) > 1:
        yield "Each SPEC was run once, so noise cannot be told from a difference; --repeats 3 measures it."


def overlapping(row: Row, other: Row) -> bool:
    """Return whether the images per second of two SPECs, several repeats each, overlap."""
    first, second = row["images_per_second"], other["images_per_second"]
    repeated = len(row["correct"]) > 1 and len(other["correct"]) > 1
    return repeated and first["min"] <= second["max"] and second["min"] <= first["max"]


def ideal_speed_up(row: Row, base: Row) -> float:
    """Return how much more hardware a SPEC has than its base: threads where they compute, else devices."""
    threads, base_threads = _threads(row), _threads(base)
    return threads / base_threads if threads and base_threads else row["world_size"] / base["world_size"]


def is_plausible(row: Row, base: Row) -> bool:
    """Return whether the speed-up of a SPEC is possible with its hardware."""
    return row["speed_up"] is None or row["speed_up"] <= LARGEST_EFFICIENCY * ideal_speed_up(row, base)


def median(row: Row, name: str) -> float | None:
    """Return the median of a figure; None where it was not measured."""
    return row[name]["median"] if row[name] else None


def _threads(row: Row) -> int | None:
    return row["world_size"] * row["threads_per_rank"] if row["threads_per_rank"] else None


def _size(row: Row) -> str:
    if row["threads_per_rank"] is None:
        return f"{row['world_size']} device{'s' if row['world_size'] > 1 else ''}"
    return f"{row['world_size']} x {row['threads_per_rank']} thread{'s' if row['threads_per_rank'] > 1 else ''}"
