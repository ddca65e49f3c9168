"""The one integer hash that data order and near-copy search are built on. Pure, vectorised, the same everywhere.

numpy's own generators may change their streams between versions; data order must not.
"""

import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers by SplitMix64's step (Steele, Lea, Flood 2014): a bijection that spreads every
    bit.

    Example:
        >>> hex(int(mix64(np.array([0], np.uint64))[0]))
        '0xe220a8397b1dcdaf'
    """
    x = x + _ODD
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash64(*keys: np.ndarray | np.integer | int) -> np.ndarray:
    """A uint64 hash of several integer keys, broadcast against each other.

    Example:
        >>> hash64(1, np.arange(3)).shape, bool(hash64(1, 2) == hash64(2, 1))
        ((3,), False)
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = mix64(state ^ mix64(np.atleast_1d(np.asarray(key)).astype(np.uint64)))
    return state


def ragged_arange(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges [start, start + length) into one int64 array.

    Example:
        >>> ragged_arange(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist()
        [5, 6, 9, 10, 11]
    """
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
