"""Runs with `memory.executor = "layer_major"`: the standard run's numbers, its checkpoints, and lost steps."""

import math

import pytest
import torch

from tests.training.tiny import assert_same_run, last_state, rows, settings, tiny, write_text
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.training import assemble
from tilewright.training.executor.step_transaction import UnrecoverableStepError
from tilewright.training.session import train

LAYERS = {"memory__executor": "layer_major", "precision__mode": "fp32"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer_major")
    write_text(folder / "text")
    return folder


def test_it_is_the_standard_run(data, tmp_path):
    """memory.executor changes no number: weights, states, losses and evaluations are the same, bit by bit."""
    apart = {"model__tie_embeddings": False}  # one gradient of both is summed in another order
    standard = train(tiny(data, tmp_path, run__name="standard", precision__mode="fp32", **apart)).run_dir
    sliced = train(tiny(data, tmp_path, run__name="sliced", **apart, **LAYERS)).run_dir
    assert_same_run(sliced, standard)


@pytest.mark.slow
def test_it_is_the_standard_run_for_integers_too(data, tmp_path):
    options = {"model__tie_embeddings": False, "precision__mode": "fp32", "precision__rules": '[{compute = "int4_a8"}]'}
    standard = train(tiny(data, tmp_path, run__name="standard", **options)).run_dir
    sliced = train(tiny(data, tmp_path, run__name="sliced", **options | LAYERS)).run_dir
    assert_same_run(sliced, standard)


def test_resume_equals_never_having_stopped(data, tmp_path):
    options = {"optim__clip": "delayed", "optim__schedule": "constant", "train__eval_interval": 0} | LAYERS
    whole = train(tiny(data, tmp_path, run__name="whole", train__steps=8, **options)).run_dir
    train(tiny(data, tmp_path, run__name="part", train__steps=5, **options))
    resumed = train(tiny(data, tmp_path, run__name="part", train__steps=8, **options)).run_dir
    (tensors, meta), (expected, expected_meta) = last_state(resumed), last_state(whole)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []
    assert meta["parts"]["delayed"] == expected_meta["parts"]["delayed"]


def test_group_cuts_the_layers(data, tmp_path):
    for group, names in ((1, ["layers.0", "layers.1"]), (2, ["layers.0-1"])):
        parts = assemble.build(
            assemble.set_up(tiny(data, tmp_path, memory__layers_per_group=group, **LAYERS)), fresh=True
        )
        assert [part.name for part in parts.executor.run.layer_groups.groups] == names
        parts.stream.close()
        parts.memory_tracker.close()


def lose(monkeypatch, steps):
    """The gradient of `steps` (counted from 1) turns to NaN between the two layers."""
    from tilewright.memory.layer_major.passes import LayerMajor

    made, real = {"step": 0}, LayerMajor.backward

    def backward(self, factor, done, **options):
        made["step"] += 1
        bad = made["step"] in steps

        def watched(part):
            if bad and part.name == "layers.0":
                for param in part.trained:
                    param.grad.fill_(math.nan)
            done(part)

        return real(self, factor, watched, **options)

    monkeypatch.setattr(LayerMajor, "backward", backward)


def test_undo_by_checkpoint(data, tmp_path, monkeypatch):
    """memory.rollback = "checkpoint": step 5 turns bad half-way; the run goes back to step 3 and leaves step 5 out."""
    lose(monkeypatch, {5})
    options = {"optim__clip": "delayed", "memory__rollback": "checkpoint", "train__steps": 7, "train__eval_interval": 0}
    options["checkpoint__interval"] = 3
    result = train(tiny(data, tmp_path, **options, **LAYERS))
    metrics = [row for row in rows(result.run_dir / "metrics.jsonl") if "eval" not in row]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6, 7]
    assert metrics[4]["loss"] is None
    events = [(row["step"], row["kind"]) for row in rows(result.run_dir / "events.jsonl")]
    assert (5, "lost_step") in events
    assert (3, "resume") in events
    tensors, _ = last_state(result.run_dir)
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())


def test_undo_by_journal_goes_on_at_once(data, tmp_path, monkeypatch):
    lose(monkeypatch, {5})
    options = {"optim__clip": "delayed", "train__steps": 6, "train__eval_interval": 0}
    result = train(tiny(data, tmp_path, **options, **LAYERS))
    events = [(row["step"], row["kind"]) for row in rows(result.run_dir / "events.jsonl")]
    assert (5, "skip") in events
    assert not [kind for _, kind in events if kind in ("lost_step", "resume")]


def test_steps_that_are_lost_again_and_again_end_the_run(data, tmp_path, monkeypatch):
    lose(monkeypatch, set(range(5, 100)))
    options = {
        "optim__clip": "delayed",
        "memory__rollback": "checkpoint",
        "train__steps": 8,
        "train__eval_interval": 0,
    }
    with pytest.raises(
        UnrecoverableStepError, match="Non-finite gradient during backward, after some layers were updated"
    ):
        train(tiny(data, tmp_path, **options, **LAYERS))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"train.activation_checkpoint": "full"}, "has no effect with the layer-major executor"),
        ({"precision.mode": "fp8_tile", "precision.controller.enabled": "true"}, "separate optimizer step"),
        ({"memory.executor": "standard", "optim.clip": "delayed"}, "Delayed clipping needs"),
    ],
)
def test_settings_that_cannot_be_together(settings, match):
    with pytest.raises(ConfigError, match=match):
        load_recipe(None, {"memory.executor": "layer_major"} | settings, environ={})


@pytest.mark.parametrize(
    ("mode", "loss_scale", "got"),
    [
        ("pure_fp16", "auto", ["FP16"]),
        ("pure_fp16", 1024.0, ["precision.loss_scale = 1024.0", "FP16"]),
        ("bf16_mixed", 1024.0, ["precision.loss_scale = 1024.0"]),
        ("fp8_tile", 1024.0, ["precision.loss_scale = 1024.0"]),
    ],
)
def test_loss_scaling_is_refused_and_its_cause_is_named(data, tmp_path, mode, loss_scale, got):
    options = {"memory__executor": "layer_major", "precision__mode": mode, "precision__loss_scale": loss_scale}
    with pytest.raises(ConfigError, match="Loss scaling is not supported by the layer-major executor") as caught:
        train(tiny(data, tmp_path, **options))
    (problem,) = caught.value.problems
    causes = {"precision.loss_scale = 1024.0", "FP16"}
    assert {cause for cause in causes if cause in problem.got} == set(got)
    assert ('precision.loss_scale = "auto"' in problem.try_) == (loss_scale != "auto")
    assert ('precision.mode = "bf16_mixed"' in problem.try_) == (mode == "pure_fp16")


@pytest.mark.parametrize("recipe", ["slice_cpu", "slice_3b_cpu", "slice_42b_h200"])
def test_the_shipped_recipes_train_at_small_size(data, tmp_path, recipe):
    """Their executor, formats, tiers and clipping, on a model of a few thousand parameters; the loss falls."""
    given = settings(data, tmp_path, model__num_kv_heads=2, ops__adam="ref", train__steps=8, optim__lr=0.01)
    kept = ("run.", "model.dim", "model.num", "data.", "train.steps", "train.compile", "optim.", "train.log", "ops.")
    given = {name: value for name, value in given.items() if name.startswith(kept)} | {"model.ffn_dim": "64"}
    loaded = load_recipe(recipe, given | {"train.global_batch_size": "4", "train.micro_batch_size": "1"}, environ={})
    assert (loaded.recipe.memory.executor, loaded.recipe.optim.moments) == ("layer_major", "8bit")
    result = train(loaded)
    losses = [row["loss"] for row in rows(result.run_dir / "metrics.jsonl") if "eval" not in row]
    assert losses[-1] < losses[0] - 0.1, losses
