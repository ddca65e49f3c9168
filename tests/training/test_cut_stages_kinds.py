"""Adapters and weights in 16 bits in stages whose matrices are cut, of a decoder and of a Hugging Face model: the run
of one process, also of one that stops and continues elsewhere; exports. By default `test_cut_stages_run` has
adapters."""

import pytest
from safetensors.torch import load_file

from tests.training.test_cut_stages_run import CUT, SETTINGS, ZBV
from tests.training.test_experts_run import STOP, Launches, check_same
from tests.training.test_pipeline_run import EXPORT
from tests.training.test_tensor_hf import write_model
from tests.training.test_tensor_run import STORED

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]
LORA = {"lora__rank": 2, "lora__base": "keep", "optim__lr": 1e-2}
TILES = {"model__dim": 256, "model__num_heads": 8, "model__num_kv_heads": 8, "model__head_dim": 32,
         "model__ffn_dim": 256}  # fmt: skip
"""Parts of two ranks have whole blocks of 128 x 128."""
ADAPTED = 1e-3
"""Of losses and weights. B is zero at first, and Adam's first step of an element is the rate, this way or that, however
small its gradient is: a last bit of a sum may be a step of B."""
HF_SIZES = {"num_hidden_layers": 4}


def ran(data, folder, changes, bounds, settings=SETTINGS):
    """Each run on one process, whole in stages under 1F1B, and stopped half-way under ZBV and gone on with as one
    process."""
    launch = Launches(data, folder, settings)
    launch(1, {f"{name}_alone": of_run | EXPORT for name, of_run in changes.items()}, seconds=200)
    whole = {name: of_run | CUT | EXPORT for name, of_run in changes.items()}
    launch(4, whole | {f"{name}_on": of_run | ZBV | STOP for name, of_run in changes.items()}, seconds=300)
    launch(1, {f"{name}_on": of_run | EXPORT for name, of_run in changes.items()}, seconds=200)
    for key, found in launch.found.items():
        assert not isinstance(found, str), f"{key}: {found}"
    for name in changes:
        assert [launch.found[f"{name}_on", world, 0][0] for world in (4, 1)] == [2, 4]
        assert len({str(launch.found[name, 4, rank]) for rank in range(4)}) == 1, "all ranks have the same numbers"
        for run in (name, f"{name}_on"):
            check_same(folder / run, folder / f"{name}_alone", bound=bounds.get(name, 2e-6))
    return launch


def check_adapters(folder, run, alone, bound=2e-2):
    """Exported ones, of all layers."""
    ours, theirs = (load_file(folder / name / "hf/adapter_model.safetensors") for name in (run, alone))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].shape == tensor.shape
        assert (ours[key] - tensor).norm() < bound * tensor.norm(), f"{run}: {key}"


ADAPTERS = {
    "kept": LORA,
    "first": LORA | {"lora__targets": '["*layers.0.*"]'},
    "saved": LORA | {"lora__modules_to_save": '["embed_tokens", "lm_head"]'},
    "coded": LORA | TILES | {"lora__base": "fp8"},
}


@pytest.mark.parametrize("names", [("kept", "first", "saved"), ("coded",)])
def test_adapters_of_a_decoder(data, tmp_path, names):
    """On all layers; on the first rank's alone; beside whole ends that are one parameter; on a base of FP8 codes."""
    changes = {name: ADAPTERS[name] for name in names}
    ran(data, tmp_path, changes, dict.fromkeys(changes, ADAPTED))
    for name in changes:
        check_adapters(tmp_path, name, f"{name}_alone")
        check_adapters(tmp_path, f"{name}_on", f"{name}_alone")


def test_adapters_of_a_hugging_face_model(data, tmp_path):
    """The base in FP32, and in BF16 as `finetune` has it."""
    changes = {"kept": LORA, "last": LORA | {"lora__targets": '["*layers.3.mlp*"]'}}
    changes["stored"] = LORA | {"optim__master_weights": "stochastic"}
    model = write_model(tmp_path, "qwen3", **HF_SIZES)
    ran(data, tmp_path, changes, dict.fromkeys(changes, ADAPTED) | {"stored": 1e-2}, SETTINGS | model)
    for name in changes:
        bound = 0.1 if name == "stored" else 2e-2
        check_adapters(tmp_path, name, f"{name}_alone", bound)
        check_adapters(tmp_path, f"{name}_on", f"{name}_alone", bound)


@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_weights_in_16_bits(data, tmp_path, kind):
    """Rounded by chance, with their low halves beside them, under a loss scale; sums in another order are rounded to
    other numbers."""
    settings = SETTINGS | (write_model(tmp_path, "qwen3", **HF_SIZES) if kind == "hf" else {})
    stored = STORED if kind == "decoder" else {name: of_run for name, of_run in STORED.items() if name != "split24"}
    ran(data, tmp_path, stored, dict.fromkeys(stored, 1e-2), settings)
