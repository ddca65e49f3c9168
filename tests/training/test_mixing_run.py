"""`[data.mixing]` in runs: a policy moves weights, every rank the same way, and a stopped run goes on with them."""

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import assert_same_run, last_state, rows, tiny
from tilewright.core.errors import ConfigError
from tilewright.planner.machine import ceilings
from tilewright.training.components.run_samples import samples_of_step
from tilewright.training.hooks.step_hook import StepHook
from tilewright.training.session import train

SMALL = {
    "precision__mode": "fp32", "train__eval_interval": 0, "train__sample_tokens": 0, "train__global_batch_size": 64,
    "train__micro_batch_size": 32, "train__steps": 14, "checkpoint__interval": 1, "optim__schedule": "constant",
    "data__mixing__interval": 2, "train__eval_batches": 3, "model__num_layers": 1,
}  # fmt: skip
POLICIES = {
    "temperature": {"data__mixing__temperature": 4.0},
    "schedule": {"data__mixing__schedule": "[{at = 0.4, weights = {alpha = 1, beta = 9}}]"},
    "ppl_guard": {
        "data__mixing__noise": 0.01,
        "data__mixing__cooldown": 0,
        "data__mixing__patience": 2,
        "data__mixing__calm": 1,
    },
    "exp3": {"data__mixing__keep": 0.5, "data__mixing__highest": 0.8},
    "aioli": {
        "data__mixing__hold": 1,
        "data__mixing__probe": 0.9,
        "data__mixing__rate": 1.0,
        "data__mixing__smoothing": 0.1,
    },
}


def of(policy, **more):
    return SMALL | {"data__mixing__policy": policy} | POLICIES.get(policy, {}) | more


def moves(run):
    log = [json.loads(line) for line in (run / "mixture.jsonl").read_text().splitlines()]
    return [row for row in log if row["kind"] == "stage"]


def shown(run):
    return [row["domains"] for row in rows(run / "events.jsonl") if row["kind"] == "mix_eval"]


class Killed(Exception):
    """Stands for the end of a process."""


class Kill(StepHook):
    """Ends the run before a step."""

    def __init__(self, at):
        self.at = at

    def before_step(self, step):
        if step.number == self.at:
            raise Killed
        return step


QUICK = ("exp3",)
"""The state of each policy that learns is killed and restored in `tests.data.test_mixing_kills`."""


@pytest.mark.parametrize(
    "policy", [policy if policy in QUICK else pytest.param(policy, marks=pytest.mark.slow) for policy in POLICIES]
)
def test_a_run_that_was_killed_goes_on_with_the_weights_of_one_that_was_not(policy, data, tmp_path):
    """Killed between two evaluations; metrics, log, policy and model are those of the undisturbed run, bit by bit."""
    with pytest.raises(Killed):
        train(tiny(data, tmp_path, run__name="killed", **of(policy)), hooks=[lambda *_: Kill(8)])
    for name in ("killed", "whole"):
        train(tiny(data, tmp_path, run__name=name, **of(policy)))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert (tmp_path / "killed" / "mixture.jsonl").read_bytes() == (tmp_path / "whole" / "mixture.jsonl").read_bytes()
    assert shown(tmp_path / "killed") == shown(tmp_path / "whole")
    rows_of = shown(tmp_path / "whole")
    assert len(rows_of) == 6
    assert all(sum(one["weight"] for one in row.values()) == pytest.approx(1) for row in rows_of)
    if policy != "ppl_guard":  # which has no reason to move here, and may find one
        assert len(moves(tmp_path / "whole")) > 1
        events = [row for row in rows(tmp_path / "whole" / "events.jsonl") if row["kind"] == "mix"]
        assert events


def test_samples_follow_the_weights(data, tmp_path):
    """From the sample that the event names on, nine of ten are of the domain that has nine tenths of the weight."""
    train(tiny(data, tmp_path, **of("schedule")))
    (event,) = (row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "mix")
    step, first = event["step"], event["first_sample"]
    assert step == 6
    assert first == -(-64 * step // 256) * 256
    counts = [Counter(), Counter()]
    for number in range(1, 15):
        for sample in samples_of_step(tmp_path / "tiny", number):
            counts[sample["sample"] >= first][sample["domain"]] += 1
    assert counts[0]["beta"] / counts[0].total() == pytest.approx(0.5, abs=0.1)
    assert counts[1]["beta"] / counts[1].total() == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("executor", ["standard", pytest.param("layer_major", marks=pytest.mark.slow)])
def test_weights_that_do_not_move_change_no_loss(executor, data, tmp_path):
    """Evaluations between steps leave no trace in them."""
    how = {"memory__executor": executor, "model__num_layers": 2, "train__steps": 6}
    train(tiny(data, tmp_path, run__name="off", **SMALL | how))
    train(tiny(data, tmp_path, run__name="static", **of("static", **how)))
    losses = [
        [row["loss"] for row in rows(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("off", "static")
    ]
    assert losses[0] == losses[1]
    assert len(moves(tmp_path / "static")) == 1
    found = shown(tmp_path / "static")
    assert [set(one["alpha"]) for one in found] == [{"weight", "epochs", "loss", "train_loss"}] * 2


def test_held_out_batches_rotate_at_their_own_interval(data, tmp_path):
    """A model that does not learn has one loss of each of three batches, and with eval_batches = 3 one of all."""
    still = {"optim__lr": 1e-12, "train__micro_batch_size": 2, "train__steps": 10, "train__global_batch_size": 4}
    train(tiny(data, tmp_path, run__name="one", **of("static", **still | {"data__mixing__interval": 1})))
    train(tiny(data, tmp_path, run__name="all", **of("static", **still | {"data__mixing__eval_batches": 3})))
    one, whole = ([row["alpha"]["loss"] for row in shown(tmp_path / name)] for name in ("one", "all"))
    assert len(one) == 9
    assert one == pytest.approx(one[:3] * 3, rel=1e-6)
    assert len({round(loss, 4) for loss in one}) == 3
    assert len(whole) == 4
    assert whole == pytest.approx([whole[0]] * 4, rel=1e-6)
    steps = [row["step"] for row in rows(tmp_path / "all" / "events.jsonl") if row["kind"] == "mix_eval"]
    assert steps == [2, 4, 6, 8], "apart from train.eval_interval; after the last step there is nothing to move"


def test_aioli_compares_losses_of_the_same_held_out_batches(data, tmp_path):
    """Two domains and hold = 1: three evaluations are one round."""
    still = {"optim__lr": 1e-12, "train__micro_batch_size": 2, "train__steps": 7, "train__global_batch_size": 4}
    train(tiny(data, tmp_path, run__name="job", **of("aioli", **still | {"data__mixing__interval": 1})))
    found = [row["alpha"]["loss"] for row in shown(tmp_path / "job")]
    assert found == pytest.approx([found[0]] * 3 + [found[3]] * 3, rel=1e-6)
    assert abs(found[0] - found[3]) > 1e-4


def run(rank, data, folder, cases):
    """One rank of several runs."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    for name, changes in cases.items():
        train(tiny(Path(data), Path(folder), run__name=name, **changes))


MESHES = {
    "copies": of("exp3", parallel__dp_replicate=2, parallel__dp_shard=1, train__steps=10),
    "stages": of("aioli", parallel__pp=2, model__num_layers=2, model__tie_embeddings="false", train__steps=10),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param("copies", marks=pytest.mark.slow), "stages"])
def test_ranks_move_as_one_process_does(data, tmp_path, name):
    cases = {name: MESHES[name]}
    on_ranks(2, run, str(data), str(tmp_path / "ranks"), cases)
    for name, changes in cases.items():
        alone = {key: value for key, value in changes.items() if not key.startswith("parallel")}
        train(tiny(data, tmp_path / "alone", run__name=name, **alone))
        ours, theirs = moves(tmp_path / "ranks" / name), moves(tmp_path / "alone" / name)
        assert [row["start"] for row in ours] == [row["start"] for row in theirs]
        assert len(ours) > 1
        for mine, one in zip(ours, theirs, strict=True):
            assert mine["weights"] == pytest.approx(one["weights"], rel=1e-3)


@pytest.mark.slow
def test_a_model_of_transformers_is_mixed_and_continues_bit_by_bit(data, tmp_path):
    """Its losses of rows come in the order of the stream, though its documents are rows of their own."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    changes = of("exp3", model__kind="hf", model__path=tmp_path / "model")
    del changes["model__num_layers"]
    with pytest.raises(Killed):
        train(tiny(data, tmp_path, run__name="killed", **changes), hooks=[lambda *_: Kill(8)])
    for name in ("killed", "whole"):
        train(tiny(data, tmp_path, run__name=name, **changes))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert len(moves(tmp_path / "whole")) > 1
    assert [set(one["alpha"]) for one in shown(tmp_path / "whole")] == [{"weight", "epochs", "loss", "train_loss"}] * 6


@pytest.mark.parametrize("policy", ["ppl_guard", pytest.param("aioli", marks=pytest.mark.slow)])
def test_another_policy_keeps_the_weights_and_says_so(policy, data, tmp_path, capsys):
    train(tiny(data, tmp_path, **of("exp3", train__steps=8)))
    before = last_state(tmp_path / "tiny")[1]["parts"]
    train(tiny(data, tmp_path, **of(policy, train__steps=9)))
    assert f"was exp3, it is {policy} now: the weights stay" in capsys.readouterr().out
    after = last_state(tmp_path / "tiny")[1]["parts"]
    assert after["mixing"]["weights"] == before["mixing"]["weights"]
    assert after["stream"]["stages"][-1] == before["stream"]["stages"][-1]
    train(tiny(data, tmp_path, **SMALL | {"train__steps": 10}))
    assert last_state(tmp_path / "tiny")[1]["parts"]["stream"]["stages"][-1] == before["stream"]["stages"][-1]


def test_a_domain_that_was_seen_often_enough_ends(data, tmp_path):
    changes = {
        "data__mixing__max_epochs": 2.0,
        "data__weights": "{alpha = 9.0, beta = 1.0}",
        "data__mixing__lowest": 0.1,
    }
    train(tiny(data, tmp_path, **of("static", **changes)))
    last = moves(tmp_path / "tiny")[-1]
    assert last["weights"] == {"alpha": 0.0, "beta": 1.0}
    assert "alpha: seen" in last["why"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data__mixing__policy": "ppl_guard", "data__holdout": 0.0}, "no held-out text"),
        ({"data__mixing__policy": "static", "data__domains": '["alpha"]'}, "Mixing needs two domains"),
        ({"data__mixing__policy": "static", "data__mixing__lowest": 0.6}, "Bounds of the mixture cannot be met"),
        ({"data__mixing__policy": "static", "data__mixing__highest": 0.4}, "Bounds of the mixture cannot be met"),
        (
            {"data__mixing__policy": "schedule", "data__mixing__schedule": "[{at = 0.0, weights = {gamma = 1}}]"},
            "unknown domains",
        ),
        ({"data__mixing__policy": "schedule"}, "stages in ascending order"),
        (
            {"data__mixing__policy": "schedule", "data__mixing__schedule": "[{at = 0.0, weights = {alpha = 0}}]"},
            "impossible weights",
        ),
        ({"data__weights": "{alpha = 0.0, beta = 0.0}"}, "not all 0"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_words(changes, what, data, tmp_path):
    with pytest.raises(ConfigError, match=what) as caught:
        train(tiny(data, tmp_path, **SMALL | changes))
    problem = caught.value.problems[0]
    assert all((problem.got, problem.need, problem.try_))
