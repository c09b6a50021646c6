"""Measure in about a second how fast a model trains: `factory.choose_processes` and generated recipes decide by it."""

import contextlib
import time
from itertools import repeat

import numpy as np
import torch
from torch import nn

from flatout.config import Recipe
from flatout.data.batches import Batch, Split
from flatout.distributed.environment import Launched
from flatout.distributed.world import World
from flatout.engine.devices import cpu_threads
from flatout.engine.torch.accelerator import BF16_WORTH, accelerator_of, precision_of_gpu
from flatout.engine.torch.engine import TorchEngine
from flatout.models.build import build_model
from flatout.models.features import frozen_network
from flatout.models.heads import FeatureNetwork, find_head
from flatout.models.pretrained import load_pretrained

# On a CPU, the first step has two images, the next ones more, up to the batch or this step time.
FIRST_IMAGES, LONG_STEP = 2, 0.15
# Then this many steps are measured, or for this long.
STEPS, SECONDS = 20, 0.4
# Images per batch of feature measurements on a CPU, some for each thread. The rate is that of two windows of so many
# seconds; further ones follow while each is slower than the one before: beside a busy process, a thread that waited
# before is fast at first.
FEATURE_BATCH, WINDOW_SECONDS, SLOWER, MAX_WINDOWS = 32, 0.4, 0.93, 8
# Seconds of an all-reduce on a host, and more per byte of gradients: those of the jobs with small batches in
# benchmarks/results/ranks.json, batch_size / images_per_second * communication_fraction, are 0.4 ms for 0.08 MB
# (mnist-parallel), 1.5 ms for 2.6 MB (caltech101) and 6 ms for 34 MB (cats-dogs).
SUM_SECONDS, SUM_SECONDS_PER_BYTE = 5e-4, 2.5e-10


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
