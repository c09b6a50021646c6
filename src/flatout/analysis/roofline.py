"""Estimates of time, memory and cost for other hardware: a step's work divided by published peaks.

`flatout plan` compiles the step for a kind of hardware (`tpu`); everything here is the same for all kinds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.config import Recipe
from flatout.data.batches import steps_per_epoch

# Minimum share of a device's memory that a program can use; the compiler knows the exact limit.
MEMORY_SHARE = 0.97
# The search for the largest batch ends within this share of the memory, or after this many compilations.
BATCH_TOLERANCE, MAX_COMPILATIONS = 0.05, 6


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Hardware to estimate a job for, such as a slice of TPU chips.

    Attributes:
        name: as users write it, `KIND:SIZE`.
        chips: the unit of the price.
        devices: the units that share a batch; a chip may be several.
        flops, memory_bandwidth, memory_bytes: of one device; operations and bytes per second, bytes.
    """

    name: str
    chips: int
    devices: int
    flops: float
    memory_bandwidth: float
    memory_bytes: float

    def message_seconds(self, kind: str, size: float, count: int = 1) -> float:
        """Return the time of `count` collectives with results of `size` bytes in all on each device."""
        raise NotImplementedError

    def sizes(self) -> "Sequence[Accelerator]":
        """Return the same hardware with 1, 2, 4 and more chips."""
        raise NotImplementedError


# The figures of a step, per device, for hardware and a global batch; see `tpu.compile_step`.
Compile = Callable[[Any, int], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a job.

    Attributes:
        recipe: complete.
        images: training images.
        classes: their classes.
        about: the source of those numbers.
    """

    recipe: Recipe
    images: int
    classes: int
    about: str

    @property
    def batch(self) -> int:
        """Images per step."""
        return min(self.recipe.batch_size, self.images)

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        return self.recipe.epochs * steps_per_epoch(self.images, self.batch, self.recipe.drop_last)

    @property
    def images_trained(self) -> int:
        """Images trained in all steps together."""
        return self.steps * self.batch if self.recipe.drop_last else self.recipe.epochs * self.images


def estimate(
    work: Work, choices: Sequence[Accelerator], compile_step: Compile, price: float | None, *, largest_batch: bool
) -> dict[str, Any]:
    """Return the estimates in plan.json: a row for each hardware, and the scaling to more chips.

    Args:
        price: the price of one chip for an hour.
        largest_batch: search for the largest batch that fits, even if the job's batch does.
    """
    rows, base = [], None
    for choice in choices:
        compiled = compile_step(choice, work.batch)
        row = estimate_row(work, choice, compiled, price)
        if not row["fits"] or largest_batch:
            row["largest_batch"] = find_largest_batch(compile_step, choice, work.batch)
        rows.append(row)
        # A single device sends no messages, so its values cannot be extrapolated to several.
        if base is None and row["fits"] and choice.devices > 1:
            base = choice, compiled
    return {
        "estimate": True,
        "price_per_chip_hour": price,
        "topologies": rows,
        "scaling": _scaling_curve(work, *base, price) if base else [],
        "scaling_of": base[0].name if base else None,
    }


def estimate_row(
    work: Work, choice: Accelerator, compiled: Mapping[str, Any], price: float | None = None
) -> dict[str, Any]:
    """Return the table row of hardware for which a step was compiled."""
    padded = _padded(work.batch, choice)
    copied = ("fits", "needed_bytes", "argument_bytes", "temporary_bytes", "collectives", "host_transfers")
    row: dict[str, Any] = {
        "topology": choice.name,
        "chips": choice.chips,
        "devices": choice.devices,
        "memory_bytes": choice.memory_bytes,
        "batch_padded": padded,
        "padding_fraction": 1 - work.batch / padded,
        **{key: compiled[key] for key in copied},
    }
    if not compiled["fits"]:
        return row
    seconds = _step_seconds(compiled, choice)
    times = _job_times(work, choice, seconds, price)
    return row | {
        "flops": compiled["flops"],
        "bytes_accessed": compiled["memory_bytes"],
        "state_bytes": compiled["state_bytes"],
        "seconds": {**seconds, "step": max(seconds.values()), "compiler": compiled["seconds"]},
        "epoch_seconds": times["job_seconds"] / work.recipe.epochs,
        **times,
    }


def _padded(batch: int, choice: Accelerator) -> int:
    return -(-batch // choice.devices) * choice.devices


def _step_seconds(compiled: Mapping[str, Any], choice: Accelerator) -> dict[str, float]:
    messages = [choice.message_seconds(c["kind"], c["bytes"], c["count"]) for c in compiled["collectives"]]
    return {
        "compute": compiled["flops"] / choice.flops,
        "memory": compiled["memory_bytes"] / choice.memory_bandwidth,
        "interconnect": sum(messages),
    }


def _job_times(work: Work, choice: Accelerator, seconds: Mapping[str, float], price: float | None) -> dict[str, Any]:
    job = max(seconds.values()) * work.steps
    return {
        "limit": max(seconds, key=lambda name: seconds[name]),
        "images_per_second": work.images_trained / job,
        "job_seconds": job,
        "cost": None if price is None else price * choice.chips * job / 3600,
    }


def _scaling_curve(
    work: Work, base: Accelerator, compiled: Mapping[str, Any], price: float | None
) -> list[dict[str, Any]]:
    """Return the estimate for other numbers of chips, from a step compiled for some.

    Compute and memory traffic of a chip are proportional to its share of the batch, except that every chip reads and
    writes all weights and optimizer state, twice per step.
    """
    share = _padded(work.batch, base) / base.devices
    fixed = min(4 * compiled["state_bytes"], compiled["memory_bytes"])
    rows: list[dict[str, Any]] = []
    for choice in base.sizes():
        relative = -(-work.batch // choice.devices) / share
        scaled = {
            "flops": compiled["flops"] * relative,
            "memory_bytes": fixed + (compiled["memory_bytes"] - fixed) * relative,
            "collectives": compiled["collectives"],
        }
        times = _job_times(work, choice, _step_seconds(scaled, choice), price)
        rate_per_chip = times["images_per_second"] / choice.chips
        efficiency = rate_per_chip / rows[0]["images_per_second"] if rows else 1.0
        rows.append({"chips": choice.chips, "efficiency": efficiency, **times})
    return rows


def find_largest_batch(compile_step: Compile, choice: Accelerator, batch: int) -> int | None:
    """Return the largest batch found to fit, None if none does.

    A step's memory grows almost in proportion to its batch, so each attempt extrapolates from the nearest two.
    """
    limit, devices = MEMORY_SHARE * choice.memory_bytes, choice.devices
    fits, fails = 0, 0
    known = [(0.0, 0)]
    for _ in range(MAX_COMPILATIONS):
        compiled = compile_step(choice, batch)
        needed = compiled["needed_bytes"]
        if needed:
            known.append((needed, batch))
        if compiled["fits"]:
            fits = max(fits, batch)
        else:
            fails = min(fails or batch, batch)
        is_full = batch == fits and needed >= (1 - BATCH_TOLERANCE) * limit
        if is_full or (fails and fails - fits <= max(devices, BATCH_TOLERANCE * fits)):
            break
        # Without a valid extrapolation: the geometric mean of both bounds, or half or double the known one.
        batch = math.isqrt(fits * fails) if fits and fails else fails // 2 or 2 * fits
        (m0, b0), *others = sorted(known, key=lambda point: abs(point[0] - limit))[:2]
        for m1, b1 in others:
            # Slightly less, since a batch that fits is worth more than one that does not.
            guess = int(0.98 * (b0 + (limit - m0) * (b1 - b0) / (m1 - m0))) if m1 != m0 else 0
            batch = guess if fits < guess < (fails or math.inf) else batch
        batch = max(devices, batch // devices * devices)
    return fits or None
