"""Signals become a request between steps; recipe changes are reported apart."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tilewright.core.config import setting_names
from tilewright.core.config.recipe import Recipe
from tilewright.training.runlog.signals import StopRequest, recipe_changes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_becomes_a_request_and_handlers_come_back(number, capsys):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
    assert signal.getsignal(number) is before
    assert "finishing the step" in capsys.readouterr().err


def test_second_ctrl_c_breaks_off():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_only_requests_count():
    seen = []

    def work():
        with StopRequest() as stop:
            stop.request("enough")
            seen.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["enough"]


def test_changed_fields_are_told_and_numerics_marked():
    before = setting_names.flat(Recipe().model_dump(mode="json"))
    now = Recipe.model_validate(
        {"train": {"steps": 7, "log_interval": 3}, "optim": {"lr": 0.5}, "data": {"prefetch": 1}}
    )
    changes = recipe_changes(before, setting_names.flat(now.model_dump(mode="json")))
    assert {change.field: change.numerics for change in changes} == {
        "train.steps": True,
        "train.log_interval": False,
        "optim.lr": True,
        "data.prefetch": False,
    }
    assert str(changes[0]).startswith("data.prefetch: 2 -> 1")


COMPILER = """#!/bin/sh
trap '' INT
case "$*" in *" -o "*) if [ ! -e "$0.sent" ]; then touch "$0.sent"; kill -INT 0; fi; exit 1;; esac
exec g++ "$@"
"""
COMPILING = """
import torch
from tilewright.training.runlog.signals import StopRequest
try:
    with StopRequest():
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.timeout(120)
def test_ctrl_c_of_a_terminal_ends_compilers_too_and_that_is_no_traceback(tmp_path):
    """It reaches all processes of the command: here the compiler sends it, and ends without a result."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        env=os.environ | {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        start_new_session=True,  # a process group of its own
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (tmp_path / "compiler.sent").exists()
    assert done.stdout.split() == ["stopped"]
    assert "SIGINT ended the C++ compiler too" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_the_compiler_without_a_stop_keeps_its_traceback():
    from torch._inductor.exc import CppCompileError, InductorError

    with pytest.raises(InductorError), StopRequest():
        raise InductorError(CppCompileError(["g++"], "no such flag"), None)
    with pytest.raises(ValueError, match="another"):
        _stopped_with(ValueError("another"))


def _stopped_with(error):
    with StopRequest() as stop:
        stop.request("SIGINT")
        raise error
