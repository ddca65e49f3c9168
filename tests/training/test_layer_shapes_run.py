"""A run whose layers have shapes of their own: both executors, stopped and resumed."""

import pytest
import torch

from tests.training.tiny import last_state, rows, tiny
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
