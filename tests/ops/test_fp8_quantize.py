"""Every candidate for quantisation on CPU against `formats.quantize`: equal bits, whatever comes in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.ops.cases import awkward_matrix
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.formats import quantize as formats
from tilewright.formats.quantize import noise_like
from tilewright.formats.scaling import BLOCK_TILE, COLUMN_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_ROW, fp8_format
from tilewright.ops.backends.cpu import fp8
from tilewright.ops.backends.ref.math import swiglu
from tilewright.ops.base.compile import compile_options
from tilewright.ops.base.dispatch import Case
from tilewright.ops.kernels import Kernels
from tilewright.ops.norm import native as rms_norm
from tilewright.ops.quantize import QUANTIZE, QUANTIZE_BOTH, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE, quantize_kind

SPECS = [E4M3, E5M2]
TILES = [ROW_TILE, COLUMN_TILE, BLOCK_TILE]
MACHINE = detect_machine("cpu")


def here(op, kind="tiles"):
    """Candidates of an operation that run this kind of call on this machine's CPU."""
    return [c for c in op.candidates if c.why_not(MACHINE, Case("cpu", torch.bfloat16, kind)) is None]


def assert_same(got, want, what=""):
    """Equal codes, scales, tile and format; the first different element otherwise."""
    assert (got.tile, got.spec) == (want.tile, want.spec)
    wrong = (got.scale_inv != want.scale_inv).nonzero()
    assert len(wrong) == 0, f"{what}: scale at {wrong[0].tolist()} of {list(want.scale_inv.shape)}"
    wrong = (got.qdata != want.qdata).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        text = f"code {got.qdata[at].item():#x}, not {want.qdata[at].item():#x}"
        raise AssertionError(f"{what}: {text} at {at} of {want.shape}; {len(wrong)} wrong")


def reference_both(x, spec, power_of_two=True):
    return tuple(formats.quantize(v, fp8_format(spec, ROW_TILE, power_of_two=power_of_two)) for v in (x, x.T))


@examples(60)
@given(
    rows=st.integers(0, 300), cols=st.integers(0, 300), seed=st.integers(0, 2**31),
    spec=st.sampled_from(SPECS), tile=st.sampled_from([*TILES, TENSORWISE, Tile(1, 0), Tile(32, 64)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    layout=st.sampled_from(["plain", "turned", "cut", "strided", "repeated"]),
)  # fmt: skip
def test_bits_of_any_matrix(rows, cols, seed, spec, tile, dtype, layout):
    x = awkward_matrix(rows, cols, dtype, seed, layout)
    want, want_both = formats.quantize(x, fp8_format(spec, tile)), reference_both(x, spec)
    for candidate in here(QUANTIZE, quantize_kind(fp8_format(spec, tile))):
        assert_same(candidate.run(x, fp8_format(spec, tile)), want, candidate.name)
    for candidate in here(QUANTIZE_BOTH):
        for got, expected in zip(candidate.run(x, fp8_format(spec, ROW_TILE)), want_both, strict=True):
            assert_same(got, expected, candidate.name)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_bf16_pattern_under_every_scale(spec, tile):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns.abs() < torch.inf
    for exponent in [*range(-133, -100), *range(-100, 100, 9), *range(100, 128)]:
        amax = torch.tensor(min(2.0**exponent * 1.375, 3.38e38)).to(torch.bfloat16)
        keep = (patterns.abs() <= amax) | ~finite  # infinities and NaN stay, and do not count
        x = torch.where(keep, patterns, 0.0).view(512, 128).clone()
        x[:, 0] = x[::128] = amax
        for values in (x, x.float() * 1.0001):
            assert_same(
                fp8.quantize(values, spec, tile), formats.quantize(values, fp8_format(spec, tile)), f"2^{exponent}"
            )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_decoded_bits(spec):
    qdata = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(77, 5)[:, :1196]
    for tile in (ROW_TILE, COLUMN_TILE, BLOCK_TILE, TENSORWISE, Tile(2, 100)):
        for matrix in (qdata, qdata.T.contiguous().T):
            shape = tile.grid(tuple(qdata.shape))
            least, most = (-117, 119) if spec == E4M3 else (-110, 112)
            exponents = torch.linspace(least, most, shape[0] * shape[1]).round().view(shape)
            tiled = fp8.TiledTensor(matrix, torch.exp2(exponents), tile, spec)
            assert fp8.is_exact(tiled)
            got, want = fp8.decode_bf16(tiled), tiled.dequantize(torch.bfloat16)
            assert torch.equal(got.isnan(), want.isnan())
            finite = ~want.isnan()
            assert torch.equal(got.view(torch.int16)[finite], want.view(torch.int16)[finite]), str(tile)
            assert (got if matrix is qdata else got.T).is_contiguous()
            turned = fp8.decode_bf16(tiled, turn=True)
            assert torch.equal(turned.view(torch.int16), got.view(torch.int16))
            assert turned.is_contiguous() or tile.cols != 128


@pytest.mark.parametrize("scale", [3.0, 2.0**-120, 2.0**120, 0.0, -2.0, float("nan"), float("inf")])
def test_scales_that_bf16_cannot_take_are_seen(scale):
    tiled = formats.quantize(torch.randn(4, 300), FP8_ROW)
    tiled.scale_inv[3, 2] = scale
    assert not fp8.is_exact(tiled)
    assert not fp8.is_exact(tiled.transposed())


@pytest.mark.parametrize("candidate", here(QUANTIZE, "fp8"), ids=lambda c: c.name)
def test_other_scales_and_noise(candidate):
    x = torch.randn(70, 200, dtype=torch.bfloat16)
    for tile in (ROW_TILE, TENSORWISE):
        want = formats.quantize(x, fp8_format(E4M3, tile, power_of_two=False))
        assert_same(candidate.run(x, fp8_format(E4M3, tile, power_of_two=False)), want)
        noise = noise_like(x)
        form = fp8_format(E4M3, tile)
        assert_same(candidate.run(x, form, noise), formats.quantize(x, form, noise=noise))


def test_memory_order_is_the_matrix_s_own():
    x = torch.randn(40, 200, dtype=torch.bfloat16)
    assert fp8.quantize(x, E4M3, BLOCK_TILE).qdata.is_contiguous()
    assert fp8.quantize(x.T, E4M3, BLOCK_TILE).qdata.T.is_contiguous()
    row, column = fp8.quantize_both(x, E4M3)
    assert row.qdata.is_contiguous()
    assert column.qdata.T.is_contiguous()  # CPU: the transposed copy is a view


@pytest.mark.parametrize(("forced", "power_of_two"), [("auto", True), ("ref", False)])
def test_compiled_whole_and_equal(forced, power_of_two):
    # Ragged: inductor forgot the last columns when the scale's index was a division (formats.scaling._tile_of).
    kernels = Kernels(MACHINE, {"quantize": forced})

    def run(x, weight):
        tiled = [*kernels.quantize_both(x, fp8_format(E5M2, ROW_TILE, power_of_two=power_of_two))]
        tiled += [
            kernels.quantize(weight, fp8_format(E4M3, tile, power_of_two=power_of_two)) for tile in (*TILES, TENSORWISE)
        ]
        return [part for t in tiled for part in (t.qdata, t.scale_inv)]

    x, weight = torch.randn(130, 300, dtype=torch.bfloat16), torch.randn(129, 200)
    whole = torch.compile(run, fullgraph=True, options=compile_options())(x, weight)
    for got, want in zip(whole, run(x, weight), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fused_with_norm_and_activation(dtype):
    x, up, weight = torch.randn(3, 50, 200, dtype=dtype), torch.randn(3, 50, 200, dtype=dtype), torch.randn(200)
    for candidate in here(RMS_NORM_QUANTIZE):
        y, row, column = candidate.run(x, weight, 1e-5, FP8_ROW)
        # The mean's sum may take another order: two last places of the result.
        torch.testing.assert_close(y, rms_norm(x, weight, 1e-5), rtol=2 * torch.finfo(dtype).eps, atol=0)
        for got, want in zip((row, column), reference_both(y.view(-1, 200), E4M3), strict=True):
            assert_same(got, want, candidate.name)
    for candidate in here(SWIGLU_QUANTIZE):
        y, row, column = candidate.run(x, up, FP8_ROW)
        assert torch.equal(y, swiglu(x, up))
        for got, want in zip((row, column), reference_both(y.view(-1, 200), E4M3), strict=True):
            assert_same(got, want, candidate.name)


def test_one_setting_for_all_of_them():
    rows = Kernels(MACHINE, {"quantize": "ref"}).explain()
    chosen = {row["op"]: row["chosen"] for row in rows if "quantize" in row["op"]}
    assert chosen == dict.fromkeys(("quantize", "quantize_both", "rms_norm_quantize", "swiglu_quantize"), "ref")
    with pytest.raises(ConfigError, match=r"ops\.quantize: no candidate 'cpus'"):
        Kernels(MACHINE, {"quantize": "cpus"})
