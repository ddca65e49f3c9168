"""Linear attention by chunks of positions: products of matrices in a chunk, one small product from chunk to chunk.

Within a chunk, what each position adds to the state solves a triangular system: the delta rule reads what earlier
positions of the chunk have added. With M the state before the chunk, G the decay from a position to a later one, p that
since the chunk began, e that up to its end, and rows of q, k, v for its positions:

    A = tril(rate (k k^T) G, -1),   L = tril((q k^T) G)
    U = T rate v - W M              with T = (I + A)^-1, W = T rate p k
    out = L U + p q M               M' = p_last M + (e k)^T U

G, p and e are 0 between documents. Backward computes a chunk's matrices again: what came in is all that is kept. Rows
and heads are independent, so as many of them are computed at a time as a bound on these matrices allows.
All of it is in FP32, on each machine: a state sums up what thousands of positions add.

Legend: B rows  H heads  S positions  N chunks  C positions of a chunk  D width of a head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.backends.ref.linear_attention import EPS, GATE_SCALE, unit
from tilewright.ops.backends.ref.math import wide

CHUNK = 64
"""Positions of a chunk."""
PIECE_BYTES = {"cpu": 2**25}
"""Of all matrices that are alive at once, by device; `_ELSEWHERE` on others, which need more work at a time."""
_ELSEWHERE = 2**28
_LIKE_OPERANDS, _LIKE_PAIRS = 30, 10
"""Matrices as large as an operand and as pairs of a chunk that backward has alive, at most."""


def attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    decay_BHS: Tensor,
    rate_BHS: Tensor,
    segments_BS: Tensor | None = None,
) -> Tensor:
    """Compute linear attention by chunks: see `ops.attention`."""
    return _Attention.apply(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, segments_BS)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, segments_BS):
        ctx.save_for_backward(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, segments_BS)
        return _forward(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, segments_BS)

    @staticmethod
    def backward(ctx, dout_BHSD):
        return *_backward(*ctx.saved_tensors, dout_BHSD), None


@torch.library.custom_op("tilewright::linear_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, segments: Tensor | None) -> Tensor:
    out = _heads_inside(q)
    for rows, heads in _pieces(q):
        piece = q[rows, heads], k[rows, heads], v[rows, heads], decay[rows, heads], rate[rows, heads]
        out[rows, heads] = with_state(*piece, None, None if segments is None else segments[rows])[0]
    return out


@_forward.register_fake
def _(q, k, v, decay, rate, segments):
    return _heads_inside(q)


@torch.library.custom_op("tilewright::linear_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, segments: Tensor | None, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = _heads_inside(q), _heads_inside(k), _heads_inside(v), torch.empty_like(decay), torch.empty_like(rate)
    for rows, heads in _pieces(q):
        piece = q[rows, heads], k[rows, heads], v[rows, heads], decay[rows, heads], rate[rows, heads]
        found = _gradients(*piece, None if segments is None else segments[rows], dout[rows, heads])
        for gradient, part in zip(gradients, found, strict=True):
            gradient[rows, heads] = part
    return gradients


@_backward.register_fake
def _(q, k, v, decay, rate, segments, dout):
    return *(_heads_inside(x) for x in (q, k, v)), torch.empty_like(decay), torch.empty_like(rate)


def _pieces(q_BHSD: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and heads of linear attention that are computed together: whole rows, or heads of one."""
    rows, heads, length, width = q_BHSD.shape
    floats = length * (_LIKE_OPERANDS * width + _LIKE_PAIRS * min(CHUNK, length))
    bound = PIECE_BYTES.get(q_BHSD.device.type, _ELSEWHERE)
    count = max(1, bound // max(1, floats * wide(q_BHSD.dtype).itemsize))
    row_step, head_step = max(1, count // max(1, heads)), min(count, heads)
    for row in range(0, rows, row_step):
        for head in range(0, heads, max(1, head_step)):
            yield slice(row, row + row_step), slice(head, head + head_step)


def with_state(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    decay_BHS: Tensor,
    rate_BHS: Tensor,
    state_BHDD: Tensor | None,
    segments_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention that begins at a state; see `ref.linear_attention.with_state`; without gradients."""
    chunks = _chunks(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, segments_BS)
    states, last = _states(chunks, state_BHDD)
    out = _in_rows(chunks.inside @ chunks.added + chunks.reads @ states, q_BHSD.shape[2])
    return out.to(q_BHSD.dtype), last


class _Chunks(NamedTuple):
    """Products of the positions of a chunk with each other, for all chunks; names as in the module's docstring."""

    q: Tensor
    """[B, H, N, C, D], over the root of D. So k and v."""
    k: Tensor
    v: Tensor
    rate: Tensor
    """[B, H, N, C, 1]; so `passed` (p) and `to_end` (e)."""
    passed: Tensor
    to_end: Tensor
    pairs: Tensor
    """G [B, H, N, C, C]: 0 above the diagonal. So the next two."""
    system: Tensor
    """I + A, without its diagonal."""
    inside: Tensor
    """L."""
    added: Tensor
    """T rate v [B, H, N, C, D]: what positions would add to an empty state."""
    erased: Tensor
    """W [B, H, N, C, D]."""
    reads: Tensor
    """p q - L W [B, H, N, C, D]: what the state before the chunk gives, times it."""


def _chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, segments_BS: Tensor | None) -> _Chunks:
    high, length = wide(q.dtype), q.shape[2]
    size = max(1, min(CHUNK, length))
    q, k, v = (_split(x.to(high), size) for x in (q, k, v))
    q, k, v = unit(q) * q.shape[-1] ** -0.5, unit(k), F.silu(v)
    real = _split(torch.ones(length, dtype=high, device=q.device)[None, None, :, None], size)
    rate = torch.sigmoid(_split(rate.to(high)[..., None], size)) * real
    logs = F.logsigmoid(_split(decay.to(high)[..., None], size)) * real / GATE_SCALE
    since = logs.squeeze(-1).cumsum(-1)
    same, continues = _documents(segments_BS, size, length, q.device)
    # Differences above the diagonal are positive, as large as a document is long: masked before the exponential.
    pairs = (since[..., :, None] - since[..., None, :]).masked_fill(~same, -torch.inf).exp()
    passed = (since.exp() * continues)[..., None]
    to_end = pairs[..., -1, :, None]
    system = ((k @ k.mT) * pairs * rate).tril(-1)
    inside = (q @ k.mT) * pairs
    solved = torch.linalg.solve_triangular(
        system, torch.cat((rate * v, rate * passed * k), -1), upper=False, unitriangular=True
    )
    added, erased = solved.split((v.shape[-1], k.shape[-1]), -1)
    return _Chunks(
        q, k, v, rate, passed, to_end, pairs, system, inside, added, erased, passed * q - inside @ erased
    )  # fmt: skip


def _documents(segments_BS: Tensor | None, size: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Masks of documents for linear attention: which pairs of a chunk's positions see each other [1 or B, 1, 1 or N, C,
    C], and which positions see the chunks before [1 or B, 1, 1 or N, C]."""
    lower_CC = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if segments_BS is None:
        return lower_CC, lower_CC[:, 0]
    pad = -length % size
    padded = torch.cat((segments_BS, segments_BS[:, -1:].expand(-1, pad)), 1) if pad else segments_BS
    chunks = padded.unflatten(1, (-1, size))[:, None]
    before = torch.cat((chunks[:, :, :1, 0], chunks[:, :, :-1, -1]), 2)
    return (chunks[..., :, None] == chunks[..., None, :]) & lower_CC, chunks == before[..., None]


def _split(x_BHSD: Tensor, size: int) -> Tensor:
    """Split into chunks for linear attention: [B, H, N, C, D], zeros behind the last position."""
    return F.pad(x_BHSD, (0, 0, 0, -x_BHSD.shape[2] % size)).unflatten(2, (-1, size))


def _in_rows(x_BHNCD: Tensor, length: int) -> Tensor:
    return x_BHNCD.flatten(2, 3)[:, :, :length]


def _states(chunks: _Chunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states of linear attention before each chunk [B, H, N, D, D], and behind the last one."""
    ends = (chunks.to_end * chunks.k).mT
    erases, adds = ends @ chunks.erased, ends @ chunks.added
    passed = chunks.passed[..., -1:, :]
    if state is None:
        state = torch.zeros_like(adds[:, :, 0])
    before = []
    for place in range(adds.shape[2]):
        before.append(state)
        state = passed[:, :, place] * state - erases[:, :, place] @ state + adds[:, :, place]
    return torch.stack(before, 2), state


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, segments: Tensor | None, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of linear attention by hand: autograd is off below an operator, and would keep every matrix
    of every chunk."""
    c = _chunks(q, k, v, decay, rate, segments)
    states, _ = _states(c, None)
    do = _split(dout.to(c.q.dtype), c.q.shape[3])
    ends = c.to_end * c.k
    after = _state_gradients(c, do, ends)
    used = c.added - c.erased @ states
    dused = c.inside.mT @ do + ends @ after
    dright = torch.linalg.solve_triangular(c.system.mT, dused, upper=True, unitriangular=True)
    dsystem, dinside = -(dright @ used.mT).tril(-1), (do @ used.mT).tril()
    held, read = c.k @ states, c.q @ states  # what the state before the chunk gives for keys and queries
    pairs_k, pairs_q = dsystem * c.rate * c.pairs, dinside * c.pairs
    drate = (dright * (c.v - c.passed * held)).sum(-1) + (dsystem * (c.k @ c.k.mT) * c.pairs).sum(-1)
    dq = c.passed * (do @ states.mT) + pairs_q @ c.k
    used_after = used @ after.mT
    dk = pairs_q.mT @ c.q + pairs_k @ c.k + pairs_k.mT @ c.k + c.to_end * used_after
    dk -= c.rate * c.passed * (dright @ states.mT)
    # Of the sums of log decays: each factor is an exponential of one or of a difference of two.
    products = dinside * c.inside + dsystem * c.system
    ending = (c.to_end * used_after * c.k).sum(-1)
    dsince = products.sum(-1) - products.sum(-2) - ending
    dsince += (c.passed * (do * read - c.rate * dright * held)).sum(-1)
    dsince[..., -1] += ending.sum(-1) + c.passed[..., -1, 0] * (after * states).sum((-2, -1))
    dlogs = dsince.flip(-1).cumsum(-1).flip(-1)
    return _through_inputs((q, k, v, decay, rate), (dq, dk, c.rate * dright, dlogs, drate))


def _state_gradients(c: _Chunks, do: Tensor, ends: Tensor) -> Tensor:
    """Gradients of linear attention's states behind each chunk [B, H, N, D, D]."""
    erases, reads = ends.mT @ c.erased, c.reads.mT @ do
    passed = c.passed[..., -1:, :]
    gradient, found = torch.zeros_like(reads[:, :, 0]), []
    for place in reversed(range(reads.shape[2])):
        found.append(gradient)
        gradient = passed[:, :, place] * gradient - erases[:, :, place].mT @ gradient + reads[:, :, place]
    return torch.stack(found[::-1], 2)


def _through_inputs(
    inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Convert gradients of the tensors that chunks are made of to gradients of the projections."""
    length = inputs[0].shape[2]
    q, k, v, decay, rate = (x.to(gradients[0].dtype) for x in inputs)
    dq, dk, dv = (_in_rows(x, length) for x in gradients[:3])
    dlogs, drate = (x.flatten(2, 3)[:, :, :length] for x in gradients[3:])
    found = (_unit_gradient(q, dq * q.shape[-1] ** -0.5), _unit_gradient(k, dk), dv * _silu_slope(v))
    gate, opened = torch.sigmoid(-decay) / GATE_SCALE, torch.sigmoid(rate)
    return *found, dlogs * gate, drate * opened * (1 - opened)


def _silu_slope(x: Tensor) -> Tensor:
    open_ = torch.sigmoid(x)
    return open_ * (1 + x * (1 - open_))


def _unit_gradient(x: Tensor, dunit: Tensor) -> Tensor:
    """Gradient of linear attention through `unit`."""
    active = F.silu(x)
    inverse = torch.rsqrt(active.square().sum(-1, keepdim=True) + EPS)
    direction = active * inverse
    return (dunit - direction * (direction * dunit).sum(-1, keepdim=True)) * inverse * _silu_slope(x)


def _heads_inside(x_BHSD: Tensor) -> Tensor:
    """An empty result for linear attention of the same shape, [B, S, H, D] in memory: what the projections beside it
    take."""
    batch, heads, positions, width = x_BHSD.shape
    return x_BHSD.new_empty((batch, positions, heads, width)).transpose(1, 2)
