"""`train.minutes`: the number of steps is found once, and the run is then that of `train.steps`, however often it is
started."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.out_of_memory import TEXT
from tests.training.tiny import assert_same_run, last_state, rows, settings, tiny
from tilewright.cli.commands.chat_models.tuned_recipe import with_passes
from tilewright.core.config.load import load_recipe, write_run_toml
from tilewright.core.config.recipe import Recipe, TrainSection
from tilewright.planner.machine import ceilings
from tilewright.training import session
from tilewright.training.executor.layer_major import LayerMajorExecutor
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.planning.minutes import (
    FEWEST,
    Length,
    StepTimes,
    expected_steps,
    lasting,
    steps_within,
    with_time_left,
)
from tilewright.training.planning.minutes import with_known_steps as known
from tilewright.training.run import Run
from tilewright.training.session import train

STEP_S, MINUTES = 7.5, 2.0
"""What a step takes by the clock of these tests, and what their runs are given."""
SELDOM = {"train__eval_interval": 6, "train__sample_tokens": 0, "checkpoint__interval": 6}
"""Settings of these runs, and of those that they are compared with: few evaluations and saves show the same."""


@pytest.fixture(autouse=True)
def _time_passes_by_the_step(monkeypatch):
    """So that how many steps a run has does not depend on what else the machine does."""
    clock, ahead_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead_s[0])
    for executor in (StandardExecutor, LayerMajorExecutor):

        def takes(self, *args, step=executor.step):
            ahead_s[0] += STEP_S
            return step(self, *args)

        monkeypatch.setattr(executor, "step", takes)


def timed(data, runs, minutes=MINUTES, **changes):
    """The recipe of the tiny run, given in minutes."""
    values = settings(data, runs, train__minutes=minutes, **SELDOM | changes)
    del values["train.steps"]
    return load_recipe(None, values, environ={})


def resolved(run):
    """Steps in run.toml, and where it says that they come from."""
    item = tomlkit.parse((run / "run.toml").read_text())["train"]["steps"]
    return int(item), item.trivia.comment


def never(*args):
    raise AssertionError("steps are timed")


# --- arithmetic -------------------------------------------------------------------------------------------------------


@given(
    minutes=st.floats(0.01, 1e4),
    step_s=st.floats(1e-3, 1e3),
    eval_s=st.floats(0, 1e3),
    interval=st.integers(0, 500),
    spent_s=st.floats(0, 1e3),
    elapsed_s=st.floats(0, 1e6),
    done=st.integers(0, 10**6),
)
def test_what_fits_takes_the_time_that_is_left(minutes, step_s, eval_s, interval, spent_s, elapsed_s, done):
    recipe = Recipe(train=TrainSection(steps=0, minutes=minutes, eval_interval=interval))
    times = StepTimes(step_s, 5, spent_s, eval_s)
    found = steps_within(recipe, times, done=done, elapsed_s=elapsed_s)
    more = found.steps - done
    each_s = step_s + (eval_s / interval if interval else 0)
    ends_s = elapsed_s + spent_s + more * each_s
    slack = 1e-9 * (elapsed_s + 60 * minutes)  # sums of three terms in FP64
    if more > FEWEST:
        assert 60 * minutes - each_s - slack <= ends_s <= 60 * minutes + slack
        assert "the fewest" not in found.source
    else:
        assert more == FEWEST, "some steps are done however little time is left"
        assert ends_s + each_s > 60 * minutes - slack
    assert f"{minutes:g} minutes" in found.source
    assert f"{minutes:g} minutes" in found.text
    assert found.numbers["steps"] == found.steps


def test_expected_steps_are_the_recipes_or_those_of_a_planned_rate():
    assert expected_steps(Recipe(train=TrainSection(steps=70)), 1.0) == 70
    assert expected_steps(Recipe(train=TrainSection(steps=0, minutes=2)), 0.5) == 240
    assert expected_steps(Recipe(train=TrainSection(steps=0, minutes=2)), 1e9) == FEWEST


@pytest.mark.parametrize(
    ("typed", "length"),
    [([], (6, 0)), (["--train.steps=7"], (7, 0)), (["--train.minutes=2"], (0, 2)), (["--train.minutes=0"], (6, 0))],
)
def test_steps_are_passes_unless_steps_or_minutes_are_typed(typed, length):
    loaded = load_recipe("sft_lora", ["--model.path=x", "--train.global_batch_size=15", *typed], environ={})
    train = with_passes(loaded, SimpleNamespace(full_rows=30), 3).recipe.train
    assert (train.steps, train.minutes) == length


# --- a run ------------------------------------------------------------------------------------------------------------

SHAPES = {
    "standard": {},
    "layer_major": {"memory__executor": "layer_major", "optim__schedule": "wsd"},
    "two_modes": {"precision__start_mode": "tf32", "precision__start_fraction": 0.3},
    "fp8_later": {"precision__mode": "fp8_tile", "precision__fp8_from": "[0.0, 0.2, 0.5]"},
}


@pytest.mark.parametrize(
    # Formats by step are formats that change, too.
    "shape", [pytest.param(one, marks=[pytest.mark.slow] * (one != "layer_major")) for one in SHAPES]
)  # fmt: skip
def test_a_run_in_minutes_is_the_run_of_so_many_steps(data, tmp_path, shape, capsys):
    result = train(timed(data, tmp_path / "minutes", **SHAPES[shape]))
    run = tmp_path / "minutes" / "tiny"
    steps, source = resolved(run)
    assert result.step == steps >= FEWEST
    assert f"{MINUTES:g} minutes at" in source
    assert source.endswith("s per step")
    (event,) = [row for row in rows(run / "events.jsonl") if row["kind"] == "plan" and "minutes" in row]
    assert (event["steps"], event["minutes"], event["step"]) == (steps, MINUTES, 0)
    assert event["message"] in capsys.readouterr().out.replace("\n  ", " ")
    train(tiny(data, tmp_path / "steps", train__steps=steps, **SELDOM, **SHAPES[shape]))
    assert_same_run(run, tmp_path / "steps" / "tiny")
    again = load_recipe(run / "run.toml", environ={}).recipe.train  # run.toml alone makes the same run
    assert (again.steps, again.minutes) == (steps, MINUTES)


def test_training_takes_the_minutes_it_was_given(data, tmp_path):
    train(timed(data, tmp_path, 2 * MINUTES, train__eval_interval=0, checkpoint__interval=0))
    last = [row for row in rows(tmp_path / "tiny" / "metrics.jsonl") if "loss" in row][-1]
    # What the machine adds to a step is small beside STEP_S, even where it has much else to do.
    assert 0.9 * 60 * 2 * MINUTES < last["time_s"] < 1.2 * 60 * 2 * MINUTES
    assert last["step"] > 2 * FEWEST


@pytest.mark.parametrize("works", [True, False], ids=["a processor's", "another program's"])
def test_time_that_first_steps_waited_for_is_said_with_their_number(data, tmp_path, monkeypatch, works):
    if works:  # the clock's seconds are the processor's too
        monkeypatch.setattr(time, "thread_time", time.perf_counter)
    train(timed(data, tmp_path, train__eval_interval=0, checkpoint__interval=0))
    (event,) = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "plan" and "minutes" in row]
    assert ("waited for other programs" in event["message"]) == (not works)
    assert ("waited" in event) == (not works)
    if not works:
        # STEP_S passes beside a step; what the processor works in one is small beside it.
        assert 0.8 < event["waited"] < 1


@pytest.mark.slow
def test_training_takes_the_minutes_of_a_real_clock(data, tmp_path, monkeypatch):
    monkeypatch.undo()
    real = StandardExecutor.step

    def slow(self, *args):
        time.sleep(0.05)
        return real(self, *args)

    monkeypatch.setattr(StandardExecutor, "step", slow)
    minutes = 0.1
    train(timed(data, tmp_path, minutes, train__eval_interval=0, checkpoint__interval=0))
    last = [row for row in rows(tmp_path / "tiny" / "metrics.jsonl") if "loss" in row][-1]
    # Steps are mostly sleep, so a busy machine changes little: the clock's count, not its precision, is what is held.
    assert 0.4 * 60 * minutes < last["time_s"] < 1.6 * 60 * minutes
    assert last["step"] > FEWEST


# --- started again ----------------------------------------------------------------------------------------------------


def _stop_in_step(monkeypatch, step):
    """SIGTERM in a step of the run itself."""
    steps = Run._step

    def stopping(self):
        steps(self)
        if self.step == step and self.recipe.train.steps < 10**6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "_step", stopping)


def test_a_run_that_goes_on_keeps_its_number(data, tmp_path, monkeypatch):
    for step in (4, 8):  # it is stopped twice
        with monkeypatch.context() as patch:
            _stop_in_step(patch, step)
            if step > 4:
                patch.setattr(session, "time_steps", never)
            result = train(timed(data, tmp_path))
        assert (result.stopped, result.step) == ("SIGTERM", step)
        first = resolved(tmp_path / "tiny")
    monkeypatch.setattr(session, "time_steps", never)
    assert train(timed(data, tmp_path)).step == first[0]
    assert resolved(tmp_path / "tiny") == first
    events = rows(tmp_path / "tiny" / "events.jsonl")
    assert not [row for row in events if row["kind"] == "recipe_change"]
    train(tiny(data, tmp_path / "steps", train__steps=first[0], **SELDOM))
    assert_same_run(tmp_path / "tiny", tmp_path / "steps" / "tiny")


def test_a_stop_while_steps_are_timed_leaves_nothing(data, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        real = Run.try_steps
        patch.setattr(Run, "try_steps", lambda run, stop, enough: (stop.request("SIGTERM"), real(run, stop, enough))[1])
        result = train(timed(data, tmp_path))
    assert (result.stopped, result.step) == ("SIGTERM", 0)
    assert "nothing was to be saved" in capsys.readouterr().out
    assert not (tmp_path / "tiny" / "run.toml").exists()
    assert not (tmp_path / "tiny" / "metrics.jsonl").exists()
    assert train(timed(data, tmp_path)).step == resolved(tmp_path / "tiny")[0]


def test_other_minutes_are_counted_from_the_checkpoint(data, tmp_path, capsys):
    train(timed(data, tmp_path))
    first, _ = resolved(tmp_path / "tiny")
    train(timed(data, tmp_path, 0.5 * MINUTES))  # they have passed
    assert f"has reached step {first} of {first}; raise train.minutes" in capsys.readouterr().out
    longer = train(timed(data, tmp_path, 2 * MINUTES)).step
    assert longer == resolved(tmp_path / "tiny")[0] >= first + FEWEST
    changes = [row["message"] for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "recipe_change"]
    assert f"train.steps: {first} -> {longer} (changes the numbers)" in changes
    assert [row["step"] for row in rows(tmp_path / "tiny" / "metrics.jsonl") if "loss" in row] == list(
        range(1, longer + 1)
    )


@pytest.mark.slow
def test_an_exact_number_goes_before_the_minutes_of_the_folder(data, tmp_path, monkeypatch):
    train(timed(data, tmp_path))
    more = resolved(tmp_path / "tiny")[0] + 2
    monkeypatch.setattr(session, "time_steps", never)
    assert train(tiny(data, tmp_path, train__steps=more, **SELDOM)).step == more


@pytest.mark.parametrize(
    ("changes", "resuming", "kept"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"train.log_interval": "3"}, False, True),
        ({"train.global_batch_size": "4"}, False, False),  # nothing was kept of that run, whose steps took longer
        ({"train.global_batch_size": "4"}, True, True),
        ({"train.minutes": "6"}, True, False),
        ({"train.steps": "9"}, True, False),
    ],
)
def test_which_number_of_a_folder_is_kept(tmp_path, changes, resuming, kept):
    first = load_recipe(None, {"train.minutes": "5"}, environ={})
    write_run_toml(lasting(first, Length(77, "fits into 5 minutes at 3 s per step", "", {})), tmp_path / "run.toml")
    now = known(load_recipe(None, {"train.minutes": "5"} | changes, environ={}), tmp_path, resuming=resuming)
    assert (now.recipe.train.steps == 77) is kept
    assert (now.sources["train.steps"] == "fits into 5 minutes at 3 s per step") is kept


def test_a_folder_without_a_readable_recipe_has_no_number(tmp_path):
    loaded = load_recipe(None, {"train.minutes": "5"}, environ={})
    assert known(loaded, tmp_path, resuming=True) is loaded
    (tmp_path / "run.toml").write_text("[train\n")
    assert known(loaded, tmp_path, resuming=True) is loaded


def test_minutes_that_have_passed(tmp_path):
    loaded = load_recipe(None, {"train.minutes": "5"}, environ={})
    assert with_time_left(loaded, 40, 299.0) is loaded
    assert with_time_left(loaded, 40, 300.0).recipe.train.steps == 40
    assert with_time_left(loaded, 0, 999.0) is loaded  # no checkpoint: it begins again


@pytest.mark.slow
def test_a_shortage_of_memory_while_steps_are_timed_is_met_as_in_a_run(data, tmp_path, monkeypatch):
    real, calls = StandardExecutor.step, []

    def short(self, *args):
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError(TEXT)  # a step that has changed nothing: it is computed again under a smaller plan
        return real(self, *args)

    monkeypatch.setattr(StandardExecutor, "step", short)
    result = train(timed(data, tmp_path))
    assert result.step == resolved(tmp_path / "tiny")[0]
    assert last_state(tmp_path / "tiny")[1]["parts"]["counters"]["step"] == result.step


def _on_rank(rank, data, runs):
    """A start that rank 1 stops while steps are timed; one whose steps are slower on rank 1; one that goes on."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    changes = {"parallel__dp_replicate": 2, "parallel__dp_shard": 1, "train__global_batch_size": 4}
    loaded = timed(Path(data), Path(runs), 0.02, **changes)
    tries, steps = Run.try_steps, StandardExecutor.step

    def asked(run, stop, enough):
        if rank == 1:
            stop.request("SIGTERM")
        return tries(run, stop, enough)

    def slow(executor, *args):
        time.sleep(0.1 * rank)
        return steps(executor, *args)

    Run.try_steps = asked
    first = train(loaded)
    Run.try_steps, StandardExecutor.step = tries, slow
    second = train(loaded)
    session.time_steps = never
    third = train(loaded)
    return (first.step, first.stopped), second.step, third.step


@pytest.mark.dist
def test_ranks_find_one_number(data, tmp_path):
    found = on_ranks(2, _on_rank, str(data), str(tmp_path))
    steps, source = resolved(tmp_path / "tiny")
    assert found == [((0, "SIGTERM (rank 1)"), steps, steps)] * 2
    assert float(source.split(" at ")[1].split()[0]) > 0.1, "the slowest rank's seconds count"
