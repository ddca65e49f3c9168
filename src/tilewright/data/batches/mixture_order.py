"""Which row of which domain is sample i: a pure function of the seed and of stages of mixture weights.

Two parts. `apportion` spreads samples over domains in exact proportion to the weights, by integers: sample j of a
stage goes to the first domain where round((j + 1) x) > round(j x), x being that domain's share of what is left over by
the domains before it. Counts are sums of such steps, so they never fall; they stay within half the number of domains
of the exact proportion; and sample j's index inside its domain needs no walk from the start. `permute` shuffles the
rows of a domain again each epoch by a Feistel network, also without state. A stage knows how many samples of each
domain came before it, so a resume needs four things (seed, fingerprint, next sample, present stage) whatever the
number of ranks and of stages before. Samples of earlier stages need these stages: `move_log` keeps them.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """The samples that a mixture draws: of each its index, its domain's index, the epoch and the row inside the
    domain. int64 arrays of one length."""

    sample: np.ndarray
    domain: np.ndarray
    epoch: np.ndarray
    row: np.ndarray


def check_weights(weights: Mapping[str, float], domains: Sequence[str]) -> dict[str, float]:
    """Check mixture weights: the weights of all `domains`, those not named 0.

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


def without(weights: Mapping[str, float], away: Collection[str], num_rows: Mapping[str, int]) -> dict[str, float]:
    """Mixture weights with nothing for some domains; where nothing is left, the others in proportion to their rows.

    Example:
        >>> rows = {"a": 5, "b": 5}
        >>> without({"a": 1.0, "b": 2.0}, ["a"], rows), without({"a": 1.0, "b": 0.0}, ["a"], rows)
        ({'a': 0.0, 'b': 2.0}, {'a': 0.0, 'b': 5.0})
    """
    left = {name: 0.0 if name in away else weight for name, weight in weights.items()}
    if away and not sum(left.values()) > 0:
        left = {name: 0.0 if name in away else float(num_rows[name]) for name in weights}
    return left if sum(left.values()) > 0 else dict(weights)


def shares_of(weights: Sequence[float]) -> np.ndarray:
    """The share of each domain of what the domains before it leave, in units of 2^-32, uint64.

    Example:
        >>> (shares_of([1, 1, 2]) / 2**32).round(4).tolist()
        [0.25, 0.3333, 1.0]
    """
    total = np.cumsum(np.asarray(weights, np.float64)[::-1])[::-1]
    share = np.divide(weights, total, out=np.zeros(len(total)), where=total > 0)
    return np.round(share * 2.0**_SHARE_BITS).astype(np.uint64)


def counts_of(shares: np.ndarray, num_samples: int) -> np.ndarray:
    """Samples of each domain in the order of a mixture, among the first `num_samples` of a stage, int64 [domains]."""
    counts, left = [], num_samples
    for share in shares.tolist():
        taken = (left * share + _HALF) >> _SHARE_BITS
        counts.append(taken)
        left -= taken
    return np.array(counts, np.int64)


def apportion(shares: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order of a mixture's samples: (domain, index inside the domain) of `index` of a stage, both int64."""
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
    """Permute range(size) by a permutation that `key` names: the image of each `index`; arrays of one length, index <
    size.

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


class RowOrder(Protocol):
    """The order in which rows of a domain come in a mixture."""

    def rows(self, seed: int, domain: np.ndarray, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The row of each domain (its place in the mixture) that comes as number `index` of an epoch: of all indices
        each row once. int64 arrays of one length."""
        ...


class WholeDomains:
    """All rows of a domain, shuffled again each epoch.

    Args:
        num_rows: of each domain, in their order.
    """

    def __init__(self, num_rows: Iterable[int]) -> None:
        self._num_rows = np.array(list(num_rows), np.int64)

    def rows(self, seed: int, domain: np.ndarray, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The rows of whole domains in a mixture's order: see `RowOrder`."""
        return permute(index, self._num_rows[domain], hash64(seed, 2, domain, epoch))


@dataclass(frozen=True)
class MixtureStage:
    """Samples that are mixed by one set of weights."""

    start: int
    """Its first sample, a multiple of `BLOCK`."""
    weights: tuple[float, ...]
    """Of each domain, in the mixture's order."""
    before: tuple[int, ...]
    """Samples of each domain before it."""


class Mixture:
    """A mixture over domains of `num_rows` rows each: which row of which domain sample i is.

    Args:
        seed: order of the rows.
        num_rows: of each domain, in their order.
        stages: that are known, one after the other; earlier ones may be left out.
        order: of each domain's rows; None: all of a domain are shuffled together.
    """

    def __init__(
        self,
        seed: int,
        num_rows: Mapping[str, int],
        stages: Iterable[MixtureStage] = (),
        order: RowOrder | None = None,
    ):
        self.seed = seed
        self.order: RowOrder = order or WholeDomains(num_rows.values())
        self.domains = tuple(num_rows)
        self.stages: list[MixtureStage] = []
        self.num_rows = dict(num_rows)
        self._num_rows = np.array([num_rows[d] for d in self.domains], np.int64)
        self._starts: list[int] = []
        self._shares: list[np.ndarray] = []
        self._block: tuple[int, Picks] | None = None
        self.skips: list[tuple[int, int]] = []
        """Samples that are left out, as first and one behind the last; ascending and apart."""
        for stage in stages:
            self._append(stage)

    def _append(self, stage: MixtureStage) -> None:
        """Append a stage to the mixture's order; one that begins where the last one does replaces it."""
        self._block = None
        if self._starts and self._starts[-1] == stage.start:
            self.stages.pop()
            self._starts.pop()
            self._shares.pop()
        self.stages.append(stage)
        self._starts.append(stage.start)
        self._shares.append(shares_of(stage.weights))

    def add_stage(self, start: int, weights: Mapping[str, float]) -> MixtureStage:
        """Add a stage to the mixture's order: mix domains with `weights` from sample `start` on, a multiple of `BLOCK`
        not before the last stage.

        A stage that would begin where the last one does replaces it.
        """
        checked = check_weights(weights, self.domains)
        if start % BLOCK or (not self.stages and start) or (self.stages and start < self._starts[-1]):
            raise AssertionError(f"a stage cannot begin at sample {start} after {self.stages[-1:]}")
        before = self.counts(start) if self.stages else (0,) * len(self.domains)
        self._append(MixtureStage(start, tuple(checked.values()), before))
        return self.stages[-1]

    def skip(self, first: int, stop: int) -> None:
        """Leave out the samples of the mixture from `first` to before `stop`: no sample takes their place."""
        merged: list[tuple[int, int]] = []
        for a, b in sorted([*self.skips, (first, stop)]):
            if merged and a <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], b)
            else:
                merged.append((a, b))
        self.skips = merged

    def following(self, start: int, number: int) -> np.ndarray:
        """The next `number` samples of the mixture from `start` on that are not left out, int64."""
        parts, at = [], start
        for a, b in self.skips:
            if b > at:
                parts.append(np.arange(at, min(max(a, at), at + number), dtype=np.int64))
                number -= len(parts[-1])
                at = b
        return np.concatenate([*parts, np.arange(at, at + number, dtype=np.int64)])

    def behind(self, start: int, number: int) -> int:
        """The sample of the mixture behind the next `number` ones from `start` on."""
        for a, b in self.skips:
            if number and b > start:
                here = max(0, a - start)
                if number <= here:
                    break
                number, start = number - here, b
        return start + number

    def weights(self) -> dict[str, float]:
        """Mixture weights of the last stage, by domain."""
        return dict(zip(self.domains, self.stages[-1].weights, strict=True))

    def counts(self, sample: int) -> tuple[int, ...]:
        """Samples of each domain before this one, in the mixture's order. Exact at a block's start; inside a block,
        whose order is shuffled, those of the block in proportion."""
        at = self._stage_of(sample)
        stage = self.stages[at]
        inside = counts_of(self._shares[at], sample - stage.start)
        return tuple((np.array(stage.before, np.int64) + inside).tolist())

    def since(self, sample: int) -> list[MixtureStage]:
        """The mixture stages of this sample and of those after it."""
        return self.stages[self._stage_of(sample) :]

    def knows(self, sample: int) -> bool:
        """True if the mixture knows the stage of this sample."""
        return bool(self._starts) and self._starts[0] <= sample

    def _stage_of(self, sample: int) -> int:
        at = bisect_right(self._starts, sample) - 1
        if at < 0:
            raise AssertionError(f"the stage of sample {sample} is not known, only those from {self._starts[:1]} on")
        return at

    def picks(self, samples: np.ndarray) -> Picks:
        """Domain, epoch and row of each sample of the mixture; `samples` int64, any order."""
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
        stage = self._stage_of(start)
        offset = start - self._starts[stage]
        if offset + BLOCK > _MAX_STAGE:
            raise AssertionError(f"a stage of more than {_MAX_STAGE} samples")
        size = np.full(BLOCK, BLOCK, np.int64)
        order = permute(np.arange(BLOCK), size, np.repeat(hash64(self.seed, 1, block), BLOCK))
        domain, index = apportion(self._shares[stage], offset + order)
        # The shuffle is of domains only: inside each domain the indices ascend, so that epochs follow one another.
        index[np.argsort(domain, kind="stable")] = index[np.lexsort((index, domain))]
        index += np.array(self.stages[stage].before, np.int64)[domain]
        num_rows = self._num_rows[domain]
        epoch = index // num_rows
        row = self.order.rows(self.seed, domain, epoch, index % num_rows)
        picks = Picks(start + np.arange(BLOCK), domain, epoch, row)
        self._block = (block, picks)
        return picks
