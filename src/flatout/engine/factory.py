"""From devices to engines: choose the processes, run a function on all ranks, and create an engine on each.

How fast a model trains is measured in about a second: the number of processes and generated recipes depend on it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.config import Recipe
from flatout.data.batches import Batch, Split
from flatout.distributed.environment import HANG_TIMEOUT, Hosts, Launched, launched
from flatout.distributed.world import World
from flatout.engine.base import Engine
from flatout.engine.devices import Devices, cpu_threads, parse_devices
from flatout.engine.torch.accelerator import BF16_WORTH, accelerator_of, multiply_adds, precision_of_gpu
from flatout.engine.torch.engine import TorchEngine
from flatout.models.build import build_model
from flatout.models.features import frozen_network
from flatout.models.heads import FeatureNetwork, find_head
from flatout.models.pretrained import load_pretrained
from flatout.utils.console import Console
from flatout.utils.errors import InputError
from flatout.utils.host import physical_cores, usable_cores

# Seconds for starting several processes, on CPUs and on GPUs, which need contexts and communicators.
LAUNCH_SECONDS, GPU_LAUNCH_SECONDS = 4.0, 10.0
# Assumed for a GPU: operations per second in training, three times a forward pass; and the least seconds of a step.
GPU_OPERATIONS, GPU_STEP_SECONDS = 30e12, 5e-4
MIN_SHARE = 8
XLA_OPTIONS = {"task", "class_weights", "report", "head"}
# On a CPU, the first step has two images, the next ones more, up to the batch or this step time.
FIRST_IMAGES, LONG_STEP = 2, 0.15
# Then this many steps are measured, or for this long.
STEPS, SECONDS = 20, 0.4
# Images per batch of feature measurements on a CPU, some for each thread. The rate is that of two windows of so many
# seconds; others follow while each is slower than the last: a thread that waited is fast at first on a busy machine.
FEATURE_BATCH, WINDOW_SECONDS, SLOWER, MAX_WINDOWS = 32, 0.4, 0.93, 8
# Seconds of an all-reduce on a host, and more per byte of gradients: in benchmarks/results/ranks.json
# (batch_size / images_per_second * communication_fraction) 0.4 ms for 0.08 MB, 1.5 ms for 2.6 MB and 6 ms for 34 MB.
SUM_SECONDS, SUM_SECONDS_PER_BYTE = 5e-4, 2.5e-10

Rate = Callable[[Recipe, int], float]  # of a recipe and the number of classes


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Measure images per second on the devices of a run: of training, and of the features before a head."""

    training: Rate
    features: Callable[[Recipe], float]


def choose_processes(
    spec: str,
    recipe: Recipe,
    images: int,
    build: Callable[[], nn.Module],
    engine: str = "torch",
    *,
    seconds: float | None = None,
) -> tuple[Devices, str]:
    """Resolve a SPEC, of which only `auto` leaves a choice; return devices, and a message for the log or "".

    On CPUs, `auto` is one process with a thread per core, or one process per core: threads synchronise after every
    operation, processes take time to start and have smaller shares of a batch. Which is faster depends on the model
    that `build` returns, so both are measured. `seconds` is the time budget, if any.
    """
    devices = parse_devices(spec, engine)
    count, is_cpu, reason = len(devices.indices), devices.kind == "cpu", ""
    if engine == "xla" and spec == "auto" and is_cpu and torch.cuda.device_count():
        reason = "--devices auto: --engine xla does not run on GPUs, so it uses the CPU; for GPUs: --engine torch"
    if engine == "torch" and is_cpu and count > usable_cores():
        reason = f"--devices {spec}: {count} processes on {usable_cores()} cores are slower than one per core"
    if engine == "xla" or spec != "auto":
        return devices, reason
    batch = min(recipe.batch_size, images)
    most, work = _most_ranks(devices, batch), images * recipe.epochs
    if devices.kind == "cuda" and count > 1:
        why = f", which the batch of {batch} fills" if most < count else ""
        if seconds is None:
            operations = 6 * multiply_adds(build(), recipe.image_sides, recipe.channels) * work
            needed = max(operations / GPU_OPERATIONS, work / recipe.batch_size * GPU_STEP_SECONDS)
            if needed < GPU_LAUNCH_SECONDS:
                most, why = 1, f": starting several would take longer than the training (about {needed:.0f} s)"
        chosen = Devices(kind="cuda", indices=devices.indices[:most])
        return chosen, f"--devices auto: using {chosen}{why}"
    # OpenVINO uses all cores for features. On two cores, 5 minutes from a fitted head have 2 minutes of steps on the
    # last layers: two processes take them 7 % faster, and lose 15 s with their start and end. The recipe that such a
    # run writes repeats it, although it has no time budget.
    is_fine_tuning = recipe.linear_probe and bool(recipe.freeze)
    if not is_cpu or not work or is_fine_tuning or most == 1:
        return devices, ""
    return _threads_or_processes(build(), recipe, work, seconds)


def _threads_or_processes(model: nn.Module, recipe: Recipe, work: int, seconds: float | None) -> tuple[Devices, str]:
    """Choose for `work` images on a CPU, or for `seconds`."""
    cores, about = physical_cores(), ""
    by_threads = by_processes = seconds_per_image(model, recipe) * work
    # A job shorter than the start of processes needs no second measurement.
    if seconds is not None or by_threads >= LAUNCH_SECONDS:
        by_processes = seconds_per_image(model, recipe, ranks=cores) / cores * work
    if seconds is None:
        by_processes += LAUNCH_SECONDS
        needed = min(by_threads, by_processes)
        about = f" (about {needed:.0f} s)" if needed < 100 else f" (about {needed / 60:.0f} min)"
    else:
        # The start of processes takes its share of the budget.
        by_processes /= max(1 - LAUNCH_SECONDS / seconds, 1e-9)
    count, using = 1, f"1 process with {cpu_threads()} threads"
    if by_processes < by_threads:
        count, using = cores, f"{cores} processes, one per core"
    return Devices(kind="cpu", indices=tuple(range(count))), f"--devices auto: using {using}{about}"


def kept_devices(before: str, engine: str) -> tuple[str, str]:
    """Return the SPEC for a run that is resumed without one, and a message for the log.

    It is that of the run, since another number of processes sums in another order; `auto` if this host lacks it.
    """
    try:
        devices = parse_devices(before, engine)
        if engine == "torch" and devices.kind == "cpu" and len(devices.indices) > usable_cores():
            raise InputError(before)
    except InputError:
        return "auto", f"--devices auto: the resumed run used {before}, which this machine does not have"
    return before, f"--devices auto: {before}, as in the run that is resumed"


def _most_ranks(devices: Devices, batch: int) -> int:
    """The maximum number of processes for `auto`."""
    if devices.kind == "cuda":
        return max(1, min(len(devices.indices), batch // MIN_SHARE))
    cores = physical_cores()
    is_split = devices.kind == "cpu" and "OMP_NUM_THREADS" not in os.environ and batch >= MIN_SHARE * cores
    return cores if is_split else 1


def speeds_on(spec: str, engine: str) -> Speeds | None:
    """None if the ranks are already started, which would distort the speeds, and for XLA, which compiles too long."""
    devices = parse_devices(spec, engine)
    if launched() is not None or engine == "xla":
        return None
    # The number of processes; the first model determines it for `auto`.
    chosen = [] if spec == "auto" else [len(devices.indices)]

    def training(recipe: Recipe, classes: int) -> float:
        most = _most_ranks(devices, recipe.batch_size)
        model = build_model(recipe, classes)
        choices = chosen or ([1, most] if devices.kind == "cpu" and most > 1 else [most])
        rates = {n: n / seconds_per_image(model, recipe, devices.names[0], ranks=n) for n in choices}
        chosen[:] = [max(rates, key=rates.__getitem__)]
        return rates[chosen[0]]

    def features(recipe: Recipe) -> float:
        # The ranks of one CPU share its cores.
        several = 1 if devices.kind == "cpu" else _most_ranks(devices, recipe.batch_size)
        return several * features_per_second(recipe, devices.names[0])

    return Speeds(training=training, features=features)


def seconds_per_image(model: nn.Module, recipe: Recipe, device: str = "cpu", *, ranks: int = 1) -> float:
    """Return the training time per image of one of several ranks, of which the all-reduce is estimated.

    The ranks share the batch and the cores of the host. The number format is that of a run. The model is trained for
    some steps on random images, at a negligible learning rate.
    """
    accelerator = accelerator_of(torch.device(device))
    formats = [accelerator.choose_precision(recipe.precision)]
    if recipe.precision == "auto" and (found := precision_of_gpu(accelerator.precisions(), model, recipe)):
        formats = [found[0]]
    elif recipe.precision == "auto" and "bf16" in accelerator.precisions():
        formats.append("bf16")
    middle, share = [0.5] * recipe.channels, max(1, recipe.batch_size // ranks)
    colours = {"data.mean": recipe.data.mean or middle, "data.std": recipe.data.std or middle}
    any_labels = {"task": "single-label", "loss": "cross-entropy"}
    recipe = recipe.override({"shard": "none", "batch_size": share, **colours, **any_labels})
    world = World(Launched(local_size=ranks), accelerator.device)
    times = [_measure(model, recipe.override({"precision": precision}), world) for precision in formats]
    seconds = times[-1] if times[0] >= BF16_WORTH * times[-1] else times[0]
    if ranks > 1:
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        seconds += (SUM_SECONDS + SUM_SECONDS_PER_BYTE * gradients) / share
    return seconds


def _measure(model: nn.Module, recipe: Recipe, world: World) -> float:
    with contextlib.closing(TorchEngine(model, recipe, world=world)) as engine:
        batch_size = recipe.batch_size
        shape = (batch_size, *recipe.stored_sides, recipe.channels)
        images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        samples = Split(images=images, rows=np.arange(batch_size), labels=np.zeros(batch_size, np.int64))
        split = engine.place(samples)
        split.begin_epoch(0)

        def step_seconds(images: int, count: int) -> float:
            batch = Batch(samples=np.arange(images), weights=np.ones(images, np.float32), count=images)
            began = time.perf_counter()
            for inputs in split.feed(repeat(batch, count)):
                split.train_step(inputs, 1e-6, 0)
            engine.counts()  # waits for an accelerator
            return (time.perf_counter() - began) / count

        images = min(batch_size, FIRST_IMAGES) if engine.accelerator.is_host else batch_size
        # The first step of a shape prepares the others.
        while step_seconds(images, 1) < LONG_STEP and images < batch_size:
            images = min(batch_size, 8 * images)
            engine.forget_shapes()
        seconds = step_seconds(images, 1)
        if (count := min(STEPS, round(SECONDS / seconds))) > 1:
            seconds = step_seconds(images, count)
        return seconds / images


def features_per_second(recipe: Recipe, device: str) -> float:
    """Return the images per second before the head of a network with published weights; OpenVINO keeps it."""
    accelerator = accelerator_of(torch.device(device))
    model = build_model(recipe, 2)
    load_pretrained(model, recipe, lambda sentence: None)
    head = find_head(model, recipe.image_sides, recipe.channels)
    network: nn.Module = model.eval() if head is None else FeatureNetwork(model, head)
    batch = FEATURE_BATCH if accelerator.is_host else recipe.batch_size
    images = torch.rand(batch, recipe.channels, *recipe.image_sides, device=accelerator.device)
    compute = network.to(accelerator.device)
    if accelerator.is_host:
        compute = frozen_network(network, images, cpu_threads())
    rates: list[float] = []
    with torch.no_grad():
        compute(images)
        while len(rates) < 2 or (rates[-1] < SLOWER * rates[-2] and len(rates) < MAX_WINDOWS):
            count, began = 0, time.perf_counter()
            while (seconds := time.perf_counter() - began) < WINDOW_SECONDS:
                float(compute(images).sum())  # waits for an accelerator
                count += 1
            rates.append(count * batch / seconds)
    return sum(rates[-2:]) / 2


def run_on_devices(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    spec: str,
    engine: str,
    console: Console,
    hosts: Hosts | None = None,
    restarts: int | None = None,
    hang_timeout: float = HANG_TIMEOUT,
) -> Any:
    """Call function(console, world, *args) on every rank, with a joined world; return the first rank's result.

    Args:
        function, args: they may be defined in `__main__`, such as a notebook.
        hosts: the hosts of the run; each calls this. Default: this host only.
        restarts: how often the ranks are restarted after losing one. Default: as often as hosts may be lost.
        hang_timeout: seconds without progress after which one of several ranks is ended.

    Raises:
        InputError, TrainingFailed, Stopped, KeyboardInterrupt: as the function raised them.
        TrainingFailed: a rank died, hung, or raised something else, which the message tells; all others were ended.
    """
    call, hosts = (spec, engine, hang_timeout, function, args), hosts or Hosts()
    restarts = hosts.most - hosts.least if restarts is None else restarts
    names = parse_devices(spec, engine).ranks.names
    if launched() is not None or (len(names) == hosts.most == 1 and restarts == 0):
        return _join_and_call(console, *call)
    # On macOS, importing torch's agent prints a warning.
    from flatout.distributed.launch import launch

    threads = cpu_threads(len(names))
    return launch(_join_and_call, call, names=names, threads=threads, console=console, hosts=hosts, restarts=restarts)


def _join_and_call(
    console: Console, spec: str, engine: str, hang_timeout: float, function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    world = join(spec, engine, hang_timeout)
    result = function(console, world, *args)
    # All hosts end together, so that none mistakes another's end for a failure.
    world.barrier()
    world.leave()
    return result


def join(spec: str, engine: str = "torch", hang_timeout: float = HANG_TIMEOUT) -> World:
    """Return the world of the ranks that a launcher has started, or of this process alone."""
    found = launched()
    if found is None or found.size == 1:
        if engine == "xla":
            return World()
        names = parse_devices(spec).names if found is None else local_devices(spec, found.local_size)
        return World(device=torch.device(names[0]))
    if engine == "xla" and found.local_size > 1:
        raise InputError(
            f"--engine xla: one process drives all devices of a host, but the launcher started {found.local_size} "
            "here; start one for each host"
        )
    names = ["cpu"] if engine == "xla" else local_devices(spec, found.local_size)
    world = World(found, torch.device(names[found.local_rank]))
    shares_gpu = world.device.type == "cuda" and len(set(names)) < len(names)
    world.join(found, shares_gpu=shares_gpu, hang_timeout=hang_timeout)
    return world


def local_devices(spec: str, local_size: int) -> list[str]:
    """Return the torch name of each rank's device if a launcher has started `local_size` ranks here."""
    devices = parse_devices(spec)
    if spec != "auto" and len(devices.indices) == 1 and ":" not in spec:
        devices = parse_devices(f"{local_size}x{devices.kind}")
    # With `auto` and more ranks than GPUs, several share one; without GPUs, all use the CPU.
    if spec != "auto" and len(devices.indices) != local_size:
        raise InputError(
            f"--devices {spec}: names {len(devices.indices)} devices, but the launcher started {local_size} ranks here"
        )
    return list(islice(cycle(devices.names), local_size))


def precisions(engine: str, world: World) -> list[str]:
    """Return the number formats of a rank's device, the default first; the XLA engine chooses by itself."""
    return accelerator_of(world.device).precisions() if engine == "torch" else []


def make_engine(model: nn.Module, recipe: Recipe, *, engine: str, devices: str, world: World, **options: Any) -> Engine:
    """Return an engine that trains `model`, with rank 0's initial weights, on the devices of all ranks.

    Args:
        devices: the SPEC; a rank that has joined a world uses that world's device.
        **options: those of `TorchEngine`; the XLA engine takes `XLA_OPTIONS` of them, and ignores the others.
    """
    if engine == "torch":
        return TorchEngine(model, recipe, world=world, **options)
    chosen = parse_devices(devices, engine)
    from flatout.engine.xla.engine import XlaEngine
    from flatout.engine.xla.mesh import find

    found = find(chosen.kind, chosen.indices, world)
    known = {name: options[name] for name in XLA_OPTIONS & options.keys()}
    return XlaEngine(model, recipe, devices=found, world=world, **known)
