"""Compile a training step for TPUs that this machine lacks, and read memory, work and messages off the program.

libtpu contains the compiler of every TPU generation and needs no TPU to run it. The compiled program is the one that
such a TPU would run.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from torch import nn

from flatout.engine.xla.mesh import MeshSharding
from flatout.engine.xla.program import Program
from flatout.errors import InputError
from flatout.plan.chips import Topology
from flatout.recipe import Recipe
from flatout.tasks import task_of

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


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Messages of one kind in a step: how many, and the bytes of their results on each device."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's figures for one step, per device.

    Attributes:
        fits: whether the program fits into the memory; if not, every figure but `needed_bytes` is 0.
        needed_bytes: memory at the peak: arguments, results and temporaries; 0 where the compiler rejects the program
            without a figure.
        argument_bytes, temporary_bytes: weights, optimizer state and input; everything else.
        flops: floating-point operations.
        memory_bytes: bytes read from and written to memory.
        seconds: the compiler's own estimate of the running time, without messages; 0 if it gives none.
        collectives: messages between devices.
        host_transfers: operations that wait for the host.
        state_bytes: weights, buffers and optimizer state of the whole model.
    """

    fits: bool
    needed_bytes: int
    argument_bytes: int = 0
    temporary_bytes: int = 0
    flops: float = 0.0
    memory_bytes: float = 0.0
    seconds: float = 0.0
    collectives: tuple[Collective, ...] = ()
    host_transfers: tuple[str, ...] = ()
    state_bytes: int = 0


def devices_of(topology: Topology) -> list[Any]:
    """Return the devices of a topology, to compile for.

    Raises:
        InputError: the installed libtpu does not know the topology.
    """
    # Several compilers may run at once, also beside a training.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Without these libtpu asks the cloud's metadata server which TPU this machine has.
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


def compile_step(model: nn.Module, recipe: Recipe, devices: list[Any], classes: int = 2) -> Compiled:
    """Compile one training step whose images come from the host.

    For images in device memory the compiler would count the whole data set as read in every step.

    Args:
        model: with any weights; only shapes matter.
        recipe: complete; `batch_size` is the global batch.

    Raises:
        InputError: the model cannot be compiled.
    """
    precision = "fp32" if recipe.precision == "fp32" else "bf16"
    sharding = MeshSharding(devices, recipe.shard)
    task = task_of(recipe)
    targets = task.targets(task.random_labels(np.random.default_rng(0), 1, classes))
    program = Program(
        model,
        recipe,
        batch=sharding.padded(recipe.batch_size),
        evaluation_batch=sharding.size,
        groups=sharding.size if recipe.norm == "per-device" else 1,
        precision=precision,
        target_shape=targets.shape[1:],
    )
    state = program.initial_state()
    lowered = sharding.lower_step(program, state)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return Compiled(fits=False, needed_bytes=needed)
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text() or ""
    assert memory is not None
    assert cost is not None
    arguments = memory.argument_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return Compiled(
        fits=True,
        needed_bytes=arguments + temporaries,
        argument_bytes=arguments,
        temporary_bytes=temporaries,
        flops=float(cost.get("flops", 0.0)),
        memory_bytes=float(cost.get("bytes accessed", 0.0)),
        seconds=max(0.0, float(cost.get("optimal_seconds", 0.0))),
        collectives=tuple(collectives(text)),
        host_transfers=tuple(host_transfers(text)),
        state_bytes=sum(array.nbytes for array in jax.tree.leaves(state)),
    )


def collectives(text: str) -> Iterator[Collective]:
    """Yield the messages between devices in a compiled program's text, one item per kind."""
    found: dict[str, list[int]] = {}
    for match in _COLLECTIVE.finditer(text):
        sizes = _sizes(match["shape"])
        if match["start"] and match["kind"] != "all-reduce":
            # Operands come first, then results.
            sizes = sizes[len(sizes) // 2 :]
        found.setdefault(match["kind"], []).append(sum(sizes))
    for kind, sizes in sorted(found.items()):
        yield Collective(kind=kind, count=len(sizes), bytes=sum(sizes))


def host_transfers(text: str) -> Iterator[str]:
    """Yield the lines of a compiled program's text that move data between a TPU and its host."""
    return (line.strip() for line in text.splitlines() if _HOST_TRANSFER.search(line))


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
