"""One layer of the decoder, and what it keeps for backward.

Training, recomputation, compiled layers and the cache all call `Block._run`.

Legend: B rows  S positions  D model width  E experts.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.core.config.recipe import ActivationCheckpoint, CheckpointInputs
from tilewright.models.base.checkpointing import checkpoint_fp8_input, run_checkpointed
from tilewright.models.decoder.attention import GatedDeltaAttention, GroupedQueryAttention, LatentAttention
from tilewright.models.decoder.cache import LayerCache
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.layers import MLP, RMSNorm
from tilewright.models.decoder.moe import MoE, SameChoices
from tilewright.ops.base.compile import graph_limit, layer_options
from tilewright.ops.base.documents import Segments
from tilewright.ops.kernels import Kernels

_ATTENTION = {"gqa": GroupedQueryAttention, "mla": LatentAttention, "linear": GatedDeltaAttention}


class Block(nn.Module):
    """One layer of the decoder: x + attention(norm(x)), then x + mlp(norm(x)). One of them may be missing, with its
    norm.

    Args:
        config: the shape of this layer, see `DecoderConfig.at`.
        layer: its number.
        kernels: implementations of the operations.
    """

    def __init__(self, config: DecoderConfig, layer: int, kernels: Kernels):
        super().__init__()
        self.is_moe = config.is_moe(layer)
        self.has_attention, self.has_mlp = config.num_heads > 0, config.ffn_dim > 0
        if self.has_attention:
            self.input_layernorm = RMSNorm(config.dim, config.norm_eps, kernels)
            self.self_attn = _ATTENTION[config.attention](config, kernels)
        if self.has_mlp:
            self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps, kernels)
            self.mlp = MoE(config, kernels) if self.is_moe else MLP(config.dim, config.ffn_dim, kernels)
        self.kernels = kernels
        self.activation_checkpoint: ActivationCheckpoint = "none"
        self.checkpoint_inputs: CheckpointInputs = "exact"
        self.compiled_inside = False
        """Compiled without the keeping of its input, which is outside then."""

    @property
    def can_give(self) -> bool:
        """False if a block's computation is an architecture's own that does not say what attention gives out."""
        return "give" in inspect.signature(self._run).parameters

    @property
    def keeps_qdata(self) -> bool:
        """True if backward recomputes this block from its input in 8 bits. Not a mixture of experts: rounded rows could
        be sent to other experts than in the forward pass."""
        return self.activation_checkpoint == "full" and self.checkpoint_inputs == "fp8" and not self.is_moe

    @property
    def attention_block(self) -> int:
        """Query rows at a time in a block's attention, 0 for all, or where there is none. Settable."""
        own = self.self_attn.core.block if self.has_attention else 0
        return self.kernels.attention_block if own is None else own

    @attention_block.setter
    def attention_block(self, rows: int) -> None:
        if self.has_attention:
            self.self_attn.core.block = rows

    def quantized_readers(self) -> Iterator[tuple[nn.Module, str, list[nn.Linear]]]:
        """Quantised readers of a block as (module, "norm" or "swiglu", layers): these linear layers, and nothing else,
        read what the module makes.

        So `precision.convert` may let it hand them a value `WithCopies` in 8 bits.
        """
        if self.has_attention:
            yield self.input_layernorm, "norm", self.self_attn.readers()
        if self.has_mlp and not self.is_moe:
            yield self.post_attention_layernorm, "norm", cast(MLP, self.mlp).readers()

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        cache: LayerCache | None = None,
        give: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run a block: x [B, S, D] -> (x [B, S, D] in the same dtype, load [E] of the experts or None, output of
        attention [B, S, D] if `give` wants it, else None). With a cache x are the next positions, and nothing is kept
        for backward."""
        if cache is not None:
            return _three(self._run(x_BSD, cos, sin, segments, cache))
        run = functools.partial(_compiled_run(), self) if self.compiled_inside else self._run
        if self.is_moe and cast(MoE, self.mlp).exchange is not None:  # ranks exchange the same rows again
            run = SameChoices(cast(MoE, self.mlp).gate, run)
        inputs = (x_BSD, cos, sin, segments, *((None, give) if give else ()))
        if self.keeps_qdata:
            return _three(checkpoint_fp8_input(self.kernels, run, *inputs))
        return _three(run_checkpointed(self.activation_checkpoint, run, *inputs))

    def _run(
        self,
        x_BSD: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        cache: LayerCache | None = None,
        give: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        given = None
        if self.has_attention:
            attended = self.self_attn(self.input_layernorm(x_BSD), cos, sin, segments, cache)
            x_BSD = (x_BSD + attended).to(x_BSD.dtype)  # the sum rounds once, and the stream keeps its dtype
            given = attended if give else None
        if not self.has_mlp:
            return x_BSD, None, given
        normed = self.post_attention_layernorm(x_BSD)
        out, load = self.mlp(normed, segments) if self.is_moe else (self.mlp(normed), None)
        return (x_BSD + out).to(x_BSD.dtype), load, given


def _three(found: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Three results of a block's `_run`; that of an architecture of one's own may return (x, load) alone, and take no
    `give`."""
    x_BSD, load_E, *given = found
    return x_BSD, load_E, given[0] if given else None


@functools.cache
def _compiled_run() -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """A block's `_run`, compiled; layers of one kind share the graph."""
    return torch.compile(Block._run, options=layer_options(), **graph_limit())
