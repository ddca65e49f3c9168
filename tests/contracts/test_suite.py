"""The suite depends on neither a terminal nor on what else the machine does."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests import conftest, ranks, schedule

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


def test_tests_of_ranks_are_one_part_of_the_schedule_which_comes_first():
    """Two test processes with ranks would wait for each other."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    starts = {file for file in files if re.search(r"\bon_ranks\w*\(|\bended\(phases", (ROOT / file).read_text())}
    assert len(starts) > 30
    assert {file for file in files if schedule.part_of(file) == schedule.RANKS} >= starts
    assert schedule.part_of("README.md") == "README.md", "a page of examples is a file of its own"
    turns = [
        schedule.turn_of(part) for part in (schedule.RANKS, "tests/training/test_loop.py", "tests/core/test_log.py")
    ]
    assert turns == sorted(set(turns))


def test_no_process_measures_the_machine():
    """Neither this one nor one that it starts, whatever the user's cache has."""
    code = "from tilewright.planner.machine import ceilings; from tilewright.core.hardware import detect_machine; "
    code += "import torch; torch.set_num_threads(1); print(ceilings.known(detect_machine('cpu')).key)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "fixed\n"
