// Products of blocks by AVX-512's BF16 instruction, which multiplies 16 pairs of values and adds each pair's sum to one
// of 16 sums in FP32: the operands of AMX tiles (packing.h), a register for each half of a row of results.

#pragma once
#include "packing.h"

namespace {

constexpr int ROWS = 8;  // of results that are in registers at a time

// Nothing to prepare; as tiles.h has it.
struct Multiplier {
  Multiplier() {}
};

// out[32, 32] (+)= the product over `steps`.
inline void block(Side a, Side b, i64 steps, float* out, i64 stride, bool adds) {
  for (i64 first = 0; first < SIDE; first += ROWS, out += ROWS * stride) {
    const char* left = (const char*)(a.from + first / 16 * a.tile) + first % 16 * a.stride;
    const char *right = (const char*)b.from, *beside = (const char*)(b.from + b.tile);
    __m512 sums[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int half = 0; half < 2; half++)
        sums[r][half] = adds ? _mm512_load_ps(out + r * stride + 16 * half) : _mm512_setzero_ps();
    for (i64 step = 0; step < steps; step++) {
      for (i64 pair = 0; pair < PAIRS; pair++) {
        const __m512bh x = (__m512bh)_mm512_load_si512(right + pair * b.stride);
        const __m512bh y = (__m512bh)_mm512_load_si512(beside + pair * b.stride);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          int values;
          std::memcpy(&values, left + r * a.stride + pair * 4, 4);
          const __m512bh one = (__m512bh)_mm512_set1_epi32(values);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], one, x);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], one, y);
        }
      }
      left += a.step * (i64)sizeof(bf16), right += b.step * (i64)sizeof(bf16), beside += b.step * (i64)sizeof(bf16);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int half = 0; half < 2; half++) _mm512_store_ps(out + r * stride + 16 * half, sums[r][half]);
  }
}

}  // namespace
