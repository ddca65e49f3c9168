// Linear layers of a few rows (few_rows.h). Compiled when first used (build.py), called through ctypes (row_linear.py).

#include "few_rows.h"

// out [N, M] = x [N, K] weight [M, K]^T + bias [M]; all BF16, or all FP32. N from 1 to 8. Not 0: no memory.
extern "C" int tw_row_linear(int bf16, const void* x, const void* weight, i64 pitch, const void* bias, void* out,
                             i64 N, i64 M, i64 K, int threads) {
  if (N < 1 || N > MOST_ROWS) return 2;
  RowLinear job{weight, pitch, M, K, N, nullptr, 0, bias, out, 0};
  return bf16 ? multiply<Bf16>(job, x, threads) : multiply<Fp32>(job, x, threads);
}
