"""Compile a job's step for TPU topologies in a process of its own, cache the figures, and search the largest batch."""

import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatout.console import Console
from flatout.engine.xla.devices import require_compiler
from flatout.errors import InputError, TrainingFailed
from flatout.host import installed
from flatout.plan.chips import Topology
from flatout.plan.roofline import Work, row_of, scaling_curve
from flatout.report.run_files import write_json

# The share of a device's memory that a program can use at least; the compiler knows the exact limit.
MEMORY_SHARE = 0.97
# The search for the largest batch ends within this share of the memory, or after this many compilations.
BATCH_TOLERANCE, MAX_COMPILATIONS = 0.05, 6
# The next batch, relative to one that does not fit, where nothing else is known.
SMALLER = 0.8
# Packages whose version decides the compiler's figures.
_COMPILERS = ("flatout", "torch", "jax", "jaxlib", "torchax", "libtpu")

Compile = Callable[[Topology, int], dict[str, Any]]


def compile_for(
    work: Work,
    topologies: Sequence[Topology],
    price: float | None,
    *,
    largest_batch: bool,
    allow_code: bool,
    console: Console,
) -> dict[str, Any]:
    """Return the part of plan.json about topologies: a row for each, and the estimate for 1 to 256 chips."""
    rows = []
    with _compiler(work, allow_code, console) as compile_step:
        for topology in topologies:
            row = row_of(work, topology, compile_step(topology, work.batch), price)
            if not row["fits"] or largest_batch:
                row["largest_batch"] = find_largest_batch(compile_step, topology, work.batch)
            rows.append(row)
    # A single device sends no messages, so its figures do not tell those of several.
    base = next((row for row in rows if row["fits"] and row["devices"] > 1), None)
    return {
        "estimate": True,
        "price_per_chip_hour": price,
        "topologies": rows,
        "scaling": scaling_curve(work, base, price),
        "scaling_of": base["topology"] if base else None,
    }


# --- the compiler's process -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _compiler(work: Work, allow_code: bool, console: Console) -> Iterator[Compile]:
    """Return a function that compiles the job's step for a topology and a batch size, from the cache where possible.

    Python handles no signal while XLA compiles, so that happens in a child process, which can be killed at any time.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def child() -> _Child:
            return stack.enter_context(_Child(work, allow_code))

        def compile_step(topology: Topology, batch: int) -> dict[str, Any]:
            path = _cache_file(work, topology, batch)
            if path is not None:
                with contextlib.suppress(OSError, ValueError):
                    return json.loads(path.read_text(encoding="utf-8"))
            require_compiler()
            console.note(f"compiling {work.recipe.model}, batch {batch:,}, for {topology.name}")
            compiled = child().compile(topology, batch)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, compiled)
            return compiled

        yield compile_step


class _Child:
    """A process that compiles; killed at the end of the block."""

    def __init__(self, work: Work, allow_code: bool) -> None:
        self._requests, theirs = multiprocessing.Pipe()
        # libtpu writes to standard error past Python; the user needs that only after an unexpected error.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from flatout.host import start_quickly; start_quickly(); "
            f"from flatout.plan.compile import serve; serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
            # Ctrl-C reaches this process alone.
            start_new_session=True,
        )
        theirs.close()
        self._requests.send((os.getpid(), work, allow_code))

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._output.close()

    def compile(self, topology: Topology, batch: int) -> dict[str, Any]:
        """Return the fields of `topology.Compiled`."""
        try:
            self._requests.send((topology, batch))
            compiled = self._requests.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._process.wait()
            raise TrainingFailed(
                f"the TPU compiler's process ended with code {code}; a negative code is a signal, and -9 usually means "
                "that the host ran out of memory"
            ) from None
        if isinstance(compiled, InputError):
            raise compiled
        if isinstance(compiled, str):
            self._output.seek(0)
            said = self._output.read().decode(errors="replace")
            raise RuntimeError(f"in the TPU compiler's process: {compiled}\n{said}")
        return compiled


def serve(descriptor: int) -> None:
    """Compile what the parent process requests; send back figures, an InputError, or the traceback of another error."""
    requests = multiprocessing.connection.Connection(descriptor)
    parent, work, allow_code = requests.recv()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    model, devices = None, {}
    while True:
        topology, batch = requests.recv()
        try:
            # Before JAX is started, which takes seconds: a model that cannot be built is reported without it.
            from flatout.models.build import build_model

            model = model or build_model(work.recipe, work.classes, allow_code=allow_code)
            from flatout.engine.xla.devices import require

            require()
            from flatout.plan.topology import compile_step, devices_of

            if topology.name not in devices:
                devices[topology.name] = devices_of(topology)
            recipe = work.recipe.override({"batch_size": batch})
            requests.send(asdict(compile_step(model, recipe, devices[topology.name], work.classes)))
        except InputError as error:
            requests.send(InputError(str(error)))
        except Exception:
            requests.send(traceback.format_exc())


def _end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _cache_file(work: Work, topology: Topology, batch: int) -> Path | None:
    """Return the file of a program's figures, named by everything that decides them; None for the user's own code."""
    from flatout.data.cache import cache_folder

    recipe = work.recipe.override({"batch_size": batch, "epochs": 1})
    if ":" in recipe.model and not recipe.model.startswith("timm:"):
        return None
    key = json.dumps([recipe.to_toml(), work.classes, topology.name, versions()])
    return cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the compiler's figures; empty for one that is missing."""
    return dict.fromkeys(_COMPILERS, "") | installed(*_COMPILERS)


# --- the largest batch ------------------------------------------------------------------------------------------------


def find_largest_batch(compile_step: Compile, topology: Topology, batch: int) -> int | None:
    """Return the largest batch found to fit, None if none does.

    A step's memory grows almost in proportion to its batch, so each attempt extrapolates from the nearest two.
    """
    limit, devices = MEMORY_SHARE * topology.device_memory_bytes, topology.devices
    fits, fails = 0, 0
    known: list[tuple[int, float]] = []
    for _ in range(MAX_COMPILATIONS):
        compiled = compile_step(topology, batch)
        needed = compiled["needed_bytes"]
        if needed:
            known.append((batch, needed))
        if not compiled["fits"]:
            fails = min(fails or batch, batch)
        elif batch > fits:
            fits = batch
            if needed >= (1 - BATCH_TOLERANCE) * limit:
                break
        if fails and fails - fits <= max(devices, BATCH_TOLERANCE * fits):
            break
        batch = _next_batch(known, limit, fits, fails, devices)
    return fits or None


def _next_batch(known: Sequence[tuple[int, float]], limit: float, fits: int, fails: int, devices: int) -> int:
    """Return the next batch to try, a multiple of the devices, between the largest that fits and the least that fails.

    Args:
        known: batches, each with the bytes that it needs.
        limit: the bytes available.
        fits, fails: those batches; 0 where none is known.
    """
    guesses = []
    nearest = sorted(known, key=lambda point: abs(point[1] - limit))[:2]
    if len(nearest) == 2:
        (b0, m0), (b1, m1) = sorted(nearest)
        if b1 > b0 and m1 > m0:
            guesses.append(b0 + (limit - m0) * (b1 - b0) / (m1 - m0))
    # The compiler may lay out a larger batch better, so that the line does not rise: then in proportion.
    guesses += [b * limit / m for b, m in known if b == fits or not fits]
    # Slightly less, since a batch that fits is worth more than one that does not.
    tries = [int(0.98 * guess) // devices * devices for guess in guesses]
    # Else the geometric mean of both ends, as they can differ by orders of magnitude.
    middle = math.isqrt(fits * fails) if fits and fails else int(SMALLER * fails) or 2 * fits
    tries.append(middle // devices * devices)
    low, high = fits or devices - 1, fails or math.inf
    return max(devices, next((batch for batch in tries if low < batch < high), tries[-1]))
