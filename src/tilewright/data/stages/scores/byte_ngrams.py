"""Byte n-grams of many texts at once: packed into integers and hashed, in plain numpy.

Legend: L bytes of all texts together with the gaps before them. A gap is `LONGEST` NUL bytes, which stand for the
begin of a text; repaired text holds no NUL. All of it is exact: a text's grams do not depend on its neighbours.
"""

from collections.abc import Iterator, Sequence

import numpy as np

LONGEST = 8
"""Bytes of the longest gram: it fills a uint64."""
_BLOCK = 1 << 15  # positions that are worked on at once: what is made of them stays in the processor's cache
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


def spaced(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts spaced for their grams: (uint8 [L] of the texts with a gap before each, int64 first byte of each gap, int64
    bytes of each text).

    Example:
        >>> data, gaps, sizes = spaced([b"ab", b"c"])
        >>> data.tolist(), gaps.tolist(), sizes.tolist()
        ([0, 0, 0, 0, 0, 0, 0, 0, 97, 98, 0, 0, 0, 0, 0, 0, 0, 0, 99], [0, 10], [2, 1])
    """
    gap = bytes(LONGEST)
    sizes = np.array([len(text) for text in texts], np.int64)
    data = np.frombuffer(b"".join(part for text in texts for part in (gap, text)), np.uint8)
    return data, np.cumsum(sizes + LONGEST) - sizes - LONGEST, sizes


def packed(data: np.ndarray) -> np.ndarray:
    """Pack the last eight bytes at each position into one number, the latest in its lowest byte; uint64 [L] of uint8
    [L].

    Example:
        >>> [hex(value) for value in packed(np.array([1, 2, 3], np.uint8)).tolist()]
        ['0x1', '0x102', '0x10203']
    """
    last = data.astype(np.uint64)
    for back in (1, 2, 4):
        last[back:] |= last[:-back] << np.uint64(8 * back)
    return last


def inside(data: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    """Positions of grams that are in a text and in no gap, bool [L]."""
    found = np.ones(len(data), bool)
    for back in range(LONGEST):
        found[gaps + back] = False
    return found


def blocks(data: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Packed grams of `data` [L] in blocks, as (first position, uint64 of the position before it and of the block).

    The first gap is left out: nothing is known of what is before it.
    """
    for first in range(LONGEST, len(data), _BLOCK):
        stop = min(len(data), first + _BLOCK)
        yield first, packed(data[first - LONGEST : stop])[LONGEST - 1 :]


def mask(length: int) -> np.uint64:
    """The bit mask of the last `length` bytes of a gram."""
    return np.uint64((1 << 8 * length) - 1)


def hashed(last: np.ndarray, length: int) -> np.ndarray:
    """Hash of the grams of `length` bytes that end at each position, uint64. Every bit of it may be used."""
    found = ((last & mask(length)) + np.uint64(length)) * _FIRST
    found ^= found >> np.uint64(32)
    found *= _SECOND
    found ^= found >> np.uint64(29)
    return found


def sums(values: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    """Sum int32 values of grams [L] (0 in gaps) over each text, int64: exact, whatever texts are beside it."""
    return np.add.reduceat(values, gaps, dtype=np.int64) if len(gaps) else np.zeros(0, np.int64)
