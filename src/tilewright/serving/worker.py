"""One thread that draws for all requests: the answers that have a place take their next tokens in one pass.

At most `concurrent` answers are being drawn, at most `waiting` wait; more are refused. They begin in the order in which
they came, each where a place and memory for it are free. One that is given up or out of time makes room at its next
token.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tilewright.core.log import get_logger
from tilewright.serving.answer import AnswerPiece, AnswerStream

Emit = Callable[[AnswerPiece | None, BaseException | None], None]
"""Takes a piece; (None, None) at the end, (None, error) where the draw failed or was stopped."""


class BusyError(Exception):
    """All places are taken, or the time ended before there was one."""


class OutOfTimeError(Exception):
    """The request's time ended while its answer was drawn."""


class StoppedError(Exception):
    """The server ends."""


class Draws(Protocol):
    """The drawer of answers; see `batch.Batch`."""

    @property
    def most_positions(self) -> int | None: ...

    def begin(self, answer: AnswerStream) -> bool: ...

    def step(self, answers: Sequence[AnswerStream]) -> list[tuple[AnswerStream, AnswerPiece | BaseException]]: ...

    def end(self, answer: AnswerStream) -> None: ...


class Job:
    """One answer. `emit` is called in the worker's thread.

    Args:
        answer: drawn in the worker's thread.
        emit: takes its pieces.
        seconds: from now until the answer must be there.
    """

    def __init__(self, answer: AnswerStream, emit: Emit, seconds: float):
        self.answer, self.emit = answer, emit
        self.deadline = time.monotonic() + seconds
        self.cancelled = False
        self.begun = False
        """True where a piece of it was drawn."""

    def cancel(self) -> None:
        """Cancel a job of the worker: its client does not wait for it any more."""
        self.cancelled = True


class Worker:
    """The thread; a context manager.

    Args:
        draws: the answers.
        concurrent: answers that are drawn at the same time.
        waiting: answers that may wait beside them.
    """

    def __init__(self, draws: Draws, concurrent: int, waiting: int):
        self.concurrent, self.waiting = concurrent, waiting
        self.draws = draws
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

    def submit(self, *jobs: Job) -> None:
        """Submit a job to the worker: all answers of a request are drawn as soon as there are places for all of them.

        Raises:
            BusyError: too many wait already.
            StoppedError: the worker ends.
        """
        with self._changed:
            if self._stopping:
                raise StoppedError
            self._queue = deque(one for one in self._queue if not one.cancelled)
            if len(self._active) + len(self._queue) + len(jobs) > self.concurrent + self.waiting:
                raise BusyError
            self._queue.extend(jobs)
            self._changed.notify()

    def load(self) -> tuple[int, int]:
        """Load of the worker: answers that are drawn, and answers that wait."""
        with self._changed:
            return len(self._active), len(self._queue)

    def _run(self) -> None:
        while self._admit():
            self._step()
        for job in [*self._active, *self._queue]:
            job.emit(None, StoppedError())

    def _admit(self) -> bool:
        """Admit jobs to the worker's free places, and wait if there is nothing to do; False at the end."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                self._queue, late = (
                    deque(job for job in self._queue if not job.cancelled and now <= job.deadline),
                    [job for job in self._queue if not job.cancelled and now > job.deadline],
                )
                for job in late:
                    job.emit(None, BusyError())
                while self._queue and len(self._active) < self.concurrent and self.draws.begin(self._queue[0].answer):
                    self._active.append(self._queue.popleft())
                if self._active:
                    return True
                self._changed.wait()
            return False

    def _step(self) -> None:
        """Run one step of the worker: draw a token of each answer, and remove those that have ended."""
        ended = [job for job in self._active if self._left(job)]
        drawn = {job.answer: job for job in self._active if job not in ended}
        for answer, outcome in self.draws.step(list(drawn)):
            job = drawn[answer]
            job.begun = True
            if not isinstance(outcome, AnswerPiece):
                get_logger(__name__).error("an answer failed", exc_info=outcome)
                job.emit(None, outcome)
                ended.append(job)
                continue
            job.emit(outcome, None)
            if answer.finish_reason is not None:
                job.emit(None, None)
                ended.append(job)
        for job in ended:
            self.draws.end(job.answer)
        if ended:
            with self._changed:
                self._active = [job for job in self._active if job not in ended]

    def _left(self, job: Job) -> bool:
        """True where a worker's job has left: it is given up or out of time."""
        if job.cancelled:
            return True
        if time.monotonic() > job.deadline:
            job.emit(None, OutOfTimeError() if job.begun else BusyError())
            return True
        return False
