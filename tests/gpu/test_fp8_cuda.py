"""8-bit operations on a CUDA device: bits equal to the CPU's, matmuls against FP64. Run with `pytest -m gpu`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.device import CUDA, DEVICE, MANY, MOST, ON_A_GPU_OR_TRIED, names, run_poisoned
from tests.ops.triton.cases import (
    DTYPES,
    SPECS,
    TILES,
    GemmCase,
    MatrixCase,
    assert_same_bits,
    gemm_cases,
    matrix_cases,
)
from tilewright.formats import quantize as formats
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW, TiledTensor, fp8_format
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.gemm import TILE_GEMM, kind_of
from tilewright.ops.quantize import QUANTIZE, QUANTIZE_BOTH, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE

pytestmark = ON_A_GPU_OR_TRIED


def to_device(tiled: TiledTensor) -> TiledTensor:
    return TiledTensor(tiled.qdata.to(DEVICE), tiled.scale_inv.to(DEVICE), tiled.tile, tiled.spec)


def skip_division(name, power_of_two):
    if CUDA and name == "ref" and not power_of_two:
        pytest.skip("torch divides by a number on CUDA by multiplying with its inverse: other FP32 scales than on CPU")


@names(QUANTIZE)
@pytest.mark.parametrize("power_of_two", [True, False], ids=["pow2", "fp32"])
def test_quantize(name, power_of_two):
    skip_division(name, power_of_two)
    run = run_poisoned(QUANTIZE, name, torch.bfloat16, "fp8")

    @MANY
    @given(matrix_cases(MOST), st.sampled_from(TILES), st.sampled_from(SPECS), st.booleans(), st.booleans())
    def check(case, tile, spec, noisy, turned):
        if not power_of_two and tile in (TENSORWISE, TILES[-1]):
            return  # scales by torch's division, as above
        x = case.matrix().T if turned else case.matrix()
        noise = formats.noise_like(x, torch.Generator().manual_seed(1)) if noisy else None
        form = fp8_format(spec, tile, power_of_two=power_of_two)
        want = formats.quantize(x, form, noise=noise)
        got = run(x.to(DEVICE), form, None if noise is None else noise.to(DEVICE))
        assert_same_bits(got, want, f"{case} {tile} {spec.name}")

    check()


@names(QUANTIZE_BOTH)
@pytest.mark.parametrize("power_of_two", [True, False], ids=["pow2", "fp32"])
def test_quantize_both(name, power_of_two):
    skip_division(name, power_of_two)
    run = run_poisoned(QUANTIZE_BOTH, name, torch.bfloat16, "tiles" if power_of_two else "fp8")

    @MANY
    @given(matrix_cases(MOST), st.sampled_from(SPECS))
    def check(case, spec):
        x = case.matrix()
        check_both(
            x, run(x.to(DEVICE), fp8_format(spec, ROW_TILE, power_of_two=power_of_two)), spec, power_of_two, str(case)
        )

    check()


def check_both(x, got, spec, power_of_two, name):
    row = formats.quantize(x, fp8_format(spec, ROW_TILE, power_of_two=power_of_two))
    column = formats.quantize(x.T.contiguous(), fp8_format(spec, ROW_TILE, power_of_two=power_of_two))
    assert_same_bits(got[0], row, f"{name} row")
    assert_same_bits(got[1], column, f"{name} column")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_value_of_bf16(spec):
    run = run_poisoned(QUANTIZE, "triton", torch.bfloat16, "tiles")
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(512, 128)
    for tile in TILES:
        assert_same_bits(
            run(x.to(DEVICE), fp8_format(spec, tile)), formats.quantize(x, fp8_format(spec, tile)), str(tile)
        )


def test_large():
    """Offsets beyond 2^31."""
    if not CUDA:
        pytest.skip("16 GiB of values: on a GPU only")
    run = run_poisoned(QUANTIZE_BOTH, "triton", torch.bfloat16, "tiles")
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of device memory")
    rows, cols = 2**16 + 3, 2**15 + 128
    x = torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    row, column = run(x, FP8_ROW)
    tail = x[-300:].cpu()
    assert torch.equal(row.qdata[-300:].cpu(), formats.quantize(tail, FP8_ROW).qdata)
    start = rows // 128 * 128  # the last, ragged tile of tokens
    want = formats.quantize(x[start:].T.contiguous().cpu(), FP8_ROW)
    assert torch.equal(column.qdata[:, start:].cpu(), want.qdata)


def assert_product(out, a, b, bias, eps, result=None):
    """In FP64 from the very operands. `eps`: of sums of 128 matmuls; 8-bit units keep 14 bits of them. `result`: a
    dtype that matmuls are rounded to before the result's."""
    a64, b64 = a.dequantize().double(), b.dequantize().double()
    want, sizes = a64 @ b64.T, a64.abs() @ b64.abs().T
    largest = want.abs()
    if bias is not None:
        rounded = bias.to(out.dtype).double()
        want, sizes, largest = want + rounded, sizes + rounded.abs(), largest + rounded.abs()
    allowed = (
        sizes * (eps + (a.shape[1] // 128 + 4) * 2.0**-23) + 2 * largest * torch.finfo(result or out.dtype).eps + 1e-30
    )
    if out.dtype == torch.float16:
        allowed = torch.where(want.abs() > 65000, torch.inf, allowed + 2.0**-24)
    error = (out.cpu().double() - want).abs().nan_to_num(nan=torch.inf)
    if error.numel():
        worst = int((error - allowed).argmax())
        assert bool((error <= allowed).all()), f"{out.flatten()[worst].item()}, want {want.flatten()[worst].item()}"


LARGE = (
    GemmCase(1000, 576, 7168),
    GemmCase(4096, 1024, 512, ROW_TILE, E5M2),
    GemmCase(257, 384, 2048, TENSORWISE, bias=True),
)


@names(TILE_GEMM)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*gemm_cases(), *(LARGE if CUDA else ())], ids=str)
def test_tile_gemm(name, case, out_dtype):
    a, b, bias = case.operands(formats.quantize, seed=3)
    run = run_poisoned(TILE_GEMM, name, out_dtype, kind_of(a, b))
    out = run(to_device(a), to_device(b), None if bias is None else bias.to(DEVICE), out_dtype)
    assert out.shape == (case.m, case.n)
    assert out.dtype == out_dtype
    matmuls = case.k * 2.0**-23 if name in ("cpu", "dequant", "ref") else 2.0**-12
    assert_product(
        out, a, b, bias, matmuls, torch.bfloat16 if name in ("cpu", "dequant") and case.power_of_two else None
    )


@names(TILE_GEMM)
def test_input_gradient_reads_the_weight_transposed(name):
    run = run_poisoned(TILE_GEMM, name, torch.bfloat16, "tiles")
    a = formats.quantize(torch.randn(100, 300), fp8_format(E5M2, ROW_TILE))
    b = formats.quantize(torch.randn(300, 260), FP8_BLOCK)
    out = run(to_device(a), to_device(b).transposed(), None, torch.bfloat16)
    assert_product(out, a, b.transposed(), None, 2.0**-12)


@pytest.mark.parametrize("op", [RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused(op, dtype):
    run = run_poisoned(op, "triton", dtype, "tiles")

    @MANY
    @given(matrix_cases(MOST), st.sampled_from(SPECS))
    def check(case, spec):
        x = MatrixCase(case.rows, case.cols, "normal", dtype, case.seed).matrix()
        other = MatrixCase(case.rows, case.cols, "normal", dtype, case.seed + 1).matrix()
        if op is RMS_NORM_QUANTIZE:
            y, *copies = run(x.to(DEVICE), other[0].float().to(DEVICE), 1e-5, fp8_format(spec, ROW_TILE))
            want = ref.rms_norm(x.double(), other[0].double(), 1e-5)
        else:
            y, *copies = run(x.to(DEVICE), other.to(DEVICE), fp8_format(spec, ROW_TILE))
            want = ref.swiglu(x.double(), other.double())
        info = torch.finfo(dtype)
        error = (y.cpu().double() - want).abs() - want.abs() * (0.51 * info.eps + 2.0**-19) - info.tiny * info.eps
        assert error.max() <= 0, f"{case}: off by {error.max().item()} too much"
        check_both(y.cpu(), copies, spec, True, str(case))

    check()


@pytest.mark.parametrize("tiles", [BLOCK_TILE, ROW_TILE, TENSORWISE], ids=str)
def test_compiled_whole(tiles):
    """Quantise and multiply inside torch.compile(fullgraph=True) give what they give outside."""
    from tilewright.ops.kernels import Kernels

    if not CUDA:
        pytest.skip("kernels that are interpreted are not compiled")
    kernels = Kernels.default()
    a_tile = TENSORWISE if tiles == TENSORWISE else ROW_TILE
    x = torch.randn(384, 512, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(256, 512, dtype=torch.bfloat16, device=DEVICE)

    def linear(x, weight):
        a, b = kernels.quantize(x, fp8_format(E4M3, a_tile)), kernels.quantize(weight, fp8_format(E4M3, tiles))
        return kernels.tile_gemm(a, b, out_dtype=torch.bfloat16)

    assert torch.equal(torch.compile(linear, fullgraph=True)(x, weight), linear(x, weight))


@pytest.mark.parametrize("mode", ["fp8_tile", "fp8_hybrid", "fp8_tensorwise"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_layer_on_both_devices(mode, compiled):
    """A linear layer's output and gradients, as the CPU computes them from the same numbers."""
    from tilewright.ops.kernels import Kernels
    from tilewright.precision.convert import convert

    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 200), torch.nn.SiLU(), torch.nn.Linear(200, 144)).to(device)
        convert(model, mode, kernels=Kernels.default())
        x = torch.randn(100, 256, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        run = torch.compile(model) if compiled and device == "cuda" else model
        run(x).float().square().sum().backward()
        results.append([x.grad.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())])
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        ratio = (got.double() - want.double()).norm() / want.double().norm()
        assert ratio < 0.02, f"gradient {i}: {ratio.item():.3g} apart"  # 8-bit codes may flip: 2^-4 of a few elements
