"""cached_layer in plain torch, and the tensors of a layer and of a row's cache that each candidate takes.

Legend: N rows  D model width  H query heads  K key heads  d their width  F hidden width  T positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.backends.ref import math as ref


class LayerWeights(NamedTuple):
    """Weights of one layer, all in one dtype."""

    attention_norm_D: Tensor
    q: Tensor
    """[H * d, D]."""
    k: Tensor
    """[K * d, D], and so `v`."""
    v: Tensor
    o: Tensor
    """[D, H * d]."""
    mlp_norm_D: Tensor
    gate_FD: Tensor
    up_FD: Tensor
    down_DF: Tensor


class RowPast(NamedTuple):
    """Keys and values of the positions that a row sees, the new one last: its place is written."""

    keys_TKd: Tensor
    values_TKd: Tensor


def cached_layer(
    x_ND: Tensor, weights: LayerWeights, eps: float, cos_NR: Tensor, sin_NR: Tensor, pasts: Sequence[RowPast]
) -> Tensor:
    """A cached layer by the reference: a whole one for the next token of a few rows: see `ops.linear`."""
    normed_ND = ref.rms_norm(x_ND, weights.attention_norm_D, eps)
    width = pasts[0].keys_TKd.shape[-1]
    q, k, v = (ref.linear(normed_ND, each).unflatten(-1, (-1, width)) for each in (weights.q, weights.k, weights.v))
    q, k = (ref.rope(each[:, None], cos_NR[:, None], sin_NR[:, None])[:, 0] for each in (q, k))
    heads = []
    for q_Hd, k_Kd, v_Kd, past in zip(q, k, v, pasts, strict=True):
        past.keys_TKd[-1], past.values_TKd[-1] = k_Kd, v_Kd
        heads.append(_attention(q_Hd, *past).flatten())
    x_ND = (x_ND + ref.linear(torch.stack(heads), weights.o)).to(x_ND.dtype)
    normed_ND = ref.rms_norm(x_ND, weights.mlp_norm_D, eps)
    hidden_NF = ref.swiglu(ref.linear(normed_ND, weights.gate_FD), ref.linear(normed_ND, weights.up_FD))
    return (x_ND + ref.linear(hidden_NF, weights.down_DF)).to(x_ND.dtype)


def _attention(q_Hd: Tensor, keys_TKd: Tensor, values_TKd: Tensor) -> Tensor:
    high, group = ref.wide(q_Hd.dtype), q_Hd.shape[0] // keys_TKd.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1).to(high) for each in (keys_TKd, values_TKd))
    scores_HT = torch.einsum("hd,thd->ht", q_Hd.to(high), keys) * ref.score_scale(q_Hd, None)
    return torch.einsum("ht,thd->hd", scores_HT.softmax(-1), values).to(q_Hd.dtype)
