"""Measure in about a second how fast a model trains; `factory.choose_processes` and generated recipes decide by it.

The steps are those of the engine, on random images. The ranks of a CPU are forked, which takes no time, and compute at
the same time, since they compete for the host and wait for each other.
"""

import contextlib
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from flatout.config import Recipe
from flatout.data.batches import Batch, Split
from flatout.distributed.environment import Launched
from flatout.distributed.shared_memory import SharedMemory
from flatout.distributed.world import World
from flatout.engine.torch.accelerator import (
    BF16_WORTH,
    accelerator_of,
    choose_precision,
    cpu_threads,
    precision_of_gpu,
)
from flatout.engine.torch.engine import TorchEngine
from flatout.utils.errors import RankLost, TrainingFailed

Value = TypeVar("Value")

# On a CPU, the first step has two images per rank, the next ones more, up to the batch or this step time.
FIRST_IMAGES, LONG_STEP = 2, 0.15
# Then this many steps are measured, or for this long.
STEPS, SECONDS = 20, 0.4
# Images per batch of feature measurements on a CPU: some for each thread.
FEATURE_BATCH = 32
# Seconds of an all-reduce on a host: constant, and per byte of gradients.
SUM_SECONDS, SUM_SECONDS_PER_BYTE = 5e-4, 2.5e-10


def seconds_per_image(model: nn.Module, recipe: Recipe, device: str = "cpu", *, ranks: int = 1) -> float:
    """Return a rank's training time per image while the other ranks train as well.

    With `precision = "auto"`, it is measured in the number format that a run chooses.

    Args:
        model: trained for some steps, at a negligible learning rate.
        recipe: the recipe. Its batch and the cores of the host are shared by the ranks.
        device: its torch name. One of several accelerators is measured: they do not slow each other down.
        ranks: the number of ranks.

    Raises:
        InputError: the device lacks the recipe's precision.
    """
    ranks = min(ranks, recipe.batch_size)  # more ranks than images are refused where the run begins
    accelerator = accelerator_of(torch.device(device))
    formats = [choose_precision(accelerator, recipe.precision)]
    if recipe.precision == "auto" and (found := precision_of_gpu(accelerator.precisions(), model, recipe)):
        formats = [found[0]]
    elif recipe.precision == "auto" and "bf16" in accelerator.precisions():
        formats.append("bf16")
    middle = [0.5] * recipe.channels
    recipe = recipe.override(
        {
            # The labels do not matter.
            "task": "single-label",
            "loss": "cross-entropy",
            "shard": "none",
            "data.mean": recipe.data.mean or middle,
            "data.std": recipe.data.std or middle,
        }
    )
    times = []
    for precision in formats:
        one = recipe.override({"precision": precision})
        if _can_fork(ranks):
            times.append(_on_ranks(model, one, ranks))
        else:
            world = World(device=accelerator.device, local_size=ranks)
            own = max(1, one.batch_size // ranks)
            seconds = _measure(model, one.override({"batch_size": own}), world)
            times.append(seconds + (ranks > 1) * _sum_seconds(model) / own)
    return times[-1] if times[0] >= BF16_WORTH * times[-1] else times[0]


def features_per_second(recipe: Recipe, device: str) -> float:
    """Return the images per second before the head of a network, with its published weights, on a device.

    The prepared ONNX Runtime network is kept for the run.

    Raises:
        InputError: the network or its weights are unavailable.
    """
    from flatout.models.build import build_model
    from flatout.models.features import frozen_network
    from flatout.models.heads import FeatureNetwork, find_head
    from flatout.models.pretrained import load_pretrained

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
    with torch.no_grad():
        compute(images)
        count, began = 0, time.perf_counter()
        while count < 2 or time.perf_counter() - began < SECONDS:
            float(compute(images).sum())  # waits for an accelerator
            count += 1
    return count * batch / (time.perf_counter() - began)


def _sum_seconds(model: nn.Module) -> float:
    """Estimate the all-reduce time of a model's gradients, if it is not measured."""
    return SUM_SECONDS + SUM_SECONDS_PER_BYTE * sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _can_fork(ranks: int) -> bool:
    """Whether this process can be forked into ranks of one thread each, like torch's data loaders.

    The threads of JAX hold locks that a forked process would wait for.
    """
    is_plain = not torch.accelerator.is_available() and "jax" not in sys.modules
    return ranks > 1 and sys.platform == "linux" and cpu_threads(ranks) == 1 and is_plain


class ForkedWorld(World):
    """The world of a forked rank, which exchanges objects through its parent, and tensors like other ranks."""

    def __init__(self, rank: int, size: int, parent: Connection) -> None:
        super().__init__(Launched(rank=rank, size=size, local_rank=rank, local_size=size, address="", port=0))
        self._parent = parent
        self.is_joined, self.backend = True, "memory"
        self._memory = SharedMemory(self)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `World`. All ranks have the parent's tensors."""

    def broadcast_object(self, value: Value) -> Value:
        """See `World`."""
        return self.all_gather_object(value)[0]

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """See `World`. There is no process group: the ranks add up tables that hold only their own rows."""
        table = torch.zeros(self.size, *rows.shape, dtype=rows.dtype)
        table[self.rank] = rows
        return self.all_reduce(table)

    def all_gather_object(self, value: Value) -> list[Value]:
        """See `World`."""
        self._parent.send(value)
        return self._parent.recv()


def _on_ranks(model: nn.Module, recipe: Recipe, ranks: int) -> float:
    """Return the seconds per image of each of some ranks of this host's CPU.

    Raises:
        TrainingFailed: the system has ended a rank, such as for lack of memory.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(ranks)]
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        # Python warns of locks that other threads of this process may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        for rank in range(ranks):
            process = context.Process(target=_rank, args=(rank, pipes, model, recipe), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        for _, there in pipes:
            there.close()
        while True:
            try:
                values = [here.recv() for here, _ in pipes]
            except EOFError:
                raise TrainingFailed("the measurement of training speed failed: is there enough memory?") from None
            failures = [value for value in values if isinstance(value, Exception)]
            if failures:
                # A failure of one rank ends the others.
                raise min(failures, key=lambda failure: isinstance(failure, RankLost))
            if isinstance(values[0], _Result):
                return max(result.seconds for result in values)
            for here, _ in pipes:
                here.send(values)


@dataclass(frozen=True)
class _Result:
    """The measurements of a rank."""

    seconds: float


def _rank(rank: int, pipes: list[tuple[Connection, Connection]], model: nn.Module, recipe: Recipe) -> None:
    """Measure in a forked process, which ends with its parent."""
    # Linux shares cores between sessions; the ranks of a run have sessions of their own, too.
    os.setsid()
    for number, (here, there) in enumerate(pipes):
        here.close()
        if number != rank:
            there.close()
    parent = pipes[rank][1]
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            answer = _Result(_measure(model, recipe, ForkedWorld(rank, len(pipes), parent)))
        except Exception as error:
            answer = error
        parent.send(answer)


def _measure(model: nn.Module, recipe: Recipe, world: World) -> float:
    """Return the seconds per image of a rank's training steps on random images."""
    with contextlib.closing(TorchEngine(model, recipe, world=world)) as engine:
        batch_size = recipe.batch_size
        shape = (batch_size, *recipe.stored_sides, recipe.channels)
        images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        samples = Split(images=images, rows=np.arange(batch_size), labels=np.zeros(batch_size, np.int64))
        split = engine.place(samples)
        split.begin_epoch(0)

        def step_seconds(images: int, count: int) -> tuple[float, float]:
            """Return the wall and CPU seconds of one of `count` steps."""
            batch = Batch(samples=np.arange(images), weights=np.ones(images, np.float32), count=images)
            began = time.perf_counter(), time.process_time()
            for inputs in split.feed(repeat(batch, count)):
                split.train_step(inputs, 1e-6, 0)
            engine.counts()  # waits for an accelerator
            took = (time.perf_counter() - began[0]) / count, (time.process_time() - began[1]) / count
            # All ranks use the same numbers.
            return max(world.all_gather_object(took))

        images = min(batch_size, FIRST_IMAGES * world.size) if engine.setup.accelerator.is_host else batch_size
        # The first step of a shape prepares the others. On a busy host, steps mostly wait.
        while step_seconds(images, 1)[1] < LONG_STEP and images < batch_size:
            images = min(batch_size, 8 * images)
            engine.forget_shapes()
        seconds, computing = step_seconds(images, 1)
        if (count := min(STEPS, round(SECONDS / computing))) > 1:
            seconds, _ = step_seconds(images, count)
        return seconds * world.size / images
