"""Block order from a pack on disk: the weights are those of a plain loop that visits the samples in the same order."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from flatout.data import batches
from flatout.data.batches import Split, epoch_batches
from flatout.distributed.world import World
from flatout.engine.torch.engine import TorchEngine
from flatout.train.loop import run_loop
from flatout.train.progress import Progress
from flatout.utils import random
from tests.engine.plain_loop import plain_loop
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import SILENT, engine_weights, make_net, make_recipe, make_samples

BLOCKS = {"data.order": "blocks", "data.placement": "disk", "optimizer.lr": 0.05}


@contextlib.contextmanager
def small_windows() -> Iterator[None]:
    """Three windows of 70 samples: three blocks of eight each."""
    with mock.patch.multiple(random, WINDOW_BLOCKS=3), mock.patch.multiple(batches, BLOCK_BYTES=8 * 144):
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.save(tmp_path / "images.npy", make_samples().images)
    return tmp_path / "images.npy"


def mapped_samples(file: Path) -> Split:
    held = make_samples()
    return Split(images=np.load(file, mmap_mode="r"), rows=held.rows, labels=held.labels)


def expected(samples: Split) -> dict[str, torch.Tensor]:
    return plain_loop(make_net(), samples, make_recipe(**BLOCKS)).state


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_equals_a_plain_loop(engine: str, file: Path) -> None:
    samples, recipe = mapped_samples(file), make_recipe(**BLOCKS)
    with small_windows():
        assert sum(len(window) > 0 for batch in epoch_batches(recipe, samples, 0) for window in batch.ahead) == 3
        found, wanted = engine_weights(make_net(), samples, recipe, engine), expected(samples)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=2e-5)


def train_on_rank(world: World, file: Path) -> dict[str, torch.Tensor]:
    recipe = make_recipe(**BLOCKS)
    engine = TorchEngine(make_net(), recipe, world=world)
    with small_windows():
        run_loop(engine, world, recipe, {"train": engine.place(mapped_samples(file))}, Progress(), SILENT)
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


@pytest.mark.parametrize("ranks", [3])
def test_any_number_of_ranks(ranks: int, file: Path) -> None:
    found = on_ranks(ranks, train_on_rank, file)
    with small_windows():
        wanted = expected(mapped_samples(file))
    for key, value in wanted.items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-3, atol=2e-5)
