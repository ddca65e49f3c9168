"""A layer of the decoder that is fast for the next token of a few rows (`cached_layer` of `ops.linear`).

Legend: B rows  S positions  N rows of a pass of one token  D model width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tilewright.models.decoder.attention import CausalAttention, GroupedQueryAttention
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.cache import JoinedLayer, LayerCache
from tilewright.models.decoder.layers import MLP, RMSNorm
from tilewright.ops.backends.ref.cached_layer import AttentionWeights, LayerWeights, MLPWeights, RowPast
from tilewright.ops.base.documents import Segments
from tilewright.ops.base.transforms import is_followed
from tilewright.ops.linear import MOST_ROWS
from tilewright.precision.mixed.row_linear import RowLinear

_OPERATIONS = frozenset(("linear", "rms_norm", "attention"))
"""Of a layer; where a candidate of one was asked for, it runs."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class RowBlock(Block):
    """The decoder's layer. The next token of a few rows goes to `cached_layer`, if all parts that the layer has are
    the decoder's own and plain, and their values are read and nothing else: see `RowLinear`. Weights are read and parts
    are looked at in each call: what was written to them, put in their place or hooked on them counts."""

    cached_layer: Callable[..., Tensor]
    """Set by `few_row_layers.attach`."""
    row_dtype: torch.dtype
    """That it was chosen for."""

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        cache: LayerCache | JoinedLayer | None = None,
        give: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weights = None
        if cache is not None and not give and _is_next_token(x_BSD, cos, sin, self.row_dtype):
            weights = self._plain_weights(x_BSD)
        if weights is None or cache is None:
            return super().forward(x_BSD, cos, sin, segments, cache, give)  # type: ignore[arg-type]
        pasts = [] if weights.attention is None else self._pasts(x_BSD, weights.attention, cache)
        if any(kept.dtype != x_BSD.dtype for past in pasts for kept in past):  # filled under autocast
            return super().forward(x_BSD, cos, sin, segments, cache, give)  # type: ignore[arg-type]
        own = slice(len(pasts) or None)  # the rows behind them repeat the first
        angles = [each[own if len(each) > 1 else slice(None), 0] for each in (cos, sin)]
        eps = (self.input_layernorm if weights.attention else self.post_attention_layernorm).eps
        out_ND = self.cached_layer(x_BSD[own, 0], weights, eps, *angles, pasts)
        if missing := len(x_BSD) - len(out_ND):
            out_ND = torch.cat((out_ND, out_ND[:1].expand(missing, -1)))
        return out_ND[:, None], None, None

    def _pasts(self, x_BSD: Tensor, weights: AttentionWeights, cache: LayerCache | JoinedLayer) -> list[RowPast]:
        """Keys and values that each row of a row block sees, with room for its own."""
        attention = self.self_attn
        kept = x_BSD.new_empty(1).expand(len(x_BSD), 1, len(weights.k) // attention.head_dim, attention.head_dim)
        return [RowPast(*tensors) for tensors in cache.reserve(kept, kept, window=attention.core.window)]

    def _plain_weights(self, x: Tensor) -> LayerWeights | None:
        """Plain weights of a block that is fast for few rows; None where a part is not the decoder's own, or has
        anything that its call would do besides."""
        if _has_any_global_hook() or self.kernels.forced & _OPERATIONS:
            return None
        attention, mlp = None, None
        if self.has_attention:
            core, norm = self._part("self_attn.core"), self._part("input_layernorm")
            found = self._plain("self_attn", GroupedQueryAttention, norm, _ATTENTION, x.dtype)
            if found is None or not _is_plain(core, CausalAttention) or core.compute_dtype not in (None, x.dtype):
                return None
            attention = AttentionWeights(*found)
        if self.has_mlp:
            norm = self._part("post_attention_layernorm")
            found = self._plain("mlp", MLP, norm, _MLP, x.dtype)
            if found is None or self._part("mlp").quantizing is not None:
                return None
            if attention is not None and norm.eps != self._part("input_layernorm").eps:
                return None
            mlp = MLPWeights(*found)
        return None if attention is None and mlp is None else LayerWeights(attention, mlp)

    def _plain(
        self, name: str, kind: type[nn.Module], norm: Any, linears: Sequence[str], dtype: torch.dtype
    ) -> list[Tensor] | None:
        """Weights of a row block's norm and of the linear layers of the part behind it; None as in `_plain_weights`."""
        parts = [self._part(f"{name}.{each}") for each in linears]
        kinds = kind, RMSNorm, *[RowLinear] * len(parts)
        if not all(map(_is_plain, (self._part(name), norm, *parts), kinds)) or norm.quantizing is not None:
            return None
        if any(part._parameters["bias"] is not None for part in parts):
            return None
        weights = [module._parameters["weight"] for module in (norm, *parts)]
        return weights if all(_can_be_read(each, dtype) for each in weights) else None

    def _part(self, name: str) -> Any:
        """A part of a row block by its name, None where there is none: in a third of the time that attributes take."""
        found: Any = self
        for part in name.split("."):
            found = None if found is None else found._modules.get(part)
        return found


def _is_next_token(x_BSD: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> bool:
    return (
        all(type(each) is Tensor and each.is_cpu and not each.is_neg() for each in (x_BSD, cos, sin))
        and x_BSD.shape[1] == 1
        and 0 < len(x_BSD) <= MOST_ROWS
        and x_BSD.dtype == dtype
        and cos.dtype == torch.float32
        and not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_followed())
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain(module: Any, kind: type[nn.Module]) -> bool:
    return (
        type(module) is kind
        and not (module._forward_hooks or module._forward_pre_hooks)
        and "forward" not in module.__dict__
    )


def _can_be_read(weight: Tensor, dtype: torch.dtype) -> bool:
    return type(weight) is nn.Parameter and weight.dtype == dtype and weight.is_cpu and weight.is_contiguous()
