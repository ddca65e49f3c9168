"""Shows how far a preparation is: a bar on a terminal, elsewhere a line where it takes long. Times each phase."""

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from tilewright.core.log import ROOT, Pulse, get_logger, say

log = logging.getLogger(__name__)


class ProgressBar:
    """A progress bar: `phase` starts a phase of `total` units, `advance` counts some of them. A context manager.

    `seconds` maps each phase to its wall time.
    """

    def __init__(self, title: str):
        self.seconds: dict[str, float] = {}
        self._title, self._bar, self._task = title, None, None
        self._name, self._started = "", 0.0
        self._done, self._total = 0.0, None
        quiet = get_logger(ROOT).level >= logging.ERROR
        self._pulse = Pulse(partial(say, error=True), on=not sys.stderr.isatty() and not quiet)

    def __enter__(self) -> "ProgressBar":
        self._pulse.__enter__()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def phase(self, name: str, total: float | None = None) -> None:
        """Begin a phase of progress: end the one before, if any, and start `name`. `total` None: of unknown length."""
        self._finish()
        self._name, self._started = name, time.perf_counter()
        self._done, self._total = 0.0, total
        self._pulse.at(self._words, said=log.isEnabledFor(logging.INFO))
        if self._bar:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(f"{self._title}: {name}", total=total)
        log.info("%s: %s", self._title, name)

    def _words(self) -> str:
        """Describe the progress in words: the present work, and how much of it is done."""
        share = f", {self._done / self._total:.0%}" if self._total else ""
        return f"{self._title}: {self._name}{share}" if self._name else ""

    def advance(self, amount: float) -> None:
        """Count `amount` units of the present phase as done, on the progress bar."""
        self._done += amount
        if self._bar and self._task is not None:
            self._bar.advance(self._task, amount)

    def _finish(self) -> None:
        if self._name:
            self.seconds[self._name] = round(time.perf_counter() - self._started, 3)
            self._name = ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._finish()
        self._pulse.__exit__()
        if self._bar:
            self._bar.stop()


def timed(title: str, build: Callable[..., None], *args: object, **kwargs: object) -> dict[str, float]:
    """Run `build` under a progress bar, passed to it as `progress`; also the seconds of its phases."""
    with ProgressBar(title) as progress:
        build(*args, progress=progress, **kwargs)
    return progress.seconds
