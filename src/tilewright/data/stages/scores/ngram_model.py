"""A language model over bytes: n-grams with interpolated modified Kneser-Ney smoothing, in hashed tables.

Chen and Goodman 1999, section 3: each order subtracts a discount from the counts (three discounts, for counts of 1, 2
and more) and gives what this frees to the order below, whose counts are of distinct bytes before a gram (Kneser and Ney
1995). Below the lowest order is the uniform distribution over 256 bytes, so no text is impossible. Bits per byte are
independent of a tokenizer and compare between texts of any language.

An entry of a table is a uint64: 24 bits that tell its gram from others in its place, 20 bits of `alpha` (what the gram
adds to the probability of its last byte) and 20 bits of `gamma` (the weight of the order below after this gram); both
are the upper bits of a float32. A gram that loses its place to a more frequent one is left out before `gamma` is made
as 1 minus the sum of `alpha`: the probabilities of the 256 bytes sum to 1, but for rounding, after any text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewright.data.stages.scores.byte_ngrams import LONGEST, blocks, hashed, inside, mask, packed, spaced, sums

MOST_GRAMS = 1 << 20
"""Of one order; of more the most frequent stay."""
_LOAD = 4  # places per gram of a table
_CHECK = np.uint64((1 << 24) - 1)
_FIELD = np.uint64((1 << 20) - 1)
_ONE = np.uint64(np.float32(1).view(np.uint32) >> 11)
_UNIT = 1 << 16  # of a bit, in which costs are counted


@dataclass(frozen=True)
class NgramModel:
    """`unigram` float32 [256]: probability of a byte with no context. `gamma` float32 [256]: weight of that after one
    byte. `tables`: uint64 entries of orders 2, 3, ..., each a power of two long."""

    unigram: np.ndarray
    gamma: np.ndarray
    tables: tuple[np.ndarray, ...]

    @property
    def order(self) -> int:
        return len(self.tables) + 1

    def tensors(self, prefix: str = "") -> dict[str, np.ndarray]:
        """Tensors of the n-gram model by name, for a file."""
        tables = {f"{prefix}table{n}": table for n, table in enumerate(self.tables, 2)}
        return {f"{prefix}unigram": self.unigram, f"{prefix}gamma": self.gamma} | tables

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray], prefix: str = "") -> "NgramModel":
        """The n-gram model from the result of `tensors`."""
        tables = []
        while (name := f"{prefix}table{len(tables) + 2}") in tensors:
            tables.append(tensors[name])
        return cls(tensors[f"{prefix}unigram"], tensors[f"{prefix}gamma"], tuple(tables))


def bits_per_byte(models: Sequence[NgramModel], texts: Sequence[bytes]) -> np.ndarray:
    """Bits per byte of each text under each n-gram model, float64 [models, texts]; 0 for an empty text.

    Args:
        models: of one order; several share the work on the grams.
        texts: UTF-8.
    """
    found = np.zeros((len(models), len(texts)))
    if not texts or not models:
        return found
    data, gaps, sizes = spaced(texts)
    text = inside(data, gaps)
    costs = np.zeros((len(models), len(data)), np.int32)
    for first, last in blocks(data):
        for cost, values in zip(costs, _costs(models, last), strict=True):
            cost[first : first + len(values)] = values
    for row, cost in zip(found, costs, strict=True):
        cost[~text] = 0
        row[:] = sums(cost, gaps) / (_UNIT * np.maximum(sizes, 1))
    return found


def probabilities(model: NgramModel, context: bytes) -> np.ndarray:
    """Probabilities by the n-gram model of each byte after `context` (NUL bytes stand for the begin of a text), float32
    [256]."""
    held = (bytes(LONGEST) + context)[-LONGEST:]
    last = np.array([[held, held[1:] + bytes([byte])] for byte in range(256)])
    pairs = np.array([[int.from_bytes(one.ljust(LONGEST, b"\0"), "big") for one in row] for row in last], np.uint64)
    return np.concatenate([_probability([model], pair)[0] for pair in pairs])


def _costs(models: Sequence[NgramModel], last: np.ndarray) -> list[np.ndarray]:
    """The bits of each position but the first of packed bytes under n-gram models, in units of 1 / `_UNIT`, int32 for
    each model."""
    return [_bits_table()[p.view(np.uint32) >> np.uint32(11)] for p in _probability(models, last)]


def _probability(models: Sequence[NgramModel], last: np.ndarray) -> list[np.ndarray]:
    """Probability by n-gram models of the byte at each position but the first, after those before it; float32 for each
    model."""
    byte = (last & mask(1)).view(np.int64)
    found = [model.unigram[byte[1:]] for model in models]
    gammas = [model.gamma[byte[:-1]] for model in models]
    for n in range(2, models[0].order + 1):
        hashes = hashed(last, n)
        check = (hashes & _CHECK) << np.uint64(40)
        for k, model in enumerate(models):
            table = model.tables[n - 2]
            entry = table[_places(hashes, len(table))]
            entry[(entry ^ check) > ~(_CHECK << np.uint64(40))] = _ONE
            found[k] = _float(entry[1:] >> np.uint64(20)) + gammas[k] * found[k]
            gammas[k] = _float(entry[:-1])
    return found


def _places(hashes: np.ndarray, length: int) -> np.ndarray:
    return (hashes >> np.uint64(65 - length.bit_length())).view(np.int64)


def _float(field: np.ndarray) -> np.ndarray:
    """Decode a 20-bit field of the n-gram tables: the float32 whose upper bits are the lowest 20 of each uint64."""
    return (((field & _FIELD) << np.uint64(11)).astype(np.uint32)).view(np.float32)


def _field(values: np.ndarray) -> np.ndarray:
    """Encode a value as a field of the n-gram tables: that of the largest result of `_float` that is at most the value;
    uint64."""
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(11)).astype(np.uint64)


@lru_cache(maxsize=1)
def _bits_table() -> np.ndarray:
    """Table of bits for n-gram models: -log2 of the float32 with these upper 20 bits, in the middle of what shares
    them; int32, capped at 64 bits."""
    upper = np.arange(1 << 20, dtype=np.uint32)
    upper = np.minimum(upper, _field(np.ones(1))[0].astype(np.uint32))  # no probability is above 1
    middle = ((upper << np.uint32(11)) | np.uint32(1 << 10)).view(np.float32).astype(np.float64)
    return np.rint(np.clip(-np.log2(middle), 0, 64) * _UNIT).astype(np.int32)


def train_ngrams(texts: Iterable[bytes], order: int) -> NgramModel:
    """Train the n-gram model of `order` of texts that are not all empty.

    Args:
        texts: UTF-8; in memory they take about thirty times their size.
        order: bytes of the longest gram, 2 to 8.
    """
    # 1. Counts and their discounted shares (alpha), for each order.
    data, gaps, _ = spaced(list(texts))
    last = packed(data)[inside(data, gaps)]
    counted = _counts(last, order)
    alphas = [_alpha(grams, counts, n) for n, (grams, counts, _) in enumerate(counted, 1)]
    wanted = _wanted(counted)
    # 2. Order 1: what the discount frees goes to the uniform distribution.
    unigram = np.full(256, 1 / 256)
    grams, alpha = counted[0][0].astype(np.int64), alphas[0]
    unigram *= 1 - alpha.sum()
    unigram[grams] += alpha
    gamma = np.ones(256)
    tables: list[np.ndarray] = []
    placed = np.zeros(0, np.uint64)
    # 3. Orders from 2 up. The context of a gram holds the weight of the order below (gamma): a gram whose context has
    # no place is left out.
    for n in range(2, order + 1):
        grams, frequency = wanted[n - 1]
        if n > 2:
            known = _looked_up(grams >> np.uint64(8), placed, np.ones(len(placed))) > 0
            grams, frequency = grams[known], frequency[known]
        # Grams compete for places; alpha and gamma are of those that got one.
        table, grams, where = _place(grams, frequency, n)
        own = _field(_looked_up(grams, counted[n - 1][0], alphas[n - 1]))
        table[where] |= own << np.uint64(20)
        # Gamma is made last: 1 minus the alphas that are stored, as rounded, so that probabilities sum to 1.
        contexts, kept = _by_context(grams, _float(own).astype(np.float64))
        left = np.maximum(1 - kept, 0)
        if n == 2:
            gamma[contexts.astype(np.int64)] = left
        else:
            _set_gamma(tables[-1], contexts, left, n - 1)
        tables.append(table)
        placed = grams
    return NgramModel(unigram.astype(np.float32), gamma.astype(np.float32), tuple(tables))


def _counts(last: np.ndarray, order: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Counts for the n-gram model: (sorted grams, counts to smooth, counts in the text) of each order. Grams that begin
    a text keep their counts."""
    grams = np.sort(last & mask(order))
    first = _runs(grams)
    grams, counts = grams[first], np.diff(np.append(first, len(grams)))
    found = [(grams, counts, counts)]
    for n in range(order - 1, 0, -1):  # what ends a longer gram
        shorter = grams & mask(n)
        by_gram = np.argsort(shorter, kind="stable")
        grams = shorter[by_gram]
        first = _runs(grams)
        counts = np.add.reduceat(counts[by_gram], first)
        before = np.diff(np.append(first, len(grams)))
        grams = grams[first]
        starts = (grams >> np.uint64(8 * (n - 1))) == 0
        found.append((grams, np.where(starts, counts, before), counts))
    return found[::-1]


def _runs(ordered: np.ndarray) -> np.ndarray:
    """Find where each value of a sorted array of n-grams begins."""
    begins = np.ones(len(ordered), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    return np.flatnonzero(begins)


def _by_context(grams: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """N-gram counts by context: (contexts, sums of values over the bytes after each) of sorted grams."""
    contexts = grams >> np.uint64(8)
    first = _runs(contexts)
    return contexts[first], np.add.reduceat(values, first) if len(first) else np.zeros(0)


def _alpha(grams: np.ndarray, counts: np.ndarray, n: int) -> np.ndarray:
    """The discounted share of each n-gram's last byte after its context (alpha), float64."""
    total = int(counts.sum()) if n == 1 else None
    if total is None:
        contexts, sizes = _by_context(grams, counts)
        totals = sizes[np.searchsorted(contexts, grams >> np.uint64(8))]
    else:
        totals = np.full(len(grams), total)
    return (counts - _discounts(counts)[np.minimum(counts, 3)]) / totals


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of the n-gram model for counts 0, 1, 2, and 3 or more; Chen and Goodman 1999, equation 17."""
    one, two, three, four = (int((counts == k).sum()) for k in (1, 2, 3, 4))
    if not (one and two and three and four):
        return np.array([0, 0.5, 0.75, 1.0])
    share = one / (one + 2 * two)
    found = [1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three]
    return np.array([0, *(min(max(d, 0.05), k - 0.05) for k, d in enumerate(found, 1))])


def _wanted(counted: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """N-grams wanted in the tables: (sorted grams, frequency) of each order: the most frequent, and the contexts of
    those of the order above."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    above = np.zeros(0, np.uint64)
    for grams, _, counts in reversed(counted):
        if len(grams) > MOST_GRAMS:
            stays = counts > np.partition(counts, -MOST_GRAMS)[-MOST_GRAMS]
            grams, counts = grams[stays], counts[stays]
        every = np.sort(np.concatenate([grams, above]), kind="stable")
        every = every[_runs(every)]
        frequency = _looked_up(every, grams, counts.astype(np.float64), default=np.inf)
        found.append((every, frequency))
        above = every >> np.uint64(8)
        above = above[_runs(above)]
    return found[::-1]


def _looked_up(asked: np.ndarray, known: np.ndarray, values: np.ndarray, default: float = 0.0) -> np.ndarray:
    """Look up the value of each n-gram that is asked for, float64; `default` if it is not among the sorted `known`."""
    at = np.minimum(np.searchsorted(known, asked), max(0, len(known) - 1))
    if not len(known):
        return np.full(len(asked), default)
    return np.where(known[at] == asked, values[at], default)


def _place(grams: np.ndarray, frequency: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places of n-grams: (table with the check bits and a gamma of 1, sorted grams that have a place, that place)."""
    length = 1 << max(4, (_LOAD * len(grams) - 1).bit_length())
    hashes = hashed(grams, n)
    where = _places(hashes, length)
    order = np.lexsort((grams, -frequency, where))
    is_first = np.ones(len(order), bool)
    is_first[1:] = where[order][1:] != where[order][:-1]
    won = np.sort(order[is_first])
    table = np.full(length, _ONE, np.uint64)
    table[where[won]] |= (hashes[won] & _CHECK) << np.uint64(40)
    return table, grams[won], where[won]


def _set_gamma(table: np.ndarray, contexts: np.ndarray, values: np.ndarray, n: int) -> None:
    """Set gamma of the n-gram model: write the weights after `contexts`, which have their place in the table of order
    `n`."""
    where = _places(hashed(contexts, n), len(table))
    table[where] = (table[where] & ~_FIELD) | _field(values)
