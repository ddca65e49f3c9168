"""Norm and SwiGLU that hand out 8-bit copies: gradients against autograd's, who reads what, compiled and not."""

import pytest
import torch

from tilewright.core.config.sections.model import ModelSection
from tilewright.core.hardware import detect_machine
from tilewright.formats.quant_error import sqnr_db
from tilewright.formats.quantize import quantize
from tilewright.formats.tiled import FP8_ROW
from tilewright.models.build import build_model, init_weights
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.float8.quantizing_layers import QuantizingNorm, QuantizingSwiGLU
from tilewright.precision.float8.weight_cache import QuantizedWeights

KERNELS = Kernels.default()


def test_norm_and_its_gradient_equal_those_of_float64():
    x = torch.randn(3, 50, 200, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(200).requires_grad_()
    y, row, column, _ = QuantizingNorm(KERNELS, FP8_ROW)(x, weight, 1e-5)
    wide_x, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = ref.rms_norm(wide_x, wide_weight, 1e-5)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, weight), dy)
    theirs = torch.autograd.grad(exact, (wide_x, wide_weight), dy.double())
    for mine, want in zip((y, *ours), (exact, *theirs), strict=True):
        assert sqnr_db(want, mine) > 48  # one rounding to BF16
    assert torch.equal(row.qdata, quantize(y.detach().flatten(0, 1), FP8_ROW).qdata)
    assert torch.equal(column.qdata, quantize(y.detach().flatten(0, 1).T, FP8_ROW).qdata)


def test_swiglu_and_its_gradient_equal_those_of_float64():
    gate, up = (torch.randn(130, 72, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    y, row, *_ = QuantizingSwiGLU(KERNELS, FP8_ROW)(gate, up)
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    exact = torch.nn.functional.silu(wide[0]) * wide[1]
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (gate, up), dy)
    theirs = torch.autograd.grad(exact, wide, dy.double())
    for mine, want in zip((y, *ours), (exact, *theirs), strict=True):
        assert sqnr_db(want, mine) > 48
    assert torch.equal(row.qdata, quantize(y.detach(), FP8_ROW).qdata)


class CountingKernels(Kernels):
    """Counts quantisations by operation."""

    def __init__(self):
        super().__init__(detect_machine())
        self.count = dict.fromkeys(("rms_norm_quantize", "swiglu_quantize", "quantize_both"), 0)

    def rms_norm_quantize(self, *args, **kwargs):
        self.count["rms_norm_quantize"] += 1
        return super().rms_norm_quantize(*args, **kwargs)

    def swiglu_quantize(self, *args, **kwargs):
        self.count["swiglu_quantize"] += 1
        return super().swiglu_quantize(*args, **kwargs)

    def quantize_both(self, *args, **kwargs):
        self.count["quantize_both"] += 1
        return super().quantize_both(*args, **kwargs)


def decoder(kernels=KERNELS, mode="fp8_tile", layers=2, **shape):
    model = build_model(ModelSection(dim=128, num_layers=layers, num_heads=2, **shape), 300, kernels, "cpu")
    init_weights(model, 0)
    convert(model, mode, kernels=kernels)
    return model.train()


def backward(model):
    ids = torch.randint(0, 300, (3, 65), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    out = model.loss({"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()})
    (out.loss_sum / out.count).backward()
    return out.loss_sum.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("shape", "norms"), [({}, 2), ({"attention": "mla", "q_lora_rank": 16}, 4)], ids=str)
def test_each_value_is_quantised_once_for_all_who_read_it(shape, norms):
    kernels = CountingKernels()
    model = decoder(kernels, **shape)
    ids = torch.zeros(1, 64, dtype=torch.long)
    with torch.no_grad():
        model.hidden({"input_ids": ids})
    assert kernels.count["rms_norm_quantize"] == norms * 2
    assert kernels.count["swiglu_quantize"] == 2
    assert kernels.count["quantize_both"] == 0  # o_proj's input has no column-wise copy: its wgrad is in BF16


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        ({}, "selective"),
        pytest.param({"num_experts": 4}, "none", marks=SLOW),
        pytest.param({}, "none", marks=SLOW),
        pytest.param({}, "full", marks=SLOW),
        pytest.param({"attention": "mla"}, "none", marks=SLOW),
    ],
    ids=str,
)
def test_compiled_layers_equal_eager_ones(shape, recompute):
    torch.compiler.reset()
    model = decoder(**shape)
    model.activation_checkpoint = recompute
    loss, grads = backward(model)
    if shape.get("num_experts"):
        model.compile_blocks()
    else:
        for block in model.blocks:
            block.compile(fullgraph=True)
    compiled_loss, compiled_grads = backward(model)
    assert compiled_loss.item() == pytest.approx(loss.item(), rel=2e-3)
    for name, grad in compiled_grads.items():
        if grad.norm():
            # Fused loops round to BF16 in fewer places, so some operands fall on the other side of an 8-bit step.
            assert torch.cosine_similarity(grad.flatten(), grads[name].flatten(), dim=0) > 0.98, name


@pytest.mark.slow
def test_compiled_layers_follow_a_switch_of_the_scaling():
    """By default formats of compiled layers are switched in `test_switch`."""
    torch.compiler.reset()
    model = decoder(layers=1)
    model.compile_blocks()
    for mode in ("fp8_tile", "fp8_tensorwise", "fp8_tile"):
        set_mode(model, mode)
        loss, _ = backward(model)
        assert loss.item() == pytest.approx(backward(decoder(mode=mode, layers=1))[0].item(), rel=2e-3)


def test_evaluation_keeps_the_codes_of_weights():
    model = decoder()
    weights = QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = [layer.weight_store for layer in weights.layers()]
    with evaluating(model):
        backward(model)
    assert all(layer.weight_store is store for layer, store in zip(weights.layers(), kept, strict=True))
    set_mode(model, "fp8_tensorwise")  # one scale: other data
    assert not any(layer.weight_store is store for layer, store in zip(weights.layers(), kept, strict=True))


def test_other_modes_take_the_plain_way():
    model = decoder()
    norm, mlp = model.blocks[0].input_layernorm, model.blocks[0].mlp
    assert norm.quantizing is not None
    with evaluating(model):
        assert norm.quantizing is mlp.quantizing is None
    assert norm.quantizing is not None
    set_mode(model, "bf16_mixed")
    assert norm.quantizing is mlp.quantizing is None
    backward(model)
