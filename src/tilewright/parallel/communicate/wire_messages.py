"""Messages between ranks, as bytes: FP32 values in a wire format, and their sum where they arrive.

| wire | bytes per value | what is lost |
|---|---|---|
| `fp32` | 4 | nothing |
| `bf16` | 2 | rounded to 8 bits of mantissa |
| `fp8` | 1 + 1/128 | rounded to E4M3, under a power-of-two scale per 128 values |

A row is what one rank gets: its codes, then the exponents of its scales (E8M0), one per tile of 128 values. Codes are
those of `formats` and `ops.quantize`. Sums are FP32, in the order of the ranks, so that all who add the same rows have
the same bits. A value that is infinite or NaN arrives as NaN in `fp8`, as itself in the others; it spoils no neighbour.

Legend: R rows, one per rank  N values  T tiles of 128  B bytes of a row.
"""

from functools import lru_cache

import torch
from torch import Tensor

from tilewright.core.config.sections.parallel import WireName
from tilewright.formats.encode import E8M0_BIAS, decode, decode_e8m0
from tilewright.formats.spec import E4M3, FP32_MANTISSA_BITS
from tilewright.formats.tiled import FP8_ROW
from tilewright.ops.kernels import Kernels

TILE = FP8_ROW.tile.cols
"""Values that share a scale. What begins at a multiple of it shares none with what is before."""


def row_bytes(values: int, wire: WireName) -> int:
    """Bytes of a wire message of so many values in a format.

    Example:
        >>> row_bytes(1280, "fp32"), row_bytes(1280, "bf16"), row_bytes(1280, "fp8")
        (5120, 2560, 1290)
    """
    if wire == "fp8":
        return values + -(-values // TILE)
    return values * (4 if wire == "fp32" else 2)


def pack(x_RN: Tensor, wire: WireName, kernels: Kernels) -> Tensor:
    """Pack FP32 rows into messages of a wire format: uint8 [R, B].

    Args:
        x_RN: FP32, contiguous; in `fp8` BF16 and FP16 too.
        wire: the format.
        kernels: whose `quantize` makes FP8 codes.
    """
    rows, values = x_RN.shape
    if wire != "fp8":
        sent = x_RN if wire == "fp32" else x_RN.to(torch.bfloat16)
        return sent.contiguous().view(torch.uint8).view(rows, row_bytes(values, wire))
    even = values > 0 and values % TILE == 0
    tiled = kernels.quantize(x_RN.reshape(rows * (values // TILE), TILE) if even else x_RN, FP8_ROW)
    # A normal power of two has its exponent alone in its bits.
    exponents = (tiled.scale_inv.contiguous().view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8)
    return torch.cat([tiled.qdata.reshape(rows, values), exponents.view(rows, -(-values // TILE))], dim=1)


def unpack(packed_RB: Tensor, values: int, wire: WireName) -> Tensor:
    """Unpack wire messages to values: FP32 [R, N], in memory of their own."""
    if wire == "fp32":
        return packed_RB.clone().view(torch.float32)
    if wire == "bf16":
        return packed_RB.clone().view(torch.bfloat16).to(torch.float32)
    codes_RN, exponents_RT = packed_RB[:, :values], packed_RB[:, values:]
    value_RN = code_values(packed_RB.device)[codes_RN.to(torch.int32)]
    scale_RT = powers(packed_RB.device)[exponents_RT.to(torch.int32)]
    whole = values // TILE * TILE
    value_RN[:, :whole].unflatten(1, (whole // TILE, TILE)).mul_(scale_RT[:, : whole // TILE, None])
    if whole < values:
        value_RN[:, whole:].mul_(scale_RT[:, -1:])
    return value_RN


def sum_rows(packed_RB: Tensor, values: int, wire: WireName) -> Tensor:
    """Sum wire messages of rows, FP32 [N], added in their order."""
    first_1B, *others = packed_RB.split(1)
    total_N = unpack(first_1B, values, wire)[0]
    for row_1B in others:
        total_N += unpack(row_1B, values, wire)[0]
    return total_N


@lru_cache(maxsize=8)
def code_values(device: torch.device) -> Tensor:
    """Values of a wire message's codes, as `formats` decodes them."""
    return decode(torch.arange(256, dtype=torch.uint8), E4M3).to(device)


@lru_cache(maxsize=8)
def powers(device: torch.device) -> Tensor:
    """Scales of the exponents in a wire message."""
    found = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert found[E8M0_BIAS] == 1.0
    return found.to(device)
