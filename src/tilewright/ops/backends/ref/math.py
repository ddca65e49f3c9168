"""The reference for every operation: eager torch, in FP32 (FP64 for FP64 inputs), on any device.

Slow and plain on purpose. All other candidates are tested against these, and `Kernels` falls back
to them last. Legend: N tokens, K in features, M out features, V vocabulary, B batch, H heads,
S positions, D head width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.base.labels import IGNORED, TokenLosses, check_labels, summed_and_each

MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_EPS = 1e-7
"""Least norm that a matrix is divided by before the iteration of `newton_schulz`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the reference's math computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Run a linear layer: the reference, see `ops.linear.LINEAR`."""
    high = wide(x.dtype)
    weight_MK = weight_MK.to(x.dtype)
    out = x.to(high) @ weight_MK.to(high).T
    if bias_M is not None:
        out = out + bias_M.to(x.dtype).to(high)
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise by RMS: the reference, see `ops.norm.RMS_NORM`."""
    x_high = x.to(wide(x.dtype))
    inv = torch.rsqrt(x_high.square().mean(-1, keepdim=True) + eps)
    return (x_high * inv * weight_D.to(x_high.dtype)).to(x.dtype)


def allowed_pairs(segments_BS: Tensor | None, num_positions: int, device: torch.device, window: int = 0) -> Tensor:
    """The mask of the reference's math for attention, boolean [1 or B, 1, S, S]: query row may look at key column
    (causal, same document, within the window)."""
    causal_SS = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device).tril()
    if window:
        causal_SS = causal_SS.triu(1 - window)
    if segments_BS is None:
        return causal_SS[None, None]
    same_BSS = segments_BS[:, :, None] == segments_BS[:, None, :]
    return (same_BSS & causal_SS)[:, None]


def score_scale(q_BHSD: Tensor, scale: float | None) -> float:
    """The factor of attention's scores: as given, or one over the square root of the width."""
    return q_BHSD.shape[-1] ** -0.5 if scale is None else scale


def attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    segments_BS: Tensor | None = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute attention: the reference, see `ops.attention.ATTENTION`."""
    high = wide(q_BHSD.dtype)
    group = q_BHSD.shape[1] // k_BHSD.shape[1]
    k = k_BHSD.repeat_interleave(group, dim=1).to(high)
    v = v_BHSD.repeat_interleave(group, dim=1).to(high)
    scale = score_scale(q_BHSD, scale)
    scores = (q_BHSD.to(high) @ k.mT) * scale  # [B, H, S, T]
    allowed = allowed_pairs(segments_BS, q_BHSD.shape[2], q_BHSD.device, window)
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v).to(q_BHSD.dtype)


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tile_bytes: int = 0, queue: object = None
) -> TokenLosses:
    """Compute the loss of the output matrix: the reference, see `ops.loss.LINEAR_CROSS_ENTROPY`. It has neither chunks
    nor gradients that wait: autograd computes them."""
    check_labels(labels_N, x_ND.shape[0], weight_VD.shape[0])
    high = wide(x_ND.dtype)
    logits_NV = x_ND.to(high) @ weight_VD.to(x_ND.dtype).to(high).T
    logits_NV = logits_NV.masked_fill((labels_N == IGNORED)[:, None], 0.0)  # those may be infinite
    loss, each_N = summed_and_each(logits_NV, labels_N)
    return loss, (labels_N != IGNORED).sum(), each_N


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute SwiGLU: silu(gate) * up, in FP32 inside: the reference."""
    high = wide(gate.dtype)
    return (F.silu(gate.to(high)) * up.to(high)).to(gate.dtype)


def rope(x_BSHD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Rotary positions by the reference's math, halves rotated against each other (the Llama convention), in FP32
    inside.

    cos and sin are [B or 1, S, D/2] FP32.
    """
    first, second = x_BSHD.to(wide(x_BSHD.dtype)).chunk(2, dim=-1)
    cos, sin = cos_BSD.unsqueeze(2), sin_BSD.unsqueeze(2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


def newton_schulz(x_RC: Tensor, num_steps: int = 5) -> Tensor:
    """Run Newton-Schulz iterations: the reference, see `ops.newton_schulz.NEWTON_SCHULZ`."""
    x = x_RC.to(torch.bfloat16).to(wide(x_RC.dtype))
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=MUON_EPS)
    a, b, c = MUON_COEFFICIENTS
    for _ in range(num_steps):
        gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x  # [S, S], S the shorter of R and C
        polynomial = b * gram + c * (gram @ gram)
        x = a * x + (polynomial @ x if x.shape[-2] <= x.shape[-1] else x @ polynomial)
    return x.to(torch.bfloat16)
