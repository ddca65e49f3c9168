"""What a test process sets once: Triton's interpreter, hypothesis, garbage, threads; what each test draws.

Triton's interpreter runs kernels on the CPU. Its switch must be set before triton is imported, which happens while
other tests are collected (by transformers and torch's compiler): so it stands here, at the top.
"""

import gc
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Each process that compiles would start others for Triton's compiler, which import torch and have nothing to do.
    os.environ["TORCH_WARM_POOL"] = "0"

# Property-based tests draw the same cases every time, so that a green suite stays green, and a seventh of them:
# `make test-slow` draws all, `make fuzz` new ones. No deadline: how long one example takes says more of what else runs
# on the machine.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=15)
settings.register_profile("many", derandomize=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

THREADS = torch.get_num_threads()
COMMANDS = ("cli", "compress", "docs", "serving")
"""Folders whose tests run commands in this process."""
gc.disable()  # while tests are collected: imports make few objects that are garbage


def pytest_addoption(parser):
    from tests.parts import part

    parser.addoption("--part", type=part, metavar="N/ALL", help="run one part of the tests, for example 3/10")
    parser.addoption("--seconds", metavar="FILE", help="write processor seconds of each test; see tests/seconds.py")


def pytest_collection_modifyitems(config, items):
    """Of tests that are asked for, those of `--part`."""
    part = config.getoption("part")
    if part is not None:
        config.hook.pytest_deselected(items=[item for item in items if not part.has(item.nodeid)])
        items[:] = [item for item in items if part.has(item.nodeid)]


def pytest_configure(config):
    """Tests interrupt the processes that they start. A job in the background ignores SIGINT, and its children inherit
    that: they have it as at a terminal."""
    if config.getoption("seconds") is not None:
        from tests.seconds import SecondsPlugin

        config.pluginmanager.register(SecondsPlugin(Path(config.getoption("seconds"))))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest gives its handlers to loggers that do not propagate, and torch traces each compilation where one has any.
    logging.getLogger("torch.__trace").propagate = True


def pytest_collection_finish():
    gc.freeze()  # the search that is due would visit all that was collected
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of `--dist loadfile`: `tests.schedule`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.schedule import RanksTogether  # only where tests run in several processes

    return RanksTogether(config, log)


@pytest.fixture(scope="session", autouse=True)
def _machine_is_known(tmp_path_factory):
    """No test measures the machine, nor does a process that one starts; tests of the measuring have caches of their
    own."""
    from tests.machine import cache_with_rates  # not at the top: the switch comes first

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache_with_rates(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _disk_is_not_waited_for():
    from tests.disk import not_waited_for

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", not_waited_for)
        yield


@pytest.fixture(scope="module", autouse=True)
def _commands_have_the_threads_of_tests(request):
    """A command takes a thread per core. Beside other test processes these wait for each other: the page on
    fine-tuning took 17 s of the processor, and takes 5."""
    real = torch.set_num_threads
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(Path(__file__).parent).parts[0] in COMMANDS:
            patch.setattr(torch, "set_num_threads", lambda count: real(min(count, THREADS)))
        yield


@pytest.fixture(autouse=True)
def _logger_as_it_was():
    """A command run with --quiet leaves nothing to the next test."""
    root = logging.getLogger("tilewright")
    before = root.level, root.handlers[:], root.propagate
    yield
    root.level, root.handlers[:], root.propagate = before


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays():
    """No search for garbage visits the modules and what earlier files left in caches, of the compiler above all.

    A step that finds no memory searches, and took four times as long at the end of the suite.
    """
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    from tests.draws import TEST_SEED  # not at the top: the switch comes first

    return f"TEST_SEED={TEST_SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """A fixture that several tests share draws the same, whichever asks first, and takes none of its numbers."""
    from tests.draws import aside

    if fixturedef.scope == "function":
        return (yield)
    with aside(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Random numbers of a test, with its own fixtures, are its own.

    A command sets the number of torch's threads for its process; the next test does not inherit it. Two test processes
    with two threads each on two cores wait for each other: small models took 20 times as long.
    """
    from tests.draws import draw_from

    draw_from(item.nodeid)
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)
    # Output is compared line by line, so it is not wrapped to the terminal of the tester. The second call is for child
    # processes: readline sets the variable where os.environ does not see it.
    os.environ.pop("COLUMNS", None)
    os.unsetenv("COLUMNS")


@pytest.fixture(scope="module", autouse=True)
def prepares_here():
    from tests.preparing import prepare_here  # not at the top: the switch comes first
    from tilewright.data import prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "call_module", prepare_here)
        yield
