"""Read device names and launcher variables; nothing else in flatout does."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.engine.base import Engine
from flatout.errors import InputError
from flatout.recipe import Recipe, nearest

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

KINDS = ("cpu", "cuda", "mps", "tpu")
_SPEC = re.compile(r"(?:(?P<count>\d+)x)?(?P<kind>[a-z]+)(?::(?P<indices>\d+(?:,\d+)*))?")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run: a kind and one index each, such as cuda 0 and cuda 2."""

    kind: str
    indices: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Device names as torch writes them."""
        return tuple(self.kind if self.kind in ("cpu", "mps") else f"{self.kind}:{i}" for i in self.indices)

    def __str__(self) -> str:
        return f"{len(self.indices)}x{self.kind}" if len(self.indices) > 1 else self.names[0]


def available() -> dict[str, int]:
    """Return how many devices of each kind this machine has; the CPU counts its cores."""
    import torch

    found = {"cpu": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        found["mps"] = 1
    return found


def parse_devices(spec: str) -> Devices:
    """Turn a SPEC (`auto`, `cpu`, `cuda:1`, `mps`) into devices of this machine.

    Raises:
        InputError: the SPEC does not parse, or names more than there is; the message lists what there is.
    """
    match = _SPEC.fullmatch(spec)
    if not match or (match["count"] and match["indices"]) or match["count"] == "0":
        raise InputError(
            f"--devices {spec}: must be auto, cpu, cuda, mps, a number of them (4xcuda) or a choice (cuda:0,2)"
        )
    kind = match["kind"]
    if kind not in ("auto", *KINDS):
        raise InputError(f"--devices {spec}: no kind of device is called {kind!r}; {nearest(kind, ('auto', *KINDS))}")
    found = available()
    if kind == "auto":
        kind = next((k for k in ("cuda", "mps") if k in found), "cpu")
    here = ", ".join(f"{k} ({n})" for k, n in found.items())
    indices = (
        tuple(map(int, match["indices"].split(","))) if match["indices"] else tuple(range(int(match["count"] or 1)))
    )
    if kind not in found or (kind != "cpu" and max(indices) >= found[kind]):
        raise InputError(f"--devices {spec}: this machine has no such device; it has: {here}")
    if len(indices) > 1:
        raise InputError(f"--devices {spec}: this version trains on one device; name one of: {here}")
    return Devices(kind=kind, indices=indices)


def is_accelerated(spec: str) -> bool:
    """Return whether a SPEC means more than the CPU."""
    return parse_devices(spec).kind != "cpu"


def machine() -> dict[str, Any]:
    """Return what this machine is: processor, cores, memory, accelerators."""
    import platform

    import psutil
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "cpu": _processor_name() or platform.processor() or platform.machine(),
        "cores": available()["cpu"],
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": ", ".join(gpus) or None,
        "system": platform.platform(),
    }


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""


def make_engine(
    model: "nn.Module",
    recipe: Recipe,
    *,
    engine: str,
    devices: str,
    class_weights: "np.ndarray | None" = None,
    report: Callable[[str], None],
    **options: bool,
) -> Engine:
    """Return an engine that trains `model` on the devices of a SPEC.

    Raises:
        InputError: there is no such engine or device.
    """
    if engine != "torch":
        raise InputError(f"--engine {engine}: {nearest(engine, ['torch'])}")
    from flatout.engine.torch import TorchEngine

    device = parse_devices(devices).names[0]
    return TorchEngine(model, recipe, device=device, class_weights=class_weights, report=report, **options)
