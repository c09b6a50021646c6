"""TPUs, and estimates of a job's time, memory and cost on them: a step's work divided by published peaks.

`tpu` compiles the step for them.

Figures of chips are as Google publishes them, from the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v5e and
its siblings, read in 2026); those of v2 and v3 from Jouppi et al., "A domain-specific supercomputer for training deep
neural networks", CACM 63 (7), 2020, table 3. The documentation gives the bandwidth of all links of a chip in both
directions together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.config import Recipe
from flatout.data.batches import steps_per_epoch
from flatout.utils.errors import InputError

# Time of one hop between neighbours ("How to Scale Your Model", jax-ml.github.io/scaling-book, chapter on TPUs).
HOP_SECONDS = 1e-6
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_OLD_FLAT = ("2x2", "4x4", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")


@dataclass(frozen=True)
class Generation:
    """One kind of chip.

    Attributes:
        name: the prefix of a topology's name.
        flops, memory_bytes, memory_bandwidth: of one device: peak bfloat16 operations per second, and its HBM.
        link_bandwidth: of a chip's link to one neighbour, bytes per second in one direction.
        ring_side: a row of chips is closed to a ring if its length is a multiple of this number.
        slices: the shapes available, small ones first.
        cores: XLA devices per chip; they share everything equally.
        config: libtpu's name for a chip whose two cores are used as one device.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    ring_side: int
    slices: tuple[str, ...]
    cores: int = 1
    config: str = ""


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("v2", 46e12 / 2, 16 * 2**30 / 2, 700e9 / 2, 62e9, 16, _OLD_FLAT, cores=2),
        Generation("v3", 123e12 / 2, 32 * 2**30 / 2, 900e9 / 2, 82e9, 32, _OLD_FLAT, cores=2),
        Generation("v4", 275e12, 32 * 2**30, 1200e9, 50e9, 4, _CUBES, config="megacore"),
        Generation("v5e", 197e12, 16 * 2**30, 819e9, 50e9, 16, _FLAT),
        Generation("v5p", 459e12, 95 * 2**30, 2765e9, 100e9, 4, _CUBES),
        Generation("v6e", 918e12, 32 * 2**30, 1638e9, 100e9, 16, _FLAT),
        Generation("tpu7x", 2307e12 / 2, 192 * 2**30 / 2, 7380e9 / 2, 100e9, 4, _CUBES, cores=2),
    )
}


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips: `v5e:2x4` is eight chips in two rows of four."""

    generation: Generation
    sides: tuple[int, ...]

    @property
    def name(self) -> str:
        """As users write it."""
        return f"{self.generation.name}:{'x'.join(map(str, self.sides))}"

    @property
    def chips(self) -> int:
        """The unit of the price."""
        return math.prod(self.sides)

    @property
    def devices(self) -> int:
        """The units that share a batch; a chip may be several."""
        return self.chips * self.generation.cores

    def message_seconds(self, kind: str, size: float, count: int = 1) -> float:
        """Return the time of `count` collectives with results of `size` bytes in all on each chip, by the ring model.

        In an all-reduce every byte travels 2 (n - 1) / n times over the links of a chip, all of which work at once, and
        each message goes twice to the farthest chip (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms",
        JPDC 2009). Other kinds take one such round instead of two.
        """
        n = self.chips
        if n == 1:
            return 0.0
        rows = [side for side in self.sides if side > 1]
        # A row of chips is one ring, there and back over its links; where the ends are linked too, it is two.
        bandwidth = sum(self.generation.link_bandwidth * (2 if self._is_ring(side) else 1) for side in rows)
        hops = sum(side // 2 if self._is_ring(side) else side - 1 for side in rows)
        rounds = 2 if kind == "all-reduce" else 1
        return rounds * ((n - 1) / n * size / bandwidth + count * hops * HOP_SECONDS)

    def _is_ring(self, side: int) -> bool:
        # Only whole cubes of 4x4x4, or a whole row of a flat pod, have links that close a ring.
        sides = (side,) if len(self.sides) == 2 else self.sides
        return all(side % self.generation.ring_side == 0 for side in sides)


def parse_topologies(text: str) -> list[Topology]:
    """Parse topologies such as `v5e:2x4,v5e:4x4`.

    Raises:
        InputError: unknown generation or slice; the known ones are listed. Or one is named twice.
    """
    found: list[Topology] = []
    for part in text.split(","):
        name, _, shape = part.strip().partition(":")
        if name not in GENERATIONS:
            known = ", ".join(f"{g.name}:{g.slices[2]}" for g in GENERATIONS.values())
            raise InputError(
                f"--topology {part}: unknown TPU generation {name!r}; use one of these, or another slice: {known}"
            )
        if shape not in GENERATIONS[name].slices:
            raise InputError(f"--topology {part}: the slices of {name} are {', '.join(GENERATIONS[name].slices)}")
        found.append(Topology(GENERATIONS[name], tuple(map(int, shape.split("x")))))
    if len(set(found)) < len(found):
        raise InputError(f"--topology {text}: a topology is named twice")
    return found


# The figures of a step, per device, for a topology; see `tpu.compile_step`.
Compile = Callable[[Topology], dict[str, Any]]


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
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return steps_per_epoch(self.images, self.batch, self.recipe.drop_last)

    @property
    def images_per_epoch(self) -> int:
        """Images trained in one epoch."""
        return self.steps_per_epoch * self.batch if self.recipe.drop_last else self.images

    @property
    def images_trained(self) -> int:
        """Images trained in the whole job."""
        return self.recipe.epochs * self.images_per_epoch


def estimate(work: Work, choices: Sequence[Topology], compile_step: Compile, price: float | None) -> dict[str, Any]:
    """Return the estimates in plan.json: a row for each topology; `price` is that of one chip for an hour."""
    rows = [estimate_row(work, choice, compile_step(choice), price) for choice in choices]
    return {"estimate": True, "price_per_chip_hour": price, "topologies": rows}


def estimate_row(
    work: Work, choice: Topology, compiled: Mapping[str, Any], price: float | None = None
) -> dict[str, Any]:
    """Return the table row of a topology for which a step was compiled."""
    chip, padded = choice.generation, -(-work.batch // choice.devices) * choice.devices
    copied = ("fits", "needed_bytes", "argument_bytes", "temporary_bytes", "collectives")
    row: dict[str, Any] = {
        "topology": choice.name,
        "chips": choice.chips,
        "devices": choice.devices,
        "memory_bytes": chip.memory_bytes,
        "batch_padded": padded,
        "padding_fraction": 1 - work.batch / padded,
        **{key: compiled[key] for key in copied},
    }
    if not compiled["fits"]:
        return row
    seconds = {
        "compute": compiled["flops"] / chip.flops,
        "memory": compiled["memory_bytes"] / chip.memory_bandwidth,
        "interconnect": sum(choice.message_seconds(c["kind"], c["bytes"], c["count"]) for c in compiled["collectives"]),
    }
    epoch = max(seconds.values()) * work.steps_per_epoch
    job = work.recipe.epochs * epoch
    return row | {
        "flops": compiled["flops"],
        "bytes_accessed": compiled["memory_bytes"],
        "state_bytes": compiled["state_bytes"],
        "seconds": {**seconds, "step": max(seconds.values()), "compiler": compiled["seconds"]},
        "limit": max(seconds, key=lambda name: seconds[name]),
        "images_per_second": work.images_per_epoch / epoch,
        "epoch_seconds": epoch,
        "job_seconds": job,
        "cost": None if price is None else price * choice.chips * job / 3600,
    }
