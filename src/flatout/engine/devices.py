"""Device names: parse a SPEC such as `2xcpu` or `cuda:0,2`, list what this host has, choose the engine.

No other module interprets device names.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.config.settings import nearest
from flatout.engine.xla.devices import tpu_count
from flatout.utils.errors import InputError
from flatout.utils.host import processor_name, usable_cores

KINDS = ("cpu", "cuda", "mps", "tpu")
ENGINES = ("torch", "xla")
# The kinds of devices that the XLA engine supports.
XLA_KINDS = ("tpu", "cuda", "cpu")
# More processes or simulated devices are a typing error that would overload the machine.
MAX_PROCESSES_PER_CORE = 16
MAX_SIMULATED = 64
_SPEC = re.compile(r"(?:(?P<count>[1-9]\d*)x)?(?P<kind>[a-z]+)(?::(?P<indices>\d+(?:,\d+)*))?")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run on this host: their kind, indices (such as cuda 0 and cuda 2) and engine."""

    kind: str
    indices: tuple[int, ...]
    engine: str = "torch"

    @property
    def names(self) -> tuple[str, ...]:
        """Torch's device names."""
        return tuple(self.kind if self.kind in ("cpu", "mps") else f"{self.kind}:{i}" for i in self.indices)

    @property
    def is_accelerated(self) -> bool:
        """Whether they are accelerators rather than CPUs."""
        return self.kind != "cpu"

    @property
    def ranks(self) -> "Devices":
        """The devices of each process to start: torch has one process per device, XLA one for all."""
        return self if self.engine == "torch" else Devices(kind="cpu", indices=(0,))

    def __str__(self) -> str:
        is_choice = len(set(self.names)) < len(self.names) and self.kind == "cuda"
        return f"cuda:{','.join(map(str, self.indices))}" if is_choice else spec_of(self.names)


def spec_of(names: Sequence[str]) -> str:
    """Return the SPEC of devices, given by their torch names: `2xcpu`, `cuda:1`, `cuda:0,2`, `16xcuda`."""
    kind = names[0].partition(":")[0]
    if len(names) == 1:
        return names[0]
    is_choice = len(set(names)) == len(names) and list(names) != [f"{kind}:{i}" for i in range(len(names))]
    if is_choice and kind == "cuda":
        return f"{kind}:{','.join(name.partition(':')[2] for name in names)}"
    return f"{len(names)}x{kind}"


def available() -> dict[str, int]:
    """Return the number of devices of each kind on this host; for the CPU, its cores.

    Raises:
        InputError: there is a GPU that torch cannot use, such as with an old driver.
    """
    import torch

    found = {"cpu": usable_cores()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = torch.cuda.is_available()
    if caught:
        # Of a GPU that does not start; without any, torch says nothing.
        reason = str(caught[0].message).removeprefix("CUDA initialization: ").partition(" (Triggered")[0]
        raise InputError(f"torch cannot use the GPU: {reason}; to train without it: CUDA_VISIBLE_DEVICES=")
    if has_cuda:
        found["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        found["mps"] = 1
    if tpu := tpu_count():
        found["tpu"] = tpu
    return found


def machine() -> dict[str, Any]:
    """Return a description of this host: processor, cores, memory, GPUs, system."""
    import platform

    import psutil
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cpu": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": ", ".join(map(torch.cuda.get_device_name, range(gpus))) or None,
        "system": platform.platform(),
    }


def engine_for(spec: str, wanted: str) -> str:
    """Return the engine for a device SPEC: `torch` or `xla`; `auto` is XLA for TPUs and torch for everything else.

    Raises:
        InputError: there is no such engine.
    """
    if wanted not in ("auto", *ENGINES):
        raise InputError(f"--engine {wanted}: known engines: auto, {', '.join(ENGINES)}")
    if wanted != "auto":
        return wanted
    return "xla" if "tpu" in spec.lower() or (spec == "auto" and tpu_count()) else "torch"


def parse_devices(spec: str, engine: str = "torch") -> Devices:
    """Resolve a SPEC (`auto`, `cpu`, `2xcpu`, `cuda:0,2`) to devices of this host; `auto` is all of the best kind.

    `gpu` is the kind of GPU that this host has. A CPU runs any number of processes; a GPU may be listed twice, which is
    slow but useful for tests. With the XLA engine, several CPU devices are simulated.

    Raises:
        InputError: the SPEC does not parse, or names more devices than there are.
    """

    def wrong(reason: str) -> InputError:
        return InputError(f"--devices {spec}: {reason}")

    match = _SPEC.fullmatch(spec.lower())
    if not match or (match["count"] and match["indices"]):
        raise wrong("must be auto, cpu, cuda, mps, tpu, a number of them (2xcpu, 8xtpu) or a choice (cuda:0,2)")
    kind, count, indices = match["kind"], int(match["count"] or 1), match["indices"]
    if kind == "auto" and (match["count"] or indices):
        raise wrong("auto chooses the number itself; name a kind, as in 2xcpu or 2xcuda")
    if kind in ("gpu", "gpus"):
        kind = "mps" if engine == "torch" and available().keys() & {"cuda", "mps"} == {"mps"} else "cuda"
    if kind not in ("auto", *KINDS):
        raise wrong(f"unknown kind of device {kind!r}; {nearest(kind, ('auto', *KINDS, 'gpu'))}")
    if kind == "cpu" and indices:
        raise wrong("CPU devices are not indexed; for several processes: 2xcpu")
    if engine == "xla":
        kind, count = _xla_devices(kind, count, wrong)
        chosen = tuple(map(int, indices.split(","))) if indices else tuple(range(count))
        return Devices(kind=kind, indices=chosen, engine=engine)
    if kind == "tpu":
        raise wrong("TPUs need --engine xla")
    found = available()
    if kind == "auto":
        kind = next((k for k in ("cuda", "mps") if k in found), "cpu")
        count = found[kind] if kind == "cuda" else 1
    chosen = tuple(map(int, indices.split(","))) if indices else tuple(range(count))
    limit = found.get(kind, 0) * (MAX_PROCESSES_PER_CORE if kind == "cpu" else 1)
    if max(chosen) >= limit:
        here = ", ".join(f"{k} ({n})" for k, n in found.items())
        most = f"at most {limit} processes" if kind == "cpu" else f"only {limit} available" if limit else "none found"
        raise wrong(f"{most}; this host has: {here}")
    return Devices(kind=kind, indices=chosen)


def _xla_devices(kind: str, count: int, wrong: Callable[[str], InputError]) -> tuple[str, int]:
    """Return XLA's devices, if possible without starting JAX, which only `auto` without TPUs requires."""
    from flatout.engine.xla.devices import gpu_count, require

    require()
    tpus = tpu_count()
    if kind == "auto":
        gpus = 0 if tpus else gpu_count()
        return ("tpu", tpus) if tpus else ("cuda", gpus) if gpus else ("cpu", 1)
    if kind not in XLA_KINDS:
        raise wrong(f"XLA supports {', '.join(XLA_KINDS)} here; for {kind} use --engine torch")
    if kind == "tpu" and not tpus:
        raise wrong(
            f"this machine has no TPU; to try the engine on simulated devices: --engine xla --devices {count}xcpu; "
            "to estimate the speed on TPUs: flatout plan"
        )
    if kind == "cpu" and count > MAX_SIMULATED:
        raise wrong(f"at most {MAX_SIMULATED} simulated devices")
    return kind, count
