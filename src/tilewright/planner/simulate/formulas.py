"""Closed formulas of schedules with equal passes and free messages: what a simulation must meet.

p ranks of a row, m micro-batches, v stages per rank; F, I and W: seconds of a forward pass, of the gradient of a
stage's input, and of the gradients of its weights, through all stages of a rank.
"""

from tilewright.planner.simulate.costs import KindSeconds


def idle_in_one_wave(p: int, m: int, v: int = 1) -> float:
    """Idle share of GPipe and 1F1B (v = 1) and of interleaved 1F1B: (p - 1) / (v m + p - 1).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. Interleaved: m is a multiple of p.

    Example:
        >>> round(idle_in_one_wave(8, 32), 3), round(idle_in_one_wave(8, 32, v=2), 3)
        (0.179, 0.099)
    """
    return (p - 1) / (v * m + p - 1)


def idle_of_deferred(p: int, m: int, v: int, kinds: KindSeconds) -> float:
    """Idle share of interleaved 1F1B whose ranks send the gradient of an input before they compute those of weights:
    they wait for (p - 1) (F + I) / v. m is a multiple of p.

    Example:
        >>> round(idle_of_deferred(8, 32, 2, KindSeconds()), 3)
        0.068
    """
    waits = (p - 1) * (kinds.forward + kinds.dgrad) / v
    return waits / (m * kinds.total + waits)


def idle_of_zb_h1(p: int, m: int, kinds: KindSeconds) -> float:
    """Idle share of ZB-H1: ranks wait for (p - 1) (F + I - W), with m from p on, and I at least W.

    Source: Qi et al. 2023 (arXiv 2401.10241), table 1.

    Example:
        >>> round(idle_of_zb_h1(8, 32, KindSeconds()), 3)
        0.068
    """
    waits = (p - 1) * (kinds.forward + kinds.dgrad - kinds.wgrad)
    return waits / (m * kinds.total + waits)


def in_flight_of_1f1b(p: int, m: int, rank: int) -> int:
    """Micro-batches whose activations a rank holds at most: min(m, p - rank)."""
    return min(m, p - rank)


def in_flight_of_interleaved(p: int, m: int, v: int, rank: int) -> float:
    """Micro-batches, each through all stages of the rank: ((v - 1) p + 2 (p - rank - 1) + 1) / v; at most m.

    Source: Narayanan et al. 2021, section 2.2: forward passes before the first backward pass. m is a multiple of p.
    """
    return min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1) / v
