"""Functions that take turns in one process, so that what disturbs the machine disturbs all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import spread


def in_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, *, warm_ups: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of each function, round by round.

    Args:
        runs: the functions by name.
        rounds: that count.
        warm_ups: rounds before those.
        clock: `time.process_time` for seconds of the processor.

    Example:
        >>> list(in_turns({"ours": int, "theirs": int}, 3)), len(in_turns({"ours": int}, 3)["ours"])
        (['ours', 'theirs'], 3)
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm_ups + rounds):
        for name, run in runs.items():
            began = clock()
            run()
            if number >= warm_ups:
                seconds[name].append(clock() - began)
    return seconds


def ratio(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Spread of one over the other, turn by turn.

    Example:
        >>> ratio([3.0, 8.0], [1.0, 4.0])["samples"]
        [3.0, 2.0]
    """
    return spread([a / b for a, b in zip(one, other, strict=True)])
