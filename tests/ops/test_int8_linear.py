"""INT8 linear layers: every candidate against float64 on the same codes, eager and compiled, one token and many."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.draws import examples
from tilewright.core.errors import ConfigError, HardwareError, NumericsError
from tilewright.core.hardware import detect_machine
from tilewright.formats.integer import INT4, INT8, quantize_integer
from tilewright.formats.scaling import TENSORWISE
from tilewright.ops.base.dispatch import Case
from tilewright.ops.int8_linear import CHANNEL, INT8_LINEAR, Int8Weight, int8_linear, quantize_tokens
from tilewright.precision.integer.linear import Int8Linear

MACHINE = detect_machine("cpu")
HERE = [c.name for c in INT8_LINEAR.candidates if c.why_not(MACHINE, Case("cpu", torch.float32)) is None]
SHAPES = [(1, 1, 64), (1, 64), (64,), (2, 5, 64), (300, 64), (0, 64)]


def exact(x, weight, bias):
    """The definition on the codes and scales of `formats`, in float64, with the bound of FP32's few roundings."""
    x_MK = x.reshape(-1, x.shape[-1]).float()
    tokens = quantize_integer(x_MK, INT8, CHANNEL)
    sums = tokens.codes.double() @ weight.codes.double().T
    out = sums * tokens.scale.double() * weight.scale.double().T
    bound = out.abs() * 4 * 2.0**-24 + 1e-30  # the sum, two scales
    if bias is not None:
        out = out + bias.double()
        bound = bound + out.abs() * 2.0**-24
    bound = bound + out.abs() * torch.finfo(x.dtype).eps / 2
    shape = (*x.shape[:-1], weight.shape[0])
    return out.reshape(shape), bound.reshape(shape)


def assert_exact(got, x, weight, bias=None):
    want, bound = exact(x, weight, bias)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    error = (got.double() - want).abs()
    assert (error <= bound).all(), f"worst {(error - bound).max()}, wanted {want.flatten()[(error - bound).argmax()]}"


def test_here_runs_more_than_the_reference():
    assert ("int_mm" in HERE) != bool(MACHINE.cpu_limits), "where a variable hides dot products, torch saturates"
    assert "ref" in HERE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", HERE)
def test_against_float64(name, shape, dtype):
    torch.manual_seed(0)
    x, bias = torch.randn(shape).to(dtype), torch.randn(48)
    weight = quantize_integer(torch.randn(48, 64), INT8, CHANNEL)
    assert_exact(int8_linear(x, Int8Weight.of(weight, MACHINE, name), bias), x, weight, bias)


@examples(40)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 40), st.integers(0, 2**31))
def test_all_candidates_give_the_same_bits(rows, cols, outs, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(torch.randn(rows, 1, generator=generator) * 10)
    weight = quantize_integer(torch.randn(outs, cols, generator=generator), INT8, CHANNEL)
    results = [int8_linear(x, Int8Weight.of(weight, MACHINE, name)) for name in HERE]
    assert all(torch.equal(result, results[-1]) for result in results)


@pytest.mark.parametrize("name", HERE)
def test_extreme_codes_do_not_saturate(name):
    """Every product 127 * 127: pairs added in 16 bits would stop at 32767."""
    weight = quantize_integer(torch.full((4, 1024), 1.0), INT8, CHANNEL)
    for sign in (1.0, -1.0):
        x = torch.full((3, 1024), sign)
        assert_exact(int8_linear(x, Int8Weight.of(weight, MACHINE, name)), x, weight)


@examples(40)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([-140, -30, 0, 100]))
def test_tokens_have_the_codes_of_the_format(rows, cols, seed, exponent):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = quantize_tokens(x)
    want = quantize_integer(x, INT8, CHANNEL)
    assert torch.equal(codes, want.codes)
    assert torch.equal(scale, want.scale)


@pytest.mark.parametrize("name", HERE)
def test_a_bad_token_harms_no_other(name):
    x = torch.randn(4, 16)
    x[1, 3], x[2, 0] = math.nan, -math.inf
    weight = quantize_integer(torch.randn(8, 16), INT8, CHANNEL)
    out = int8_linear(x, Int8Weight.of(weight, MACHINE, name))
    assert out[[1, 2]].isnan().all()
    assert_exact(out[[0, 3]], x[[0, 3]], weight)
    assert (int8_linear(torch.zeros(2, 16), Int8Weight.of(weight, MACHINE, name)) == 0).all()


@pytest.mark.parametrize("name", ["int_mm", pytest.param("onednn", marks=pytest.mark.slow)])
def test_one_compiled_token_is_right(name):
    """Compiled by inductor, `_int_mm` with its scales gives garbage for (1, 1, K) in torch 2.13 (-40 to -240 dB)."""
    if name not in HERE:
        pytest.skip("no such instructions here")
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    fast = Int8Linear.from_linear(layer, kernel=name)
    weight = quantize_integer(layer.weight.detach(), INT8, CHANNEL)
    compiled = torch.compile(fast, fullgraph=True, dynamic=False)
    for shape in ((1, 1, 64), (1, 64), (2, 5, 64)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert_exact(compiled(x), x, weight, layer.bias.detach())
            assert_exact(fast(x), x, weight, layer.bias.detach())


# ---- the layer ----


def test_a_layer_is_near_the_one_it_came_from():
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 64), torch.randn(32, 256)
    fast = Int8Linear.from_linear(layer)
    noise = (fast(x) - layer(x)).square().sum() / layer(x).square().sum()
    assert 10 * math.log10(1 / noise) > 35  # 1/sqrt(12) of a step of 4 sigma / 127 on both sides gives 38 dB


def test_new_weights_copies_and_pickles():
    """What the kernel prepared belongs to the old weight."""
    first, second = (Int8Linear.from_linear(nn.Linear(32, 8)) for _ in range(2))
    x = torch.randn(3, 32)
    assert not torch.equal(first(x), second(x))
    copied, pickled = copy.deepcopy(second), pickle.loads(pickle.dumps(second))
    assert torch.equal(copied(x), second(x))
    assert torch.equal(pickled(x), second(x))
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), second(x))


def test_each_candidate_says_why_not():
    bare = dataclasses.replace(MACHINE, cpu_features=frozenset({"avx2"}), cpu_limits=())
    by_name = {candidate.name: candidate for candidate in INT8_LINEAR.candidates}
    assert "saturate" in by_name["onednn"].why_not(bare, Case("cpu", torch.float32))
    assert "CPUs" in by_name["onednn"].why_not(MACHINE, Case("cuda", torch.float32))
    assert "GPUs" in by_name["int_mm"].why_not(MACHINE, Case("cuda", torch.float32))
    limited = dataclasses.replace(bare, cpu_limits=("ONEDNN_MAX_CPU_ISA=avx2",))
    assert "ONEDNN_MAX_CPU_ISA=avx2" in by_name["int_mm"].why_not(limited, Case("cpu", torch.float32))
    weight = quantize_integer(torch.randn(8, 16), INT8, CHANNEL)
    with pytest.raises(HardwareError, match="saturate"):
        Int8Weight.of(weight, bare, "onednn")
    with pytest.raises(ConfigError, match="no candidate"):
        Int8Weight.of(weight, MACHINE, "fbgemm")
    assert Int8Weight.of(weight, bare).chosen.candidate.name == "int_mm"


def test_bad_weights():
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[1, 2] = math.nan
    with pytest.raises(NumericsError, match="not finite") as error:
        Int8Linear.from_linear(layer)
    assert error.value.problems[0].got.startswith("1 of 3 rows")
    for weight in (
        quantize_integer(torch.ones(2, 3), INT8, TENSORWISE),
        quantize_integer(torch.ones(2, 3), INT4, CHANNEL),
    ):
        with pytest.raises(ValueError, match="symmetric INT8 per row"):
            Int8Weight.of(weight, MACHINE)
