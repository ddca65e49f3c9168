"""Our decoder as a graph: token ids and what is kept of earlier tokens in, logits and what is kept of all tokens out.

One graph serves a prompt (nothing kept yet) and each token after it. All its linear layers are plain `nn.Linear`,
layers of one input joined, so that quantisers find them; the head is one of them, with the embedding's values where
both are tied.

Legend: S new positions  T all positions so far  D model width  V vocabulary.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.compress.graph.attention import GroupedQueryGraph, LatentGraph
from tilewright.compress.graph.graph_layers import GraphNorm, Rotary, causal_bias, join
from tilewright.compress.graph.mlp import GraphExperts, GraphMLP
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.layers import MLP
from tilewright.models.decoder.moe import MoE


class GraphBlock(nn.Module):
    """`models.decoder.block.Block`."""

    def __init__(self, block: Block, latent: bool):
        super().__init__()
        self.has_attention, self.has_mlp = block.has_attention, block.has_mlp
        self.kept: tuple[tuple[str, tuple[int, int, int]], ...] = ()
        if block.has_attention:
            self.attention_norm = GraphNorm(block.input_layernorm.weight, block.input_layernorm.eps)
            self.attention = LatentGraph(block.self_attn) if latent else GroupedQueryGraph(block.self_attn)
            self.kept = self.attention.kept
        if block.has_mlp:
            self.mlp_norm = GraphNorm(block.post_attention_layernorm.weight, block.post_attention_layernorm.eps)
            self.mlp = GraphExperts(cast(MoE, block.mlp)) if block.is_moe else GraphMLP(cast(MLP, block.mlp))

    def forward(
        self, x_1SD: Tensor, cos: Tensor, sin: Tensor, bias_ST: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run a block of the decoder's graph with the keys and values of earlier tokens: see
        `attention.GroupedQueryGraph.forward`."""
        kept: tuple[Tensor, ...] = ()
        if self.has_attention:
            attended, kept = self.attention(self.attention_norm(x_1SD), cos, sin, bias_ST, past)
            x_1SD = x_1SD + attended
        return (x_1SD + self.mlp(self.mlp_norm(x_1SD)) if self.has_mlp else x_1SD), kept


class DecoderGraph(nn.Module):
    """A `Decoder` in FP32 on the CPU, for one row.

    Args:
        decoder: with plain layers (no adapters, no quantised layers). Its weights are read, not kept.
        block: makes the graph's layer from the decoder's, and whether attention is latent.

    Example:
        >>> from tilewright.models.build import init_weights
        >>> from tilewright.models.decoder.config import DecoderConfig
        >>> model = Decoder(DecoderConfig.of(vocab_size=50, dim=32, num_heads=4, num_layers=1))
        >>> init_weights(model, seed=0)
        >>> graph = DecoderGraph(model)
        >>> empty = [torch.zeros(1, heads, 0, width) for _, (heads, _, width) in graph.kept]
        >>> logits, key, value = graph(torch.arange(6)[None], *empty)
        >>> logits.shape, key.shape
        (torch.Size([1, 6, 50]), torch.Size([1, 4, 6, 8]))
    """

    def __init__(self, decoder: Decoder, block: Callable[..., Any] = GraphBlock):
        super().__init__()
        config = decoder.config
        latent = config.attention == "mla"
        self.embed = nn.Embedding.from_pretrained(decoder.model.embed_tokens.weight.detach().float())
        self.rotary = Rotary(config.rope_dim, config.rope_theta)
        blocks = [block(layer, latent) for layer in decoder.blocks]
        self.blocks = nn.ModuleList(blocks)
        self.windows = tuple(shape.sliding_window for shape in config.shapes)
        """Positions that each layer's attention sees at most, see `DecoderConfig.sliding_window`."""
        self.norm = GraphNorm(decoder.model.norm.weight, decoder.model.norm.eps)
        self.head = join([decoder.lm_head])
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.kept = tuple((f"{name}.{layer}", shape) for layer, part in enumerate(blocks) for name, shape in part.kept)
        """Name and shape (heads, positions as -1, width) of each tensor that is kept, in order."""
        self.num_kept = tuple(len(part.kept) for part in blocks)
        """Of each layer."""

    def forward(self, ids_1S: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Run a decoder as a graph: ids [1, S] int64 and the kept tensors [1, heads, T - S, width] -> logits [1, S, V]
        and the kept tensors [1, heads, T, width]."""
        query_S = torch.arange(past[0].shape[2], past[0].shape[2] + ids_1S.shape[1])
        key_T = torch.arange(past[0].shape[2] + ids_1S.shape[1])
        biases = {window: causal_bias(query_S, key_T, window) for window in dict.fromkeys(self.windows)}
        cos, sin = self.rotary(query_S)
        x_1SD = self.embed(ids_1S)
        kept: list[Tensor] = []
        for block, window, number in zip(self.blocks, self.windows, self.num_kept, strict=True):
            before = past[len(kept) : len(kept) + number]
            x_1SD, more = block(x_1SD, cos, sin, biases[window], before)
            kept += more
        return (self.head(self.norm(x_1SD)), *kept)
