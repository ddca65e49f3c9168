"""A run is held against its plan: how long it takes is said before it starts, and steps that are far off early."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.rates import make_rates
from tests.training.tiny import rows, tiny
from tilewright.core.config.recipe import TrainSection
from tilewright.planner.machine import ceilings
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.planning.minutes import LONG_S, long_run
from tilewright.training.planning.off_plan import OFF
from tilewright.training.planning.pace import COUNTED, hold_against_plan
from tilewright.training.session import train


def told(planned_s, seconds, steps=100):
    """What is recorded of first steps of so many seconds."""
    found = []
    record = lambda step, kind, text, **numbers: found.append((step, kind, text, numbers))  # noqa: E731
    hold_against_plan(record, planned_s, seconds, len(seconds), steps)
    return found


@given(planned_s=st.floats(1e-3, 1e3), factor=st.floats(0.01, 100), first_s=st.floats(0, 1e4))
def test_steps_far_off_are_told(planned_s, factor, first_s):
    found = told(planned_s, [first_s] + [factor * planned_s] * (COUNTED - 1))
    off = max(factor, 1 / factor)
    if off > OFF * 1.001:
        ((step, kind, text, numbers),) = found
        assert (step, kind) == (4, "pace")
        assert numbers["measured_s"] / numbers["planned_s"] == pytest.approx(factor)
        assert "96 that are left" in text
        assert ("doctor" in text) is (factor > 1), "a slow run has its cause named"
    elif off < OFF * 0.999:
        assert found == []


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        ([9.0, 9.0, 1.0, 1.0], 0),  # one that was slow is not the middle one
        ([9.0, 9.0, 9.0, 1.0], 1),
    ],
)
def test_the_middle_one_of_three_counts(seconds, count):
    assert len(told(1.0, seconds)) == count


def test_nothing_is_told_where_nothing_was_planned():
    assert told(0.0, [1.0] * 9) == []


@pytest.mark.parametrize(
    ("train_section", "done", "step_s", "said"),
    [
        ({"steps": 600}, 0, 6.6, True),
        ({"steps": 600}, 0, 1.0, False),
        ({"steps": 600}, 590, 6.6, False),  # a run that goes on has little left
        ({"steps": 10}, 0, 100.0, True),
        ({"steps": 600, "minutes": 90}, 0, 9.0, False),  # as long as was asked for
    ],
)
def test_a_long_run_is_told_before_it_starts(train_section, done, step_s, said):
    text = long_run(TrainSection(**train_section), done, step_s)
    assert bool(text) is said
    if said:
        left = train_section["steps"] - done
        assert left * step_s > LONG_S
        assert f"{left} steps" in text
        assert "--train.minutes 15" in text


def test_a_run_tells_both(data, tmp_path, monkeypatch, capsys):
    real = StandardExecutor.step

    def slow(self, *args):
        time.sleep(0.05)
        result = real(self, *args)
        return type(result)(**vars(result) | {"seconds": result.seconds + 1.0})

    monkeypatch.setattr(StandardExecutor, "step", slow)
    settings = {"train__eval_interval": 0, "train__sample_tokens": 0, "checkpoint__interval": 0}
    train(tiny(data, tmp_path, train__steps=5, **settings))
    (event,) = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "pace"]
    assert event["step"] == 4
    assert event["measured_s"] > OFF * event["planned_s"]
    said = capsys.readouterr().out.replace("\n  ", " ")
    assert f"pace: {event['message']}" in said
    assert said.index("pace:") < said.index("done:")
    train(tiny(data, tmp_path, train__steps=5, **settings))  # nothing is left to do, and nothing is told
    assert "pace" not in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["bf16_mixed", "fp32"])
def test_a_mode_slower_than_fp32_is_named_before_the_run_starts(mode, data, tmp_path, monkeypatch, capsys):
    row = {"fp32": 1e12, "tf32": 1e12, "bf16": 1e11, "fp16": 1e11}
    rates = make_rates(matmul={fmt: {256: rate, 2048: rate} for fmt, rate in row.items()})
    monkeypatch.setattr(ceilings, "measure", lambda *args, **kwargs: rates)
    settings = {"train__eval_interval": 0, "train__sample_tokens": 0, "checkpoint__interval": 0}
    train(tiny(data, tmp_path, train__steps=1, precision__mode=mode, **settings))
    told = [event["message"] for event in rows(tmp_path / "tiny" / "events.jsonl") if event["kind"] == "slow_mode"]
    assert len(told) == (mode == "bf16_mixed")
    said = " ".join(capsys.readouterr().out.split())
    assert all("0.1 times" in text and 0 <= said.index(text) < said.index("done:") for text in told)
