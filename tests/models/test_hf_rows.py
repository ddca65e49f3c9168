"""Rows that a model has no positions for, and parts that a task does not train, are known before any data is prepared.

The reference is transformers itself: a forward pass at the limit, and one position beyond it.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import ConfigError
from tilewright.models.build import build_model, check_data
from tilewright.models.hf.load import hf_shapes
from tilewright.models.hf.row_lengths import position_limit, row_use

_GPT = {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
_BERT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_BERT |= {"max_position_embeddings": 24}
_DECODER = {"vocab_size": 60, "d_model": 16, "decoder_layers": 1, "encoder_layers": 1, "decoder_attention_heads": 2}
_DECODER |= {"encoder_attention_heads": 2, "decoder_ffn_dim": 24, "encoder_ffn_dim": 24}
_OPT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24}
_OPT |= {"word_embed_proj_dim": 16, "max_position_embeddings": 24}
_XGLM = {"vocab_size": 60, "d_model": 16, "num_layers": 1, "attention_heads": 2, "ffn_dim": 24}
_XGLM |= {"max_position_embeddings": 24}

# model_type -> (task, config, positions; None: as many as one likes)
LIMITS = {
    "gpt2": ("causal_lm", _GPT, 24),
    "gptj": ("causal_lm", _GPT | {"rotary_dim": 4}, 24),
    "openai-gpt": ("causal_lm", _GPT, 24),
    "gpt_bigcode": ("causal_lm", _GPT, 24),
    "opt": ("causal_lm", _OPT, 24),
    "biogpt": ("causal_lm", _BERT, 24),
    "bart": ("causal_lm", _DECODER | {"max_position_embeddings": 24}, 24),
    "bert": ("masked_lm", _BERT, 24),
    "roberta": ("masked_lm", _BERT | {"pad_token_id": 1}, 22),
    "xlm-roberta": ("masked_lm", _BERT | {"pad_token_id": 1}, 22),
    "mpnet": ("masked_lm", _BERT | {"pad_token_id": 1}, 22),
    "esm": ("masked_lm", _BERT | {"pad_token_id": 1, "mask_token_id": 3}, 22),
    "distilbert": (
        "masked_lm",
        {"vocab_size": 60, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 24},
        24,
    ),
    "albert": ("masked_lm", _BERT | {"embedding_size": 8}, 24),
    "xglm": ("causal_lm", _XGLM, None),
    "llama": ("causal_lm", _BERT, None),
    "gpt_neox": ("causal_lm", _BERT, None),
    "bloom": ("causal_lm", {"vocab_size": 60, "hidden_size": 16, "n_layer": 1, "n_head": 2}, None),
    "mamba": ("causal_lm", {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1}, None),
    "xlnet": ("causal_lm", {"vocab_size": 60, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24}, None),
    "mixtral": ("causal_lm", _BERT | {"num_key_value_heads": 2, "num_local_experts": 2}, None),
}
_AUTO = {"causal_lm": AutoModelForCausalLM, "masked_lm": AutoModelForMaskedLM}


@pytest.mark.parametrize("kind", LIMITS)
def test_rows_are_as_long_as_the_models_table_of_positions(kind, tmp_path):
    task, sizes, limit = LIMITS[kind]
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    net = hf_shapes(tmp_path, task)
    assert position_limit(net, 1000) == limit
    section = ModelSection(kind="hf", path=str(tmp_path), task=task)
    real = _AUTO[task].from_config(AutoConfig.from_pretrained(tmp_path)).eval()

    def forward(length):
        with torch.no_grad():
            return real(input_ids=torch.full((1, length), 7)).logits

    assert forward(limit or 200).isfinite().all()
    check_data(section, limit or 1000, None)
    if limit is None:
        return
    with pytest.raises((IndexError, RuntimeError)):
        forward(limit + 1)
    with pytest.raises(ConfigError, match="Rows are longer than the model's table of positions") as error:
        check_data(section, limit + 1, None)
    problem = error.value.problems[0]
    assert problem.where == "data.seq_len"
    assert f"data.seq_len = {limit + 1}, a table for {limit} positions" in problem.got
    assert f"data.seq_len = {limit}" in problem.try_


def test_nothing_is_computed_to_find_it_out(tmp_path):
    """A model of half a terabyte is looked at within its config.json alone."""
    sizes = {"vocab_size": 60, "n_embd": 65536, "n_layer": 3, "n_head": 64, "n_positions": 1024}
    AutoConfig.for_model("gpt2", **sizes).save_pretrained(tmp_path)
    net = hf_shapes(tmp_path, "causal_lm")
    assert position_limit(net, 4096) == 1024
    assert row_use(net).unused == []


_IMAGE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_WHISPER = _DECODER | {"max_target_positions": 24, "max_source_positions": 16, "num_mel_bins": 8}
_WHISPER |= {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4}

PARTS = {
    "whisper": ("causal_lm", _WHISPER, ["decoder.layers.*.encoder_attn", "encoder"]),
    "bart": ("causal_lm", _DECODER | {"max_position_embeddings": 24}, ["decoder.layers.*.encoder_attn", "encoder"]),
    "clip": (
        "image_classification",
        {
            "vision_config": _IMAGE | {"image_size": 16, "patch_size": 8},
            "text_config": _IMAGE | {"vocab_size": 60, "max_position_embeddings": 16},
        },
        ["text_model"],
    ),
    "gpt2": ("causal_lm", _GPT, []),
    "llama": ("causal_lm", _BERT, []),
    "mixtral": ("causal_lm", _BERT | {"num_key_value_heads": 2, "num_local_experts": 2}, []),
    "bert": ("masked_lm", _BERT, ["pooler"]),
}


@pytest.mark.parametrize("kind", PARTS)
def test_the_model_notes_what_the_task_does_not_train(kind, tmp_path):
    task, sizes, parts = PARTS[kind]
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    model = build_model(ModelSection(kind="hf", path=str(tmp_path), task=task), 10, device="cpu")
    if not parts:
        assert model.notes == []
        return
    (note,) = model.notes
    assert f"{task} trains " in note
    for part in parts:
        assert part in note.split("not trained: ")[1].split(", ")


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "image_classification"])
def test_an_encoder_decoder_that_does_not_do_the_task_is_refused(task, tmp_path):
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    AutoConfig.for_model("t5", **sizes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"Task {task} is not supported") as error:
        check_data(ModelSection(kind="hf", path=str(tmp_path), task=task), 16, None)
    assert "t5" in error.value.problems[0].got
