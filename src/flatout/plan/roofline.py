"""Estimates of time and cost: a compiled step's work, divided by the chip's published peaks; see docs/plan.md."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.data.batches import steps_per_epoch
from flatout.plan.chips import GENERATIONS, Topology
from flatout.recipe import Recipe

# The efficiency is estimated for up to this number of chips.
MAX_CHIPS = 256


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be computed.

    Attributes:
        recipe: complete.
        images: training images.
        classes: their classes.
        about: where those numbers come from.
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


def step_seconds(compiled: Mapping[str, Any], topology: Topology) -> dict[str, float]:
    """Return the time of a compiled step by each of three limits, the longest of which decides."""
    peaks = topology.generation
    return {
        "compute": compiled["flops"] / (peaks.flops / peaks.cores),
        "memory": compiled["memory_bytes"] / (peaks.memory_bandwidth / peaks.cores),
        "interconnect": sum(
            topology.message_seconds(c["kind"], c["bytes"], c["count"]) for c in compiled["collectives"]
        ),
    }


def row_of(work: Work, topology: Topology, compiled: Mapping[str, Any], price: float | None) -> dict[str, Any]:
    """Return the table row of a topology.

    Args:
        compiled: fields of `plan.topology.Compiled`.
        price: of one chip for an hour.
    """
    padded = -(-work.batch // topology.devices) * topology.devices
    copied = ("fits", "needed_bytes", "argument_bytes", "temporary_bytes", "collectives", "host_transfers")
    row: dict[str, Any] = {
        "topology": topology.name,
        "chips": topology.chips,
        "devices": topology.devices,
        "memory_bytes": topology.device_memory_bytes,
        "batch_padded": padded,
        "padding_fraction": 1 - work.batch / padded,
        **{key: compiled[key] for key in copied},
    }
    if not compiled["fits"]:
        return row
    seconds = step_seconds(compiled, topology)
    estimate = _estimate(work, topology, seconds, price)
    return row | {
        "flops": compiled["flops"],
        "bytes_accessed": compiled["memory_bytes"],
        "state_bytes": compiled["state_bytes"],
        "seconds": {**seconds, "step": max(seconds.values()), "compiler": compiled["seconds"]},
        "epoch_seconds": estimate["job_seconds"] / work.recipe.epochs,
        **estimate,
    }


def _estimate(work: Work, topology: Topology, seconds: Mapping[str, float], price: float | None) -> dict[str, Any]:
    """Return what a topology takes for the whole job, with such steps."""
    job = max(seconds.values()) * work.steps
    return {
        "limit": max(seconds, key=lambda name: seconds[name]),
        "images_per_second": work.images_trained / job,
        "job_seconds": job,
        "cost": None if price is None else price * topology.chips * job / 3600,
    }


def scaling_curve(work: Work, base: Mapping[str, Any] | None, price: float | None) -> list[dict[str, Any]]:
    """Return the estimate for 1 to 256 chips of a topology's generation, from the topology's row in the table.

    Compute and memory traffic of a chip are proportional to its share of the batch, except that every chip reads and
    writes all weights and optimizer state, twice per step.
    """
    if base is None:
        return []
    generation = GENERATIONS[base["topology"].partition(":")[0]]
    share = base["batch_padded"] / base["devices"]
    fixed = min(4 * base["state_bytes"], base["bytes_accessed"])
    rows: list[dict[str, Any]] = []
    for sides in _slices(len(generation.slices[0].split("x"))):
        topology = Topology(generation=generation, sides=sides)
        own = -(-work.batch // topology.devices) / share
        compiled = {
            "flops": base["flops"] * own,
            "memory_bytes": fixed + (base["bytes_accessed"] - fixed) * own,
            "collectives": base["collectives"],
        }
        estimate = _estimate(work, topology, step_seconds(compiled, topology), price)
        rate_per_chip = estimate["images_per_second"] / topology.chips
        efficiency = rate_per_chip / rows[0]["images_per_second"] if rows else 1.0
        rows.append({"chips": topology.chips, "efficiency": efficiency, **estimate})
    return rows


def _slices(dimensions: int) -> list[tuple[int, ...]]:
    """Return the shapes of slices of 1, 2, 4, ... 256 chips, as near to a square or cube as possible."""
    shapes, sides = [], [1] * dimensions
    for turn in range(int(math.log2(MAX_CHIPS)) + 1):
        shapes.append(tuple(sides))
        sides[(turn + dimensions - 1) % dimensions] *= 2
    return shapes
