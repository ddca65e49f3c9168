"""The suite depends on neither a terminal nor on what else the machine does."""

import ast
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import conftest, schedule
from tests.contracts.syntax import statements
from tests.cover import covering
from tests.draws import aside, draw_from
from tests.ranks import LOCK, on_ranks
from tilewright.core.hardware import detect_machine
from tilewright.planner.machine import ceilings

ROOT = Path(__file__).resolve().parents[2]


def test_processes_that_tests_start_can_be_interrupted_in_the_background_too():
    asks = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for `make test &` in a script
    try:
        conftest.pytest_configure(SimpleNamespace(getoption={}.get))
        done = subprocess.run([sys.executable, "-S", "-c", asks], capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout == "default_int_handler\n"


def test_two_clones_and_two_users_do_not_wait_for_each_others_ranks():
    assert LOCK.is_relative_to(ROOT)


def test_tests_of_ranks_are_one_part_of_the_schedule_which_comes_first():
    """Two test processes with ranks would wait for each other."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    starts = {file for file in files if re.search(r"\bon_ranks\w*\(|\bended\(phases", (ROOT / file).read_text())}
    assert len(starts) > 30
    together = {file for file in files if schedule.part_of(file) == schedule.RANKS}
    assert together >= starts
    assert together == {file for file in files if reaches(file, ("tests.ranks", "tests.commands"))}
    assert schedule.part_of("README.md") == "README.md", "a page of examples is a file of its own"
    files = ("tests/training/test_session.py", "tests/ops/triton/test_compiled.py", "tests/core/test_log.py")
    turns = [schedule.turn_of(part) for part in (schedule.RANKS, *files)]
    assert turns == sorted(set(turns))


def frozen(rank):
    return gc.get_freeze_count(), len(gc.get_objects())


@pytest.mark.dist
def test_no_process_of_ranks_searches_imports_for_garbage():
    """A process that did would have a copy of all that the fork server has imported."""
    ((of_imports, own),) = on_ranks(1, frozen)
    assert of_imports > 100_000
    assert own < of_imports / 10


@cache
def reaches(file, wanted):
    """Whether a file imports one of these modules, or a module of tests that does."""
    found = statements(ast.parse((ROOT / file).read_text()))
    imported = [str(node.module) for node in found if isinstance(node, ast.ImportFrom) and not node.level]
    inner = [f"{name.replace('.', '/')}.py" for name in imported if name.startswith("tests.")]
    return any(name in wanted for name in imported) or any(reaches(i, wanted) for i in inner if (ROOT / i).exists())


def rates(rank):
    torch.set_num_threads(1)
    found = ceilings.known(detect_machine("cpu"))
    return found and found.key


@pytest.mark.dist
def test_no_process_measures_the_machine():
    """Neither this one, nor one that it starts, whatever the user's cache has."""
    before = torch.get_num_threads()
    assert rates(0) == "fixed"
    torch.set_num_threads(before)
    assert on_ranks(1, rates) == ["fixed"]
    asks = "import os; print(os.environ['XDG_CACHE_HOME'])"
    done = subprocess.run([sys.executable, "-S", "-c", asks], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == os.environ["XDG_CACHE_HOME"], "where those rates are"


# ---- random numbers ----


def drawn():
    return torch.rand(2).tolist(), np.random.rand(), random.random()


@pytest.fixture(scope="module", params=[0, 1])
def shared(request):
    """What several tests have is drawn as the first of them asks."""
    return request.param, drawn()


@pytest.fixture
def own():
    return drawn()


@pytest.mark.parametrize("case", [0, 1])
def test_what_a_test_draws_is_its_own(case, shared, own, request):
    """Whatever ran before it, fixtures that it shares too."""
    found = own, drawn()
    draw_from(request.node.nodeid)
    assert found == (drawn(), drawn())
    param, numbers = shared
    with aside(f"tests/contracts/test_suite.py::shared[{param}]"):
        assert drawn() == numbers
    assert own not in (found[1], numbers)


def test_what_is_drawn_aside_changes_nothing():
    draw_from("one")
    first = drawn(), drawn()
    draw_from("one")
    again = drawn()
    with aside("other"):
        assert drawn() not in first
    assert (again, drawn()) == first


ALWAYS_NEW = {"urandom", "SystemRandom", "token_bytes", "token_hex", "uuid4", "uuid1"}
NEW_WITHOUT_A_SEED = {"default_rng", "Random", "RandomState", "SeedSequence", "seed"}
"""Draws that no seed of a test reaches."""


def new_each_time(text):
    """Lines with a call that draws other numbers each time. Most files have none of the names, and are not parsed."""
    if not re.search(rf"\b({'|'.join(ALWAYS_NEW | NEW_WITHOUT_A_SEED)})\s*\(", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ALWAYS_NEW or (name in NEW_WITHOUT_A_SEED and not node.args and not node.keywords):
                yield node.lineno


def test_no_test_draws_what_cannot_be_drawn_again():
    planted = "os.urandom(4)\nnp.random.default_rng()\nrandom.Random()\ntorch.seed()\nrandom.Random(3)\n"
    assert list(new_each_time(planted)) == [1, 2, 3, 4]
    files = list((ROOT / "tests").rglob("*.py"))
    assert not [f"{file.relative_to(ROOT)}:{line}" for file in files for line in new_each_time(file.read_text())]


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (2, 8, 4, 2), (6, 5)])
@pytest.mark.parametrize("pairs", [True, False])
def test_a_sample_of_a_product_has_each_value_and_each_pair(sizes, pairs):
    axes = [[(axis, value) for value in range(size)] for axis, size in enumerate(sizes)]
    cases = covering(*axes, pairs=pairs)
    assert [tuple(case.values) for case in cases] == list(itertools.product(*axes)), "the rest is there, and slow"
    kept = [case.values for case in cases if not case.marks]
    parts = min(2, len(sizes)) if pairs else 1
    wanted = {part for case in cases for part in itertools.combinations(case.values, parts)}
    assert {part for case in kept for part in itertools.combinations(case, parts)} == wanted
    assert len(kept) <= 2 * np.prod(sorted(sizes)[-parts:])
    assert covering(*axes, pairs=pairs) == cases, "and the same each time"
