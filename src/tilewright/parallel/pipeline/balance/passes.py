"""Seconds of each pass of a rank's stages: two readings of the clock; on CUDA two events, read after the step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch

from tilewright.parallel.pipeline.balance.replay import Action, Pass


class PassClock:
    """Notes the passes of a step.

    Args:
        device: that computes them.

    Example:
        >>> clock = PassClock(torch.device("cpu"))
        >>> clock.begin()
        >>> with clock.measure("forward", stage=0, number=0):
        ...     pass
        >>> [(one.action, one.stage, one.microbatch) for one in clock.taken()]
        [('forward', 0, 0)]
    """

    def __init__(self, device: torch.device) -> None:
        self._read: Callable[[], float | torch.cuda.Event]
        self._read = _recorded if device.type == "cuda" else time.perf_counter
        self._marks: list[tuple[str, int, int, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self._began: float | torch.cuda.Event = 0.0

    def begin(self) -> None:
        """A step begins; what was noted before is dropped."""
        self._marks.clear()
        self._began = self._read()

    @contextmanager
    def measure(self, action: str, stage: int, number: int) -> Iterator[None]:
        """Around a pass."""
        began = self._read()
        yield
        self._marks.append((action, stage, number, began, self._read()))

    def taken(self) -> list[Pass]:
        """Passes since `begin`, in their order. On CUDA it waits for the last of them."""
        if self._marks and isinstance(self._marks[-1][-1], torch.cuda.Event):
            self._marks[-1][-1].synchronize()
        return [
            Pass(cast(Action, action), stage, number, _between(self._began, begin), _between(begin, end))
            for action, stage, number, begin, end in self._marks
        ]


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1e3
    assert isinstance(end, float)
    return end - begin
