"""Runs with `optim.kind = "muon"`: exact where runs with AdamW are, in every executor, format and checkpoint."""

import pytest
import torch

from tests.training.tiny import assert_same_run, last_state, rows, tiny
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.training import assemble
from tilewright.training.components.optimizer import make_optimizer
from tilewright.training.session import train

MUON = {"optim__kind": "muon", "optim__lr": 0.004}
FP32 = {"precision__mode": "fp32"}
LAYERS = {"memory__executor": "layer_major"} | FP32
APART = {"model__tie_embeddings": False}  # one gradient of both is summed in another order


def losses(run_dir):
    return [row["loss"] for row in rows(run_dir / "metrics.jsonl") if "eval" not in row]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"optim__moments": "8bit"},
        pytest.param({"model__num_experts": 4, "model__num_dense_layers": 1}, marks=pytest.mark.slow),
    ],
    ids=["fp32", "8bit", "experts"],
)
def test_layer_major_is_the_standard_run(data, tmp_path, options):
    """memory.executor changes no number: weights, states, losses and evaluations are the same, bit by bit."""
    given = MUON | APART | options
    standard = train(tiny(data, tmp_path, run__name="standard", **given, **FP32)).run_dir
    sliced = train(tiny(data, tmp_path, run__name="sliced", **given, **LAYERS)).run_dir
    assert_same_run(sliced, standard)
    assert losses(standard)[-1] < losses(standard)[0]


@pytest.mark.slow
def test_states_off_the_device_change_nothing(data, tmp_path):
    given = MUON | APART | {"optim__moments": "8bit"} | LAYERS
    here = train(tiny(data, tmp_path, run__name="here", **given)).run_dir
    disk = {"memory__offload_optimizer": "disk", "memory__offload_params": "cpu"}
    away = train(tiny(data, tmp_path, run__name="away", **given, **disk)).run_dir
    assert_same_run(away, here)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(FP32, marks=pytest.mark.slow),
        pytest.param({"precision__mode": "fp8_tile"}, marks=pytest.mark.slow),
        pytest.param(
            {"optim__moments": "bf16", "optim__master_weights": "stochastic", "ops__adam": "ref"},
            marks=pytest.mark.slow,
        ),
        {"optim__moments": "8bit", "optim__master_weights": "split24", "optim__clip": "delayed"} | LAYERS,
    ],
    ids=["fp32", "fp8", "stochastic", "layer_major_split24"],
)
def test_resume_equals_never_having_stopped(data, tmp_path, options):
    given = MUON | {"optim__schedule": "constant", "train__eval_interval": 0} | options
    whole = train(tiny(data, tmp_path, run__name="whole", train__steps=8, **given)).run_dir
    train(tiny(data, tmp_path, run__name="part", train__steps=5, **given))
    resumed = train(tiny(data, tmp_path, run__name="part", train__steps=8, **given)).run_dir
    (tensors, _), (expected, _) = last_state(resumed), last_state(whole)
    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []
    assert losses(whole)[-1] < losses(whole)[0]
    matrices = [name for name in expected if name.endswith("q_proj.weight.exp_avg")]
    assert matrices, sorted(expected)
    assert not [name for name in expected if name.endswith("_proj.weight.exp_avg_sq")]
    assert [name for name in expected if name.endswith("embed_tokens.weight.exp_avg_sq")]


def test_a_run_of_one_optimizer_is_not_resumed_with_the_other(data, tmp_path):
    train(tiny(data, tmp_path, train__steps=3))
    with pytest.raises(CheckpointError, match="written by another optimizer"):
        train(tiny(data, tmp_path, train__steps=6, **MUON))


def test_clipping_scales_what_muon_sees(data, tmp_path):
    """Its update has one length whatever the gradient's; the momentum has the clipped gradient."""
    given = MUON | FP32 | {"train__steps": 1, "optim__warmup_steps": 0, "checkpoint__interval": 1}
    momenta = []
    for name, clip in (("free", 0), ("clipped", 1e-3)):
        run_dir = train(tiny(data, tmp_path, run__name=name, optim__clip_norm=clip, **given)).run_dir
        tensors, _ = last_state(run_dir)
        norm = next(row["grad_norm"] for row in rows(run_dir / "metrics.jsonl") if "eval" not in row)
        momenta.append({key: value for key, value in tensors.items() if key.endswith("exp_avg")})
    for key, value in momenta[0].items():
        torch.testing.assert_close(momenta[1][key], value * (1e-3 / (norm + 1e-6)), rtol=1e-5, atol=0)


def build(data, tmp_path, **changes):
    return assemble.build(assemble.set_up(tiny(data, tmp_path, **MUON, **changes)), fresh=True)


@pytest.mark.parametrize("tied", [True, False])
def test_which_weights_are_whose(data, tmp_path, tied):
    parts = build(data, tmp_path, model__tie_embeddings=tied, model__num_experts=4, model__num_dense_layers=1)
    names = {param: name for name, param in parts.model.named_parameters()}
    groups = [{names[param] for param in group["params"]} for group in parts.optimizer.param_groups]
    assert set.union(*groups) == set(names.values())
    assert [group["weight_decay"] for group in parts.optimizer.param_groups] == [0.1, 0.1, 0.0]
    of_adamw = {"model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"} | (
        {"lm_head.weight"} - {tied and "lm_head.weight"}
    )
    assert groups[1] == of_adamw
    assert all(name.endswith("norm.weight") or "norm" in name for name in groups[2]), groups[2]
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in groups[0]
    parts.close()


def test_a_model_without_matrices_is_refused():
    section = load_recipe(None, {"optim.kind": "muon"}, environ={}).recipe.optim
    with pytest.raises(ConfigError, match="no matrices for Muon"):
        make_optimizer(section, torch.nn.Embedding(5, 4), None, 0)


def test_settings_that_cannot_be_together():
    with pytest.raises(ConfigError, match="Muon does not train adapters"):
        load_recipe(None, {"optim.kind": "muon", "lora.rank": "4"}, environ={})


def test_momentum_without_muon_is_reported():
    loaded = load_recipe(None, {"optim.momentum": "0.9"}, environ={})
    assert [note for note in loaded.notes if "optim.momentum" in note], loaded.notes
