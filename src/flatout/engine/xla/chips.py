"""What Google publishes about each TPU generation: peaks, memory, links, and the slices that can be had.

Figures are per chip, from the system architecture pages of the Cloud TPU documentation (cloud.google.com/tpu/docs/v5e
and its siblings, read in 2026).
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
        link_bandwidth: to all neighbours together, bytes a second in one direction.
        devices: what JAX sees of one chip.
        slices: the shapes that can be had, small ones first.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    devices: int
    slices: tuple[str, ...]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")

GENERATIONS = {
    g.name: g
    for g in (
        Generation(
            name="v4", flops=275 * TERA, memory_bytes=32 * 2**30, memory_bandwidth=1200 * GB, link_bandwidth=300 * GB,
            devices=1, slices=_CUBES,
        ),
        Generation(
            name="v5e", flops=197 * TERA, memory_bytes=16 * 2**30, memory_bandwidth=819 * GB, link_bandwidth=200 * GB,
            devices=1, slices=_FLAT,
        ),
        Generation(
            name="v5p", flops=459 * TERA, memory_bytes=95 * 2**30, memory_bandwidth=2765 * GB,
            link_bandwidth=600 * GB, devices=1, slices=_CUBES,
        ),
        Generation(
            name="v6e", flops=918 * TERA, memory_bytes=32 * 2**30, memory_bandwidth=1638 * GB,
            link_bandwidth=448 * GB, devices=1, slices=_FLAT,
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

    def all_reduce_seconds(self, size: float, count: int = 1) -> float:
        """Return the time to add up `size` bytes that each chip has, in `count` messages, by the ring model.

        Every byte travels 2 (n - 1) / n times over the links of a chip, all of which are used at once; a message waits
        for two rounds through every ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009).
        """
        return ring_seconds(self.generation, self.sides, size, count, rounds=2)

    def all_gather_seconds(self, size: float, count: int = 1) -> float:
        """Return the same for messages of which each chip has a part, or wants one: one round instead of two."""
        return ring_seconds(self.generation, self.sides, size, count, rounds=1)


def ring_seconds(generation: Generation, sides: tuple[int, ...], size: float, count: int, *, rounds: int) -> float:
    """See `Topology.all_reduce_seconds`."""
    n = prod(sides)
    if n == 1:
        return 0.0
    # Rings go both ways, so the farthest chip is half a ring away.
    hops = sum(side // 2 for side in sides)
    return rounds * ((n - 1) / n * size / generation.link_bandwidth + count * hops * HOP_SECONDS)


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
