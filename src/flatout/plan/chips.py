"""TPU generations as Google publishes them: peaks, memory, links between chips, and available slices.

Figures are per chip, from the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v5e and its siblings, read in
2026); those of v2 and v3 from Jouppi et al., "A domain-specific supercomputer for training deep neural networks",
CACM 63 (7), 2020, table 3. The documentation gives the bandwidth of all links of a chip in both directions together.
"""

from dataclasses import dataclass
from math import prod

from flatout.errors import InputError

# Time of one hop between neighbours ("How to Scale Your Model", jax-ml.github.io/scaling-book, chapter on TPUs).
HOP_SECONDS = 1e-6
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_OLD_FLAT = ("2x2", "4x4", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")


@dataclass(frozen=True)
class Generation:
    """One kind of chip.

    Attributes:
        name: as in a topology's name.
        flops: peak bfloat16 operations per second.
        memory_bytes: HBM.
        memory_bandwidth: of the HBM, bytes per second.
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
    """A slice of TPU chips: `v5e:2x4` is eight chips in two rows of four."""

    generation: Generation
    sides: tuple[int, ...]

    @property
    def name(self) -> str:
        """As users and libtpu write it."""
        return f"{self.generation.name}:{'x'.join(map(str, self.sides))}"

    @property
    def chips(self) -> int:
        """The number of chips."""
        return prod(self.sides)

    @property
    def devices(self) -> int:
        """The number of XLA devices."""
        return self.chips * self.generation.cores

    @property
    def device_memory_bytes(self) -> float:
        """The memory of each XLA device."""
        return self.generation.memory_bytes / self.generation.cores

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
        # Links that close a ring come with whole cubes of 4x4x4, or with a whole row of a flat pod.
        sides = (side,) if len(self.sides) == 2 else self.sides
        return all(side % self.generation.ring_side == 0 for side in sides)


def parse_topology(text: str) -> Topology:
    """Turn `v5e:2x4` into a topology.

    Raises:
        InputError: unknown generation or slice; the known ones are listed.
    """
    name, _, shape = text.strip().partition(":")
    if name not in GENERATIONS:
        known = ", ".join(f"{g.name}:{g.slices[2]}" for g in GENERATIONS.values())
        raise InputError(
            f"--topology {text}: unknown TPU generation {name!r}; use one of these, or another slice: {known}"
        )
    generation = GENERATIONS[name]
    if shape not in generation.slices:
        raise InputError(f"--topology {text}: the slices of {name} are {', '.join(generation.slices)}")
    return Topology(generation=generation, sides=tuple(map(int, shape.split("x"))))


def parse_topologies(text: str) -> list[Topology]:
    """Turn `v5e:2x4,v5e:4x4` into topologies; see `parse_topology`."""
    found = [parse_topology(part) for part in text.split(",")]
    for topology in found:
        if found.count(topology) > 1:
            raise InputError(f"--topology {text}: {topology.name} is named twice")
    return found
