"""Cases of `ops.follow_writes` for the tests of all candidates."""

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (5,), (4099,), (3, 129), (7, 64, 5), (2, 300_000))


def awkward() -> Tensor:
    """FP32 numbers of all exponents, between numbers of 16 bits and on them; zeros, infinities, NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (5000,), generator=generator, dtype=torch.int64).to(torch.int32)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, 3.4e38, 1e-45, 6e-8])
    return torch.cat([bits.view(torch.float32), halves.view(torch.float32), special])


def pair(dtype: torch.dtype, shape: tuple[int, ...], written: float) -> tuple[Tensor, Tensor, Tensor]:
    """(master, weight, what the master must become), where this share of the weight was written."""
    generator = torch.Generator().manual_seed(1)
    some = awkward()
    count = torch.Size(shape).numel()
    master = some[torch.randint(len(some), (count,), generator=generator)].view(shape)
    weight = master.to(dtype)
    chosen = torch.rand(shape, generator=generator) < written
    other = some[torch.randint(len(some), (count,), generator=generator)].view(shape).to(dtype)
    weight = torch.where(chosen, other, weight)
    unlike = weight.view(torch.int16) != master.to(dtype).view(torch.int16)
    return master, weight, torch.where(unlike, weight.float(), master)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Whether the bits are equal (where both are NaN, whatever the bits of it)."""
    return bool(((got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())).all())
