"""Weights that other classes than nn.Linear own: the matmuls of a Float8Linear with the same matrix.

Operands are equal bit for bit. Sums may differ in their order where a matrix has other strides; another operand would
show: one code more or less moves a result a thousand times further than the bounds here.
"""

import pytest
import torch
from torch import nn

from tests.cover import covering
from tilewright.core.hardware import detect_machine
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import fp8_format
from tilewright.ops.kernels import Kernels
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.third_party import give_over
from tilewright.precision.float8.weight import Float8Weight
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS, Gemms, Operands, named_format

KERNELS = Kernels.default()
EXACT = Kernels(detect_machine("cpu"), {"tile_gemm": "ref"})
"""Sums in FP32 that are rounded nowhere; matrix units of a CPU round results to BF16."""
MIXED = Gemms.of("fp8_tile", "bf16", "fp32")
GEMMS = [
    *map(Gemms.all, SCALED_FORMATS),
    Gemms.of("bf16", "fp8_tile", "bf16"),
    Gemms.of("bf16", "bf16", "fp8_hybrid"),
    MIXED,
]


def set_all(module, gemms, power_of_two=True, output="fp32"):
    for weight in give_over(module).values():
        weight.kernels = KERNELS
        weight.set_gemms(gemms, output, power_of_two=power_of_two)


def twin(weight_MK, bias_M, gemms, power_of_two=True, output=torch.float32):
    """A Float8Linear with this matrix."""
    layer = nn.Linear(weight_MK.shape[1], weight_MK.shape[0], bias=bias_M is not None)
    with torch.no_grad():
        layer.weight.copy_(weight_MK)
        if bias_M is not None:
            layer.bias.copy_(bias_M)
    layer.__class__ = Float8Linear
    layer.kernels, layer.output_dtype = KERNELS, output
    layer.configure(gemms, power_of_two=power_of_two)
    return layer


def same(ours, theirs, name):
    """Equal but for the order of sums; a matmul in BF16 may be rounded the other way then."""
    assert ours.dtype == theirs.dtype
    least = {"rtol": 2**-7 if name == "bf16" else 1e-5, "atol": 1e-5 * theirs.abs().max().item()}
    assert torch.allclose(ours, theirs, **least), f"{name}: largest difference {(ours - theirs).abs().max()}"


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("gemms", GEMMS, ids=str)
@pytest.mark.parametrize(("features", "tokens"), [((160, 200), (3, 50)), ((64, 24), (7,)), ((128, 256), (2, 128))])
def test_conv1d_is_a_tile_linear(features, tokens, gemms, power_of_two):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    conv = Conv1D(features[1], features[0])
    nn.init.normal_(conv.bias)
    layer = twin(conv.weight.T, conv.bias, gemms, power_of_two)
    set_all(conv, gemms, power_of_two)
    x = torch.randn(*tokens, features[0])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, want = conv(ours), layer(theirs)
    same(out, want, gemms.fprop.name)
    up = torch.randn_like(out)
    out.backward(up)
    want.backward(up)
    same(ours.grad, theirs.grad, gemms.dgrad.name)
    same(conv.weight.grad, layer.weight.grad.T, gemms.wgrad.name)
    same(conv.bias.grad, layer.bias.grad, "fp32")
    executed = give_over(conv)["weight"].executed()
    assert executed == {name: {getattr(gemms, name).name: 1} for name in ("fprop", "dgrad", "wgrad")}


@pytest.mark.parametrize(
    ("counts", "gemms", "transposed", "power_of_two"),
    covering(
        [(5, 0, 130, 1), (128, 128, 0, 256), (0, 0, 0, 0), (300, 2, 3, 4)], tuple(GEMMS), (False, True), (True, False)
    ),
    ids=str,
)
def test_each_expert_is_a_tile_linear(counts, gemms, transposed, power_of_two):
    torch.manual_seed(0)
    stack = torch.randn(4, 200, 72) if transposed else torch.randn(4, 72, 200)
    stack_EMK = stack.requires_grad_().transpose(1, 2) if transposed else stack.requires_grad_()
    bias = torch.randn(4, 72, requires_grad=True)
    weight = Float8Weight()
    weight.kernels = KERNELS
    weight.set_gemms(gemms, "fp32", power_of_two=power_of_two)
    x = torch.randn(sum(counts), 200, requires_grad=True)
    out = weight.grouped(x, counts, stack_EMK, bias)
    up = torch.randn_like(out)
    if sum(counts):
        out.backward(up)
    starts = [sum(counts[:i]) for i in range(5)]
    for expert, count in enumerate(counts):
        rows = slice(starts[expert], starts[expert] + count)
        if not count:
            assert stack.grad is None or not stack.grad[expert].any()
            continue
        layer = twin(stack_EMK[expert], bias[expert], gemms, power_of_two)
        theirs = x.detach()[rows].requires_grad_()
        want = layer(theirs)
        same(out[rows], want, gemms.fprop.name)
        want.backward(up[rows])
        same(x.grad[rows], theirs.grad, gemms.dgrad.name)
        dw = layer.weight.grad.T if transposed else layer.weight.grad
        same(stack.grad[expert], dw, gemms.wgrad.name)
        same(bias.grad[expert], layer.bias.grad, "fp32")
    busy = sum(map(bool, counts))
    assert weight.executed()["wgrad"] == ({gemms.wgrad.name: busy} if busy else {})


def values(x, form, power_of_two):
    """What an operand is after it was quantised, in FP64."""
    return KERNELS.quantize(x, form.relaxed(power_of_two=power_of_two)).dequantize().double()


def forms_of(mode):
    """Of input, weight and gradient; those of other formats than FP8 are written out in `test_recipe_formats`."""
    if not mode.startswith("fp8"):
        return named_format(mode).operands
    tensorwise, spec = mode == "fp8_tensorwise", E4M3 if mode == "fp8_tile" else E5M2
    rows, blocks = (TENSORWISE, TENSORWISE) if tensorwise else (ROW_TILE, BLOCK_TILE)
    return Operands(fp8_format(E4M3, rows), fp8_format(E4M3, blocks), fp8_format(spec, rows))


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("mode", SCALED_FORMATS)
def test_products_are_those_of_the_quantised_operands_in_fp64(mode, power_of_two):
    torch.manual_seed(0)
    counts, stack = (130, 0, 70), torch.randn(3, 72, 200, requires_grad=True)
    x, up = torch.randn(200, 200, requires_grad=True), torch.randn(200, 72)
    weight = Float8Weight()
    weight.kernels = EXACT
    weight.set_gemms(Gemms.all(mode), "fp32", power_of_two=power_of_two)
    out = weight.grouped(x, counts, stack, None)
    out.backward(up)
    forms = forms_of(mode)
    for expert, (start, count) in enumerate(zip((0, 130, 130), counts, strict=True)):
        if not count:
            continue
        here = slice(start, start + count)
        xs, dy, matrix = x.detach()[here], up[here], stack.detach()[expert]
        column = values(xs.T.contiguous(), forms.input, power_of_two)
        along_outputs = values(matrix.T.contiguous(), forms.weight, power_of_two)
        wants = (
            (out[here], values(xs, forms.input, power_of_two) @ values(matrix, forms.weight, power_of_two).T),
            (x.grad[here], values(dy, forms.gradient, power_of_two) @ along_outputs.T),
            (stack.grad[expert], values(dy.T.contiguous(), forms.gradient, power_of_two) @ column.T),
        )
        for ours, want in wants:
            error = ((ours.detach().double() - want).norm() / want.norm()).item()
            assert error < 1e-6, error
