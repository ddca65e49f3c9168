"""A run is held against its plan: how long it takes is said before it starts, and steps that are far off early."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.rates import make_rates
from tests.training.tiny import rows, tiny
from tilewright.core.config.recipe import TrainSection
from tilewright.planner.machine import ceilings
from tilewright.planner.machine.microbench import WAITED
from tilewright.training.executor.base import StepResult
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.hooks.step_hook import Step
from tilewright.training.planning.minutes import LONG_S, long_run
from tilewright.training.planning.off_plan import OFF, off_plan
from tilewright.training.planning.pace import COUNTED, WORTH_S, Pace, PlannedSeconds, StepSeconds, hold_against_plan
from tilewright.training.runlog.record_files import Counters, RunLog
from tilewright.training.session import train


def told(planned, found, step=COUNTED, steps=100, correct=None):
    """What is recorded of first steps of so many seconds, and by how much the plan was corrected."""
    events = []
    record = lambda step, kind, text, **numbers: events.append((step, kind, text, numbers))  # noqa: E731
    corrected = hold_against_plan(record, planned, found, step, steps, correct)
    return events, corrected


FACTOR = st.floats(0.01, 100)


@given(planned_s=st.floats(1e-3, 1e3), factor=FACTOR)
def test_steps_far_off_are_told(planned_s, factor):
    """On a machine that others do not use."""
    events, corrected = told(PlannedSeconds(planned_s), StepSeconds(factor * planned_s, factor * planned_s))
    assert corrected is None
    off = max(factor, 1 / factor)
    if off > OFF * 1.001:
        ((step, kind, text, numbers),) = events
        assert (step, kind) == (4, "pace")
        assert numbers["measured_s"] / numbers["planned_s"] == pytest.approx(factor)
        assert "96 that are left" in text
        assert ("doctor" in text) is (factor > 1), "a slow run has its cause named"
    elif off < OFF * 0.999:
        assert events == []


@given(planned_s=st.floats(1e-3, 1e3), own=FACTOR, others=st.floats(1, 20), fresh=FACTOR, steps=st.integers(4, 10**6))
def test_a_plan_is_corrected_where_the_steps_own_work_is_far_off(planned_s, own, others, fresh, steps):
    """Own work as planned, or not, beside other programs that take the processors, or not. A correction is asked for
    once, only where it is the plan that is wrong, and only where the run is long enough to be worth it; it is taken
    where it is nearer to the steps."""
    clock, asked = planned_s * own * others, []
    found = StepSeconds(clock, planned_s * own)
    events, corrected = told(
        PlannedSeconds(planned_s), found, steps=steps, correct=lambda s: asked.append(s) or planned_s * fresh
    )
    wrong = off_plan(planned_s, found.own) >= OFF
    worth = (steps - COUNTED) * abs(clock - planned_s) > WORTH_S
    expected = bool(events) and wrong and worth
    assert bool(events) == (off_plan(planned_s, clock) >= OFF)
    assert asked == [found.own] * expected
    nearer = expected and off_plan(planned_s * fresh, found.own) < off_plan(planned_s, found.own)
    assert (corrected == planned_s * fresh) if nearer else corrected is None
    for _, _, text, numbers in events:
        assert ("the plan is corrected" in text) is nearer
        assert ("no nearer: the plan stays" in text) is (expected and not nearer)
        assert numbers.get("correction", fresh) == pytest.approx(fresh)
        assert ("have a processor" in text) is (others > WAITED)
        if others > WAITED:
            assert (", as planned;" in text) is not wrong
            assert numbers["processor_s"] == pytest.approx(planned_s * own)


@pytest.mark.parametrize(
    ("step", "steps", "said"),
    [(4, 100, ": the 96 that are left take 57.6 s"), (4, 5, ": the last one takes 600 ms"), (14, 14, "")],
)
@pytest.mark.parametrize("processor_s", [0.2, 0.6])
def test_the_steps_that_are_left_are_named_where_there_are_any(step, steps, said, processor_s):
    [(_, _, text, _)], _ = told(PlannedSeconds(0.25), StepSeconds(0.6, processor_s), step, steps)
    assert text.startswith(f"steps take 600 ms, 2.4 times the planned 250 ms{said}. ")


def test_seconds_of_links_are_no_work():
    """A step of 1 s, of which the disk has 0.8: 2 s with 0.2 s on a processor are the disk's, and no rate is wrong."""
    planned, asked = PlannedSeconds(1.0, moved=0.8), []
    ((_, _, text, _),), _ = told(planned, StepSeconds(2.0, 0.2), steps=10**6, correct=asked.append)
    assert asked == []
    assert "as planned; in the rest they wait" in text


def test_a_gpus_seconds_are_those_of_the_clock():
    found = StepSeconds.of([9.0, 2.0, 2.0, 2.0], [9.0, 0.1, 0.1, 0.1], on_cpu=False)
    assert (found.own, found.shared) == (2.0, False)


@pytest.mark.parametrize(
    ("seconds", "middle"),
    [
        ([9.0, 9.0, 1.0, 1.0], 1.0),  # one that was slow is not the middle one
        ([9.0, 9.0, 9.0, 1.0], 9.0),
    ],
)
def test_the_middle_one_of_three_counts(seconds, middle):
    assert StepSeconds.of(seconds, seconds, on_cpu=True) == StepSeconds(middle, middle)


def test_nothing_is_told_where_nothing_was_planned():
    assert told(PlannedSeconds(0.0), StepSeconds(1.0, 1.0)) == ([], None)


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


@pytest.mark.parametrize("before", range(COUNTED))
@pytest.mark.parametrize("why", ["its gradient turned bad", "the batch holds no targets"])
def test_steps_that_were_not_computed_do_not_count(before, why, tmp_path):
    """They take no time: rates of the machine would be taken for thousands of times what they are."""
    asked, kept = [], []
    log = RunLog(tmp_path)
    counters, recorder = Counters(), SimpleNamespace(event=lambda *_, **__: None, log=log)
    correct = lambda own_s: asked.append(own_s) or own_s  # noqa: E731
    keep = lambda step, seconds: kept.append((step.number, seconds))  # noqa: E731
    pace = Pace(PlannedSeconds(1.0), 1, 10**6, on_cpu=True, correct=correct, keep=keep)
    skipped = [None] * before + [why] * COUNTED + [None] * COUNTED
    for number, reason in enumerate(skipped, start=1):
        seconds = 2.0 if reason is None else 0.0
        result = StepResult(1.0, 1, 1, 1.0, reason, 1.0, seconds, processor_s=seconds)
        counters.add(result)
        log.step(counters, result, 0.1, 1e-3)
        pace.after_step(Step(number, (), 0.1, None, 0.0, False, recorder, None), result)
    assert asked == [2.0]
    assert kept == [(2 * COUNTED, 2.0)]
    log.close()


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
