"""Joules by what a run does: counters are read by a thread once a second, and where one phase ends and another begins.

Phases shorter than `LEAST_S` are not read apart: what was counted over several of them is shared out by their seconds.
No figure is made up. What has no counter is not in the sum, and `EnergyUse.to_json` says which parts are.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tilewright.energy.counter import Counter, MeteredPart, Tally

EVERY_S, SAMPLED_EVERY_S = 1.0, 0.1
"""Between two readings: of counters, and of power that is sampled. A 32-bit counter wraps after minutes."""
LEAST_S = 0.05
"""Counters step every millisecond; the edges of a shorter reading would be a few percent of it."""
START = "start"


Sums = defaultdict[str, float]
"""By phase; 0 of those without an entry."""


def _no_sums() -> Sums:
    return defaultdict(float)


@dataclass
class EnergyUse:
    """Energy by phase; in energy.json, so that it adds up over resumes."""

    joules: Sums = field(default_factory=_no_sums)
    seconds: Sums = field(default_factory=_no_sums)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: what it covers, what counts, joules, and what was wrong with it."""

    @property
    def total_j(self) -> float:
        """Metered joules of all phases."""
        return sum(self.joules.values())

    def to_json(self) -> dict[str, Any]:
        """The metered energy in JSON types; without joules where nothing is counted."""
        return {
            "joules": {phase: round(value, 6) for phase, value in self.joules.items()} if self.parts else {},
            "seconds": {phase: round(value, 6) for phase, value in self.seconds.items()},
            "parts": [{"name": name, **part} for name, part in sorted(self.parts.items())],
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "EnergyUse":
        """Metered energy from the result of `to_json`."""
        parts = {part["name"]: {key: part[key] for key in part if key != "name"} for part in table["parts"]}
        return cls(_sum(table["joules"], {}), _sum(table["seconds"], {}), parts)

    def plus(self, other: "EnergyUse") -> "EnergyUse":
        """The sum of the metered energy of two machines, or of two processes one after the other. A part of both is
        one."""
        parts = {name: dict(part) for name, part in self.parts.items()}
        for name, part in other.parts.items():
            before = parts.get(name)
            parts[name] = dict(part) if before is None else part | _both(before, part)
        return EnergyUse(_sum(self.joules, other.joules), _sum(self.seconds, other.seconds), parts)


class EnergyMeter:
    """Reads counters during a run. A context manager: its thread ends with it.

    Args:
        counters: of this machine.
        waited_s: seconds that the run has waited for data in all, for the phase `steps`, of which that is a part of its
            own (`waiting`).
        clock: gives seconds.
        thread: read by a thread; False: only where phases change, and in `use`.
    """

    def __init__(
        self,
        counters: Sequence[Counter],
        waited_s: Callable[[], float] = lambda: 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ) -> None:
        self._tallies = [Tally(counter) for counter in counters]
        self._clock, self._waited, self._lock = clock, waited_s, threading.Lock()
        self._use, self._phase = EnergyUse(), START
        self._since = _no_sums()  # seconds by phase since the last reading
        self._waited_s = waited_s()
        now = clock()
        for tally in self._tallies:
            tally.begin(now)
            part = tally.counter.part
            told = {"covers": part.covers, "how": part.how, "board": part.board}
            self._use.parts[part.name] = told | {"joules": 0.0, "trouble": tally.gone}
        self._phase_at = self._read_at = now
        self._stop = threading.Event()
        sampled = any(tally.counter.part.sampled for tally in self._tallies)
        self._every_s = SAMPLED_EVERY_S if sampled else EVERY_S
        self._thread = threading.Thread(target=self._read_often, name="energy", daemon=True) if thread else None

    def __enter__(self) -> "EnergyMeter":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def parts(self) -> list[MeteredPart]:
        """Names of the parts of the machine that the energy meter counts."""
        return [tally.counter.part for tally in self._tallies]

    @property
    def reads(self) -> bool:
        """True while at least one counter of the energy meter is counted."""
        return any(not tally.gone for tally in self._tallies)

    def at(self, phase: str) -> None:
        """The energy meter at another phase, which begins."""
        with self._lock:
            now = self._clock()
            self._pass_time(now)
            if now - self._read_at >= LEAST_S:
                self._read(now)
            self._phase = phase

    def use(self) -> EnergyUse:
        """The energy totals that this meter has counted up to now."""
        with self._lock:
            now = self._clock()
            self._pass_time(now)
            self._read(now)
            return self._use.plus(EnergyUse())

    def _read_often(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                now = self._clock()
                self._pass_time(now)
                self._read(now)

    def _pass_time(self, now: float) -> None:
        self._since[self._phase] += now - self._phase_at
        self._phase_at = now

    def _read(self, now: float) -> None:
        """Read the energy meter: add what was counted since the last reading to the phases that there were, by their
        seconds."""
        joules = 0.0
        for tally in self._tallies:
            counted = tally.advance(now)
            joules += counted
            part = self._use.parts[tally.counter.part.name]
            part["joules"] += counted
            part["trouble"] = tally.gone or _resets(tally.resets)
        shares = self._shares()
        whole = sum(shares.values())
        for phase, seconds in shares.items():
            self._use.seconds[phase] += seconds
            self._use.joules[phase] += joules * seconds / whole if whole else 0.0
        self._since, self._read_at = _no_sums(), now

    def _shares(self) -> dict[str, float]:
        """Divide the time since the last energy reading into seconds of each phase; waiting for data is one of its
        own."""
        shares = dict(self._since)
        waited, before = self._waited(), self._waited_s
        self._waited_s = waited
        if "steps" in shares and waited > before:
            shares["waiting"] = min(waited - before, shares["steps"])
            shares["steps"] -= shares["waiting"]
        return shares


def idle_watts(
    counters: Sequence[Counter], seconds: float, sleep: Callable[[float], None] = time.sleep
) -> float | None:
    """Idle power by the meter, in watts: of the parts while this process does nothing for so long; None where no
    counter says it.

    Args:
        counters: of this machine.
        seconds: to wait.
        sleep: waits.
    """
    began = time.monotonic()
    tallies = [Tally(counter) for counter in counters]
    for tally in tallies:
        tally.begin(began)
    sleep(seconds)
    now = time.monotonic()
    joules = sum(tally.advance(now) for tally in tallies)
    return None if not joules or any(tally.gone or tally.resets for tally in tallies) else joules / (now - began)


def _resets(count: int) -> str:
    return f"set back {count} times; nothing is counted of these intervals" if count else ""


def _both(before: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    trouble = "; ".join(dict.fromkeys(filter(None, (before["trouble"], part["trouble"]))))
    return {"joules": before["joules"] + part["joules"], "trouble": trouble}


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> Sums:
    found = defaultdict(float, one)
    for name, value in other.items():
        found[name] += value
    return found
