"""`flatout plan --topology`: a training step compiled for TPUs, and bounds of its speed, memory and cost.

libtpu contains the compiler of every TPU generation and needs no TPU. Memory, work and messages are read off the
compiled program, and divided by published peaks.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Recipe
from flatout.data.batches import Split, evaluation_batches
from flatout.data.cache import cache_folder
from flatout.engine.devices import XLA_PRECISIONS, choose_precision, require_tpu_compiler, require_xla
from flatout.models.build import build_model
from flatout.tasks import task_of
from flatout.utils.console import Console
from flatout.utils.errors import DiskFull, InputError, first_line
from flatout.utils.host import installed
from flatout.utils.run_files import JsonObject, write_json

if TYPE_CHECKING:
    from torch import nn

    from flatout.analysis.plan import Work

# Figures of chips are as Google publishes them, from the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v5e
# and its siblings, read in 2026); those of v2 and v3 from Jouppi et al., "A domain-specific supercomputer for training
# deep neural networks", CACM 63 (7), 2020, table 3. The documentation gives the bandwidth of all links of a chip in
# both directions together.

# Time of one hop between neighbours ("How to Scale Your Model", jax-ml.github.io/scaling-book, chapter on TPUs).
HOP_SECONDS = 1e-6
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_OLD_FLAT = ("2x2", "4x4", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")


@dataclass(frozen=True)
class Generation:
    """One kind of chip; arithmetic and memory are those of one device, and rates are per second."""

    name: str
    flops: float  # in bfloat16, at most
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float  # of a chip to one neighbour, in one direction
    ring_side: int  # a row of chips is closed to a ring if its length is a multiple of this
    slices: tuple[str, ...]  # small ones first
    cores: int = 1  # XLA devices per chip, which share everything equally
    config: str = ""  # libtpu's name for a chip whose two cores are used as one device


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

    name: str
    generation: Generation
    sides: tuple[int, ...]

    @property
    def chips(self) -> int:
        """The unit of the price."""
        return math.prod(self.sides)

    @property
    def devices(self) -> int:
        """The units that share a batch; a chip may be several."""
        return self.chips * self.generation.cores

    def message_seconds(self, kind: str, size: float, count: int = 1) -> float:
        """Return the time of `count` collectives with results of `size` bytes in all on each chip.

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
    """Parse topologies such as `v5e:2x4,v5e:4x4`."""
    found: list[Topology] = []
    for part in text.split(","):
        name, _, shape = part.strip().partition(":")
        if name not in GENERATIONS:
            raise InputError(f"--topology {part}: unknown TPU generation {name!r}; known are {', '.join(GENERATIONS)}")
        if shape not in GENERATIONS[name].slices:
            raise InputError(f"--topology {part}: the slices of {name} are {', '.join(GENERATIONS[name].slices)}")
        found.append(Topology(part.strip(), GENERATIONS[name], tuple(map(int, shape.split("x")))))
    if len(set(found)) < len(found):
        raise InputError(f"--topology {text}: a topology is named twice")
    return found


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The compiler's figures of a training step, for each device; without most of them if it does not fit."""

    fits: bool
    needed_bytes: int  # memory at the peak; 0 if the compiler rejects the program without a number
    flops: float = 0.0
    memory_bytes: float = 0.0  # read from and written to memory
    collectives: list[JsonObject] = field(default_factory=list)  # kind, count, and bytes of results


def estimate_row(work: "Work", choice: Topology, step: CompiledStep, price: float | None = None) -> JsonObject:
    """Return the table row of a topology for which a step was compiled."""
    chip, padded = choice.generation, -(-work.batch // choice.devices) * choice.devices
    row: JsonObject = {
        "topology": choice.name,
        "chips": choice.chips,
        "devices": choice.devices,
        "memory_bytes": chip.memory_bytes,
        "batch_padded": padded,
        "padding_fraction": 1 - work.batch / padded,
        "fits": step.fits,
        "needed_bytes": step.needed_bytes,
        "collectives": step.collectives,
    }
    if not step.fits:
        return row
    seconds = {
        "compute": step.flops / chip.flops,
        "memory": step.memory_bytes / chip.memory_bandwidth,
        "interconnect": sum(choice.message_seconds(c["kind"], c["bytes"], c["count"]) for c in step.collectives),
    }
    limit, step_seconds = max(seconds.items(), key=lambda item: item[1])
    epoch, job = step_seconds * work.steps_per_epoch, step_seconds * work.steps
    return row | {
        "flops": step.flops,
        "bytes_accessed": step.memory_bytes,
        "seconds": {**seconds, "step": step_seconds},
        "limit": limit,
        "images_per_second": work.images_per_epoch / epoch,
        "epoch_seconds": epoch,
        "job_seconds": job,
        "cost": None if price is None else price * choice.chips * job / 3600,
    }


def step_compiler(work: "Work", allow_code: bool, console: Console) -> Callable[[Topology], CompiledStep]:
    """Return a function that compiles the job's step for a topology, or takes the figures from the cache."""
    precision = choose_precision(work.recipe.precision, XLA_PRECISIONS["tpu"], "XLA on tpu")

    @functools.cache
    def model() -> "nn.Module":
        return build_model(work.recipe, work.classes, allow_code=allow_code)

    def compiled(topology: Topology) -> CompiledStep:
        path = _cache_file(work, topology)
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                return CompiledStep(**json.loads(path.read_text(encoding="utf-8")))
        require_tpu_compiler()
        console.note(f"compiling {work.recipe.model}, batch {work.batch:,}, for {topology.name}")
        recipe = work.recipe.override({"batch_size": work.batch, "precision": precision})
        with _stoppable():
            # The model before JAX is started, which takes seconds.
            step = _compile(model(), recipe, devices_of(topology), work.classes)
        if path is not None:
            with contextlib.suppress(OSError, InputError, DiskFull):  # it only saves time
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, asdict(step))
        return step

    return compiled


def compiler_versions() -> dict[str, str]:
    """Return the versions of the packages that determine the compiler's results; empty for one that is missing."""
    packages = ("flatout", "torch", "jax", "jaxlib", "torchax", "libtpu")
    return dict.fromkeys(packages, "") | installed(*packages)


def _cache_file(work: "Work", topology: Topology) -> Path | None:
    """Return the cache file of a program's results; None for user code, whose content no name tells."""
    recipe = work.recipe.override({"batch_size": work.batch, "epochs": 1})
    if ":" in recipe.model and not recipe.model.startswith("timm:"):
        return None
    key = json.dumps([recipe.to_toml(), work.classes, topology.name, compiler_versions()])
    return cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Silence libtpu, which writes past Python; and end the process at a signal, which Python handles after XLA."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before, stderr = signal.set_wakeup_fd(wake), os.dup(2)

    def end() -> None:
        if number := os.read(woken, 1)[0]:
            if number == signal.SIGINT:
                os.write(stderr, b"flatout: interrupted\n")
            os._exit(128 + number)

    watching = threading.Thread(target=end, daemon=True)
    watching.start()
    try:
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        signal.set_wakeup_fd(before)
        os.write(wake, b"\0")
        watching.join()
        for number in (woken, wake, stderr):
            os.close(number)


@functools.cache
def devices_of(topology: Topology) -> list[Any]:
    """Return JAX's devices of a topology, to compile for."""
    require_xla()
    from jax.experimental import topologies

    # Several compilers may run at once, also during a training.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Without these, libtpu queries the cloud's metadata server for the machine's TPU.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    options: dict[str, Any] = {"chip_config_name": topology.generation.config} if topology.generation.config else {}
    if topology.chips == 1:
        # libtpu assumes four chips per host.
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except Exception as error:  # libtpu's errors have no type of their own
        reason = first_line(error)
        raise InputError(f"--topology {topology.name}: not supported by the installed libtpu ({reason})") from error
    return list(described.devices)


def _compile(model: "nn.Module", recipe: Recipe, devices: list[Any], classes: int) -> CompiledStep:
    """Compile a step whose images come from the host: in device memory, all would count as read in every step."""
    import jax

    from flatout.engine.augment import epoch_transforms
    from flatout.engine.xla.batches import read_batches
    from flatout.engine.xla.mesh import MeshSharding
    from flatout.engine.xla.program import Program, shapes_of

    sharding, task = MeshSharding(devices, recipe.shard), task_of(recipe)
    program = Program(model, recipe, devices=sharding.size, precision=recipe.precision)
    labels = task.blank_labels(1, classes)
    images = np.zeros((1, *recipe.stored_sides, recipe.channels), np.uint16 if recipe.data.bits == 16 else np.uint8)
    _, one = read_batches(
        Split(images=images, rows=np.arange(1), labels=labels),
        list(evaluation_batches(1, 1)),
        1,
        slice(1),
        is_resident=False,
        targets=task.targets(labels),
        transforms=epoch_transforms(recipe, 0, 1),
    )
    state, inputs = program.initial_state(), shapes_of(one, sharding.padded(recipe.batch_size))
    lowered = sharding.lower(program, program.train_step, state, inputs)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return CompiledStep(fits=False, needed_bytes=needed)
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text() or ""
    assert memory is not None
    assert cost is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return CompiledStep(
        fits=True,
        needed_bytes=memory.argument_size_in_bytes + temporaries,
        flops=float(cost.get("flops", 0.0)),
        memory_bytes=float(cost.get("bytes accessed", 0.0)),
        collectives=collectives(text),
    )


# --- the program's text -----------------------------------------------------------------------------------------------

_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<type>pred|bf16|[fsu]\d+)\[(?P<lengths>[\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}
# The memory that a rejected program needed, as the compiler reports it before and after the memory's layout.
_REJECTED = re.compile(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGTP]?)(?:\)| of)")


def collectives(text: str) -> list[JsonObject]:
    """Return kind, count and bytes of the messages between devices in a compiled program's text."""
    found: dict[str, list[int]] = {}
    for match in _COLLECTIVE.finditer(text):
        sizes = _sizes(match["shape"])
        if match["start"] and match["kind"] != "all-reduce":
            # Operands come first, then results.
            sizes = sizes[len(sizes) // 2 :]
        found.setdefault(match["kind"], []).append(sum(sizes))
    return [{"kind": kind, "count": len(sizes), "bytes": sum(sizes)} for kind, sizes in sorted(found.items())]


def _sizes(shape: str) -> list[int]:
    """Return the bytes of each array in an HLO shape such as `f32[10,20]{1,0}` or `(f32[10]{0}, f32[])`."""
    found = []
    for array in _ARRAY.finditer(shape):
        width = _BYTES.get(array["type"]) or int(array["type"][1:]) // 8
        found.append(width * math.prod(int(n) for n in array["lengths"].split(",") if n))
    return found


def needed_bytes(message: str) -> int | None:
    """Return the memory that a rejected program needed, 0 if the message has no figure; None for other errors."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = _REJECTED.search(message)
    return int(float(match[1]) * 2.0 ** (10 * " KMGTP".index(match[2] or " "))) if match else 0
