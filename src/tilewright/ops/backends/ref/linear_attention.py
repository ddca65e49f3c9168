"""Linear attention position by position, as `ops.attention` defines it, in FP32 (FP64 for FP64 inputs).

Legend: B rows  H heads  S positions  D width of a head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.backends.ref.math import wide

GATE_SCALE = 16
"""The root that is taken of the decay's sigmoid, so that a state that begins to learn forgets slowly."""
EPS = 1e-6
"""Added to the square of a key's and a query's length."""


def unit(x: Tensor) -> Tensor:
    """Pass x through SiLU and scale it to length 1, for linear attention: the reference."""
    x = F.silu(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    decay_BHS: Tensor,
    rate_BHS: Tensor,
    segments_BS: Tensor | None = None,
) -> Tensor:
    """Linear attention by the reference, position by position: see `ops.attention`."""
    return with_state(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, None, segments_BS)[0]


def with_state(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    decay_BHS: Tensor,
    rate_BHS: Tensor,
    state_BHDD: Tensor | None,
    segments_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention by the reference that begins at a state (None: nothing was seen yet), and the state after the
    last position."""
    high = wide(q_BHSD.dtype)
    q, k, v, decay, rate = (x.to(high) for x in (q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS))
    q, k, v = unit(q) * q.shape[-1] ** -0.5, unit(k), F.silu(v)
    kept, rate = torch.exp(F.logsigmoid(decay) / GATE_SCALE)[..., None, None], torch.sigmoid(rate)[..., None]
    rows, heads, length, width = q.shape
    state = q.new_zeros(rows, heads, width, width) if state_BHDD is None else state_BHDD
    outs = []
    for place in range(length):
        state = state * kept[:, :, place]
        if segments_BS is not None and place:
            same_B = segments_BS[:, place] == segments_BS[:, place - 1]
            state = torch.where(same_B[:, None, None, None], state, 0.0)
        key = k[:, :, place, :, None]
        error = v[:, :, place] - (state * key).sum(-2)
        state = state + key * (rate[:, :, place] * error)[..., None, :]
        outs.append((state * q[:, :, place, :, None]).sum(-2))
    out = torch.stack(outs, 2) if outs else torch.zeros_like(v)
    return out.to(q_BHSD.dtype), state
