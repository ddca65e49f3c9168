"""Statuses of the page of benchmarks: each state of each rule, and the intervals against scipy and a simulation."""

import random
from statistics import median

import pytest
from scipy.stats import ttest_1samp

from benchmarks.rows.verdict import (
    MISS,
    NO_TARGET,
    PASS,
    UNDECIDED,
    errors,
    interval_of_mean,
    interval_of_median,
    once,
    seeds,
    turns,
)


def text(number):
    return f"{number:.2f}x"


@pytest.mark.parametrize("count", [6, 7, 9, 15, 30])
def test_the_interval_of_the_median_holds_it_as_often_as_it_says(count):
    draw = random.Random(count)
    held = 0
    for _ in range(4000):
        low, high = interval_of_median([draw.random() for _ in range(count)])
        held += low <= 0.5 <= high
    # 4000 draws: three standard errors of a share of 0.95 are 1.0 %.
    assert held / 4000 > 0.94


def test_few_samples_have_their_range_and_many_have_less():
    assert interval_of_median([3, 1, 2, 5, 4]) == (1, 5)
    low, high = interval_of_median(list(range(1, 31)))
    assert (low, high) == (10, 21)  # the ranks in tables of the sign test


def test_the_interval_of_the_mean_is_that_of_the_t_test():
    gaps = [0.22, -1.46, -0.83]
    interval = ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert interval_of_mean(gaps) == pytest.approx((interval.low, interval.high))


def test_turns_in_each_state():
    assert turns([1.0, 1.1, 1.2], text, at_most=1.35).status == PASS
    assert turns([1.4, 1.5, 1.6], text, at_most=1.35).status == MISS
    found = turns([1.0, 1.1, 1.6], text, at_most=1.35)
    assert (found.status, found.why) == (UNDECIDED, "95 % interval 1.00x to 1.60x")
    assert turns([3.2, 3.5], text, at_least=3).status == PASS
    assert turns([2.2, 2.5], text, at_least=3).status == MISS
    assert turns([2.2, 3.5], text, at_least=3).status == UNDECIDED
    found = turns([1.0, 3.0], text)
    assert (found.status, found.text) == (NO_TARGET, "2.00x (1.00x to 3.00x, n = 2)")


def test_an_outlier_of_many_turns_does_not_decide():
    samples = [1.0] * 29 + [9.0]
    assert turns(samples, text, at_most=1.35).status == PASS
    assert median(samples) == 1.0


def test_seeds_in_each_state():
    near = [0.01, 0.02, 0.03]
    assert seeds(near, 0.1, at_most=0.5).status == PASS
    assert seeds([2.0, 2.1, 2.2], 0.1, at_most=0.5).status == MISS
    assert seeds([2.0, 2.1, 2.2], 0.75, at_most=0.5).status == MISS, "noise does not excuse a loss that is far above"
    assert seeds([-3.0, 0.4, 3.0], 0.1, at_most=0.5).status == UNDECIDED
    assert seeds(near, 0.75, at_most=0.5).status == UNDECIDED, "the bound is below the noise of the seeds"
    assert seeds([0.6], 0.75, at_most=0.5).status == UNDECIDED
    assert seeds([0.6], None, at_most=0.5).status == UNDECIDED, "one seed decides nothing"
    assert seeds(near, 0.75).status == NO_TARGET


def test_errors_and_single_numbers():
    assert errors([-0.08, 0.06], 10).status == PASS
    assert errors([-0.12, 0.06], 10).status == MISS
    assert errors([-0.08, 0.06], 10).text == "-1.0 % (-8.0 to +6.0, 2 runs)"
    assert once(10.7, "10.7 s", at_most=15).status == PASS
    assert once(10.7, "10.7 s", at_most=10).status == MISS
    assert once(3, "3", at_least=3).status == PASS
    assert once(2, "2", at_least=3).status == MISS
    assert once(2, "2").status == NO_TARGET
