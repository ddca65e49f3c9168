"""Closed formulas of schedules with equal passes and free messages: what a simulation must meet.

p ranks of a row, m micro-batches, v stages per rank; F, I and W: seconds of a forward pass, of the gradient of a
stage's input, and of the gradients of its weights, through all stages of a rank.
"""

import math
from dataclasses import dataclass

from tilewright.planner.simulate.pass_costs import KindSeconds


def idle_in_one_wave(p: int, m: int, v: int = 1) -> float:
    """The idle share of GPipe and 1F1B (v = 1) and of interleaved 1F1B by formula: (p - 1) / (v m + p - 1).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. Interleaved: m is a multiple of p.

    Example:
        >>> round(idle_in_one_wave(8, 32), 3), round(idle_in_one_wave(8, 32, v=2), 3)
        (0.179, 0.099)
    """
    return (p - 1) / (v * m + p - 1)


def idle_of_deferred(p: int, m: int, v: int, kinds: KindSeconds) -> float:
    """The idle share, by formula, of interleaved 1F1B whose ranks send the gradient of an input before they compute
    those of weights: they wait for (p - 1) (F + I) / v. m is a multiple of p.

    Example:
        >>> round(idle_of_deferred(8, 32, 2, KindSeconds()), 3)
        0.068
    """
    waits = (p - 1) * (kinds.forward + kinds.dgrad) / v
    return waits / (m * kinds.total + waits)


def idle_of_zb_h1(p: int, m: int, kinds: KindSeconds) -> float:
    """The idle share of ZB-H1 by formula: ranks wait for (p - 1) (F + I - W), with m from p on, and I at least W.

    Source: Qi et al. 2023 (arXiv 2401.10241), table 1.

    Example:
        >>> round(idle_of_zb_h1(8, 32, KindSeconds()), 3)
        0.068
    """
    waits = (p - 1) * (kinds.forward + kinds.dgrad - kinds.wgrad)
    return waits / (m * kinds.total + waits)


def in_flight_of_1f1b(p: int, m: int, rank: int) -> int:
    """The most micro-batches whose activations a rank of 1F1B holds, by formula: min(m, p - rank)."""
    return min(m, p - rank)


def in_flight_of_interleaved(p: int, m: int, v: int, rank: int) -> float:
    """The most micro-batches that a rank of interleaved 1F1B holds, each through all its stages, by formula: ((v - 1) p
    + 2 (p - rank - 1) + 1) / v; at most m.

    Source: Narayanan et al. 2021, section 2.2: forward passes before the first backward pass. m is a multiple of p.
    """
    return min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1) / v


@dataclass(frozen=True)
class Failures:
    """A run that fails now and then, at random and without memory, and goes on from its last checkpoint.

    Example:
        >>> round(Failures(every_s=2.7 * 3600, interval_s=900.0, recover_s=900.0).goodput, 3)
        0.87
    """

    every_s: float
    """Mean seconds from one failure to the next."""
    interval_s: float
    """Seconds of steps from one checkpoint to the next."""
    stall_s: float = 0.0
    """Seconds that a checkpoint stops the steps for."""
    recover_s: float = 0.0
    """Seconds from a failure to the first step after it; a failure in that time starts the recovery again."""

    @property
    def goodput(self) -> float:
        """The goodput by formula: the share of all time that goes into steps which count.

        Source: Daly 2006 (Future Generation Computer Systems 22), equation 13: a stretch of steps and its checkpoint
        take M e^(R/M) (e^((T + C)/M) - 1) seconds on average. Here over e^((R + T + C)/M), which may be any number.
        """
        stretch = (self.interval_s + self.stall_s) / self.every_s
        least = math.exp(-stretch - self.recover_s / self.every_s) / -math.expm1(-stretch)
        return self.interval_s / self.every_s * least

    @property
    def best_interval_s(self) -> float:
        """The interval of checkpoints with the greatest goodput, by formula; 0 if checkpoints cost nothing.

        Source: zero of the derivative, (1 - x) e^x = e^(-C/M) of x = T/M, by bisection.
        """
        if not self.stall_s:
            return 0.0
        low, high, stall = 0.0, 1.0, self.stall_s / self.every_s
        for _ in range(60):
            x = (low + high) / 2
            low, high = (x, high) if (1 - x) * math.exp(x) > math.exp(-stall) else (low, x)
        return low * self.every_s
