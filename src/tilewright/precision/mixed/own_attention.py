"""Attention that another party's module calls as a function of torch's, by the kernel in C++ where it takes the call.

Legend: B rows  H query heads  K key heads  S positions  D width.

torch's CPU kernel takes four times as long on BF16 operands, backward above all (docs/log.md, 2026-11-27).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.base.transforms import in_func_transform


class Call(NamedTuple):
    """A call of `scaled_dot_product_attention` that the kernel takes, its operands in BF16."""

    q_BHSD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor
    mask: Tensor | None
    scale: float | None


def own_attention(kernel: str, call: Call) -> Tensor:
    """Compute a third-party call of attention by our own kernel, in BF16.

    Args:
        kernel: candidate of `ops.attention` in C++: "amx" or "avx512".
        call: made by `taken_call`.
    """
    from tilewright.ops.backends.cpu import attention  # it registers torch operators

    q_BHSD, k_BKSD, v_BKSD, mask, scale = call
    if mask is None:
        return attention.attention(kernel, q_BHSD, k_BKSD, v_BKSD, scale=scale)
    return attention.masked_attention(kernel, q_BHSD, k_BKSD, v_BKSD, mask, scale)


def taken_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call | None:
    """The operands in BF16, mask and scale of an attention call that our kernel takes: in BF16, by itself or by
    autocast, on the CPU, causal or with a boolean mask, without dropout. None for any other call. Arguments have
    torch's names."""
    operands = query, key, value
    if in_func_transform() or dropout_p or is_causal == (attn_mask is not None):
        return None
    if any(x.device.type != "cpu" or x.dim() != 4 or _dtype_of(x) != torch.bfloat16 for x in operands):
        return None
    rows, heads, length, width = query.shape
    keys = key.shape[1]
    fits = key.shape == (rows, keys, length, width) and value.shape[:3] == key.shape[:3] and value.shape[3] <= width
    if not fits or (heads % keys if enable_gqa else heads != keys):
        return None
    if attn_mask is not None:
        of_all = attn_mask.dim() == 4 and attn_mask.shape[0] in (1, rows) and attn_mask.shape[1] in (1, heads)
        if attn_mask.dtype != torch.bool or not of_all or attn_mask.shape[2:] != (length, length):
            return None
    low = torch.bfloat16
    return Call(query.to(low), key.to(low), value.to(low), attn_mask, scale)


def _dtype_of(x: Tensor) -> torch.dtype:
    """The dtype in which attention computes: autocast's, if it is on."""
    if x.dtype in (torch.float32, torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return x.dtype
