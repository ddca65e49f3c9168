"""AdamW with moments in 8 bits on GPUs: the bits of `ops.backends.ref.low_bit_adam`, each number read and written once.

A program takes eight blocks of 128 elements. Fusing a multiplication with an addition is turned off, and roots and
quotients are the correctly rounded ones: anything else is another bit.

Legend: R blocks of a program  K elements of a block.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tilewright.formats import quadratic_map
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors, factors
from tilewright.ops.backends.triton.encode import INF_BITS, MAGNITUDE, to_fp32
from tilewright.ops.backends.triton.follow_writes import followed, to_nearest
from tilewright.ops.backends.triton.launch import raw

_ROWS = 8
FP32, BF16, SPLIT24, OF_BF16, OF_FP16 = (tl.constexpr(kind) for kind in range(5))
"""Kinds of target: FP32, BF16 rounded stochastically, BF16 with 8 bits more in `low`, FP32 master of a BF16 or FP16
weight."""
BLOCK, LEAST = tl.constexpr(quadratic_map.BLOCK), tl.constexpr(quadratic_map.LEAST)
TINY_BITS = tl.constexpr(int(torch.tensor(quadratic_map.TINY).view(torch.int32)))


def low_bit_adam(tensors: LowBitTensors, hyper: AdamHyper) -> None:
    """Low-bit AdamW in Triton, with moments in 8 bits: see `ops.adam`."""
    target, low, weight = tensors.target, tensors.low, tensors.weight
    if weight is not None:
        kind, beside = (OF_BF16 if weight.dtype == torch.bfloat16 else OF_FP16), weight.view(torch.int16)
    else:
        kind, beside = (FP32 if target.dtype == torch.float32 else BF16 if low is None else SPLIT24), low
    target = target if target.dtype == torch.float32 else target.view(torch.int16)
    num_rows, length = tensors.rows
    per_row = quadratic_map.num_blocks(length)
    num_blocks = num_rows * per_row
    if num_blocks == 0:
        return
    # Launched as it is, for no graph has it: torch's `wrap_triton`, outside of an operation, makes an autotuner of
    # `num_warps` and an entry in a table that is never emptied, at each call, and does not know `enable_fp_fusion`.
    cast(Any, _kernel)[(triton.cdiv(num_blocks, _ROWS),)](
        target, target if beside is None else beside, raw(tensors.grad),
        tensors.exp_avg, tensors.exp_avg_scale, tensors.exp_avg_sq, tensors.exp_avg_sq_scale,
        num_blocks, per_row, length, tensors.skip, *factors(hyper), tensors.stream(hyper),
        KIND=kind.value, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _has_correction(bits):
    magnitude = bits & MAGNITUDE
    return (magnitude != 0) & (magnitude < INF_BITS)


@triton.jit
def _random_bits(element, stream):
    """Draw 32 random bits per element for low-bit AdamW in Triton: `ops.backends.ref.adam.hash32`."""
    x = element.to(tl.uint32) * 0x9E3779B9 + stream.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return (x ^ (x >> 15)).to(tl.int32, bitcast=True)


@triton.jit
def _decode(qdata, scale):
    code = qdata.to(tl.int32)
    return scale * (code * tl.abs(code)).to(tl.float32)


@triton.jit
def _encode(x, noise, STEPS: tl.constexpr):
    """Encode moments of low-bit AdamW in Triton: (int32 codes, scales [R, 1]) of FP32 values:
    `formats.quadratic_map.encode`, signed where STEPS is 127."""
    magnitude = _as_bits(x) & MAGNITUDE
    most = tl.max(magnitude, axis=1, keep_dims=True)
    seen = (most < INF_BITS) & (most >= TINY_BITS)
    largest = _as_float(tl.where(seen, most, 0x3F800000))
    scale = tl.where(seen, largest * (1.0 / (STEPS * STEPS)), 0.0)
    scale = tl.where(most < INF_BITS, scale, float("nan"))
    factor = tl.div_rn(tl.full(largest.shape, STEPS * STEPS, tl.float32), largest)
    square = tl.where(seen, _as_float(magnitude) * factor, 0.0)
    low = tl.sqrt_rn(square).to(tl.int32)
    rest = square - (low * low).to(tl.float32)
    code = low + (rest * 512.0 > ((2 * noise + 1) * (2 * low + 1)).to(tl.float32)).to(tl.int32)
    if STEPS == 127:
        code = tl.where(x < 0, -code, code)
    else:
        code = tl.maximum(code, LEAST)
    return code, scale


@triton.jit
def _load_target(target_ptr, beside_ptr, offsets, inside, KIND: tl.constexpr):
    if KIND == FP32:
        return tl.load(target_ptr + offsets, mask=inside, other=0)
    elif KIND >= OF_BF16:
        master = tl.load(target_ptr + offsets, mask=inside, other=0)
        stored = tl.load(beside_ptr + offsets, mask=inside, other=0)
        return followed(master, stored, KIND == OF_BF16)
    else:
        bits = tl.load(target_ptr + offsets, mask=inside, other=0).to(tl.int32) << 16
        if KIND == SPLIT24:
            low = tl.load(beside_ptr + offsets, mask=inside, other=0).to(tl.int32) << 8
            bits += tl.where(_has_correction(bits), low, 0)
        return _as_float(bits)


@triton.jit
def _store_target(target_ptr, beside_ptr, offsets, inside, p, random, KIND: tl.constexpr):
    if KIND == FP32:
        tl.store(target_ptr + offsets, p, mask=inside)
    elif KIND >= OF_BF16:
        tl.store(target_ptr + offsets, p, mask=inside)
        tl.store(beside_ptr + offsets, to_nearest(p, KIND == OF_BF16), mask=inside)
    else:
        bits = _as_bits(p)
        finite = (bits & INF_BITS) != INF_BITS
        not_finite = (bits >> 16) | tl.where((bits & 0x7FFFFF) != 0, 0x40, 0)
        if KIND == BF16:
            high = (bits + (random & 0xFFFF)) >> 16
        else:
            rounded = (bits + (random & 0xFF)) & -256
            high = (rounded + 0x8000) >> 16
            low = (rounded - (high << 16)) >> 8
            tl.store(beside_ptr + offsets, low.to(tl.int8), mask=inside)
        tl.store(target_ptr + offsets, tl.where(finite, high, not_finite).to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["stream"])
def _kernel(
    target_ptr, beside_ptr, grad_ptr, m_ptr, m_scale_ptr, root_ptr, root_scale_ptr, num_blocks, per_row, length,
    skip, decay, rate1, beta2, rate2, size, inv_root, eps, stream, KIND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    is_block = rows < num_blocks
    places = (rows % per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    offsets = (rows // per_row).to(tl.int64) * length + places
    inside = is_block & (places < length)
    random = _random_bits(offsets + (rows // per_row).to(tl.int64) * skip, stream)
    p = _load_target(target_ptr, beside_ptr, offsets, inside, KIND)
    grad = to_fp32(tl.load(grad_ptr + offsets, mask=inside, other=0))
    m = _decode(tl.load(m_ptr + offsets, mask=inside, other=0), tl.load(m_scale_ptr + rows, mask=is_block, other=0))
    root = _decode(
        tl.load(root_ptr + offsets, mask=inside, other=0), tl.load(root_scale_ptr + rows, mask=is_block, other=0)
    )
    m = m + rate1 * (grad - m)
    root = tl.sqrt_rn(beta2 * (root * root) + rate2 * grad * grad)
    p = decay * p - tl.div_rn(size * m, root * inv_root + eps)
    _store_target(target_ptr, beside_ptr, offsets, inside, p, random, KIND)
    code, scale = _encode(m, (random >> 16) & 0xFF, 127)
    tl.store(m_ptr + offsets, code.to(tl.int8), mask=inside)
    tl.store(m_scale_ptr + rows, scale, mask=is_block)
    code, scale = _encode(root, (random >> 24) & 0xFF, 255)
    tl.store(root_ptr + offsets, code.to(tl.uint8), mask=inside)
    tl.store(root_scale_ptr + rows, scale, mask=is_block)
