"""A run that works says so: off a terminal a line in each half minute, whatever takes long."""

import io
import re
import sys
import time
from itertools import pairwise

import pytest

from tests.training.tiny import tiny
from tilewright.cli.app import run as command_line
from tilewright.core import log
from tilewright.core.log import Pulse
from tilewright.data.common.progress import ProgressBar
from tilewright.training import run, session
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.run import Run
from tilewright.training.runlog import recorder, train_progress
from tilewright.training.session import train

EVERY_S = 0.3


def until_said(said, lines):
    deadline = time.monotonic() + 60
    while len(said) < lines:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)


def silence_s(line):
    number, unit = re.search(r": working, ([\d.]+) (ms|s) after the last line$", line).groups()
    return float(number) / (1000 if unit == "ms" else 1)


def test_it_says_what_goes_on_while_nothing_else_is_said():
    said, spoke_at = [], []
    with Pulse(said.append, every_s=EVERY_S) as pulse:
        pulse.at("the first thing")
        until_said(said, 1)
        for _ in range(8):  # something else is said all the time
            pulse.said()
            spoke_at.append(time.monotonic())
            time.sleep(0.05)
        before = len(said)
        pulse.at(lambda: f"the second thing, {len(said)} lines before")
        spoke_at.append(time.monotonic())
        until_said(said, before + 2)
        pulse.at("")
        ended = len(said)
        time.sleep(1.2 * EVERY_S)
    time.sleep(1.2 * EVERY_S)
    assert len(said) <= ended + 1, "it ends with its block, and with what goes on"
    gap = max(later - one for one, later in pairwise(spoke_at))
    assert before == 1 or gap > 0.9 * EVERY_S, "it speaks only where this machine was busy for so long"
    assert said[0].startswith("the first thing: working, ")
    assert said[before].startswith(f"the second thing, {before} lines before: working, ")
    assert silence_s(said[before]) >= 0.99 * EVERY_S
    assert silence_s(said[before + 1]) >= 1.98 * EVERY_S, "its own lines are not counted"


def test_it_says_nothing_where_it_is_off_or_nobody_reads():
    said = []
    with Pulse(said.append, every_s=0.01, on=False) as pulse:
        pulse.at("something")
        time.sleep(0.05)
    assert said == []

    def closed(line):
        raise BrokenPipeError

    with Pulse(closed, every_s=0.01) as pulse:
        pulse.at("something")
        time.sleep(0.05)


@pytest.fixture
def hasty(monkeypatch):
    """Half a minute is a fraction of a second."""
    monkeypatch.setattr(log.Pulse.__init__, "__defaults__", (log.say, 0.2))
    monkeypatch.setattr(run, "OVERDUE_S", 0.15)


def _slow(monkeypatch, owner, name, seconds=0.6):
    real = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


CASES = {
    "preparing": (session, "build", "making the model: "),
    "a step": (StandardExecutor, "step", "step 2 of 2: "),
    "an evaluation": (recorder.MetricsLogger, "evaluation", "evaluation after step 2: "),
    "a checkpoint": (Run, "_write_audit", "checkpoint of step 2: "),
    "samples": (recorder.MetricsLogger, "sample", "samples after step 2: "),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_speaks_in_each_long_phase(data, tmp_path, monkeypatch, hasty, capsys, case):
    owner, name, words = CASES[case]
    _slow(monkeypatch, owner, name)
    train(tiny(data, tmp_path, train__steps=2, train__eval_interval=0, checkpoint__interval=0))
    assert any(line.startswith(words) for line in capsys.readouterr().out.splitlines()), words


def test_slow_steps_have_lines_between_those_of_the_log_interval(data, tmp_path, monkeypatch, hasty, capsys):
    _slow(monkeypatch, StandardExecutor, "step", 0.17)
    settings = {"train__steps": 6, "train__eval_interval": 0, "train__log_interval": 100, "checkpoint__interval": 0}
    train(tiny(data, tmp_path, **settings))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ") and " | loss " in line]
    assert [line.split()[1] for line in lines] == [f"{step}/6" for step in range(1, 7)]
    assert all(("| mem " in line) is (line.split()[1] in ("1/6", "6/6")) for line in lines), "memory costs a look"
    assert all("| eta " in line for line in lines[2:-1])


@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_speaks_off_a_terminal(monkeypatch, hasty, capsys, quiet):
    log.configure(quiet=quiet)
    try:
        with ProgressBar("preparing data") as bar:
            bar.phase("tokens", total=8)
            bar.advance(2)
            time.sleep(0.5)
    finally:
        log.configure()
    said = capsys.readouterr()
    assert said.out == "", "a command may write JSON there"
    assert ("preparing data: tokens, 25%: " in said.err) is not quiet


def test_a_bar_of_short_phases_speaks_too(hasty, capsys):
    """Off a terminal a phase that begins has said nothing."""
    with ProgressBar("work") as bar:
        for number in range(20):
            bar.phase(f"part {number}")
            time.sleep(0.05)
    assert "work: part" in capsys.readouterr().err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_plan_of_a_recipe_speaks(form, monkeypatch, capsys):
    monkeypatch.setattr(log.Pulse.__init__, "__defaults__", (log.say, 0.01))
    assert command_line(["plan", "zero_cpu", "--on", "h100", *form]) == 0
    found = capsys.readouterr()
    assert "planning: " in found.err  # whichever phase takes longer than a pulse
    assert "working" not in found.out


def test_on_a_terminal_the_live_line_is_enough(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    with train_progress.open_pulse() as pulse:
        assert pulse._thread is None


def test_a_phase_takes_the_seconds_between_its_beginning_and_the_next_ones():
    began = time.perf_counter()
    with ProgressBar("work") as progress:
        progress.phase("first")
        time.sleep(0.3)
        progress.phase("second")
    whole = time.perf_counter() - began
    assert 0.3 <= progress.seconds["first"] <= whole + 1e-3
    assert 0 <= progress.seconds["second"] <= whole - 0.3 + 1e-3
