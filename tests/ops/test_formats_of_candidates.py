"""Every candidate of the operations that take a format, in any format: the bits of `formats.quantize`, or a reason why
it does not run, and then nothing that it computes by another's code."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.cases import awkward_matrix
from tilewright.core.errors import HardwareError
from tilewright.core.hardware import detect_machine
from tilewright.formats import quantize as formats
from tilewright.formats.scaling import ScaleSpec, Tile
from tilewright.formats.spec import E2M1, E4M3, E5M2, FloatSpec
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, NVFP4, OperandFormat, TiledTensor
from tilewright.ops.backends.triton import launch
from tilewright.ops.base.dispatch import Case
from tilewright.ops.gemm import TILE_GEMM, kind_of
from tilewright.ops.kernels import Kernels
from tilewright.ops.quantize import QUANTIZE, QUANTIZE_BOTH, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE, quantize_kind

CPU = detect_machine("cpu")
GPU = dataclasses.replace(
    CPU, device="cuda", capability=(9, 0), versions=CPU.versions | {"cuda": "13.0", "triton": "3.6.0"}
)
ELEMENTS = (E4M3, E5M2, E2M1, FloatSpec("e3m4", 8, 3, 4, torch.uint8))
TILES = (Tile(1, 128), Tile(128, 1), Tile(128, 128), Tile(0, 0), Tile(1, 0), Tile(1, 32), Tile(1, 16), Tile(32, 64))
SCALES = (
    *((torch.float32, rule, False) for rule in ("ceil", "floor", "exact")),
    *((torch.float8_e8m0fnu, rule, False) for rule in ("ceil", "floor")),
    (torch.float8_e4m3fn, "exact", True),
    (torch.bfloat16, "exact", False),
)
KNOWN = (MXFP8, MXFP4, NVFP4, FP8_ROW, FP8_BLOCK)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32)}
INTERPRETED = pytest.mark.skipif(not launch.INTERPRETED, reason="a GPU's own kernels are tested in tests/gpu")
any_format = st.one_of(
    st.sampled_from(KNOWN),
    st.builds(
        lambda element, tile, scale: OperandFormat(element, ScaleSpec(tile, *scale)),
        st.sampled_from(ELEMENTS), st.sampled_from(TILES), st.sampled_from(SCALES),
    ),
)  # fmt: skip


def candidates(*ops):
    """(operation, candidate, machine, device) of all that can run here, on a GPU's by the interpreter."""
    for op in ops:
        for each in op.candidates:
            machine, device = (GPU, "cuda") if each.name == "triton" else (CPU, "cpu")
            if any(each.why_not(machine, Case(device, torch.bfloat16, kind)) is None for kind in op.kinds):
                marks = INTERPRETED if each.name == "triton" else ()
                yield pytest.param(op, each, machine, device, id=f"{op.name} {each.name}", marks=marks)


def assert_same(got, want, what):
    assert (got.tile, got.spec, got.scale_inv.dtype) == (want.tile, want.spec, want.scale_inv.dtype), what
    for name in ("scale", "qdata"):
        ours, theirs = getattr(got, name), getattr(want, name)
        wrong = ((ours != theirs) & ~((ours != ours) & (theirs != theirs))).nonzero()
        assert len(wrong) == 0, f"{what}: {name} at {wrong[0].tolist()} of {list(theirs.shape)}, {len(wrong)} wrong"


def check(op, run, x, form, noise, what):
    """The result of a candidate is that of `formats.quantize`."""
    if op is QUANTIZE:
        assert_same(run(x, form, noise), formats.quantize(x, form, noise), what)
        return
    if op is QUANTIZE_BOTH:
        y, copies = x, run(x, form)
    else:
        y, *copies = (
            run(x, torch.linspace(0.5, 2, x.shape[1]), 1e-5, form) if op is RMS_NORM_QUANTIZE else run(x, x, form)
        )
    for got, want in zip(copies, (formats.quantize(y, form), formats.quantize(y.T, form)), strict=True):
        assert_same(got, want, what)


@pytest.mark.parametrize(
    ("op", "candidate", "machine", "device"),
    list(candidates(QUANTIZE, QUANTIZE_BOTH, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE)),
)
def test_a_format_is_quantised_bit_for_bit_or_refused_with_a_reason(op, candidate, machine, device):
    ran, refused = set(), set()
    most, examples = (130, 20) if device == "cuda" else (140, 60)  # the interpreter is slow

    @settings(max_examples=examples, deadline=None)
    @given(
        form=any_format, rows=st.integers(1, most), cols=st.integers(1, most), seed=st.integers(0, 2**31),
        dtype=st.sampled_from(list(DTYPES)), noisy=st.booleans(),
    )  # fmt: skip
    def property_(form, rows, cols, seed, dtype, noisy):
        x = awkward_matrix(rows, cols, DTYPES[dtype], seed)
        noise = formats.noise_like(x, torch.Generator().manual_seed(1)) if noisy and op is QUANTIZE else None
        case = Case(device, x.dtype, quantize_kind(form, noise))
        reason = candidate.why_not(machine, case)
        (ran if reason is None else refused).add(case.kind)
        if reason is None:
            check(op, candidate.run, x, form, noise, f"{candidate.name} {form}")
            return
        assert "knows" in reason, reason
        with pytest.raises(AssertionError, match="knows"):
            check(op, candidate.run, x, form, noise, candidate.name)

    property_()
    assert ran
    assert candidate.name == "ref" or "other" in refused


@pytest.mark.parametrize("name", ["triton", "cpu"])
def test_a_forced_kernel_that_does_not_know_a_format_is_an_error(name):
    machine, device = (GPU, "cuda") if name == "triton" else (CPU, "cpu")
    if QUANTIZE.candidates[1].why_not(CPU, Case("cpu", torch.bfloat16, "tiles")) is not None and name == "cpu":
        pytest.skip("no C++ kernels here")
    kernels = Kernels(machine, {"quantize": name})
    find = partial(kernels._find, "quantize", device, torch.bfloat16)
    assert callable(find("tiles"))
    with pytest.raises(HardwareError, match="cannot run on this machine") as error:
        find(quantize_kind(NVFP4))
    assert "knows" in error.value.problems[0].got


@pytest.mark.parametrize(("op", "candidate", "machine", "device"), list(candidates(TILE_GEMM)))
def test_a_matmul_of_any_two_formats_is_what_it_says_or_refused_with_a_reason(op, candidate, machine, device):
    @settings(max_examples=30, deadline=None)
    @given(
        forms=st.tuples(any_format, any_format), sizes=st.tuples(*[st.integers(1, 140)] * 3),
        seed=st.integers(0, 2**31), out=st.sampled_from(list(DTYPES)),
    )  # fmt: skip
    def property_(forms, sizes, seed, out):
        generator, (m, n, k) = torch.Generator().manual_seed(seed), sizes
        a, b = (
            formats.quantize(torch.randn(rows, k, generator=generator), form)
            for rows, form in zip((m, n), forms, strict=True)
        )
        reason = candidate.why_not(machine, Case(device, DTYPES[out], kind_of(a, b)))
        if reason is not None:
            assert "knows" in reason, reason
            with pytest.raises((AssertionError, KeyError)):
                candidate.run(a, b, None, DTYPES[out])
            return
        got, wide_a, wide_b = (
            candidate.run(a, b, None, DTYPES[out]).double(),
            a.dequantize().double(),
            b.dequantize().double(),
        )
        want, magnitudes = wide_a @ wide_b.T, wide_a.abs() @ wide_b.abs().T
        # Summed in FP32 in any order, and rounded to the result's dtype (by `dequant` and `cpu` to BF16 on the way).
        bound = k * 2.0**-23 * magnitudes + 2.0**-8 * want.abs() + 2.0**-126
        excess = (got - want).abs() - bound
        assert excess.max() <= 0, f"{candidate.name} {forms[0]} x {forms[1]}: off by {excess.max():.3g} too much"

    property_()


def test_cublas_refuses_two_e5m2_operands_and_triton_takes_them():
    form = OperandFormat(E5M2, FP8_ROW.scale)
    a = TiledTensor(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), form.tile, E5M2)
    assert kind_of(a, a) == kind_of(form, form) == "e5m2"
    why = {each.name: each.why_not(GPU, Case("cuda", torch.bfloat16, "e5m2")) for each in TILE_GEMM.candidates}
    assert "E5M2" in why["scaled_mm"]
    assert why["triton"] is None
