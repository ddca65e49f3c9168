"""ONNX INT8 on CPUs without VNNI, whose kernels clip sums of two products: emulated in NumPy by the reference
evaluator.

onnxruntime chooses its kernel by the CPU itself and cannot be told another, so the machine that tests run on may have
either kind; the emulation has the clipping kind everywhere.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tests.compress.models import decoder, hf, our_tokenizer, source
from tilewright.compress.export.onnx import traced_onnx
from tilewright.compress.onnx import int8_columns
from tilewright.compress.onnx.int8 import quantize_int8
from tilewright.compress.onnx.int8_columns import quantize_columns
from tilewright.compress.prove.held_out import all_logits

INT8_KL = 5e-3
IDS = np.random.default_rng(3).integers(0, 400, (1, 24))
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_dim": 32, "num_dense_layers": 1}
MODELS = {
    "decoder": lambda: decoder(),
    "untied": lambda: decoder(tie_embeddings=False),
    "experts": lambda: decoder(**EXPERTS),
    "odd width": lambda: decoder(ffn_dim=97),
    "Llama": lambda: hf("Llama", tie_word_embeddings=False),
}


class Counted:
    """Pairs of products that were clipped."""

    clipped = 0


def sum_of_pairs(a_MK: np.ndarray, b_KN: np.ndarray) -> np.ndarray:
    """vpmaddubsw and vpmaddwd: products of columns 2i and 2i + 1 added in 16 bits with saturation, then in 32."""
    pad = a_MK.shape[-1] % 2
    a = np.pad(a_MK.astype(np.int32), [(0, 0)] * (a_MK.ndim - 1) + [(0, pad)])
    b = np.pad(b_KN.astype(np.int32), [(0, 0)] * (b_KN.ndim - 2) + [(0, pad), (0, 0)])
    products = a[..., :, :, None] * b[..., None, :, :]
    pairs = products[..., 0::2, :] + products[..., 1::2, :]
    Counted.clipped += int(((pairs > 32767) | (pairs < -32768)).sum())
    return np.clip(pairs, -32768, 32767).sum(-2).astype(np.int32)


class MatMulInteger(OpRun):
    """As a CPU without VNNI computes it: unsigned bytes as they are, the zero point taken off by sums of columns."""

    op_domain = ""

    def _run(self, a, b, a_zero_point=None, b_zero_point=None):
        assert (a.dtype, b.dtype) == (np.uint8, np.int8)
        assert not np.any(b_zero_point)
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        b = np.broadcast_to(b, (*lead, *b.shape[-2:]))
        point = np.int32(a_zero_point if a_zero_point is not None else 0)
        return (sum_of_pairs(a, b) - point * b.astype(np.int32).sum(-2, keepdims=True),)


def logits(model, empty, *, clipping: bool) -> np.ndarray:
    evaluator = ReferenceEvaluator(model, new_ops=[MatMulInteger] if clipping else None)
    names = [tensor.name for tensor in model.graph.input]
    return evaluator.run(None, dict(zip(names, [IDS, *empty], strict=True)))[0][0]


def divergence(exact: np.ndarray, found: np.ndarray) -> float:
    p, q = (x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True)) for x in (exact, found))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@functools.cache
def exported(name):
    """The FP32 graph, and the logits of our model."""
    model = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        traced, _ = traced_onnx(source(model, our_tokenizer(), Path(folder) / "run"))
    return traced, all_logits(model, IDS[0]).detach().numpy()


def quantized(name):
    traced, exact = exported(name)
    copy = onnx.ModelProto()
    copy.CopyFrom(traced)
    found = quantize_int8(copy)
    empty = [
        np.zeros([1 if d.dim_param else d.dim_value for d in t.type.tensor_type.shape.dim], np.float32)[:, :, :0]
        for t in found.graph.input[1:]
    ]
    return exact, found, empty


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_artefact_is_right_on_a_cpu_that_clips(name):
    exact, model, empty = quantized(name)
    Counted.clipped = 0
    clipping, plain = (logits(model, empty, clipping=kind) for kind in (True, False))
    assert Counted.clipped == 0
    assert np.array_equal(clipping, plain)
    kl = divergence(exact, clipping)
    print(name, kl)
    assert kl <= INT8_KL


@pytest.mark.slow
def test_codes_up_to_127_are_wrong_there(monkeypatch):
    """What the emulation would say of onnxruntime's own scales."""
    monkeypatch.setattr("tilewright.compress.onnx.int8.scale_overrides", lambda *_: {})
    exact, model, empty = quantized("experts")
    Counted.clipped = 0
    clipping, plain = (divergence(exact, logits(model, empty, clipping=kind)) for kind in (True, False))
    print(f"KL {clipping:.4f} on a CPU that clips, {plain:.4f} on another, {Counted.clipped} pairs clipped")
    assert Counted.clipped > 0
    assert clipping > 1.5 * plain


@pytest.mark.parametrize("shape", [(2, 3), (97, 5), (64, 1), (1, 4)])
def test_the_worst_activations_are_not_clipped(shape):
    draw = np.random.default_rng(0)
    weight = draw.normal(size=shape).astype(np.float32)
    for sign in (np.abs(weight), -np.abs(weight), weight, np.ones(shape, np.float32)):
        codes, scale = quantize_columns(sign)
        worst = np.where(codes > 0, 255, 0), np.where(codes < 0, 255, 0)
        for columns_a in worst:
            for n in range(shape[1]):
                a = columns_a[:, n].astype(np.uint8)[None]
                assert sum_of_pairs(a, codes[:, n : n + 1]) == a.astype(int) @ codes[:, n : n + 1].astype(int)
        assert np.abs(codes * scale - sign).max() <= 0.5001 * scale.max()


def test_experts_share_scales_and_no_pair():
    weight = np.random.default_rng(1).normal(size=(3, 5, 4)).astype(np.float32)
    rows = int8_columns.as_rows(weight)
    assert rows.shape == (4, 3 * 6)
    assert np.array_equal(rows[2].reshape(3, 6)[:, :5], weight[:, :, 2])
    assert not rows.reshape(4, 3, 6)[:, :, 5].any()
