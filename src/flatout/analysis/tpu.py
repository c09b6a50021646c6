"""A training step compiled for TPUs, for `flatout plan`, in a separate process.

libtpu contains the compiler of every TPU generation and needs no TPU to run it. The compiled program is the one that
such a TPU would run; memory, work and messages are read off it.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.analysis.roofline import Compile, Topology, Work
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

_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<type>pred|bf16|[fsu]\d+)\[(?P<lengths>[\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}
# The memory that a rejected program needed, as the compiler reports it before and after the memory's layout.
_REJECTED = re.compile(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGTP]?)(?:\)| of)")


# --- the compiler's process -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tpu_compiler(work: Work, allow_code: bool, console: Console) -> Iterator[Compile]:
    """Provide a function that compiles the job's step for a topology, or takes the figures from the cache.

    Python handles no signal while XLA compiles, so that happens in a child process, which can be killed at any time.
    """
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start)
    workers: list[multiprocessing.process.BaseProcess] = []

    def compile_cached(topology: Topology) -> dict[str, Any]:
        path = _cache_file(work, topology)
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                return json.loads(path.read_text(encoding="utf-8"))
        require_compiler()
        console.note(f"compiling {work.recipe.model}, batch {work.batch:,}, for {topology.name}")
        # The child inherits the mask, so that Ctrl-C reaches only this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        before = multiprocessing.active_children()
        compiled = pool.submit(_compile, work, allow_code, topology)
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


def _cache_file(work: Work, topology: Topology) -> Path | None:
    """Return the cache file of a program's results; None for user code, whose content no name tells."""
    recipe = work.recipe.override({"batch_size": work.batch, "epochs": 1})
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


def _compile(work: Work, allow_code: bool, topology: Topology) -> dict[str, Any]:
    from flatout.models.build import build_model

    if not _models:
        # Before JAX is started, which takes seconds: a model that cannot be built is reported without it.
        _models.append(build_model(work.recipe, work.classes, allow_code=allow_code))
    recipe = work.recipe.override({"batch_size": work.batch})
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
        `state_bytes`: weights, buffers and optimizer state.

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
    figures: dict[str, Any] = {**dict.fromkeys(names, 0), "collectives": []}
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
