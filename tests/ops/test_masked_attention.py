"""Attention with a mask in C++, of BF16 operands: masks of documents and windows, any other, against FP64."""

import functools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.draws import examples
from tests.ops.compare import LargestTensor, assert_snr
from tests.ops.test_bf16_attention import REASONS
from tests.ops.test_ops import SNR_DB, grads_of
from tilewright.ops.backends.attention_parts import first_keys
from tilewright.ops.backends.cpu import attention as cpp

KERNEL = next((name for name, reason in REASONS.items() if reason is None), None)
pytestmark = pytest.mark.skipif(KERNEL is None, reason=f"{REASONS}")


def drawn_mask(kind, rows, heads, length, seed):
    """[1 or B, 1 or H, S, S]; each query sees itself at least."""
    generator = torch.Generator().manual_seed(seed)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    segments = (torch.rand(rows, length, generator=generator) < 0.1).cumsum(-1)
    same = (segments[:, :, None] == segments[:, None])[:, None]
    any_ = torch.rand(rows, heads, length, length, generator=generator) < 0.5
    return {
        "causal": causal[None, None],
        "documents": causal & same,
        "window": causal.triu(-6).expand(rows, 1, -1, -1),
        "both ways": same,
        "of heads": any_ | torch.eye(length, dtype=torch.bool),
        "holes": (any_[:, :1] & causal) | torch.eye(length, dtype=torch.bool),
        "later first": (causal & ((torch.arange(length) >= 3) | torch.eye(length, dtype=torch.bool)))[None, None],
    }[kind]


KINDS = ("causal", "documents", "window", "both ways", "of heads", "holes", "later first")


@example(kind="holes", rows=2, keys=2, group=2, length=33, width=24, narrow=False, seed=1)
@example(kind="of heads", rows=1, keys=2, group=2, length=20, width=8, narrow=True, seed=2)
@example(kind="documents", rows=2, keys=2, group=2, length=70, width=64, narrow=False, seed=3)
@examples(12)
@given(
    kind=st.sampled_from(KINDS), rows=st.integers(1, 2), keys=st.integers(1, 2), group=st.integers(1, 2),
    length=st.one_of(st.integers(1, 70), st.just(130)), width=st.sampled_from([8, 24, 64]), narrow=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_mask(kind, rows, keys, group, length, width, narrow, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((keys * group, width), (keys, width), (keys, width // 2 if narrow else width))
    q, k, v = (torch.randn(rows, heads, length, d, generator=generator).bfloat16() for heads, d in shapes)
    mask = drawn_mask(kind, rows, keys * group, length, seed)
    got, grads = grads_of(lambda q, k, v: cpp.masked_attention(KERNEL, q, k, v, mask), [q, k, v])
    plain = functools.partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    want, want_grads = grads_of(plain, [x.double() for x in (q, k, v)])
    assert_snr(got, want, SNR_DB[torch.bfloat16], "output")
    for name, one, other in zip("qkv", grads, want_grads, strict=True):
        # Where a query sees one key its gradient is 0: errors are those of the terms that it is a sum of.
        eps, size = torch.finfo(torch.bfloat16).eps, max(1.0, other.abs().max().item())
        assert (one.double() - other).abs().max() <= 16 * eps * size, name


@pytest.mark.parametrize("kind", ["causal", "documents", "window"])
def test_masks_of_documents_and_windows_are_attention_bit_for_bit(kind):
    q, k, v = (torch.randn(2, 2, 90, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    mask = drawn_mask(kind, 2, 2, 90, 5)
    segments = (torch.rand(2, 90, generator=torch.Generator().manual_seed(5)) < 0.1).cumsum(-1)
    arguments = {"documents": {"segments_BS": segments}, "window": {"window": 7}, "causal": {}}[kind]
    want = grads_of(lambda q, k, v: cpp.attention(KERNEL, q, k, v, **arguments), [q, k, v])
    got = grads_of(lambda q, k, v: cpp.masked_attention(KERNEL, q, k, v, mask), [q, k, v])
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


def test_nothing_is_kept_beside_the_mask():
    q, k, v = (torch.randn(1, 2, 256, 16).bfloat16().requires_grad_() for _ in range(3))
    mask = drawn_mask("documents", 1, 2, 256, 0)
    with LargestTensor() as largest:
        out = cpp.masked_attention(KERNEL, q, k, v, mask)
        out.sum().backward()
    assert largest.num_bytes <= 256 * 256  # the mask


@pytest.mark.slow
def test_compiled():
    q, k, v = (torch.randn(2, 2, 40, 16).bfloat16() for _ in range(3))
    mask = drawn_mask("documents", 2, 2, 40, 1)
    run = functools.partial(cpp.masked_attention, KERNEL)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    got, want = (grads_of(lambda q, k, v, f=f: f(q, k, v, mask), [q, k, v]) for f in (compiled, run))
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), window=st.integers(0, 12), seed=st.integers(0, 9))
def test_first_keys_are_those_of_the_definition(lengths, window, seed):
    documents = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    segments = torch.cat([torch.full((n,), int(number)) for n, number in zip(lengths, documents, strict=True)])[None]
    place = torch.arange(segments.shape[1])
    seen = (segments[:, :, None] == segments[:, None]) & (place[:, None] >= place)
    if window:
        seen &= place[:, None] - place < window
    assert torch.equal(first_keys(segments, len(place), window), seen.int().argmax(-1).int())
