"""The suite depends on neither a terminal nor on what else the machine does."""

import signal
import subprocess
import sys
from pathlib import Path

from tests import conftest, ranks

ROOT = Path(__file__).resolve().parents[2]


def test_processes_that_tests_start_can_be_interrupted_in_the_background_too():
    asks = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for `make test &` in a script
    try:
        conftest.pytest_configure()
        done = subprocess.run([sys.executable, "-S", "-c", asks], capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout == "default_int_handler\n"


def test_two_clones_and_two_users_do_not_wait_for_each_others_ranks():
    assert ranks.LOCK.is_relative_to(ROOT)
