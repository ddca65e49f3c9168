"""The worker: turns, places, memory, and each way in which a request ends."""

import itertools
import queue

import pytest

from tilewright.serving.answer import AnswerPiece
from tilewright.serving.worker import BusyError, Job, OutOfTimeError, StoppedError, Worker


class Pieces:
    """An answer that is an iterator of texts."""

    def __init__(self, texts, size=1):
        self.texts, self.size, self.finish_reason = iter(texts), size, None


class Turns:
    """Draws a text of each answer, or its error; there is room for answers of `room` in all."""

    most_positions = None

    def __init__(self, room=100):
        self.room, self.begun, self.passes = room, [], []

    def begin(self, answer):
        if self.begun and sum(one.size for one in self.begun) + answer.size > self.room:
            return False
        self.begun.append(answer)
        return True

    def end(self, answer):
        self.begun.remove(answer)

    def step(self, answers):
        self.passes.append(len(answers))
        return [(answer, self.draw(answer)) for answer in answers]

    def draw(self, answer):
        try:
            return AnswerPiece(next(answer.texts))
        except StopIteration:
            answer.finish_reason = "stop"
            return AnswerPiece("")
        except ArithmeticError as error:
            return error


def emitted():
    """A queue, and what puts pieces and errors into it."""
    found = queue.Queue()
    return found, lambda piece, error: found.put((piece, error))


def whole(found):
    """The pieces up to the end, and the error that was the end."""
    pieces = []
    while True:
        piece, error = found.get(timeout=100)
        if piece is None:
            return [text for text in pieces if text], error
        pieces.append(piece.text)


def test_answers_take_their_tokens_in_one_pass():
    first, second = emitted(), emitted()
    turns = Turns()
    worker = Worker(turns, 2, 0)
    worker.submit(Job(Pieces("abcde"), first[1], 60), Job(Pieces("vwxyz"), second[1], 60))
    with worker:
        assert whole(first[0]) == (list("abcde"), None)
        assert whole(second[0]) == (list("vwxyz"), None)
    assert turns.passes == [2] * 6
    assert turns.begun == []


def test_one_that_waits_too_long_is_refused_and_one_too_many_at_once():
    endless, late = emitted(), emitted()
    with Worker(Turns(), 1, 1) as worker:
        first = Job(Pieces(itertools.repeat("")), endless[1], 60)
        worker.submit(first)
        worker.submit(Job(Pieces(["never"]), late[1], 0.1))
        with pytest.raises(BusyError):
            worker.submit(Job(Pieces(()), late[1], 60))
        assert isinstance(whole(late[0])[1], BusyError)
        with pytest.raises(BusyError):  # both or none
            worker.submit(Job(Pieces(()), late[1], 60), Job(Pieces(()), late[1], 60))
        assert worker.load() == (1, 0)
        first.cancel()


def test_one_that_has_no_memory_waits_and_keeps_its_turn():
    found = [emitted() for _ in range(3)]
    turns = Turns(room=10)
    worker = Worker(turns, 3, 0)
    for (_, emit), size in zip(found, (6, 6, 1), strict=True):
        worker.submit(Job(Pieces("ab", size), emit, 60))
    with worker:
        for pieces, _ in found:
            assert whole(pieces) == (["a", "b"], None)
    assert turns.passes == [1, 1, 1, 2, 2, 2]


def test_time_cancelling_a_failure_and_the_end():
    found = emitted()
    turns = Turns()
    with Worker(turns, 1, 8) as worker:
        worker.submit(Job(Pieces(itertools.repeat("x")), found[1], 0.1))
        pieces, error = whole(found[0])
        assert pieces
        assert isinstance(error, OutOfTimeError)

        def broken():
            yield "one"
            raise ArithmeticError("a failure of the model")

        worker.submit(Job(Pieces(broken()), found[1], 60))
        pieces, error = whole(found[0])
        assert (pieces, type(error)) == (["one"], ArithmeticError)
        worker.submit(Job(Pieces(["two"]), found[1], 60))  # the others go on
        assert whole(found[0]) == (["two"], None)
        cancelled = Job(Pieces(itertools.repeat("")), emitted()[1], 60)
        worker.submit(cancelled)
        cancelled.cancel()
        worker.submit(Job(Pieces(["three"]), found[1], 60))
        assert whole(found[0]) == (["three"], None)
        worker.submit(Job(Pieces(itertools.repeat("")), found[1], 60))
    assert isinstance(whole(found[0])[1], StoppedError)
    with pytest.raises(StoppedError):
        worker.submit(Job(Pieces(()), found[1], 60))
