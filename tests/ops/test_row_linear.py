"""Linear layers of a few rows: each candidate against FP64, the same bits beside other rows, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.draws import examples
from tilewright.core.hardware import detect_machine
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.generate import generate
from tilewright.ops.backends.cpu.row_linear import row_linear
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.linear import MOST_ROWS, ROW_LINEAR
from tilewright.precision.mixed.few_row_layers import attach
from tilewright.precision.mixed.row_linear import RowLinear

MACHINE = detect_machine("cpu")
DTYPES = (torch.float32, torch.bfloat16)
HERE = {dtype: [c for c in ROW_LINEAR.candidates if c.why_not(MACHINE, Case("cpu", dtype)) is None] for dtype in DTYPES}


def drawn(rows, outs, width, dtype, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight, shift = (torch.randn(size, generator=generator) for size in ((rows, width), (outs, width), (outs,)))
    return x.to(dtype), weight.to(dtype), shift.to(dtype) if bias else None


def assert_near(got, x, weight, bias):
    """Within a sum in FP32 of K products in any order, and one rounding of the result."""
    wide = [None if each is None else each.double() for each in (x, weight, bias)]
    want, size = F.linear(*wide), F.linear(*(None if each is None else each.abs() for each in wide))
    bound = size * (x.shape[-1] + 2) * torch.finfo(torch.float32).eps + want.abs() * torch.finfo(x.dtype).eps
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= bound).all()


@examples(60)
@given(
    st.integers(1, MOST_ROWS), st.integers(1, 70), st.integers(1, 300), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
def test_every_candidate_is_near_fp64(rows, outs, width, dtype, bias, seed):
    operands = drawn(rows, outs, width, dtype, bias, seed)
    for candidate in HERE[dtype]:
        assert_near(candidate.run(*operands), *operands)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads(dtype):
    x, weight, bias = drawn(MOST_ROWS, 530, 1031, dtype, True, 0)
    before = torch.get_num_threads()
    alone = torch.cat([row_linear(row[None], weight, bias) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            for rows in range(1, MOST_ROWS + 1):
                assert torch.equal(row_linear(x[:rows], weight, bias), alone[:rows])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_stay_in_their_row(dtype):
    x, weight, _ = drawn(3, 20, 45, dtype, False, 1)
    x[1, 44], x[2, 0] = torch.nan, torch.inf
    got = row_linear(x, weight)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()
    assert torch.equal(got[2], torch.where(weight[:, 0] > 0, torch.inf, -torch.inf).to(dtype))


def test_a_part_of_a_weight_and_a_turned_input_are_read_where_they_lie():
    x, weight, bias = drawn(2, 33, 90, torch.bfloat16, True, 2)
    turned = x.T.contiguous().T
    part = weight[5:30, 10:80]
    assert torch.equal(
        row_linear(turned[:, 10:80], part, bias[5:30]), row_linear(x[:, 10:80].clone(), part.clone(), bias[5:30])
    )
    assert row_linear(x.reshape(2, 1, 90), weight).shape == (2, 1, 33)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "error"),
    [
        (torch.ones(MOST_ROWS + 1, 4), torch.ones(3, 4), None, ValueError),
        (torch.ones(0, 4), torch.ones(3, 4), None, ValueError),
        (torch.ones(4, 2), torch.ones(3, 4), None, ValueError),
        (torch.ones(1, 4), torch.ones(4, 3).T, None, ValueError),
        (torch.ones(1, 4), torch.ones(3, 4), torch.ones(4), ValueError),
        (torch.ones(1, 4), torch.ones(3, 4).bfloat16(), None, TypeError),
        (torch.ones(1, 4).half(), torch.ones(3, 4).half(), None, TypeError),
        (torch.ones(1, 4), torch.ones(3, 4), torch.ones(3).bfloat16(), TypeError),
    ],
)
def test_what_the_library_cannot_read_is_refused(x, weight, bias, error):
    with pytest.raises(error, match="needed"):
        row_linear(x, weight, bias)


def test_without_a_compiler_the_reason_is_told_and_torch_multiplies():
    chosen = choose(ROW_LINEAR, replace(MACHINE, cxx_compiler=None), Case("cpu", torch.bfloat16))
    assert chosen.candidate.name == "native"
    assert "no C++ compiler was found" in dict(chosen.rejected)["cpu"]
    model = nn.Sequential(nn.Linear(4, 4))
    assert attach(model, replace(MACHINE, cxx_compiler=None)) == []
    assert type(model[0]) is nn.Linear


def test_a_layer_takes_rows_where_nothing_needs_torchs_own():
    layer = nn.Linear(64, 32)
    attach(layer, MACHINE)
    taken = []
    layer.row_linear = lambda *operands: taken.append(operands) or F.linear(*operands)
    x = torch.randn(1, 3, 64)
    layer(x)  # with autograd
    with torch.no_grad():
        layer(x.expand(3, 3, 64))  # more rows
        layer(x[:, :0])
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        torch.vmap(layer)(x[0])
        torch.compile(layer, backend="eager", fullgraph=True)(x)
        assert not taken
        layer(x)
    assert len(taken) == 1


def jitted(layer, x):
    return torch.jit.trace(layer, (x,), check_trace=False)(2 * x)


def symbolic(layer, x):
    return torch.fx.symbolic_trace(nn.Sequential(layer))(2 * x)


def counted(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return torch.tensor(counter.get_total_flops())


def dual(layer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, 3 * x))).tangent


def other(kind):
    return lambda layer, x: layer.to(kind)(x.to(kind))


FOLLOWED = {
    "torch.jit": jitted,
    "make_fx": lambda layer, x: make_fx(layer)(x)(2 * x),
    "torch.fx": symbolic,
    "FLOPs": counted,
    "forward derivatives": dual,
    "negated view": lambda layer, x: layer(torch._neg_view(x)),
    "imaginary part": lambda layer, x: layer(torch.complex(x, x).conj().imag),
    "another device": other("meta"),
    "FP64": other(torch.float64),
    "FP16": other(torch.float16),
    "BF16": other(torch.bfloat16),
}
"""What other programs do with a layer, of whose operations they see all, or whose tensors they change."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*_neg_view")
@pytest.mark.parametrize("name", FOLLOWED)
def test_where_something_follows_a_layer_it_is_torchs(name):
    """To the bit."""
    plain = nn.Sequential(nn.Linear(64, 32))
    fast = copy.deepcopy(plain)
    assert attach(fast, MACHINE)
    x = torch.randn(3, 64)
    with torch.no_grad():
        found, want = (FOLLOWED[name](layers, x) for layers in (fast, plain))
    assert (found.shape, found.dtype, found.device) == (want.shape, want.dtype, want.device)
    assert found.is_meta or torch.equal(found, want)


@pytest.mark.parametrize("shape", [(), (32,), (128,), (2, 32)])
def test_an_input_of_another_width_is_torchs_error(shape):
    layer = nn.Linear(64, 32)
    attach(layer, MACHINE)
    with torch.no_grad(), pytest.raises(RuntimeError):
        layer(torch.ones(shape))


def test_writes_to_a_weight_count_at_once():
    layer = nn.Linear(64, 32, bias=False)
    attach(layer, MACHINE)
    x = torch.randn(1, 64)
    with torch.no_grad():
        first = layer(x)
        layer.weight.data.mul_(2)
        assert torch.equal(layer(x), 2 * first)


def test_a_model_draws_the_tokens_that_it_drew_before():
    model = Decoder(DecoderConfig.of(vocab_size=97, dim=64, num_heads=4, num_layers=2))
    init_weights(model, seed=0)
    ids = torch.arange(10).reshape(2, 5)
    before = generate(model, ids, 24, temperature=0)
    names = attach(model, MACHINE)
    assert "lm_head" in names
    assert len(names) == len([1 for module in model.modules() if isinstance(module, RowLinear)]) == 15
    assert torch.equal(generate(model, ids, 24, temperature=0), before)
    assert len(before.unique()) > 5
