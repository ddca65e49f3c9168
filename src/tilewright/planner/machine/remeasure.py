"""Rates of this machine measured again beside the steps of a run, where known ones promise far more or less.

The known rates may be of a busy hour, or of another machine with the same name. The run is held against what is
measured now; the cache learns of it: a rate that was reached once is this machine's, and what a quiet machine does not
reach any more is not.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.core.hardware import Machine
from tilewright.planner.machine.ceilings import Ceilings, keep, one_round

LESS = 1.25
"""Known rate over the one measured again, from which on the known one is not this machine's any more."""
_RATES = ("matmul", "attention", "loss", "elementwise", "adam", "bandwidth", "exp")
"""Fields in which more is faster; in `start` it is slower."""


def measured_again(
    machine: Machine,
    known: Ceilings,
    formats: Collection[str],
    *,
    cache_dir: str | Path | None = None,
    progress: Callable[[str], None],
) -> Ceilings:
    """Measure the rates of the formats again, which takes some seconds: the known rates with them; the cache learns of
    them.

    Args:
        machine: the one at hand.
        known: its rates, each thread's share of a core counted.
        formats: of matmuls, attention, loss and element-wise work that are wanted: `ceilings.DTYPES`.
        cache_dir: see `ceilings.measure`.
        progress: called with a line of text before each measurement.

    Raises:
        HardwareError: the process that measures was killed.
    """
    alone = known.slowed(1 / machine.core_share)
    found = replaced(alone, one_round(machine, formats, progress))
    keep(machine, learned(alone, found), cache_dir)
    return found.slowed(machine.core_share)


def reached(
    machine: Machine, known: Ceilings, formats: Collection[str], times: float, cache_dir: str | Path | None = None
) -> Ceilings:
    """Correct remeasured rates of a machine by what a run's steps reached: matmuls so many times as fast. The cache
    learns of it.

    Args:
        machine: the one at hand.
        known: its rates, each thread's share of a core counted.
        formats: of the matmuls.
        times: more than 1.
        cache_dir: see `ceilings.measure`.
    """
    faster = {name: {width: times * rate for width, rate in known.matmul[name].items()} for name in formats}
    found = replace(known, matmul={**known.matmul, **faster})
    keep(machine, found.slowed(1 / machine.core_share), cache_dir)
    return found


def replaced(known: Ceilings, fresh: Ceilings) -> Ceilings:
    """Known rates of the machine with those in their place that were remeasured."""
    return _of_both(known, fresh, lambda old, new: new, lambda old, new: new, fresh)


def learned(known: Ceilings, fresh: Ceilings) -> Ceilings:
    """Merge fresh rates into cached ones: of each rate the higher one, or the fresh one if the machine was quiet and is
    far slower. If it is slower and busy, the rate stays unknown: it is measured again after an hour, as after each
    measurement of a busy machine.

    Example:
        >>> from tilewright.planner.machine.gpu_specs import find_published
        >>> slow = find_published("h100").ceilings()
        >>> fast = replace(slow, bandwidth=2 * slow.bandwidth)
        >>> [learned(*pair).bandwidth / slow.bandwidth for pair in ((slow, fast), (fast, slow))]
        [2.0, 1.0]
    """
    slower = fresh.quiet

    def rate(old: float, new: float) -> float:
        return new if new > old or (slower and old > LESS * new) else old

    def seconds(old: float, new: float) -> float:
        return new if new < old or (slower and new > LESS * old) else old

    lost = any(old > LESS * new for name in _RATES for old, new in _pairs(getattr(known, name), getattr(fresh, name)))
    return _of_both(known, fresh, rate, seconds, fresh if lost else known)


def _of_both(
    known: Ceilings,
    fresh: Ceilings,
    rate: Callable[[float, float], float],
    seconds: Callable[[float, float], float],
    load: Ceilings,
) -> Ceilings:
    """Each rate that both measurements have, first and again, as the functions say; what was known of the machine's
    load as `load` has it."""
    picked = {name: _each(getattr(known, name), getattr(fresh, name), rate) for name in _RATES}
    start = _each(known.start, fresh.start, seconds)
    return replace(known, **picked, start=start, busy=load.busy, others=load.others)


def _each(known: Any, fresh: Any, pick: Callable[[float, float], float]) -> Any:
    if not isinstance(known, Mapping):
        return pick(known, fresh)
    return {name: _each(old, fresh[name], pick) if name in fresh else old for name, old in known.items()}


def _pairs(known: Any, fresh: Any) -> list[tuple[float, float]]:
    """Pairs of a rate as it was measured first and again."""
    if not isinstance(known, Mapping):
        return [(known, fresh)]
    return [pair for name, old in known.items() if name in fresh for pair in _pairs(old, fresh[name])]
