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

# Minimum share of a device's memory that a program can use; the compiler knows the exact limit.
MEMORY_SHARE = 0.97
# The search for the largest batch ends within this share of the memory, or after this many compilations.
BATCH_TOLERANCE, MAX_COMPILATIONS = 0.05, 6
# The scaling is estimated for up to this number of chips.
MAX_CHIPS = 256
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
        flops: peak bfloat16 operations per second.
        memory_bytes, memory_bandwidth: of the HBM; bytes, bytes per second.
        link_bandwidth: of the link to one neighbour, bytes per second in one direction.
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
        Generation("v2", 46e12, 16 * 2**30, 700e9, 62e9, 16, _OLD_FLAT, cores=2),
        Generation("v3", 123e12, 32 * 2**30, 900e9, 82e9, 32, _OLD_FLAT, cores=2),
        Generation("v4", 275e12, 32 * 2**30, 1200e9, 50e9, 4, _CUBES, config="megacore"),
        Generation("v5e", 197e12, 16 * 2**30, 819e9, 50e9, 16, _FLAT),
        Generation("v5p", 459e12, 95 * 2**30, 2765e9, 100e9, 4, _CUBES),
        Generation("v6e", 918e12, 32 * 2**30, 1638e9, 100e9, 16, _FLAT),
        Generation("tpu7x", 2307e12, 192 * 2**30, 7380e9, 100e9, 4, _CUBES, cores=2),
    )
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of TPU chips: `v5e:2x4` is eight chips in two rows of four.

    Attributes:
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
    generation: Generation
    sides: tuple[int, ...]

    @classmethod
    def of(cls, generation: Generation, sides: tuple[int, ...]) -> "Topology":
        """Return the slice of a shape."""
        chips, cores = math.prod(sides), generation.cores
        return cls(
            name=f"{generation.name}:{'x'.join(map(str, sides))}",
            chips=chips,
            devices=chips * cores,
            flops=generation.flops / cores,
            memory_bandwidth=generation.memory_bandwidth / cores,
            memory_bytes=generation.memory_bytes / cores,
            generation=generation,
            sides=sides,
        )

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

    def sizes(self) -> list["Topology"]:
        """Return slices of 1, 2, 4, ... 256 chips, as near to a square or cube as possible."""
        found, sides = [], [1] * len(self.sides)
        for turn in range(int(math.log2(MAX_CHIPS)) + 1):
            found.append(Topology.of(self.generation, tuple(sides)))
            sides[(turn + len(sides) - 1) % len(sides)] *= 2
        return found


def parse_topologies(text: str) -> list[Topology]:
    """Parse topologies such as `v5e:2x4,v5e:4x4`.

    Raises:
        InputError: unknown generation or slice; the known ones are listed. Or one is named twice.
    """
    found = [_parse_topology(part.strip()) for part in text.split(",")]
    for topology in found:
        if found.count(topology) > 1:
            raise InputError(f"--topology {text}: {topology.name} is named twice")
    return found


def _parse_topology(text: str) -> Topology:
    name, _, shape = text.partition(":")
    if name not in GENERATIONS:
        known = ", ".join(f"{g.name}:{g.slices[2]}" for g in GENERATIONS.values())
        raise InputError(
            f"--topology {text}: unknown TPU generation {name!r}; use one of these, or another slice: {known}"
        )
    generation = GENERATIONS[name]
    if shape not in generation.slices:
        raise InputError(f"--topology {text}: the slices of {name} are {', '.join(generation.slices)}")
    return Topology.of(generation, tuple(map(int, shape.split("x"))))


# The figures of a step, per device, for a topology and a global batch; see `tpu.compile_step`.
Compile = Callable[[Topology, int], dict[str, Any]]


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


def estimate(
    work: Work, choices: Sequence[Topology], compile_step: Compile, price: float | None, *, largest_batch: bool
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
    work: Work, choice: Topology, compiled: Mapping[str, Any], price: float | None = None
) -> dict[str, Any]:
    """Return the table row of hardware for which a step was compiled."""
    padded = _padded(work.batch, choice)
    copied = ("fits", "needed_bytes", "argument_bytes", "temporary_bytes", "collectives")
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
    return row | {
        "flops": compiled["flops"],
        "bytes_accessed": compiled["memory_bytes"],
        "state_bytes": compiled["state_bytes"],
        "seconds": {**seconds, "step": max(seconds.values()), "compiler": compiled["seconds"]},
        **_job_times(work, choice, seconds, price),
    }


def _padded(batch: int, choice: Topology) -> int:
    return -(-batch // choice.devices) * choice.devices


def _step_seconds(compiled: Mapping[str, Any], choice: Topology) -> dict[str, float]:
    messages = [choice.message_seconds(c["kind"], c["bytes"], c["count"]) for c in compiled["collectives"]]
    return {
        "compute": compiled["flops"] / choice.flops,
        "memory": compiled["memory_bytes"] / choice.memory_bandwidth,
        "interconnect": sum(messages),
    }


def _job_times(work: Work, choice: Topology, seconds: Mapping[str, float], price: float | None) -> dict[str, Any]:
    epoch = max(seconds.values()) * work.steps_per_epoch
    job = work.recipe.epochs * epoch
    return {
        "limit": max(seconds, key=lambda name: seconds[name]),
        "images_per_second": work.images_per_epoch / epoch,
        "epoch_seconds": epoch,
        "job_seconds": job,
        "cost": None if price is None else price * choice.chips * job / 3600,
    }


def _scaling_curve(
    work: Work, base: Topology, compiled: Mapping[str, Any], price: float | None
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


def find_largest_batch(compile_step: Compile, choice: Topology, batch: int) -> int | None:
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
