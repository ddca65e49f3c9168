"""Square codes: 8-bit integers whose squares, times one scale for 128 elements, are the values.

    signed, int8 -127..127:   value = scale * code * |code|
    unsigned, uint8 4..255:   value = scale * code^2,   for values that are never negative

Small values get finer steps: the smallest is 1/16129 (1/4064) of the largest in its block, where equal steps would end
at 1/127. That suits the moments of AdamW, which divides one small number by another: with equal steps, a coordinate
whose root of the second moment rounds to zero is thrown far out. Hence the least unsigned code: what is below it is
raised to it, so that the finest step of a first moment moves a weight by a quarter of a full step at most where the
largest moments of their blocks are alike. (Zero codes in memory that nothing was written to mean zeros.)

Rounding is stochastic: up or down to a neighbour with the probability that makes the expectation right, up to 1/512 of
a step. A running mean of rounded numbers that change by less than a step would be still otherwise.

This file is the definition; `ops/backends/cpu/cpp/low_bit_adam.cpp` and `ops/backends/triton/low_bit_adam.py` have the
same bits. All arithmetic is in FP32, each operation rounded by itself.

A tensor of any shape is read as rows: its first dimension by all the others. A block is part of one row, so whatever
cuts a tensor between rows (FSDP's shards, experts on their devices) cuts codes and scales alike, and cuts no block. A
vector's rows are single elements, each with a scale of its own: 10 bytes per element for two moments, of tensors that
are small.

Legend: R rows  K elements of a row  B blocks of a row  ... any dimensions.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 4
"""The least unsigned code. Below it neighbours differ by more than half, and 1/value is no longer right on average."""
BLOCK = 128
"""Elements of a row that share a scale; a row's last block may be shorter."""
TINY = 2.0**-45
"""A block whose largest magnitude is below this is stored as zeros: so no root of a second moment has a square that is
subnormal, which processors are slow with. Next to the eps of any AdamW it is nothing."""


def num_blocks(num_elements: int) -> int:
    """Count the blocks, each with a scale of the quadratic map, of a row with that many elements."""
    return -(-num_elements // BLOCK)


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Shape of the quadratic map's scales [R, B] of a tensor of this shape. A scalar has one row.

    Example:
        >>> scale_shape((4, 300)), scale_shape((4, 3, 100)), scale_shape((5,)), scale_shape(())
        ((4, 3), (4, 3), (5, 1), (1, 1))
    """
    return (shape[0] if len(shape) else 1), num_blocks(prod(shape[1:]))


def encode(x_K: Tensor, noise_K: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode FP32 values by the quadratic map to codes and scales. A block with a value that is not finite gets the
    scale NaN.

    Args:
        x_K: FP32 rows [..., K]; not negative unless `signed`.
        noise_K: int32 from 0 to 255, of the same shape.
        signed: int8 codes, else uint8.

    Returns:
        (codes [..., K], scales [..., B] in FP32).

    Example:
        >>> qdata, scale = encode(torch.tensor([0.0, 0.25, -1.0]), torch.full((3,), 128), signed=True)
        >>> qdata.tolist(), decode(qdata, scale)
        ([0, 63, -127], tensor([ 0.0000,  0.2461, -1.0000]))
    """
    steps = 127 if signed else 255
    x_BK = _blocks(x_K)
    largest_B1 = x_BK.abs().amax(dim=-1, keepdim=True)
    finite_B1 = largest_B1 < torch.inf  # false for NaN
    seen_B1 = finite_B1 & (largest_B1 >= TINY)
    scale_B1 = torch.where(seen_B1, largest_B1 * (1 / steps**2), 0.0)
    scale_B1 = torch.where(finite_B1, scale_B1, torch.nan)
    factor_B1 = torch.full_like(largest_B1, steps**2) / largest_B1  # torch does not divide where one is a number
    square_BK = torch.where(seen_B1, x_BK.abs() * factor_B1, 0.0)
    low_BK = root(square_BK).to(torch.int32)  # the code below
    rest_BK = square_BK - (low_BK * low_BK).to(torch.float32)
    # Up where rest > (noise + 1/2) / 256 * (distance to the next square). The largest value rounds to `steps` itself.
    up_BK = rest_BK * 512 > ((2 * _blocks(noise_K) + 1) * (2 * low_BK + 1)).to(torch.float32)
    code_BK = low_BK + up_BK
    if not signed:
        return _rows(code_BK.clamp(min=LEAST).to(torch.uint8), x_K), scale_B1.squeeze(-1)
    code_BK = torch.where(x_BK < 0, -code_BK, code_BK)
    return _rows(code_BK.to(torch.int8), x_K), scale_B1.squeeze(-1)


def decode(qdata_K: Tensor, scale_B: Tensor) -> Tensor:
    """Decode codes of the quadratic map with scales [..., B] to FP32 values [..., K]: int8 codes are signed, uint8
    codes are not."""
    code_BK = _blocks(qdata_K).to(torch.int32)
    return _rows(scale_B[..., None] * (code_BK * code_BK.abs()).to(torch.float32), qdata_K)


def root(x: Tensor) -> Tensor:
    """The FP32 number nearest to the square root, for the quadratic map. torch's own root on CPUs is the next number
    now and then (MKL)."""
    return x.double().sqrt().to(torch.float32)


def _blocks(x_K: Tensor) -> Tensor:
    """Divide rows into blocks of the quadratic map, [..., B, 128], the last one filled up with zeros."""
    size = x_K.shape[-1]
    return F.pad(x_K, (0, -size % BLOCK)).view(*x_K.shape[:-1], num_blocks(size), BLOCK)


def _rows(x_BK: Tensor, like_K: Tensor) -> Tensor:
    """Rows of the quadratic map back from `_blocks`, without padding."""
    return x_BK.flatten(-2)[..., : like_K.shape[-1]]
