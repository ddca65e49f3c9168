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

This file is the definition; `ops/backends/cpu/low_bit_adam.cpp` and `ops/backends/triton/low_bit_adam.py` have the
same bits. All arithmetic is in FP32, each operation rounded by itself.

Legend: N elements  B blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 4
"""The least unsigned code. Below it neighbours differ by more than half, and 1/value is no longer right on average."""
BLOCK = 128
"""Elements that share a scale, of the flat tensor; the last block may be shorter."""
TINY = 2.0**-45
"""A block whose largest magnitude is below this is stored as zeros: so no root of a second moment has a square that is
subnormal, which processors are slow with. Next to the eps of any AdamW it is nothing."""


def num_blocks(num_elements: int) -> int:
    """Scales of a tensor with that many elements."""
    return -(-num_elements // BLOCK)


def encode(x_N: Tensor, noise_N: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of FP32 values. A block with a value that is not finite gets the scale NaN.

    Args:
        x_N: FP32, flat; not negative unless `signed`.
        noise_N: int32 from 0 to 255.
        signed: int8 codes, else uint8.

    Returns:
        (codes [N], scales [B] in FP32).

    Example:
        >>> qdata, scale = encode(torch.tensor([0.0, 0.25, -1.0]), torch.full((3,), 128), signed=True)
        >>> qdata.tolist(), decode(qdata, scale)
        ([0, 63, -127], tensor([ 0.0000,  0.2461, -1.0000]))
    """
    steps = 127 if signed else 255
    x_BK = _blocks(x_N)
    largest_B1 = x_BK.abs().amax(dim=1, keepdim=True)
    finite_B1 = largest_B1 < torch.inf  # false for NaN
    seen_B1 = finite_B1 & (largest_B1 >= TINY)
    scale_B1 = torch.where(seen_B1, largest_B1 * (1 / steps**2), 0.0)
    scale_B1 = torch.where(finite_B1, scale_B1, torch.nan)
    factor_B1 = torch.full_like(largest_B1, steps**2) / largest_B1  # torch does not divide where one is a number
    square_BK = torch.where(seen_B1, x_BK.abs() * factor_B1, 0.0)
    low_BK = root(square_BK).to(torch.int32)  # the code below
    rest_BK = square_BK - (low_BK * low_BK).to(torch.float32)
    # Up where rest > (noise + 1/2) / 256 * (distance to the next square). The largest value rounds to `steps` itself.
    up_BK = rest_BK * 512 > ((2 * _blocks(noise_N) + 1) * (2 * low_BK + 1)).to(torch.float32)
    code_BK = low_BK + up_BK
    if not signed:
        return code_BK.clamp(min=LEAST).view(-1)[: len(x_N)].to(torch.uint8), scale_B1.view(-1)
    code_BK = torch.where(x_BK < 0, -code_BK, code_BK)
    return code_BK.view(-1)[: len(x_N)].to(torch.int8), scale_B1.view(-1)


def decode(qdata_N: Tensor, scale_B: Tensor) -> Tensor:
    """FP32 values of codes: int8 ones are signed, uint8 ones are not."""
    code_BK = _blocks(qdata_N).to(torch.int32)
    return (scale_B[:, None] * (code_BK * code_BK.abs()).to(torch.float32)).view(-1)[: len(qdata_N)]


def root(x: Tensor) -> Tensor:
    """The FP32 number nearest to the square root. On CPUs torch's own is the next one now and then (MKL)."""
    return x.double().sqrt().to(torch.float32)


def _blocks(x_N: Tensor) -> Tensor:
    """Rows of 128 elements, the last one filled up with zeros."""
    return F.pad(x_N, (0, -len(x_N) % BLOCK)).view(-1, BLOCK)
