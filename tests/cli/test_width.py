"""What commands print reads well at 40, 80 and 200 columns: no line is too long, no number is parted from its unit."""

import itertools
import re

import pytest

from tests.cli.test_train import arguments
from tests.contracts.observe import fixed_ceilings, write_texts
from tilewright.cli.app import run
from tilewright.core.log import wrap_text
from tilewright.training.runlog.train_progress import step_line

WIDTHS = (40, 80, 200)
RUN = ("inspect", "runs/probe")
UNIT = re.compile(r"^\s*(?:[kMGT]?i?B(?:/s)?|ms|s|%)(?:[\s,;:.)]|$)")
ROW = {
    "step": 120, "loss": 3.41019, "grad_norm": 0.8123, "lr": 2.9e-4, "loss_scale": 65536.0,
    "memory_bytes": 11.2 * 2**30, "tokens_per_s": 8412.3, "wait_share": 0.0002,
    "memory": {"parameters": 2**30, "optimizer": 5 * 2**30, "activations": 4 * 2**30, "other": 1.2 * 2**30},
}  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("width")
    write_texts(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
        assert run(["train", *arguments()]) == 0
    return folder


def assert_readable(text: str, width: int) -> None:
    """No line is longer than the width unless it is one word, such as a path; units follow their numbers."""
    lines = text.splitlines()
    assert lines
    long = [line for line in lines if len(line) > width and len(line.split()) > 1]
    assert not long, long
    parted = [(a, b) for a, b in itertools.pairwise(lines) if a[-1:].isdigit() and UNIT.match(b)]
    assert not parted, parted


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "command",
    [["plan", *arguments()], ["doctor"], ["doctor", "-v"], ["inspect"], [*RUN], [*RUN, "-v"]],
    ids=["plan", "doctor", "doctor -v", "inspect", "inspect run", "inspect run -v"],
)
def test_commands_fit(here, command, width, capsys, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
    assert run(command) == 0
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(command) == 0
    text = capsys.readouterr().out
    assert_readable(text, width)
    # What fits stays as it is; doctor's speed of the disk differs from call to call.
    assert whole == text or command[0] == "doctor" or max(map(len, whole.splitlines())) > width


@pytest.mark.parametrize("width", WIDTHS)
def test_a_training_log_fits(here, width, capsys, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["train", *arguments(run__name=f"at{width}")]) == 0
    text = capsys.readouterr().out
    assert_readable(text, width)
    assert "step 3/3 |" in text
    assert not re.search(r"\b0 (ms|µs)", text)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_error_fits(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["plan", "no_such_recipe"]) == 2
    text = capsys.readouterr().err
    assert_readable(text, width)
    assert [line.split()[0] for line in text.splitlines() if re.match(r"  \w", line)] == ["got", "need", "try"]


def test_a_step_breaks_between_its_numbers():
    line = step_line(ROW, steps=2000, memory_limit=24 * 2**30, num_skips=0, seconds_left=0.0, scaled=True)
    assert wrap_text(line, 40).splitlines() == [
        "step 120/2000 | loss 3.4102 |",
        "  gnorm 0.812 | lr 2.9e-04 |",
        "  scale 65536 (0 skips) | mem",
        "  11.2/24.0 GiB (optimizer 5.0,",
        "  activations 4.0) | 8,412 tok/s |",
        "  wait < 0.1 % | eta 0 s",
    ]
    assert wrap_text(line, 200) == wrap_text(line, None) == line
