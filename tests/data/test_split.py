"""Splits taken from the training images, and folds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.config import Data
from flatout.data import splits as splitting
from flatout.data.formats.arrays import from_arrays
from flatout.data.pack import Pack
from flatout.data.splits import divide, folds_of, split_by_labels, splits_of, stratified_split
from tests.data.packs import load, settings
from tests.data.small_sets import refused


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


@pytest.mark.parametrize("kind", ["classes", "several", "numbers"])
def test_seed_and_stream_decide_the_choice(kind):
    classes = np.arange(1000) % 10
    labels = {"classes": classes, "several": np.eye(10, dtype=np.uint8)[classes], "numbers": classes * 0.5}[kind]
    chosen = {
        (seed, stream): split_by_labels(labels, 0.2, seed, stream=stream)[1].tobytes()
        for seed in (1, 2)
        for stream in ("valid", "test")
    }
    assert len(set(chosen.values())) == 4
    assert split_by_labels(labels, 0.2, 1, stream="valid")[1].tobytes() == chosen[1, "valid"]


def test_the_choice_of_a_seed_never_changes():
    assert stratified_split(np.arange(20) % 2, 0.25, 1, stream="valid")[1].tolist() == [1, 7, 11, 12, 14]


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
    fraction=st.sampled_from([0.01, 0.1, 0.3]),
    seed=st.integers(0, 2**63 - 1),
)
@example(groups=[0, 1, 2, 3] * 6, fraction=0.1, seed=0)
def test_no_group_is_divided_and_no_part_is_empty(groups, fraction, seed):
    labels, of = np.arange(len(groups)) % 3, np.array(groups)
    for some in (labels, labels * 0.5, np.eye(3, dtype=np.uint8)[labels]):
        folds = divide(some, 4, seed, of)
        assert set(folds.tolist()) == {1, 2, 3, 4}
        assert all(len(set(folds[of == group].tolist())) == 1 for group in set(groups))
        kept, taken = split_by_labels(some, fraction, seed, stream="valid", groups=of)
        assert not set(of[kept].tolist()) & set(of[taken].tolist())
        assert len(kept)
        assert len(taken)


def test_a_class_of_one_group_stays_in_training():
    labels, of = np.repeat([0, 1, 2], [100, 100, 5]), np.append(np.arange(200) // 5, [40] * 5)
    for some in (labels, np.eye(3, dtype=np.uint8)[labels]):
        kept, taken = split_by_labels(some, 0.1, 0, stream="valid", groups=of)
        assert set(labels[kept].tolist()) == {0, 1, 2}
        assert len(taken) == pytest.approx(20, abs=6)


def test_folds_are_shared_out_evenly():
    labels, groups = np.repeat([0, 1], 60), np.arange(120) // 4
    assert sizes(divide(labels, 5, 1, groups), labels, 5).tolist() == [[12, 12]] * 5
    several = np.random.default_rng(0).random((600, 5)) < [0.5, 0.3, 0.2, 0.1, 0.02]
    found = sizes(divide(several.astype(np.uint8), 4, 1), several.astype(np.int64), 4)
    assert np.all(np.abs(found - several.sum(axis=0) / 4) <= 2)
    numbers = np.random.default_rng(0).permutation(100) / 7
    folds, bins = divide(numbers, 5, 3), np.arange(-0.5, 100, 10) / 7
    refused(r"data.folds = 3: there are only 2 images", divide, np.array([0, 1]), 3, 1)
    assert all(np.histogram(numbers[folds == fold], bins)[0].tolist() == [2] * 10 for fold in range(1, 6))


# Identical images


def pack_of_copies(*, groups: bool = False, times: int = 3) -> Pack:
    """So many copies of 60 noise images, in random order."""
    numbers = np.random.default_rng(1).permutation(60 * times) % 60
    images = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 3), np.uint8)[numbers]
    pack = load(from_arrays((images, numbers % 3)), None, settings(size=4))
    return replace(pack, groups=np.arange(len(images)) // 2 if groups else None)


@pytest.mark.parametrize("changes", [{}, {"test_fraction": 0.2}, {"folds": 4, "fold": 2}])
@pytest.mark.parametrize("groups", [False, True])
def test_identical_images_stay_in_one_split(changes, groups):
    pack = pack_of_copies(groups=groups, times=1 if groups else 3)
    if groups:  # a few copies, so that there are groups without
        pack.images[30:33] = pack.images[:3]
    splits = splits_of(pack, Data(**changes), seed=1)
    contents = {name: {image.tobytes() for image in pack.images[some.rows]} for name, some in splits.items()}
    assert sum(len(some) for some in splits.values()) == len(pack.labels)
    assert sum(map(len, contents.values())) == len(set().union(*contents.values()))
    assert all(len(some) for some in splits.values())
    if not groups:
        share = (changes.get("fold") and 0.25) or Data().valid_fraction
        assert len(splits["valid"]) == pytest.approx(share * len(pack.labels), abs=6)
        assert np.ptp(np.bincount(splits["valid"].labels)) <= 3


def test_without_copies_the_choice_is_that_of_the_labels_alone(monkeypatch):
    pack, data = pack_of_copies(times=1), Data(test_fraction=0.2)
    taken = split_by_labels(pack.labels, 0.2, 1, stream="test")[1]
    splits = splits_of(pack, data, seed=1)
    assert splits["test"].rows.tolist() == taken.tolist()
    copies = pack_of_copies(times=3)
    monkeypatch.setattr(splitting, "MAX_COMPARED_BYTES", 100)  # of a large pack all images count as different
    assert folds_of(copies, 4, 1)[1].tolist() == divide(copies.labels, 4, 1).tolist()
