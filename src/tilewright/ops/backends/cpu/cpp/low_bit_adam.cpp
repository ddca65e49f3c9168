// One AdamW step, in one pass: with moments in 8 bits (the bits are those of tilewright.ops.backends.ref.low_bit_adam),
// or in FP32 or BF16 (those of ops.backends.ref.adam).
//
// Compiled when first used (build.py), called through ctypes (low_bit_adam.py). A block of 128 elements at a time is
// widened into buffers that stay in the first-level cache, updated in FP32 and narrowed again, in loops plain enough
// for the compiler to vectorise. No multiplication is fused with an addition (-ffp-contract=off): that is another bit.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

namespace {

constexpr int BLOCK = 128;            // elements that share a scale
constexpr i64 UNIT = 64;              // blocks that a thread takes at a time
constexpr int32_t INFINITE = 0x7F800000;
constexpr float TINY = 0x1p-45f;      // see formats/quadratic_map.py

enum Target { FP32, BF16, SPLIT24, OF_BF16, OF_FP16 };
// Of `target`: FP32, BF16 rounded stochastically, BF16 with 8 bits more in `low`, FP32 master of a BF16 or FP16 `weight`

struct Adam {
  int kind, is_fp32_grad;
  void* target;
  int8_t* low;
  uint16_t* weight;                   // of a master: what was written there becomes the master, whose rounding it gets
  const void* grad;
  int8_t* m;                          // codes, and a scale for each block
  float* m_scale;
  uint8_t* root;                      // of the second moment
  float* root_scale;
  i64 rows, length;                   // elements of a row: its last block may be shorter
  i64 skip;                           // elements of the whole tensor between two rows, for the random bits
  float decay, rate1, beta2, rate2, size, inv_root, eps;
  int32_t stream;
};

inline i64 blocks_of(i64 length) { return (length + BLOCK - 1) / BLOCK; }
inline float as_float(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline int32_t as_bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline int32_t hash(int32_t element, int32_t stream) {
  uint32_t x = (uint32_t)element * 0x9E3779B9u + (uint32_t)stream;
  x = (x ^ x >> 16) * 0x21F0AAADu;
  x = (x ^ x >> 15) * 0x735A2D97u;
  return (int32_t)(x ^ x >> 15);
}
// BF16 of what is not finite.
inline int32_t not_finite(int32_t bits) { return bits >> 16 | ((bits & 0x7FFFFF) ? 0x40 : 0); }
// Whether a pattern's correction of 8 bits counts: neither zero nor not finite.
inline bool has_correction(int32_t bits) {
  return (uint32_t)bits * 2u - 1u < (uint32_t)INFINITE * 2u - 1u;  // without the sign; zero becomes the largest
}

// FP32 patterns to the nearest 16-bit ones, ties to even, and back. Plain integers: they vectorise on any processor.
inline int32_t to_bf16(int32_t bits) {
  const bool is_nan = (bits & 0x7FFFFFFF) > INFINITE;
  const int32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF;
  return is_nan ? 0x7FC0 : nearest;
}
inline int32_t from_bf16(int32_t half) { return (int32_t)((uint32_t)half << 16); }
inline int32_t to_fp16(int32_t bits) {
  const int32_t magnitude = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
  const int32_t normal = (magnitude - (112 << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  const int32_t small = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000;  // below 2^-14: the addition rounds
  int32_t half = magnitude < 0x38800000 ? small : normal;
  half = magnitude >= 0x47800000 ? 0x7C00 : half;
  half = magnitude > INFINITE ? 0x7E00 : half;
  return sign | half;
}
inline int32_t from_fp16(int32_t half) {
  const int32_t magnitude = half & 0x7FFF, sign = (int32_t)((uint32_t)(half & 0x8000) << 16);
  const int32_t normal = (magnitude << 13) + (112 << 23);
  const int32_t small = as_bits((float)magnitude * 0x1p-24f);
  const int32_t wide = magnitude < 0x400 ? small : magnitude >= 0x7C00 ? normal + (112 << 23) : normal;
  return sign | wide;
}

// 128 numbers, and those of them that there are: `N` is constant but in the last block.
struct alignas(64) Floats { float at[BLOCK]; };
struct alignas(64) Ints { int32_t at[BLOCK]; };

template <class Code>
inline void decode(const Code* codes, float scale, Floats& x, int n) {
  for (int i = 0; i < n; i++) {
    const int32_t code = codes[i];
    x.at[i] = scale * (float)(code * (code < 0 ? -code : code));
  }
}

// Square codes: formats/quadratic_map.py. `shift`: where in the random bits this one's eight are.
template <class Code, int STEPS, int LEAST>
inline void encode(const Floats& x, const Ints& random, int shift, Code* codes, float* scale, int n) {
  int32_t most = 0;
  for (int i = 0; i < n; i++) {
    const int32_t magnitude = as_bits(x.at[i]) & 0x7FFFFFFF;
    most = magnitude > most ? magnitude : most;
  }
  const float largest = as_float(most);
  const bool seen = most < INFINITE && largest >= TINY;
  *scale = most >= INFINITE ? as_float(0x7FC00000) : seen ? largest * (float)(1.0 / (STEPS * STEPS)) : 0.0f;
  if (!seen) {
    std::memset(codes, LEAST, n);
    return;
  }
  const float factor = (float)(STEPS * STEPS) / largest;
  for (int i = 0; i < n; i++) {
    const float square = std::fabs(x.at[i]) * factor;
    const int32_t low = (int32_t)std::sqrt(square);
    const float rest = square - (float)(low * low);
    const int32_t noise = random.at[i] >> shift & 0xFF;
    const int32_t code = low + (rest * 512.0f > (float)((2 * noise + 1) * (2 * low + 1)));
    codes[i] = (Code)(x.at[i] < 0 ? -code : code > LEAST ? code : LEAST);
  }
}

// A master, or where its weight has other bits than its rounding, what was written there.
template <int32_t round(int32_t), int32_t widen(int32_t)>
inline void load_master(const float* master, const uint16_t* weight, Floats& p, int n) {
  for (int i = 0; i < n; i++) {
    const int32_t held = as_bits(master[i]), stored = weight[i];
    p.at[i] = as_float(round(held) == stored ? held : widen(stored));
  }
}
template <int32_t round(int32_t)>
inline void store_master(float* master, uint16_t* weight, const Floats& p, int n) {
  std::memcpy(master, p.at, 4 * n);
  for (int i = 0; i < n; i++) weight[i] = (uint16_t)round(as_bits(p.at[i]));
}

template <int KIND>
inline void load_target(const Adam& a, i64 start, Floats& p, int n) {
  const uint16_t* narrow = (const uint16_t*)a.target + start;
  if (KIND == FP32) {
    std::memcpy(p.at, (const float*)a.target + start, 4 * n);
  } else if (KIND == OF_BF16) {
    load_master<to_bf16, from_bf16>((const float*)a.target + start, a.weight + start, p, n);
  } else if (KIND == OF_FP16) {
    load_master<to_fp16, from_fp16>((const float*)a.target + start, a.weight + start, p, n);
  } else if (KIND == BF16) {
    for (int i = 0; i < n; i++) p.at[i] = as_float((int32_t)((uint32_t)narrow[i] << 16));
  } else {
    const int8_t* low = a.low + start;
    for (int i = 0; i < n; i++) {
      const int32_t bits = (int32_t)((uint32_t)narrow[i] << 16);
      p.at[i] = as_float(bits + (has_correction(bits) ? low[i] * 256 : 0));
    }
  }
}
template <int KIND>
inline void store_target(const Adam& a, i64 start, const Floats& p, const Ints& random, int n) {
  uint16_t* narrow = (uint16_t*)a.target + start;
  if (KIND == FP32) {
    std::memcpy((float*)a.target + start, p.at, 4 * n);
  } else if (KIND == OF_BF16) {
    store_master<to_bf16>((float*)a.target + start, a.weight + start, p, n);
  } else if (KIND == OF_FP16) {
    store_master<to_fp16>((float*)a.target + start, a.weight + start, p, n);
  } else if (KIND == BF16) {
    for (int i = 0; i < n; i++) {
      const int32_t bits = as_bits(p.at[i]), rounded = (bits + (random.at[i] & 0xFFFF)) >> 16;
      narrow[i] = (uint16_t)((bits & INFINITE) != INFINITE ? rounded : not_finite(bits));
    }
  } else {
    int8_t* low = a.low + start;
    for (int i = 0; i < n; i++) {
      const int32_t bits = as_bits(p.at[i]), rounded = (bits + (random.at[i] & 0xFF)) & -256;
      const int32_t high = (rounded + 0x8000) >> 16;
      const bool finite = (bits & INFINITE) != INFINITE;
      narrow[i] = (uint16_t)(finite ? high : not_finite(bits));
      low[i] = (int8_t)((rounded - (int32_t)((uint32_t)high << 16)) >> 8);
    }
  }
}

template <int KIND>
inline __attribute__((always_inline)) void update(const Adam& a, i64 block, i64 start, i64 number, int n) {
  Floats p, g, m, root;
  Ints random;
  load_target<KIND>(a, start, p, n);
  if (a.is_fp32_grad) {
    std::memcpy(g.at, (const float*)a.grad + start, 4 * n);
  } else {
    const uint16_t* grad = (const uint16_t*)a.grad + start;
    for (int i = 0; i < n; i++) g.at[i] = as_float((int32_t)((uint32_t)grad[i] << 16));
  }
  decode(a.m + start, a.m_scale[block], m, n);
  decode(a.root + start, a.root_scale[block], root, n);
  for (int i = 0; i < n; i++) {
    random.at[i] = hash((int32_t)(number + i), a.stream);
    m.at[i] = m.at[i] + a.rate1 * (g.at[i] - m.at[i]);
    root.at[i] = std::sqrt(a.beta2 * (root.at[i] * root.at[i]) + a.rate2 * g.at[i] * g.at[i]);
    p.at[i] = a.decay * p.at[i] - a.size * m.at[i] / (root.at[i] * a.inv_root + a.eps);
  }
  store_target<KIND>(a, start, p, random, n);
  encode<int8_t, 127, 0>(m, random, 16, a.m + start, a.m_scale + block, n);
  encode<uint8_t, 255, 4>(root, random, 24, a.root + start, a.root_scale + block, n);
}

template <int KIND>
void adam_unit(const Adam& a, i64 unit) {
  const i64 per_row = blocks_of(a.length), blocks = a.rows * per_row;
  const i64 end = (unit + 1) * UNIT < blocks ? (unit + 1) * UNIT : blocks;
  i64 row = unit * UNIT / per_row, place = unit * UNIT % per_row;
  for (i64 block = unit * UNIT; block < end; block++) {
    const i64 before = place * BLOCK, left = a.length - before, start = row * a.length + before;
    const i64 number = start + row * a.skip;
    if (left >= BLOCK) update<KIND>(a, block, start, number, BLOCK);
    else update<KIND>(a, block, start, number, (int)left);
    if (++place == per_row) place = 0, row++;
  }
}

// ---- moments in FP32 or BF16 ----

struct Wide {
  int kind, is_narrow, is_fp32_grad;  // a Target but SPLIT24; whether moments are BF16
  void* target;
  uint16_t* weight;
  const void* grad;
  void *m, *v;
  i64 count;
  float decay, rate1, beta2, rate2, size, root_correction2, eps;
  int32_t streams[3];                 // of the target and both moments
};
constexpr i64 PIECE = 64 * BLOCK;     // elements that a thread takes at a time

inline int32_t round_up_or_down(int32_t bits, int32_t element, int32_t stream) {
  const int32_t rounded = (bits + (hash(element, stream) & 0xFFFF)) >> 16;
  return (bits & INFINITE) != INFINITE ? rounded : not_finite(bits);
}
inline void load_wide(const void* from, bool is_narrow, i64 start, Floats& x, int n) {
  if (!is_narrow) {
    std::memcpy(x.at, (const float*)from + start, 4 * n);
    return;
  }
  const uint16_t* narrow = (const uint16_t*)from + start;
  for (int i = 0; i < n; i++) x.at[i] = as_float(from_bf16(narrow[i]));
}
inline void store_wide(void* to, bool is_narrow, i64 start, const Floats& x, int32_t stream, int n) {
  if (!is_narrow) {
    std::memcpy((float*)to + start, x.at, 4 * n);
    return;
  }
  uint16_t* narrow = (uint16_t*)to + start;
  for (int i = 0; i < n; i++) narrow[i] = (uint16_t)round_up_or_down(as_bits(x.at[i]), (int32_t)(start + i), stream);
}
inline __attribute__((always_inline)) void update_wide(const Wide& a, i64 start, int n) {
  Floats p, g, m, v;
  if (a.kind == OF_BF16) load_master<to_bf16, from_bf16>((const float*)a.target + start, a.weight + start, p, n);
  else if (a.kind == OF_FP16) load_master<to_fp16, from_fp16>((const float*)a.target + start, a.weight + start, p, n);
  else load_wide(a.target, a.kind == BF16, start, p, n);
  load_wide(a.grad, !a.is_fp32_grad, start, g, n);
  load_wide(a.m, a.is_narrow, start, m, n);
  load_wide(a.v, a.is_narrow, start, v, n);
  for (int i = 0; i < n; i++) {
    m.at[i] = m.at[i] + a.rate1 * (g.at[i] - m.at[i]);
    v.at[i] = v.at[i] * a.beta2 + a.rate2 * g.at[i] * g.at[i];
    p.at[i] = p.at[i] * a.decay - a.size * m.at[i] / (std::sqrt(v.at[i]) / a.root_correction2 + a.eps);
  }
  if (a.kind == OF_BF16) store_master<to_bf16>((float*)a.target + start, a.weight + start, p, n);
  else if (a.kind == OF_FP16) store_master<to_fp16>((float*)a.target + start, a.weight + start, p, n);
  else store_wide(a.target, a.kind == BF16, start, p, a.streams[0], n);
  store_wide(a.m, a.is_narrow, start, m, a.streams[1], n);
  store_wide(a.v, a.is_narrow, start, v, a.streams[2], n);
}
void wide_unit(const Wide& a, i64 unit) {
  const i64 end = (unit + 1) * PIECE < a.count ? (unit + 1) * PIECE : a.count;
  for (i64 start = unit * PIECE; start < end; start += BLOCK) {
    if (end - start >= BLOCK) update_wide(a, start, BLOCK);
    else update_wide(a, start, (int)(end - start));
  }
}

}  // namespace

extern "C" void tw_adam(
    int kind, int is_narrow, int is_fp32_grad, void* target, uint16_t* weight, const void* grad, void* m, void* v,
    i64 count, float decay, float rate1, float beta2, float rate2, float size, float root_correction2, float eps,
    int stream, int stream_m, int stream_v, int threads) {
  const Wide a{kind,  is_narrow, is_fp32_grad, target, weight, grad, m, v, count, decay, rate1, beta2, rate2, size,
               root_correction2, eps, {stream, stream_m, stream_v}};
  run(a, wide_unit, (count + PIECE - 1) / PIECE, count, threads);
}

// kind: a Target. The random bits of element i come from a hash of (i, stream).
extern "C" void tw_low_bit_adam(
    int kind, int is_fp32_grad, void* target, int8_t* low, uint16_t* weight, const void* grad, int8_t* m, float* m_scale,
    uint8_t* root, float* root_scale, i64 rows, i64 length, i64 skip, float decay, float rate1, float beta2, float rate2,
    float size, float inv_root, float eps, int stream, int threads) {
  const Adam a{kind, is_fp32_grad, target, low,   weight, grad,  m,    m_scale,  root, root_scale,
               rows, length,       skip,   decay, rate1,  beta2, rate2, size,    inv_root, eps, stream};
  const auto unit = kind == FP32      ? adam_unit<FP32>
                    : kind == BF16    ? adam_unit<BF16>
                    : kind == SPLIT24 ? adam_unit<SPLIT24>
                    : kind == OF_BF16 ? adam_unit<OF_BF16>
                                      : adam_unit<OF_FP16>;
  run(a, unit, (rows * blocks_of(length) + UNIT - 1) / UNIT, rows * length, threads);
}
