"""GGUF files in llama.cpp itself: distributions, token ids, and what it cannot hold."""

import json

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers

from tests.compress.models import VOCAB, decoder, drawn, family_tokenizer, hf, our_tokenizer, proof, source
from tilewright.compress.export.gguf import F16, Q4_0, Q8_0
from tilewright.compress.export.targets import why_not
from tilewright.compress.gguf.architecture import state
from tilewright.compress.gguf.tensors import stored_format
from tilewright.data.common.tokenizer import Tokenizer

CONSUMER = F16.consumer.module
TRICKY = [
    "def f(x):\n    return x*12345\n\n\n",
    "naïve 🦊 12 ٣٤ don't I'LL\r\n\ttab  two",
    " <|eos|> <|im_end|>",
    "日本語、と 한국어",
    "a\u00a0b \u2003c",
]
F16_KL = 1e-5


def proven(target, model, tokenizer, tmp_path, against=None):
    given = source(model, tokenizer, tmp_path / "run")
    assert why_not(target, given) is None
    path = tmp_path / "model.gguf"
    written = target.write(given, path)
    asked = proof(tmp_path / "proof", against or model, tokenizer, TRICKY)
    row = asked.of(CONSUMER, path, written.options)
    assert row["state"] == "ran", row["reason"]
    return row, written, path


MODELS = {
    "decoder": lambda: decoder(),
    "decoder, untied, all heads": lambda: decoder(tie_embeddings=False, num_kv_heads=4),
    "decoder, one key head, wide heads": lambda: decoder(num_kv_heads=1, head_dim=32),
    "Llama": lambda: hf("Llama", tie_word_embeddings=False),
    "Qwen2": lambda: hf("Qwen2", tie_word_embeddings=True),
    "Qwen3": lambda: hf("Qwen3", tie_word_embeddings=True, head_dim=32),
    "Mistral": lambda: hf("Mistral", sliding_window=None),
}


@pytest.mark.parametrize("name", MODELS)
def test_f16_gives_the_distributions_and_ids_of_our_model(name, tmp_path):
    model = MODELS[name]()
    tokenizer = our_tokenizer() if "decoder" in name else family_tokenizer(tmp_path / "tokenizer")
    row, _, _ = proven(F16, model, tokenizer, tmp_path)
    assert row["kl"] <= F16_KL, row
    assert row["log_prob_max"] < 0.05, row
    assert row["token_ids"] == {"equal": len(TRICKY), "documents": len(TRICKY)}
    assert row["quantized"]["f16"] == sum(t.dim() > 1 for t in state(model).values())
    assert min(row["prefill_s"].values()) > 0
    assert row["cached_token_s"] > 0


@torch.no_grad()
def rounded(model, asked):
    """The model with each matrix as the file has it."""
    kind = gguf.GGMLQuantizationType[asked.upper()]
    for tensor in state(model).values():
        array = tensor.numpy()
        if stored_format(array, asked) == asked:
            tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(array, kind), kind).reshape(array.shape)))
    return model


@pytest.mark.parametrize(("target", "asked", "share"), [(Q8_0, "q8_0", 0.27), (Q4_0, "q4_0", 0.16)])
def test_fewer_bits_are_those_of_the_rounded_weights(target, asked, share, tmp_path):
    model = decoder()
    row, written, path = proven(target, model, our_tokenizer(), tmp_path, against=rounded(decoder(), asked))
    # llama.cpp rounds activations to 8 bits, our rounded model none: about 0.4 % of noise in each product.
    assert row["kl"] <= 5e-3, row
    matrices = sum(t.dim() > 1 for t in state(model).values())
    assert row["quantized"] == written.quantized == {asked: matrices, "f32": len(state(model)) - matrices}
    reader = gguf.GGUFReader(path)
    weights = sum(tensor.n_bytes for tensor in reader.tensors)
    assert weights <= share * sum(4 * t.numel() for t in state(model).values()) + 8 * 64 * 4


def test_rows_that_are_no_whole_blocks_stay_f16_and_that_is_said(tmp_path):
    row, written, _ = proven(Q4_0, decoder(ffn_dim=80), our_tokenizer(), tmp_path)
    assert row["quantized"]["f16"] == 2  # down_proj of two layers
    assert "2 matrices stay F16" in written.notes[0]
    odd = source(decoder(dim=48, num_heads=4, head_dim=4, ffn_dim=40), our_tokenizer(), tmp_path / "odd")
    assert "blocks of 32" in why_not(Q8_0, odd)


def test_a_zero_row_and_a_zero_matrix(tmp_path):
    model = decoder()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = 0
        model.model.layers[0].mlp.up_proj.weight.zero_()
    for target in (F16, Q8_0, Q4_0):
        path = tmp_path / target.name
        target.write(source(model, our_tokenizer(), tmp_path / "run"), path)
        for tensor in gguf.GGUFReader(path).tensors:
            assert np.isfinite(gguf.dequantize(tensor.data, tensor.tensor_type)).all(), tensor.name


def test_the_chat_template_and_the_special_tokens_are_in_the_file(tmp_path):
    tokenizer = our_tokenizer()
    given = source(decoder(), tokenizer, tmp_path / "run")
    (tmp_path / "run" / "chat_template.jinja").write_text("{{ messages }}")
    F16.write(given, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    held = {name.rpartition("tokenizer.")[2]: field.contents() for name, field in fields.items() if "tokenizer" in name}
    assert held["chat_template"] == "{{ messages }}"
    assert (held["ggml.bos_token_id"], held["ggml.eos_token_id"]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert held["ggml.pre"] == "qwen2"
    assert len(held["ggml.tokens"]) == VOCAB
    assert fields["llama.context_length"].contents() == 64


def older_tokenizer():
    """With the pattern that our runs had before."""
    tokenizer = our_tokenizer()
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,2}|\p{L}+|[^\p{L}\p{N}]"), "isolated")
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def test_an_older_tokenizer_is_refused_or_left_out(tmp_path):
    model, tokenizer = decoder(), older_tokenizer()
    reason = why_not(F16, source(model, tokenizer, tmp_path / "run"))
    assert "would get other token ids" in reason
    assert "--without-tokenizer" in reason
    given = source(model, tokenizer, tmp_path / "run", without_tokenizer=True)
    assert why_not(F16, given) is None
    written = F16.write(given, tmp_path / "model.gguf")
    assert "without a tokenizer" in written.notes[0]
    assert "does not start without a tokenizer" in written.lint_only
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "none"
    assert "tokenizer.ggml.tokens" not in fields


def changed(tokenizer: Tokenizer, **model: object) -> Tokenizer:
    raw = json.loads(tokenizer.backend.to_str())
    raw["model"] |= model
    return Tokenizer(type(tokenizer.backend).from_str(json.dumps(raw)), 0, 1, None, None, VOCAB, ())


def test_what_llama_cpp_cannot_hold_says_why_before_anything_is_written(tmp_path):
    tokenizer = our_tokenizer()
    mla = {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    cases = {
        "latent attention": source(drawn(decoder(**mla)), tokenizer, tmp_path / "a"),
        "experts": source(decoder(num_experts=4, expert_dim=32), tokenizer, tmp_path / "b"),
        "task is masked_lm": source(hf("Bert"), tokenizer, tmp_path / "c", task="masked_lm"),
        "model_type 'gpt2'": source(hf("GPT2", n_embd=64, n_layer=1, n_head=4), tokenizer, tmp_path / "d"),
        "attention_bias": source(hf("Llama", attention_bias=True), tokenizer, tmp_path / "e"),
        "ignore_merges": source(decoder(), changed(tokenizer, ignore_merges=True), tmp_path / "f"),
        "rope_parameters": source(
            hf("Llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            tokenizer,
            tmp_path / "g",
        ),
    }
    for words, given in cases.items():
        assert words in (why_not(F16, given) or "it can"), words
