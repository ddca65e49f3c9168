"""Device functions: tiles of FP32 values to scales and 8-bit codes, the bits of `formats.quantize`.

Two ways to the same bits. The plain one rounds by integer arithmetic, runs on every GPU and in the interpreter, and
takes noise. The short one uses the conversion instruction of GPUs that have it; tiles that hold infinities, which the
instruction turns into the largest value, are mended afterwards.

Branches on constants are if and else, not early returns: Triton compiles what is after a return too.
Nothing here adds after it multiplies, so a compiler that contracts both into one rounding cannot change bits.

A format comes as five integers: MANTISSA and BIAS, MAX_BITS (its largest value as FP32 bits), LEAST and MOST (exponents
of scales).
"""

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NAN_CODE = tl.constexpr(0x7F)


@triton.jit
def to_fp32(x):
    """Convert the values of `launch.raw` to FP32 in Triton: int16 is BF16 in the interpreter."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_like(y, dtype: tl.constexpr):
    """Round FP32 values to nearest even in a dtype of `launch.raw`, in Triton: (the values in FP32, the same in that
    dtype)."""
    if dtype == tl.int16:
        bits = y.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & MAGNITUDE) > INF_BITS, 0x7FC0, rounded)
        return (rounded << 16).to(tl.float32, bitcast=True), rounded.to(tl.int16)
    else:
        out = y.to(dtype)
        return out.to(tl.float32), out


@triton.jit
def scales_of(amax_bits, MAX_BITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, POW2: tl.constexpr):
    """Encode in Triton: (decode scale, encode scale) from the FP32 bits of the largest finite magnitude. See
    `formats.scaling`."""
    if POW2:
        above: tl.constexpr = 0x7FFFFF - (MAX_BITS & 0x7FFFFF)
        max_exponent: tl.constexpr = (MAX_BITS >> 23) - 127
        exponent = ((amax_bits + above) >> 23) - 127 - max_exponent
        exponent = tl.minimum(tl.maximum(exponent, LEAST), MOST)
        scale_inv = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        return scale_inv, scale
    else:
        low: tl.constexpr = MAX_BITS + (LEAST << 23)  # the format's largest value times 2^LEAST
        high: tl.constexpr = MAX_BITS + (MOST << 23)
        amax = tl.minimum(tl.maximum(amax_bits, low), high).to(tl.float32, bitcast=True)
        largest = tl.full(amax_bits.shape, MAX_BITS, tl.int32).to(tl.float32, bitcast=True)
        scale_inv = tl.div_rn(amax, largest)
        return scale_inv, tl.div_rn(tl.full(amax_bits.shape, 1.0, tl.float32), scale_inv)


@triton.jit
def tile_max(magnitude, AXES: tl.constexpr):
    """The largest magnitude of each tile of a block of magnitude bits, in Triton. AXES: 1 tiles are rows, 0 columns, 2
    the whole block."""
    if AXES == 2:
        return tl.max(tl.max(magnitude, axis=1, keep_dims=True), axis=0, keep_dims=True)
    else:
        return tl.max(magnitude, axis=AXES, keep_dims=True)


@triton.jit
def encode_bits(
    x, scale, noise, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, NOISY: tl.constexpr
):
    """Encode x * scale as uint8 codes by integer arithmetic, in Triton. `noise`: int32 of x's shape, read where
    NOISY."""
    dropped: tl.constexpr = 23 - MANTISSA
    tiny: tl.constexpr = 128 - BIAS  # the format's smallest normal exponent, as FP32 stores it
    x_bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((x * scale).to(tl.int32, bitcast=True) & MAGNITUDE, MAX_BITS)
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | 0x800000
    below = tl.maximum(tiny - exponent, 0)  # binary places more to cut off: subnormals of the format
    if NOISY:
        # As in `formats.encode`: a subnormal is looked at in 20 binary places of the format's smallest value.
        steps = significand >> (tl.minimum(below, 24) + (dropped - 20))
        subnormal = (steps + (noise & 0xFFFFF)) >> 20
        cut_off: tl.constexpr = (1 << dropped) - 1  # pyright: ignore[reportOperatorIssue]  # Triton compiles it
        normal = (significand + (noise & cut_off)) >> dropped
        rounded = tl.where(below > 0, subnormal, normal)
    else:
        cut = tl.minimum(dropped + below, 25)  # at 25 places nothing is left, not even a half
        half = (1 << (cut - 1)) - 1
        rounded = (significand + half + ((significand >> cut) & 1)) >> cut
    code = ((tl.maximum(exponent, tiny) - tiny) << MANTISSA) + rounded  # a carry runs into the exponent
    code = code | ((x_bits >> 24) & 0x80)
    return tl.where((x_bits & MAGNITUDE) < INF_BITS, code, NAN_CODE).to(tl.uint8)


@triton.jit
def to_qdata(scaled, MANTISSA: tl.constexpr):
    """Encode values as uint8 codes by the GPU's conversion instruction, in Triton: to nearest even, saturating, NaN to
    0x7F."""
    if MANTISSA == 3:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def encode_tile(
    x, noise, AXES: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, POW2: tl.constexpr, NOISY: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Encode in Triton: (uint8 codes, decode scales, spoilt) of a block of FP32 values; scales keep the reduced
    dimensions as 1.

    FAST: the device has the conversion instruction. spoilt: the caller must `mark_not_finite` after it stored codes.
    """
    magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE
    if FAST and not NOISY:
        spoilt = tl.max(tl.max(tile_max(magnitude, AXES), axis=1), axis=0) >= INF_BITS
        amax = tile_max(tl.where(magnitude < INF_BITS, magnitude, 0), AXES)
        scale_inv, scale = scales_of(amax, MAX_BITS, LEAST, MOST, POW2)
        qdata = to_qdata(x * scale, MANTISSA)
    else:
        spoilt = False
        amax = tile_max(tl.where(magnitude < INF_BITS, magnitude, 0), AXES)
        scale_inv, scale = scales_of(amax, MAX_BITS, LEAST, MOST, POW2)
        qdata = encode_bits(x, scale, noise, MANTISSA, BIAS, MAX_BITS, NOISY)
    return qdata, scale_inv, spoilt


@triton.jit
def mark_not_finite(
    x_ptr, codes_ptr, first_row, first_col, num_rows, num_cols, code_stride_row, code_stride_col, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Write NaN codes over those of infinities and NaN in a block of BLOCK_M x 128, in Triton.

    Reads x [num_rows, num_cols] again, a few rows at a time: blocks seldom need this, and code that holds many values
    would take registers from all. Code of element (m, k) is at codes_ptr + m * code_stride_row + k * code_stride_col.
    """
    tl.debug_barrier()  # after the codes, which other threads may have written
    cols = first_col + tl.arange(0, 128)[None, :]
    # `tl.range` raises if Python iterates it, so to pyright nothing returns from here on.
    for start in tl.range(0, BLOCK_M, 8, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        rows = first_row + start + tl.arange(0, 8)[:, None]
        inside = (rows < num_rows) & (cols < num_cols)
        x = to_fp32(tl.load(x_ptr + rows.to(tl.int64) * num_cols + cols, mask=inside, other=0))
        bits = x.to(tl.int32, bitcast=True)
        code_at = rows.to(tl.int64) * code_stride_row + cols.to(tl.int64) * code_stride_col
        code = tl.full(bits.shape, NAN_CODE, tl.uint8)
        tl.store(codes_ptr + code_at, code, mask=inside & ((bits & MAGNITUDE) >= INF_BITS))
