"""Compile a job's training step for TPUs that are not there, keep what the compiler says, and look for what fits."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import Console
from flatout.plan.chips import Topology
from flatout.plan.roofline import Work, device_memory, row_of, scaling
from flatout.report.run_files import write_json

if TYPE_CHECKING:
    from torch import nn

# The share of a device's memory that programs get at least; the compiler knows how much it really is.
MEMORY_SHARE = 0.97
# The search for the largest batch ends when that fills the memory to within this share, or after so many compilations.
BATCH_TOLERANCE, MOST_COMPILATIONS = 0.05, 6
# Where a batch does not fit and nothing says by how much, the next is this much smaller.
SMALLER = 0.8
# Packages whose version decides what the compiler says.
_COMPILERS = ("flatout", "torch", "jax", "jaxlib", "torchax", "libtpu")


def compile_for(
    work: Work,
    topologies: Sequence[Topology],
    price: float | None,
    *,
    largest_batch: bool,
    allow_code: bool,
    console: Console,
) -> dict[str, Any]:
    """Return what plan.json says of topologies: a row for each, and the estimate for 1 to 256 chips."""
    compiler = _Compiler(work, allow_code, console)
    rows = []
    for topology in topologies:
        row = row_of(work, topology, compiler.step(topology, work.batch), price)
        if not row["fits"] or largest_batch:
            row["largest_batch"] = compiler.largest_batch(topology, work.batch)
        rows.append(row)
    # One device alone sends no messages, from which those of many could be told.
    base = next((row for row in rows if row["fits"] and row["devices"] > 1), None)
    return {
        "estimate": True,
        "price_per_chip_hour": price,
        "topologies": rows,
        "scaling": scaling(work, base, price),
        "scaling_of": base["topology"] if base else None,
    }


class _Compiler:
    """Compiles a job's step for topologies, or finds in the cache what was compiled before."""

    def __init__(self, work: Work, allow_code: bool, console: Console) -> None:
        self._work, self._allow_code, self._console = work, allow_code, console
        self._model: nn.Module | None = None
        self._devices: dict[str, list[Any]] = {}

    def step(self, topology: Topology, batch: int) -> dict[str, Any]:
        """Return what the compiler says of the step at a batch size: the fields of `engine.xla.topology.Compiled`."""
        path = self._cached(topology, batch)
        if path is not None:
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                pass
        self._console.note(f"compiling {self._work.recipe.model}, batch {batch:,}, for {topology.name}")
        compiled = self._compile(topology, batch)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, compiled)
        return compiled

    def largest_batch(self, topology: Topology, batch: int) -> int | None:
        """Return the largest batch found to fit, None if none does.

        What a step needs grows almost in proportion to its batch, so each attempt goes where a line through the
        nearest two says that the memory ends.
        """
        limit, parts = MEMORY_SHARE * device_memory(topology), topology.devices
        fits, fails = 0, 0
        known: list[tuple[int, float]] = []
        for _ in range(MOST_COMPILATIONS):
            compiled = self.step(topology, batch)
            needed = compiled["needed_bytes"]
            if needed:
                known.append((batch, needed))
            if not compiled["fits"]:
                fails = min(fails or batch, batch)
            elif batch > fits:
                fits = batch
                if needed >= (1 - BATCH_TOLERANCE) * limit:
                    break
            if fails and fails - fits <= max(parts, BATCH_TOLERANCE * fits):
                break
            batch = _next_batch(known, limit, fits, fails, parts)
        return fits or None

    def _compile(self, topology: Topology, batch: int) -> dict[str, Any]:
        from flatout.engine.xla import devices
        from flatout.models.load import build_model

        devices.settle_for_compiling()
        from flatout.plan.topology import chips, compile_step

        if self._model is None:
            self._model = build_model(self._work.recipe, self._work.classes, allow_code=self._allow_code)
        if topology.name not in self._devices:
            self._devices[topology.name] = chips(topology)
        recipe = self._work.recipe.override({"batch_size": batch})
        return asdict(compile_step(self._model, recipe, self._devices[topology.name]))

    def _cached(self, topology: Topology, batch: int) -> Path | None:
        """Return the file for a program, named by everything that decides it; None where code may have changed."""
        from flatout.data.cache import cache_folder

        recipe = self._work.recipe.override({"batch_size": batch, "epochs": 1})
        if ":" in recipe.model and not recipe.model.startswith("timm:"):
            return None
        decides = [recipe.to_toml(), self._work.classes, topology.name, versions()]
        name = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
        return cache_folder() / "plans" / f"{name}.json"


def _next_batch(known: Sequence[tuple[int, float]], limit: float, fits: int, fails: int, parts: int) -> int:
    """Return the batch to try next, a multiple of the devices, between the largest that fits and the least that fails.

    Args:
        known: batches, each with the bytes that it needs.
        limit: the bytes that there are.
        fits, fails: those batches; 0 where none is known.
        parts: how many devices share a batch.
    """
    guesses = []
    nearest = sorted(known, key=lambda point: abs(point[1] - limit))[:2]
    if len(nearest) == 2:
        (b0, m0), (b1, m1) = sorted(nearest)
        if b1 > b0 and m1 > m0:
            guesses.append(b0 + (limit - m0) * (b1 - b0) / (m1 - m0))
    # The compiler may lay out a larger batch better, so that no such line leads up: then in proportion.
    guesses += [b * limit / m for b, m in known if b == fits or not fits]
    # A little below, since a batch that fits is worth more than one that does not.
    tries = [int(0.98 * guess) // parts * parts for guess in guesses]
    # Or the middle, as batches of different orders of magnitude have it.
    tries.append((math.isqrt(fits * fails) if fits and fails else int(SMALLER * fails) or 2 * fits) // parts * parts)
    low, high = fits or parts - 1, fails or math.inf
    batch = next((batch for batch in tries if low < batch < high), tries[-1])
    return max(batch, parts)


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what the compiler says; empty for one that is missing."""
    found = {}
    for package in _COMPILERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
