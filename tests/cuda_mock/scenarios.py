"""Trainings that run with the mock in processes of their own; each returns what the tests assert."""

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.config import Recipe
from flatout.data.batches import Split, epoch_batches
from flatout.distributed.world import World
from flatout.engine.torch.engine import TorchEngine
from tests.cuda_mock import device
from tests.engine.test_tape import job_net, job_recipe


def train(net: nn.Module, recipe: Recipe, steps: int = 6) -> dict[str, Any]:
    notes: list[str] = []
    engine = TorchEngine(net, recipe, world=World(device=torch.device("cuda:0")), report=notes.append)
    rng = np.random.default_rng(7)
    shape = (4 * recipe.batch_size, *recipe.stored_sides, recipe.channels)
    samples = Split(
        images=rng.integers(0, 256, shape, dtype=np.uint8), rows=np.arange(shape[0]), labels=np.arange(shape[0]) % 2
    )
    split = engine.place(samples)
    split.begin_epoch(0)
    batches = itertools.islice(itertools.cycle(epoch_batches(recipe, samples, 0)), steps)
    for number, inputs in enumerate(split.feed(batches)):
        split.train_step(inputs, 0.1, number)
    return {"notes": notes, "counters": device.counters()}


def job(name: str) -> Any:
    recipe = job_recipe(name)
    return train(job_net(recipe), recipe)


if __name__ == "__main__":
    device.answer(globals())
