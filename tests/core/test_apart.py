"""A call in a process of its own: what comes back, and what does not stay."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tilewright.core.apart import apart, here
from tilewright.core.errors import DataError, HardwareError
from tilewright.core.log import get_logger, say


def add(one, other=0):
    return one + other


def hold(number):
    """Blocks of which every hundredth lives on; what is freed between them does not leave the process."""
    blocks = [bytes(2000) for _ in range(number)]
    hold.left = blocks[::100]
    return os.getpid()


def growth():
    """Bytes by which a process grows that has `hold` called apart, and that calls it itself."""
    sizes = [psutil.Process().memory_info().rss]
    for call in (apart, here):
        call(hold, 100_000)
        sizes.append(psutil.Process().memory_info().rss)
    return sizes[1] - sizes[0], sizes[2] - sizes[1]


def wrong_data():
    raise DataError("what", got="got", need="need", try_="try", where="where")


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def end(number):
    os.kill(os.getpid(), number)


def leave():
    sys.exit(3)


def speak():
    say("said")
    get_logger("apart").warning("warned of %s", "it")
    get_logger("apart").info("not asked for")
    try:
        raise ValueError("inner")
    except ValueError:
        get_logger("apart").exception("with its trace")


def sleep_and_tell(path):
    path.write_text(str(os.getpid()))
    time.sleep(60)


def test_a_value_comes_back_from_another_process():
    assert apart(add, 2, other=3) == 5
    assert apart(hold, 10) != os.getpid()


def test_large_arguments_and_results():
    assert apart(add, b"a" * 2**22, other=b"b" * 2**22) == b"a" * 2**22 + b"b" * 2**22


def test_memory_does_not_stay():
    """In a process that is new, whatever free blocks this one has."""
    theirs, ours = apart(growth)
    assert theirs < 2**24
    assert ours > 2**25


def test_errors_come_back_whole():
    with pytest.raises(DataError) as caught:
        apart(wrong_data)
    assert caught.value.problems == _problems(wrong_data)
    assert str(caught.value) == "what\n  where  where\n  got    got\n  need   need\n  try    try"
    with pytest.raises(OSError, match="No space left") as other:
        apart(full_disk)
    assert other.value.errno == errno.ENOSPC
    assert "in full_disk" in other.value.__notes__[0], "the child's traceback"


def _problems(function):
    try:
        function()
    except DataError as error:
        return error.problems


def test_a_killed_process_is_told():
    with pytest.raises(HardwareError, match=r"ended from outside(.|\n)*test_apart.end\n(.|\n)*SIGKILL"):
        apart(end, signal.SIGKILL)


def test_a_process_that_leaves_is_a_bug():
    with pytest.raises(AssertionError, match="exit code 3"):
        apart(leave)


def test_logs_and_prints_come_through(capfd, caplog):
    with caplog.at_level(logging.WARNING, "tilewright"):
        apart(speak)
    assert capfd.readouterr().out == "said\n"
    assert [record.getMessage() for record in caplog.records] == ["warned of it", "with its trace"]
    assert "ValueError: inner" in caplog.text


def test_it_ends_with_its_parent(tmp_path):
    path = tmp_path / "pid"
    code = f"""
import pathlib, sys
sys.path[:] = {sys.path!r}
from tests.core.test_apart import sleep_and_tell
from tilewright.core.apart import apart, here
apart(sleep_and_tell, pathlib.Path({str(path)!r}))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    _wait(lambda: path.exists() and path.read_text())
    pid = int(path.read_text())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    _wait(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def _wait(what, seconds=20.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)
