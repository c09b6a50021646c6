"""Trainings that run with the mock in processes of their own; each returns what the tests compare.

A group of scenarios shares a process, since importing torch takes seconds.
"""

import contextlib
import io
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from flatout.cli.main import main
from flatout.config import Recipe
from flatout.config.jobs import builtin_jobs
from flatout.data.batches import Split, epoch_batches
from flatout.distributed.environment import launched
from flatout.distributed.shared_memory import Bucket
from flatout.distributed.world import World
from flatout.engine import optim
from flatout.engine.torch import batches
from flatout.engine.torch.accelerator import CUDA
from flatout.engine.torch.batches import Step
from flatout.engine.torch.dataset import TorchDataset
from flatout.engine.torch.engine import TorchEngine
from flatout.models.build import build_model
from flatout.train.loop import TrainingLoop
from flatout.train.request import Progress
from flatout.utils.errors import RankLost
from tests.cuda_mock import device, plain
from tests.cuda_mock.kernels import Kernels
from tests.engine.recorded import (
    BATCH,
    CASES,
    CLASSES,
    COUNT,
    EXACT,
    Waits,
    job_net,
    job_recipe,
    net_of,
    net_recipe,
    norm_net,
    plain_net,
)
from tests.engine.test_against_plain_loop import SILENT, make_samples
from tests.engine.test_prefix import frozen_net
from tests.system.conftest import leave_out_pictures

GPU = torch.device("cuda:0")
# Recorded steps whose mean is compared with budgets.
STEPS = 3
TIMM = [
    "test_efficientnet",
    "test_vit",
    "test_convnext",
    "test_mambaout",
    "test_nfnet",
    "test_byobnet",
    "resnet18",
    "mobilenetv4_conv_small",
    "hgnetv2_b0",
    "regnety_002",
]


# --- what a step does -------------------------------------------------------------------------------------------------


def measure(net: nn.Module, recipe: Recipe, *, world: World | None = None, classes: int = CLASSES) -> dict[str, Any]:
    """Return the engine's notes, what it did up to the first recorded step, and what each step after it does."""
    notes: list[str] = []
    world = world or World(device=GPU)
    device.reset_counters()
    engine = TorchEngine(net, recipe, world=world, report=notes.append)
    try:
        count = recipe.batch_size * 4
        images = np.zeros((count, *recipe.stored_sides, recipe.channels), np.uint8)
        split = engine.place(Split(images=images, rows=np.arange(count), labels=np.arange(count) % classes))
        split.begin_epoch(0)
        epochs = itertools.cycle(epoch_batches(recipe, split.samples, 0))
        inputs = iter(enumerate(split.feed(itertools.islice(epochs, batches.EAGER_STEPS + 1 + STEPS))))
        _train(split, itertools.islice(inputs, batches.EAGER_STEPS + 1))
        start = device.counters()
        device.reset_counters()
        _train(split, inputs)
        steps = device.counters()
        held = {name: steps.pop(name) for name in ("pinned bytes", "device bytes")}
        return {"notes": notes, "start": start, "step": {k: v / STEPS for k, v in steps.items()}, "held": held}
    finally:
        engine.close()


def _train(split: TorchDataset, inputs: Iterator[tuple[int, Any]]) -> None:
    for number, batch in inputs:
        split.train_step(batch, 0.1, number)


def jobs() -> dict[str, Any]:
    recipes = {name: job_recipe(name) for name in builtin_jobs()}
    classes = {name: 2 if recipe.loss == "binary-cross-entropy" else CLASSES for name, recipe in recipes.items()}
    return {name: measure(job_net(recipe), recipe, classes=classes[name]) for name, recipe in recipes.items()}


def large() -> dict[str, Any]:
    """Return what steps do of networks that are trained on GPUs, in bfloat16; their size does not depend on images."""
    shared = {"precision": "bf16", "optimizer.name": "momentum", "augment.flip": True, "channels": 3, **_colours(3)}
    recipes = {
        "resnet50": net_recipe(model="timm:resnet50", image_size=64, ema=0.99, **shared),
        "fast-cnn-64": net_recipe(model="fast-cnn-64", image_size=32, **shared),
    }
    return {name: measure(build_model(recipe, CLASSES), recipe) for name, recipe in recipes.items()}


def compiled() -> dict[str, Any]:
    """Return what the step of a network does, and what it does once torch compiled it."""
    recipe = net_recipe(model="fast-cnn-16", image_size=32, channels=3, precision="bf16", **_colours(3))
    recipes = {"eager": recipe, "compiled": recipe.override({"tune": "always"})}
    return {way: measure(_one_block(recipe), recipe) for way, recipe in recipes.items()}


def _one_block(recipe: Recipe) -> nn.Module:
    """Return a network of three equal blocks without two of them, each of which compiles for many seconds."""
    net: Any = build_model(recipe, CLASSES)
    net.features, net.classifier = net.features[:1], nn.Linear(16, CLASSES, bias=False)
    return net


def cases() -> dict[str, Any]:
    return {name: measure(net_of(name), net_recipe(**changes)) for name, changes in CASES.items()}


def timm_models() -> dict[str, Any]:
    recipes = {name: net_recipe(model=f"timm:{name}", image_size=64, channels=3, **_colours(3)) for name in TIMM}
    return {name: measure(build_model(recipe, CLASSES), recipe) for name, recipe in recipes.items()}


def _colours(channels: int) -> dict[str, Any]:
    return {"data.mean": [0.4] * channels, "data.std": [0.3] * channels}


# --- planted defects --------------------------------------------------------------------------------------------------


class Planted(nn.Module):
    """Does something in its forward pass that a recorded step must not."""

    def __init__(self, defect: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self._defect = defect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self._defect(x)
        return x if result is None else result


def _reads_the_loss(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 if x.mean().item() >= 0 else 2.0)


def _copies_pageable_memory(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(1).to(x.device, non_blocking=True)


def _copies_pageable_memory_itself(x: torch.Tensor) -> None:
    # As a library does; torch refuses to record its own copies of such memory.
    device.copy(torch.empty(1, device=x.device), torch.ones(1))


def _calls_an_unknown_function(x: torch.Tensor) -> None:
    device.preloaded().cudaStreamAddCallback()


def _allocates(x: torch.Tensor) -> None:
    device.allocate(1 << 10)


class _WaitsOutside:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.Stream())

    def __call__(self, x: torch.Tensor) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def _forks(x: torch.Tensor) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return x + 1


def _copies_every_step(train_step: Any) -> Callable[..., None]:
    def copying(self: TorchDataset, inputs: Any, learning_rate: float, seed: int) -> None:
        torch.from_numpy(inputs.batch.weights).to(GPU)
        train_step(self, inputs, learning_rate, seed)

    return copying


def planted() -> dict[str, Any]:
    """Return what `measure` finds for each defect of the forward pass, and for a copy in every step."""
    torch.cuda.init()
    defects = {
        "none": lambda x: None,
        "item": _reads_the_loss,
        "pageable copy": _copies_pageable_memory,
        "pageable copy of a library": _copies_pageable_memory_itself,
        "unknown function": _calls_an_unknown_function,
        "allocation": _allocates,
        "event": _WaitsOutside(),
        "fork": _forks,
    }
    found = {name: measure(nn.Sequential(Planted(d), norm_net()), net_recipe()) for name, d in defects.items()}
    with mock.patch.object(TorchDataset, "train_step", _copies_every_step(TorchDataset.train_step)):
        found["copy per step"] = measure(norm_net(), net_recipe())
    return found


# --- evaluation -------------------------------------------------------------------------------------------------------


def recorded_evaluations() -> dict[str, Any]:
    changes: dict[str, dict[str, Any]] = {"plain": {}, "averaged": {"ema": 0.9}, "streamed": CASES["streamed images"]}
    return {name: recorded_evaluation(net_recipe(**EXACT, **changed)) for name, changed in changes.items()}


def recorded_evaluation(recipe: Recipe) -> dict[str, Any]:
    """Return what the third evaluation during training does, and its metrics beside those of the CPU."""
    samples = make_samples(3 * BATCH + 3, classes=CLASSES)
    found: dict[str, Any] = {"batches": 4}
    for name, where, kernels in (("gpu", GPU, Kernels()), ("cpu", torch.device("cpu"), contextlib.nullcontext())):
        with kernels:
            engine = TorchEngine(norm_net(), recipe, world=World(device=where))
            split = engine.place(samples)
            for _ in range(2):
                split.evaluate()
            if name == "gpu":
                device.reset_counters()
            evaluated = split.evaluate()
            if name == "gpu":
                found["counters"] = device.counters()
            found[name] = {"loss": evaluated.loss, **evaluated.metrics}
            engine.close()
    return found


# --- numbers ----------------------------------------------------------------------------------------------------------


def _state(net: nn.Module, recipe: Recipe, *, count: int = COUNT, world: World | None = None, **options: Any) -> Any:
    """Train with kernels; return the state on the CPU and the engine's notes."""
    notes: list[str] = []
    world = world or World(device=GPU)
    with Kernels():
        engine = TorchEngine(net, recipe, world=world, report=notes.append, **options)
        try:
            samples = make_samples(count, recipe.image_sides[0], recipe.channels, CLASSES)
            if recipe.loss == "binary-cross-entropy":
                samples.labels[:] %= 2
            split = engine.place(samples)
            TrainingLoop(engine, world, recipe, {"train": split}, Progress(), SILENT).run()
            return engine.state(), notes
        finally:
            engine.close()


def _eager() -> Any:
    return mock.patch.object(batches, "EAGER_STEPS", 1 << 30)


def _different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    assert all(value.isfinite().all() for value in first.values())
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def _compare(make_net: Callable[[], nn.Module], recipe: Recipe, **options: Any) -> dict[str, Any]:
    """Train with recorded and with eager steps; return the notes, and what differs by a bit."""
    state, notes = _state(make_net(), recipe, **options)
    with _eager():
        expected, _ = _state(make_net(), recipe, **options)
    return {"notes": notes, "different": _different(state, expected)}


def numbers() -> dict[str, Any]:
    """Return which tensors differ between recorded steps and a plain loop on the CPU."""
    found = {}
    for name, case in plain.CASES.items():
        state, notes = _state(case.make_net(), case.recipe, count=case.count)
        expected = plain.loop(case)
        found[name] = {"notes": notes, "different": _different({k: state[k] for k in expected}, expected)}
    return found


def recorded_numbers() -> dict[str, Any]:
    """Return which tensors differ between recorded and eager steps."""
    found = {name: _compare(lambda n=name: net_of(n), net_recipe(**EXACT | CASES[name])) for name in CASES}
    # The largest network is frozen as `frozen_net` is.
    for job in sorted({*builtin_jobs()} - {"oct-vgg16"}):
        recipe = job_recipe(job, **EXACT)
        found[job] = _compare(lambda recipe=recipe: job_net(recipe), recipe)
    found["a cached prefix"] = _compare(frozen_net, net_recipe(**EXACT))
    return found | {"dropout": _compare(plain_net, net_recipe(**EXACT)), "recorded anew": recorded_anew()}


def recorded_anew() -> dict[str, Any]:
    """Return the notes, and what differs from eager steps, of an engine with another split and a loaded state."""
    states, notes = [], list[str]()
    for how in (contextlib.nullcontext(), _eager()):
        with Kernels(), how:
            world, recipe = World(device=GPU), net_recipe(**EXACT, **CASES["momentum"])
            engine = TorchEngine(norm_net(), recipe, world=world, report=notes.append)
            for count in (COUNT, COUNT + BATCH):
                split = engine.place(make_samples(count, classes=CLASSES))
                TrainingLoop(engine, world, recipe, {"train": split}, Progress(), SILENT).run()
                engine.load_state(engine.state())
                TrainingLoop(engine, world, recipe, {"train": split}, Progress(), SILENT).run()
            states.append(engine.state())
            engine.close()
    return {"notes": notes, "different": _different(*states)}


def planted_numbers() -> dict[str, Any]:
    """Return which tensors differ where a Python number of the batch or the learning rate is recorded."""
    build, found = optim.build, {}
    constants = mock.patch.object(Step, "constants", property(lambda inputs: (len(inputs.batch.samples),)))
    rate = mock.patch.object(
        optim, "build", lambda *args, capturable, **options: build(*args, capturable=False, **options)
    )
    for name, planted in {"constants": constants, "rate": rate}.items():
        with planted:
            found[name] = _compare(norm_net, net_recipe(**EXACT))["different"]
    return found


def failed_capture() -> dict[str, Any]:
    """Return what engines do whose capture fails, what differs from eager steps, and whether later ones train."""

    def lose(self: CUDA, step: Callable[[], None]) -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be")
        except RuntimeError as error:
            raise RankLost("rank 0 lost touch with the others") from error

    recipe = net_recipe(**EXACT)
    found = {"item": _compare(lambda: nn.Sequential(Waits(), plain_net()), recipe)}
    with mock.patch.object(CUDA, "capture", lose):
        found["collective"] = _compare(plain_net, recipe)
    with mock.patch.object(CUDA, "has_room_for_graph", lambda self: False):
        found["memory"] = _compare(plain_net, recipe)
    return found | {"later": _compare(plain_net, recipe)}


def streamed() -> dict[str, Any]:
    """Return the difference between streamed and placed images, and pinned memory over a long epoch of streaming."""
    recipe = net_recipe(**EXACT)
    streaming = recipe.override({"data.placement": "disk"})
    with device.slow():
        different = _different(_state(norm_net(), streaming)[0], _state(norm_net(), recipe)[0])
        pinned = []
        engine = TorchEngine(norm_net(), streaming, world=World(device=GPU))
        samples = make_samples(48 * BATCH, classes=CLASSES)
        split = engine.place(samples)
        split.begin_epoch(0)
        for number, inputs in enumerate(split.feed(epoch_batches(streaming, samples, 0))):
            split.train_step(inputs, 0.1, number)
            pinned.append(device.counters()["pinned bytes"])
        engine.close()
    batch = math.prod((BATCH, *streaming.stored_sides, streaming.channels))
    return {"different": different, "batch bytes": batch, "pinned bytes": pinned}


# --- ranks ------------------------------------------------------------------------------------------------------------


def ranks() -> dict[str, Any]:
    """Return what a step of two ranks does, and which tensors of recorded steps differ from eager ones."""
    launch = launched()
    assert launch is not None
    world = World(launch, torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.cuda.set_device(world.device)
    world.join(launch)
    recipe = net_recipe(**EXACT)
    numbers = {
        "global": _compare(norm_net, recipe, world=world),
        "per device": _compare(norm_net, recipe.override({"norm": "per-device"}), world=world),
        "dropout, adam": _compare(plain_net, recipe.override({"optimizer.name": "adam"}), world=world),
    }
    found: dict[str, Any] = {"numbers": numbers}
    for norm in ("global", "per-device"):
        found[norm] = measure(norm_net(), net_recipe(norm=norm), world=world)
    with mock.patch.multiple(Bucket, start=lambda bucket: None, finish=lambda bucket: bucket.input):
        found["all-reduce left out"] = measure(norm_net(), net_recipe(), world=world)
    recipe = net_recipe(model="timm:resnet18", image_size=64, channels=3, precision="bf16", **_colours(3))
    found["resnet"] = measure(build_model(recipe, CLASSES), recipe, world=world)
    found["sharded"] = measure(norm_net(), net_recipe(shard="full"), world=world)
    # No process ends before the others.
    world.barrier()
    return found


# --- a run ------------------------------------------------------------------------------------------------------------


def command() -> dict[str, Any]:
    """Return what `flatout train` prints, and whether it has imported torch's compiler."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        leave_out_pictures(patch)
        with contextlib.redirect_stdout(printed):
            main(["train", "digits", "--epochs", "1", "--devices", "cuda", "--out", f"{folder}/run"])
    return {"printed": printed.getvalue(), "compiler": "torch._dynamo" in sys.modules}


# --- the process ------------------------------------------------------------------------------------------------------


def several(names: list[str]) -> dict[str, Any]:
    return {name: globals()[name]() for name in names}


if __name__ == "__main__":
    device.answer(globals())
