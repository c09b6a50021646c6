"""Read device names, and choose the engine; nothing else in flatout knows what devices are called."""

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flatout.engine.base import Engine
from flatout.errors import InputError
from flatout.host import physical_cores, processor_name, total_memory, usable_cores
from flatout.recipe import Recipe
from flatout.settings import nearest

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from flatout.dist.world import World

# Ranks of one core at most: more is a slip of the pen that would bring the machine down.
MOST_RANKS_PER_CORE = 16
KINDS = ("cpu", "cuda", "mps", "tpu")
ENGINES = ("torch", "xla")
# The package that gives torch a device `tpu`, and the variable by which a user allows what was never tested.
TORCH_TPU, UNTESTED = "torch_tpu", "FLATOUT_ALLOW_UNTESTED"
# The kinds of devices that XLA drives; `auto` takes the first that is there.
XLA_KINDS = ("tpu", "cuda", "cpu")
MOST_SIMULATED = 64
_SPEC = re.compile(r"(?:(?P<count>\d+)x)?(?P<kind>[a-z]+)(?::(?P<indices>\d+(?:,\d+)*))?")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run on this host: a kind and one index each, such as cuda 0 and cuda 2; and what drives them."""

    kind: str
    indices: tuple[int, ...]
    engine: str = "torch"

    @property
    def names(self) -> tuple[str, ...]:
        """Device names as torch writes them."""
        return tuple(self.kind if self.kind in ("cpu", "mps") else f"{self.kind}:{i}" for i in self.indices)

    @property
    def first(self) -> "Devices":
        """The first of them alone."""
        return replace(self, indices=self.indices[:1])

    @property
    def ranks(self) -> "Devices":
        """The devices that processes of their own stand for: each one; XLA drives all from one process."""
        return self if self.engine == "torch" else Devices(kind="cpu", indices=(0,))

    def __str__(self) -> str:
        is_choice = len(set(self.names)) < len(self.names) and self.kind == "cuda"
        return f"cuda:{','.join(map(str, self.indices))}" if is_choice else spec_of(self.names)


def spec_of(names: Sequence[str]) -> str:
    """Return the SPEC of some devices, given by their torch names: `2xcpu`, `cuda:1`, `cuda:0,2`, `16xcuda`."""
    kind = names[0].partition(":")[0]
    if len(names) == 1:
        return names[0]
    is_choice = len(set(names)) == len(names) and list(names) != [f"{kind}:{i}" for i in range(len(names))]
    if is_choice and kind == "cuda":
        return f"{kind}:{','.join(name.partition(':')[2] for name in names)}"
    return f"{len(names)}x{kind}"


def available() -> dict[str, int]:
    """Return how many devices of each kind this machine has; the CPU counts its cores."""
    import torch

    found = {"cpu": usable_cores()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        found["mps"] = 1
    if os.environ.get(UNTESTED) and importlib.util.find_spec(TORCH_TPU):
        importlib.import_module(TORCH_TPU)
        found["tpu"] = torch.get_device_module("tpu").device_count()
    return found


def engine_for(spec: str, wanted: str) -> str:
    """Return the engine for a device SPEC: `torch` or `xla`; `auto` is XLA for TPUs and torch for everything else.

    Raises:
        InputError: there is no such engine.
    """
    if wanted == "auto":
        return "xla" if "tpu" in spec else "torch"
    if wanted not in ENGINES:
        raise InputError(f"--engine {wanted}: {nearest(wanted, ('auto', *ENGINES))}")
    return wanted


def parse_devices(spec: str, engine: str = "torch") -> Devices:
    """Turn a SPEC (`auto`, `cpu`, `2xcpu`, `cuda:0,2`) into devices of this machine; `auto` is all of the best kind.

    A CPU has as many ranks as are asked for, and a GPU may be named twice; that is slow, and good for trying things.
    For XLA a CPU stands in for as many devices as are asked for.

    Raises:
        InputError: the SPEC does not parse, or names more than there is; the message lists what there is.
    """
    match = _SPEC.fullmatch(spec)
    if not match or (match["count"] and match["indices"]) or (match["count"] and int(match["count"]) == 0):
        raise InputError(
            f"--devices {spec}: must be auto, cpu, cuda, mps, tpu, a number of them (2xcpu, 8xtpu) "
            "or a choice (cuda:0,2)"
        )
    kind = match["kind"]
    if kind not in ("auto", *KINDS):
        raise InputError(f"--devices {spec}: no kind of device is called {kind!r}; {nearest(kind, ('auto', *KINDS))}")
    if engine == "xla":
        return _xla_devices(spec, kind, match["count"], match["indices"])
    if kind == "tpu":
        _require_torch_tpu(spec)
    found = available()
    here = ", ".join(f"{k} ({n})" for k, n in found.items())
    if kind == "auto":
        if match["count"] or match["indices"]:
            raise InputError(f"--devices {spec}: auto chooses by itself; to choose, name the kind: {here}")
        kind = next((k for k in ("cuda", "mps") if k in found), "cpu")
        return Devices(kind=kind, indices=tuple(range(found[kind])) if kind == "cuda" else (0,))
    if match["indices"]:
        if kind == "cpu":
            raise InputError(f"--devices {spec}: processors have no numbers; ask for several ranks as 2xcpu")
        indices = tuple(map(int, match["indices"].split(",")))
    else:
        indices = tuple(range(int(match["count"] or 1)))
    most = found.get(kind, 0) * (MOST_RANKS_PER_CORE if kind == "cpu" else 1)
    if max(indices) >= most:
        raise InputError(f"--devices {spec}: this machine has not so many; it has: {here}")
    return Devices(kind=kind, indices=indices)


def _require_torch_tpu(spec: str) -> None:
    """Check that torch has a device `tpu`, and that the user knows what that means.

    Raises:
        InputError: it has none, or nobody said that it may be used.
    """
    if importlib.util.find_spec(TORCH_TPU) is None:
        raise InputError(
            f"--devices {spec}: torch has no device tpu here ({TORCH_TPU} is not installed): use --engine xla"
        )
    if not os.environ.get(UNTESTED):
        raise InputError(
            f"--devices {spec}: the torch engine on {TORCH_TPU} has never been tested; use --engine xla, which has, or "
            "--allow-untested to try"
        )


def _xla_devices(spec: str, kind: str, count: str | None, indices: str | None) -> Devices:
    from flatout.engine.xla.devices import has_tpu, kinds, require

    require()
    if kind == "auto":
        if count or indices:
            raise InputError(f"--devices {spec}: auto chooses by itself; to choose, name the kind")
        kind, number = kinds()[0]
        return Devices(kind=kind, indices=tuple(range(number)), engine="xla")
    if kind not in XLA_KINDS:
        raise InputError(f"--devices {spec}: XLA drives {', '.join(XLA_KINDS)} here; for {kind}: --engine torch")
    if indices:
        if kind == "cpu":
            raise InputError(f"--devices {spec}: processors have no numbers; simulate several devices as 8xcpu")
        return Devices(kind=kind, indices=tuple(map(int, indices.split(","))), engine="xla")
    number = int(count or 1)
    if kind == "tpu" and not has_tpu():
        raise InputError(
            f"--devices {spec}: this machine has no TPU; simulate as many devices to try the engine: --engine xla "
            f"--devices {number}xcpu, or see how fast the job would be: flatout plan"
        )
    if kind == "cpu" and number > MOST_SIMULATED:
        raise InputError(
            f"--devices {spec}: more than {MOST_SIMULATED} simulated devices would only wait for each other"
        )
    return Devices(kind=kind, indices=tuple(range(number)), engine="xla")


def own_device(spec: str, local_rank: int, local_size: int) -> str:
    """Return the torch name of the device that is this rank's, where a launcher has started several.

    Raises:
        InputError: the SPEC names another number of devices than the launcher has started ranks.
    """
    devices = parse_devices(spec)
    count = len(devices.indices)
    if spec == "auto":
        # More ranks than GPUs: they take turns, or all go by the CPU where there is none.
        return devices.names[local_rank % count]
    if count == local_size:
        return devices.names[local_rank]
    if count == 1 and devices.kind == "cpu":
        return "cpu"
    if count == 1 and ":" not in spec:
        return parse_devices(f"{local_size}x{devices.kind}").names[local_rank]
    raise InputError(f"--devices {spec}: names {count} devices, but the launcher started {local_size} ranks here")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to start: a rank for each device, each with so many threads, and why."""

    devices: Devices
    threads: int
    reason: str = ""


# Seconds that starting ranks takes, and of one sum over the ranks of a host: for each, and for each byte of gradients.
LAUNCH_SECONDS = 4.0
SUM_SECONDS, SUM_SECONDS_PER_BYTE = 5e-4, 2.5e-10
# How much of a core one more thread of a process is worth, where one more process is worth a whole one.
THREAD_WORTH = 0.6
LEAST_SHARE = 8


def plan(spec: str, recipe: Recipe, images: int, build: "Callable[[], nn.Module]", engine: str = "torch") -> Plan:
    """Decide which devices a SPEC means for a job; only `auto` leaves a choice.

    On CPUs that is between one process with a thread for each core, and a rank for each core. Two ranks are faster than
    two threads, since threads meet after every operation and ranks once or a few times in a step; but ranks must be
    started, must add up their gradients, and must have something to compute.

    Args:
        spec: the SPEC.
        recipe: the job.
        images: the number of training images.
        build: makes the model, for a look at how long it takes.
        engine: the engine's name.

    Raises:
        InputError: as `parse_devices`.
    """
    from flatout.engine.eager.device_setup import cpu_threads

    devices = parse_devices(spec, engine)
    if engine == "xla":
        return Plan(devices=devices, threads=physical_cores())
    names, threads = devices.names, cpu_threads(len(devices.names))
    if spec != "auto" or devices.kind == "mps" or (devices.kind == "cuda" and len(names) == 1):
        return Plan(devices=devices, threads=threads)
    batch = min(recipe.batch_size, images)
    if devices.kind == "cuda":
        count = max(1, min(len(names), batch // LEAST_SHARE))
        chosen = Devices(kind="cuda", indices=devices.indices[:count])
        return Plan(
            devices=chosen, threads=cpu_threads(count), reason=f"--devices auto: {chosen}, all that the batch fills"
        )
    count = physical_cores()
    if count == 1 or "OMP_NUM_THREADS" in os.environ or batch < LEAST_SHARE * count:
        return Plan(devices=devices, threads=threads)
    from flatout.engine.eager.probe import seconds_per_image

    model = build()
    seconds = seconds_per_image(model, recipe) * images * recipe.epochs
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    sums = recipe.epochs * -(-images // batch) * (SUM_SECONDS + SUM_SECONDS_PER_BYTE * gradients)
    by_threads = seconds / (1 + THREAD_WORTH * (count - 1))
    by_ranks = seconds / count + sums + LAUNCH_SECONDS
    if by_ranks < by_threads:
        ranks = Devices(kind="cpu", indices=tuple(range(count)))
        reason = (
            f"--devices auto: {ranks}, a rank of one thread for each core, which suits about {by_ranks:.0f} s of work"
        )
        return Plan(devices=ranks, threads=1, reason=reason)
    reason = f"--devices auto: cpu, one process with {threads} threads, for about {by_threads:.0f} s of work"
    return Plan(devices=devices, threads=threads, reason=reason)


def join(spec: str, engine: str = "torch") -> "World":
    """Meet the ranks that a launcher has started with this process; alone where none has.

    Raises:
        InputError: the devices or the launcher's variables are wrong, or the others do not come.
    """
    import torch

    from flatout.dist.env import launched
    from flatout.dist.world import World

    found = launched()
    if engine == "xla":
        if found is None:
            return World()
        if found.local_size > 1:
            raise InputError(
                f"--engine xla: one process drives all devices of a host, but the launcher started {found.local_size} "
                "here; start one for each host"
            )
        world = World(found, torch.device("cpu"))
        world.join(found, shares_gpu=False)
        return world
    if found is None:
        return World(device=torch.device(parse_devices(spec).names[0]))
    device = torch.device(own_device(spec, found.local_rank, found.local_size))
    world = World(found, device)
    names = [own_device(spec, i, found.local_size) for i in range(found.local_size)]
    world.join(found, shares_gpu=device.type == "cuda" and len(set(names)) < len(names))
    return world


def is_accelerated(spec: str, engine: str = "torch") -> bool:
    """Return whether a SPEC means more than the CPU."""
    return parse_devices(spec, engine).kind != "cpu"


def machine() -> dict[str, Any]:
    """Return what this machine is: processor, cores, memory, accelerators."""
    import platform

    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "cpu": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": total_memory(),
        "gpu": ", ".join(gpus) or None,
        "system": platform.platform(),
    }


def make_engine(
    model: "nn.Module",
    recipe: Recipe,
    *,
    engine: str,
    devices: str,
    world: "World",
    class_weights: "np.ndarray | None" = None,
    report: Callable[[str], None],
    **options: bool,
) -> Engine:
    """Return an engine that trains `model` on the devices of all ranks.

    Args:
        model: with the weights to start from.
        recipe: complete.
        engine: `torch` or `xla`.
        devices: the SPEC; of ranks that have joined, each knows its own device.
        world: the ranks.
        class_weights: float32 [classes]; None for none.
        report: takes sentences for the log.
        **options: for the torch engine.

    Raises:
        InputError: the engine cannot be had here, or cannot compile the model.
    """
    if engine == "xla":
        from flatout.engine.xla.devices import find, find_on_all_hosts

        chosen = parse_devices(devices, engine)
        kind, indices = chosen.kind, chosen.indices
        found = find_on_all_hosts(kind, indices, world) if world.is_joined else find(kind, indices)
        from flatout.engine.xla.engine import XlaEngine

        return XlaEngine(model, recipe, devices=found, world=world, class_weights=class_weights, report=report)
    from flatout.engine.eager.engine import TorchEngine

    return TorchEngine(model, recipe, world=world, class_weights=class_weights, report=report, **options)
