// One AdamW step with moments in 8 bits, in one pass. The bits are those of tilewright.ops.backends.ref.low_bit_adam.
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

enum Target { FP32, BF16, SPLIT24 };  // of `target`: FP32, BF16 rounded stochastically, BF16 with 8 bits more in `low`

struct Adam {
  int kind, is_fp32_grad;
  void* target;
  int8_t* low;
  const void* grad;
  int8_t* m;                          // codes, and a scale for each block
  float* m_scale;
  uint8_t* root;                      // of the second moment
  float* root_scale;
  i64 rows, length;                   // elements of a row: its last block may be shorter
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
  const int32_t magnitude = bits & 0x7FFFFFFF;
  return magnitude != 0 && magnitude < INFINITE;
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

inline void load_target(const Adam& a, i64 start, Floats& p, int n) {
  const uint16_t* narrow = (const uint16_t*)a.target + start;
  if (a.kind == FP32) {
    std::memcpy(p.at, (const float*)a.target + start, 4 * n);
  } else if (a.kind == BF16) {
    for (int i = 0; i < n; i++) p.at[i] = as_float((int32_t)((uint32_t)narrow[i] << 16));
  } else {
    const int8_t* low = a.low + start;
    for (int i = 0; i < n; i++) {
      const int32_t bits = (int32_t)((uint32_t)narrow[i] << 16);
      p.at[i] = as_float(bits + (has_correction(bits) ? low[i] * 256 : 0));
    }
  }
}
inline void store_target(const Adam& a, i64 start, const Floats& p, const Ints& random, int n) {
  uint16_t* narrow = (uint16_t*)a.target + start;
  if (a.kind == FP32) {
    std::memcpy((float*)a.target + start, p.at, 4 * n);
  } else if (a.kind == BF16) {
    for (int i = 0; i < n; i++) {
      const int32_t bits = as_bits(p.at[i]), rounded = (bits + (random.at[i] & 0xFFFF)) >> 16;
      narrow[i] = (uint16_t)((bits & INFINITE) != INFINITE ? rounded : not_finite(bits));
    }
  } else {
    int8_t* low = a.low + start;
    for (int i = 0; i < n; i++) {
      const int32_t bits = as_bits(p.at[i]), rounded = (bits + (random.at[i] & 0xFF)) & -256;
      const int32_t high = (bits & INFINITE) != INFINITE ? (rounded + 0x8000) >> 16 : not_finite(bits);
      const int32_t stored = (int32_t)((uint32_t)high << 16);
      narrow[i] = (uint16_t)high;
      low[i] = (int8_t)(has_correction(stored) ? (rounded - stored) >> 8 : 0);
    }
  }
}

inline __attribute__((always_inline)) void update(const Adam& a, i64 block, i64 start, int n) {
  Floats p, g, m, root;
  Ints random;
  load_target(a, start, p, n);
  if (a.is_fp32_grad) {
    std::memcpy(g.at, (const float*)a.grad + start, 4 * n);
  } else {
    const uint16_t* grad = (const uint16_t*)a.grad + start;
    for (int i = 0; i < n; i++) g.at[i] = as_float((int32_t)((uint32_t)grad[i] << 16));
  }
  decode(a.m + start, a.m_scale[block], m, n);
  decode(a.root + start, a.root_scale[block], root, n);
  for (int i = 0; i < n; i++) {
    random.at[i] = hash((int32_t)(start + i), a.stream);
    m.at[i] = m.at[i] + a.rate1 * (g.at[i] - m.at[i]);
    root.at[i] = std::sqrt(a.beta2 * (root.at[i] * root.at[i]) + a.rate2 * g.at[i] * g.at[i]);
    p.at[i] = a.decay * p.at[i] - a.size * m.at[i] / (root.at[i] * a.inv_root + a.eps);
  }
  store_target(a, start, p, random, n);
  encode<int8_t, 127, 0>(m, random, 16, a.m + start, a.m_scale + block, n);
  encode<uint8_t, 255, 4>(root, random, 24, a.root + start, a.root_scale + block, n);
}

void adam_unit(const Adam& a, i64 unit) {
  const i64 per_row = blocks_of(a.length), blocks = a.rows * per_row;
  const i64 end = (unit + 1) * UNIT < blocks ? (unit + 1) * UNIT : blocks;
  i64 row = unit * UNIT / per_row, place = unit * UNIT % per_row;
  for (i64 block = unit * UNIT; block < end; block++) {
    const i64 before = place * BLOCK, left = a.length - before, start = row * a.length + before;
    if (left >= BLOCK) update(a, block, start, BLOCK);
    else update(a, block, start, (int)left);
    if (++place == per_row) place = 0, row++;
  }
}

}  // namespace

// kind: a Target. The random bits of element i come from a hash of (i, stream).
extern "C" void tw_low_bit_adam(
    int kind, int is_fp32_grad, void* target, int8_t* low, const void* grad, int8_t* m, float* m_scale, uint8_t* root,
    float* root_scale, i64 rows, i64 length, float decay, float rate1, float beta2, float rate2, float size, float inv_root,
    float eps, int stream, int threads) {
  const Adam a{kind,       is_fp32_grad, target, low,   grad,  m,     m_scale, root,     root_scale,
               rows,       length,       decay,  rate1, beta2, rate2, size,     inv_root, eps,  stream};
  run(a, adam_unit, (rows * blocks_of(length) + UNIT - 1) / UNIT, rows * length, threads);
}
