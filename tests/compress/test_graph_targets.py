"""Graph targets in their runtimes: distributions in FP32 and in 8 and 4 bits, what is quantised, bytes."""

from dataclasses import replace

import pytest
import torch

from tests.compress.models import decoder, hf, our_tokenizer, proof, source
from tilewright.compress.export.aoti import AOTI
from tilewright.compress.export.executorch import EXECUTORCH
from tilewright.compress.export.onnx import ONNX, ONNX_INT8
from tilewright.compress.export.openvino import OPENVINO
from tilewright.compress.export.publish import artefact_bytes
from tilewright.compress.export.target import missing
from tilewright.compress.export.targets import why_not
from tilewright.compress.graph.quantized import quantize_8da4w
from tilewright.compress.graph.trace import graph_of

EXACT_KL, INT8_KL = 1e-5, 5e-3
ROUNDED_KL = 1e-3
"""Runtime and torch round activations to INT8 each in its own way."""
MLA = {"attention": "mla", "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_dim": 32, "num_dense_layers": 1}
MODELS = {
    "decoder": lambda: decoder(),
    "decoder, untied": lambda: decoder(tie_embeddings=False),
    "latent attention": lambda: decoder(**MLA),
    "experts": lambda: decoder(**EXPERTS),
    "Llama": lambda: hf("Llama", tie_word_embeddings=False),
    "Qwen3": lambda: hf("Qwen3", tie_word_embeddings=True),
    "Bert": lambda: hf("Bert"),
}


def proven(target, model, tmp_path, task="causal_lm", answers=None):
    if (absent := missing((*target.packages, *target.consumer.packages), target.extra)) is not None:
        pytest.skip(absent)
    tokenizer = our_tokenizer()
    given = source(model, tokenizer, tmp_path / "run", task)
    assert why_not(target, given) is None
    path = tmp_path / "artefact"
    written = target.write(given, path)
    asked = proof(tmp_path / "proof", model, tokenizer)
    if answers is not None:
        expected = replace(asked.expected, log_probs_NV=answers(model, asked.question))
        asked = replace(asked, expected=expected)
    row = asked.of(target.consumer.module, path, written.options)
    assert row["state"] == "ran", row["reason"]
    assert min(row["prefill_s"].values()) > 0
    return row, written, path


def test_onnx_in_onnxruntime_fp32_and_int8(tmp_path):
    model = decoder()
    row, written, exact = proven(ONNX, model, tmp_path / "fp32")
    assert row["kl"] <= EXACT_KL, row
    assert row["cached_token_s"] > 0
    row, written, int8 = proven(ONNX_INT8, model, tmp_path / "int8")
    assert EXACT_KL < row["kl"] <= INT8_KL, row
    assert written.quantized == {"MatMulInteger": 9}  # four of each layer, and the tied head
    assert sum(row["quantized"].values()) == 9
    assert "fp32" not in row["quantized"]
    saved = artefact_bytes(exact) - artefact_bytes(int8)
    assert saved > 0.7 * 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "decoder"])
@pytest.mark.parametrize(("target", "bound"), [(ONNX, EXACT_KL), (ONNX_INT8, INT8_KL)], ids=["onnx", "onnx-int8"])
def test_other_models_in_onnxruntime(name, target, bound, tmp_path):
    row, written, _ = proven(target, MODELS[name](), tmp_path, "masked_lm" if name == "Bert" else "causal_lm")
    assert row["kl"] <= bound, row
    assert (row["cached_token_s"] is None) == (name == "Bert")
    assert any("whole rows" in note for note in written.notes) == (name == "Bert")
    if name == "experts" and target is ONNX_INT8:
        assert written.quantized["fp32"] == 1  # the router


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "latent attention", "experts", "Llama"])
@pytest.mark.parametrize(
    ("target", "bound"),
    [(OPENVINO, INT8_KL), (AOTI, EXACT_KL)],
    ids=["openvino", "aoti"],
)
def test_other_runtimes(name, target, bound, tmp_path):
    row, _, _ = proven(target, MODELS[name](), tmp_path)
    assert row["kl"] <= bound, row
    assert row["cached_token_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "latent attention", "experts", "Llama"])
def test_executorch_computes_what_torch_computes_with_the_same_codes(name, tmp_path):
    """What 4 bits lose of drawn weights says nothing, so the program is compared with its rounded graph in torch."""
    model = MODELS[name]()
    row, _, _ = proven(EXECUTORCH, model, tmp_path, answers=rounded_answers)
    print(name, row["kl"], row["log_prob_max"])
    assert row["kl"] <= ROUNDED_KL, row
    assert row["cached_token_s"] > 0


@torch.no_grad()
def rounded_answers(model, question):
    """Log-probabilities [N, V] in FP64 of the graph with its 4-bit weights, eager."""
    graph, _ = quantize_8da4w(graph_of(model))
    empty = [torch.zeros(1, heads, 0, width) for _, (heads, _, width) in graph.kept]
    rows = [graph(torch.from_numpy(ids)[None], *empty)[0][0].double().log_softmax(-1) for ids in question.rows]
    return torch.stack([rows[row][at] for row, at in question.positions_N2]).numpy()
