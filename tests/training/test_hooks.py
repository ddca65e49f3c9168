"""A hook that nobody knows rides along with a run: it changes steps, hears of them, and its state outlives the run."""

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.observe import fixed_ceilings
from tests.ranks import fork_server, on_ranks
from tests.training.tiny import assert_same_run, last_state, rows, tiny
from tilewright import api
from tilewright.core.errors import ConfigError, FitError
from tilewright.planner.machine import ceilings
from tilewright.training.assemble import build, set_up
from tilewright.training.components.teacher import Teacher
from tilewright.training.hooks.precision_hook import PrecisionHook
from tilewright.training.hooks.step_hook import AfterStep, StepHook, by_name, calls
from tilewright.training.session import train

QUIET = {"train__eval_interval": 0, "train__sample_tokens": 0, "log__report": "false"}
QUIET |= {"train__steps": 12, "train__log_interval": 4, "checkpoint__interval": 3}


class Mixer(StepHook):
    """What a step is depends on all steps before it: its rate and which rows it has."""

    name = "mixer"

    def __init__(self, setup, parts, kill_at=0):
        self.steps, self.losses, self.kill_at, self.heard = 0, 0.0, kill_at, []

    def before_step(self, step):
        self.steps += 1
        assert step.number == self.steps, "one that is resumed goes on where it was"
        batches = [{name: tensor.flip(0) for name, tensor in batch.items()} for batch in step.microbatches]
        return replace(step, lr=step.lr * (1 + self.losses % 1), microbatches=batches[:: 1 if self.steps % 2 else -1])

    def after_step(self, step, result):
        if step.number == self.kill_at:
            signal.raise_signal(signal.SIGKILL)
        self.losses += result.loss
        self.heard.append((step.number, step.due, step.memory is not None))
        if step.number == 5:
            step.recorder.event(step.number, "mixed", "half of it", sum=self.losses)

    def state_dict(self):
        return {"steps": self.steps, "losses": self.losses}

    def load_state_dict(self, state):
        self.steps, self.losses = state["steps"], state["losses"]


class Fresh(StepHook):
    """A hook that a run has only from some checkpoint on."""

    name = "fresh"

    def __init__(self, setup, parts):
        pass

    def state_dict(self):
        return {"steps": 0}

    def load_state_dict(self, state):
        raise AssertionError("there is none")


def _killed(data, runs, step):
    """A run that ends its process in a step."""
    changes = QUIET | {"checkpoint__async_save": "false"}  # what was saved is there when it is killed
    train(tiny(data, runs, **changes), hooks=[partial(Mixer, kill_at=step)])


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """A run with a mixer, and the hook."""
    runs, made = tmp_path_factory.mktemp("straight"), []
    train(tiny(data, runs, **QUIET), hooks=[lambda *of: made.append(Mixer(*of)) or made[-1]])
    return runs / "tiny", *made


def test_a_hook_changes_every_step_and_hears_of_it(data, tmp_path, straight):
    run, mixer = straight
    assert mixer.heard == [(n, due := n in (1, 4, 8, 12), due) for n in range(1, 13)]
    losses, rates = zip(*((row["loss"], row["lr"]) for row in rows(run / "metrics.jsonl") if "lr" in row), strict=True)
    assert mixer.losses == sum(losses)
    train(tiny(data, tmp_path, **QUIET))
    plain = [row["lr"] for row in rows(tmp_path / "tiny" / "metrics.jsonl") if "lr" in row]
    for number, (lr, without) in enumerate(zip(rates, plain, strict=True)):
        assert lr == without * (1 + sum(losses[:number]) % 1), number
    (event,) = [row for row in rows(run / "events.jsonl") if row["kind"] == "mixed"]
    assert (event["step"], event["sum"]) == (5, sum(losses[:5]))
    assert last_state(run)[1]["parts"]["mixer"] == {"steps": 12, "losses": sum(losses)}


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_its_state_survives_a_kill(step, data, tmp_path, straight):
    process = fork_server().Process(target=_killed, args=(data, tmp_path, step), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    train(tiny(data, tmp_path, **QUIET), hooks=[Mixer])
    events = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "resume"]
    assert [row["step"] for row in events] == [step - 1 - (step - 1) % 3]
    assert_same_run(tmp_path / "tiny", straight[0])


class Sometimes(StepHook):
    """Called at the steps that it asks for, and where there is news."""

    def __init__(self, wanted):
        self.wanted, self.heard = sorted(wanted), []
        self.next_step = min(wanted, default=float("inf"))

    def before_step(self, step):
        self.heard.append(step.number)
        return step

    def after_step(self, step, result):
        assert self.heard[-1] == step.number
        self.next_step = min((n for n in self.wanted if n > step.number), default=float("inf"))


def test_state_without_its_hook_and_a_hook_without_state_are_told(data, tmp_path):
    short = QUIET | {"train__steps": 4}
    train(tiny(data, tmp_path, **short), hooks=[Mixer])
    train(tiny(data, tmp_path, **short | {"train__steps": 6}))
    train(tiny(data, tmp_path, **short | {"train__steps": 8}), hooks=[Fresh])
    told = [row["message"] for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "recipe_change"]
    assert "the checkpoint's state of `mixer` is not used: this run has none" in told
    assert "`fresh` starts afresh: the checkpoint has no state of it" in told
    assert not [text for text in told if "`stream`" in text or "`clip`" in text or "`counters`" in text]


def test_a_hook_is_called_when_it_asks_and_where_a_line_is_due(data, tmp_path):
    cases = [[], [1], [3, 6], [2, 3, 4, 11], range(1, 13)]
    hooks = [Sometimes(wanted) for wanted in cases]
    train(tiny(data, tmp_path, **QUIET), hooks=[lambda *_, hook=hook: hook for hook in hooks])
    for hook in hooks:
        assert hook.heard == sorted({*hook.wanted, 1, 4, 8, 12})


class Hungry(StepHook):
    """Finds no memory in one of its calls, so many times."""

    name = "hungry"

    def __init__(self, where, times, repeatable=True):
        self.where, self.times, self.repeatable, self.count = where, times, repeatable, 0

    def _look(self, where, number):
        if (where, number) == (self.where, 5) and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("planted: no memory")

    def before_step(self, step):
        self._look("before", step.number)
        self.count += 1
        return step

    def after_step(self, step, result):
        self._look("after", step.number)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("where", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_call_that_may_be_repeated_is_under_a_smaller_plan(where, data, tmp_path):
    train(tiny(data, tmp_path / "plain", **QUIET), hooks=[lambda *_: Hungry("nowhere", 0)])
    train(tiny(data, tmp_path / "hungry", **QUIET), hooks=[lambda *_: Hungry(where, 1)])
    assert_same_run(tmp_path / "hungry" / "tiny", tmp_path / "plain" / "tiny", matmuls=False)
    events = rows(tmp_path / "hungry" / "tiny" / "events.jsonl")
    (event,) = [row for row in events if row.get("trigger") == "out_of_memory"]
    assert event["step"] == 5


def test_a_call_that_may_not_ends_the_run_before_the_step(data, tmp_path):
    """The state of hooks and of the stream is saved as it was before the step that could not be prepared."""
    runs, settings = tmp_path / "runs", QUIET | {"checkpoint__interval": 0}
    mixers = lambda where, times: [Mixer, lambda *_: Hungry(where, times, repeatable=False)]  # noqa: E731
    with pytest.raises(FitError):
        train(tiny(data, runs, **settings), hooks=mixers("before", 1))
    parts = last_state(runs / "tiny")[1]["parts"]
    assert (parts["counters"]["step"], parts["mixer"]["steps"], parts["hungry"]["count"]) == (4, 4, 4)
    train(tiny(data, runs, **settings), hooks=mixers("nowhere", 0))
    train(tiny(data, tmp_path / "plain", **settings), hooks=mixers("nowhere", 0))
    assert_same_run(runs / "tiny", tmp_path / "plain" / "tiny")


def test_steps_that_are_timed_leave_no_trace_in_a_hook(data, tmp_path):
    """With `train.minutes` a run is made twice, its hooks too."""
    made = []
    settings = QUIET | {"train__steps": 0, "train__minutes": 0.001}
    result = train(tiny(data, tmp_path, **settings), hooks=[lambda *of: made.append(Mixer(*of)) or made[-1]])
    assert len(made) == 2
    assert made[1].steps == result.step


def test_a_dry_run_has_its_hooks_too(data, tmp_path):
    made = []
    train(tiny(data, tmp_path, **QUIET), dry_run=True, hooks=[lambda *of: made.append(Mixer(*of)) or made[-1]])
    assert [number for number, *_ in made[0].heard] == [1, 2]
    assert not (tmp_path / "tiny").exists()


NAMES = st.lists(st.sampled_from(["", "a", "b", "c", "clip"]), max_size=4)


@given(names=NAMES, taken=st.sets(st.sampled_from(["clip", "stream"])))
def test_no_two_parts_of_a_checkpoint_have_one_name(names, taken):
    hooks = [type("Named", (StepHook,), {"name": name})() for name in names]
    named = [name for name in names if name]
    if len(set(named)) < len(named) or set(named) & taken:
        with pytest.raises(ConfigError, match="Two parts of a checkpoint with one name") as caught:
            by_name(hooks, taken)
        problem = caught.value.problems[0]
        assert all((problem.what, problem.got, problem.need, problem.try_))
    else:
        assert list(by_name(hooks, taken)) == named


def test_a_name_of_the_run_itself_is_refused_before_a_step(data, tmp_path):
    clash = type("Clash", (StepHook,), {"name": "counters"})
    with pytest.raises(ConfigError, match="Two parts of a checkpoint with one name"):
        train(tiny(data, tmp_path, **QUIET), hooks=[lambda *_: clash()])
    assert not [*(tmp_path / "tiny").rglob("step_*")]


class Plain:
    """A hook that inherits nothing."""

    name, next_step, repeatable = "plain", 0, False

    def before_step(self, step):
        return step

    def after_step(self, step, result): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_what_does_nothing_is_not_called():
    only_before = type("Before", (StepHook,), {"before_step": lambda self, step: step})()
    hooks = [StepHook.__new__(type("Nothing", (StepHook,), {})), only_before, AfterStep(print), Plain()]
    assert [hook for hook, _ in calls(hooks, "before_step")] == [only_before, hooks[3]]
    assert [hook for hook, _ in calls(hooks, "after_step")] == hooks[2:]


def test_from_python(data, tmp_path, monkeypatch):
    """`tilewright.train(..., hooks=...)`."""
    given_ = []
    monkeypatch.setattr(api, "run_training", lambda loaded, hooks, executor: given_.append((hooks, executor)))
    api.train("default", {"train.steps": "1"}, hooks=[Mixer])
    assert given_ == [([Mixer], None)]


def on_a_rank(rank, data, runs, mesh):
    ceilings.measure = fixed_ceilings  # this process is the test's own
    made = []
    settings = QUIET | mesh | {"train__steps": 6, "train__global_batch_size": 4}
    train(tiny(Path(data), Path(runs), **settings), hooks=[lambda *of: made.append(Mixer(*of)) or made[-1]])
    return made[0].losses, made[0].heard


COPIES = {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}


@pytest.mark.dist
@pytest.mark.parametrize("mesh", [pytest.param(COPIES, marks=pytest.mark.slow), {"parallel__dp_shard": 2}])
def test_ranks_have_a_hook_each_that_hears_the_same(mesh, data, tmp_path):
    first, second = on_ranks(2, on_a_rank, str(data), str(tmp_path), mesh)
    assert first == second
    assert [number for number, *_ in first[1]] == [*range(1, 7)]
    assert last_state(tmp_path / "tiny")[1]["parts"]["mixer"] == {"steps": 6, "losses": first[0]}


WRITTEN = {
    "steps": 0,
    "told": ["model.layers.1.mlp.up_proj fprop"],
    "controller": {
        "units": {"model.layers.0.self_attn.q_proj dgrad": {"level": 1, "moved": 2, "quiet": 1}},
        "detector": {
            "losses": [5.718100929260254, 13.52110652923584],
            "norms": [1.2399659156799316, 17.95975685119629],
        },
        "bad_steps": 0,
        "noise": 0.011085264766820967,
    },
}
"""Part `control` of meta.json, by the version before there were hooks; most units left out."""


def test_parts_of_checkpoints_have_the_names_and_forms_that_they_had(data, tmp_path):
    setup = set_up(tiny(data, tmp_path, precision__mode="fp8_tile", precision__controller__enabled="true"))
    parts = build(setup, fresh=True)
    try:
        hook = parts.state().parts["control"]
        assert hook is parts.hook(PrecisionHook)
        hook.load_state_dict(WRITTEN)
        found = hook.state_dict()
        assert found["told"] == WRITTEN["told"]
        units = found["controller"].pop("units")
        (name, unit) = next(iter(WRITTEN["controller"]["units"].items()))
        assert units[name] == unit
        assert found["controller"] == {key: own for key, own in WRITTEN["controller"].items() if key != "units"}
        assert Teacher.name == "teacher"
        assert parts.hook(Teacher) is None
    finally:
        parts.close()
