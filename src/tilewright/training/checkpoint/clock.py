"""When a checkpoint is due: after so many steps, after so many minutes since the last one, or both."""

import time
from collections.abc import Callable


class CheckpointClock:
    """Asked between steps. One process decides: training has one rank (`assemble.check_one_rank`); several ranks would
    have to take the answer of one of them, since their clocks differ.

    Args:
        steps: a checkpoint is due at each multiple of this step number; 0: never for that reason.
        minutes: one is due where this many have passed since the start or the last one; 0: never for that reason.
        clock: seconds that never go back.

    Example:
        >>> now = iter((0.0, 59.0, 61.0, 62.0, 100.0))
        >>> clock = CheckpointClock(0, 1.0, clock=lambda: next(now))
        >>> clock.is_due(1), clock.is_due(2), clock.restart(), clock.is_due(3)
        (False, True, None, False)
    """

    def __init__(self, steps: int, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._seconds = 60 * minutes
        self._clock = clock
        self._last = clock()

    def is_due(self, step: int) -> bool:
        """Whether one is due after `step`."""
        if self._steps and step % self._steps == 0:
            return True
        return self._seconds > 0 and self._clock() - self._last >= self._seconds

    def restart(self) -> None:
        """A checkpoint was taken, or tried: minutes count from now."""
        self._last = self._clock()
