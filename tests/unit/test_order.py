"""Order and randomness are functions of seed, epoch and position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.order import evaluation_batches, steps_per_epoch, training_batches
from flatout.numerics.random import Stream, permutation, raw, uniform


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
