"""Order and randomness are functions of seed, epoch and position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.order import evaluation_batches, steps_per_epoch, training_batches
from flatout.randomness import Stream, permutation, raw, uniform


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
