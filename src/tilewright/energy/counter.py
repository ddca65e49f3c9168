"""A counter of joules, and what may be believed of two of its readings.

Counters of processors hold 32 bits and begin again at 0 within minutes; others are set back when a driver is loaded,
stand still in a virtual machine, or go away with a device. `Tally` counts what can only be energy: of an interval that
cannot be told, nothing is counted, and the part says so.
"""

from dataclasses import dataclass, field
from typing import Protocol

MOST_WATTS = 5_000.0
"""Of one part. More is no power but a counter that was set, or ran backwards just before it would have wrapped."""
STILL_S, STILL_READINGS = 10.0, 5
"""So long, and over so many readings, a counter of a part that runs does not keep its value: the part idles at watts,
and counters step in millijoules or less."""
MOST_RESETS = 3
"""In a row. A counter that is set back more often is none."""


@dataclass(frozen=True)
class MeteredPart:
    """A part of a machine whose energy is counted.

    `name`: unique on the machine. `covers`: in words. `how`: what counts. `sampled`: the power is measured now and
    then, and taken as constant in between. `board`: a GPU with its memory.
    """

    name: str
    covers: str
    how: str
    sampled: bool = False
    board: bool = False


class Counter(Protocol):
    """Joules since some time in the past.

    `wraps_at`: joules after which it begins again at 0; None: it does not.
    """

    part: MeteredPart
    wraps_at: float | None

    def read(self, now: float) -> float:
        """Read a counter in joules.

        Args:
            now: seconds of a clock that only goes forward.

        Raises:
            OSError: the counter cannot be read any more.
        """
        ...


@dataclass
class Tally:
    """Energy counted since the first reading, over wrap-around."""

    counter: Counter
    gone: str = ""
    """Why nothing more is counted; empty while it is."""
    resets: int = 0
    """Intervals of which nothing was counted, since the counter had been set."""
    _last: float = 0.0
    _at: float = 0.0
    _moved_at: float = 0.0
    _still: int = 0
    _in_a_row: int = field(default=0)

    def begin(self, now: float) -> None:
        """Begin with a counter: the first reading. One that cannot be read is gone."""
        self._at = self._moved_at = now
        try:
            self._last = self.counter.read(now)
        except OSError as error:
            self.gone = _said(error)

    def advance(self, now: float) -> float:
        """Advance an energy counter and return the joules since the reading before; 0 if they cannot be known.

        Args:
            now: seconds, later than at the reading before.
        """
        if self.gone or now <= self._at:
            return 0.0
        try:
            value = self.counter.read(now)
        except OSError as error:
            self.gone = _said(error)
            return 0.0
        joules = _between(self._last, value, self.counter.wraps_at)
        believed = joules is not None and joules <= MOST_WATTS * (now - self._at)
        moved = value != self._last
        self._last, self._at = value, now
        if not believed:
            self._not_believed(now)
            return 0.0
        if not moved:
            self._stands_still(now)
            return 0.0
        self._moved_at, self._still, self._in_a_row = now, 0, 0
        return joules or 0.0

    def _not_believed(self, now: float) -> None:
        self.resets += 1
        self._in_a_row += 1
        self._moved_at, self._still = now, 0
        if self._in_a_row >= MOST_RESETS:
            self.gone = "the counter runs backwards or jumps"

    def _stands_still(self, now: float) -> None:
        self._still += 1
        if self._still >= STILL_READINGS and now - self._moved_at >= STILL_S:
            self.gone = f"the counter stood still for {now - self._moved_at:.0f} s"


def _between(before: float, after: float, wraps_at: float | None) -> float | None:
    """Joules between two readings of an energy counter; None if it went back and does not wrap.

    Example:
        >>> _between(10.0, 12.5, None), _between(262_000.0, 56.0, 262_144.0), _between(10.0, 1.0, None)
        (2.5, 200.0, None)
    """
    if after >= before:
        return after - before
    return None if wraps_at is None else after + wraps_at - before


def _said(error: OSError) -> str:
    return f"the counter cannot be read any more: {error.strerror or error}"
