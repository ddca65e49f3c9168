"""Signals become a request between steps; recipe changes are reported apart."""

import os
import signal
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
