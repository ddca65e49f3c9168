"""A layer of the decoder that is fast for the next token of a few rows (`cached_layer` of `ops.linear`).

Legend: B rows  S positions  N rows of a pass of one token  D model width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tilewright.models.decoder.attention import CausalAttention, GroupedQueryAttention
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.cache import JoinedLayer, LayerCache
from tilewright.models.decoder.layers import MLP, RMSNorm
from tilewright.ops.backends.ref.cached_layer import LayerWeights, RowPast
from tilewright.ops.base.documents import Segments
from tilewright.ops.base.transforms import is_followed
from tilewright.ops.linear import MOST_ROWS
from tilewright.precision.mixed.row_linear import RowLinear

_OPERATIONS = frozenset(("linear", "rms_norm", "attention"))
"""Of a layer; where a candidate of one was asked for, it runs."""
_PARTS = ("self_attn", "self_attn.core", "mlp", "input_layernorm", "post_attention_layernorm")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class RowBlock(Block):
    """The decoder's layer. The next token of a few rows goes to `cached_layer`, if all parts of the layer are the
    decoder's own and plain, and their values are read and nothing else: see `RowLinear`. Weights are read and parts are
    looked at in each call: what was written to them, put in their place or hooked on them counts."""

    cached_layer: Callable[..., Tensor]
    """Set by `rows.attach`."""
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
        attention = self.self_attn
        kept = x_BSD.new_empty(1).expand(len(x_BSD), 1, len(weights.k) // attention.head_dim, attention.head_dim)
        pasts = [RowPast(*tensors) for tensors in cache.reserve(kept, kept, window=attention.core.window)]
        if any(kept.dtype != x_BSD.dtype for past in pasts for kept in past):  # filled under autocast
            return super().forward(x_BSD, cos, sin, segments, cache, give)  # type: ignore[arg-type]
        own = slice(len(pasts))  # the rows behind them repeat the first
        angles = [each[own if len(each) > 1 else slice(None), 0] for each in (cos, sin)]
        out_ND = self.cached_layer(x_BSD[own, 0], weights, self.input_layernorm.eps, *angles, pasts)
        if missing := len(x_BSD) - len(pasts):
            out_ND = torch.cat((out_ND, out_ND[:1].expand(missing, -1)))
        return out_ND[:, None], None, None

    def _plain_weights(self, x: Tensor) -> LayerWeights | None:
        """Plain weights of a block that is fast for few rows; None where a part is not the decoder's own, or has
        anything that its call would do besides."""
        attention, core, mlp, *norms = (self._part(name) for name in _PARTS)
        attending, multiplying = (
            [self._part(f"{owner}.{name}") for name in names]
            for owner, names in (("self_attn", _ATTENTION), ("mlp", _MLP))
        )
        linears = attending + multiplying
        kinds = GroupedQueryAttention, CausalAttention, MLP, RMSNorm, RMSNorm, *[RowLinear] * len(linears)
        parts = attention, core, mlp, *norms, *linears
        if not all(_is_plain(part, kind) for part, kind in zip(parts, kinds, strict=True)) or _has_any_global_hook():
            return None
        if core.compute_dtype not in (None, x.dtype) or self.kernels.forced & _OPERATIONS:
            return None
        if any(part.quantizing is not None for part in (mlp, *norms)) or norms[0].eps != norms[1].eps:
            return None
        if any(linear._parameters["bias"] is not None for linear in linears):
            return None
        having = norms[0], *attending, norms[1], *multiplying
        weights = LayerWeights(*(module._parameters["weight"] for module in having))
        return weights if all(_can_be_read(each, x.dtype) for each in weights) else None

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
