"""Clusters of near-copies: MinHash over shingles of five words, candidates by locality-sensitive hashing.

Words are hashed in plain numpy over the bytes of many documents at once, sketches are `rensa`'s. Signs of code and
formulas are part of the word before them, marks of prose are not: `a < b` is no copy of `a > b`, `a+b` is one of
`a + b`, and a comma more or less changes nothing. Two documents are linked where their estimated Jaccard similarity
reaches `THRESHOLD`; clusters are the connected components. Used by `holdout`, so that no near-copy of a held-out
document is trained on. What it does not see: a short document contained in a long one, whose Jaccard similarity is low.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import rensa

from tilewright.data.common.hashing import mix64, ragged_arange

THRESHOLD = 0.5
"""Estimated Jaccard similarity from which two documents count as near-copies."""

PERMUTATIONS = 128
BAND_ROWS = 4  # 32 bands: a pair of similarity 0.65 becomes a candidate with probability 0.998
_SHINGLE = 5
_CHUNK_BYTES = 4 << 20
_SEED = 0x7E57

_SEPARATOR, _INSIDE, _STARTS, _SIGN, _MARK, _HYPHEN = range(6)
"""Kinds of bytes: between words, in one, the first of one, a sign, and two that neighbours may make a sign."""
_SIGNS = b"+*/%<>=&|^~!#@$\\()[]{}"
_MARKS = b":?'"
"""A sign where a sign or another of them stands beside it: `x[1:]`, `a := 1`, `f'(x)`, `a::b`."""
_NOTHING = np.zeros(1, np.uint64)
_LETTERS = bytes(b for b in range(256) if b >= 0x80 or chr(b).isalpha())
"""A hyphen between two of them joins words; any other one is a minus, and a sign."""


def near_copy_clusters(
    data: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, advance: Callable[[float], None] = lambda _: None
) -> np.ndarray:
    """Find clusters of near-copies by MinHash: for each document the index of the cluster's first document, int64
    [documents].

    Args:
        data: uint8 UTF-8 bytes; document i is `data[offsets[i] : offsets[i] + lengths[i]]`, contiguous in order.
        offsets, lengths: int64, bytes. No document is empty.
        advance: told the bytes that are done.
    """
    sketches = []
    first = 0
    while first < len(offsets):
        stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _CHUNK_BYTES)))
        begin, end = int(offsets[first]), int(offsets[stop - 1] + lengths[stop - 1])
        sketches.append(sketches_of(*shingle_hashes(data[begin:end], offsets[first:stop] - begin)))
        advance(end - begin)
        first = stop
    return near_copies(np.concatenate(sketches))


def shingle_hashes(data: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hash the shingles of several documents, five words each; a shorter document is one shingle.

    Args:
        data: uint8, the documents one after the other.
        starts: first byte of each document, ascending, first 0.

    Returns:
        (uint64 hashes, int64 number of hashes of each document; 0 where a document has no word).
    """
    words, counts = _word_hashes(data, starts)
    padded = np.zeros(len(words) + (_SHINGLE - 1) * len(counts), np.uint64)  # four empty words end each document
    padded_starts = np.cumsum(counts + _SHINGLE - 1) - (counts + _SHINGLE - 1)
    padded[ragged_arange(padded_starts, counts)] = words
    shingles = np.where(counts > 0, np.maximum(counts - _SHINGLE + 1, 1), 0)
    at = ragged_arange(padded_starts, shingles)
    hashes = np.zeros(len(at), np.uint64)
    for i in range(_SHINGLE):  # each word is mixed before the next comes, the first too: order counts
        hashes = mix64(hashes ^ padded[at + i])
    return hashes, shingles


def _word_hashes(data: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Word hashes for MinHash's shingles: (uint64 hash of every word, number of words of each document).

    A word has the signs up to the next one in it, wherever they stand, and a document's first word those before it too.
    So there are as many shingles as without signs, and changed words weigh as much.
    """
    kind_of, value_of, power_of = _tables()
    kind = kind_of[data]
    at, is_sign = _signs_by_neighbour(data, kind, starts)
    kind[at] = np.where(is_sign, _SIGN, _SEPARATOR)
    begins = (kind == _INSIDE) | (kind == _STARTS)
    begins[1:] &= (kind[:-1] == _SEPARATOR) | (kind[:-1] == _SIGN) | (kind[1:] == _STARTS)
    begins[starts] = (kind[starts] == _INSIDE) | (kind[starts] == _STARTS)  # never continues the word before
    counts = np.diff(np.searchsorted(np.flatnonzero(begins), np.append(starts, len(data))))
    edge = begins.copy()
    edge[starts] = True
    edges = np.flatnonzero(edge)
    counted = np.cumsum(kind > _SEPARATOR, dtype=np.int32)
    ahead = counted[edges] - (kind[edges] > _SEPARATOR).astype(np.int32)
    place = counted - np.repeat(ahead, np.diff(np.append(edges, len(data))))  # white space counts for nothing
    value = value_of[data]
    value[at[~is_sign]] = 0
    sums = np.add.reduceat(value * power_of[place & 63], edges)
    hashes = sums[begins[edges]]
    before = np.flatnonzero(~begins[starts] & (counts > 0))  # documents that begin with no word
    ahead_of_it = mix64(sums[np.searchsorted(edges, starts[before])]) - mix64(_NOTHING)
    hashes[(np.cumsum(counts) - counts)[before]] += ahead_of_it
    return mix64(hashes), counts


def _signs_by_neighbour(data: np.ndarray, kind: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the marks and hyphens of a text, and whether each is a sign of its own in MinHash's words, by its neighbours
    within the document."""
    at = np.flatnonzero(kind >= _MARK)
    space = ord(" ")
    before = np.where(np.isin(at, starts), space, data[at - 1])
    after = np.where(np.isin(at + 1, np.append(starts, len(data))), space, data[(at + 1) % len(data)])
    is_letter, is_sign = np.zeros(256, bool), np.zeros(256, bool)
    is_letter[list(_LETTERS)], is_sign[list(_SIGNS + _MARKS)] = True, True
    minus = ~(is_letter[before] & is_letter[after])
    return at, np.where(kind[at] == _HYPHEN, minus, is_sign[before] | is_sign[after])


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tables for MinHash's words: (kind of a byte, its hash value, factor by place in the word). Upper case counts as
    lower, separators as zero."""
    kind = np.zeros(256, np.uint8)
    kind[list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")] = _INSIDE
    kind[0x80:0xC0] = _INSIDE
    kind[0xC0:] = _STARTS  # first byte of a character beyond ASCII: scripts without spaces get one word a character
    kind[list(_SIGNS)], kind[list(_MARKS)], kind[ord("-")] = _SIGN, _MARK, _HYPHEN
    lower = np.arange(256, dtype=np.uint64)
    lower[65:91] += np.uint64(32)
    value = mix64(lower) * (kind > _SEPARATOR)
    return kind, value, mix64(np.arange(64, dtype=np.uint64)) | np.uint64(1)


def sketches_of(hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """MinHash sketches, uint32 [documents, permutations], of shingles that `shingle_hashes` gives."""
    rows = np.append(0, np.cumsum(counts)).astype(np.uint64)
    library: Any = rensa  # compiled, without annotations
    matrix = library.RMinHash.digest_matrix_from_flat_token_hashes(hashes, rows, PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), np.uint32)


def near_copies(sketches: np.ndarray) -> np.ndarray:
    """Find near-copies by MinHash: connected components of the pairs that share a band and pass the threshold; smallest
    index names one."""
    num, pairs = len(sketches), np.zeros(0, np.int64)
    for start in range(0, PERMUTATIONS, BAND_ROWS):
        left, right = _similar(sketches, *_candidates(sketches[:, start : start + BAND_ROWS]))
        pairs = np.union1d(pairs, left * num + right)  # most pairs share several bands
    return components(num, pairs // num, pairs % num)


def components(num: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Connected components of MinHash's pairs; the smallest index names one."""
    parent = list(range(num))
    for i, j in zip(a.tolist(), b.tolist(), strict=True):
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        while parent[j] != j:
            parent[j] = parent[parent[j]]
            j = parent[j]
        parent[max(i, j)] = min(i, j)
    for i in range(num):
        parent[i] = parent[parent[i]]
    return np.array(parent, np.int64)


def _candidates(band: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair documents with equal `band` [documents, rows]: each with the first of its bucket and with the one before.

    All pairs would be quadratic in a large bucket; 32 bands give every true pair many chances.
    """
    key = np.zeros(len(band), np.uint64)
    for column in band.T:
        key = mix64(key ^ column)
    order = np.argsort(key, kind="stable")
    same = key[order[1:]] == key[order[:-1]]
    follower = np.flatnonzero(same) + 1
    index = np.arange(len(order))
    begins = np.ones(len(order), bool)
    begins[1:] = ~same
    leader = np.maximum.accumulate(np.where(begins, index, 0))[follower]
    chained = leader != follower - 1
    left = np.concatenate([order[leader], order[follower[chained] - 1]])
    return left, np.concatenate([order[follower], order[follower[chained]]])


def _similar(sketches: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keep = np.zeros(len(left), bool)
    for start in range(0, len(left), 65_536):  # bounds the memory of the gathered sketches
        rows = slice(start, start + 65_536)
        keep[rows] = (sketches[left[rows]] == sketches[right[rows]]).mean(1) >= THRESHOLD
    return left[keep], right[keep]
