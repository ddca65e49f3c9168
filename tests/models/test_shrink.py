"""Configs of published sizes made small: models that learn, with the same kinds of layers."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models.folder.shrink_config import AT_MOST, smaller
from tilewright.models.hf.load import load_hf

transformers = pytest.importorskip("transformers")

VOCAB = {"vocab_size": 500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    "qwen3": {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "smollm": {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
               "hidden_size": 576},
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "bert": {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    "opt": {"num_hidden_layers": 24, "num_attention_heads": 32, "hidden_size": 2048, "ffn_dim": 8192,
            "word_embed_proj_dim": 2048},
    "mixtral": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    "qwen3_moe": {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128},
    "deepseek_v3": {"num_hidden_layers": 61, "n_group": 8, "topk_group": 4},
    "gemma3_text": {"num_hidden_layers": 26, "sliding_window": 512},
    "qwen3_next": {"num_hidden_layers": 12, "num_experts": 16},
}  # fmt: skip


def published(name):
    """config.json of a family at its own size, as `save_pretrained` writes it, without any weights."""
    values = dict(FAMILIES[name])
    kind = values.pop("model_type", name)
    return json.loads(transformers.AutoConfig.for_model(kind, **VOCAB, **values).to_json_string(use_diff=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_smallest_learns(name, tmp_path):
    words, values = next(smaller(published(name)))
    (tmp_path / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    model = load_hf(tmp_path, "masked_lm" if name == "bert" else "causal_lm")
    model.loss(model.short_batch()).loss_sum.backward()
    assert words == "2 narrow layers"
    assert len(model.layers) == 2
    assert model.vocab_size == VOCAB["vocab_size"]
    assert model.net.get_input_embeddings().weight.shape[1] == 64
    assert sum(param.numel() for param in model.parameters()) < 1_500_000
    trained = [name for name, param in model.named_parameters() if param.grad is not None]
    assert any(".0." in name for name in trained)
    assert any(".1." in name for name in trained)


def test_both_kinds_of_layers_are_kept():
    kinds = {name: next(smaller(published(name)))[1]["layer_types"] for name in ("gemma3_text", "qwen3_next")}
    assert kinds == {
        "gemma3_text": ["sliding_attention", "full_attention"],
        "qwen3_next": ["linear_attention", "full_attention"],
    }


@pytest.mark.parametrize("num_layers", [3, 4, 8])
def test_as_many_layers_as_stages_have(num_layers):
    """The first ones, and one of another kind among them."""
    for name in ("gemma3_text", "qwen3_next", "deepseek_v3", "gpt2"):
        words, values = next(smaller(published(name), num_layers))
        assert words == f"{num_layers} narrow layers"
        assert {values.get("num_hidden_layers"), values.get("n_layer")} == {num_layers, None}
        kinds = values.get("layer_types") or [0] * num_layers
        assert len(kinds) == num_layers
        assert len(set(kinds)) == (2 if name in ("gemma3_text", "qwen3_next") else 1)
    few = {"num_hidden_layers": 2, "hidden_size": 8}
    assert [values for _, values in smaller(few, num_layers)][-1] == few


def test_a_dense_layer_and_one_with_experts():
    _, values = next(smaller(published("deepseek_v3")))
    assert (values["num_hidden_layers"], values["first_k_dense_replace"], values["n_routed_experts"]) == (2, 1, 8)


def test_parts_are_made_small_and_a_method_of_quantising_is_left_out():
    config = {
        "text_config": {"num_hidden_layers": 8, "hidden_size": 512},
        "vision_config": {"num_hidden_layers": 4, "hidden_size": 256},
        "quantization_config": {"quant_method": "fp8"},
        "model_type": "some",
    }
    (first, narrow), *_, (last, whole) = smaller(config)
    assert narrow == {
        "text_config": {"num_hidden_layers": 2, "hidden_size": 64},
        "vision_config": {"num_hidden_layers": 2, "hidden_size": 64},
        "model_type": "some",
    }
    assert (first, last) == ("2 narrow layers", "all layers")
    assert whole == {name: value for name, value in config.items() if name != "quantization_config"}


@given(st.dictionaries(st.sampled_from([*AT_MOST, "num_hidden_layers", "vocab_size", "rope_theta"]),
                       st.integers(1, 10_000) | st.none() | st.booleans()))  # fmt: skip
def test_nothing_grows_and_no_other_value_changes(config):
    for _, values in smaller(config):
        assert values.keys() == config.keys()
        for name, value in config.items():
            if isinstance(value, int) and not isinstance(value, bool) and name not in ("vocab_size", "rope_theta"):
                assert 1 <= values[name] <= value
            else:
                assert values[name] == value
