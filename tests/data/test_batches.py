"""Order and randomness are functions of seed, epoch and position; in block order, images are read ahead."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.config import Recipe
from flatout.data import batches as batching
from flatout.data.batches import (
    READ_BYTES,
    Split,
    epoch_batches,
    evaluation_batches,
    measure,
    read_ahead,
    steps_per_epoch,
    training_batches,
)
from flatout.engine.augment import epoch_transforms
from flatout.utils import random
from flatout.utils.random import Stream, permutation, raw, uniform

COUNT, IMAGE_BYTES, BLOCK = 2000, 64 * 64, 64
RECIPE = Recipe(model="any", image_size=64, epochs=1, batch_size=50).override({"data.order": "blocks"})

# Order


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 5), st.booleans(), st.integers(1, 9))
def test_each_sample_once_in_batches_of_one_size_shared_by_ranks(
    count: int, batch_size: int, epoch: int, drop_last: bool, ranks: int
) -> None:
    """Also a short last batch, of which some ranks have nothing, and batches smaller than the ranks."""
    batches = list(training_batches(1, epoch, count, batch_size, drop_last))
    assert len(batches) == steps_per_epoch(count, batch_size, drop_last)
    real = np.concatenate([b.samples[: b.count] for b in batches])
    if drop_last and count >= batch_size:
        assert len(set(real.tolist())) == len(real) == count // batch_size * batch_size
    else:
        assert sorted(real.tolist()) == list(range(count))
    for batch in batches:
        assert len(batch.samples) == len(batch.weights) == min(batch_size, count)
        shares = [batch.part(rank, ranks) for rank in range(ranks)]
        assert np.concatenate([share.samples for share in shares]).tolist() == batch.samples.tolist()
        assert np.concatenate([share.weights for share in shares]).tolist() == batch.weights.tolist()
        sizes = [len(share.samples) for share in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert sum(share.count for share in shares) == batch.count
        for share in (batch, *shares):
            assert share.weights.tolist() == [1] * share.count + [0] * (len(share.weights) - share.count)


def test_an_epoch_can_begin_anywhere_and_differs_by_seed_and_number() -> None:
    whole = list(training_batches(3, 2, 100, 16))
    rest = list(training_batches(3, 2, 100, 16, start=4))
    assert len(rest) == len(whole) - 4
    assert all((a.samples == b.samples).all() for a, b in zip(whole[4:], rest, strict=True))
    assert [b.samples[: b.count].tolist() for b in evaluation_batches(5, 2)] == [[0, 1], [2, 3], [4]]
    for block in (0, 5):  # within one window, block order is full order
        assert next(training_batches(1, 0, 100, 16, block=block)).samples[:5].tolist() == [29, 63, 76, 45, 55]
        orders = {next(training_batches(s, e, 100, 100, block=block)).samples.tobytes() for s in (1, 2) for e in (0, 1)}
        assert len(orders) == 4


def test_random_numbers_never_change() -> None:
    """Values of Philox4x64-10 with this key, as written down once: a change would break every resumed run."""
    assert raw(1, Stream.ORDER, 0, 2).tolist() == raw(1, Stream.ORDER, 0, 5)[:2].tolist()
    draws = uniform(1, Stream.AUGMENT, 0, (1000, 3))
    np.testing.assert_allclose(np.sort(draws, axis=None), np.linspace(0, 1, 3000), atol=0.03)
    assert permutation(1, Stream.ORDER, 0, 8).tolist() == [2, 7, 0, 6, 3, 4, 1, 5]


def test_mean_and_deviation_are_of_images_from_all_over_the_split() -> None:
    images = np.zeros((20_000, 1, 2, 1), np.uint8)
    images[10_000:] = 255  # sorted by class
    found = measure(Split(images=images, rows=np.arange(20_000), labels=np.zeros(20_000)))
    assert found == ((0.5,), (0.5,))


# Block order


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "WINDOW_BLOCKS", 4)


def plain_windows(seed: int, epoch: int, count: int, block: int) -> list[set[int]]:
    """The windows of block order, as one would write them down."""
    places = permutation(seed, Stream.BLOCKS, epoch, -(-count // block)).tolist()
    windows = [set() for _ in range(-(-len(places) // 4))]
    for sample in range(count):
        windows[places[sample // block] // 4].add(sample)
    return windows


@pytest.mark.parametrize(("count", "block", "batch_size"), [(103, 5, 7), (64, 1, 64), (10, 20, 3)])
def test_block_order_goes_through_windows(small_windows: None, count: int, block: int, batch_size: int) -> None:
    batches = list(training_batches(3, 2, count, batch_size, block=block))
    order = np.concatenate([batch.samples[: batch.count] for batch in batches]).tolist()
    assert sorted(order) == list(range(count))
    for window in plain_windows(3, 2, count, block):
        found, order = order[: len(window)], order[len(window) :]
        assert set(found) == window
        assert len(window) < 10 or found != sorted(found)


def test_mixed_images_are_of_one_window(small_windows: None) -> None:
    mixing = Recipe(model="any", image_size=1, epochs=1, batch_size=1).override({"augment.mixup": 0.2})
    partners = (epoch_transforms(mixing, 2, 103, 5) or {})["partner"]
    assert sorted(partners.tolist()) == list(range(103))
    for window in plain_windows(mixing.seed, 2, 103, 5):
        assert set(partners[list(window)].tolist()) == window


# Reading ahead


@pytest.fixture
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Split:
    """Four windows of eight blocks on disk, of which every tenth image belongs to another split."""
    monkeypatch.setattr(batching, "BLOCK_BYTES", BLOCK * IMAGE_BYTES)
    monkeypatch.setattr(random, "WINDOW_BLOCKS", 8)
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (COUNT, 64, 64, 1), np.uint8))
    rows = np.flatnonzero(np.arange(COUNT) % 10)
    return Split(images=np.load(tmp_path / "images.npy", mmap_mode="r"), rows=rows, labels=0 * rows)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and length of everything that is read ahead."""
    found: list[tuple[int, int]] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda f, length, at: found.append((at, length)) or pread(f, length, at))
    return found


@pytest.mark.parametrize(("ranks", "start"), [(1, 0), (3, 0), (1, 14)])
def test_windows_are_read_in_large_pieces(samples: Split, reads: list[tuple[int, int]], ranks: int, start: int) -> None:
    """As many bytes as the windows have, in few reads, and before the batch that needs them."""
    cached = np.zeros(COUNT * IMAGE_BYTES, bool)
    offset = samples.images.offset  # pyright: ignore[reportAttributeAccessIssue]
    of_ranks = [read_ahead(samples, epoch_batches(RECIPE, samples, 0, start), rank, ranks) for rank in range(ranks)]
    for batches in zip(*of_ranks, strict=True):
        for at, length in reads:
            cached[at - offset : at - offset + length] = True
        assert cached.reshape(COUNT, -1)[samples.rows[batches[0].samples]].all()
    blocks = -(-len(samples) // BLOCK)
    assert sum(length for _, length in reads) < 1.2 * COUNT * IMAGE_BYTES
    assert len(reads) <= COUNT * IMAGE_BYTES / READ_BYTES + blocks + 4 * ranks
    if ranks == 1:
        assert sum(a > b for (a, _), (b, _) in pairwise(reads)) <= 4  # from front to back, between windows
