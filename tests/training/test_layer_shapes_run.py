"""A run whose layers have shapes of their own: both executors, stopped and resumed, in stages."""

from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import last_state, rows, tiny
from tilewright.planner.machine import ceilings
from tilewright.training.hooks.step_hook import AfterStep
from tilewright.training.session import train

LAYERS = (
    "[{ num_heads = 4, num_kv_heads = 2, ffn_dim = 48, sliding_window = 5 }, { num_heads = 0 }, "
    '{ ffn_dim = 0, attention = "linear" }]'
)
OWN = {"model__num_layers": 3, "model__head_dim": 16, "model__layers": LAYERS, "train__steps": 4}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return train(tiny(data, tmp_path_factory.mktemp("whole"), **OWN)).run_dir


def losses(run):
    return [row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row]


def test_the_layer_major_executor_has_its_losses(whole, data, tmp_path):
    run = train(tiny(data, tmp_path, memory__executor="layer_major", **OWN)).run_dir
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def staged(rank, data, folder):
    """A run in stages: what the plan gave each stage, and what stages of this rank hold."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    found = {}

    def look(setup, parts):
        found["plan"] = setup.plan.split
        found["held"] = {stage.index: len(stage.layers) for stage in parts.model.stages}
        return AfterStep(lambda step, result: None)

    loaded = tiny(Path(data), Path(folder), **OWN | {"parallel__pp": 2, "model__num_layers": 6, "data__seq_len": 128})
    found["step"] = train(loaded, hooks=[look]).step
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_stages_hold_what_the_plan_gave_them(data, tmp_path):
    """Twice the same three layers; the first one of each costs more than the others together."""
    ranks = on_ranks(2, staged, str(data), str(tmp_path))
    held = ranks[0]["held"] | ranks[1]["held"]
    assert {found["step"] for found in ranks} == {4}
    assert {found["plan"] for found in ranks} == {tuple(count for _, count in sorted(held.items()))}
    alone = OWN | {"model__num_layers": 6, "data__seq_len": 128}
    whole = train(tiny(data, tmp_path / "alone", **alone)).run_dir
    assert losses(tmp_path / "tiny") == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.slow
def test_a_run_that_was_stopped_has_its_bits(whole, data, tmp_path):
    for steps in (2, 4):
        run = train(tiny(data, tmp_path, **OWN | {"train__steps": steps, "optim__schedule": "constant"})).run_dir
    never = train(tiny(data, tmp_path / "never", **OWN | {"optim__schedule": "constant"})).run_dir
    (ours, _), (theirs, _) = last_state(run), last_state(never)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    names = {name for name in ours if name.startswith("model/") or "layers.1." in name}
    assert not any("layers.1.self_attn" in name or "layers.2.mlp" in name for name in names)


def test_other_layers_are_not_resumed_into(whole, data):
    from tilewright.core.errors import TilewrightError

    with pytest.raises(TilewrightError) as caught:
        train(tiny(data, whole.parent, **OWN | {"model__layers": "[{}]", "train__steps": 5}))
    assert "layers" in str(caught.value)
