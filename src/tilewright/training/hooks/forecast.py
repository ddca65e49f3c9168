"""What a step is expected to take: bytes and seconds as planned, corrected by what steps have measured.

forecast.restart(row_length)           # another memory plan or row length: nothing measured is of it
forecast.measure(peaks)                   # after a step
forecast.error                            # 0.05: 5 % more than expected
forecast.memory_factor *= ...             # what every later plan is multiplied by
"""

from collections.abc import Callable, Iterable

from tilewright.core.units import format_bytes
from tilewright.planner.replan import Replan, Replanner
from tilewright.training.executor.base import Executor


class Forecast:
    """Of the memory plan and row length that run now.

    Args:
        executor: whose memory plan that is.
        find_planner: gives the planner of this run, made when it is needed first; None where its model cannot be
            planned.
        known: what the memory plan that runs is expected to take with the first batch's rows, where that is known
            without a planner, which takes a second or more to be made.
    """

    def __init__(
        self, executor: Executor, find_planner: Callable[[], Replanner | None], known: Replan | None = None
    ) -> None:
        self._executor = executor
        self._find_planner = find_planner
        self._known = known
        self._planner: Replanner | None = None
        self._looked = False
        self.row_length: int | None = None
        """Tokens of the longest row; None of images, and before the first step."""
        self.expected = known
        """Before any correction; None while no planner was asked."""
        self.memory_factor = 1.0
        """Measured over planned bytes."""
        self.time_factor = 1.0
        """Measured over planned seconds. The same for all plans, so it orders none of them."""
        self.measured = 0.0
        """Highest peak in bytes of the step that was looked at last."""
        self.looks = 0
        """How often that was measured."""

    def restart(self, row_length: int | None) -> None:
        """Another memory plan or row length: nothing that was measured is of it, and nothing is expected yet."""
        self.row_length, self.expected, self.measured, self.looks = row_length, None, 0.0, 0

    def measure(self, peaks: Iterable[float]) -> None:
        """Count the peaks of a step, in bytes."""
        self.looks += 1
        self.measured = max(peaks)

    def planner(self) -> Replanner | None:
        """The planner of this run, made now if it is not there; None where the model cannot be planned."""
        if not self._looked:
            self._planner, self._looked = self._find_planner(), True
            known, self._known = self._known, None
            if self._planner is not None and known is not None and self.expected is known:
                self.expected = self._planner.predict(self._executor.memory_plan, self.row_length)
                # What was measured stays; the planner may say otherwise than who spoke before.
                self.memory_factor *= known.peak_bytes / self.expected.peak_bytes
                self.time_factor *= known.step_s / self.expected.step_s
        return self._planner

    def is_known(self) -> bool:
        """Whether anything is expected of what runs now; a planner is asked where nothing is."""
        if self.expected is None and (planner := self.planner()) is not None:
            self.expected = planner.predict(self._executor.memory_plan, self.row_length)
        return self.expected is not None

    @property
    def peak_bytes(self) -> float:
        """Replan peak of a step, corrected."""
        assert self.expected is not None, "nothing is expected yet"
        return self.memory_factor * self.expected.peak_bytes

    @property
    def step_s(self) -> float:
        """Replan seconds of a step, corrected."""
        assert self.expected is not None, "nothing is expected yet"
        return self.time_factor * self.expected.step_s

    @property
    def error(self) -> float:
        """Measured over expected bytes, less one."""
        return self.measured / self.peak_bytes - 1

    def words(self) -> str:
        """Measured and expected, for a user."""
        measured, expected = format_bytes(self.measured), format_bytes(self.peak_bytes)
        return f"{measured} measured, {expected} expected: {self.error:+.1%}"

    @property
    def factors(self) -> dict[str, float]:
        """The corrections, as planners take them."""
        return {"memory_factor": self.memory_factor, "time_factor": self.time_factor}
