"""Compile a job's training step for TPUs that are not there, and read what the compiler says of it.

libtpu holds the compiler of every TPU generation and needs no TPU to run it. What comes out is the very program that
such a TPU would run: its memory, its operations and its messages are facts; how long it takes remains an estimate.

Shape letters: B batch.
"""

import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from torch import nn

from flatout.engine.xla.mesh import Layout
from flatout.engine.xla.step import Program
from flatout.errors import InputError
from flatout.plan.chips import Topology
from flatout.recipe import Recipe

_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<type>pred|bf16|[fsu]\d+)\[(?P<lengths>[\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}
# What moves data between a TPU and its host in the middle of a program.
_HOST_TRANSFER = re.compile(
    r"= .*\b(?:infeed|outfeed)\("
    r"|= .*\b(?:send|recv)\(.*\bis_host_transfer=true"
    r"|\bcustom_call_target=\"\w*[Hh]ost"
)
# How the compiler says what a program would have needed: before and after it has laid out the memory.
_REFUSED = re.compile(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGTP]?)(?:\)| of)")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Messages of one kind in a step: how many, and the bytes of their results on each chip."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says of one step, for each chip.

    Attributes:
        fits: whether the program fits into the chip's memory; if not, all but `needed_bytes` is 0.
        needed_bytes: memory at the peak: arguments, results and temporaries; 0 where it does not fit and the compiler
            does not say.
        argument_bytes, temporary_bytes: weights, optimizer state and input; everything else.
        flops: floating-point operations.
        memory_bytes: bytes read from and written to the chip's memory.
        seconds: the compiler's own estimate of its running time, without messages; 0 if it gives none.
        collectives: messages between chips.
        host_transfers: operations that would wait for the host.
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


def chips(topology: Topology) -> list[Any]:
    """Return the devices of a topology, as ones that can be compiled for.

    Raises:
        InputError: this libtpu knows no such topology.
    """
    # A compiler needs no TPU to itself: several may run on a machine, beside a training too.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # libtpu otherwise asks the cloud which TPU this machine has, and complains of having none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    options: dict[str, Any] = {"chip_config_name": topology.generation.config} if topology.generation.config else {}
    if topology.chips == 1:
        # A host is taken to have four.
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        with _chatter_aside():
            described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except Exception as error:  # libtpu's errors have no type of their own
        said = str(error).strip().partition("\n")[0]
        raise InputError(f"--topology {topology.name}: the installed libtpu does not take it ({said})") from error
    return list(described.devices)


def compile_step(model: nn.Module, recipe: Recipe, devices: list[Any]) -> Compiled:
    """Compile one training step for the chips of a topology, its images coming from the host.

    Where they lie on the chips the compiler would count all of them as read, though a step reads a batch of them.

    Args:
        model: with any weights; only shapes matter.
        recipe: complete; `batch_size` is the global batch.
        devices: as `chips` returns them.

    Raises:
        InputError: the model cannot be compiled.
    """
    precision = "fp32" if recipe.precision == "fp32" else "bf16"
    layout = Layout(devices, recipe.shard)
    program = Program(
        model,
        recipe,
        batch=layout.padded(recipe.batch_size),
        evaluation_batch=layout.size,
        groups=layout.size if recipe.norm == "per-device" else 1,
        precision=precision,
    )
    lowered = layout.lower_step(program, steps=None, is_resident=False, table=None, precision=precision)
    try:
        with _chatter_aside():
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
    return Compiled(
        fits=True,
        needed_bytes=arguments + results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        argument_bytes=arguments,
        temporary_bytes=results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        flops=float(cost.get("flops", 0.0)),
        memory_bytes=float(cost.get("bytes accessed", 0.0)),
        seconds=max(0.0, float(cost.get("optimal_seconds", 0.0))),
        collectives=tuple(collectives(text)),
        host_transfers=tuple(host_transfers(text)),
        state_bytes=sum(array.nbytes for array in jax.tree.leaves(program.initial_state())),
    )


@contextlib.contextmanager
def _chatter_aside() -> Iterator[None]:
    """Keep from the user what libtpu writes to standard error past Python; an exception takes it along as a note."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except Exception as error:
            file.seek(0)
            if said := file.read().decode(errors="replace").strip():
                error.add_note(f"libtpu wrote:\n{said}")
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def collectives(text: str) -> Iterator[Collective]:
    """Yield the messages between chips that a compiled program, as text, sends; each kind once."""
    found: dict[str, list[int]] = {}
    for match in _COLLECTIVE.finditer(text):
        sizes = _sizes(match["shape"])
        if match["start"] and match["kind"] != "all-reduce":
            # What is sent comes first, then what arrives.
            sizes = sizes[len(sizes) // 2 :]
        found.setdefault(match["kind"], []).append(sum(sizes))
    for kind, sizes in sorted(found.items()):
        yield Collective(kind=kind, count=len(sizes), bytes=sum(sizes))


def host_transfers(text: str) -> Iterator[str]:
    """Yield the lines of a compiled program, as text, that move data between a TPU and its host."""
    return (line.strip() for line in text.splitlines() if _HOST_TRANSFER.search(line))


def _sizes(shape: str) -> list[int]:
    """Return the bytes of each array in an HLO shape such as `f32[10,20]{1,0}` or `(f32[10]{0}, f32[])`."""
    found = []
    for array in _ARRAY.finditer(shape):
        width = _BYTES.get(array["type"]) or int(array["type"][1:]) // 8
        found.append(width * math.prod(int(n) for n in array["lengths"].split(",") if n))
    return found


def needed_bytes(message: str) -> int | None:
    """Return how much memory a program would have needed, from the compiler's refusal; None if it was another.

    0 where the refusal does not say.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50, "": 1}
    used = _REFUSED.search(message)
    return int(float(used[1]) * units[used[2]]) if used else 0
