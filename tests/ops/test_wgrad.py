"""Weight gradients on AMX tiles: any shape and stride, sums as good as FP32 gets, tiles of others left alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.draws import examples
from tests.ops.compare import assert_snr
from tilewright.core.hardware import detect_machine
from tilewright.ops.backends.cpu import wgrad
from tilewright.ops.backends.native import wide_ops
from tilewright.ops.base.dispatch import Case
from tilewright.ops.kernels import Kernels

MACHINE = detect_machine("cpu")
BF16 = Case("cpu", torch.bfloat16)
REASON = wgrad.why_not(MACHINE, BF16)
needs_tiles = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")


def operands(tokens, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, size, generator=generator).bfloat16() for size in (rows, columns)]


def exact(dy, x):
    return dy.double().T @ x.double()


def assert_fp32_sums(out, dy, x):
    """Matmuls of BF16 numbers are exact in FP32; each of N sums rounds by eps/2 of what was summed so far."""
    bound = torch.finfo(torch.float32).eps * max(dy.shape[0], 1) * (dy.double().abs().T @ x.double().abs())
    excess = ((out.double() - exact(dy, x)).abs() - bound).flatten()
    worst = int(excess.argmax()) if len(excess) else 0
    assert not (excess > 0).any(), f"element {worst}: {out.flatten()[worst]} for {exact(dy, x).flatten()[worst]}"


@needs_tiles
@examples(60)
@given(
    tokens=st.one_of(st.integers(0, 70), st.sampled_from([511, 512, 513, 1100])),
    rows=st.one_of(st.integers(1, 70), st.sampled_from([1024, 1025, 1500])),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([1024, 1025, 1500])),
    layout=st.sampled_from(["plain", "turned", "cut", "repeated"]),
    seed=st.integers(0, 100),
)
def test_any_shape_and_layout(tokens, rows, columns, layout, seed):
    dy, x = operands(tokens, rows, columns + 3, seed)
    dy, x = {
        "plain": lambda: (dy, x[:, 3:].contiguous()),
        "turned": lambda: (dy.T.contiguous().T, x.T.contiguous().T),
        "cut": lambda: (dy, x[:, 3:]),
        "repeated": lambda: (dy[:1].expand(tokens, rows) if tokens else dy, x),
    }[layout]()
    out = wgrad.weight_gradient(dy, x)
    assert out.dtype == torch.float32
    assert_fp32_sums(out, dy, x)


@needs_tiles
def test_adds_to_what_is_there_or_does_not_read_it():
    dy, x = operands(600, 40, 50)
    out = torch.full((40, 50), torch.nan)
    wgrad.add_weight_gradient_(out, dy, x, adds=False)
    once = out.clone()
    wgrad.add_weight_gradient_(out, dy, x)
    assert_snr(once, exact(dy, x), 120)
    assert_snr(out, 2 * exact(dy, x), 120)


@needs_tiles
def test_a_traced_model_adds_nothing():
    """Fake tensors have no memory: the library must not be given their addresses."""
    with FakeTensorMode():
        dy, x = (torch.empty(7, size, dtype=torch.bfloat16) for size in (5, 6))
        out = torch.empty(5, 6)
        wgrad.add_weight_gradient_(out, dy, x)
        assert wgrad.weight_gradient(dy, x).shape == (5, 6)


@needs_tiles
def test_no_tokens_add_nothing():
    dy, x = operands(0, 5, 6)
    out = torch.ones(5, 6)
    wgrad.add_weight_gradient_(out, dy, x)
    assert torch.equal(out, torch.ones(5, 6))


@needs_tiles
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(bad):
    dy, x = operands(70, 40, 50)
    dy[69, 7], x[0, 49] = bad, bad
    finite = wgrad.weight_gradient(dy, x).isfinite()
    want = torch.ones(40, 50, dtype=torch.bool)
    want[7], want[:, 49] = False, False
    assert torch.equal(finite, want)


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_with_any_number_of_threads(threads):
    dy, x = operands(700, 300, 1100)
    want = wgrad.weight_gradient(dy, x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(wgrad.weight_gradient(dy, x), want)
    finally:
        torch.set_num_threads(before)


@needs_tiles
def test_products_of_torch_between_ours_are_right():
    """oneDNN keeps a configuration of the tiles of its own between its calls."""
    dy, x = operands(64, 40, 96)
    weight = torch.randn(40, 96).bfloat16()
    want = F.linear(x, weight)
    for _ in range(3):
        wgrad.weight_gradient(dy, x)
        assert torch.equal(F.linear(x, weight), want)


@needs_tiles
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole_and_equal(backend):
    def run(x, weight, bias):
        return wgrad.linear(F.silu(x), weight, bias).square().mean()

    x, weight, bias = torch.randn(3, 40, 96), torch.randn(50, 96), torch.randn(50)
    found = []
    for fn in (run, torch.compile(run, fullgraph=True, backend=backend)):
        leaves = [x.bfloat16().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        fn(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    for eager, compiled in zip(*found, strict=True):
        assert_snr(compiled, eager, 40)
    assert found[0][1].dtype == torch.float32


@needs_tiles
def test_an_fp32_weight_gets_its_gradient_unrounded_and_a_bf16_weight_rounded():
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(50, 96)
    dy = torch.randn(64, 50).bfloat16()
    for dtype, snr in ((torch.float32, 120), (torch.bfloat16, 50)):
        leaf = weight.detach().to(dtype).clone().requires_grad_()
        wgrad.linear(x, leaf).backward(dy)
        assert leaf.grad.dtype == dtype
        assert_snr(leaf.grad, exact(dy, x), snr)
    rounded = exact(dy, x).bfloat16()
    with pytest.raises(AssertionError):
        assert_snr(rounded, exact(dy, x), 120)


@needs_tiles
def test_other_dtypes_and_strides_of_the_result_are_refused():
    dy, x = operands(4, 5, 6)
    with pytest.raises(TypeError, match="BF16 operands"):
        wgrad.weight_gradient(dy.float(), x.float())
    with pytest.raises(TypeError, match="contiguous"):
        wgrad.add_weight_gradient_(torch.zeros(6, 5).T, dy, x)


def test_who_runs_where():
    bare = replace(MACHINE, cpu_features=MACHINE.cpu_features - {"amx_bf16"})
    assert "no AMX" in wgrad.why_not(bare, BF16)
    assert "BF16" in wgrad.why_not(MACHINE, Case("cpu", torch.float32))
    assert "BF16" in wgrad.why_not(MACHINE, Case("cuda", torch.bfloat16))
    rows = [row for row in Kernels(bare).explain() if row["op"] == "linear" and row["case"] == "cpu bfloat16"]
    assert rows[0]["chosen"] != "amx"
    assert "no AMX" in dict(rows[0]["rejected"])["amx"]


def test_widened_layers_do_not_round_it_either():
    """`wide`, for CPUs without 16-bit units, runs on any machine."""
    dy, x = operands(300, 40, 72)
    weight = torch.randn(40, 72, requires_grad=True)
    wide_ops.linear(x, weight).backward(dy)
    assert weight.grad.dtype == torch.float32
    assert_fp32_sums(weight.grad, dy, x)
