"""GGUF files in llama.cpp itself: distributions, token ids, and what it cannot hold."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors

from tests.compress.models import VOCAB, decoder, drawn, family_tokenizer, hf, our_tokenizer, proof, rules_of, source
from tilewright.compress.export.gguf import F16, Q4_0, Q8_0
from tilewright.compress.export.targets import why_not
from tilewright.compress.gguf.architecture import state
from tilewright.compress.prove.held_out import reference
from tilewright.compress.prove.tolerance import TOLERANCES
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


def proven(target, model, tokenizer, tmp_path):
    """Against the values that the file stores, and every fact of the run."""
    given = source(model, tokenizer, tmp_path / "run")
    assert why_not(target, given) is None
    path = tmp_path / "model.gguf"
    written = target.write(given, path)
    stored = written.stored()
    asked = proof(tmp_path / "proof", stored, tokenizer, TRICKY, **rules_of(given))
    log_probs = reference(stored, asked.question)
    row = asked.of(CONSUMER, path, written.options, tolerance=TOLERANCES[target.name], stored=log_probs)
    assert row["state"] == "ran", row["reason"]
    return row, written, path


def own_layers(*shapes):
    """Our decoder with layers of these shapes."""
    shape = decoder().config.shape
    return decoder(num_layers=len(shapes), layers=tuple(replace(shape, **changes) for changes in shapes))


MODELS = {
    "decoder": lambda: decoder(),
    "decoder, untied, all heads": lambda: decoder(tie_embeddings=False, num_kv_heads=4),
    "decoder, one key head, wide heads": lambda: decoder(num_kv_heads=1, head_dim=32),
    "decoder, layers of their own": lambda: own_layers(
        {"num_heads": 2, "ffn_dim": 32}, {"num_heads": 0, "num_kv_heads": 0}, {"num_kv_heads": 4}
    ),
    "Llama": lambda: hf("Llama", tie_word_embeddings=False),
    "Qwen2": lambda: hf("Qwen2", tie_word_embeddings=True),
    "Qwen3": lambda: hf("Qwen3", tie_word_embeddings=True, head_dim=32),
    "Mistral": lambda: hf("Mistral", sliding_window=None),
}
TWINS = ("decoder", "decoder, untied, all heads", "Mistral", "Qwen2")
"""Of a decoder with other heads, of Llama, and of Qwen3."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in TWINS else n for n in MODELS])
def test_f16_gives_the_distributions_and_ids_of_our_model(name, tmp_path):
    model = MODELS[name]()
    tokenizer = our_tokenizer() if "decoder" in name else family_tokenizer(tmp_path / "tokenizer")
    row, _, _ = proven(F16, model, tokenizer, tmp_path)
    assert row["kl"] <= F16_KL, row
    assert row["log_prob_max"] < 0.05, row
    assert row["token_ids"] == {"equal": 4, "documents": 4}
    assert row["odd_texts"]["equal"] == row["odd_texts"]["texts"] > 256
    assert row["quantized"]["f16"] == sum(t.dim() > 1 for t in state(model).values())
    assert min(row["prefill_s"].values()) > 0
    assert row["cached_token_s"] > 0


def test_layers_without_an_ffn_are_refused(tmp_path):
    """llama.cpp reads such a file, and computes another model: it goes to the next layer before it adds attention."""
    given = source(own_layers({"ffn_dim": 0}, {"num_heads": 2}), our_tokenizer(), tmp_path / "run")
    assert "layers without an FFN" in (why_not(F16, given) or "")


@pytest.mark.parametrize(
    "make",
    [
        lambda: decoder(sliding_window=8),
        lambda: own_layers({"sliding_window": 8}, {}),
        lambda: hf("Mistral", sliding_window=8),
    ],
)
def test_a_window_is_refused(make, tmp_path):
    """Its Llama reads no `attention.sliding_window`: it would look at all positions."""
    given = source(make(), our_tokenizer(), tmp_path / "run")
    assert "sliding_window = 8" in (why_not(F16, given) or "")


@pytest.mark.parametrize(("target", "asked", "share"), [(Q8_0, "q8_0", 0.27), (Q4_0, "q4_0", 0.16)])
def test_fewer_bits_are_those_of_the_rounded_weights(target, asked, share, tmp_path):
    model = decoder()
    row, written, path = proven(target, model, our_tokenizer(), tmp_path)
    # llama.cpp rounds activations to 8 bits, our rounded model none: about 0.4 % of noise in each product.
    assert row["kl"] <= 5e-3, row
    matrices = sum(t.dim() > 1 for t in state(model).values())
    assert row["quantized"] == written.quantized == {asked: matrices, "f32": len(state(model)) - matrices}
    reader = gguf.GGUFReader(path)
    values = dict(written.stored().named_parameters())
    for tensor in reader.tensors:
        if "attn_output" in tensor.name or "token_embd" in tensor.name:
            of = "embed_tokens" if "token" in tensor.name else f"layers.{tensor.name.split('.')[1]}.self_attn.o_proj"
            expected = next(value for name, value in values.items() if of in name).numpy()
            assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), expected), tensor.name
    weights = sum(tensor.n_bytes for tensor in reader.tensors)
    assert weights <= share * sum(4 * t.numel() for t in state(model).values()) + 8 * 64 * 4


def test_small_tensors_are_not_lost_in_four_bits(tmp_path):
    """Norms that are large and matrices behind them that are small: scales below FP16's normal numbers."""
    model = decoder()
    with torch.no_grad():
        for block in model.blocks:
            for norm, layers in (
                (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
                (block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)),
            ):
                norm.weight.mul_(4096)
                for layer in layers:
                    layer.weight.div_(4096)
    row, _, path = proven(Q4_0, model, our_tokenizer(), tmp_path)
    assert row["kl"] <= 5e-3, row
    small = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.attn_v.weight")
    scales = small.data.reshape(-1, 18)[:, :2].copy().view("<f2").astype(np.float32)
    assert 0 < np.abs(scales).max() < 2.0**-14
    values = gguf.dequantize(small.data, small.tensor_type)
    exact = model.blocks[0].self_attn.v_proj.weight.detach().numpy()
    assert np.square(values - exact).sum() < 0.02 * np.square(exact).sum()  # four bits lose 0.006 of drawn weights


def test_rows_that_are_no_whole_blocks_stay_f16_and_that_is_said(tmp_path):
    row, written, _ = proven(Q4_0, decoder(ffn_dim=80), our_tokenizer(), tmp_path)
    assert row["quantized"]["f16"] == 2  # down_proj of two layers
    assert any("2 matrices stay F16" in note for note in written.notes)
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
    assert fields["llama.context_length"].contents() == 64  # a model that was made here knows the rows of its training
    assert (held["ggml.add_bos_token"], held["ggml.add_eos_token"]) == (True, False)


@pytest.mark.parametrize("positions", [128, 2048])
def test_the_length_is_the_models_not_that_of_the_rows(positions, tmp_path):
    given = source(hf("Qwen3", max_position_embeddings=positions), family_tokenizer(tmp_path / "t"), tmp_path / "run")
    assert given.recipe.data.seq_len == 64
    F16.write(given, tmp_path / "model.gguf")
    assert gguf.GGUFReader(tmp_path / "model.gguf").fields["qwen3.context_length"].contents() == positions


def normalizing(tokenizer: Tokenizer, normalizer) -> Tokenizer:
    tokenizer.backend.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize(
    "normalizer",
    [
        pytest.param(normalizers.NFC(), marks=pytest.mark.slow),
        normalizers.Sequence([normalizers.NFC()]),
        normalizers.Sequence([normalizers.Sequence([])]),
    ],
    ids=["NFC", "sequence", "empty sequence"],
)
def test_text_that_llama_cpp_does_not_normalise_is_refused_or_left_to_callers(normalizer, tmp_path):
    tokenizer = normalizing(our_tokenizer(), normalizer)
    given = source(decoder(), tokenizer, tmp_path / "run")
    reason = why_not(F16, given)
    if tokenizer.encode("e\u0301") == our_tokenizer().encode("e\u0301"):
        assert reason is None
        return
    assert "llama.cpp does not" in reason
    assert "--normalized-text" in reason
    given = source(decoder(), tokenizer, tmp_path / "run", normalized_text=True)
    assert why_not(F16, given) is None
    written = F16.write(given, tmp_path / "model.gguf")
    assert any("callers give it in NFC" in note for note in written.notes)
    asked = proof(tmp_path / "proof", given.model, tokenizer, **rules_of(given))
    limit = TOLERANCES["gguf-f16"]
    row = asked.of(CONSUMER, tmp_path / "model.gguf", written.options, tolerance=limit)
    assert row["state"] == "ran", row["reason"]
    row = asked.of(CONSUMER, tmp_path / "model.gguf", {}, tolerance=limit)  # as it was: text as it is
    assert row["state"] == "failed"
    assert "other token ids for" in row["reason"]
    assert row["token_ids"]["equal"] == row["token_ids"]["documents"], "documents that are normalised say nothing"


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


def with_pairs(tokenizer: Tokenizer) -> Tokenizer:
    """A post-processor that llama.cpp has not: two tokens before a text."""
    ids = [("<|bos|>", tokenizer.bos_id), ("<|eos|>", tokenizer.eos_id)]
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<|bos|> <|eos|> $A", special_tokens=ids)
    return tokenizer


def with_stripping(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.backend.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    return tokenizer


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
        "unk_token": source(decoder(), changed(tokenizer, unk_token="<|pad|>"), tmp_path / "h"),
        "puts one token before": source(hf("Llama"), with_pairs(our_tokenizer()), tmp_path / "i"),
        "takes blanks beside it": source(decoder(), with_stripping(our_tokenizer()), tmp_path / "j"),
        "normalizer Lowercase": source(
            decoder(), normalizing(our_tokenizer(), normalizers.Lowercase()), tmp_path / "k", normalized_text=True
        ),
        "rope_parameters": source(
            hf("Llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            tokenizer,
            tmp_path / "g",
        ),
    }
    for words, given in cases.items():
        assert words in (why_not(F16, given) or "it can"), words
