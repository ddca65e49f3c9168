"""cached_layer in plain torch, and the tensors of a layer and of a row's cache that each candidate takes.

Legend: N rows  D model width  H query heads  K key heads  d their width  F hidden width  T positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.backends.ref import math as ref


class AttentionWeights(NamedTuple):
    """Weights of the attention of one layer, and of the norm before it, all in one dtype."""

    norm_D: Tensor
    q: Tensor
    """[H * d, D]."""
    k: Tensor
    """[K * d, D], and so `v`."""
    v: Tensor
    o: Tensor
    """[D, H * d]."""


class MLPWeights(NamedTuple):
    """Weights of the MLP of one layer, and of the norm before it, all in one dtype."""

    norm_D: Tensor
    gate_FD: Tensor
    up_FD: Tensor
    down_DF: Tensor


class LayerWeights(NamedTuple):
    """Weights of one layer, all in one dtype; at least one of both."""

    attention: AttentionWeights | None
    mlp: MLPWeights | None

    @property
    def tensors(self) -> list[Tensor]:
        """All weights of the layer."""
        return [*(self.attention or ()), *(self.mlp or ())]


class RowPast(NamedTuple):
    """Keys and values of the positions that a row sees, the new one last: its place is written."""

    keys_TKd: Tensor
    values_TKd: Tensor


def cached_layer(
    x_ND: Tensor, weights: LayerWeights, eps: float, cos_NR: Tensor, sin_NR: Tensor, pasts: Sequence[RowPast]
) -> Tensor:
    """Run a whole layer for the next token of a few rows: the reference, see `ops.linear`."""
    if weights.attention is not None:
        x_ND = (x_ND + _attended(x_ND, weights.attention, eps, cos_NR, sin_NR, pasts)).to(x_ND.dtype)
    if weights.mlp is not None:
        _, gate_FD, up_FD, down_DF = weights.mlp
        normed_ND = ref.rms_norm(x_ND, weights.mlp.norm_D, eps)
        hidden_NF = ref.swiglu(ref.linear(normed_ND, gate_FD), ref.linear(normed_ND, up_FD))
        x_ND = (x_ND + ref.linear(hidden_NF, down_DF)).to(x_ND.dtype)
    return x_ND


def _attended(
    x_ND: Tensor,
    weights: AttentionWeights,
    eps: float,
    cos_NR: Tensor,
    sin_NR: Tensor,
    pasts: Sequence[RowPast],
) -> Tensor:
    normed_ND = ref.rms_norm(x_ND, weights.norm_D, eps)
    width = pasts[0].keys_TKd.shape[-1]
    q, k, v = (ref.linear(normed_ND, each).unflatten(-1, (-1, width)) for each in weights[1:4])
    q, k = (ref.rope(each[:, None], cos_NR[:, None], sin_NR[:, None])[:, 0] for each in (q, k))
    heads = []
    for q_Hd, k_Kd, v_Kd, past in zip(q, k, v, pasts, strict=True):
        past.keys_TKd[-1], past.values_TKd[-1] = k_Kd, v_Kd
        heads.append(_attention(q_Hd, *past).flatten())
    return ref.linear(torch.stack(heads), weights.o)


def _attention(q_Hd: Tensor, keys_TKd: Tensor, values_TKd: Tensor) -> Tensor:
    high, group = ref.wide(q_Hd.dtype), q_Hd.shape[0] // keys_TKd.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1).to(high) for each in (keys_TKd, values_TKd))
    scores_HT = torch.einsum("hd,thd->ht", q_Hd.to(high), keys) * ref.score_scale(q_Hd, None)
    return torch.einsum("ht,thd->hd", scores_HT.softmax(-1), values).to(q_Hd.dtype)
