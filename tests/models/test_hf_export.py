"""Folders of Hugging Face models: FP8 that is FP8 in every family, and a config that stays the model's own."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.cover import covering, some
from tests.models.test_fp8_io import FP8, plain_decode
from tilewright.core.errors import CheckpointError
from tilewright.formats.fp8_layout import to_stored
from tilewright.models.folder.fp8_weights import fp8_bytes
from tilewright.models.hf.load import load_hf
from tilewright.models.hf.model import HFModel
from tilewright.precision.convert import convert

_SIZES = {"vocab_size": 61, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
_TEXT = _SIZES | {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _TEXT | _IDS | {"num_key_value_heads": 2}
_IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 5, "num_attention_heads": 4, "num_hidden_layers": 2}
_VIT = _IMAGE | {"hidden_size": 256, "intermediate_size": 384}
_MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_SSM = {"vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16}

FAMILIES = {
    "llama": ("causal_lm", _LLAMA),
    "qwen3": ("causal_lm", _LLAMA | {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma2": ("causal_lm", _LLAMA | {"head_dim": 64}),
    "mixtral": ("causal_lm", _LLAMA | {"num_local_experts": 4}),
    "qwen3_moe": ("causal_lm", _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    "deepseek_v3": ("causal_lm", _LLAMA | _MLA | _GROUPS | {"moe_intermediate_size": 128, "num_key_value_heads": 4}),
    "mamba": ("causal_lm", _SSM | _IDS),
    "bert": ("masked_lm", _TEXT),
    "roberta": ("masked_lm", _TEXT | {"pad_token_id": 1}),
    "vit": ("image_classification", _VIT),
    "beit": ("image_classification", _VIT | {"out_indices": [1]}),
    "swin": (
        "image_classification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 64, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
        | {"num_labels": 5},
    ),
}
NO_FP8 = {
    "gpt2": ("causal_lm", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "dinov2": ("image_classification", _IMAGE | {"hidden_size": 256}),
}
_UNLIKE = {"mamba": ("dt_proj", "x_proj", "out_proj")}
"""Linear layers whose weights are read otherwise than by calling them."""


def make(name, **changes):
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    task, sizes = (FAMILIES | NO_FP8)[name]
    return load_hf(AutoConfig.for_model(name, **sizes | changes), task)


def reload(model, folder, **options):
    """The folder as transformers reads it, and what it says about it."""
    import transformers

    kind = getattr(transformers, type(model.net).__name__)
    return kind.from_pretrained(folder, output_loading_info=True, **options)


def logits(model, net):
    batch = model.short_batch()
    if model.task == "image_classification":
        inputs = {"pixel_values": batch["pixel_values"].to(next(net.parameters()).dtype)}
    else:
        inputs = {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        return net.eval()(**inputs).logits


def decoded(weight_NK):
    return plain_decode(*to_stored(weight_NK))


def fp8_weights(name, net):
    """The parameters that should be FP8 in the folder, with the values that they then stand for."""
    values = {}
    for path, module in net.named_modules():
        if not re.search(r"\.\d+\.", path) or path.endswith(_UNLIKE.get(name, "-")):
            continue
        if type(module) is nn.Linear:
            values[f"{path}.weight"] = decoded(module.weight.detach())
        elif path.endswith(".experts"):
            for key, param in module.named_parameters():
                parts = 2 if key == "gate_up_proj" else 1
                matrices = [torch.cat([decoded(half) for half in one.chunk(parts)]) for one in param.detach()]
                values[f"{path}.{key}"] = torch.stack(matrices)
    return values


@pytest.mark.parametrize("name", some(FAMILIES, "deepseek_v3", "bert", "gemma2"))
def test_fp8_folders_hold_fp8_and_read_as_the_decoded_weights(name, tmp_path):
    model = make(name)
    values = fp8_weights(name, model.net)
    before = model.net.state_dict()
    model.save_hf(tmp_path, dtype=FP8)

    stored = load_file(tmp_path / "model.safetensors")
    in_fp8 = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == FP8)
    assert in_fp8 == sum(value.numel() for value in values.values()) > 0
    scales = sum(tensor.nbytes for key, tensor in stored.items() if key.endswith("_scale_inv"))
    assert fp8_bytes(tmp_path) == (in_fp8 + scales, (tmp_path / "model.safetensors").stat().st_size)

    want = {key: values.get(key, tensor.bfloat16().float()) for key, tensor in before.items()}
    net, info = reload(model, tmp_path)
    assert not any(info.values()), info
    ours = load_hf(tmp_path, model.task, "load").net
    for key, tensor in want.items():
        assert torch.equal(net.state_dict()[key].float(), tensor), key
        assert torch.equal(ours.state_dict()[key], tensor), key
    reference = make(name).net
    reference.load_state_dict(want)
    assert torch.equal(logits(model, ours), logits(model, reference))
    assert torch.equal(logits(model, net.float()), logits(model, reference))


@pytest.mark.parametrize("name", some(FAMILIES, "qwen3_moe"))
def test_transformers_makes_fp8_modules_of_the_fp8_weights_and_no_others(name, tmp_path, monkeypatch):
    """As it does on a GPU: names and shapes of its own FP8 modules must be those in the folder."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
    model = make(name)
    values = fp8_weights(name, model.net)
    model.save_hf(tmp_path, dtype=FP8)
    net, info = reload(model, tmp_path)
    assert not any(info.values()), info
    assert {key for key, tensor in net.state_dict().items() if tensor.dtype == FP8} == values.keys()


def test_weights_with_a_partial_block_stay_bf16(tmp_path):
    """transformers without a GPU misreads or refuses them."""
    model = make("llama", intermediate_size=300)
    model.save_hf(tmp_path, dtype=FP8)
    stored = load_file(tmp_path / "model.safetensors")
    assert {key.split(".")[-2] for key, tensor in stored.items() if tensor.dtype == FP8} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    net, info = reload(model, tmp_path)
    assert not any(info.values()), info
    assert torch.equal(net.model.layers[1].mlp.up_proj.weight, model.net.model.layers[1].mlp.up_proj.weight.bfloat16())


NOTHING, UNREADABLE = "No weight of this model can be stored in FP8", "FP8 folder would be unreadable for transformers"


@pytest.mark.parametrize(
    ("name", "changes", "title", "got"),
    [
        ("gpt2", {}, NOTHING, "8 Conv1D"),
        ("bert", {"hidden_size": 132, "intermediate_size": 140}, NOTHING, "12 Linear"),
        ("dinov2", {}, UNREADABLE, "mlp.weights_in.weight"),
    ],
)
def test_what_would_be_no_fp8_folder_is_refused_and_nothing_is_written(name, changes, title, got, tmp_path):
    with pytest.raises(CheckpointError, match=title) as error:
        make(name, **changes).save_hf(tmp_path / "hf", dtype=FP8)
    (problem,) = error.value.problems
    assert got in problem.got
    assert problem.need
    assert "bf16" in problem.try_
    assert not (tmp_path / "hf").exists()


def test_a_layer_with_the_name_of_a_head_is_not_taken_for_it(tmp_path):
    """transformers skips each module whose name ends like one that is not FP8; it must not hold FP8 weights."""
    from tilewright.models.hf.fp8_names import plan_fp8

    class Named(type(make("bert").net)):
        def __init__(self, config):
            super().__init__(config)
            self.query = nn.Linear(256, 256)

    model = HFModel(Named(make("bert").config), "masked_lm")
    plan = plan_fp8(model.net)
    assert not any("query" in name for name in plan.coded)
    assert any("key" in name for name in plan.coded)


# ---- config ----


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *covering(tuple(FAMILIES), (None, torch.bfloat16, FP8), pairs=False),
        *covering(tuple(NO_FP8), (None, torch.bfloat16), pairs=False),
    ],
)
def test_a_foreign_config_comes_back_as_it_was(name, dtype, tmp_path):
    from transformers import AutoConfig

    model = make(name)
    before = json.loads(model.config.to_json_string(use_diff=False))
    want = logits(model, model.net)
    model.save_hf(tmp_path, dtype=dtype)
    after = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed <= {"dtype", "architectures", "quantization_config", "_name_or_path", "transformers_version"}, (
        changed
    )
    net, info = reload(model, tmp_path)
    assert not any(info.values()), info
    if dtype is None:
        assert torch.equal(logits(model, net), want)


# ---- converted models ----


@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_a_converted_model_is_saved_and_loaded_by_its_class(name, mode, tmp_path):
    model = make(name)
    plain = type(model.net)
    before = {key: tensor.clone() for key, tensor in model.net.state_dict().items()}
    want = logits(model, model.net)
    net = model.net
    convert(net, mode)
    net.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [plain.__name__]
    again, info = type(net).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(again) is plain
    assert {type(module) for module in again.modules()} == {type(module) for module in plain(net.config).modules()}
    assert again.state_dict().keys() == before.keys()
    for key, tensor in before.items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert torch.equal(logits(model, again), want)
    assert type(type(net)(net.config)) is plain
