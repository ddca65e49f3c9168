"""The mixture against its promises: exact proportions, no row twice in an epoch, pure in (seed, log)."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core.errors import ConfigError
from tilewright.data.batches.mixture_order import BLOCK, Mixture, apportion, counts_of, permute, shares_of

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 10)), min_size=1, max_size=9).filter(lambda w: sum(w) > 0)


@examples(200)
@given(WEIGHTS)
def test_counts_never_fall_and_stay_near_the_weights(weights):
    shares, total = shares_of(weights), sum(weights)
    domain, inside = apportion(shares, np.arange(700))
    counts = np.zeros(len(weights), np.int64)
    for n in range(700):
        assert (counts_of(shares, n) == counts).all()
        assert inside[n] == counts[domain[n]]  # the index inside a domain is the number of its samples before
        counts[domain[n]] += 1
        off = np.abs(counts - (n + 1) * np.array(weights) / total).max()
        assert off <= 1 + len(weights) / 2, f"sample {n}: {off} off for {weights}"
    assert counts.sum() == 700
    assert not counts[np.array(weights) == 0].any()


def test_weights_far_below_one_in_a_block_are_served():
    """The trap of rounding block by block: a domain of one sample in 4096 must get it."""
    domain, _ = apportion(shares_of([1, 4095]), np.arange(3 * 4096))
    assert (np.bincount(domain) == [3, 3 * 4095]).all()


@examples(100)
@given(st.integers(1, 700), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size, key):
    image = permute(np.arange(size), np.full(size, size), np.full(size, key, np.uint64))
    assert sorted(image.tolist()) == list(range(size))


def test_permutations_of_different_keys_differ_and_mix():
    size = 1000
    images = [permute(np.arange(size), np.full(size, size), np.full(size, k, np.uint64)) for k in range(40)]
    fixed = [(a == np.arange(size)).mean() for a in images]
    same = [(a == b).mean() for a, b in pairwise(images)]
    assert max(*fixed, *same) < 0.01
    # A shuffle has no memory of the order: the mean rank correlation of 40 is 0 within four standard errors.
    correlation = np.mean([np.corrcoef(a, np.arange(size))[0, 1] for a in images])
    assert abs(correlation) < 4 / np.sqrt(40 * size)


@examples(40)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**6)), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_no_row_twice_before_the_epoch_ends(num_rows, log, seed):
    """Also across changes of the weights: every finished epoch of a domain holds each row exactly once."""
    names = {f"d{i}": n for i, n in enumerate(num_rows)}
    mixture, start = Mixture(seed, names), 0
    for blocks, weight_seed in log:
        weights = np.random.default_rng(weight_seed).random(len(names)) + 0.01
        mixture.add_stage(start, dict(zip(names, weights.tolist(), strict=True)))
        start += blocks * BLOCK
    picks = mixture.picks(np.arange(start + 3 * BLOCK))
    for d, size in enumerate(num_rows):
        rows, epochs = picks.row[picks.domain == d], picks.epoch[picks.domain == d]
        assert (epochs == np.arange(len(rows)) // size).all(), "an epoch begins before the last one has ended"
        for epoch in range(len(rows) // size):
            assert sorted(rows[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
        tail = rows[len(rows) // size * size :]
        assert len(set(tail.tolist())) == len(tail)


def test_samples_are_pure():
    """Any order, any grouping, another object: the same picks."""

    def build():
        mixture = Mixture(11, {"x": 70, "y": 300})
        mixture.add_stage(0, {"x": 1, "y": 2})
        mixture.add_stage(2 * BLOCK, {"x": 5, "y": 1})
        return mixture

    whole = build().picks(np.arange(5 * BLOCK))
    order = np.random.default_rng(0).permutation(5 * BLOCK)
    other = build()
    for chunk in np.array_split(order, 37):
        picks = other.picks(chunk)
        assert (picks.row == whole.row[chunk]).all()
        assert (picks.domain == whole.domain[chunk]).all()
        assert (picks.epoch == whole.epoch[chunk]).all()


def test_a_new_stage_changes_only_what_comes_after_it():
    mixture = Mixture(3, {"x": 50, "y": 50})
    mixture.add_stage(0, {"x": 1, "y": 1})
    before = mixture.picks(np.arange(4 * BLOCK))
    mixture.add_stage(2 * BLOCK, {"x": 3, "y": 1})
    after = mixture.picks(np.arange(4 * BLOCK))
    assert (before.row[: 2 * BLOCK] == after.row[: 2 * BLOCK]).all()
    share = [(p.domain[2 * BLOCK :] == 0).mean() for p in (before, after)]
    assert share == pytest.approx([0.5, 0.75], abs=1 / BLOCK)


def test_order_is_fixed_for_ever():
    """A change here breaks the resume of every run that exists."""
    mixture = Mixture(1234, {"code": 1000, "docs": 77})
    mixture.add_stage(0, {"code": 3, "docs": 1})
    picks = mixture.picks(np.array([0, 1, 2, 3, 13, 300, 100011, 100022]))
    assert picks.domain.tolist() == [0, 0, 1, 1, 1, 0, 1, 1]
    assert picks.epoch.tolist() == [0, 0, 0, 0, 0, 0, 324, 324]
    assert picks.row.tolist() == [41, 987, 33, 48, 67, 587, 76, 65]


@pytest.mark.parametrize("weights", [{"z": 1.0}, {"x": -1.0, "y": 2.0}, {"x": 0.0}, {}, {"x": float("nan")}])
def test_bad_weights(weights):
    mixture = Mixture(0, {"x": 3, "y": 3})
    with pytest.raises(ConfigError, match="mixture weights") as caught:
        mixture.add_stage(0, weights)
    assert "x, y" in caught.value.problems[0].need
