"""What torch's CUDA kernels for sequences of any length promise and refuse, as plain code on the CPU.

Written from their source, not from our calls: `flash_api.cpp` (mha_varlen_fwd, mha_varlen_bwd), `attention.cu`
(_efficient_attention_forward) and `attention_backward.cu`. Inside `on_cpu()` torch's operators are these functions, for
CPU tensors, so the product's own code calls them. Tokens that no sequence holds are NaN: the kernels do not write them.

Legend: T tokens  H heads  K key heads  D width  N sequences.
"""

import contextlib
import itertools

import torch

NAMES = ("_flash_attention_forward", "_flash_attention_backward")
NAMES += ("_efficient_attention_forward", "_efficient_attention_backward")


@contextlib.contextmanager
def on_cpu():
    """torch's CUDA operators as these functions; the list of calls: (name, shapes of queries and keys)."""
    calls = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in NAMES:
            library.impl(name, _noted(calls, name, globals()[name]), "CPU")
        yield calls


def _noted(calls, name, function):
    def run(*args, **kwargs):
        first = 1 if name.endswith("backward") else 0
        calls.append((name, tuple(args[first].shape), tuple(args[first + 1].shape)))
        return function(*args, **kwargs)

    return run


def sequences(starts, tokens):
    """(first, end) of each."""
    bounds = starts.tolist()
    assert bounds[0] == 0
    assert bounds[-1] <= tokens
    assert bounds == sorted(bounds)
    return list(itertools.pairwise(bounds))


def seen_by(length, left):
    """[L, L]: earlier keys, `left` of them at most; None or below 0: all."""
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    return allowed if left is None or left < 0 else allowed.triu(-left)


def attend(q_LHD, k_LKD, v_LKD, scale, left=None):
    """One causal sequence in FP64: result [L, H, D] and log-sum-exp [H, L]."""
    group = q_LHD.shape[1] // k_LKD.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q_LHD, k_LKD, v_LKD))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.mT * scale).masked_fill(~seen_by(q.shape[1], left), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def check_starts(cu_q, cu_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.is_contiguous()
    assert cu_k.is_contiguous()
    assert cu_q.dim() == 1
    assert torch.equal(cu_q, cu_k)


def check_flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal):
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    check_starts(cu_q, cu_k)
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    tokens, heads, width = q.shape
    assert k.shape == v.shape == (tokens, k.shape[1], width)
    assert heads % k.shape[1] == 0
    assert width <= 256
    assert width % 8 == 0
    assert len(cu_q) > 1
    assert max(end - first for first, end in sequences(cu_q, tokens)) <= min(max_q, max_k)
    assert max_q > 1, "the kernel folds heads into one query then, and its log-sum-exp has another shape"
    assert dropout == 0.0
    assert causal


def _flash_attention_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None,
):  # fmt: skip
    assert window_size_right in (None, 0), "causal: nothing behind"
    check_flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal)
    assert not debug
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for first, end in sequences(cu_q, len(q)):
        part, part_lse = attend(q[first:end], k[first:end], v[first:end], scale, window_size_left)
        out[first:end], lse[:, first:end] = part.to(q.dtype), part_lse.float()
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _flash_attention_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    check_flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal)
    assert rng.dtype == torch.uint64
    assert rng.shape == (2,)
    assert dout.dtype == out.dtype == q.dtype
    assert dout.shape == out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q))
    assert lse.dtype == torch.float32
    assert window_size_right in (None, 0)
    return gradients(dout, q, k, v, cu_q, scale, lambda number, first, end: lse[:, first:end], window_size_left)


def derivatives(q_LHD, k_LKD, v_LKD, dout_LHD, scale, left=None):
    """Of one causal sequence in FP64, by hand (autograd is off below an operator); and its log-sum-exp."""
    group = q_LHD.shape[1] // k_LKD.shape[1]
    q, k, v, dout = (x.double().transpose(0, 1) for x in (q_LHD, k_LKD, v_LKD, dout_LHD))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.mT * scale).masked_fill(~seen_by(q.shape[1], left), -torch.inf)
    probs, dprobs = scores.softmax(-1), dout @ v.mT
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (dscores.mT @ q, probs.mT @ dout))
    return [x.transpose(0, 1) for x in (dscores @ k, dk, dv)], scores.logsumexp(-1)


def gradients(dout, q, k, v, cu, scale, kept_lse, left=None):
    """Of each sequence by itself; the log-sum-exp that was kept must be the one of forward."""
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for number, (first, end) in enumerate(sequences(cu, len(q))):
        part = (x[first:end] for x in (q, k, v))
        found, lse = derivatives(*part, dout[first:end], scale, left)
        torch.testing.assert_close(kept_lse(number, first, end).double(), lse, atol=1e-4, rtol=0)
        for grad, here in zip(grads, found, strict=True):
            grad[first:end] = here.to(q.dtype)
    return tuple(grads)


def check_efficient(q, k, v, cu_q, cu_k, max_q, max_k, dropout, mask_type):
    assert q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    check_starts(cu_q, cu_k)
    assert q.dim() == k.dim() == v.dim() == 4
    assert len(q) == len(k) == len(v) == 1
    assert q.shape[2] == k.shape[2] == v.shape[2], "no grouped heads"
    assert q.shape[3] == k.shape[3]
    assert k.shape[1] == v.shape[1] == q.shape[1]
    aligned = 16 // q.element_size()
    assert all(x.stride(3) == 1 and x.stride(2) % aligned == 0 for x in (q, k, v))
    assert max(end - first for first, end in sequences(cu_q, q.shape[1])) <= min(max_q, max_k)
    assert (dropout, mask_type) == (0.0, 1), "causal from the top left"


def sums_of(max_q):
    return -(-max_q // 32) * 32


def _efficient_attention_forward(
    q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask_type, compute_log_sumexp=False, *, scale=None
):
    check_efficient(q, k, v, cu_q, cu_k, max_q, max_k, dropout, mask_type)
    assert bias is None
    assert compute_log_sumexp
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full((len(cu_q) - 1, q.shape[2], sums_of(max_q)), torch.nan)
    for number, (first, end) in enumerate(sequences(cu_q, q.shape[1])):
        part, part_lse = attend(q[0, first:end], k[0, first:end], v[0, first:end], scale)
        out[0, first:end], lse[number, :, : end - first] = part.to(q.dtype), part_lse.float()
    seed = torch.empty((), dtype=torch.int64)
    return out, lse, seed, seed.clone(), max_q, max_k


def _efficient_attention_backward(
    dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset, mask_type, bias_requires_grad,
    *, scale=None,
):  # fmt: skip
    check_efficient(q, k, v, cu_q, cu_k, max_q, max_k, dropout, mask_type)
    assert bias is None
    assert not bias_requires_grad
    assert seed.dtype == offset.dtype == torch.int64
    assert max(max_q, max_k) <= q.shape[1], "refused by backward alone"
    assert lse.shape == (len(cu_q) - 1, q.shape[2], sums_of(max_q))
    assert lse.dtype == torch.float32
    assert dout.shape == out.shape == (*q.shape[:3], v.shape[3])
    found = gradients(dout[0], q[0], k[0], v[0], cu_q, scale, lambda number, first, end: lse[number, :, : end - first])
    return *(grad[None] for grad in found), torch.empty(0)
