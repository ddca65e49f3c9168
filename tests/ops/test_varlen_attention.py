"""Attention by documents on torch's CUDA kernels, each called with what its source promises and refuses
(`varlen_contract`), and which kernel a GPU gets for which call."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.draws import examples
from tests.ops import varlen_contract
from tests.ops.cases import AttentionCase, attention_cases
from tests.ops.compare import LargestTensor
from tests.ops.test_ops import check, grads_of, plain_attention
from tilewright.core.errors import DataError
from tilewright.core.hardware import detect_machine
from tilewright.ops.attention import ATTENTION
from tilewright.ops.backends.native.varlen_attention import by_efficient, by_flash
from tilewright.ops.base.documents import STARTS, document_starts, documents_of, segments_of
from tilewright.ops.kernels import Kernels

CASES = [*attention_cases(), AttentionCase(3, 6, 2, 40, 20, 12, docs=9), AttentionCase(2, 4, 2, 1, 8, 8, docs=1)]
RUNS = [(by_flash, torch.bfloat16), (by_flash, torch.float16)]
RUNS += [(by_efficient, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("run", "dtype"), RUNS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_get_what_they_take_and_give_attention(run, dtype, case):
    """Outputs and gradients against FP64; documents, none, ragged widths, grouped heads, narrow values."""
    q, k, v, segments = case.tensors(dtype)
    with varlen_contract.on_cpu() as calls:
        for given_as in (segments, None if segments is None else documents_of(segments)):
            check(
                lambda q, k, v, given_as=given_as: run(q, k, v, given_as),
                lambda q, k, v: plain_attention(q, k, v, segments), [q, k, v], dtype,
            )  # fmt: skip
    name = "_flash" if run is by_flash else "_efficient"
    assert {call for call, *_ in calls} == {f"{name}_attention_forward", f"{name}_attention_backward"}


def test_nothing_of_positions_squared_is_made():
    q, k, v = (torch.randn(1, heads, 512, 8, requires_grad=True) for heads in (4, 2, 2))
    segments = (torch.arange(512) // 16)[None]
    with varlen_contract.on_cpu(), LargestTensor() as largest:
        by_efficient(q, k, v, segments).sum().backward()
    assert largest.num_bytes <= 4 * 4 * 512 * 32, "log-sum-exps of 32 documents, the bound of each 128 tokens"


def test_grouped_heads_are_not_repeated_for_flash():
    q, k, v, segments = AttentionCase(2, 8, 2, 24, 8, 8, docs=3).tensors(torch.bfloat16)
    with varlen_contract.on_cpu() as calls:
        by_flash(q, k, v, segments)
    assert calls == [("_flash_attention_forward", (48, 8, 8), (48, 2, 8))]


def test_heads_inside_of_positions_are_handed_over_as_they_are():
    """As a layer has them: views, no copies."""
    q, k, v = (torch.randn(2, 24, heads, 8).bfloat16().transpose(1, 2) for heads in (4, 2, 2))
    kept = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    seen = []
    with torch.library._scoped_library("aten", "IMPL") as library:

        def forward(q, k, v, *args, **kwargs):
            seen.extend(x.untyped_storage().data_ptr() for x in (q, k, v))
            return q.clone(), torch.empty(4, 48), None, None, None

        library.impl("_flash_attention_forward", forward, "CPU")
        with torch.no_grad():
            by_flash(q, k, v, torch.zeros(2, 24, dtype=torch.int32))
    assert set(seen) == kept


@pytest.mark.parametrize("run", [by_flash, by_efficient])
def test_shapes_told_to_the_compiler_are_those_of_the_kernels(run):
    """Forward and backward, on a CUDA device that is not there, where torch tells its kernels' shapes too."""
    case = AttentionCase(2, 4, 2, 48, 16, 16, docs=4)
    dtype = torch.bfloat16 if run is by_flash else torch.float32
    q, k, v, segments = (x.detach() for x in case.tensors(dtype))
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda g, e: make_boxed_func(keep(g, e)))
    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with varlen_contract.on_cpu():
        found = documents_of(segments)
        out, grads = grads_of(lambda q, k, v: compiled(q, k, v, found), [q, k, v])
        want, want_grads = grads_of(lambda q, k, v: run(q, k, v, found), [q, k, v])
        for number, more in enumerate((5, 2, 7)):  # other numbers of documents: no graph for each of them
            other = documents_of((torch.arange(48) // more).expand(2, -1).contiguous())
            grads_of(lambda q, k, v, other=other: compiled(q, k, v, other), [q, k, v])
            assert len(graphs) <= 4, number
    assert torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.parametrize("longest", [128, 4096])
def test_the_shapes_are_those_that_torch_tells_of_its_kernels(longest):
    """On a CUDA device that is not there. Of backward of the memory-efficient kernel torch 2.13 tells nothing right."""
    aten, ours = torch.ops.aten, torch.ops.tilewright

    def facts(*tensors):
        return [(x.shape, x.stride(), x.dtype, x.device) for x in tensors]

    with FakeTensorMode():
        starts = torch.empty(6, dtype=torch.int32, device="cuda")
        q, k = (torch.empty(300, heads, 24, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
        out, lse, rng, unused, _ = aten._flash_attention_forward(
            q, k, k, starts, starts, longest, longest, 0.0, True, False, scale=0.1
        )
        grads = aten._flash_attention_backward(
            out, q, k, k, out, lse, starts, starts, longest, longest, 0.0, True, rng, unused, scale=0.1
        )
        assert facts(*ours.varlen_attention(q, k, k, starts, longest, 0.1, True)) == facts(out, lse)
        found = ours.varlen_attention_backward(q, k, k, starts, out, lse, out, longest, 0.1, True)
        assert facts(*found) == facts(*grads)
        q, within = q.float(), min(longest, 300)
        out, lse, *_ = aten._efficient_attention_forward(
            *[q.unsqueeze(0)] * 3, None, starts, starts, within, within, 0.0, 1, True, scale=0.1
        )
        assert facts(*ours.varlen_attention(q, q, q, starts, longest, 0.1, False))[0] == facts(out.squeeze(0))[0]
        # torch counts the sums of one sequence for all; `varlen_contract` has those of the kernel
        assert ours.varlen_attention(q, q, q, starts, longest, 0.1, False)[1].shape == (5, 4, -(-within // 32) * 32)


# ---- documents ----


@examples(60)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 5))
def test_starts_are_those_of_the_lengths_whatever_the_numbers(rows, padding):
    length = max(map(sum, rows)) + padding
    lengths = [[*row, *([length - sum(row)] if length > sum(row) else [])] for row in rows]
    segments = torch.stack([
        torch.repeat_interleave(torch.tensor([*range(7, 7 + len(row)), -1][: len(full)]), torch.tensor(full))
        for row, full in zip(rows, lengths, strict=True)
    ])  # fmt: skip
    want = [0, *itertools.accumulate(itertools.chain.from_iterable(lengths))]
    assert document_starts(segments).tolist() == want
    found = documents_of(segments)
    assert found.longest >= max(map(max, lengths))
    assert found.longest == documents_of(segments, found.starts_N1).longest
    assert segments_of(found) is segments


def test_a_document_in_pieces_is_an_error():
    with pytest.raises(DataError, match="in pieces"):
        document_starts(torch.tensor([[0, 0, 0], [3, 4, 3]]))
    assert document_starts(torch.tensor([[1, 2], [2, 1]])).tolist() == [0, 1, 2, 3, 4], "of other rows: no pieces"


# ---- which kernel runs where ----


def gpu(capability):
    return replace(detect_machine("cpu"), device="cuda", capability=capability)


def chosen(capability, monkeypatch, flash=True):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
    rows = [row for row in Kernels(gpu(capability)).explain() if row["op"] == "attention"]
    return {row["case"].removeprefix("cuda "): row["chosen"] for row in rows if row["case"].startswith("cuda")}


def test_no_call_on_a_gpu_falls_to_scores_of_all_pairs(monkeypatch):
    """FP64 alone: no kernel of torch multiplies it by blocks. A window goes by blocks of its own."""
    for capability, flash in (((7, 5), True), ((8, 0), True), ((9, 0), True), ((9, 0), False), ((12, 0), True)):
        found = chosen(capability, monkeypatch, flash)
        by_torch = {case for case, name in found.items() if name == "native" and "window" not in case}
        left = {case for case in by_torch if not case.startswith("float64")}
        plain = {"bfloat16", "float16"} if capability >= (8, 0) and flash else set()  # torch chooses flash itself
        bf16 = {case for case in by_torch if case.startswith("bfloat16")} if capability < (8, 0) else set()
        assert left == plain | bf16, capability
    found = chosen((9, 0), monkeypatch)
    assert found["bfloat16 packed"] == found["float16 packed"] == "varlen"
    assert found["float32 packed"] == found["float32"] == found["bfloat16 packed_wide"] == "efficient"


def test_the_reasons_name_the_capability(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    rows = {row["case"]: row for row in Kernels(gpu((7, 5))).explain() if row["op"] == "attention"}
    reasons = dict(rows["cuda float16 packed"]["rejected"])
    assert "8.0" in reasons["varlen"]
    assert "7.5" in reasons["varlen"]
    assert rows["cuda float16 packed"]["chosen"] == "efficient"


def test_documents_are_found_where_a_kernel_wants_them(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    segments = torch.tensor([[0, 0, 1, -1]])
    batch = {"segments": segments, STARTS: document_starts(segments)}
    assert Kernels.default().documents({"segments": segments}) is segments
    assert Kernels.default().documents(batch).starts_N1.tolist() == [0, 2, 3, 4], "a CPU goes through documents"
    assert Kernels.default().documents({}) is None
    with FakeTensorMode():
        there = torch.empty(1, 4, dtype=torch.int32, device="cuda")
    given = []
    monkeypatch.setattr("tilewright.ops.kernels.documents_of", lambda *args: given.append(args) or "found")
    on_gpu = Kernels(gpu((9, 0)))
    assert on_gpu.documents(batch | {"segments": there}) == on_gpu.documents({"segments": there}) == "found"
    (first, host), (second, nothing) = given
    assert first is second is there
    assert host is batch[STARTS]
    assert nothing is None
    assert on_gpu.documents({"segments": segments}) is segments, "attention on its CPU reads segments"


def test_every_candidate_takes_documents_in_either_form():
    q, k, v, segments = AttentionCase(2, 4, 2, 40, 16, 16, docs=3).tensors(torch.float32)
    found = documents_of(segments)
    kernels = Kernels.default()
    outs = [kernels.attention(q, k, v, segments=form) for form in (segments, found)]
    real = (segments >= 0)[:, None, :, None]  # what stands in padding is read by nothing
    error = ((outs[0] - outs[1]) * real).abs().max() / outs[0].abs().max()
    assert error <= 8 * torch.finfo(torch.float32).eps, f"{error:.1e}"  # document by document, or with a mask
    assert {candidate.name for candidate in ATTENTION.candidates} >= {"varlen", "efficient", "native", "ref"}
