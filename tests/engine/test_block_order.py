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
from flatout.utils import random
from tests.engine.plain_loop import plain_loop
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import assert_close, engine_weights, make_net, make_recipe, make_samples

BLOCKS = {"data.order": "blocks", "data.placement": "disk", "optimizer.lr": 0.05}


@contextlib.contextmanager
def small_windows() -> Iterator[None]:
    """Three windows of 70 samples: three blocks of eight each."""
    with mock.patch.multiple(random, WINDOW_BLOCKS=3), mock.patch.multiple(batches, BLOCK_BYTES=8 * 144):
        yield


def mapped_samples(file: Path) -> Split:
    held = make_samples()
    return Split(images=np.load(file, mmap_mode="r"), rows=held.rows, labels=held.labels)


def train_on_rank(world: World, file: Path) -> dict[str, torch.Tensor]:
    with small_windows():
        return engine_weights(make_net(), mapped_samples(file), make_recipe(**BLOCKS), world=world)


@pytest.mark.slow
def test_both_engines_and_ranks_equal_a_plain_loop(tmp_path: Path) -> None:
    file, recipe = tmp_path / "images.npy", make_recipe(**BLOCKS)
    np.save(file, make_samples().images)
    with small_windows():
        samples = mapped_samples(file)
        assert sum(len(window) > 0 for batch in epoch_batches(recipe, samples, 0) for window in batch.ahead) == 3
        expected = plain_loop(make_net(), samples, recipe).state
        found = [engine_weights(make_net(), samples, recipe, engine) for engine in ("torch", "xla 8")]
    for weights in (*found, on_ranks(3, train_on_rank, file)[0]):
        assert_close(weights, expected)
