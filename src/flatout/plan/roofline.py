"""From what the TPU compiler counts in a step to how long the step, the job and its bill would be.

Everything here is arithmetic on published figures: see docs/plan.md for what it leaves out.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatout.plan.chips import GENERATIONS, Topology
from flatout.recipe import Recipe

# Numbers of chips for which the efficiency is estimated.
MOST_CHIPS = 256


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be computed: a recipe, and how much data.

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
        """Samples in a step."""
        return min(self.recipe.batch_size, self.images)

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        from flatout.data.order import steps_per_epoch

        return self.recipe.epochs * steps_per_epoch(self.images, self.batch, self.recipe.drop_last)

    @property
    def images_trained(self) -> int:
        """Images that all those steps train on."""
        return self.steps * self.batch if self.recipe.drop_last else self.recipe.epochs * self.images


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long one step takes by each of three limits, in seconds; the slowest decides."""

    compute: float
    memory: float
    interconnect: float

    @property
    def seconds(self) -> float:
        """The estimate."""
        return max(self.compute, self.memory, self.interconnect)

    @property
    def limit(self) -> str:
        """What decides it."""
        return max(asdict(self), key=lambda name: getattr(self, name))


def device_memory(topology: Topology) -> float:
    """Return the bytes of memory of each device: a chip, or a core that has its own part of a chip."""
    return topology.generation.memory_bytes / topology.generation.cores


def step_time(compiled: Mapping[str, Any], topology: Topology) -> StepTime:
    """Return how long a compiled step takes by each limit.

    Compute and memory: what the compiler counted for one device, by its published peaks. Interconnect: its messages,
    by the ring model.
    """
    peaks = topology.generation
    messages = 0.0
    for collective in compiled["collectives"]:
        is_reduced = collective["kind"] == "all-reduce"
        seconds = topology.all_reduce_seconds if is_reduced else topology.all_gather_seconds
        messages += seconds(collective["bytes"], collective["count"])
    return StepTime(
        compute=compiled["flops"] / (peaks.flops / peaks.cores),
        memory=compiled["memory_bytes"] / (peaks.memory_bandwidth / peaks.cores),
        interconnect=messages,
    )


def row_of(work: Work, topology: Topology, compiled: Mapping[str, Any], price: float | None) -> dict[str, Any]:
    """Return the line of a topology in the table."""
    padded = -(-work.batch // topology.devices) * topology.devices
    row: dict[str, Any] = {
        "topology": topology.name,
        "chips": topology.chips,
        "devices": topology.devices,
        "fits": compiled["fits"],
        "needed_bytes": compiled["needed_bytes"],
        "argument_bytes": compiled["argument_bytes"],
        "temporary_bytes": compiled["temporary_bytes"],
        "memory_bytes": device_memory(topology),
        "batch_padded": padded,
        "padding_fraction": 1 - work.batch / padded,
        "collectives": compiled["collectives"],
        "host_transfers": compiled["host_transfers"],
    }
    if not compiled["fits"]:
        return row
    time = step_time(compiled, topology)
    seconds = time.seconds
    hours = seconds * work.steps / 3600
    return row | {
        "flops": compiled["flops"],
        "bytes_accessed": compiled["memory_bytes"],
        "state_bytes": compiled["state_bytes"],
        "seconds": {**asdict(time), "step": seconds, "compiler": compiled["seconds"]},
        "limit": time.limit,
        "images_per_second": work.images_trained / (seconds * work.steps),
        "epoch_seconds": seconds * work.steps / work.recipe.epochs,
        "job_seconds": seconds * work.steps,
        "cost": None if price is None else price * topology.chips * hours,
    }


def scaling(work: Work, base: Mapping[str, Any] | None, price: float | None) -> list[dict[str, Any]]:
    """Return the estimate for 1 to 256 chips of a topology's generation, from its row in the table.

    What a chip computes goes with its share of the batch; what it reads and writes does too, but for the weights and
    what the optimizer keeps, which every chip goes through whole, twice in each step.
    """
    if base is None:
        return []
    generation = GENERATIONS[base["topology"].partition(":")[0]]
    share = base["batch_padded"] / base["devices"]
    fixed = min(4 * base["state_bytes"], base["bytes_accessed"])
    rows: list[dict[str, Any]] = []
    for sides in _slices(len(generation.slices[0].split("x"))):
        topology = Topology(generation=generation, sides=sides)
        n = topology.chips
        own = -(-work.batch // topology.devices) / share
        compiled = {
            "flops": base["flops"] * own,
            "memory_bytes": fixed + (base["bytes_accessed"] - fixed) * own,
            "collectives": base["collectives"],
        }
        time = step_time(compiled, topology)
        job = time.seconds * work.steps
        rate = work.images_trained / job
        rows.append(
            {
                "chips": n,
                "images_per_second": rate,
                "efficiency": rate / (n * rows[0]["images_per_second"]) if rows else 1.0,
                "job_seconds": job,
                "limit": time.limit,
                "cost": None if price is None else price * n * job / 3600,
            }
        )
    return rows


def _slices(dimensions: int) -> list[tuple[int, ...]]:
    """Return the shapes of slices of 1, 2, 4, ... 256 chips, as near to a square or cube as can be."""
    shapes, sides = [], [1] * dimensions
    for turn in range(int(math.log2(MOST_CHIPS)) + 1):
        shapes.append(tuple(sides))
        sides[(turn + dimensions - 1) % dimensions] *= 2
    return shapes
