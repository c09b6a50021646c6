import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.data.splits import divide, split_by_labels, stratified_split
from flatout.errors import InputError


@example(counts=[1, 6], fraction=0.5, seed=0)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    fraction=st.floats(0, 0.99),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_sample_is_kept_or_taken_and_each_class_gives_its_share(counts, fraction, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    kept, taken = stratified_split(labels, fraction, seed, stream="valid")
    assert np.array_equal(np.sort(np.concatenate([kept, taken])), np.arange(len(labels)))
    assert np.all(np.diff(kept) > 0)
    assert np.all(np.diff(taken) > 0)
    for index, count in enumerate(counts):
        given_away = np.count_nonzero(labels[taken] == index)
        assert abs(given_away - fraction * count) < 1
        assert given_away < count or count == 0
    assert len(taken) <= round(fraction * len(labels))
    if min(counts) * (1 - fraction) >= 2:  # no class is so small that it had to keep a sample
        assert len(taken) == round(fraction * len(labels))


def test_largest_remainders_make_up_the_total():
    labels = np.repeat([0, 1, 2], [5, 8, 7])  # a tenth: 0.5, 0.8, 0.7 of 2 in all
    _, taken = stratified_split(labels, 0.1, 1, stream="valid")
    assert labels[taken].tolist() == [1, 2]


def test_ties_between_classes_are_decided_by_the_seed():
    labels = np.repeat(np.arange(100), 3)  # a tenth: 0.3 of each class, 30 in all
    taken = [set(labels[stratified_split(labels, 0.1, seed, stream="valid")[1]].tolist()) for seed in (1, 2)]
    assert [len(classes) for classes in taken] == [30, 30]
    assert taken[0] != taken[1]
    assert max(taken[0]) > 60  # not the first classes only
    assert min(taken[0]) < 30


def test_seed_and_stream_decide_the_choice():
    labels = np.arange(1000) % 10
    chosen = {}
    for seed in (1, 2):
        for stream in ("valid", "test"):
            chosen[seed, stream] = stratified_split(labels, 0.2, seed, stream=stream)[1].tobytes()
    assert len(set(chosen.values())) == 4
    assert stratified_split(labels, 0.2, 1, stream="valid")[1].tobytes() == chosen[1, "valid"]


def test_the_choice_of_a_seed_never_changes():
    kept, taken = stratified_split(np.arange(20) % 2, 0.25, 1, stream="valid")
    assert taken.tolist() == [1, 7, 11, 12, 14]
    assert len(kept) == 15


def sizes(folds: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """Return how many samples of each class each fold has, int64 [count, K]."""
    present = labels if labels.ndim == 2 else np.eye(labels.max() + 1, dtype=np.int64)[labels]
    return np.array([present[folds == fold].sum(axis=0) for fold in range(1, count + 1)])


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(lambda counts: sum(counts) >= 5),
    count=st.integers(2, 5),
    seed=st.integers(0, 2**63 - 1),
)
def test_folds_differ_by_one_sample_at_most(counts, count, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    folds = divide(labels, count, seed)
    assert set(folds.tolist()) == set(range(1, count + 1))
    assert np.ptp(np.bincount(folds)[1:]) <= 1
    assert np.all(np.ptp(sizes(folds, labels, count), axis=0) <= 1)
    assert np.array_equal(folds, divide(labels, count, seed))


@given(
    groups=st.lists(st.integers(0, 12), min_size=20, max_size=60).filter(lambda groups: len(set(groups)) >= 4),
    seed=st.integers(0, 2**63 - 1),
)
def test_no_group_is_divided_and_no_fold_is_empty(groups, seed):
    labels, of = np.arange(len(groups)) % 3, np.array(groups)
    for some in (labels, labels * 0.5, np.eye(3, dtype=np.uint8)[labels]):
        folds = divide(some, 4, seed, of)
        assert set(folds.tolist()) == {1, 2, 3, 4}
        assert all(len(set(folds[of == group].tolist())) == 1 for group in set(groups))
        kept, taken = split_by_labels(some, 0.3, seed, stream="valid", groups=of)
        assert not set(of[kept].tolist()) & set(of[taken].tolist())
        assert len(kept)
        assert len(taken)


def test_groups_of_one_class_are_shared_out_evenly():
    labels, groups = np.repeat([0, 1], 60), np.arange(120) // 4
    assert sizes(divide(labels, 5, 1, groups), labels, 5).tolist() == [[12, 12]] * 5


def test_several_labels_are_shared_out_evenly():
    labels = np.random.default_rng(0).random((600, 5)) < [0.5, 0.3, 0.2, 0.1, 0.02]
    found = sizes(divide(labels.astype(np.uint8), 4, 1), labels.astype(np.int64), 4)
    assert np.all(np.abs(found - labels.sum(axis=0) / 4) <= 2)


def test_folds_have_numbers_from_everywhere():
    numbers = np.random.default_rng(0).permutation(100) / 7
    folds = divide(numbers, 5, 3)
    assert all(
        np.histogram(numbers[folds == fold], np.arange(-0.5, 100, 10) / 7)[0].tolist() == [2] * 10
        for fold in range(1, 6)
    )


def test_more_folds_than_samples_are_refused():
    with pytest.raises(InputError, match=r"data.folds = 3: there are only 2 images"):
        divide(np.array([0, 1]), 3, 1)
