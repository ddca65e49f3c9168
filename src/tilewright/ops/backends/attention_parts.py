"""What each way to attention here is made of: heads that share keys, values as wide as keys, masks of blocks of rows.

Legend: B batch  H query heads  K key heads  S positions  R rows of a block  E keys up to its last row  D width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

QUERY_BLOCK = 256


def padded_values(q_BHSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """Values as wide as queries and keys, zeros behind them."""
    pad = q_BHSD.shape[-1] - v_BKSD.shape[-1]
    if pad < 0:
        raise AssertionError("values wider than keys are not used by any model here")
    return F.pad(v_BKSD, (0, pad)) if pad else v_BKSD


def expand(x_BKSD: Tensor, group: int) -> Tensor:
    """[B, H, S, D]: each key head so many times."""
    return x_BKSD if group == 1 else x_BKSD.repeat_interleave(group, dim=1)


def added_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to the scores."""
    return torch.zeros((), dtype=dtype, device=allowed.device).masked_fill(~allowed, float("-inf"))


def allowed_block(segments_BS: Tensor | None, start: int, end: int, device: torch.device) -> Tensor:
    """Rows start..end of `allowed_pairs`, columns 0..end: [1 or B, 1, R, E]."""
    allowed_RE = torch.arange(start, end, device=device)[:, None] >= torch.arange(end, device=device)
    if segments_BS is None:
        return allowed_RE[None, None]
    same_BRE = segments_BS[:, start:end, None] == segments_BS[:, None, :end]
    return (same_BRE & allowed_RE)[:, None]
