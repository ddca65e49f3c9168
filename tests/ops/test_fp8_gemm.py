"""Candidates for matmuls of 8-bit operands against float64 on the same operands: only sums and rounding differ."""

import pytest
import torch

from tests.ops.cases import awkward_matrix
from tilewright.core.hardware import detect_machine
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW, TiledTensor, fp8_format
from tilewright.ops.backends.native import dequant_gemm
from tilewright.ops.base.compile import compile_options
from tilewright.ops.base.dispatch import Case
from tilewright.ops.gemm import TILE_GEMM
from tilewright.ops.kernels import Kernels

MACHINE = detect_machine("cpu")
HERE = [c for c in TILE_GEMM.candidates if c.why_not(MACHINE, Case("cpu", torch.bfloat16, "tiles")) is None]
FORMATS = {"e4m3": (E4M3, E4M3), "hybrid": (E5M2, E4M3)}
TILES = {"row_block": (ROW_TILE, BLOCK_TILE), "row_row": (ROW_TILE, ROW_TILE), "one_scale": (TENSORWISE, TENSORWISE)}
FP32_EPS = torch.finfo(torch.float32).eps
each_candidate = pytest.mark.parametrize("candidate", HERE, ids=lambda c: c.name)


def operands(m, n, k, tiles="row_block", formats="e4m3", *, power_of_two=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows, tile, spec in zip((m, n), TILES[tiles], FORMATS[formats], strict=True):
        x = torch.randn(rows, k, generator=generator) * torch.exp2(torch.randn(rows, 1, generator=generator) * 4)
        parts.append(quantize(x.to(torch.bfloat16), fp8_format(spec, tile, power_of_two=power_of_two)))
    return parts


def assert_rounding_only(out, a, b, bias, *, rounded=None):
    """Within the rounding of the result (half a last place of `rounded`, its own dtype if None) and of an FP32 sum.

    A sum of K matmuls in FP32, in any order, errs by at most K eps of the sum of magnitudes (Higham, section 4.2); the
    result is rounded once, and once more where a bias is added to what was rounded before.
    """
    exact_a, exact_b = a.dequantize().double(), b.dequantize().double()
    want, magnitudes = exact_a @ exact_b.T, exact_a.abs() @ exact_b.abs().T
    if bias is not None:
        wide = bias.to(out.dtype).double()
        want, magnitudes = want + wide, magnitudes + wide.abs()
    result, first = torch.finfo(out.dtype), torch.finfo(rounded or out.dtype)
    bound = first.eps / 2 * (want.abs() if bias is None or rounded is None else want.abs() + magnitudes)
    bound = bound * (1 + first.eps) + (result.eps / 2 * want.abs() if rounded is not None else 0)
    bound = bound + a.shape[1] * FP32_EPS * magnitudes + result.tiny * result.eps  # the last: subnormal results
    excess = (out.double() - want).abs() - bound
    if excess.numel() and excess.max() > 0:
        at = divmod(int(excess.argmax()), excess.shape[1])
        raise AssertionError(f"{at}: {out[at].item()!r}, not {want[at].item()!r} within {bound[at].item():.3g}")


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", [(64, 96, 256), (1, 1, 1), (130, 77, 300), (129, 200, 129), (0, 16, 128), (16, 8, 0)])
@each_candidate
def test_only_rounding_is_lost(candidate, shape, tiles, formats):
    a, b = operands(*shape, tiles, formats)
    bias = torch.randn(shape[1])
    for given in (None, bias):
        out = candidate.run(a, b, given, torch.bfloat16)
        assert (out.shape, out.dtype) == ((shape[0], shape[1]), torch.bfloat16)
        assert_rounding_only(out, a, b, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@each_candidate
def test_other_dtypes_of_the_result(candidate, dtype):
    a, b = operands(40, 50, 300)
    a = TiledTensor(a.qdata, a.scale_inv * 2.0**-6, a.tile, a.spec)  # FP16 holds the results
    bias = torch.randn(50) * 0.01
    for given in (None, bias):
        out = candidate.run(a, b, given, dtype)
        assert out.dtype == dtype
        # torch's BF16 matmul on a CPU comes rounded to BF16 (ops.native.dequant_gemm); the reference's does not.
        assert_rounding_only(out, a, b, given, rounded=None if candidate.name == "ref" else torch.bfloat16)


@pytest.mark.parametrize("tiles", TILES)
@each_candidate
def test_fp32_scales_are_not_rounded(candidate, tiles):
    a, b = operands(60, 40, 300, tiles, power_of_two=False)
    out = candidate.run(a, b, None, torch.float32)
    assert_rounding_only(out, a, b, None)


@each_candidate
def test_error_is_that_of_the_rounding_of_the_result(candidate):
    a, b = operands(256, 256, 1024, "row_block")
    exact = a.dequantize().double() @ b.dequantize().double().T
    out = candidate.run(a, b, None, torch.bfloat16)
    error = float((out.double() - exact).norm() / exact.norm())
    rounding = float((exact.to(torch.bfloat16).double() - exact).norm() / exact.norm())
    assert error < 1.01 * rounding, f"{error:.4g}, of which {rounding:.4g} is the rounding of the result"


@each_candidate
def test_transposed_operands_of_a_linear_layer(candidate):
    tokens, inputs, outputs = 130, 200, 77
    weight = quantize(torch.randn(outputs, inputs), FP8_BLOCK)
    dy, x = torch.randn(tokens, outputs).to(torch.bfloat16), torch.randn(tokens, inputs).to(torch.bfloat16)
    dgrad = (quantize(dy, fp8_format(E5M2, ROW_TILE)), weight.transposed())
    wgrad = (quantize(dy.T, fp8_format(E5M2, ROW_TILE)), quantize(x.T, FP8_ROW))
    for a, b in (dgrad, wgrad):
        assert_rounding_only(candidate.run(a, b, None, torch.bfloat16), a, b, None)


@each_candidate
def test_not_a_number_spreads_along_its_row_only(candidate):
    x = awkward_matrix(50, 200, torch.bfloat16, seed=0)
    a, b = quantize(x, FP8_ROW), quantize(torch.randn(30, 200), FP8_BLOCK)
    out = candidate.run(a, b, None, torch.bfloat16)
    assert torch.equal(out.isnan().any(1), ~torch.isfinite(x).all(1))


def test_compiled_whole_and_equal():
    kernels = Kernels(MACHINE)
    a, b = operands(64, 40, 300)

    def run(a_qdata, a_scale, b_qdata, b_scale):
        one = TiledTensor(a_qdata, a_scale, ROW_TILE, E4M3)
        two = TiledTensor(b_qdata, b_scale, BLOCK_TILE, E4M3)
        return kernels.tile_gemm(one, two, out_dtype=torch.bfloat16) * 2

    parts = (a.qdata, a.scale_inv, b.qdata, b.scale_inv)
    assert torch.equal(torch.compile(run, fullgraph=True, options=compile_options())(*parts), run(*parts))


def test_tensorwise_is_a_case_of_its_own():
    rows = [row for row in Kernels(MACHINE).explain() if row["op"] == "tile_gemm"]
    assert {row["case"].split()[-1] for row in rows} == {"tiles", "tensorwise", "e5m2", "decoded"}


@pytest.mark.parametrize("multiplies", [True, False])
def test_bf16_is_fast_on_a_cpu_that_multiplies_it_and_on_every_gpu(multiplies, monkeypatch):
    monkeypatch.setattr(dequant_gemm, "_cpu_multiplies_bf16", lambda: multiplies)
    assert dequant_gemm.is_fast_bf16(torch.device("cpu")) == multiplies
    assert dequant_gemm.is_fast_bf16(torch.device("cuda"))
