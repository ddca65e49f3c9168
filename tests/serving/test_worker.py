"""The worker: turns, places, and each way in which a request ends."""

import itertools
import queue

import pytest

from tilewright.serving.worker import BusyError, Job, OutOfTimeError, StoppedError, Worker


def emitted():
    """A queue, and what puts pieces and errors into it."""
    found = queue.Queue()
    return found, lambda piece, error: found.put((piece, error))


def whole(found):
    """The pieces up to the end, and the error that was the end."""
    pieces = []
    while True:
        piece, error = found.get(timeout=20)
        if piece is None:
            return pieces, error
        pieces.append(piece)


def test_answers_take_turns():
    drawn = []

    def pieces(name):
        for i in range(5):
            drawn.append(name)
            yield f"{name}{i}"

    first, second = emitted(), emitted()
    worker = Worker(2, 0)
    jobs = [Job(pieces("a"), first[1], 60), Job(pieces("b"), second[1], 60)]
    for job in jobs:
        worker.submit(job)
    with worker:
        assert whole(first[0]) == ([f"a{i}" for i in range(5)], None)
        assert whole(second[0]) == ([f"b{i}" for i in range(5)], None)
    assert drawn == ["a", "b"] * 5


def test_one_that_waits_too_long_is_refused_and_one_too_many_at_once():
    endless, late = emitted(), emitted()
    with Worker(1, 1) as worker:
        first = Job(itertools.repeat(""), endless[1], 60)
        worker.submit(first)
        worker.submit(Job(iter(["never"]), late[1], 0.1))
        with pytest.raises(BusyError):
            worker.submit(Job(iter(()), late[1], 60))
        assert isinstance(whole(late[0])[1], BusyError)
        first.cancel()


def test_time_cancelling_a_failure_and_the_end():
    found = emitted()
    with Worker(1, 8) as worker:
        worker.submit(Job(itertools.repeat("x"), found[1], 0.1))
        pieces, error = whole(found[0])
        assert pieces
        assert isinstance(error, OutOfTimeError)

        def broken():
            yield "one"
            raise ArithmeticError("a failure of the model")

        worker.submit(Job(broken(), found[1], 60))
        pieces, error = whole(found[0])
        assert (pieces, type(error)) == (["one"], ArithmeticError)
        worker.submit(Job(iter(["two"]), found[1], 60))  # the others go on
        assert whole(found[0]) == (["two"], None)
        cancelled = Job(itertools.repeat(""), emitted()[1], 60)
        worker.submit(cancelled)
        cancelled.cancel()
        worker.submit(Job(iter(["three"]), found[1], 60))
        assert whole(found[0]) == (["three"], None)
        worker.submit(Job(itertools.repeat(""), found[1], 60))
    assert isinstance(whole(found[0])[1], StoppedError)
    with pytest.raises(StoppedError):
        worker.submit(Job(iter(()), found[1], 60))
