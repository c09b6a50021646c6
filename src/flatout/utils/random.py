"""Reproducible randomness: every random number is a function of (seed, stream, index), without a state.

The generator is NumPy's Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Only its raw
64-bit output is used, which NumPy guarantees never to change.
"""

from enum import IntEnum

import numpy as np

WINDOW_BLOCKS = 1024  # of `block_permutation`


class Stream(IntEnum):
    """The purpose of random numbers; streams never overlap."""

    ORDER = 1
    AUGMENT = 2
    SPLIT = 3
    STEP = 4
    PICTURES = 5
    COLOR = 6
    POLICY = 7
    ERASE = 8
    MIX = 9
    PARTNER = 10
    BLOCKS = 11
    FLIP = 12


def raw(seed: int, stream: Stream, index: int, count: int, start: int = 0) -> np.ndarray:
    """Return `count` uniform 64-bit integers, uint64 [count], from `start` on, for one index of a stream: an epoch."""
    # The generator makes four numbers at once.
    assert start % 4 == 0
    key = np.array([seed, (int(stream) << 48) | index], dtype=np.uint64)
    return np.random.Philox(key=key).advance(start // 4).random_raw(count)


def uniform(seed: int, stream: Stream, index: int, shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    """Return uniform numbers in [0, 1), float64 of the given shape; rows begin at `start`, a multiple of 4."""
    each = int(np.prod(shape[1:]))
    return ((raw(seed, stream, index, shape[0] * each, start * each) >> np.uint64(11)) * 2.0**-53).reshape(shape)


def permutation(seed: int, stream: Stream, index: int, count: int) -> np.ndarray:
    """Return a random permutation of 0..count-1, int64 [count]."""
    return np.argsort(raw(seed, stream, index, count), kind="stable")


def block_permutation(seed: int, stream: Stream, index: int, count: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a random permutation of 0..count-1, int64 [count], and the end of each window in it, int64 [windows].

    Blocks of `block` consecutive numbers are shuffled, `WINDOW_BLOCKS` of them at a time form a window, and the numbers
    of each window are shuffled. If one window contains everything, the result is that of `permutation`.
    """
    shuffled = permutation(seed, stream, index, count)
    windows = permutation(seed, Stream.BLOCKS, index, -(-count // block))[shuffled // block] // WINDOW_BLOCKS
    return shuffled[np.argsort(windows, kind="stable")], np.cumsum(np.bincount(windows))
