"""The Triton matmul of 8-bit operands, in the interpreter, against FP64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.ops.triton.cases import SPECS, GemmCase, gemm_cases
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, COLUMN_TILE, ROW_TILE, TENSORWISE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW, TiledTensor, fp8_format
from tilewright.ops.backends.triton import gemm, launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="these run the interpreter; tests/gpu runs the kernels")


def assert_product(out, a, b, bias, out_dtype, name):
    """FP32 sums of FP32 matmuls: each K step adds at most one rounding of the sum of magnitudes."""
    a64, b64 = a.dequantize().double(), b.dequantize().double()
    want, sizes = a64 @ b64.T, a64.abs() @ b64.abs().T
    if bias is not None:
        rounded = bias.to(out_dtype).double()
        want, sizes = want + rounded, sizes + rounded.abs()
    allowed = sizes * (a.shape[1] + 4) * 2.0**-24 + want.abs() * torch.finfo(out_dtype).eps + 1e-30
    if out_dtype == torch.float16:
        allowed = torch.where(want.abs() > 65000, torch.inf, allowed + 2.0**-24)
    assert out.dtype == out_dtype
    assert out.shape == want.shape
    error = (out.double() - want).abs().nan_to_num(nan=torch.inf)
    if error.numel():
        worst = int((error - allowed).argmax())
        message = f"{name}: {out.flatten()[worst].item()}, want {want.flatten()[worst].item()}"
        assert bool((error <= allowed).all()), message


@pytest.mark.parametrize("case", list(gemm_cases()), ids=str)
def test_product(case):
    a, b, bias = case.operands(quantize)
    for out_dtype in (torch.bfloat16, torch.float32):
        assert_product(gemm.tile_gemm(a, b, bias, out_dtype), a, b, bias, out_dtype, str(case))


@examples(15)
@given(
    st.integers(1, 140), st.integers(1, 140), st.integers(1, 300), st.sampled_from((BLOCK_TILE, ROW_TILE, TENSORWISE)),
    st.sampled_from(SPECS), st.sampled_from(SPECS), st.booleans(), st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)  # fmt: skip
def test_any_shape(m, n, k, b_tile, a_spec, b_spec, power_of_two, has_bias, out_dtype):
    case = GemmCase(m, n, k, b_tile, a_spec, b_spec, power_of_two, has_bias)
    a, b, bias = case.operands(quantize, seed=m)
    assert_product(gemm.tile_gemm(a, b, bias, out_dtype), a, b, bias, out_dtype, str(case))


def test_transposed_operand():
    """The input gradient's matmul: the weight's own codes and scales, seen the other way."""
    dy, weight = torch.randn(20, 140), torch.randn(140, 200)
    a, b = quantize(dy, fp8_format(E5M2, ROW_TILE)), quantize(weight, FP8_BLOCK).transposed()
    assert_product(gemm.tile_gemm(a, b, None, torch.float32), a, b, None, torch.float32, "transposed")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_code_is_decoded(spec):
    """A matmul with one is the code's value: all 256, NaN and infinities too."""
    qdata = TiledTensor(torch.arange(256, dtype=torch.uint8)[:, None], torch.ones(256, 1), ROW_TILE, spec)
    one = quantize(torch.full((1, 1), 1.0), FP8_ROW)
    got, want = gemm.tile_gemm(qdata, one, None, torch.float32)[:, 0], qdata.dequantize()[:, 0]
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_nan_stays_in_its_row():
    x = torch.ones(3, 128)
    x[1, 5] = torch.inf
    a, b = quantize(x, FP8_ROW), quantize(torch.ones(4, 128), FP8_BLOCK)
    out = gemm.tile_gemm(a, b, None, torch.bfloat16)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], torch.full((2, 4), 128.0, dtype=torch.bfloat16))


def test_other_tiles_are_refused():
    x = torch.ones(128, 128)
    with pytest.raises(AssertionError, match="128x1 and 1x128"):
        gemm.tile_gemm(quantize(x, fp8_format(E4M3, COLUMN_TILE)), quantize(x, FP8_ROW), None, torch.float32)


def test_the_choice_of_a_configuration_is_made_for_few_numbers_of_rows():
    """Experts and generation have another number each time, and a choice measures all configurations."""
    from tilewright.ops.backends.triton.gemm import rows_bucket

    buckets = [rows_bucket(rows) for rows in range(1, 20_000)]
    assert len(set(buckets)) <= 8
    assert buckets == sorted(buckets)
