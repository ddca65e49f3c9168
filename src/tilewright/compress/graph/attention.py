"""Causal self-attention of an exported graph: keys and values of earlier tokens come in and go out as tensors.

The same sums as `models.decoder.attention`, without branches on lengths: the number of earlier positions may be 0, and
of new ones 1, in one graph. What is kept of a position is what `models.decoder.cache` keeps, heads before positions;
latent attention keeps its latent after the norm.

Legend: S new positions  T all positions so far  D head width  H query heads  K key heads  G query heads per key head
R rotary width  L latent width.
"""

import torch
from torch import Tensor, nn

from tilewright.compress.graph.graph_layers import GraphNorm, join, turn
from tilewright.models.decoder.attention import GroupedQueryAttention, LatentAttention


def attend(q_1HSD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, bias_ST: Tensor) -> Tensor:
    """Compute attention in an exported graph: softmax(q k^T / sqrt(D) + bias) v, heads joined, [1, S, H * D of the
    values]. Query heads of one key head are rows of one matmul, so keys are not repeated."""
    num_heads, num_keys, num_new = q_1HSD.shape[1], k_1KTD.shape[1], q_1HSD.shape[2]
    group = num_heads // num_keys
    q = (q_1HSD * q_1HSD.shape[-1] ** -0.5).reshape(1, num_keys, group * num_new, -1)
    scores = q @ k_1KTD.transpose(-1, -2)
    if group == 1:
        weights = (scores + bias_ST).softmax(-1)
    else:
        weights = (scores.reshape(num_keys, group, num_new, -1) + bias_ST).softmax(-1).reshape(scores.shape)
    out_1HSD = (weights @ v_1KTD).reshape(1, num_heads, num_new, -1)
    return out_1HSD.transpose(1, 2).reshape(1, num_new, -1)


class GroupedQueryGraph(nn.Module):
    """`GroupedQueryAttention`; keeps rotated keys and values, each [1, K, T, D]."""

    def __init__(self, attention: GroupedQueryAttention):
        super().__init__()
        self.head_dim = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_keys = attention.k_proj.out_features // self.head_dim
        self.qkv_proj = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj = join([attention.o_proj])
        self.kept = (("key", (self.num_keys, -1, self.head_dim)), ("value", (self.num_keys, -1, self.head_dim)))

    def forward(
        self, x_1SD: Tensor, cos: Tensor, sin: Tensor, bias_ST: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run attention in an exported graph: x [1, S, D] and the kept tensors of earlier positions -> (output of the
        same shape, kept tensors of all positions)."""
        heads = self.qkv_proj(x_1SD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_keys, self.num_keys), dim=1)
        k = torch.cat((past[0], turn(k, cos, sin)), dim=2)
        v = torch.cat((past[1], v), dim=2)
        return self.o_proj(attend(turn(q, cos, sin), k, v, bias_ST)), (k, v)


class LatentGraph(nn.Module):
    """`LatentAttention`; keeps the normed latent [1, 1, T, L] and the rotated key of all heads [1, 1, T, R]."""

    def __init__(self, attention: LatentAttention):
        super().__init__()
        self.nope_dim, self.rope_dim = attention.nope_dim, attention.rope_dim
        self.v_head_dim, self.latent_dim = attention.v_head_dim, attention.kv_lora_rank
        self.q_rank = attention.q_lora_rank
        self.in_proj = join(attention.readers())
        if self.q_rank:
            self.q_norm = GraphNorm(attention.q_a_layernorm.weight, attention.q_a_layernorm.eps)
            self.q_b_proj = join([attention.q_b_proj])
        self.kv_norm = GraphNorm(attention.kv_a_layernorm.weight, attention.kv_a_layernorm.eps)
        self.kv_b_proj = join([attention.kv_b_proj])
        self.o_proj = join([attention.o_proj])
        self.kept = (("latent", (1, -1, self.latent_dim)), ("key", (1, -1, self.rope_dim)))

    def forward(
        self, x_1SD: Tensor, cos: Tensor, sin: Tensor, bias_ST: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run latent attention in a graph with the keys and values of earlier tokens: see
        `GroupedQueryGraph.forward`."""
        joined = self.in_proj(x_1SD)
        narrow = self.latent_dim + self.rope_dim
        q_in, latent, k_rope = joined.split((joined.shape[-1] - narrow, self.latent_dim, self.rope_dim), dim=-1)
        q_joined = self.q_b_proj(self.q_norm(q_in)) if self.q_rank else q_in
        q = q_joined.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).transpose(1, 2)
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)

        latent = torch.cat((past[0], self.kv_norm(latent)[:, None]), dim=2)
        k_rope = torch.cat((past[1], turn(_halves(k_rope[:, None]), cos, sin)), dim=2)
        kv = self.kv_b_proj(latent[:, 0]).unflatten(-1, (-1, self.nope_dim + self.v_head_dim)).transpose(1, 2)
        k_nope, v = kv.split((self.nope_dim, self.v_head_dim), dim=-1)
        q = torch.cat((q_nope, turn(_halves(q_rope), cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        return self.o_proj(attend(q, k, v, bias_ST)), (latent, k_rope)


def _halves(x_1HSR: Tensor) -> Tensor:
    """Rotary pairs of attention in a graph, (2i, 2i + 1), to halves, as DeepSeek's weights need it."""
    return x_1HSR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
