"""Windows over the tokens of a long record: cut where the text has a joint, each begun by the end of the one before.

A record's stream is begin, its tokens, end: N positions, of which all but the first are targets. A window is a range of
it; its first tokens repeat the window before it, as context. Every position is a new target of exactly one window.
"""

from dataclasses import dataclass

import numpy as np

_NEAR = 8  # a joint is looked for in this part of a window before its end
_PARAGRAPH, _LINE, _SENTENCE, _NONE = 3, 2, 1, 0
_FUNCTIONS = (b"def ", b"class ", b"async ", b"fn ", b"func ", b"function ", b"#")
_SENTENCE_ENDS = (b". ", b"! ", b"? ", b".\t", "。".encode(), "！".encode(), "？".encode())


@dataclass(frozen=True)
class Window:
    """A window over tokens: stream positions [start, stop); those from `target` on are targets, the rest context."""

    start: int
    target: int
    stop: int


def windows(data: bytes, sizes: list[int], num: int, overlap: float) -> list[Window]:
    """The windows of a record of n tokens, which is n + 2 stream positions.

    Args:
        data: its text in UTF-8.
        sizes: bytes that each token stands for; they sum to `len(data)`.
        num: targets and their context in a window, at most: `seq_len` of the rows that hold one.
        overlap: share of a window that may be context.

    Example:
        >>> windows(b"aa bb cc dd ee ff", [2, 3, 3, 3, 3, 3], 4, 0.5)
        [Window(start=0, target=1, stop=5), Window(start=3, target=5, stop=8)]
    """
    total = len(sizes) + 2
    if total - 1 <= num:
        return [Window(0, 1, total)]
    ends = np.cumsum([0, *sizes]).tolist()  # ends[i]: first byte after stream position i
    most = max(1, int(overlap * num))
    found = []
    start, target = 0, 1
    while True:
        limit = start + num + 1
        if limit >= total:
            found.append(Window(start, target, total))
            return found
        stop = _joint(data, ends, max(target + 1, limit - num // _NEAR), min(limit, total - 1))
        found.append(Window(start, target, stop))
        target = stop
        start = _context(data, ends, max(0, target - most), target - 1)


def _joint(data: bytes, ends: list[int], first: int, last: int) -> int:
    """Cut a window at the strongest joint of the text in [first, last], of equal ones the last."""
    best, rank = last, _NONE
    for stop in range(last, first - 1, -1):
        found = _rank(data, ends[stop - 1])
        if found > rank:
            best, rank = stop, found
            if rank == _PARAGRAPH:
                break
    return best


def _context(data: bytes, ends: list[int], first: int, last: int) -> int:
    """The start of a window's context: the first line or sentence in the first half of [first, last], else `first`."""
    for start in range(max(1, first), (first + last) // 2 + 1):
        if _rank(data, ends[start - 1]) > _NONE:
            return start
    return first


def _rank(data: bytes, at: int) -> int:
    """Rank the joint before byte `at` by its strength, to cut windows there."""
    before = data[max(0, at - 3) : at]
    if before.endswith(b"\n"):
        return _PARAGRAPH if before.endswith(b"\n\n") or data.startswith(_FUNCTIONS, at) else _LINE
    if before[-2:] in _SENTENCE_ENDS or before in _SENTENCE_ENDS or data[at - 1 : at + 1] in _SENTENCE_ENDS:
        return _SENTENCE
    return _NONE
