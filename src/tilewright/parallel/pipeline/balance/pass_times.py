"""Seconds of each pass of a rank's stages: two readings of the clock; on CUDA two events, read after the step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from tilewright.parallel.pipeline.balance.replay import Action, Pass, StepPart


@dataclass(frozen=True)
class _Mark:
    action: str
    stage: int | None
    microbatch: int
    begin: Any
    end: Any


class PassClock:
    """Notes the passes of a step, and what comes behind them.

    Args:
        device: that computes them.
        read: another clock, of seconds: that of the processor, say, where ranks share cores.

    Example:
        >>> clock = PassClock(torch.device("cpu"))
        >>> clock.begin()
        >>> with clock.measure("forward", stage=0, number=0):
        ...     pass
        >>> clock.waited_s() >= 0
        True
        >>> clock.until_now("gradients")
        >>> passes, parts = clock.taken()
        >>> [(one.action, one.stage, one.microbatch) for one in passes], [part.name for part in parts]
        ([('forward', 0, 0)], ['gradients'])
    """

    def __init__(self, device: torch.device, read: Callable[[], float] = time.perf_counter) -> None:
        self._read: Callable[[], Any] = _recorded if device.type == "cuda" else read
        self._marks: list[_Mark] = []
        self._began: Any = 0.0

    def begin(self) -> None:
        """Begin the clock of passes with a step; what was noted before is dropped. Ranks call it as they leave a
        collective: their clocks are compared by it."""
        self._marks.clear()
        self._began = self._read()

    @contextmanager
    def measure(self, action: str, stage: int | None = None, number: int = 0) -> Iterator[None]:
        """Measure a pass of a stage by the clock; around another part of the step where there is no stage."""
        began = self._read()
        yield
        self._marks.append(_Mark(action, stage, number, began, self._read()))

    def waited_s(self) -> float | None:
        """Waited seconds by the clock of passes since `begin` before and between the passes so far: for what other
        stages send. None on CUDA, where streams wait, which the host does not see."""
        if isinstance(self._began, torch.cuda.Event):
            return None
        ends = [self._began, *(mark.end for mark in self._marks)]
        return sum(mark.begin - end for mark, end in zip(self._marks, ends, strict=False))

    def until_now(self, part: str) -> None:
        """Count all time since the last pass by the clock as this part of the step."""
        began = self._marks[-1].end if self._marks else self._began
        self._marks.append(_Mark(part, None, 0, began, self._read()))

    def taken(self) -> tuple[list[Pass], list[StepPart]]:
        """Passes and other parts by the clock since `begin`, in their order, once. On CUDA it waits for the last of
        them."""
        marks = self._marks[:]
        self._marks.clear()
        if marks and isinstance(marks[-1].end, torch.cuda.Event):
            marks[-1].end.synchronize()
        passes, parts = [], []
        for mark in marks:
            begin_s, seconds = _between(self._began, mark.begin), _between(mark.begin, mark.end)
            if mark.stage is None:
                parts.append(StepPart(mark.action, begin_s, seconds))
            else:
                passes.append(Pass(cast(Action, mark.action), mark.stage, mark.microbatch, begin_s, seconds))
        return passes, parts


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    return begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin
