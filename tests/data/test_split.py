import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.splits import stratified_split


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
