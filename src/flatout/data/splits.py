"""Splits (train, valid, test): the names people give them, and a stratified share taken from one."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from flatout.errors import InputError
from flatout.numerics.random import Stream, raw

T = TypeVar("T")

_YEAR = re.compile(r"(19|20)\d\d$")

SPLITS = ("train", "valid", "test")
# Numbers are divided alike by so many ranges.
QUANTILES = 10
# Groups are divided into so many parts, of which a split takes some.
GROUP_PARTS = 20
WORDS = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "testing", "t10k"), "test"),
}


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a file, folder or array name: `Train_Labels` is `["train", "labels"]`."""
    return re.findall(r"[a-z0-9]+", name.lower())


def split_of(name: str) -> str | None:
    """Return the split that a whole name means (`Training_Set` is `train`, `val2017` is `valid`), or None."""
    words = [_YEAR.sub("", word).removesuffix("set") for word in words_of(name)]
    words = [word for word in words if word not in ("", "data", "images", "split")]
    return WORDS.get(words[0]) if len(words) == 1 else None


def split_within(name: str) -> str | None:
    """Return the split that one word of a name means (`desc_train`, `train02`); None for no word or several."""
    found = {WORDS[word] for name in words_of(name) if (word := name.rstrip("0123456789")) in WORDS}
    return found.pop() if len(found) == 1 else None


def in_order(splits: Mapping[Any, T], where: object) -> dict[str, T]:
    """Return the splits in the order train, valid, test.

    Raises:
        InputError: there is no training split.
    """
    if "train" not in splits:
        raise InputError(f"{where}: has {' and '.join(splits) or 'nothing'} but no training split; name one 'train'")
    return {name: splits[name] for name in SPLITS if name in splits}


def stratified_split(labels_N: np.ndarray, fraction: float, seed: int, *, stream: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices (int64, ascending) of samples kept and of samples taken, the same share of each class.

    round(fraction * N) samples are taken. Each class gives its share rounded down; the classes with the largest
    remainders give one more, ties decided by the seed. One sample of each class is always kept, so fewer may be taken
    where classes are tiny. The choice depends on the arguments alone, on every machine and NumPy version; `stream`,
    the split that the samples are taken for, makes choices independent.
    """
    assert 0 <= fraction < 1
    counts_K = np.bincount(labels_N)
    shares_K = fraction * counts_K
    taken_K = np.floor(shares_K).astype(np.int64)
    missing = round(fraction * len(labels_N)) - int(taken_K.sum())
    ties_K = raw(seed, Stream.SPLIT, len(SPLITS) + SPLITS.index(stream), len(counts_K))
    remainders_K = np.round(shares_K - taken_K, 9)
    by_remainder = np.lexsort((ties_K, -remainders_K))
    can_give_K = (remainders_K > 0) & (taken_K + 1 < counts_K)
    spare = by_remainder[can_give_K[by_remainder]]
    taken_K[spare[: max(missing, 0)]] += 1

    shuffled = np.argsort(raw(seed, Stream.SPLIT, SPLITS.index(stream), len(labels_N)), kind="stable")
    by_class = shuffled[np.argsort(labels_N[shuffled], kind="stable")]
    start_K = np.cumsum(counts_K) - counts_K
    rank_in_class = np.arange(len(labels_N)) - np.repeat(start_K, counts_K)
    is_taken = rank_in_class < np.repeat(taken_K, counts_K)
    return np.sort(by_class[~is_taken]), np.sort(by_class[is_taken])


def split_by_labels(
    labels: np.ndarray, fraction: float, seed: int, *, stream: str, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of samples kept and of samples taken, with labels of any task alike; see `stratified_split`.

    Numbers are cut into `QUANTILES` of equally many samples, of each of which the same share is taken. With groups,
    int64 [N], whole groups are taken, about the fraction of the samples; see `divide`.
    """
    if groups is not None:
        parts = min(len(np.unique(groups)), GROUP_PARTS)
        wanted = min(max(1, round(fraction * parts)), parts - 1) if fraction else 0
        is_taken = divide(labels, parts, seed, groups) <= wanted
        return np.flatnonzero(~is_taken), np.flatnonzero(is_taken)
    if labels.ndim == 2:
        return iterative_split(labels, fraction, seed, stream=stream)
    return stratified_split(_strata(labels), fraction, seed, stream=stream)


def _strata(labels: np.ndarray) -> np.ndarray:
    """Return what samples are divided alike by, int64 [N]: classes as they are, numbers by their quantile."""
    if labels.dtype.kind != "f":
        return labels
    ranks = np.argsort(np.argsort(labels, kind="stable"), kind="stable")
    return ranks * min(QUANTILES, len(labels)) // len(labels)


def iterative_split(labels_NK: np.ndarray, fraction: float, seed: int, *, stream: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices (int64, ascending) of samples kept and of about the fraction taken, by several labels each.

    Iterative stratification (Sechidis et al., ECML PKDD 2011) for two parts: the class with the fewest samples left is
    divided first, and each of its samples goes to the part that lacks most of the class, then most samples. The seed
    decides between equals. At least one sample of each class is kept.
    """
    order = np.argsort(raw(seed, Stream.SPLIT, SPLITS.index(stream), len(labels_NK)), kind="stable")
    is_present = labels_NK[order].astype(bool)
    shares = np.array([1 - fraction, fraction])
    # What each of both parts lacks, of every class and of samples.
    lacking_2K, lacking_2 = shares[:, None] * is_present.sum(axis=0), shares * len(labels_NK)
    is_left, is_taken = np.ones(len(order), bool), np.zeros(len(order), bool)
    left_K, kept_K = is_present.sum(axis=0), np.zeros(labels_NK.shape[1], np.int64)

    def assign(sample: int, wanted: np.ndarray) -> None:
        of = is_present[sample]
        part = int(wanted[1] > wanted[0] or (wanted[1] == wanted[0] and lacking_2[1] > lacking_2[0]))
        part *= bool(((kept_K + left_K)[of] > 1).all())
        is_left[sample], is_taken[sample] = False, bool(part)
        lacking_2K[part, of] -= 1
        lacking_2[part] -= 1
        left_K[of] -= 1
        kept_K[of] += 1 - part

    while left_K.any():
        rarest = int(np.argmin(np.where(left_K > 0, left_K, len(order) + 1)))
        for sample in np.flatnonzero(is_present[:, rarest] & is_left).tolist():
            assign(sample, lacking_2K[:, rarest])
    for sample in np.flatnonzero(is_left).tolist():
        assign(sample, lacking_2)
    return np.sort(order[~is_taken]), np.sort(order[is_taken])


def divide(labels: np.ndarray, count: int, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the fold of each sample, int64 [N] from 1 to `count`, for cross-validation.

    The choice depends on the arguments alone. With one class each, folds differ by at most one sample, in all and of
    every class; numbers are divided by `QUANTILES`. Several labels, and groups, are divided greedily: the group that
    makes up most of its classes comes first, and goes to the fold that has least of these.

    Args:
        labels: of any task, as in `labels.Labels`.
        seed: decides between equals.
        groups: int64 [N]; samples of a group share a fold.

    Raises:
        InputError: there are fewer samples or groups than folds.
    """
    units, members = np.arange(len(labels)) if groups is None else groups, "images"
    if groups is not None:
        units, members = np.unique(groups, return_inverse=True)[1], "groups of data.group_column"
    total = int(units.max()) + 1
    if total < count:
        raise InputError(f"data.folds = {count}: there are only {total} {members}; at most as many folds are possible")
    order = np.argsort(raw(seed, Stream.SPLIT, 2 * len(SPLITS), total), kind="stable")
    folds = np.empty(total, np.int64)
    if groups is None and labels.ndim == 1:
        by_class = order[np.argsort(_strata(labels)[order], kind="stable")]
        folds[by_class] = np.arange(total) % count
        return folds + 1
    if labels.ndim == 2:
        counts_UK = np.zeros((total, labels.shape[1]))
        np.add.at(counts_UK, units, labels)
    else:
        counts_UK = np.zeros((total, int(_strata(labels).max()) + 1))
        np.add.at(counts_UK, (units, _strata(labels)), 1)
    counts_UK = np.column_stack([counts_UK, np.bincount(units)])  # the last column counts samples
    # The sum over folds of squared shares of each class grows least where a fold has least of the group's classes.
    shares_UK = counts_UK / np.maximum(counts_UK.sum(axis=0), 1)
    has_FK = np.zeros((count, shares_UK.shape[1]))
    for unit in order[np.argsort(-np.square(shares_UK[order]).sum(axis=1), kind="stable")].tolist():
        folds[unit] = fold = int(np.argmin(has_FK @ shares_UK[unit]))
        has_FK[fold] += shares_UK[unit]
    return folds[units] + 1
