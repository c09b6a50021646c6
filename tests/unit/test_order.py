"""Order and randomness are functions of seed, epoch and position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.batches import evaluation_batches, steps_per_epoch, training_batches
from flatout.numerics import random
from flatout.numerics.augment import epoch_transforms
from flatout.numerics.random import Stream, permutation, raw, uniform
from flatout.recipe import Recipe


@given(
    st.integers(1, 200),
    st.integers(1, 64),
    st.integers(0, 5),
    st.booleans(),
)
def test_each_sample_once_in_batches_of_one_size(count: int, batch_size: int, epoch: int, drop_last: bool) -> None:
    batches = list(training_batches(1, epoch, count, batch_size, drop_last))
    assert len(batches) == steps_per_epoch(count, batch_size, drop_last)
    assert all(len(b.samples) == len(b.weights) == min(batch_size, count) for b in batches)
    real = np.concatenate([b.samples[: b.count] for b in batches])
    assert all(b.weights.sum() == b.count and b.weights[: b.count].all() for b in batches)
    if drop_last and count >= batch_size:
        assert len(real) == count // batch_size * batch_size
        assert len(set(real.tolist())) == len(real)
    else:
        assert sorted(real.tolist()) == list(range(count))


def test_an_epoch_can_begin_anywhere() -> None:
    whole = list(training_batches(3, 2, 100, 16))
    rest = list(training_batches(3, 2, 100, 16, start=4))
    assert len(rest) == len(whole) - 4
    assert all((a.samples == b.samples).all() for a, b in zip(whole[4:], rest, strict=True))


def test_epochs_and_seeds_differ() -> None:
    orders = [permutation(seed, Stream.ORDER, epoch, 50).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


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


@pytest.mark.parametrize(("count", "block", "batch_size"), [(100, 5, 16), (103, 5, 7), (64, 1, 64), (10, 20, 3)])
def test_block_order_goes_through_windows(small_windows: None, count: int, block: int, batch_size: int) -> None:
    batches = list(training_batches(3, 2, count, batch_size, block=block))
    order = np.concatenate([batch.samples[: batch.count] for batch in batches]).tolist()
    assert sorted(order) == list(range(count))
    for window in plain_windows(3, 2, count, block):
        found, order = order[: len(window)], order[len(window) :]
        assert set(found) == window
        assert len(window) < 10 or found != sorted(found)


def test_block_order_is_a_function_of_seed_and_epoch(small_windows: None) -> None:
    orders = [next(training_batches(s, e, 100, 100, block=5)).samples.tolist() for s in (1, 2) for e in (0, 1) * 2]
    assert orders[:2] == orders[2:4]
    assert len({tuple(order) for order in orders}) == 4


def test_block_order_within_one_window_is_full_order() -> None:
    blocks, full = (list(training_batches(1, 0, 100, 16, block=block)) for block in (5, 0))
    assert all((a.samples == b.samples).all() for a, b in zip(blocks, full, strict=True))


@pytest.mark.parametrize("start", [0, 1, 5])
def test_windows_are_read_before_their_batches(small_windows: None, start: int) -> None:
    """Each window once, in order, one of them ahead; also of an epoch that begins within."""
    whole = list(training_batches(3, 2, 103, 16, block=5))
    expected, begun = plain_windows(3, 2, 103, 5), []
    for batch, same in zip(training_batches(3, 2, 103, 16, start=start, block=5), whole[start:], strict=True):
        assert batch.samples.tolist() == same.samples.tolist()
        assert all((np.diff(window) > 0).all() for window in batch.ahead)
        begun += [set(window.tolist()) for window in batch.ahead]
        # The last one is being read.
        assert set().union(*begun[:-1]) >= set(batch.samples.tolist())
        assert len(begun) < 2 or not begun[-1] & set(batch.samples.tolist())
    first = next(number for number, window in enumerate(expected) if whole[start].samples[0] in window)
    assert begun == [*expected[first:], set()]


def test_mixed_images_are_of_one_window(small_windows: None) -> None:
    mixing = Recipe(model="any", image_size=1, epochs=1, batch_size=1).override({"augment.mixup": 0.2})
    partners = (epoch_transforms(mixing, 2, 103, 5) or {})["partner"]
    assert sorted(partners.tolist()) == list(range(103))
    for window in plain_windows(mixing.seed, 2, 103, 5):
        assert set(partners[list(window)].tolist()) == window


def test_evaluation_is_in_order() -> None:
    batches = list(evaluation_batches(5, 2))
    assert [b.samples[: b.count].tolist() for b in batches] == [[0, 1], [2, 3], [4]]


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 9))
def test_the_ranks_shares_are_the_batch(count: int, batch_size: int, ranks: int) -> None:
    """Also those of a short last batch, of which some ranks have nothing, and of a batch smaller than the ranks."""
    for batch in training_batches(1, 0, count, batch_size):
        shares = [batch.part(rank, ranks) for rank in range(ranks)]
        assert np.concatenate([share.samples for share in shares]).tolist() == batch.samples.tolist()
        assert np.concatenate([share.weights for share in shares]).tolist() == batch.weights.tolist()
        sizes = [len(share.samples) for share in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert sum(share.count for share in shares) == batch.count
        assert all(share.weights[: share.count].all() for share in shares)
        assert not any(share.weights[share.count :].any() for share in shares)


def test_a_share_is_the_same_whatever_was_asked_for_before() -> None:
    (batch,) = training_batches(1, 0, 100, 100)
    assert [len(batch.part(rank, 3).samples) for rank in (2, 0, 1)] == [33, 34, 33]
    assert batch.part(0, 1).samples.tolist() == batch.samples.tolist()


def test_random_numbers_never_change() -> None:
    """Values of Philox4x64-10 with this key, as written down once: a change would break every resumed run."""
    assert raw(1, Stream.ORDER, 0, 2).tolist() == raw(1, Stream.ORDER, 0, 5)[:2].tolist()
    draws = uniform(1, Stream.AUGMENT, 0, (1000, 3))
    assert draws.shape == (1000, 3)
    assert 0 <= draws.min() < 0.01
    assert 0.99 < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.02
    assert permutation(1, Stream.ORDER, 0, 8).tolist() == FIRST_ORDER


FIRST_ORDER = [2, 7, 0, 6, 3, 4, 1, 5]
