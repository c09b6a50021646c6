"""TPUs for `flatout plan`: their peaks, and a training step compiled for them in a separate process.

libtpu contains the compiler of every TPU generation and needs no TPU to run it. The compiled program is the one that
such a TPU would run; memory, work and messages are read off it.

Figures of chips are as Google publishes them, from the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v5e and
its siblings, read in 2026); those of v2 and v3 from Jouppi et al., "A domain-specific supercomputer for training deep
neural networks", CACM 63 (7), 2020, table 3. The documentation gives the bandwidth of all links of a chip in both
directions together.
"""

import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import multiprocessing.process
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.analysis.roofline import Accelerator, Compile, Work
from flatout.config import Recipe
from flatout.data.cache import cache_folder
from flatout.engine.xla.devices import require_compiler
from flatout.utils.console import Console
from flatout.utils.errors import InputError, TrainingFailed
from flatout.utils.host import installed
from flatout.utils.run_files import write_json

if TYPE_CHECKING:
    from torch import nn

# Packages whose versions determine the compiler's results.
_COMPILERS = ("flatout", "torch", "jax", "jaxlib", "torchax", "libtpu")
# The scaling is estimated for up to this number of chips.
MAX_CHIPS = 256
# Time of one hop between neighbours ("How to Scale Your Model", jax-ml.github.io/scaling-book, chapter on TPUs).
HOP_SECONDS = 1e-6
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_OLD_FLAT = ("2x2", "4x4", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")

_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<type>pred|bf16|[fsu]\d+)\[(?P<lengths>[\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}
# Operations that move data between a TPU and its host in the middle of a program.
_HOST_TRANSFER = re.compile(
    r"= .*\b(?:infeed|outfeed)\("
    r"|= .*\b(?:send|recv)\(.*\bis_host_transfer=true"
    r"|\bcustom_call_target=\"\w*[Hh]ost"
)
# The memory that a rejected program needed, as the compiler reports it before and after the memory's layout.
_REJECTED = re.compile(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGTP]?)(?:\)| of)")


# --- chips ------------------------------------------------------------------------------------------------------------


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
class Topology(Accelerator):
    """A slice of TPU chips: `v5e:2x4` is eight chips in two rows of four."""

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


# --- the compiler's process -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tpu_compiler(work: Work, allow_code: bool, console: Console) -> Iterator[Compile]:
    """Provide a function that compiles the job's step for a topology and a batch size, from the cache if possible.

    Python handles no signal while XLA compiles, so that happens in a child process, which can be killed at any time.
    """
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start)
    workers: list[multiprocessing.process.BaseProcess] = []

    def compile_cached(topology: Topology, batch: int) -> dict[str, Any]:
        path = _cache_file(work, topology, batch)
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                return json.loads(path.read_text(encoding="utf-8"))
        require_compiler()
        console.note(f"compiling {work.recipe.model}, batch {batch:,}, for {topology.name}")
        # The child inherits the mask, so that Ctrl-C reaches only this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        before = multiprocessing.active_children()
        compiled = pool.submit(_compile, work, allow_code, topology, batch)
        workers.extend(worker for worker in multiprocessing.active_children() if worker not in before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            figures = compiled.result()
        except BrokenProcessPool:
            workers[0].join()
            raise TrainingFailed(
                f"the TPU compiler's process ended with code {workers[0].exitcode}; a negative code is a signal, and "
                "-9 usually means that the host ran out of memory"
            ) from None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, figures)
        return figures

    try:
        yield compile_cached
    finally:
        for worker in workers:
            worker.kill()
        pool.shutdown(cancel_futures=True)


def compiler_versions() -> dict[str, str]:
    """Return the versions of the packages that determine the compiler's results; empty for one that is missing."""
    return dict.fromkeys(_COMPILERS, "") | installed(*_COMPILERS)


def _cache_file(work: Work, topology: Topology, batch: int) -> Path | None:
    """Return the cache file of a program's results, named by everything that determines them; None for user code."""
    recipe = work.recipe.override({"batch_size": batch, "epochs": 1})
    if ":" in recipe.model and not recipe.model.startswith("timm:"):
        return None
    key = json.dumps([recipe.to_toml(), work.classes, topology.name, compiler_versions()])
    return cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _start() -> None:
    """Silence the child, since libtpu writes past Python, and end it when its parent ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


# The child builds the model of its job once.
_models: "list[nn.Module]" = []


def _compile(work: Work, allow_code: bool, topology: Topology, batch: int) -> dict[str, Any]:
    from flatout.models.build import build_model

    if not _models:
        # Before JAX is started, which takes seconds: a model that cannot be built is reported without it.
        _models.append(build_model(work.recipe, work.classes, allow_code=allow_code))
    recipe = work.recipe.override({"batch_size": batch})
    return compile_step(_models[0], recipe, devices_of(topology), work.classes)


# --- the compiler -----------------------------------------------------------------------------------------------------


@functools.cache
def devices_of(topology: Topology) -> list[Any]:
    """Return JAX's devices of a topology, to compile for.

    Raises:
        InputError: a package is missing, or the installed libtpu does not know the topology.
    """
    from flatout.engine.xla.devices import require

    require()
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
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"--topology {topology.name}: not supported by the installed libtpu ({reason})") from error
    return list(described.devices)


def compile_step(model: "nn.Module", recipe: Recipe, devices: list[Any], classes: int = 2) -> dict[str, Any]:
    """Compile one training step whose images come from the host.

    For images in device memory the compiler would count the whole data set as read in every step.

    Returns:
        The compiler's figures per device; all but `needed_bytes` are 0 if the program does not fit (`fits`).
        `needed_bytes`: memory at the peak; 0 if the compiler rejects the program without a number.
        `argument_bytes`: weights, optimizer state and input; `temporary_bytes`: everything else.
        `flops`, `memory_bytes`: operations, and bytes read from and written to memory.
        `seconds`: the compiler's own estimate of the running time, without messages; 0 if it gives none.
        `collectives`: kind, count and bytes of the results of messages between devices.
        `host_transfers`: operations that wait for the host. `state_bytes`: weights, buffers and optimizer state.

    Raises:
        InputError: the model cannot be compiled.
    """
    import jax
    import numpy as np

    from flatout.engine.xla.mesh import MeshSharding
    from flatout.engine.xla.program import Program
    from flatout.tasks import task_of

    sharding, task = MeshSharding(devices, recipe.shard), task_of(recipe)
    targets = task.targets(task.random_labels(np.random.default_rng(0), 1, classes))
    program = Program(
        model,
        recipe,
        batch=sharding.padded(recipe.batch_size),
        evaluation_batch=sharding.size,
        groups=sharding.size if recipe.norm == "per-device" else 1,
        precision="fp32" if recipe.precision == "fp32" else "bf16",
        target_shape=targets.shape[1:],
    )
    state = program.initial_state()
    names = ("argument_bytes", "temporary_bytes", "flops", "memory_bytes", "seconds", "state_bytes")
    figures: dict[str, Any] = {**dict.fromkeys(names, 0), "collectives": [], "host_transfers": []}
    lowered = sharding.lower_step(program, state)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return {**figures, "fits": False, "needed_bytes": needed}
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text() or ""
    assert memory is not None
    assert cost is not None
    arguments = memory.argument_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return {
        "fits": True,
        "needed_bytes": arguments + temporaries,
        "argument_bytes": arguments,
        "temporary_bytes": temporaries,
        "flops": float(cost.get("flops", 0.0)),
        "memory_bytes": float(cost.get("bytes accessed", 0.0)),
        "seconds": max(0.0, float(cost.get("optimal_seconds", 0.0))),
        "collectives": collectives(text),
        "host_transfers": host_transfers(text),
        "state_bytes": sum(array.nbytes for array in jax.tree.leaves(state)),
    }


def collectives(text: str) -> list[dict[str, Any]]:
    """Return kind, count and bytes of the messages between devices in a compiled program's text."""
    found: dict[str, list[int]] = {}
    for match in _COLLECTIVE.finditer(text):
        sizes = _sizes(match["shape"])
        if match["start"] and match["kind"] != "all-reduce":
            # Operands come first, then results.
            sizes = sizes[len(sizes) // 2 :]
        found.setdefault(match["kind"], []).append(sum(sizes))
    return [{"kind": kind, "count": len(sizes), "bytes": sum(sizes)} for kind, sizes in sorted(found.items())]


def host_transfers(text: str) -> list[str]:
    """Return the lines of a compiled program's text that move data between a TPU and its host."""
    return [line.strip() for line in text.splitlines() if _HOST_TRANSFER.search(line)]


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
