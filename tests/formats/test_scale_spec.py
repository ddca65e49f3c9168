"""MX and NVFP4 against the rules of their papers in exact arithmetic, with ml_dtypes for the rounding of elements; and
the same properties for any format that can be written down."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.formats.encode import decode, encode
from tilewright.formats.quantize import noise_like, quantize
from tilewright.formats.scaling import MX_SCALE, ScaleSpec, Tile, scale_values
from tilewright.formats.spec import E2M1, E4M3, E5M2, FloatSpec
from tilewright.formats.tiled import FP8_ROW, MXFP4, MXFP8, NVFP4, OperandFormat, TiledTensor

E3M4 = FloatSpec("e3m4", 8, 3, 4, torch.uint8)
E2M3 = FloatSpec("e2m3", 6, 2, 3, torch.uint8, has_infinity=False, has_nan=False)
E3M2 = FloatSpec("e3m2", 6, 3, 2, torch.uint8, has_infinity=False, has_nan=False)
E4M3_IEEE = FloatSpec("e4m3ieee", 8, 4, 3, torch.uint8)
NUMPY = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m4": ml_dtypes.float8_e3m4,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3ieee": ml_dtypes.float8_e4m3,
}
ELEMENTS = (E4M3, E5M2, E2M1, E3M4, E2M3, E3M2, E4M3_IEEE)
E8M0 = torch.float8_e8m0fnu
SCALES = (
    MX_SCALE,
    ScaleSpec(Tile(1, 32), E8M0, "ceil"),
    NVFP4.scale,
    ScaleSpec(Tile(1, 64)),
    ScaleSpec(Tile(32, 32), torch.float32, "floor"),
    ScaleSpec(Tile(0, 0), torch.float32, "exact"),
    ScaleSpec(Tile(16, 1), torch.float8_e5m2, "exact", second=True),
    ScaleSpec(Tile(1, 48), torch.bfloat16, "exact"),
    ScaleSpec(Tile(2, 3), torch.bfloat16, "ceil"),
    ScaleSpec(Tile(4, 8), torch.float8_e4m3fn, "floor"),
)
each_element = pytest.mark.parametrize("spec", ELEMENTS, ids=lambda spec: spec.name)


@each_element
def test_an_element_format_is_that_of_ml_dtypes(spec):
    info = ml_dtypes.finfo(NUMPY[spec.name])
    assert (spec.max, spec.tiny, spec.smallest) == tuple(
        float(x) for x in (info.max, info.smallest_normal, info.smallest_subnormal)
    )
    assert spec.bits == 1 + spec.exponent_bits + spec.mantissa_bits


@each_element
def test_every_code_decodes_and_survives(spec):
    qdata = torch.arange(2**spec.bits, dtype=torch.uint8)
    want = torch.from_numpy(qdata.numpy().view(NUMPY[spec.name]).astype(np.float32))
    got = decode(qdata, spec)
    assert torch.equal(got.isnan(), want.isnan())
    sound = ~want.isnan()
    assert torch.equal(got[sound].view(torch.int32), want[sound].view(torch.int32))  # signs of zeros too
    finite = want.isfinite()
    assert torch.equal(encode(got[finite], spec), qdata[finite])
    assert torch.equal(encode(got[finite], spec, noise_like(got[finite])), qdata[finite])


@each_element
def test_every_bf16_rounds_to_nearest_even_and_saturates(spec):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    inside = x.clamp(-spec.max, spec.max)
    want = torch.from_numpy(inside.numpy().astype(NUMPY[spec.name]).view(np.uint8))
    assert torch.equal(encode(x, spec), want)


def nearest(value: Fraction, spec: FloatSpec) -> Fraction:
    """The value of a format nearest to an exact one, of two the one with the even code; saturated."""
    sizes = [
        Fraction(v)
        for v in decode(torch.arange(2 ** (spec.bits - 1), dtype=torch.uint8), spec).tolist()
        if math.isfinite(v)
    ]
    best = min(range(len(sizes)), key=lambda code: (abs(sizes[code] - abs(value)), code % 2))
    return sizes[best] if value >= 0 else -sizes[best]


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


blocks = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
    min_size=1,
    max_size=32,
)


@examples(150)
@given(blocks, st.sampled_from([E4M3, E5M2, E2M1, E2M3, E3M2]))
def test_mx_is_the_open_compute_rule(values, spec):
    """OCP MX v1.0, 6.3: X = the largest power of two <= max|v|, over the largest power of two of the element format."""
    amax = max(abs(Fraction(v)) for v in values)
    emax = {"e4m3": 8, "e5m2": 15, "e2m1": 2, "e2m3": 2, "e3m2": 4}[spec.name]  # tables 1 to 5 there
    exponent = max(floor_log2(amax) - emax, -127) if amax else -127
    tiled = quantize(torch.tensor([values]), OperandFormat(spec, MX_SCALE))
    assert tiled.scale_inv.dtype == E8M0
    assert tiled.scale_inv.view(torch.uint8).item() == exponent + 127
    got = decode(tiled.qdata, spec)[0].tolist()
    assert [Fraction(v) for v in got] == [nearest(Fraction(v) / Fraction(2) ** exponent, spec) for v in values]


@examples(150)
@given(blocks, st.sampled_from([E4M3, E5M2, E2M1]))
def test_scales_rounded_up_clip_nothing_and_are_the_least(values, spec):
    """NVIDIA's MXFP8 recipe (Mishra et al., 2025): the exponent is rounded up."""
    amax = max(abs(Fraction(v)) for v in values)
    tiled = quantize(torch.tensor([values]), OperandFormat(spec, ScaleSpec(Tile(1, 32), E8M0, "ceil")))
    exponent = tiled.scale_inv.view(torch.uint8).item() - 127
    assert amax <= Fraction(spec.max) * Fraction(2) ** exponent
    assert exponent == -127 or amax > Fraction(spec.max) * Fraction(2) ** (exponent - 1)


@examples(60)
@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from([0.0, 3.0, 12.0, 40.0]), st.integers(0, 2**31))
def test_nvfp4_is_the_recipe(rows, cols, spread, seed):
    """Second scale amax / (6 * 448); scale of 16 elements amax / 6 over it, rounded to E4M3; elements over both."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(torch.randn(rows, cols, generator=generator) * spread)
    x = x.clamp(-(2.0**100), 2.0**100)
    tiled = quantize(x, NVFP4)
    second = np.float32(x.abs().max().item()) / np.float32(6 * 448)
    assert tiled.second is not None
    assert tiled.second.item() == second
    assert tiled.scale_inv.dtype == torch.float8_e4m3fn
    for row in range(rows):
        for block in range(-(-cols // 16)):
            part = x[row, 16 * block : 16 * block + 16].numpy()
            wanted = np.abs(part).max() / np.float32(6) / second
            scale = np.clip(wanted, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            assert tiled.scale_inv[row, block].float().item() == scale
            scaled = np.clip(part / (scale * second), -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
            got = decode(tiled.qdata[row, 16 * block : 16 * block + 16], E2M1).numpy()
            assert np.array_equal(got, scaled)
            assert np.array_equal(tiled.dequantize()[row, 16 * block : 16 * block + 16].numpy(), got * (scale * second))


@examples(150)
@given(
    st.tuples(st.integers(0, 70), st.integers(0, 130)), st.sampled_from(ELEMENTS), st.sampled_from(SCALES),
    st.sampled_from([0.0, 2.0, 10.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_any_format_rounds_within_its_step(shape, element, scale, spread, seed):
    """Half a step of the element: relative where it is normal, of the scale where it is not. Above the largest value
    ("floor" and rounded scales) it is clipped to it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * spread)
    form = OperandFormat(element, scale)
    tiled = quantize(x, form)
    assert tiled.nbytes == form.bytes_of(shape)
    assert (tiled.spec, tiled.tile, tiled.scale_inv.dtype) == (element, form.tile, scale.dtype)
    rows, cols = form.tile.sizes(shape)
    spread_out = tiled.scale.double().repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(cols, 1)[:, : shape[1]]
    exact = x.double()
    reachable = exact.clamp(-spread_out * element.max, spread_out * element.max)
    bound = torch.maximum(reachable.abs() * element.eps / 2, spread_out * element.smallest / 2) * (1 + 2.0**-20)
    excess = (tiled.dequantize().double() - reachable).abs() - bound
    assert not x.numel() or excess.max() <= 0, f"worst element {x.flatten()[excess.argmax()].item()!r}"
    clipped = (reachable - exact).abs() > exact.abs() * 2.0**-3  # a rounded scale clips by half its own step at most
    assert scale.rule == "floor" or scale.second or not clipped.any()


@pytest.mark.parametrize("largest", [(60, 20), (3, 4)], ids=["elsewhere", "beside_it"])
@pytest.mark.parametrize("scale", SCALES, ids=str)
@each_element
def test_what_is_not_finite_stays_visible(spec, scale, largest):
    """Also where the largest value of the matrix, which a second scale follows, shares a tile with a NaN."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[largest] = 9.0
    x[3, 5], x[40, 100], x[41, 7] = math.nan, math.inf, -math.inf
    got = quantize(x, OperandFormat(spec, scale)).dequantize()
    assert got.isnan()[~x.isfinite()].all()
    clean = quantize(torch.where(x.isfinite(), x, 0.0), OperandFormat(spec, scale)).dequantize()
    kept = ~got.isnan()
    assert torch.equal(got[kept], clean[kept])
    if spec.has_nan:  # only the elements themselves
        assert torch.equal(got.isnan(), ~x.isfinite())
    else:  # the tiles that they are in
        rows, cols = scale.tile.sizes((64, 128))
        tiles = {(r // rows, c // cols) for r, c in (~x.isfinite()).nonzero().tolist()}
        assert {(r // rows, c // cols) for r, c in got.isnan().nonzero().tolist()} == tiles


@pytest.mark.parametrize("scale", SCALES, ids=str)
@each_element
def test_zeros_and_the_transpose(spec, scale):
    form = OperandFormat(spec, scale)
    assert torch.equal(quantize(torch.zeros(3, 70), form).dequantize(), torch.zeros(3, 70))
    x = torch.randn(33, 70)
    ours, direct = quantize(x, form).transposed(), quantize(x.T, form.transposed())
    assert torch.equal(ours.qdata, direct.qdata)
    assert torch.equal(scale_values(ours.scale_inv), scale_values(direct.scale_inv))
    assert torch.equal(ours.dequantize(), direct.dequantize())


def test_four_bit_codes_are_stored_as_torch_and_mx_do():
    """float4_e2m1fn_x2: the first element of a pair in the low half."""
    tiled = quantize(torch.tensor([[1.0, -6.0, 0.5]]), OperandFormat(E2M1, ScaleSpec(Tile(1, 32), E8M0, "ceil")))
    assert tiled.qdata.tolist() == [[0b0010, 0b1111, 0b0001]]
    assert tiled.packed().tolist() == [[0b1111_0010, 0b0000_0001]]
    assert quantize(torch.ones(1, 3), MXFP8).packed().shape == (1, 3)


def test_names_tell_formats_apart():
    forms = [FP8_ROW, MXFP8, MXFP4, NVFP4, *(OperandFormat(e, s) for e in ELEMENTS for s in SCALES)]
    assert len({str(form) for form in forms}) == len(set(forms))


def test_what_cannot_be_a_scale_is_refused():
    with pytest.raises(ValueError, match="powers of two"):
        ScaleSpec(Tile(1, 32), E8M0, "exact")
    with pytest.raises(ValueError, match="second scale"):
        ScaleSpec(Tile(1, 32), torch.float32, "exact", second=True)
    with pytest.raises(ValueError, match="scales floats"):
        TiledTensor(torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), Tile(1, 32), E4M3)
