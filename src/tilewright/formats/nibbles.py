"""Two signed 4-bit integers per byte.

Element 2i of a row is in the low four bits of byte i, element 2i + 1 in the high four, each in two's complement: the
layout of ONNX's INT4. A row of odd length ends with a high half of zero, so every row begins at a byte.

Legend: M rows  K columns  B bytes per row, ceil(K / 2).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_nibbles(codes_MK: Tensor) -> Tensor:
    """Pack int8 codes from -8 to 7 as nibbles, two per byte: uint8 [M, B].

    Raises:
        ValueError: a code that needs more than four bits.

    Example:
        >>> pack_nibbles(torch.tensor([[1, -1, 7]], dtype=torch.int8)).tolist()  # 0xF1, 0x07
        [[241, 7]]
    """
    if codes_MK.numel() and bool(((codes_MK < -8) | (codes_MK > 7)).any()):
        raise ValueError("codes outside of -8..7 do not fit into four bits")
    pairs = F.pad(codes_MK, (0, codes_MK.shape[1] % 2)).view(torch.uint8) & 0xF
    return pairs[:, ::2] | (pairs[:, 1::2] << 4)


def unpack_nibbles(stored_MB: Tensor, cols: int) -> Tensor:
    """Unpack nibbles to int8 codes [M, cols], from bytes that `pack_nibbles` made.

    Raises:
        ValueError: rows of another length.

    Example:
        >>> unpack_nibbles(torch.tensor([[241, 7]], dtype=torch.uint8), 3).tolist()
        [[1, -1, 7]]
    """
    if stored_MB.shape[1] != -(-cols // 2):
        raise ValueError(f"{cols} codes per row take {-(-cols // 2)} bytes, not {stored_MB.shape[1]}")
    halves = torch.stack([stored_MB & 0xF, stored_MB >> 4], dim=2).view(torch.int8)
    codes = torch.where(halves > 7, halves - 16, halves)
    return codes.reshape(stored_MB.shape[0], 2 * stored_MB.shape[1])[:, :cols].contiguous()
