"""Runs with the precision controller from a recipe: decisions, files, resume after a kill."""

import math
import signal
from dataclasses import replace

import pytest
import torch

from tests.training import test_kill
from tests.training.tiny import assert_same_run, last_state, rows, tiny
from tilewright.core.errors import ConfigError, FitError
from tilewright.precision.controller.controller_log import read_history
from tilewright.precision.controller.layer_statistics import GemmStats, LayerStats, QuantStats
from tilewright.precision.controller.monitor import Monitor
from tilewright.training.assemble import build, set_up
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.session import train

CONTROLLED = {
    "precision__mode": "fp8_tile",
    "precision__controller__enabled": "true",
    "precision__controller__interval": 2,
    "precision__controller__recalibrate_interval": 6,
    "precision__controller__cooldown": 3,
    "precision__controller__budget": 0.9,
    "train__steps": 12,
    "train__eval_interval": 4,
    "train__sample_tokens": 0,
}


def test_a_calm_run_stays_in_8_bits_and_equals_one_without_a_controller(data, tmp_path):
    settings = CONTROLLED | {"train__steps": 6}
    train(tiny(data, tmp_path / "on", **settings))
    # A schedule that changes nothing within these steps: layers keep for backward what they keep with a controller.
    off = {name: value for name, value in settings.items() if "controller" not in name}
    off["precision__fp8_until"] = 0.99
    train(tiny(data, tmp_path / "off", **off))
    history = read_history(tmp_path / "on" / "tiny")
    assert [sample.step for sample in history.samples] == [1, 3, 5]
    assert history.moves == []
    assert not (tmp_path / "off" / "tiny" / "precision.jsonl").exists()
    (a, _), (b, _) = last_state(tmp_path / "on" / "tiny"), last_state(tmp_path / "off" / "tiny")
    for name, tensor in b.items():
        assert torch.equal(a[name], tensor), name


def _poison(monkeypatch, steps):
    """Make the loss of some steps infinite, as long as a matmul has 8 bits."""
    whole = StandardExecutor._attempt
    calls = []

    def attempt(self, microbatches, num_targets, scale):
        found = whole(self, microbatches, num_targets, scale)
        formats = self.control.controller.formats() if self.control is not None else {}
        now = {str(layer.gemms) for layer in self.model.modules() if hasattr(layer, "gemms")}
        calls.append(now)
        if len(calls) in steps and any("fp8" in text for text in now) and formats:
            found = replace(found, loss=math.inf, skipped="the loss or its gradient is not finite")
        return found

    monkeypatch.setattr(StandardExecutor, "_attempt", attempt)
    return calls


def test_a_bad_step_is_redone_recorded_and_something_moves(data, tmp_path, monkeypatch):
    calls = _poison(monkeypatch, {5})
    train(tiny(data, tmp_path, **CONTROLLED))
    run = tmp_path / "tiny"
    metrics = [row for row in rows(run / "metrics.jsonl") if "loss" in row]
    redone = [row for row in metrics if "redone" in row]
    assert [row["step"] for row in redone] == [5]
    assert redone[0]["loss"] is not None
    assert redone[0]["skipped"] is None
    assert len(calls) == 13
    assert not any("fp8" in text for text in calls[5]), "again in wider formats"
    kinds = [row["kind"] for row in rows(run / "events.jsonl")]
    assert kinds.count("redo") == 1
    assert "precision_move" in kinds
    history = read_history(run)
    after = [move for move in history.moves if move.step == 5]
    assert after, "what was measured at that step, or the step itself where no measurement is beyond its limit"
    assert {move.before for move in after} == {"fp8_tile"}
    steps = history.formats(steps=[1, 5, 6, 12])
    assert all(name == "fp8_tile" for (_, gemm), name in steps[1].items() if gemm == "fprop")
    moved = next(move for move in history.moves)
    assert steps[6][moved.layer, moved.gemm] == moved.after


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    runs = tmp_path_factory.mktemp("straight")
    train(tiny(data, runs, **test_kill.CHANGES, **KILLED))
    return runs / "tiny"


WILD = {
    "precision__controller__patience": 1,
    "precision__controller__spike_factor": 0.1,
    "optim__schedule": "constant",
    "optim__lr": 3.0,
    "optim__clip_norm": 0.0,
}
KILLED = {name: value for name, value in CONTROLLED.items() if name not in test_kill.CHANGES} | WILD
"""A run that goes wild, so that there is something to decide."""


@pytest.mark.slow
def test_killed_and_resumed_it_decides_the_same(data, tmp_path, straight, monkeypatch):
    monkeypatch.setattr(test_kill, "CHANGES", test_kill.CHANGES | KILLED)
    for step in (20, 41):
        code, said = test_kill._kill(data, tmp_path, step, 0.01)
        assert code == -signal.SIGKILL, said
    train(tiny(data, tmp_path, **test_kill.CHANGES))
    assert_same_run(tmp_path / "tiny", straight)
    assert rows(tmp_path / "tiny" / "precision.jsonl") == rows(straight / "precision.jsonl")
    told = ("redo", "precision_move", "precision_budget")
    events = [
        [(row["step"], row["kind"], row["message"]) for row in rows(run / "events.jsonl") if row["kind"] in told]
        for run in (tmp_path / "tiny", straight)
    ]
    assert events[0] == events[1]
    # Whether a step is bad enough to be computed again is a matter of the CPU's order of sums.
    assert "precision_move" in {kind for _, kind, _ in events[0]}, "there was to be something to decide"


def test_a_schedule_of_products_without_a_controller(data, tmp_path):
    changes = {
        "precision__mode": "fp8_tile",
        "precision__fp8_from": "[0.0, 0.25, 0.5]",
        "precision__fp8_until": 0.75,
        "train__steps": 8,
    }
    train(tiny(data, tmp_path, **changes))
    told = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "precision_switch"]
    assert [row["step"] for row in told] == [3, 5, 7]
    assert "fprop, wgrad, dgrad" in told[-1]["message"]
    assert not (tmp_path / "tiny" / "precision.jsonl").exists()


@pytest.mark.slow
def test_the_rate_follows_the_noise(data, tmp_path):
    train(tiny(data, tmp_path / "a", **CONTROLLED))
    train(tiny(data, tmp_path / "b", **CONTROLLED, precision__lr_noise_damping=10.0))
    a, b = ([row["lr"] for row in rows(tmp_path / x / "tiny" / "metrics.jsonl") if "lr" in row] for x in "ab")
    noise = [sample.noise for sample in read_history(tmp_path / "b" / "tiny").samples]
    assert b[0] == pytest.approx(a[0] / (1 + 10 * noise[0]), rel=1e-4)
    assert 0.5 < b[-1] / a[-1] < 0.95


def test_an_impossible_budget_is_refused_before_the_first_step(data, tmp_path):
    loaded = tiny(data, tmp_path, **(CONTROLLED | {"precision__controller__budget": 0.01}))
    setup = set_up(loaded)
    with pytest.raises(FitError, match="Controller budget is too small") as caught:
        build(setup, fresh=True)
    assert "at least" in str(caught.value)


def test_contradictions_are_told_all_at_once(data, tmp_path):
    wrong = {
        "precision__controller__enabled": "true",
        "precision__fp8_from": "[0, 2.0, 0]",
        "precision__controller__interval": 2000,
    }
    with pytest.raises(ConfigError) as caught:
        tiny(data, tmp_path, **wrong)
    text = str(caught.value)
    assert "Share of the steps outside 0 to 1" in text
    assert 'need   precision.mode = "fp8_tile"' in text
    assert "Controller's recalibrate_interval is below its interval" in text


def test_elements_are_clipped(data, tmp_path):
    losses = []
    for bound in (0.0, 1e-6):
        train(tiny(data, tmp_path / str(bound), optim__clip_elements=bound, optim__clip_norm=0.0, train__steps=3))
        found = rows(tmp_path / str(bound) / "tiny" / "metrics.jsonl")
        losses.append([row["grad_norm"] for row in found if "grad_norm" in row])
    count = sum(t.numel() for name, t in last_state(tmp_path / "0.0" / "tiny")[0].items() if name.startswith("model."))
    assert losses[0][0] > losses[1][0] > 0
    assert losses[1][0] <= 1e-6 * count**0.5 * 1.001


SETTINGS = {
    "precision.controller.granularity": ("three_level", {"wrong": 2}),
    "precision.controller.interval": (4, {}),
    "precision.controller.cooldown": (50, {"wrong": 2}),
    "precision.controller.patience": (5, {"wrong": 1, "precision__controller__recalibrate_interval": 1000}),
    "precision.controller.recalibrate_interval": (2, {"wrong": 1, "precision__controller__patience": 5}),
    "precision.controller.retry_steps": ("false", {"poison": 5}),
    "precision.controller.spike_factor": (0.001, {"train__steps": 24, "optim__lr": 1e-6}),
}
"""A setting, another value of it, and the run in which that shows: evidence that is wrong in the first samples, or a
step that is poisoned."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_controller(name, data, tmp_path, monkeypatch):
    value, given = SETTINGS[name]
    changes = {key: given[key] for key in given.keys() - {"wrong", "poison"}}
    recorded = []
    for run, extra in (("a", {}), ("b", {name.replace(".", "__"): value})):
        with monkeypatch.context() as patch:
            if "poison" in given:
                _poison(patch, {given["poison"]})
            if "wrong" in given:
                _distort(patch, given["wrong"])
            train(tiny(data, tmp_path / run, **(CONTROLLED | {"precision__controller__budget": 1.0} | changes | extra)))
        kinds = ("precision_move", "redo", "skip")
        told = [row for row in rows(tmp_path / run / "tiny" / "events.jsonl") if row["kind"] in kinds]
        history = read_history(tmp_path / run / "tiny")
        recorded.append(
            ([(row["step"], row["kind"]) for row in told], history.moves, [s.step for s in history.samples])
        )
    assert recorded[0] != recorded[1]


def _distort(monkeypatch, samples):
    """Make the first samples say that one matmul is bad."""
    sample = Monitor.sample
    taken = []

    def distorted(self, passes):
        evidence = sample(self, passes)
        taken.append(1)
        if len(taken) > samples:
            return evidence
        layers = dict(evidence.layers)
        name = next(name for name in layers if name.endswith("up_proj"))
        bad = {**layers[name].matmuls, "fprop.fp8_tile": GemmStats(0.5, 0.5, 0.9, 3.0)}
        layers[name] = LayerStats(layers[name].tensors, bad)
        return QuantStats(layers)

    monkeypatch.setattr(Monitor, "sample", distorted)
