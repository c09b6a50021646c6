"""What Google publishes about each TPU generation: peaks, memory, links, and the slices that can be had.

Figures are per chip, from the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v5e and its siblings, read in
2026); those of v2 and v3 from Jouppi et al., "A domain-specific supercomputer for training deep neural networks",
CACM 63 (7), 2020, table 3. The documentation gives the bandwidth of all links of a chip in both directions together.
"""

from dataclasses import dataclass
from math import prod

from flatout.errors import InputError

GB, TERA = 1e9, 1e12
# Time of one hop between neighbours ("How to Scale Your Model", jax-ml.github.io/scaling-book, chapter on TPUs).
HOP_SECONDS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One kind of chip.

    Attributes:
        name: as in a topology's name.
        flops: peak bfloat16 operations a second.
        memory_bytes: HBM.
        memory_bandwidth: of the HBM, bytes a second.
        link_bandwidth: of the link to one neighbour, bytes a second in one direction.
        ring_side: chips in a row whose ends are linked too have a multiple of this number.
        cores: parts of a chip that XLA takes for devices of their own, with equal parts of all that the chip has.
        slices: the shapes that can be had, small ones first.
        config: how libtpu is to see a chip, where that is not the way it is used: two cores as one device.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    ring_side: int
    cores: int = 1
    slices: tuple[str, ...]
    config: str = ""


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")

GENERATIONS = {
    g.name: g
    for g in (
        Generation(
            name="v2", flops=46 * TERA, memory_bytes=16 * 2**30, memory_bandwidth=700 * GB, link_bandwidth=62 * GB,
            ring_side=16, cores=2, slices=("2x2", "4x4", "8x8", "8x16", "16x16"),
        ),
        Generation(
            name="v3", flops=123 * TERA, memory_bytes=32 * 2**30, memory_bandwidth=900 * GB, link_bandwidth=82 * GB,
            ring_side=32, cores=2, slices=("2x2", "4x4", "8x8", "8x16", "16x16"),
        ),
        Generation(
            name="v4", flops=275 * TERA, memory_bytes=32 * 2**30, memory_bandwidth=1200 * GB, link_bandwidth=50 * GB,
            ring_side=4, slices=_CUBES, config="megacore",
        ),
        Generation(
            name="v5e", flops=197 * TERA, memory_bytes=16 * 2**30, memory_bandwidth=819 * GB, link_bandwidth=50 * GB,
            ring_side=16, slices=_FLAT,
        ),
        Generation(
            name="v5p", flops=459 * TERA, memory_bytes=95 * 2**30, memory_bandwidth=2765 * GB,
            link_bandwidth=100 * GB, ring_side=4, slices=_CUBES,
        ),
        Generation(
            name="v6e", flops=918 * TERA, memory_bytes=32 * 2**30, memory_bandwidth=1638 * GB,
            link_bandwidth=100 * GB, ring_side=16, slices=_FLAT,
        ),
        Generation(
            name="tpu7x", flops=2307 * TERA, memory_bytes=192 * 2**30, memory_bandwidth=7380 * GB,
            link_bandwidth=100 * GB, ring_side=4, cores=2, slices=_CUBES,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of TPU chips: `v5e:2x4` is eight chips in two rows of four."""

    generation: Generation
    sides: tuple[int, ...]

    @property
    def name(self) -> str:
        """As the user and the compiler write it."""
        return f"{self.generation.name}:{'x'.join(map(str, self.sides))}"

    @property
    def chips(self) -> int:
        """How many chips it has."""
        return prod(self.sides)

    @property
    def devices(self) -> int:
        """How many devices XLA sees: the parts of a batch."""
        return self.chips * self.generation.cores

    def all_reduce_seconds(self, size: float, count: int = 1) -> float:
        """Return the time to add up `size` bytes that each chip has, in `count` messages, by the ring model.

        Every byte travels 2 (n - 1) / n times over the links of a chip, all of which are used at once; a message goes
        twice to the farthest chip (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009).
        """
        return self._rounds_seconds(2, size, count)

    def all_gather_seconds(self, size: float, count: int = 1) -> float:
        """Return the same for messages of which each chip has a part, or wants one: one round instead of two."""
        return self._rounds_seconds(1, size, count)

    def _rounds_seconds(self, rounds: int, size: float, count: int) -> float:
        n = self.chips
        if n == 1:
            return 0.0
        rows = [side for side in self.sides if side > 1]
        # A row of chips is one ring, there and back over its links; where the ends are linked too, it is two.
        bandwidth = sum(self.generation.link_bandwidth * (2 if self._is_ring(side) else 1) for side in rows)
        hops = sum(side // 2 if self._is_ring(side) else side - 1 for side in rows)
        return rounds * ((n - 1) / n * size / bandwidth + count * hops * HOP_SECONDS)

    def _is_ring(self, side: int) -> bool:
        # Links that close a ring come with whole cubes of 4x4x4, or with a whole row of a flat pod.
        sides = (side,) if len(self.sides) == 2 else self.sides
        return all(side % self.generation.ring_side == 0 for side in sides)


def parse_topology(text: str) -> Topology:
    """Turn `v5e:2x4` into a topology.

    Raises:
        InputError: there is no such generation or slice; the known ones are listed.
    """
    name, _, shape = text.strip().partition(":")
    if name not in GENERATIONS:
        known = ", ".join(f"{g.name}:{g.slices[2]}" for g in GENERATIONS.values())
        raise InputError(f"--topology {text}: no TPU generation is called {name!r}; known, each with a slice: {known}")
    generation = GENERATIONS[name]
    if shape not in generation.slices:
        raise InputError(f"--topology {text}: {name} has the slices {', '.join(generation.slices)}")
    return Topology(generation=generation, sides=tuple(map(int, shape.split("x"))))


def parse_topologies(text: str) -> list[Topology]:
    """Turn `v5e:2x4,v5e:4x4` into topologies; see `parse_topology`."""
    found = [parse_topology(part) for part in text.split(",")]
    for topology in found:
        if found.count(topology) > 1:
            raise InputError(f"--topology {text}: {topology.name} is named twice")
    return found
