"""Attention in C++ of BF16 operands: any shape and layout against FP64, documents apart, nothing of all pairs."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tests.draws import examples
from tests.ops.cases import AttentionCase
from tests.ops.compare import LargestTensor
from tests.ops.test_ops import NATIVE_ATTENTION, grads_of
from tilewright.core.hardware import detect_machine
from tilewright.models.base.checkpointing import CONTEXTS
from tilewright.ops.backends.cpu import attention as cpp
from tilewright.ops.base.dispatch import Case

KERNELS = {"amx": cpp.why_not_amx, "avx512": cpp.why_not_avx512}
REASONS = {name: why_not(detect_machine("cpu"), Case("cpu", torch.bfloat16)) for name, why_not in KERNELS.items()}


@pytest.fixture(params=KERNELS, scope="module")
def attention(request):
    """`ops.attention` by each kernel that runs here."""
    if reason := REASONS[request.param]:
        pytest.skip(reason)
    return functools.partial(cpp.attention, request.param)


def exactly(q, k, v, segments, scale, dout, window=0):
    """Result and gradients in FP64, and for each element the sum of the sizes of what is added up in it."""
    group, positions = q.shape[1] // k.shape[1], q.shape[2]
    q, dout = q.double(), dout.double()
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    allowed = torch.ones(positions, positions, dtype=torch.bool).tril()[None]
    if window:
        allowed = allowed.triu(1 - window)
    if segments is not None:
        allowed = allowed & (segments[:, :, None] == segments[:, None])
    probs = (q @ k.mT * scale).masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    out, dprobs = probs @ v, dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = probs * (dprobs - delta) * scale
    sizes = probs * ((dout.abs() @ v.mT.abs()) + (dout * out).abs().sum(-1, keepdim=True)) * abs(scale)

    def heads(x):
        return x.unflatten(1, (-1, group)).sum(2)

    exact = (out, dscores @ k, heads(dscores.mT @ q), heads(probs.mT @ dout))
    bound = (probs @ v.abs(), sizes @ k.abs(), heads(sizes.mT @ q.abs()), heads(probs.mT @ dout.abs()))
    return zip(("result", "dq", "dk", "dv"), exact, bound, strict=True)


def run_both_ways(run, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(*leaves)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(dout)
    return dout, [out.detach(), *(leaf.grad for leaf in leaves)]


@examples(20)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    positions=st.one_of(st.integers(1, 100), st.sampled_from([255, 256, 257, 511, 512, 513, 545, 800])),
    width=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128])),
    docs=st.sampled_from([0, 1, 5, 60]),
    window=st.sampled_from([0, 0, 1, 31, 32, 33, 64, 300]),
    scale=st.sampled_from([None, 0.05, 3.0]),
    turned=st.booleans(),
    seed=st.integers(0, 50),
)
def test_any_shape_layout_documents_and_window(
    attention, batch, kv_heads, group, positions, width, docs, window, scale, turned, seed
):
    case = AttentionCase(batch, kv_heads * group, kv_heads, positions, width, width, docs)
    *tensors, segments = case.tensors(torch.bfloat16, seed)
    if turned:  # heads inside of positions, as projections leave them
        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    dout, found = run_both_ways(lambda q, k, v: attention(q, k, v, segments, scale, window=window), tensors)
    used = width**-0.5 if scale is None else scale
    # Probabilities, their gradients, the result that delta is made from, and what is returned are rounded to BF16.
    eps = torch.finfo(torch.bfloat16).eps
    for got, (name, exact, sizes) in zip(found, exactly(*tensors, segments, used, dout, window), strict=True):
        excess = (got.double() - exact).abs() - (2 * eps * sizes + 1e-30)
        worst = torch.unravel_index(excess.argmax(), excess.shape)
        assert not (excess > 0).any(), f"{name} {[int(i) for i in worst]}: {got[worst]}, want {exact[worst]}"


@pytest.mark.parametrize("size", [1e2, 1e8, 1e15])
def test_probabilities_of_large_scores_add_up_to_one(attention, size):
    q, k = (torch.randn(1, 2, 70, 32, generator=torch.Generator().manual_seed(i)).bfloat16() * size for i in range(2))
    out, grads = grads_of(lambda q, k, v: attention(q, k, v), [q, k, torch.ones(1, 2, 70, 32).bfloat16()])
    assert torch.equal(out, torch.ones_like(out))
    assert torch.isfinite(grads[2]).all()
    total = grads[2].double().sum(2)  # each gradient of the result goes to the values once
    want = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).bfloat16().double()
    assert torch.allclose(total, want.sum(2), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("operand", [0, 1, 2])
def test_not_a_number_is_not_hidden(attention, operand):
    *tensors, _ = AttentionCase(1, 1, 1, 70, 32, 32).tensors(torch.bfloat16)
    tensors = [x.detach() for x in tensors]
    tensors[operand][0, 0, 40, 3] = torch.nan
    lost = attention(*tensors)[0, 0].isnan().any(1)
    assert lost[40], "the query that sees it"
    assert not lost[:32].any(), "earlier blocks do not"
    assert lost[41:].all() == (operand > 0), "a key or value reaches all later queries"


def test_documents_do_not_see_each_other(attention):
    *tensors, _ = AttentionCase(1, 2, 1, 200, 32, 32).tensors(torch.bfloat16)
    segments = (torch.arange(200) // 70)[None]
    out = attention(*tensors, segments)
    tensors[1].data[:, :, :70] = 7.0
    tensors[2].data[:, :, :70] = -7.0
    changed = attention(*tensors, segments)
    assert torch.equal(out[:, :, 70:], changed[:, :, 70:])
    assert not torch.equal(out[:, :, :70], changed[:, :, :70])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits_with_any_number_of_threads(attention, threads):
    *tensors, segments = AttentionCase(2, 4, 2, 300, 64, 64, docs=4).tensors(torch.bfloat16)
    want = grads_of(lambda q, k, v: attention(q, k, v, segments), tensors)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = grads_of(lambda q, k, v: attention(q, k, v, segments), tensors)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.slow
def test_compiled_whole(attention):
    *tensors, segments = AttentionCase(2, 4, 2, 300, 64, 64, docs=4).tensors(torch.bfloat16)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    got = grads_of(lambda q, k, v: compiled(q, k, v, segments), tensors)
    eager = grads_of(lambda q, k, v: attention(q, k, v, segments), tensors)
    assert torch.equal(got[0], eager[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], eager[1], strict=True))


def test_as_good_as_torchs_kernel(attention):
    *tensors, segments = AttentionCase(2, 4, 2, 300, 64, 64, docs=4).tensors(torch.bfloat16)
    native = run_both_ways(lambda q, k, v: NATIVE_ATTENTION(q, k, v, segments), tensors)[1]
    dout, ours = run_both_ways(lambda q, k, v: attention(q, k, v, segments), tensors)
    for mine, theirs, (_, exact, _) in zip(ours, native, exactly(*tensors, segments, 0.125, dout), strict=True):
        assert (mine.double() - exact).norm() < 1.1 * (theirs.double() - exact).norm()


def test_nothing_of_positions_squared_is_made(attention):
    positions = 1024
    *tensors, _ = AttentionCase(1, 2, 2, positions, 32, 32).tensors(torch.bfloat16)
    with LargestTensor() as largest:
        attention(*tensors, (torch.arange(positions) // 100)[None]).sum().backward()
    assert largest.num_bytes <= 4 * 2 * positions * 32  # FP32 queries, at most; a mask would take 1 MiB


def test_other_dtypes_are_refused(attention):
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match="BF16 is needed"):
        attention(x, x, x)


def test_selective_checkpointing_keeps_its_result(attention):
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += func is torch.ops.tilewright.bf16_attention.default
            return func(*args, **(kwargs or {}))

    *tensors, _ = AttentionCase(1, 2, 2, 40, 32, 32).tensors(torch.bfloat16)
    kept = [(found, 2 if mode == "matmuls" else 1) for mode, found in CONTEXTS.items()]
    for contexts, times in (*kept, (noop_context_fn, 2)):
        with Count() as count:
            out = checkpoint(lambda q, k, v: attention(q * 1, k, v), *tensors, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
        assert count.seen == times
