"""Modules of ours run by `python -m`: results, errors and what they print come back."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tilewright.core import env
from tilewright.core.errors import DataError, HardwareError
from tilewright.core.log import get_logger
from tilewright.core.subprocess_call import ModuleWorker, answer, answer_error, call_module

NAME = "tests.core.test_subprocess_call"


class OwnError(DataError):
    """As a module below `core` may have."""


def act(what, **rest):
    """What the child does."""
    if what == "return":
        return rest | {"pid": os.getpid()}
    if what == "raise_own":
        raise OwnError("what", got="got", need="need", try_="try")
    if what == "answer_and_end":
        answer_error(OwnError("what", got="got", need="need", try_="try"))
        os._exit(1)
    if what == "raise":
        raise DataError("what", got="got", need="need", try_="try", where="where")
    if what == "fail":
        raise OSError(errno.ENOSPC, "No space left on device")
    if what == "exit":
        sys.exit(0)
    if what == "stay":
        time.sleep(600)
    if what == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    print("one line\nanother")
    get_logger("child").warning("warned of %s", "it")
    get_logger("child").info("not asked for")
    return None


@pytest.fixture(autouse=True)
def tests_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_a_result_comes_back_from_another_process():
    found = call_module(NAME, what="return", text="\u00e9\n{" * 2**12, numbers=[1, 0.1, None])
    assert found.pop("pid") != os.getpid()
    assert found == {"text": "\u00e9\n{" * 2**12, "numbers": [1, 0.1, None]}


def test_errors_of_users_come_back_whole():
    with pytest.raises(DataError) as caught:
        call_module(NAME, what="raise")
    with pytest.raises(DataError) as expected:
        act("raise")
    assert caught.value.problems == expected.value.problems
    assert str(caught.value) == "what\n  where  where\n  got    got\n  need   need\n  try    try"


def test_an_error_of_a_class_of_its_own_comes_back_as_the_nearest_public_one():
    with pytest.raises(DataError) as caught:
        call_module(NAME, what="raise_own")
    assert type(caught.value) is DataError


def test_an_error_in_words_counts_however_the_process_ends():
    with pytest.raises(DataError, match="what"):
        call_module(NAME, what="answer_and_end")


def test_the_process_is_given_out():
    found = []
    call_module(NAME, on_start=found.append, what="return", text="", numbers=[])
    assert [child.returncode for child in found] == [0]


def test_other_errors_leave_their_traceback(capfd):
    with pytest.raises(AssertionError, match="exit code 1"):
        call_module(NAME, what="fail")
    assert "No space left on device" in capfd.readouterr().err


def test_a_killed_process_is_reported():
    with pytest.raises(HardwareError) as caught:
        call_module(NAME, what="end")
    (problem,) = caught.value.problems
    assert "SIGKILL" in problem.got
    assert all((problem.what, problem.need, problem.try_, problem.where))


def test_a_worker_stays_between_calls_and_ends_with_its_owner():
    worker = ModuleWorker(NAME)
    first = worker.call(what="return", number=1)
    with pytest.raises(DataError):
        worker.call(what="raise")
    assert worker.call(what="return", number=1) == first
    child = worker._child
    assert child.poll() is None
    del worker
    assert child.returncode == 0


def test_a_worker_that_is_killed_says_so_from_then_on():
    worker = ModuleWorker(NAME)
    worker.call(what="return")
    for what in ("end", "return"):
        with pytest.raises(HardwareError, match=r"signal 9 \(SIGKILL\)"):
            worker.call(what=what)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_the_one_that_called_it(ending):
    """A run that is killed while it prepares data left that work behind: it took a core for minutes."""
    calls = f"from {call_module.__module__} import call_module as call; call"
    call = f"({NAME!r}, on_start=lambda child: print(child.pid, flush=True), what='stay')"
    ours = env.importing(Path(env.__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", calls + call], env=ours, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        called = psutil.Process(int(caller.stdout.readline()))
        caller.send_signal(ending)
    try:
        called.wait(60)
    finally:
        if called.is_running():
            called.kill()


def test_no_answer_is_a_bug():
    with pytest.raises(AssertionError, match="exit code 0"):
        call_module(NAME, what="exit")


def test_lines_and_logs_come_through(capfd, caplog):
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert call_module(NAME, what="speak") is None
    out, err = capfd.readouterr()
    assert out == "one line\nanother\n"
    assert "warned of it" in err
    assert "not asked for" not in err


if __name__ == "__main__":
    answer(act)
