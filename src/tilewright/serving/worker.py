"""One thread that draws for all requests in turn, a token of each: fair, and the model runs for one at a time.

At most `concurrent` answers are being drawn, at most `waiting` wait; more are refused. A request that is given up or
out of time makes room at its next token.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from tilewright.core.log import get_logger

Emit = Callable[[str | None, BaseException | None], None]
"""Takes a piece; (None, None) at the end, (None, error) where the draw failed or was stopped."""


class BusyError(Exception):
    """All places are taken, or the time ended before there was one."""


class OutOfTimeError(Exception):
    """The request's time ended while its answer was drawn."""


class StoppedError(Exception):
    """The server ends."""


class Job:
    """One answer. `emit` is called in the worker's thread.

    Args:
        pieces: drawn one by one in the worker's thread.
        emit: takes them.
        seconds: from now until the answer must be there.
    """

    def __init__(self, pieces: Iterator[str], emit: Emit, seconds: float):
        self.pieces, self.emit = pieces, emit
        self.deadline = time.monotonic() + seconds
        self.cancelled = False
        self.begun = False
        """Whether a piece of it was drawn."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True


class Worker:
    """The thread; a context manager.

    Args:
        concurrent: answers that are drawn at the same time.
        waiting: requests that may wait beside them.
    """

    def __init__(self, concurrent: int, waiting: int):
        self.concurrent, self.waiting = concurrent, waiting
        self._changed = threading.Condition()
        self._active: list[Job] = []
        self._queue: deque[Job] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tilewright-serve", daemon=True)

    def __enter__(self) -> "Worker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def submit(self, job: Job) -> None:
        """Draw an answer as soon as there is a place.

        Raises:
            BusyError: too many wait already.
            StoppedError: the worker ends.
        """
        with self._changed:
            if self._stopping:
                raise StoppedError
            self._queue = deque(one for one in self._queue if not one.cancelled)
            if len(self._active) + len(self._queue) >= self.concurrent + self.waiting:
                raise BusyError
            self._queue.append(job)
            self._changed.notify()

    def load(self) -> tuple[int, int]:
        """Answers that are drawn, and requests that wait."""
        with self._changed:
            return len(self._active), len(self._queue)

    def _run(self) -> None:
        while self._admit():
            for job in list(self._active):
                if not self._step(job):
                    with self._changed:
                        self._active.remove(job)
        for job in [*self._active, *self._queue]:
            job.emit(None, StoppedError())

    def _admit(self) -> bool:
        """Fill the free places, and wait where nothing is to do; False at the end."""
        with self._changed:
            while not self._stopping:
                late = [job for job in self._queue if job.cancelled or time.monotonic() > job.deadline]
                for job in late:
                    self._queue.remove(job)
                    job.emit(None, BusyError())
                while self._queue and len(self._active) < self.concurrent:
                    self._active.append(self._queue.popleft())
                if self._active:
                    return True
                self._changed.wait()
            return False

    def _step(self, job: Job) -> bool:
        """Draw one piece; whether there may be more."""
        if job.cancelled:
            return False
        if time.monotonic() > job.deadline:
            job.emit(None, OutOfTimeError() if job.begun else BusyError())
            return False
        job.begun = True
        try:
            piece = next(job.pieces, None)
        except Exception as error:  # noqa: BLE001  one request's failure is handed to it, and must not end the others
            get_logger(__name__).exception("an answer failed")
            job.emit(None, error)
            return False
        job.emit(piece, None)
        return piece is not None
