"""Parts that each way to attention here is made of: heads that share keys, values as wide as keys, masks of blocks of
rows.

Legend: B batch  H query heads  K key heads  S positions  R rows of a block  E keys that they may see  D width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

QUERY_BLOCK = 256
_NARROW_BLOCK = 64


def padded_values(q_BHSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """Pad values with zeros to the width of queries and keys, for attention kernels that need it."""
    pad = q_BHSD.shape[-1] - v_BKSD.shape[-1]
    if pad < 0:
        raise AssertionError("values wider than keys are not used by any model here")
    return F.pad(v_BKSD, (0, pad)) if pad else v_BKSD


def expand(x_BKSD: Tensor, group: int) -> Tensor:
    """Expand key heads for attention, each so many times: [B, H, S, D]."""
    return x_BKSD if group == 1 else x_BKSD.repeat_interleave(group, dim=1)


def added_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask for attention that is added to the scores."""
    return torch.zeros((), dtype=dtype, device=allowed.device).masked_fill(~allowed, float("-inf"))


def first_key(position: int, window: int) -> int:
    """The first key that a position may see in attention.

    Example:
        >>> first_key(9, window=0), first_key(9, window=4), first_key(2, window=4)
        (0, 6, 0)
    """
    return max(0, position - window + 1) if window else 0


def first_keys(segments_BS: Tensor | None, num_positions: int, window: int = 0) -> Tensor | None:
    """The first keys for attention that each position may see, [1 or B, S] int32, never falling; None: the first of
    all.

    Example:
        >>> first_keys(torch.tensor([[4, 4, 4, 7, 7]]), 5, window=2)
        tensor([[0, 0, 1, 3, 3]], dtype=torch.int32)
    """
    if segments_BS is None and not window:
        return None
    position_1S = torch.arange(num_positions, dtype=torch.int32)[None]
    found = torch.zeros_like(position_1S)
    if segments_BS is not None:
        begins_BS = torch.ones_like(segments_BS, dtype=torch.bool)
        begins_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
        found = torch.where(begins_BS, position_1S, 0).cummax(1).values
    return torch.maximum(found, position_1S - window + 1) if window else found


def allowed_block(segments_BS: Tensor | None, start: int, end: int, device: torch.device, window: int = 0) -> Tensor:
    """A block of attention's mask: rows start..end of `allowed_pairs`, columns from the first key that one of them may
    see: [1 or B, 1, R, E]."""
    first = first_key(start, window)
    row_R1, key_E = torch.arange(start, end, device=device)[:, None], torch.arange(first, end, device=device)
    allowed_RE = row_R1 >= key_E
    if window:
        allowed_RE &= row_R1 - window < key_E
    if segments_BS is None:
        return allowed_RE[None, None]
    same_BRE = segments_BS[:, start:end, None] == segments_BS[:, None, first:end]
    return (same_BRE & allowed_RE)[:, None]


def block_rows(block: int, window: int) -> int:
    """Choose the query rows of a block of attention: as asked for, or so many that a block of a narrow window reads few
    keys which its last row does not see."""
    return block or (min(QUERY_BLOCK, max(_NARROW_BLOCK, window)) if window else QUERY_BLOCK)


def query_blocks(
    length: int, segments_BS: Tensor | None, block: int, window: int, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Yield blocks of queries for attention on CPUs: query rows, the keys that they may see, whether the kernel masks
    the future, and else the mask to add.

    One block with the kernel's own mask where nothing else is asked for.
    """
    if segments_BS is None and not block and (not window or window >= length):
        if length:
            yield slice(0, length), slice(0, length), True, None
        return
    step, device = block_rows(block, window), torch.device("cpu")
    for start in range(0, length, step):
        end = min(start + step, length)
        allowed = allowed_block(segments_BS, start, end, device, window)
        yield slice(start, end), slice(first_key(start, window), end), False, added_mask(allowed, dtype)
