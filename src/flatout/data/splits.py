"""Splits (train, valid, test): their common names, stratified splitting, and folds."""

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import scipy

from flatout.config import Data
from flatout.data.batches import CHUNK_BYTES, Split
from flatout.utils.errors import InputError
from flatout.utils.host import usable_cores
from flatout.utils.random import Stream, raw

if TYPE_CHECKING:
    from flatout.data.pack import Pack

T = TypeVar("T")

_YEAR = re.compile(r"(19|20)\d\d$")

SPLITS = ("train", "valid", "test")
# Regression labels are stratified by this many quantiles.
QUANTILES = 10
# Groups are divided into this many parts; a split takes some of them.
GROUP_PARTS = 20
# Identical images are searched for in up to this many bytes: a second or two of work.
MAX_COMPARED_BYTES = 1 << 32
WORDS = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "testing", "t10k"), "test"),
}


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a file, folder or array name: `Train_Labels` is `["train", "labels"]`."""
    return re.findall(r"[a-z0-9]+", name.lower())


def split_of(name: str) -> str | None:
    """Return the split that a name means as a whole (`Training_Set` is `train`, `val2017` is `valid`), or None."""
    words = [_YEAR.sub("", word).removesuffix("set") for word in words_of(name)]
    words = [word for word in words if word not in ("", "data", "images", "split")]
    return WORDS.get(words[0]) if len(words) == 1 else None


def split_within(name: str) -> str | None:
    """Return the split that one word of a name means (`desc_train`, `train02`); None for no word or several."""
    found = {WORDS[word] for name in words_of(name) if (word := name.rstrip("0123456789")) in WORDS}
    return found.pop() if len(found) == 1 else None


def in_order(splits: Mapping[Any, T], where: object) -> dict[str, T]:
    """Return the splits in the order train, valid, test; raise InputError without a training split."""
    if "train" not in splits:
        raise InputError(f"{where}: has {' and '.join(splits) or 'nothing'} but no training split; name one 'train'")
    return {name: splits[name] for name in SPLITS if name in splits}


def splits_of(pack: "Pack", data: Data, seed: int) -> dict[str, Split]:
    """Return the splits of a pack, of which valid, or valid and test, may be taken from the training images.

    With `data.fold`, that fold is the validation split, and the other folds are the training images.
    """
    rows = {name: np.arange(start, stop) for name, (start, stop) in pack.splits.items()}
    if data.fold:
        pool, folds = folds_of(pack, data.folds, seed)
        rows |= {"train": pool[folds != data.fold], "valid": pool[folds == data.fold]}
    elif "valid" not in rows:
        fractions = {"test": data.test_fraction} if len(rows) == 1 else {}
        fractions["valid"] = data.valid_fraction
        left = every = rows["train"]
        copies = identical(pack, every) if any(fractions.values()) else every
        for name, fraction in fractions.items():
            # Both fractions are of all training images, although the second split is taken from the rest.
            groups = None if pack.groups is None else pack.groups[left]
            share = fraction * len(every) / len(left)
            kept, taken = split_by_labels(
                pack.labels[left], share, seed, stream=name, groups=groups, copies=copies[left - every[0]]
            )
            if len(taken):
                rows[name], left = left[taken], left[kept]
        rows["train"] = left
    rows = in_order(rows, "data")
    return {name: Split(images=pack.images, rows=some, labels=pack.labels[some]) for name, some in rows.items()}


def folds_of(pack: "Pack", count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are divided into folds (training and validation images) and the fold of each, from 1."""
    pool = np.concatenate([np.arange(*span) for name, span in pack.splits.items() if name != "test"])
    groups = None if pack.groups is None else pack.groups[pool]
    return pool, divide(pack.labels[pool], count, seed, groups, copies=identical(pack, pool))


def identical(pack: "Pack", rows: np.ndarray) -> np.ndarray:
    """Number the distinct images by first appearance, int64 [N]; in a large pack, all images count as distinct."""
    row_bytes = pack.images[:1].nbytes
    if len(rows) * row_bytes > MAX_COMPARED_BYTES:
        return np.arange(len(rows))
    samples, step = Split(images=pack.images, rows=rows, labels=rows), max(1, CHUNK_BYTES // row_bytes)

    def digests(start: int) -> list[bytes]:
        images = samples.images_at(np.arange(start, min(start + step, len(rows))))
        return [hashlib.blake2b(image, digest_size=16).digest() for image in images]

    numbers: dict[bytes, int] = {}
    with ThreadPoolExecutor(usable_cores()) as pool:
        every = chain.from_iterable(pool.map(digests, range(0, len(rows), step)))
        return np.array([numbers.setdefault(digest, len(numbers)) for digest in every])


def split_by_labels(
    labels: np.ndarray,
    fraction: float,
    seed: int,
    *,
    stream: str,
    groups: np.ndarray | None = None,
    copies: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of samples kept and of samples taken, stratified by labels of any task.

    With groups, int64 [N], whole groups are taken, if possible not all of a class. For `copies` see `divide`.
    """
    if groups is not None:
        units = joined(groups, copies)
        parts = min(len(np.unique(units)), GROUP_PARTS)
        wanted = min(max(1, round(fraction * parts)), parts - 1) if fraction else 0
        folds, taken = divide(labels, parts, seed, units), list[int]()
        for fold in range(1, parts + 1):
            if len(taken) < wanted and _has_all_classes(labels, ~np.isin(folds, [*taken, fold])):
                taken.append(fold)
        # Where each fold has a class of its own, one part lacks classes anyway.
        is_taken = np.isin(folds, taken or range(1, wanted + 1))
    elif copies is not None:
        _, first, number = np.unique(copies, return_index=True, return_inverse=True)
        is_taken = np.isin(number, split_by_labels(labels[first], fraction, seed, stream=stream)[1])
    elif labels.ndim == 2:
        return iterative_split(labels, fraction, seed, stream=stream)
    else:
        return stratified_split(_strata(labels), fraction, seed, stream=stream)
    return np.flatnonzero(~is_taken), np.flatnonzero(is_taken)


def _has_all_classes(labels: np.ndarray, is_kept: np.ndarray) -> bool:
    if labels.ndim == 2:
        return bool((labels[is_kept].any(axis=0) == labels.any(axis=0)).all())
    return labels.dtype.kind == "f" or len(np.unique(labels[is_kept])) == len(np.unique(labels))


def joined(groups: np.ndarray, copies: np.ndarray | None) -> np.ndarray:
    """Merge groups, int64 [N], that contain copies of the same image."""
    if copies is None or len(np.unique(copies)) == len(copies):
        return groups
    total = int(groups.max()) + 1
    size = total + int(copies.max()) + 1
    edges = scipy.sparse.coo_array((np.ones(len(groups)), (groups, total + copies)), shape=(size, size))
    return scipy.sparse.csgraph.connected_components(edges, directed=False)[1][groups].astype(np.int64)


def _strata(labels: np.ndarray) -> np.ndarray:
    """Return stratification keys, int64 [N]: classes, or quantiles of regression labels."""
    if labels.dtype.kind != "f":
        return labels
    ranks = np.argsort(np.argsort(labels, kind="stable"), kind="stable")
    return ranks * min(QUANTILES, len(labels)) // len(labels)


def stratified_split(labels_N: np.ndarray, fraction: float, seed: int, *, stream: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices (int64, ascending) of samples kept and of samples taken, the same share of each class.

    round(fraction * N) samples are taken: of each class its share rounded down, and one more of the classes with the
    largest remainders, with ties decided by the seed. One sample of each class is always kept. `stream`, the split that
    the samples are taken for, makes the choices independent.
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


def iterative_split(labels_NK: np.ndarray, fraction: float, seed: int, *, stream: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices (int64, ascending) of multi-label samples kept, and of about `fraction` taken.

    Iterative stratification (Sechidis et al., ECML PKDD 2011) for two parts: the class with the fewest samples left is
    divided first, and each of its samples goes to the part that lacks most of the class, then most samples. The seed
    decides between equals. At least one sample of each class is kept.
    """
    order = np.argsort(raw(seed, Stream.SPLIT, SPLITS.index(stream), len(labels_NK)), kind="stable")
    is_present = labels_NK[order].astype(bool)
    shares = np.array([1 - fraction, fraction])
    # The samples that each part still needs, per class and in total.
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


def divide(
    labels: np.ndarray, count: int, seed: int, groups: np.ndarray | None = None, copies: np.ndarray | None = None
) -> np.ndarray:
    """Return the fold of each sample, int64 [N] from 1 to `count`, for cross-validation.

    With one class per sample, folds differ by at most one sample, in total and per class; regression labels are divided
    by `QUANTILES`. Several labels, and `groups`, int64 [N], are divided greedily: the group with the largest share of
    its classes is first, and is assigned to the fold that has least of these. `copies`, int64 [N], are equal for
    identical images, which share a fold. The seed breaks ties.
    """
    units, members = np.arange(len(labels)), "images"
    if groups is not None:
        units, members = np.unique(joined(groups, copies), return_inverse=True)[1], "groups of data.group_column"
    elif copies is not None and len(np.unique(copies)) < len(labels):
        _, first, number = np.unique(copies, return_index=True, return_inverse=True)
        return divide(labels[first], count, seed)[number]
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
        strata = _strata(labels)
        counts_UK = np.zeros((total, int(strata.max()) + 1))
        np.add.at(counts_UK, (units, strata), 1)
    counts_UK = np.column_stack([counts_UK, np.bincount(units)])  # the last column counts samples
    # Choose the fold where the sum of squared class shares grows least, which has least of the group's classes.
    shares_UK = counts_UK / np.maximum(counts_UK.sum(axis=0), 1)
    has_FK = np.zeros((count, shares_UK.shape[1]))
    for unit in order[np.argsort(-np.square(shares_UK[order]).sum(axis=1), kind="stable")].tolist():
        folds[unit] = fold = int(np.argmin(has_FK @ shares_UK[unit]))
        has_FK[fold] += shares_UK[unit]
    return folds[units] + 1
