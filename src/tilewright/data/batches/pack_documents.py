"""Packs documents into rows of a fixed length: best-fit decreasing, long documents split (`bfd_split`).

A document is a run of tokens in one long stream. A piece is a range of a document; a row is a list of pieces whose
lengths sum to at most the row's length. Every position of every document is in exactly one piece, so every token is
trained exactly once and nothing is cut off. The tables say where; the tokens stay where they are.
Source of the strategy: "Fewer Truncations Improve Language Modeling" (Ding et al. 2024).
"""

from dataclasses import dataclass

import numpy as np

from tilewright.data.common.hashing import ragged_arange


@dataclass(frozen=True)
class Packing:
    """Packed rows of a fixed length: the pieces of documents in them, row after row. P pieces, R rows.

    `starts_P` int64: first stream position; `lengths_P` int32; `first_R` int64 [R + 1]: first piece of each row.
    """

    starts_P: np.ndarray
    lengths_P: np.ndarray
    first_R: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.first_R) - 1

    def utilisation(self, row_length: int) -> float:
        """Share of the positions of packed rows that hold a token."""
        return float(self.lengths_P.sum()) / max(1, self.num_rows * row_length)


def pack(starts: np.ndarray, lengths: np.ndarray, row_length: int) -> Packing:
    """Pack documents into rows of a fixed length by best-fit decreasing; long documents are split.

    Args:
        starts: int64 [documents], stream position of each document.
        lengths: int64 [documents], positions to place, each at least 1.
        row_length: positions in a row.

    Example:
        >>> packed = pack(np.array([0, 10, 13]), np.array([10, 3, 2]), 5)
        >>> [packed.lengths_P[a:b].tolist() for a, b in zip(packed.first_R, packed.first_R[1:])]
        [[5], [5], [3, 2]]
    """
    full = lengths // row_length
    full_starts = np.repeat(starts, full) + row_length * ragged_arange(np.zeros_like(full), full)
    rest = lengths % row_length
    has_rest = np.flatnonzero(rest)
    order = has_rest[np.argsort(-rest[has_rest], kind="stable")]
    row_of, num_rows = _best_fit(rest[order].tolist(), row_length)
    by_row = np.argsort(row_of, kind="stable")
    order, row_of = order[by_row], row_of[by_row]
    counts = np.concatenate([np.ones(len(full_starts), np.int64), np.bincount(row_of, minlength=num_rows)])
    return Packing(
        np.concatenate([full_starts, (starts + lengths - rest)[order]]).astype(np.int64),
        np.concatenate([np.full(len(full_starts), row_length), rest[order]]).astype(np.int32),
        np.append(0, np.cumsum(counts)).astype(np.int64),
    )


def alone(starts: np.ndarray, lengths: np.ndarray, most: int) -> Packing:
    """A packing with each document in a row of its own, those with more than `most` positions in several, in their
    order.

    Example:
        >>> alone(np.array([0, 20]), np.array([7, 3]), 5).lengths_P.tolist()
        [5, 2, 3]
    """
    pieces = -(-lengths // most)
    part = ragged_arange(np.zeros_like(pieces), pieces)
    left = np.repeat(lengths, pieces) - part * most
    return Packing(
        (np.repeat(starts, pieces) + part * most).astype(np.int64),
        np.minimum(left, most).astype(np.int32),
        np.arange(len(part) + 1, dtype=np.int64),
    )


def _best_fit(lengths: list[int], row_length: int) -> tuple[np.ndarray, int]:
    """Pack lengths (descending) by best fit: each goes into the fullest row that it still fits into, else a new one.

    Rows wait on a stack for each count of free positions; an integer's bits say which stacks are not empty, so the
    smallest sufficient one is the lowest bit at or above the length.
    """
    waiting: list[list[int]] = [[] for _ in range(row_length + 1)]
    not_empty = 0
    rows: list[int] = []
    num_rows = 0
    for length in lengths:
        fits = not_empty >> length
        if fits:
            free = length + (fits & -fits).bit_length() - 1
            row = waiting[free].pop()
            if not waiting[free]:
                not_empty ^= 1 << free
        else:
            free, row = row_length, num_rows
            num_rows += 1
        rows.append(row)
        if free > length:
            waiting[free - length].append(row)
            not_empty |= 1 << (free - length)
    return np.array(rows, np.int64), num_rows
