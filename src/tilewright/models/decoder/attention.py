"""Causal self-attention of the decoder: grouped-query (GQA), multi-head latent (MLA) and linear.

The first two project, rotate and call `kernels.attention`, which masks the future and other documents (`segments`).
Heads stay in [B, S, H, D] memory order and are handed over as transposed views, so nothing is copied here.
Parameter names are those of Hugging Face's Llama and DeepSeek-V3.

Legend: B rows  S positions  D model width or head width  H heads  R rotary width.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tilewright.models.decoder.cache import JoinedLayer, LayerCache
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.layers import RMSNorm
from tilewright.ops.base.documents import Segments
from tilewright.ops.kernels import Kernels

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms on MLA's compressed vectors; DeepSeek-V3's code fixes it apart from the model's own."""


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(Dk)) v without parameters: the part of a layer whose precision is a rule of its own.

    `compute_dtype` (settable, None = the query's dtype) is what the scores and the matmul are computed from;
    the result has the query's dtype in either case. `block` (settable, None = as the kernels say) is how many query
    rows are computed at a time. `window`: see `ops.attention`.
    """

    def __init__(self, kernels: Kernels, window: int = 0):
        super().__init__()
        self.window = window
        self.compute_dtype: torch.dtype | None = None
        self.block: int | None = None
        self.kernels = kernels

    def forward(self, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, segments: Segments) -> Tensor:
        """Compute the decoder's causal attention: heads [B, S, H or Hkv, D] -> joined heads [B, S, H * Dv]. Keys and
        values may have more positions than queries, which are then the last ones."""
        dtype = self.compute_dtype or q_BSHD.dtype
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (q_BSHD, k_BSHD, v_BSHD))
        if k.shape[2] > q.shape[2]:
            out_BHSD = self.kernels.attention_to_past(q, k, v, window=self.window)
        else:
            out_BHSD = self.kernels.attention(q, k, v, segments=segments, block=self.block, window=self.window)
        return out_BHSD.transpose(1, 2).flatten(2).to(q_BSHD.dtype)


class GroupedQueryAttention(nn.Module):
    """Attention in which `num_heads / num_kv_heads` query heads share a key and value head.

    See: Ainslie et al., "GQA", 2023. Rotary pairs are (i, i + D/2), as in Llama.
    """

    def __init__(self, config: DecoderConfig, kernels: Kernels):
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, q_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.core = CausalAttention(kernels, config.sliding_window)
        self.o_proj = nn.Linear(q_dim, config.dim, bias=False)
        self.kernels = kernels

    def readers(self) -> list[nn.Linear]:
        """The layers that read the input of grouped-query attention."""
        return [self.q_proj, self.k_proj, self.v_proj]

    def forward(
        self,
        x_BSD: Tensor,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
        segments: Segments,
        cache: LayerCache | JoinedLayer | None = None,
    ) -> Tensor:
        """Run grouped-query attention: x [B, S, D], cos and sin [B or 1, S, R/2] FP32 -> [B, S, D]. With a cache x are
        the next positions."""
        heads = (-1, self.head_dim)
        q_BSHD, k_BSHD, v_BSHD = (project(x_BSD).unflatten(-1, heads) for project in self.readers())
        if cache is None:
            q_BSHD = self.kernels.rope(q_BSHD, cos_BSR, sin_BSR)
            k_BSHD = self.kernels.rope(k_BSHD, cos_BSR, sin_BSR)
        else:  # of one token, calls take the time: all heads in one
            both_BSHD = self.kernels.rope(torch.cat((q_BSHD, k_BSHD), dim=2), cos_BSR, sin_BSR)
            q_BSHD, k_BSHD = both_BSHD.split((q_BSHD.shape[2], k_BSHD.shape[2]), dim=2)
        if cache is None:
            return self.o_proj(self.core(q_BSHD, k_BSHD, v_BSHD, segments))
        attend = functools.partial(self.core, segments=segments)
        return self.o_proj(cache.attend(attend, q_BSHD, k_BSHD, v_BSHD, window=self.core.window))


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA): keys and values are expanded from one narrow vector per token.

    A query or key head is [content | position]: the content part comes from the latent, the rotary part of the key is
    one vector shared by all heads. Queries go through a rank of their own where `q_lora_rank` is not 0.
    Rotary pairs are interleaved, (2i, 2i + 1), as in DeepSeek's weights.

    See: DeepSeek-V3 report, section 2.1.1, equations 1-11.
    """

    def __init__(self, config: DecoderConfig, kernels: Kernels):
        super().__init__()
        self.qk_head_dim, self.v_head_dim = config.qk_head_dim, config.v_head_dim
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.kv_lora_rank, self.q_lora_rank = config.kv_lora_rank, config.q_lora_rank
        q_dim = config.num_heads * self.qk_head_dim
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, kernels)
            self.q_b_proj = nn.Linear(config.q_lora_rank, q_dim, bias=False)
        else:
            self.q_proj = nn.Linear(config.dim, q_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.dim, config.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS, kernels)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, config.num_heads * (self.nope_dim + self.v_head_dim), bias=False
        )
        self.core = CausalAttention(kernels, config.sliding_window)
        self.o_proj = nn.Linear(config.num_heads * self.v_head_dim, config.dim, bias=False)
        self.kernels = kernels
        self.shared_by_heads: Callable[[Tensor], Tensor] | None = None
        """What the rotary key goes through before heads read it: ranks may have other heads (`parallel.inside`)."""

    def readers(self) -> list[nn.Linear]:
        """The layers that read the input of latent attention."""
        return [self.q_a_proj if self.q_lora_rank else self.q_proj, self.kv_a_proj_with_mqa]

    def quantized_readers(self) -> Iterator[tuple[nn.Module, str, list[nn.Linear]]]:
        """The linear layers of latent attention that read what a norm makes: see `block.Block.quantized_readers`."""
        yield self.kv_a_layernorm, "norm", [self.kv_b_proj]
        if self.q_lora_rank:
            yield self.q_a_layernorm, "norm", [self.q_b_proj]

    def forward(
        self,
        x_BSD: Tensor,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
        segments: Segments,
        cache: LayerCache | JoinedLayer | None = None,
    ) -> Tensor:
        """Run latent attention (MLA): x [B, S, D], cos and sin [B or 1, S, R/2] FP32 -> [B, S, D]. With a cache x are
        the next positions."""
        q_joined = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD))) if self.q_lora_rank else self.q_proj(x_BSD)
        q_nope, q_rope = q_joined.unflatten(-1, (-1, self.qk_head_dim)).split((self.nope_dim, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BSD).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        k_rope = self._rotate_pairs(k_rope.unsqueeze(2), cos_BSR, sin_BSR)
        q_BSHD = torch.cat((q_nope, self._rotate_pairs(q_rope, cos_BSR, sin_BSR)), dim=-1)
        if cache is None:
            return self.o_proj(self._attend(q_BSHD, latent, k_rope, segments))
        attend = functools.partial(self._attend, segments=segments)
        return self.o_proj(cache.attend(attend, q_BSHD, latent, k_rope, window=self.core.window))

    def _attend(self, q_BSHD: Tensor, latent: Tensor, k_rope: Tensor, segments: Segments) -> Tensor:
        """Latent attention's queries against keys and values that are expanded from the latent."""
        kv_BSHD = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, self.nope_dim + self.v_head_dim))
        k_nope, v_BSHD = kv_BSHD.split((self.nope_dim, self.v_head_dim), dim=-1)
        k_rope = k_rope if self.shared_by_heads is None else self.shared_by_heads(k_rope)
        k_BSHD = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        return self.core(q_BSHD, k_BSHD, v_BSHD, segments)

    def _rotate_pairs(self, x_BSHR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
        """Rotate pairs in latent attention: reorder them to halves, which are rotated. Queries and keys are permuted
        alike, so scores are the same."""
        halves = x_BSHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self.kernels.rope(halves, cos_BSR, sin_BSR)


class LinearAttention(nn.Module):
    """Linear attention by the gated delta rule, without parameters: a part of the layer with a precision rule of its
    own. Its settings are those of `CausalAttention`; see `ops.attention`. It works by chunks: `block` changes
    nothing."""

    def __init__(self, kernels: Kernels):
        super().__init__()
        self.compute_dtype: torch.dtype | None = None
        self.block: int | None = None
        self.kernels = kernels

    def forward(
        self, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, decay_BSH: Tensor, rate_BSH: Tensor, segments: Segments
    ) -> Tensor:
        """Run linear attention: heads [B, S, H, D] and their gates -> heads [B, S, H, D]."""
        inputs = self._inputs(q_BSHD, k_BSHD, v_BSHD, decay_BSH, rate_BSH)
        return self.kernels.linear_attention(*inputs, segments=segments).transpose(1, 2).to(q_BSHD.dtype)

    def from_state(self, state: Tensor | None, q_BSHD: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Continue linear attention from the state of earlier positions: heads of the next positions, and the state
        after them."""
        out_BHSD, state = self.kernels.linear_attention_from(state, *self._inputs(q_BSHD, *rest))
        return out_BHSD.transpose(1, 2).to(q_BSHD.dtype), state

    def _inputs(self, q_BSHD: Tensor, *rest: Tensor) -> list[Tensor]:
        dtype = self.compute_dtype or q_BSHD.dtype
        return [x.to(dtype).transpose(1, 2) for x in (q_BSHD, *rest)]


class GatedDeltaAttention(nn.Module):
    """A layer of linear attention: each head writes its values to a matrix, and forgets, at rates that each token sets.

    Its output is normed head by head and gated. It has no positions of its own: their order is that of the writes.
    Parameter names are those of flash-linear-attention's Gated DeltaNet.

    See: Yang et al., "Gated Delta Networks", 2024; here without a convolution over neighbouring tokens.
    """

    def __init__(self, config: DecoderConfig, kernels: Kernels):
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (
            nn.Linear(config.dim, width, bias=False) for _ in range(4)
        )
        self.a_proj, self.b_proj = (nn.Linear(config.dim, config.num_heads, bias=False) for _ in range(2))
        self.core = LinearAttention(kernels)
        self.o_norm = RMSNorm(config.head_dim, config.norm_eps, kernels)
        self.o_proj = nn.Linear(width, config.dim, bias=False)
        self.kernels = kernels

    def readers(self) -> list[nn.Linear]:
        """The layers that read the input of gated delta attention."""
        return [self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj]

    def forward(
        self,
        x_BSD: Tensor,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
        segments: Segments,
        cache: LayerCache | JoinedLayer | None = None,
    ) -> Tensor:
        """Run linear attention with its projections: x [B, S, D] -> [B, S, D]; angles are not read. With a cache x are
        the next positions."""
        heads = (-1, self.head_dim)
        inputs = [project(x_BSD).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj)]
        inputs += [self.a_proj(x_BSD), self.b_proj(x_BSD)]
        out_BSHD = self.core(*inputs, segments) if cache is None else cache.recur(self.core.from_state, *inputs)
        return self.o_proj(self.kernels.swiglu(self.g_proj(x_BSD), self.o_norm(out_BSHD).flatten(2)))
