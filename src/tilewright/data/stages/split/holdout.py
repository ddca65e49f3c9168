"""Chooses what is held out for evaluation: whole clusters of near-copies, some in every domain.

Clusters are taken in the order of a seeded hash until a domain has its share; a cluster that spans domains is held out
in all of them, and every domain keeps something to train on. Where even the smallest cluster is far above the share
(one book, three files) the tail of the longest document is held out instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tilewright.data.common.hashing import hash64

_COARSE = 5  # a cluster above this many times the share is too big to be a domain's whole holdout
GROUP = 8
"""Documents from which near-copies of each other may be a task of their own."""
_MIN_DOCUMENT_BYTES = 256  # shorter documents are not cut
_MIN_TAIL_BYTES = 64


class HoldoutDocuments(Protocol):
    """The documents that are divided: `domain_of` (index into `domains`) and `lengths` (bytes) have one entry a
    document."""

    @property
    def domains(self) -> Sequence[str]: ...

    @property
    def domain_of(self) -> np.ndarray: ...

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def data_of(self, index: int) -> bytes:
        """The UTF-8 bytes of a document that may be held out."""
        ...


@dataclass
class Split:
    """The split into training and held-out documents: bool [documents].

    `cut` maps a document to the byte where its held-out tail begins; such a document is not in `held`. `dropped` are
    domains (indices) too small to hold anything out of. `notes` say where a holdout is not independent.
    """

    held: np.ndarray
    cut: dict[int, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_holdout(
    spool: HoldoutDocuments, cluster_of: np.ndarray, share: float, seed: int, *, may_cut: bool = True
) -> Split:
    """Hold out about `share` (between 0 and 0.5) of the bytes of every domain.

    Args:
        spool: the documents.
        cluster_of: int64 [documents], see `minhash.near_copy_clusters`.
        share: part of each domain's bytes, about.
        seed: decides the order of the clusters.
        may_cut: a long document may be held out in part.
    """
    clusters, cluster_of = np.unique(cluster_of, return_inverse=True)
    num = len(spool.domains)
    sizes = np.bincount(cluster_of * num + spool.domain_of, spool.lengths, minlength=len(clusters) * num)
    table = _Clusters(sizes.reshape(len(clusters), num), np.argsort(hash64(seed, clusters), kind="stable"))
    split = Split(np.zeros(len(spool), bool))
    for domain in np.argsort(table.bytes_CD.sum(0), kind="stable").tolist():
        target = share * table.bytes_CD[:, domain].sum()
        if not target:
            continue
        chosen = (
            table.hold_in_order(domain, target)
            or table.hold_smallest(domain, _COARSE * target)
            or (may_cut and _hold_out_tail(split, spool, cluster_of, table, domain, target))
            or table.hold_smallest(domain, np.inf)
        )
        if not chosen:
            split.dropped.append(domain)
    split.held = table.held_C[cluster_of]
    _note_groups(split, spool, cluster_of)
    return split


def _note_groups(split: Split, spool: HoldoutDocuments, cluster_of: np.ndarray) -> None:
    """Note what is held out: say where a group of near-copies that may be a task of its own is not trained on at
    all."""
    sizes = np.bincount(cluster_of[split.held], minlength=1)
    for cluster in np.flatnonzero(sizes >= GROUP).tolist():
        name = spool.domains[int(spool.domain_of[np.flatnonzero(cluster_of == cluster)[0]])]
        split.notes.append(
            f"{name}: {sizes[cluster]:,} near-copies of each other are held out, none of them is trained"
        )


class _Clusters:
    """Bytes of each cluster in each domain, and which are held out. C clusters, D domains."""

    def __init__(self, bytes_CD: np.ndarray, order: np.ndarray):
        self.bytes_CD, self.order = bytes_CD, order
        self.held_C = np.zeros(len(bytes_CD), bool)
        self.cut_C = np.zeros(len(bytes_CD), bool)  # a document of it gave its tail, so the rest stays
        self.free_D = (bytes_CD > 0).sum(0)  # clusters that a domain still trains on

    def hold_in_order(self, domain: int, target: float) -> bool:
        """Hold out clusters of `domain` up to `target` bytes; True where it has any in the end."""
        size_C = self.bytes_CD[:, domain]
        total = size_C[self.held_C].sum()
        for c in self.order[size_C[self.order] > 0]:
            if total >= target:
                break
            if total + size_C[c] <= 1.5 * target and self._hold(c):
                total += size_C[c]
        return bool(total > 0)

    def hold_smallest(self, domain: int, limit: float) -> bool:
        """Hold out the smallest cluster of `domain` that may be, if it is within `limit` bytes."""
        size_C = self.bytes_CD[:, domain]
        return any(self._hold(c) for c in np.argsort(size_C, kind="stable") if 0 < size_C[c] <= limit)

    def _hold(self, cluster: int) -> bool:
        """Hold out `cluster`, unless some domain would have nothing left to train on."""
        touched = self.bytes_CD[cluster] > 0
        if self.held_C[cluster] or self.cut_C[cluster] or (self.free_D[touched] < 2).any():
            return False
        self.held_C[cluster] = True
        self.free_D -= touched
        return True


def _hold_out_tail(
    split: Split, spool: HoldoutDocuments, cluster_of: np.ndarray, table: _Clusters, domain: int, target: float
) -> bool:
    """Cut the tail off the domain's longest document, best one without a near-copy; False where it is too short."""
    members = np.flatnonzero(spool.domain_of == domain)
    single = members[np.bincount(cluster_of)[cluster_of[members]] == 1]
    pool = single if len(single) else members
    document = int(pool[np.argmax(spool.lengths[pool])])
    length = int(spool.lengths[document])
    if length < _MIN_DOCUMENT_BYTES:
        return False
    tail = min(max(int(target), _MIN_TAIL_BYTES), length // 2)
    split.cut[document] = _line_start(spool, document, length - tail)
    table.cut_C[cluster_of[document]] = True
    if not len(single):
        name = spool.domains[domain]
        split.notes.append(f"{name}: all its documents are near-copies, so what is held out is not independent")
    return True


def _line_start(spool: HoldoutDocuments, document: int, at: int) -> int:
    """Line start for a held-out tail: a byte near and before `at` where a line, else a word, else a character
    begins."""
    text = spool.data_of(document)
    data = text[:at]
    for mark in (b"\n", b" "):
        found = data.rfind(mark, at // 4)
        if found >= 0:
            return found + 1
    while at > 1 and 0x80 <= text[at] < 0xC0:
        at -= 1
    return at
