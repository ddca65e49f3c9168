"""Attention within a window, against its definition in FP64: each query sees the last keys of its own document."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops import varlen_contract
from tests.ops.cases import AttentionCase
from tests.ops.compare import largest_allocation
from tests.ops.test_ops import grads_of
from tilewright.core.errors import HardwareError
from tilewright.core.hardware import detect_machine
from tilewright.ops.backends.native.attention import _Blocked
from tilewright.ops.backends.native.varlen_attention import by_efficient, by_flash
from tilewright.ops.base.documents import documents_of
from tilewright.ops.kernels import Kernels

MACHINE = detect_machine("cpu")
KERNELS = {name: Kernels(MACHINE, {"attention": name}, compile=False) for name in ("native", "ref")}
KERNELS["wide"] = Kernels(replace(MACHINE, cpu_features=frozenset()), {"attention": "wide"}, compile=False)


def by_definition(q, k, v, segments, window):
    """A softmax over the keys that each query sees, in the precision of the inputs."""
    group, place = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    back = place[:, None] - place
    seen = (back >= 0) & (back < window)
    if segments is not None:
        seen = (seen & (segments[:, :, None] == segments[:, None]))[:, None]
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(group, 1)) / q.shape[-1] ** 0.5
    probs = torch.where(seen, scores, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", probs, v.repeat_interleave(group, 1))


def check(run, q, k, v, segments, window):
    """Output and gradients. A gradient may be 0 where a query sees one key: errors are measured against the values
    that it is a sum of, each rounded once, and sums of at most 160 products in FP32."""
    eps = max(torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps if q.dtype != torch.float64 else 0)
    out, grads = grads_of(run, [q, k, v])
    want, want_grads = grads_of(lambda *x: by_definition(*x, segments, window), [x.double() for x in (q, k, v)])
    for name, one, other in zip(("out", "dq", "dk", "dv"), (out, *grads), (want, *want_grads), strict=True):
        off, bound = (one.double() - other).abs().max(), 32 * eps * max(1.0, float(other.abs().max()))
        assert off <= bound, f"{name}: off by {off:.3g}, bound {bound:.3g}"


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(1, 150)),
    window=st.one_of(st.integers(1, 12), st.integers(13, 160)),
    docs=st.sampled_from([0, 0, 3]),
    narrow=st.booleans(),
    how=st.sampled_from(
        [("native", torch.float32), ("native", torch.bfloat16), ("native", torch.float64), ("wide", torch.bfloat16),
         ("wide", torch.float16), ("ref", torch.float32)]
    ),
    block=st.sampled_from([0, 0, 19]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_each_candidate_is_the_definition(shape, window, docs, narrow, how, block, seed):
    """Outputs and gradients; of packed rows in both forms."""
    rows, (heads, groups), length = shape
    name, dtype = how
    case = AttentionCase(rows, heads, groups, length, 16, 8 if narrow else 16, docs=docs)
    q, k, v, segments = case.tensors(dtype, seed)
    if segments is not None:
        segments = segments.cummax(-1).values.clamp(min=0)  # no padding: rows of a definition are all read
    for form in (segments, None if segments is None else documents_of(segments)):
        check(
            lambda q, k, v, form=form: KERNELS[name].attention(q, k, v, segments=form, block=block, window=window),
            *(q, k, v, segments, window),
        )


@pytest.mark.parametrize("name", KERNELS)
def test_a_window_that_hides_nothing_changes_no_bit(name):
    dtype = torch.bfloat16 if name == "wide" else torch.float32
    q, k, v, segments = AttentionCase(2, 4, 2, 90, 16, 16, docs=4).tensors(dtype)
    for form in (None, segments, documents_of(segments)):
        plain, *windowed = (
            grads_of(
                lambda q, k, v, w=w, form=form: KERNELS[name].attention(q, k, v, segments=form, window=w), [q, k, v]
            )
            for w in (0, 90, 91, 2**31 - 1)
        )
        for out, grads in windowed:
            assert torch.equal(out, plain[0])
            assert all(map(torch.equal, grads, plain[1]))


def test_a_window_as_long_as_each_document_changes_no_bit():
    q, k, v, segments = AttentionCase(1, 2, 1, 200, 16, 16, docs=6).tensors(torch.float32)
    found = documents_of(segments)
    longest = int(found.starts_N1.diff().max())
    assert longest < 199
    (out, grads), (want, want_grads) = (
        grads_of(lambda q, k, v, w=w: KERNELS["native"].attention(q, k, v, segments=found, window=w), [q, k, v])
        for w in (longest, 0)
    )
    assert torch.equal(out, want)
    assert all(map(torch.equal, grads, want_grads))


@pytest.mark.parametrize(("name", "packed"), [("native", False), ("native", True), ("wide", False)])
def test_nothing_of_positions_squared_is_in_memory(name, packed):
    """Nor of all keys for a block of queries: memory is that of the operands, whatever the length."""
    length = 4096
    dtype = torch.bfloat16 if name == "wide" else torch.float32
    q, k, v = (torch.randn(1, 2, length, 16).to(dtype).requires_grad_() for _ in range(3))
    segments = documents_of((torch.arange(length) // 1500)[None]) if packed else None
    found = largest_allocation(lambda: KERNELS[name].attention(q, k, v, segments=segments, window=64).sum().backward())
    assert found <= 2 * length * 16 * 4, "one operand in FP32"


@pytest.mark.slow
def test_compiled_code_has_the_numbers_of_eager_code():
    q, k, v, segments = AttentionCase(2, 4, 2, 150, 16, 16, docs=3).tensors(torch.bfloat16)

    def run(q, k, v):
        return KERNELS["native"].attention(q, k, v, segments=segments, window=20)

    torch._dynamo.reset()
    out, grads = grads_of(torch.compile(run, backend="aot_eager", fullgraph=True), [q, k, v])
    want, want_grads = grads_of(run, [q, k, v])
    assert torch.equal(out, want)
    assert all(map(torch.equal, grads, want_grads))


def test_no_window_is_below_one():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="window"):
        Kernels.default().attention(q, q, q, window=-1)


# ---- GPUs ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("docs", [0, 4])
def test_flash_is_told_of_the_window(dtype, docs):
    q, k, v, segments = AttentionCase(2, 4, 2, 90, 16, 16, docs=docs).tensors(dtype)
    with varlen_contract.on_cpu() as calls:
        check(lambda q, k, v: by_flash(q, k, v, segments, None, 0, 7), q, k, v, segments, 7)
    assert {call for call, *_ in calls} == {"_flash_attention_forward", "_flash_attention_backward"}


def test_other_gpu_kernels_go_by_blocks(monkeypatch):
    """What a GPU runs where flash does not: the same code on a CPU, but for its choice of kernel."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    gpu = replace(MACHINE, device="cuda", capability=(9, 0))
    rows = {row["case"]: row for row in Kernels(gpu).explain() if row["op"] == "attention"}
    assert rows["cuda bfloat16 window"]["chosen"] == rows["cuda float16 window"]["chosen"] == "varlen"
    assert rows["cuda float32 window"]["chosen"] == rows["cuda bfloat16 window_wide"]["chosen"] == "native"
    assert "window" in dict(rows["cuda float32 window"]["rejected"])["efficient"]
    with pytest.raises(HardwareError, match="window"):
        raise Kernels(gpu, {"attention": "efficient"}).impossible["attention", "cuda", torch.float32, "window"]
    with pytest.raises(AssertionError, match="window"):
        by_efficient(*(torch.randn(1, 1, 4, 8),) * 3, window=2)
    case = AttentionCase(2, 4, 2, 150, 16, 8, docs=3)
    q, k, v, segments = case.tensors(torch.float32)

    def blocked(q, k, v):
        v = torch.nn.functional.pad(v, (0, 8))
        return _Blocked.apply(q, k, v, segments, 0.25, 0, 20)[..., :8]

    check(blocked, q, k, v, segments, 20)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # its own backward, by matmuls
    check(blocked, q, k, v, segments, 20)


# ---- the end of a row ----


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 2), group=st.integers(1, 2), new=st.integers(1, 5), past=st.integers(1, 9),
    window=st.integers(1, 12), cut=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_to_the_past_is_the_end_of_the_whole(groups, group, new, past, window, cut, seed):
    """Whether the keys before the window are there or not."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, new + past, 8, generator=generator, dtype=torch.float64)
               for heads in (groups * group, groups, groups))  # fmt: skip
    first = max(0, past - window + 1) if cut and window > 1 else 0
    found = KERNELS["native"].attention_to_past(q[:, :, past:], k[:, :, first:], v[:, :, first:], window=window)
    want = by_definition(q, k, v, None, window)[:, :, past:]
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
