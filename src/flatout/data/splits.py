"""A share of the samples set aside: stratified, and a function of the seed alone."""

import numpy as np

from flatout.data.source import SPLITS
from flatout.numerics.random import Stream, raw


def carve(labels_N: np.ndarray, fraction: float, seed: int, *, stream: str) -> tuple[np.ndarray, np.ndarray]:
    """Divide samples into those kept and those taken, with the same share of each class taken.

    In total round(fraction * N) samples are taken. Each class gives its share rounded down, and the classes whose share
    lost most by that give one more (the largest remainder method). One sample of each class is always kept, so that
    fewer than the total may be taken where classes are tiny. The choice depends on nothing but the arguments: the same
    on every machine and NumPy version.

    Args:
        labels_N: class index of each sample, int64 [N], not negative.
        fraction: the share to take, at least 0 and less than 1.
        seed: of the run.
        stream: the name of the split that the samples are taken for, so that two by one seed are independent.

    Returns:
        The indices kept and the indices taken, int64, each in ascending order.
    """
    assert 0 <= fraction < 1
    counts_K = np.bincount(labels_N)
    shares_K = fraction * counts_K
    taken_K = np.floor(shares_K).astype(np.int64)
    missing = round(fraction * len(labels_N)) - int(taken_K.sum())
    by_remainder = np.argsort(taken_K - shares_K, kind="stable")
    spare = by_remainder[taken_K[by_remainder] + 1 < counts_K[by_remainder]]
    taken_K[spare[: max(missing, 0)]] += 1

    shuffled = np.argsort(raw(seed, Stream.SPLIT, SPLITS.index(stream), len(labels_N)), kind="stable")
    by_class = shuffled[np.argsort(labels_N[shuffled], kind="stable")]
    start_K = np.cumsum(counts_K) - counts_K
    rank_in_class = np.arange(len(labels_N)) - np.repeat(start_K, counts_K)
    is_taken = rank_in_class < np.repeat(taken_K, counts_K)
    return np.sort(by_class[~is_taken]), np.sort(by_class[is_taken])
