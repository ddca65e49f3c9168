"""Linear attention by chunks against its definition, position by position in FP64; documents, states, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.compare import assert_snr, largest_allocation
from tests.ops.test_ops import SNR_DB, check, grads_of
from tilewright.ops.attention import LINEAR_ATTENTION
from tilewright.ops.backends.linear_attention import PIECE_BYTES
from tilewright.ops.kernels import Kernels

CHUNKED, REF = (candidate.run for candidate in LINEAR_ATTENTION.candidates)
KERNELS = Kernels.default()


def operands(rows, heads, length, width, dtype=torch.float32, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, length, width)] * 3 + [(rows, heads, length)] * 2
    return [(torch.randn(shape, generator=generator) * spread).to(dtype) for shape in shapes]


def by_definition(q, k, v, decay, rate, segments=None):
    """The recurrence as the operation's contract has it, all rows and heads of a position together."""
    silu = torch.nn.functional.silu
    q, k = (silu(x) / (silu(x).square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    kept, rate, outs = (torch.nn.functional.logsigmoid(decay) / 16).exp(), torch.sigmoid(rate), []
    state = q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])
    for t in range(q.shape[2]):
        if segments is not None and t:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        state = torch.einsum("bh,bhij->bhij", kept[:, :, t], state)
        error = silu(v[:, :, t]) - torch.einsum("bhi,bhij->bhj", k[:, :, t], state)
        state = state + torch.einsum("bhi,bhj,bh->bhij", k[:, :, t], error, rate[:, :, t])
        outs.append(torch.einsum("bhi,bhij->bhj", q[:, :, t], state) / q.shape[-1] ** 0.5)
    return torch.stack(outs, 2)


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.tuples(
        st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 2, 63, 64, 65, 100, 130]), st.sampled_from([4, 10])
    ),
    docs=st.integers(0, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    run=st.sampled_from([CHUNKED, CHUNKED, REF]), seed=st.integers(0, 99),
)  # fmt: skip
def test_candidates_are_the_definition(sizes, docs, dtype, run, seed):
    """Outputs, and gradients of all five inputs."""
    rows, heads, length, width = sizes
    inputs = operands(rows, heads, length, width, dtype, seed)
    segments = None
    if docs:
        segments = (
            torch.randint(0, docs, (rows, length), generator=torch.Generator().manual_seed(seed)).cummax(-1).values
        )
    check(
        lambda *x: run(*x, segments), lambda *x: by_definition(*x, segments), inputs, dtype
    )  # fmt: skip


@pytest.mark.parametrize("spread", [0.01, 30.0])
def test_gates_at_their_ends_and_equal_keys(spread):
    """Decay of 1 and of almost 0 over a whole row; keys that are all alike, so that the triangular system is full."""
    q, k, v, decay, rate = operands(1, 2, 200, 8, spread=spread, seed=3)
    k = k[:, :, :1].expand_as(k) + 0.1
    decay, rate = decay.abs() * spread * torch.tensor([1.0, -1.0])[None, :, None], rate.abs() * spread
    inputs = [q, k.contiguous(), v, decay, rate]
    out, grads = grads_of(CHUNKED, inputs)
    want, want_grads = grads_of(by_definition, [x.double() for x in inputs])
    for one, other in zip((out, *grads), (want, *want_grads), strict=True):
        # The inverse of a full system of 64 positions has entries of about 64: as many times FP32's rounding.
        off, bound = (one.double() - other).abs().max(), 64 * 2.0**-23 * max(1.0, float(other.abs().max()))
        assert off <= bound, f"off by {off:.3g}, bound {bound:.3g}"


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 2, 5, 64, 70]), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_pieces_from_a_state_are_the_whole_row(sizes, seed):
    inputs = operands(2, 2, sum(sizes), 8, seed=seed)
    whole = by_definition(*(x.double() for x in inputs))
    state, start, outs = None, 0, []
    for size in sizes:
        out, state = KERNELS.linear_attention_from(state, *(x[:, :, start : start + size] for x in inputs))
        outs.append(out)
        start += size
    assert_snr(torch.cat(outs, 2), whole, SNR_DB[torch.float32])
    assert state.shape == (2, 2, 8, 8)


def test_documents_of_a_row_do_not_see_each_other():
    inputs = operands(1, 2, 150, 8)
    segments = (torch.arange(150) >= 70).int()[None]
    out = CHUNKED(*inputs, segments)
    alone = CHUNKED(*(x[:, :, 70:] for x in inputs))
    assert_snr(out[:, :, 70:], alone, SNR_DB[torch.float32])
    _, grads = grads_of(lambda *x: CHUNKED(*x, segments)[:, :, 70:], inputs)
    for grad in grads:  # decays of a chunk are summed over its documents, so a last bit of one is seen in another
        assert grad[:, :, :70].abs().max() <= 1e-6 * grad.abs().max()


@pytest.mark.parametrize("bound", [2**14, 2**16, 2**18])
def test_few_rows_and_heads_at_a_time_change_no_bit(bound, monkeypatch):
    """Heads of a row one by one, a row at a time, several rows."""
    inputs = operands(3, 2, 70, 4, torch.bfloat16)
    segments = (torch.arange(70) // 40).expand(3, -1)
    out, grads = grads_of(lambda *x: CHUNKED(*x, segments), inputs)
    monkeypatch.setitem(PIECE_BYTES, "cpu", bound)
    again, more = grads_of(lambda *x: CHUNKED(*x, segments), inputs)
    assert torch.equal(out, again)
    assert all(map(torch.equal, grads, more))


def test_memory_is_bounded_and_nothing_is_of_positions_squared():
    length, width, heads = 4096, 16, 8
    inputs = [x.requires_grad_() for x in operands(1, heads, length, width)]
    found = largest_allocation(lambda: CHUNKED(*inputs).sum().backward())
    assert found <= max(PIECE_BYTES["cpu"] / 10, 4 * heads * length * width)


@pytest.mark.slow
def test_compiled_code_has_the_numbers_of_eager_code():
    inputs = operands(2, 2, 70, 8, torch.bfloat16)
    segments = (torch.arange(70) // 40).expand(2, -1)

    def run(*x):
        return KERNELS.linear_attention(*x, segments=segments)

    torch._dynamo.reset()
    out, grads = grads_of(torch.compile(run, backend="aot_eager", fullgraph=True), inputs)
    want, want_grads = grads_of(run, inputs)
    assert torch.equal(out, want)
    assert all(map(torch.equal, grads, want_grads))


@pytest.mark.slow
def test_transformers_recurrence_agrees():
    """Of Qwen3-Next, with the gates as it takes them."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, decay, rate = operands(2, 3, 40, 8, seed=5)
    silu = torch.nn.functional.silu
    theirs, _ = torch_recurrent_gated_delta_rule(
        *(silu(x).transpose(1, 2) for x in (q, k, v)), (torch.nn.functional.logsigmoid(decay) / 16).transpose(1, 2),
        torch.sigmoid(rate).transpose(1, 2), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert_snr(CHUNKED(q, k, v, decay, rate), theirs.transpose(1, 2), 110)
