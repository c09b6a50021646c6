"""Reading ahead in block order: in large pieces, in the order of the file, each rank of a host its part."""

import os
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from flatout.data import order
from flatout.data.batches import READ_BYTES, Samples, epoch_batches, read_ahead
from flatout.numerics import random
from flatout.recipe import Recipe

COUNT, IMAGE_BYTES, BLOCK = 2000, 64 * 64, 64
RECIPE = Recipe(model="any", image_size=64, epochs=1, batch_size=50).override({"data.order": "blocks"})


@pytest.fixture
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Samples:
    """Four windows of eight blocks on disk, of which every tenth image belongs to another split."""
    monkeypatch.setattr(order, "BLOCK_BYTES", BLOCK * IMAGE_BYTES)
    monkeypatch.setattr(random, "WINDOW_BLOCKS", 8)
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (COUNT, 64, 64, 1), np.uint8))
    rows = np.flatnonzero(np.arange(COUNT) % 10)
    return Samples(images=np.load(tmp_path / "images.npy", mmap_mode="r"), rows=rows, labels=0 * rows)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and length of everything that is read ahead."""
    found: list[tuple[int, int]] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda f, length, at: found.append((at, length)) or pread(f, length, at))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_windows_are_read_in_large_pieces(samples: Samples, reads: list[tuple[int, int]], ranks: int) -> None:
    """As many bytes as the windows have, in few reads, and before the batch that needs them."""
    cached = np.zeros(COUNT * IMAGE_BYTES, bool)
    offset = samples.images.offset  # pyright: ignore[reportAttributeAccessIssue]
    of_ranks = [read_ahead(samples, epoch_batches(RECIPE, samples, 0), rank, ranks) for rank in range(ranks)]
    for batches in zip(*of_ranks, strict=True):
        for at, length in reads:
            cached[at - offset : at - offset + length] = True
        assert cached.reshape(COUNT, -1)[samples.rows[batches[0].samples]].all()
    blocks = -(-len(samples) // BLOCK)
    assert sum(length for _, length in reads) < 1.2 * COUNT * IMAGE_BYTES
    assert len(reads) <= COUNT * IMAGE_BYTES / READ_BYTES + blocks + 4 * ranks
    assert len(reads) < len(samples) / 20


def test_a_window_is_read_from_front_to_back(samples: Samples, reads: list[tuple[int, int]]) -> None:
    for batch in read_ahead(samples, epoch_batches(RECIPE, samples, 0)):
        if batch.ahead and not len(batch.ahead[-1]):
            break
    offsets = [at for at, _ in reads]
    assert sum(a > b for a, b in pairwise(offsets)) <= 3  # between windows


def test_what_is_not_needed_is_not_read(samples: Samples, reads: list[tuple[int, int]]) -> None:
    full = RECIPE.override({"data.order": "full"})
    assert len(list(read_ahead(samples, epoch_batches(full, samples, 0)))) == 36
    held = Samples(images=np.array(samples.images), rows=samples.rows, labels=samples.labels)
    assert len(list(read_ahead(held, epoch_batches(RECIPE, held, 0)))) == 36
    assert reads == []


def test_closing_ends_the_thread(samples: Samples) -> None:
    batches = read_ahead(samples, epoch_batches(RECIPE, samples, 0))
    next(batches)
    assert any(thread.name.startswith("flatout-ahead") for thread in threading.enumerate())
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not any(thread.name.startswith("flatout-ahead") for thread in threading.enumerate())
