"""Device names: parse a SPEC such as `2xcpu` or `cuda:0,2`, list what this host has, choose the engine."""

import importlib
import importlib.util
import os
import platform
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.distributed.environment import wanted_threads
from flatout.utils.errors import InputError, first_line
from flatout.utils.host import physical_cores, processor_name, usable_cores

ENGINES = ("torch", "xla")
# More processes or simulated devices are a typing error that would overload the machine.
MAX_PROCESSES_PER_CORE = 16
MAX_SIMULATED = 64
_SPEC = re.compile(r"(?:([1-9]\d*)x)?(cpu|cuda|mps|tpu)|(cuda|tpu):(\d+(?:,\d+)*)|(auto)")
# XLA's number formats, the default first.
XLA_PRECISIONS = {"cpu": ("fp32", "bf16"), "tpu": ("bf16", "fp32")}
XLA_INSTALL = "pip install 'flatout[tpu]'"

# PCI device IDs of TPU chips (Google is vendor 0x1ae0), and JAX's devices per chip: v2 and v3, v4, v5p, v5e, v6e, v7x.
# From jax/_src/hardware_utils.py.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0027": 2, "0x005e": 1, "0x0056": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 2}


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
        is_repeated = len(set(self.names)) < len(self.names) and self.kind == "cuda"
        return f"cuda:{','.join(map(str, self.indices))}" if is_repeated else spec_of(self.names)


def spec_of(names: Sequence[str]) -> str:
    """Return the SPEC of devices, given by their torch names: `2xcpu`, `cuda:1`, `cuda:0,2`, `16xcuda`."""
    kind, count = names[0].partition(":")[0], len(names)
    if count == 1:
        return names[0]
    is_choice = len(set(names)) == count and list(names) != [f"{kind}:{i}" for i in range(count)]
    return f"{kind}:{','.join(name.partition(':')[2] for name in names)}" if is_choice else f"{count}x{kind}"


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
    if caught and not has_cuda:
        # Of a GPU that does not start; without any, torch says nothing.
        reason = str(caught[0].message).removeprefix("CUDA initialization: ").partition(" (Triggered")[0]
        fix = "to train without it, set CUDA_VISIBLE_DEVICES to an empty value"
        raise InputError(f"torch cannot use the GPU: {reason}; {fix}")
    if has_cuda:
        found["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        found["mps"] = 1
    if tpu := tpu_count():
        found["tpu"] = tpu
    return found


def machine() -> dict[str, Any]:
    """Return a description of this host for results."""
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


def cpu_threads(ranks_here: int = 1) -> int:
    """Return the threads of one of several processes on this host: OMP_NUM_THREADS, or an equal share of the cores.

    Several processes are limited to their shares: with more threads than cores, synchronising is several times slower.
    """
    share = max(1, physical_cores() // ranks_here)
    wanted = wanted_threads() or share
    return wanted if ranks_here == 1 else min(wanted, share)


def choose_precision(wanted: str, formats: Sequence[str], where: str) -> str:
    """Resolve a recipe's `precision` to one of the formats that the hardware has, the default first."""
    if wanted not in ("auto", *formats):
        raise InputError(
            f"precision = {wanted!r}: {where} supports only {', '.join(formats)}; use --set precision=auto"
        )
    return formats[0] if wanted == "auto" else wanted


def engine_for(spec: str, wanted: str) -> str:
    """Return the engine for a device SPEC: `torch` or `xla`; `auto` is XLA for TPUs and torch for everything else."""
    if wanted not in ("auto", *ENGINES):
        raise InputError(f"--engine {wanted}: known engines: auto, {', '.join(ENGINES)}")
    if wanted != "auto":
        return wanted
    return "xla" if "tpu" in spec.lower() or (spec == "auto" and tpu_count()) else "torch"


def parse_devices(spec: str, engine: str = "torch") -> Devices:
    """Resolve a SPEC (`auto`, `cpu`, `2xcpu`, `cuda:0,2`) to devices of this host; `auto` is all of the best kind.

    A GPU may be listed twice, which is slow but useful for tests. With the XLA engine, several CPU devices are
    simulated; JAX is not started.
    """
    match = _SPEC.fullmatch(spec.lower().replace("gpu", "cuda"))
    if match is None:
        raise InputError(
            f"--devices {spec}: must be auto, cpu, cuda, mps, tpu, a number of them (2xcpu, 8xtpu) or a choice of GPUs "
            "(cuda:0,2)"
        )
    count, counted, chosen, listed, auto = match.groups()
    kind = counted or chosen or auto
    indices = tuple(map(int, listed.split(","))) if listed else tuple(range(int(count or 1)))
    if engine == "xla":
        return _of_xla(spec, kind, indices)
    if kind == "tpu":
        raise InputError(f"--devices {spec}: TPUs need --engine xla")
    found = available()
    if kind == "auto":
        kind = next(k for k in ("cuda", "mps", "cpu") if k in found)
        indices = tuple(range(found[kind])) if kind == "cuda" else (0,)
    limit = found.get(kind, 0) * (MAX_PROCESSES_PER_CORE if kind == "cpu" else 1)
    if max(indices) >= limit:
        here = ", ".join(f"{k} ({n})" for k, n in found.items())
        most = f"at most {limit} processes" if kind == "cpu" else f"only {limit} available" if limit else "none found"
        raise InputError(f"--devices {spec}: {most}; this host has: {here}")
    return Devices(kind=kind, indices=indices)


def _of_xla(spec: str, kind: str, indices: tuple[int, ...]) -> Devices:
    require_xla()
    tpus = tpu_count()
    if kind == "auto":
        kind, indices = ("tpu", tuple(range(tpus))) if tpus else ("cpu", (0,))
    if kind not in ("cpu", "tpu") or (kind == "cpu" and len(indices) > MAX_SIMULATED):
        raise InputError(
            f"--devices {spec}: --engine xla runs on TPUs, or on at most {MAX_SIMULATED} simulated devices (8xcpu)"
        )
    if kind == "tpu" and not tpus:
        raise InputError(
            f"--devices {spec}: this machine has no TPU; to try the engine on simulated devices: --engine xla "
            f"--devices {len(indices)}xcpu; to estimate the speed on TPUs: flatout plan"
        )
    return Devices(kind=kind, indices=indices, engine="xla")


# --- XLA --------------------------------------------------------------------------------------------------------------


def tpu_count(root: Path = Path("/")) -> int:
    """Return the number of TPU devices of this host as JAX counts them, without starting JAX."""
    nodes = [*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]
    folders = root.glob("sys/bus/pci/devices/*") if nodes else ()
    numbers = [tuple((folder / name).read_text().strip() for name in ("vendor", "device")) for folder in folders]
    chips = [_TPUS[device] for vendor, device in numbers if vendor == _GOOGLE and device in _TPUS]
    chips = chips or [1 for node in nodes if node.name.startswith("accel")]
    visible = os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("TPU_VISIBLE_DEVICES")
    return sum(chips[: visible.count(",") + 1] if visible else chips)


def require_xla() -> None:
    """Check that the engine's packages are installed, in versions that fit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("jax")
            importlib.import_module("flatout.engine.xla.function").import_lowerings()
    except Exception as error:  # incompatible versions fail in their own ways
        raise InputError(f"--engine xla: {first_line(error)}; install what it needs: {XLA_INSTALL}") from error


def require_tpu_compiler() -> None:
    """Check that libtpu is installed, which contains the compiler of TPU programs; it is not imported."""
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(f"the TPU compiler needs libtpu, which is not installed: {XLA_INSTALL}")
