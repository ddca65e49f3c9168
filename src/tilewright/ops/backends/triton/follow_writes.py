"""Masters that follow writes to their weights on GPUs: 6 bytes read per element, and written what differs."""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.backends.ref import follow_writes as ref
from tilewright.ops.backends.triton.encode import INF_BITS, MAGNITUDE

_BLOCK = 4096


def follow_writes(master: Tensor, weight: Tensor) -> None:
    """Give FP32 masters the values that others wrote to their 16-bit weights, in Triton: see `ops.adam`. Tensors with
    gaps, or in other orders of memory, are followed by torch."""
    count = weight.numel()
    if not count or master.dtype == weight.dtype:
        return
    if master.dtype != torch.float32 or not (master.is_contiguous() and weight.is_contiguous()):
        ref.follow_writes(master, weight)
        return
    cast(Any, _kernel)[(triton.cdiv(count, _BLOCK),)](
        master, weight.view(torch.int16), count, BF16=weight.dtype == torch.bfloat16, BLOCK=_BLOCK, num_warps=8
    )


@triton.jit
def to_nearest(x, BF16: tl.constexpr):
    """Round FP32 numbers to nearest in Triton: patterns (int16); of NaN in BF16 any."""
    if BF16:  # as integers: the interpreter's own conversion is not exact
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & MAGNITUDE) > INF_BITS, 0x7FC0, nearest).to(tl.int16)
    else:
        return x.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def followed(master, stored, BF16: tl.constexpr):
    """The master after it has followed writes: new where its weight has other patterns than before, in Triton."""
    if BF16:
        value = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = stored.to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(to_nearest(master, BF16) != stored, value, master)


@triton.jit
def _kernel(master_ptr, weight_ptr, count, BF16: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    value = followed(master, tl.load(weight_ptr + at, mask=inside, other=0), BF16)
    differs = master.to(tl.int32, bitcast=True) != value.to(tl.int32, bitcast=True)
    tl.store(master_ptr + at, value, mask=inside & differs)
