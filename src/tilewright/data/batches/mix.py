"""Which row of which domain is sample i: a pure function of the seed and of an append-only log of mixture weights.

Two parts. `apportion` spreads samples over domains in exact proportion to the weights, by integers: sample j of a
stage goes to the first domain where round((j + 1) x) > round(j x), x being that domain's share of what is left over by
the domains before it. Counts are sums of such steps, so they never fall; they stay within half the number of domains
of the exact proportion; and sample j's index inside its domain needs no walk from the start. `permute` shuffles the
rows of a domain again each epoch by a Feistel network, also without state. So a resume needs four things (seed,
fingerprint, next sample, log) whatever the number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.data.common.hashing import hash64, mix64

BLOCK = 256
"""Samples in a block: order is shuffled inside blocks, and a new stage of weights begins at a block's start."""

_SHARE_BITS = 32
_HALF = 1 << (_SHARE_BITS - 1)
_MAX_STAGE = 1 << 31  # samples in one stage, so that sample x share stays inside uint64
_ROUNDS = 4


@dataclass(frozen=True)
class Picks:
    """For each sample: its index, domain (index), epoch and row inside the domain. int64 arrays of one length."""

    sample: np.ndarray
    domain: np.ndarray
    epoch: np.ndarray
    row: np.ndarray


def check_weights(weights: Mapping[str, float], domains: Sequence[str]) -> dict[str, float]:
    """Weights of all `domains`, those not named 0.

    Raises:
        ConfigError: an unknown domain, a negative or infinite weight, or nothing above zero.
    """
    unknown = sorted(set(weights) - set(domains))
    bad = {d: w for d, w in weights.items() if not 0 <= w < float("inf")}
    if unknown or bad or not sum(weights.values()) > 0:
        raise ConfigError(
            "Invalid mixture weights",
            where="data.weights",
            got=f"no such domain: {', '.join(unknown)}" if unknown else str(bad or dict(weights)),
            need=f"weights of zero or more, one above zero, for: {', '.join(domains)}",
            try_="data.weights = {}   (in proportion to tokens)",
        )
    return {domain: float(weights.get(domain, 0.0)) for domain in domains}


def shares_of(weights: Sequence[float]) -> np.ndarray:
    """For each domain its share of what the domains before it leave, in units of 2^-32, uint64.

    Example:
        >>> (shares_of([1, 1, 2]) / 2**32).round(4).tolist()
        [0.25, 0.3333, 1.0]
    """
    total = np.cumsum(np.asarray(weights, np.float64)[::-1])[::-1]
    share = np.divide(weights, total, out=np.zeros(len(total)), where=total > 0)
    return np.round(share * 2.0**_SHARE_BITS).astype(np.uint64)


def counts_of(shares: np.ndarray, num_samples: int) -> np.ndarray:
    """Samples of each domain among the first `num_samples` of a stage, int64 [domains]."""
    counts, left = [], num_samples
    for share in shares.tolist():
        taken = (left * share + _HALF) >> _SHARE_BITS
        counts.append(taken)
        left -= taken
    return np.array(counts, np.int64)


def apportion(shares: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(domain, index inside the domain) of the samples `index` of a stage, both int64."""
    domain = np.full(len(index), -1, np.int64)
    inside = np.zeros(len(index), np.int64)
    left = index.astype(np.uint64)
    open_ = np.arange(len(index))
    bits, half = np.uint64(_SHARE_BITS), np.uint64(_HALF)
    for d, share in enumerate(shares):
        below = (left * share + half) >> bits
        taken = ((left + np.uint64(1)) * share + half) >> bits > below
        domain[open_[taken]] = d
        inside[open_[taken]] = below[taken]
        left, open_ = (left - below)[~taken], open_[~taken]
    return domain, inside


def permute(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Image of `index` under a permutation of range(size) that `key` names; arrays of one length, index < size.

    A Feistel network over the next even number of bits; results outside the range go through it again.

    Example:
        >>> sorted(permute(np.arange(10), np.full(10, 10), np.full(10, 7, np.uint64)).tolist()) == list(range(10))
        True
    """
    bits = np.frexp(np.maximum(size - 1, 1).astype(np.float64))[1]
    half = ((bits + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    round_keys = [hash64(key, r) for r in range(_ROUNDS)]
    out = index.astype(np.uint64)
    todo = np.arange(len(index))
    while len(todo):
        left, right = out[todo] >> half[todo], out[todo] & mask[todo]
        for round_key in round_keys:
            left, right = right, left ^ (mix64(round_key[todo] ^ right) & mask[todo])
        out[todo] = left << half[todo] | right
        todo = todo[out[todo] >= size[todo].astype(np.uint64)]
    return out.astype(np.int64)


class Mixture:
    """Samples over domains of `num_rows` rows each. `stages` is [(first sample, weights by domain), ...]."""

    def __init__(self, seed: int, num_rows: Mapping[str, int]):
        self.seed = seed
        self.domains = tuple(num_rows)
        self.stages: list[tuple[int, dict[str, float]]] = []
        self._num_rows = np.array([num_rows[d] for d in self.domains], np.int64)
        self._shares: list[np.ndarray] = []
        self._base: list[np.ndarray] = []  # samples of each domain before the stage
        self._block: tuple[int, Picks] | None = None

    def add_stage(self, start: int, weights: Mapping[str, float]) -> None:
        """From sample `start` on, a multiple of `BLOCK` not before the last stage, mix with `weights`.

        A stage that would begin where the last one does replaces it.
        """
        checked = check_weights(weights, self.domains)
        if start % BLOCK or (not self.stages and start) or (self.stages and start < self.stages[-1][0]):
            raise AssertionError(f"a stage cannot begin at sample {start} after {self.stages}")
        self._block = None
        if self.stages and self.stages[-1][0] == start:
            self.stages.pop()
            self._shares.pop()
            self._base.pop()
        base = np.zeros(len(self.domains), np.int64)
        if self.stages:
            base = self._base[-1] + counts_of(self._shares[-1], start - self.stages[-1][0])
        self.stages.append((start, checked))
        self._shares.append(shares_of(list(checked.values())))
        self._base.append(base)

    def picks(self, samples: np.ndarray) -> Picks:
        """Domain, epoch and row of each sample; `samples` int64, any order."""
        blocks = samples // BLOCK
        parts = [(np.flatnonzero(blocks == b), self._picks_of_block(int(b))) for b in np.unique(blocks)]
        columns = []
        for name in ("domain", "epoch", "row"):
            column = np.empty(len(samples), np.int64)
            for where, block in parts:
                column[where] = getattr(block, name)[samples[where] % BLOCK]
            columns.append(column)
        return Picks(samples, *columns)

    def _picks_of_block(self, block: int) -> Picks:
        cached = self._block  # read once: another thread may replace it
        if cached and cached[0] == block:
            return cached[1]
        start = block * BLOCK
        stage = max(i for i, (first, _) in enumerate(self.stages) if first <= start)
        offset = start - self.stages[stage][0]
        if offset + BLOCK > _MAX_STAGE:
            raise AssertionError(f"a stage of more than {_MAX_STAGE} samples")
        size = np.full(BLOCK, BLOCK, np.int64)
        order = permute(np.arange(BLOCK), size, np.repeat(hash64(self.seed, 1, block), BLOCK))
        domain, index = apportion(self._shares[stage], offset + order)
        # The shuffle is of domains only: inside each domain the indices ascend, so that epochs follow one another.
        index[np.argsort(domain, kind="stable")] = index[np.lexsort((index, domain))]
        index += self._base[stage][domain]
        num_rows = self._num_rows[domain]
        epoch = index // num_rows
        row = permute(index % num_rows, num_rows, hash64(self.seed, 2, domain, epoch))
        picks = Picks(start + np.arange(BLOCK), domain, epoch, row)
        self._block = (block, picks)
        return picks
