"""The Triton quantisation, in the interpreter, against `formats.quantize`: bit for bit."""

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.ops.triton.cases import DTYPES, SPECS, TILES, MatrixCase, assert_same_bits, matrix_cases
from tilewright.formats import quantize as formats
from tilewright.formats.encode import NAN_CODE, encode
from tilewright.formats.scaling import COLUMN_TILE, ROW_TILE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_ROW, fp8_format
from tilewright.ops.backends.triton import fused, launch, quantize

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="these run the interpreter; tests/gpu runs the kernels")


@examples(30)
@given(matrix_cases(), st.sampled_from(TILES), st.sampled_from(SPECS), st.booleans(), st.booleans())
def test_any_tile(case, tile, spec, power_of_two, noisy):
    x = case.matrix()
    noise = formats.noise_like(x, torch.Generator().manual_seed(1)) if noisy else None
    want = formats.quantize(x, fp8_format(spec, tile, power_of_two=power_of_two), noise=noise)
    assert_same_bits(quantize.quantize(x, spec, tile, power_of_two, noise), want, str(case))


@examples(4)
@given(matrix_cases(), st.sampled_from(SPECS), st.booleans())
def test_both_ways(case, spec, power_of_two):
    x = case.matrix()
    check_both(x, quantize.quantize_both(x, spec, power_of_two), spec, power_of_two, str(case))


def check_both(x, got, spec, power_of_two, name):
    row, column = got
    assert_same_bits(row, formats.quantize(x, fp8_format(spec, ROW_TILE, power_of_two=power_of_two)), f"{name} row")
    want = formats.quantize(x.T.contiguous(), fp8_format(spec, ROW_TILE, power_of_two=power_of_two))
    assert_same_bits(column, want, f"{name} column")
    assert row.qdata.is_contiguous()
    assert column.qdata.is_contiguous()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_value_of_bf16(spec):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(512, 128)
    for tile in (ROW_TILE, COLUMN_TILE):
        assert_same_bits(quantize.quantize(x, spec, tile), formats.quantize(x, fp8_format(spec, tile)), str(tile))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 256), (5, 0), (0, 0)])
def test_nothing(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    for tile in TILES:
        got, want = quantize.quantize(x, E4M3, tile), formats.quantize(x, fp8_format(E4M3, tile))
        assert (got.qdata.shape, got.scale_inv.shape) == (want.qdata.shape, want.scale_inv.shape)
    row, column = quantize.quantize_both(x, E4M3)
    assert (row.shape, column.shape) == (shape, shape[::-1])


def test_strides():
    """Any strides in; scales of rows lie next to each other, as matrix units want them."""
    x = torch.randn(300, 140).T
    assert_same_bits(quantize.quantize(x, E4M3, ROW_TILE), formats.quantize(x, FP8_ROW))
    assert quantize.quantize(x, E4M3, ROW_TILE).scale_inv.stride() == (1, 140)
    row, column = quantize.quantize_both(x, E4M3)
    assert (row.scale_inv.stride(), column.scale_inv.stride()) == ((1, 140), (1, 300))


def convert_as_the_instruction_does(values, from_dtype, to_dtype, rounding):
    """cvt.rn.satfinite of PTX: nearest even, saturating, infinity too; NaN becomes 0x7F without its sign."""
    spec = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}[to_dtype]
    x = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
    qdata = encode(x.clamp(-spec.max, spec.max), spec)
    return torch.where(x.isnan(), NAN_CODE, qdata).to(torch.uint8).numpy()


@examples(15)
@given(matrix_cases(), st.sampled_from(SPECS), st.booleans(), st.sampled_from((*TILES, "both")))
def test_with_the_conversion_instruction(case, spec, power_of_two, tile):
    """The way that GPUs with 8-bit units go, with their instruction imitated."""
    x = case.matrix()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_as_the_instruction_does)
        patch.setattr(quantize, "has_fp8", lambda device: True)
        if tile == "both":
            check_both(x, quantize.quantize_both(x, spec, power_of_two), spec, power_of_two, str(case))
        else:
            want = formats.quantize(x, fp8_format(spec, tile, power_of_two=power_of_two))
            assert_same_bits(quantize.quantize(x, spec, tile, power_of_two), want, str(case))


@examples(20)
@given(matrix_cases(), st.sampled_from(TILES), st.sampled_from(SPECS), st.booleans(), st.booleans(), st.booleans())
def test_a_transposed_view_is_read_as_it_lies(case, tile, spec, power_of_two, noisy, by_instruction):
    """The weight of an input's gradient: no copy in the values' own format, and codes that a matmul takes."""
    x = case.matrix().T
    noise = formats.noise_like(x, torch.Generator().manual_seed(1)) if noisy else None
    want = formats.quantize(x, fp8_format(spec, tile, power_of_two=power_of_two), noise=noise)
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "raw", lambda x: read.append(x.data_ptr()) or launch.raw(x))
        if by_instruction:
            patch.setattr(interpreter, "_convert_float", convert_as_the_instruction_does)
            patch.setattr(quantize, "has_fp8", lambda device: True)
        got = quantize.quantize(x, spec, tile, power_of_two, noise)
    assert_same_bits(got, want, f"{case} {tile} {spec.name}")
    assert got.qdata.is_contiguous()
    assert set(read) == {x.data_ptr()}, "a copy was read"


def plain_norm(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@examples(4)
@given(matrix_cases(200), st.sampled_from(SPECS), st.booleans())
def test_norm(case, spec, power_of_two):
    x = MatrixCase(case.rows, case.cols, "normal", case.dtype, case.seed).matrix()
    weight = torch.linspace(-2, 2, case.cols)
    y, row, column = fused.rms_norm_quantize(x[None], weight, 1e-5, spec, power_of_two)
    check_rounded(y[0], plain_norm(x, weight, 1e-5), case)
    check_both(y[0], (row, column), spec, power_of_two, str(case))


@examples(4)
@given(matrix_cases(200), st.sampled_from(SPECS), st.booleans())
def test_swiglu(case, spec, power_of_two):
    gate = case.matrix()
    up = MatrixCase(case.rows, case.cols, "normal", case.dtype, case.seed + 1).matrix()
    y, row, column = fused.swiglu_quantize(gate[None], up[None], spec, power_of_two)
    if case.kind in ("normal", "outliers", "zeros"):
        check_rounded(y[0], torch.nn.functional.silu(gate.double()) * up.double(), case)
    check_both(y[0], (row, column), spec, power_of_two, str(case))


def approximate(sign):
    """`exp` and `/` as a GPU may round them, at the bounds of the PTX manual (9.7.3: ex2.approx 2^-22, of an argument
    that is one product in FP32; div.full 2 ulp), all in one direction."""
    exp = interpreter.InterpreterBuilder.create_exp
    divide = interpreter.InterpreterBuilder.create_fdiv

    def off(handle, relative):
        data = (handle.data.astype(np.float64) * (1 + sign * relative)).astype(np.float32)
        return interpreter.TensorHandle(data, handle.dtype.scalar)

    def create_exp(self, arg):
        return off(exp(self, arg), 2.0**-22 + np.abs(np.clip(arg.data, -90, 90)).astype(np.float64) * 1.45 * 2.0**-24)

    return {"create_exp": create_exp, "create_fdiv": lambda self, a, b: off(divide(self, a, b), -(2.0**-22))}


@pytest.mark.slow
def test_swiglu_of_every_gate_is_off_by_one_unit_at_most_on_a_gpu():
    """In BF16, and seldom: where the exact result is near the middle of two numbers."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()].view(-1, 128)
    exact = fused.swiglu_quantize(gate, torch.ones_like(gate), E4M3)[0]
    assert torch.equal(exact, torch.nn.functional.silu(gate.float()).bfloat16())
    for sign in (1, -1):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in approximate(sign).items():
                patch.setattr(interpreter.InterpreterBuilder, name, value)
            y, row, column = fused.swiglu_quantize(gate, torch.ones_like(gate), E4M3)
        units = (y.view(torch.int16).int() - exact.view(torch.int16).int()).abs()
        assert units.max() == 1, "the stand-in rounds otherwise somewhere, and no farther"
        assert units.double().mean() < 0.005
        check_both(y, (row, column), E4M3, True, f"copies are of y as it is, {sign}")


def check_rounded(got, want, case):
    """Within half a unit of the last place of the dtype and some of FP32: computed in FP32, then rounded."""
    info = torch.finfo(case.dtype)
    error = (got.double() - want).abs()
    allowed = want.abs() * (0.51 * info.eps + 8 * 2.0**-23) + info.smallest_normal * info.eps
    worst = int((error - allowed).nan_to_num(nan=torch.inf).argmax())
    message = f"{case}: {got.flatten()[worst].item()}, want {want.flatten()[worst].item()}"
    assert bool((error <= allowed).all()), message
