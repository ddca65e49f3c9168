"""Attention on CPUs by documents: the same as with a mask in FP64, at the cost of the sum of the squared lengths."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core.hardware import detect_machine
from tilewright.ops.backends.document_attention import attention
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.documents import STARTS, documents_of
from tilewright.ops.kernels import Kernels


def _operands(segments_BS, heads, group, width, narrower, dtype, seed):
    rows, length = segments_BS.shape
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, width), (heads // group, width), (heads // group, width - narrower), (heads, width - narrower)
    return [torch.randn(rows, h, length, d, generator=generator).to(dtype) for h, d in shapes]


def _with_gradients(run, operands, segments, dtype):
    q, k, v, dout = (x.to(dtype) for x in operands)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = run(*leaves, segments)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _segments(rows: list[list[int]], padding: int) -> torch.Tensor:
    length = max(sum(row) for row in rows) + padding
    filled = [np.repeat([*range(len(row)), -1], [*row, length - sum(row)]) for row in rows]
    return torch.tensor(np.array(filled), dtype=torch.int32)


@given(
    rows=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=2),
    padding=st.integers(0, 20),
    group=st.sampled_from((1, 2)),
    narrower=st.sampled_from((0, 8)),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 2**16),
)
@examples(40)
def test_each_document_as_with_a_mask_and_padding_as_zeros(rows, padding, group, narrower, dtype, seed):
    segments_BS = _segments(rows, padding)
    operands = _operands(segments_BS, 4, group, 16, narrower, dtype, seed)
    documents = documents_of(segments_BS)
    operands[3] *= (segments_BS >= 0)[:, None, :, None]  # what comes back to padding is nothing
    ours = _with_gradients(lambda q, k, v, s: attention(q, k, v, s), operands, documents, dtype)
    right = _with_gradients(ref.attention, operands, segments_BS, torch.float64)
    kept = (segments_BS >= 0)[:, None, :, None]
    assert not ours[0][~kept.expand_as(ours[0])].any()
    # A sum of at most 40 products, and of the two heads that share a key, each rounded once.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if dtype != torch.float64 else 0)
    for name, one, other in zip(("out", "dq", "dk", "dv"), ours, right, strict=True):
        off = (one.double() - other * (kept if name == "out" else 1)).abs()
        bound = 16 * eps * max(1.0, float(other.abs().max()))
        assert off.max() <= bound, f"{name}: off by {off.max():.3g}, bound {bound:.3g}, at {int(off.argmax())}"


def _pairs(run) -> int:
    """Pairs of positions that flash kernels are given while `run` runs, no mask among them."""
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    seen = 0
    for event in profile.events():
        if "flash_attention_for_cpu" in event.name and event.name.startswith("aten::"):
            backward = "backward" in event.name
            query, key = event.input_shapes[backward], event.input_shapes[1 + backward]
            assert not event.input_shapes[8 if backward else 5], "a mask"
            seen += query[0] * query[2] * key[2]
    return seen


@pytest.mark.parametrize(
    ("backend", "dtype"), [("wide", torch.bfloat16), ("native", torch.float32), ("native", torch.bfloat16)]
)
def test_the_kernels_see_the_sum_of_squares_and_no_mask(backend, dtype):
    """What a batch of the stream brings is found by the model's kernels; rows packed as before go on as before."""
    machine = replace(detect_machine("cpu"), cpu_features=frozenset())  # one that multiplies in FP32 alone
    kernels = Kernels(machine, {"attention": backend})
    segments_BS = _segments([[30, 2, 17, 5]], 10)
    q, k, v, _ = (x.requires_grad_() for x in _operands(segments_BS, 2, 1, 16, 0, dtype, 1))
    batch = {"segments": segments_BS}
    starts = torch.tensor([0, 30, 32, 49, 54, 64], dtype=torch.int32)
    documents = kernels.documents(batch | {STARTS: starts})
    seen = _pairs(lambda: kernels.attention(q, k, v, segments=documents).sum().backward())
    assert seen == 2 * (30**2 + 2**2 + 17**2 + 5**2)
    assert kernels.documents(batch) is segments_BS


def test_compiled_code_has_the_numbers_of_eager_code():
    segments_BS = _segments([[9, 20]], 3)
    documents, operands = documents_of(segments_BS), _operands(segments_BS, 2, 1, 16, 0, torch.float32, 7)

    def run(q, k, v, s):
        return attention(q, k, v, s)

    compiled = _with_gradients(torch.compile(run, backend="aot_eager"), operands, documents, torch.float32)
    for one, other in zip(compiled, _with_gradients(run, operands, documents, torch.float32), strict=True):
        assert torch.equal(one, other)
