// x W^T + b of a few rows: what a pass of cached tokens multiplies. Its time is that of reading the weight once.
//
// Weights are read as they are, in FP32 or BF16, a few of their rows side by side. An output is one chain of sums per
// lane, summed over lanes at its end, in an order that depends on K alone: a row has the same bits beside any others and
// with any number of threads.

#pragma once
#include <cstdint>
#include <cstring>
#include <new>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int CHAINS = WIDTH == 64 ? 28 : 12;  // outputs that are summed at a time: one register each, of 32 or 16
constexpr i64 UNIT_BYTES = 1 << 15;            // of the weight, that a thread takes at a time
constexpr int MOST_ROWS = 8;

// A format: what a vector of weights becomes when it is loaded, once for all rows of x; what x is kept as; and a chain's
// next sum.
struct Fp32 {
  typedef float Element;
  typedef float Kept;
  typedef floats Weights;
  static constexpr int EACH = LANES;  // elements of a vector
  static float widen(float x) { return x; }
  static float narrow(float x) { return x; }
  static i64 place(i64 k) { return k; }
  static float keep(float x) { return x; }
  static Weights weights(const float* from) { return load<floats>(from); }
  static floats sum(Weights w, const float* x, floats sum) { return fused(w, load<floats>(x), sum); }
};
struct Bf16Base {
  typedef uint16_t Element;
  static constexpr int EACH = 2 * LANES;
  static float widen(uint16_t x) { return from_bf16(x); }
  static uint16_t narrow(float x) { return to_bf16(x); }
};
#if defined(__AVX512BF16__)
struct Bf16 : Bf16Base {  // the processor multiplies pairs and sums in FP32
  typedef uint16_t Kept;
  typedef ints Weights;
  static i64 place(i64 k) { return k; }
  static uint16_t keep(uint16_t x) { return x; }
  static Weights weights(const uint16_t* from) { return load<ints>(from); }
  static floats sum(Weights w, const uint16_t* x, floats sum) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)load<ints>(x));
  }
};
#else
struct Bf16 : Bf16Base {  // even elements are taken out by a shift and odd ones by a mask; x has them apart too
  typedef float Kept;
  struct Weights { floats even, odd; };
  static i64 place(i64 k) { return k / EACH * EACH + k % 2 * LANES + k % EACH / 2; }
  static float keep(uint16_t x) { return from_bf16(x); }
  static Weights weights(const uint16_t* from) {
    const ints both = load<ints>(from);
    return {(floats)(both << 16), (floats)(both & 0xFFFF0000u)};
  }
  static floats sum(Weights w, const float* x, floats sum) {
    return fused(w.odd, load<floats>(x + LANES), fused(w.even, load<floats>(x), sum));
  }
};
#endif

struct RowLinear {
  const void* weight;  // [M, K], rows `pitch` elements apart
  i64 pitch, M, K, N;
  const void* x;       // [N, padded K], as the format keeps it
  i64 padded;
  const void* bias;    // [M], or none
  void* out;           // [N, M]
  i64 step;            // outputs of a unit
};

template <class Format, int OUTS, int ROWS>
inline void block(const RowLinear& job, i64 m) {
  typedef typename Format::Element Element;
  typedef typename Format::Kept Kept;
  constexpr int EACH = Format::EACH;
  const Element* weight[OUTS];
  for (int o = 0; o < OUTS; o++) weight[o] = (const Element*)job.weight + (m + o) * job.pitch;
  const Kept* x = (const Kept*)job.x;
  floats sums[OUTS][ROWS] = {};
  const i64 whole = job.K / EACH * EACH;
  for (i64 k = 0; k < whole; k += EACH)
    for (int o = 0; o < OUTS; o++) {
      const typename Format::Weights w = Format::weights(weight[o] + k);
      for (int r = 0; r < ROWS; r++) sums[o][r] = Format::sum(w, x + r * job.padded + k, sums[o][r]);
    }
  if (whole < job.K)
    for (int o = 0; o < OUTS; o++) {
      Element last[EACH] = {};
      std::memcpy(last, weight[o] + whole, (job.K - whole) * sizeof(Element));
      for (int r = 0; r < ROWS; r++)
        sums[o][r] = Format::sum(Format::weights(last), x + r * job.padded + whole, sums[o][r]);
    }
  const Element* bias = (const Element*)job.bias;
  Element* out = (Element*)job.out;
  for (int o = 0; o < OUTS; o++)
    for (int r = 0; r < ROWS; r++) {
      const float sum = sum_of(sums[o][r]);
      out[r * job.M + m + o] = Format::narrow(bias ? sum + Format::widen(bias[m + o]) : sum);
    }
}

template <class Format, int ROWS>
void outputs(const RowLinear& job, i64 first, i64 end) {
  constexpr int MOST = CHAINS / ROWS > 4 ? 4 : CHAINS / ROWS;
  i64 m = first;
  for (; m + MOST <= end; m += MOST) block<Format, MOST, ROWS>(job, m);
  for (; m < end; m++) block<Format, 1, ROWS>(job, m);
}

template <class Format, int ROWS = MOST_ROWS>
void unit(const RowLinear& job, i64 number) {
  if constexpr (ROWS > 1)
    if (job.N < ROWS) return unit<Format, ROWS - 1>(job, number);
  const i64 first = number * job.step, end = first + job.step < job.M ? first + job.step : job.M;
  outputs<Format, ROWS>(job, first, end);
}

template <class Format>
int multiply(RowLinear job, const void* x, int threads) {
  typedef typename Format::Element Element;
  typedef typename Format::Kept Kept;
  job.padded = (job.K + Format::EACH - 1) / Format::EACH * Format::EACH;
  Kept* kept = new (std::align_val_t(64), std::nothrow) Kept[job.N * job.padded + 1]();
  if (!kept) return 1;
  for (i64 n = 0; n < job.N; n++) {
    const Element* from = (const Element*)x + n * job.K;
    Kept* to = kept + n * job.padded;
    for (i64 k = 0; k < job.K; k++) to[Format::place(k)] = Format::keep(from[k]);
  }
  job.x = kept;
  job.step = UNIT_BYTES / (i64)sizeof(Element) / (job.K ? job.K : 1) / 8 * 8;
  job.step = job.step < 8 ? 8 : job.step;
  run(job, unit<Format, MOST_ROWS>, (job.M + job.step - 1) / job.step, job.M * job.K, threads);
  operator delete[](kept, std::align_val_t(64));
  return 0;
}

}  // namespace
