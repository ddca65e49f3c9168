"""Large clusters of near-copies, divided inside.

Rows of one task share its instruction: where that is long they are near-copies of each other by most of their words,
and a cluster that is held out whole takes the task out of training. Where a cluster is a large part of a domain, what
most of its documents share says nothing about copies: without it, near-copies are looked for again among what is left.
Documents with nothing left are copies and stay together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tilewright.data.common.hashing import hash64
from tilewright.data.stages.copies.minhash import near_copies, shingle_hashes, sketches_of
from tilewright.data.stages.split.holdout import GROUP

LARGEST_SHARE = 0.05
"""Of a domain's bytes: a cluster above it is divided. Less where less is held out, see `largest_share`."""
_SAMPLE = 2000  # documents in which common shingles are looked for
_COMMON = 0.5  # share of documents from which a shingle is what they have in common
_CHUNK_BYTES = 4 << 20


@dataclass
class Divided:
    """Large clusters of near-copies, divided as they are to be held out.

    Args:
        cluster_of: int64 [documents], the first document of each document's cluster.
        sizes: documents of each cluster that was divided, by domain (the one with most of it).
    """

    cluster_of: np.ndarray
    sizes: dict[int, list[int]] = field(default_factory=dict)

    def notes(self, domains: tuple[str, ...]) -> list[str]:
        """Notes on divided clusters of near-copies, by domain."""
        found = []
        for domain, sizes in sorted(self.sizes.items()):
            groups = "a group" if len(sizes) == 1 else f"{len(sizes)} groups"
            named = ", ".join(f"{size:,}" for size in sorted(sizes, reverse=True)[:5])
            more = ", ..." if len(sizes) > 5 else ""
            found.append(
                f"{domains[domain]}: {groups} with most words in common ({named}{more} documents), too large to be "
                "held out whole, divided inside; what is held out there is not independent of what is trained"
            )
        return found


def largest_share(holdout: float) -> float:
    """Largest share of a cluster: of a domain's bytes above which a cluster is divided: what fits into the held-out
    part, at most 5 %."""
    return min(1.5 * holdout, LARGEST_SHARE)


def divide_clusters(
    texts: Callable[[np.ndarray], list[np.ndarray]],
    lengths: np.ndarray,
    cluster_of: np.ndarray,
    domain_of: np.ndarray,
    share: float,
) -> Divided:
    """Divide each cluster of at least eight documents that has more than `share` of a domain's bytes.

    Args:
        texts: gives the UTF-8 bytes (uint8) of the documents with these indices; asked for a few MiB at a time.
        lengths: int64 [documents], bytes of each.
        cluster_of: int64 [documents], from `near_copy_clusters`: the first document of each one's cluster.
        domain_of: int64 [documents].
        share: see `largest_share`.
    """
    divided = Divided(cluster_of.copy())
    limits = share * np.bincount(domain_of, lengths)
    names, counts = np.unique(cluster_of, return_counts=True)
    for name in names[counts >= GROUP].tolist():
        members = np.flatnonzero(cluster_of == name)
        if not _is_large(members, lengths, domain_of, limits):
            continue
        parts = _divide(texts, lengths, domain_of, limits, members)
        if len(parts) > 1:
            for part in parts:
                divided.cluster_of[part] = part[0]
            most = int(np.bincount(domain_of[members], lengths[members]).argmax())
            divided.sizes.setdefault(most, []).append(len(members))
    return divided


def _is_large(members: np.ndarray, lengths: np.ndarray, domain_of: np.ndarray, limits: np.ndarray) -> bool:
    sizes = np.bincount(domain_of[members], lengths[members], minlength=len(limits))
    return len(members) >= GROUP and bool((sizes > limits).any())


def _divide(
    texts: Callable[[np.ndarray], list[np.ndarray]],
    lengths: np.ndarray,
    domain_of: np.ndarray,
    limits: np.ndarray,
    members: np.ndarray,
) -> list[np.ndarray]:
    """Divide a cluster's members by what they do not share; each part in ascending order."""
    found, open_ = [], [members]
    while open_:
        mine = open_.pop()
        parts = _without_common(texts, lengths, mine)
        for part in parts:
            again = len(parts) > 1 and _is_large(part, lengths, domain_of, limits)
            (open_ if again else found).append(part)
    return found


def _without_common(
    texts: Callable[[np.ndarray], list[np.ndarray]], lengths: np.ndarray, members: np.ndarray
) -> list[np.ndarray]:
    """Divide members of a cluster by the shingles that at most half of them have; members without any are one part."""
    sample = members[np.argsort(hash64(0, members), kind="stable")[:_SAMPLE]]
    hashes, counts = _hashes(texts, lengths, sample)
    pairs = np.unique(np.stack([hashes, np.repeat(np.arange(len(sample)), counts).astype(np.uint64)]), axis=1)
    values, times = np.unique(pairs[0], return_counts=True)
    common = values[times > _COMMON * len(sample)]
    sketches, has_rest = [], np.zeros(len(members), bool)
    begins = np.append(0, np.cumsum(lengths[members]) // _CHUNK_BYTES)
    for chunk in np.unique(begins[1:]).tolist():
        here = np.flatnonzero(begins[1:] == chunk)
        hashes, counts = _hashes(texts, lengths, members[here])
        keep = ~np.isin(hashes, common)
        rest = np.bincount(np.repeat(np.arange(len(here)), counts)[keep], minlength=len(here))
        has_rest[here] = rest > 0
        if keep.any():
            sketches.append(sketches_of(hashes[keep], rest[rest > 0]))
    alike = [members[~has_rest]] if not has_rest.all() else []
    if not sketches:
        return alike
    others = members[has_rest]
    cluster_of = near_copies(np.concatenate(sketches))
    order = np.argsort(cluster_of, kind="stable")
    return [*alike, *np.split(others[order], np.flatnonzero(np.diff(cluster_of[order])) + 1)]


def _hashes(
    texts: Callable[[np.ndarray], list[np.ndarray]], lengths: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum(lengths[members]) - lengths[members]
    return shingle_hashes(np.concatenate(texts(members)), starts)


def slices(data: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Slices of `texts` of a cluster's documents that lie in one array.

    Args:
        data: uint8.
        offsets, lengths: int64 [documents], in bytes.
    """
    return lambda members: [data[offsets[i] : offsets[i] + lengths[i]] for i in members.tolist()]
