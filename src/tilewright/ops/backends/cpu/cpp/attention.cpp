// Causal attention within documents and windows, operands in BF16, forward and backward: flash attention, scores never
// whole. Products are made on AMX tiles with -DTILES, by AVX-512's BF16 instruction without.
//
// Scores are made transposed, [keys, queries]: their maximum and sum over keys go down the lanes of a vector, and the
// probabilities come out in the order in which the next product wants them.
//
// Compiled when first used (build.py), called through ctypes (attention.py).
//
// Legend: B batch, H query heads, K key heads, G = H / K, S positions, D width; P positions and W width, S and D
// rounded up to SIDE with zeros.

#include <atomic>
#include <cmath>

#if defined(TILES)
#include "tiles.h"
#else
#include "pairs.h"
#endif

namespace {

constexpr i64 KEYS = 512;   // keys at a time, forward
constexpr i64 BLOCK = 256;  // keys, and queries, at a time, backward
constexpr float NEVER = -3.4e38f, LOG2_E = 1.44269504f;

// A tensor [B, heads, S, D], values of a row contiguous.
struct Rows {
  bf16* from;
  i64 batch, head, row;  // strides
  Rows at(i64 b, i64 h) const { return {from + b * batch + h * head, 0, 0, row}; }
};

struct Problem {
  Rows q, k, v, out;
  float* lse;         // [B, H, S]
  const int* first;  // [B, S]: the first key that a query sees, never falling; null: the first of all
  Rows dout, dq, dk, dv;
  i64 B, H, K, S, D;
  float scale;
  std::atomic<bool>* no_memory;
  i64 P() const { return whole(S); }
  i64 W() const { return whole(D); }
};

// Memory of one unit of work, given out piece by piece.
class Arena {
  char* next;

 public:
  explicit Arena(i64 bytes) : next(scratch.get(bytes)) {}
  explicit operator bool() const { return next; }
  template <class T>
  T* take(i64 count) {
    T* taken = (T*)next;
    next += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
  }
};

// --- packing ---------------------------------------------------------------------------------------------------------

// 16 or fewer rows of 32 values from (first, column) on, zeros elsewhere.
inline void take(const Rows& x, i64 S, i64 D, i64 first, i64 column, int count, __m512i rows[]) {
  for (int i = 0; i < count; i++)
    rows[i] = row(x.from + (first + i) * x.row + column, first + i < S ? D - column : 0);
}

// A copy: [P, W].
void pack_rows(const Rows& x, const Problem& p, bf16* to) {
  for (i64 first = 0; first < p.P(); first += 16)
    for (i64 column = 0; column < p.W(); column += SIDE) {
      __m512i rows[16];
      take(x, p.S, p.D, first, column, 16, rows);
      store(to + first * p.W() + column, rows, p.W());
    }
}

// Pairs of rows side by side: [P / 2, W, 2].
void pack_pairs(const Rows& x, const Problem& p, bf16* to) {
  for (i64 first = 0; first < p.P(); first += 2)
    for (i64 column = 0; column < p.W(); column += SIDE) {
      __m512i rows[2], low, high;
      take(x, p.S, p.D, first, column, 2, rows);
      interleave(rows[0], rows[1], low, high);
      _mm512_store_si512(to + first * p.W() + 2 * column, low);
      _mm512_store_si512(to + first * p.W() + 2 * column + SIDE, high);
    }
}

// 32 rows transposed, pairs of values side by side: [W / 2, 32, 2].
void pack_turned_pairs(const Rows& x, const Problem& p, i64 first, bf16* to) {
  for (i64 half = 0; half < 2; half++)
    for (i64 column = 0; column < p.W(); column += SIDE) {
      __m512i rows[16];
      take(x, p.S, p.D, first + 16 * half, column, 16, rows);
      turn(rows);
      store(to + column * SIDE + half * SIDE, rows, 2 * SIDE);
    }
}

// All rows transposed, 32 at a time: [P / 32][W / 16] tiles of 16 values x 32 rows.
void pack_turned(const Rows& x, const Problem& p, bf16* to) {
  for (i64 first = 0; first < p.P(); first += SIDE)
    for (i64 column = 0; column < p.W(); column += SIDE, to += SIDE * SIDE) {
      __m512i rows[32], low[16], high[16];
      take(x, p.S, p.D, first, column, 32, rows);
      for (int i = 0; i < 16; i++) interleave(rows[2 * i], rows[2 * i + 1], low[i], high[i]);
      turn(low);
      turn(high);
      store(to, low, SIDE);
      store(to + 16 * SIDE, high, SIDE);
    }
}

// The packed operands as products take them.
Side rows_of(const bf16* packed, i64 width) { return {packed, 16 * width, SIDE, width * 2}; }      // left
Side pairs_of(const bf16* packed, i64 width) { return {packed, SIDE, STEP * width, width * 4}; }  // right
Side panel_of(const bf16* packed) { return {packed, SIDE, STEP * SIDE, 128}; }                    // right
Side turned_of(const bf16* packed, i64 width) { return {packed, 16 * SIDE, SIDE * width, 64}; }   // left

// --- vectors of 16 queries -------------------------------------------------------------------------------------------

// A score times the scale, rounded: the same number wherever it is made. Fused with a subtraction it would keep more
// digits than the maximum and the log-sum-exp have, and of scores in the millions the difference overflows the exponential.
inline __m512 scaled(const float* score, __m512 scale) { return _mm512_mul_ps(_mm512_load_ps(score), scale); }

// e^x. Below 2^-126 it is 0, so that what is masked is 0 exactly; of NaN it is NaN.
inline __m512 exp_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), _mm512_mul_ps(x, _mm512_set1_ps(LOG2_E)));  // of NaN: the second, NaN
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  // Taylor's series of 2^r for |r| <= 1/2: the first term left out is below 2^-22 of the value.
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.3333558e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(whole, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y, whole);
}

inline __m512 as_floats(__m512i x) { return _mm512_castsi512_ps(x); }
inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m512i paired(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

// The keys that each query of a row of the batch sees: from a first one up to itself.
struct Seen {
  int* first;

  Seen(const Problem& p, i64 b, Arena& arena) : first(arena.take<int>(p.P())) {
    for (i64 i = 0; i < p.S; i++) first[i] = p.first ? p.first[b * p.S + i] : 0;
    for (i64 i = p.S; i < p.P(); i++) first[i] = INT32_MAX;  // what is not there sees nothing
  }
  // Whether a query of a block sees a key of an earlier one or its own.
  bool any(i64 key, i64 query) const { return first[query] < key + SIDE; }
  // Whether every query of a block sees every key of another one.
  bool all(i64 key, i64 query) const { return key + SIDE <= query && first[query + SIDE - 1] <= key; }
};

// Which of the 16 queries from `query` on see a key.
struct Mask {
  __m512i queries, first;

  Mask(const Seen& seen, i64 query) : first(_mm512_loadu_si512(seen.first + query)) {
    queries = _mm512_add_epi32(_mm512_set1_epi32((int)query),
                               _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  __mmask16 operator()(i64 key) const {
    const __m512i keys = _mm512_set1_epi32((int)key);
    return _mm512_mask_cmple_epi32_mask(_mm512_cmple_epi32_mask(keys, queries), first, keys);
  }
};

// --- forward ---------------------------------------------------------------------------------------------------------

// Turns [W, 32] of FP32 into rows of BF16, times a factor for each row.
void write_rows(const float* turned, const Rows& to, const Problem& p, i64 first, const float* factor) {
  for (i64 half = 0; half < 2; half++)
    for (i64 column = 0; column < p.D; column += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(turned + (column + i) * SIDE + 16 * half);
      turn(r);
      const __mmask16 there = p.D - column >= 16 ? 0xffff : (1u << (p.D - column)) - 1;
      for (i64 i = 0, at = first + 16 * half; i < 16 && at < p.S; i++, at++) {
        const __m512 value = _mm512_mul_ps(as_floats(r[i]), _mm512_set1_ps(factor ? factor[16 * half + i] : 1.0f));
        _mm256_mask_storeu_epi16(to.from + at * to.row + column, there, rounded(value));
      }
    }
}

// All queries of a head of keys, of a row of the batch.
void forward(const Problem& p, i64 unit) {
  const i64 P = p.P(), W = p.W(), b = unit / p.K, group = p.H / p.K;
  Arena arena((2 * P * W + W * SIDE + KEYS * SIDE) * sizeof(bf16) + (KEYS + W) * SIDE * sizeof(float) + P * sizeof(int) + 1024);
  if (!arena) {
    *p.no_memory = true;
    return;
  }
  auto *keys = arena.take<bf16>(P * W), *values = arena.take<bf16>(P * W), *query = arena.take<bf16>(W * SIDE);
  auto *probs = arena.take<bf16>(KEYS * SIDE);
  auto *scores = arena.take<float>(KEYS * SIDE), *out = arena.take<float>(W * SIDE);
  const Seen seen(p, b, arena);
  Multiplier multiplier;
  pack_rows(p.k.at(b, unit % p.K), p, keys);
  pack_turned(p.v.at(b, unit % p.K), p, values);
  const __m512 scale = _mm512_set1_ps(p.scale);
  for (i64 h = unit % p.K * group; h < (unit % p.K + 1) * group; h++)
    for (i64 q = 0; q < p.S; q += SIDE) {
      pack_turned_pairs(p.q.at(b, h), p, q, query);
      const Mask mask[2] = {{seen, q}, {seen, q + 16}};
      alignas(64) __m512 most[2] = {_mm512_set1_ps(NEVER), _mm512_set1_ps(NEVER)};  // of scores so far
      __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      bool first = true;
      for (i64 start = seen.first[q] / SIDE * SIDE; start <= q; start += KEYS) {
        const i64 end = std::min(start + KEYS, q + SIDE);
        for (i64 key = start; key < end; key += SIDE) {
          float* part = scores + (key - start) * SIDE;
          block(rows_of(keys + key * W, W), panel_of(query), W / SIDE, part, SIDE, false);
          if (seen.all(key, q)) continue;
          for (i64 i = 0; i < SIDE; i++)
            for (int half = 0; half < 2; half++) {
              float* at = part + i * SIDE + 16 * half;
              _mm512_store_ps(at, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask[half](key + i), _mm512_load_ps(at)));
            }
        }
        for (int half = 0; half < 2; half++) {
          __m512 now = _mm512_set1_ps(-INFINITY);
          for (i64 i = 0; i < end - start; i++) now = _mm512_max_ps(now, _mm512_load_ps(scores + i * SIDE + 16 * half));
          now = _mm512_max_ps(_mm512_mul_ps(now, scale), most[half]);  // NEVER rather than -inf where nothing was seen
          const __m512 factor = exp_of(_mm512_sub_ps(most[half], now));
          most[half] = now;
          sum[half] = _mm512_mul_ps(sum[half], factor);
          if (!first)
            for (i64 i = 0; i < W; i++) {
              float* at = out + i * SIDE + 16 * half;
              _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
            }
          for (i64 i = 0; i < end - start; i += 2) {
            const float* at = scores + i * SIDE + 16 * half;
            const __m512 a = exp_of(_mm512_sub_ps(scaled(at, scale), now));
            const __m512 c = exp_of(_mm512_sub_ps(scaled(at + SIDE, scale), now));
            sum[half] = _mm512_add_ps(sum[half], _mm512_add_ps(a, c));
            _mm512_store_si512(probs + i * SIDE + SIDE * half, paired(rounded(a), rounded(c)));
          }
        }
        for (i64 d = 0; d < W; d += SIDE)
          block(turned_of(values + start * W + d * SIDE, W), panel_of(probs), (end - start) / SIDE,
                out + d * SIDE, SIDE, !first);
        first = false;
      }
      alignas(64) float factor[SIDE], top[SIDE];
      for (int half = 0; half < 2; half++) {
        _mm512_store_ps(factor + 16 * half, sum[half]);
        _mm512_store_ps(top + 16 * half, most[half]);
      }
      for (i64 i = 0; i < SIDE && q + i < p.S; i++) {
        p.lse[(b * p.H + h) * p.S + q + i] = top[i] + std::log(factor[i]);
        factor[i] = 1.0f / factor[i];
      }
      write_rows(out, p.out.at(b, h), p, q, factor);
    }
}

// --- backward --------------------------------------------------------------------------------------------------------

inline __m512 even_values(__m512i x) { return as_floats(_mm512_slli_epi32(x, 16)); }
inline __m512 odd_values(__m512i x) { return as_floats(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))); }

// [P, W] of FP32 to rows of BF16.
void write(const float* from, const Rows& to, const Problem& p) {
  for (i64 i = 0; i < p.S; i++)
    for (i64 column = 0; column < p.D; column += 16) {
      const __mmask16 there = p.D - column >= 16 ? 0xffff : (1u << (p.D - column)) - 1;
      _mm256_mask_storeu_epi16(to.from + i * to.row + column, there, rounded(_mm512_load_ps(from + i * p.W() + column)));
    }
}

// What a block of 32 keys and 32 queries makes: probabilities and gradients of scores, both ways round.
struct Made {
  bf16 *probs, *dscores;  // [32 keys][BLOCK queries]
  bf16* dscores_pairs;    // [16 pairs of keys][32 queries][2]
};

inline void make(const float* scores, const float* dprobs, const Mask mask[2], bool masked, i64 key, __m512 scale,
                 const float* lse, const float* delta, const Made& to) {
  for (int half = 0; half < 2; half++) {
    const __m512 top = _mm512_loadu_ps(lse + 16 * half), less = _mm512_loadu_ps(delta + 16 * half);
    for (i64 i = 0; i < SIDE; i += 2) {
      __m256i ds[2];
      for (int odd = 0; odd < 2; odd++) {
        const i64 at = (i + odd) * SIDE + 16 * half;
        __m512 p = exp_of(_mm512_sub_ps(scaled(scores + at, scale), top));
        if (masked) p = _mm512_maskz_mov_ps(mask[half](key + i + odd), p);
        const __m512 gradient = _mm512_mul_ps(_mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(dprobs + at), less)), scale);
        ds[odd] = rounded(gradient);
        _mm256_store_si256((__m256i*)(to.probs + (i + odd) * BLOCK + 16 * half), rounded(p));
        _mm256_store_si256((__m256i*)(to.dscores + (i + odd) * BLOCK + 16 * half), ds[odd]);
      }
      _mm512_store_si512(to.dscores_pairs + i * SIDE + SIDE * half, paired(ds[0], ds[1]));
    }
  }
}

inline void make_nothing(const Made& to) {
  for (i64 i = 0; i < SIDE; i++) {
    std::memset(to.probs + i * BLOCK, 0, SIDE * sizeof(bf16));
    std::memset(to.dscores + i * BLOCK, 0, SIDE * sizeof(bf16));
  }
  std::memset(to.dscores_pairs, 0, SIDE * SIDE * sizeof(bf16));
}

// All that depends on a head of keys, of a row of the batch.
void backward(const Problem& p, i64 unit) {
  const i64 P = p.P(), W = p.W(), b = unit / p.K, group = p.H / p.K;
  Arena arena((7 * P * W + 2 * SIDE * BLOCK + BLOCK * BLOCK) * sizeof(bf16) + (3 * P * W + 2 * P) * sizeof(float) +
              P * sizeof(int) + 2048);
  if (!arena) {
    *p.no_memory = true;
    return;
  }
  auto *keys = arena.take<bf16>(P * W), *values = arena.take<bf16>(P * W), *keys_turned = arena.take<bf16>(P * W);
  auto *q_turned = arena.take<bf16>(P * W), *q_pairs = arena.take<bf16>(P * W);
  auto *dout_turned = arena.take<bf16>(P * W), *dout_pairs = arena.take<bf16>(P * W);
  auto *dk = arena.take<float>(P * W), *dv = arena.take<float>(P * W), *dq = arena.take<float>(P * W);
  auto *lse = arena.take<float>(P), *delta = arena.take<float>(P);
  auto *probs = arena.take<bf16>(SIDE * BLOCK), *dscores = arena.take<bf16>(SIDE * BLOCK);
  auto* dscores_pairs = arena.take<bf16>(BLOCK * BLOCK);  // [queries / 32][keys / 2][32][2]
  alignas(64) float s[SIDE * SIDE], dp[SIDE * SIDE];
  const Seen seen(p, b, arena);
  const __m512 scale = _mm512_set1_ps(p.scale);
  Multiplier multiplier;
  pack_rows(p.k.at(b, unit % p.K), p, keys);
  pack_rows(p.v.at(b, unit % p.K), p, values);
  pack_turned(p.k.at(b, unit % p.K), p, keys_turned);
  std::memset(dk, 0, P * W * sizeof(float));
  std::memset(dv, 0, P * W * sizeof(float));
  for (i64 h = unit % p.K * group; h < (unit % p.K + 1) * group; h++) {
    const Rows q = p.q.at(b, h), dout = p.dout.at(b, h), out = p.out.at(b, h);
    for (i64 first = 0; first < P; first += SIDE) {
      pack_turned_pairs(q, p, first, q_turned + first * W);
      pack_turned_pairs(dout, p, first, dout_turned + first * W);
    }
    pack_pairs(q, p, q_pairs);
    pack_pairs(dout, p, dout_pairs);
    std::memset(dq, 0, P * W * sizeof(float));
    for (i64 i = 0; i < P; i++) {
      __m512 sum = _mm512_setzero_ps();
      for (i64 d = 0; i < p.S && d < p.D; d += SIDE) {
        const __m512i x = row(dout.from + i * dout.row + d, p.D - d), y = row(out.from + i * out.row + d, p.D - d);
        sum = _mm512_fmadd_ps(odd_values(x), odd_values(y), _mm512_fmadd_ps(even_values(x), even_values(y), sum));
      }
      delta[i] = _mm512_reduce_add_ps(sum);
      lse[i] = i < p.S ? p.lse[(b * p.H + h) * p.S + i] : INFINITY;  // no probability for what is not there
    }
    for (i64 key_start = 0; key_start < P; key_start += BLOCK)
      for (i64 start = key_start; start < P; start += BLOCK) {
        const i64 key_end = std::min(key_start + BLOCK, P), end = std::min(start + BLOCK, P);
        if (!seen.any(key_end - SIDE, start)) break;  // nor does a later query
        for (i64 key = key_start; key < std::min(key_end, end); key += SIDE) {
          const i64 from = std::max(start, key);
          bool any = false;
          for (i64 query = from; query < end; query += SIDE) {
            const i64 at = query - start;
            const Made made{probs + at, dscores + at,
                            dscores_pairs + at * BLOCK + (key - key_start) * SIDE};
            if (!seen.any(key, query)) {
              make_nothing(made);
              continue;
            }
            any = true;
            block(rows_of(keys + key * W, W), panel_of(q_turned + query * W), W / SIDE, s, SIDE, false);
            block(rows_of(values + key * W, W), panel_of(dout_turned + query * W), W / SIDE, dp, SIDE, false);
            const Mask mask[2] = {{seen, query}, {seen, query + 16}};
            make(s, dp, mask, !seen.all(key, query), key, scale, lse + query, delta + query, made);
          }
          if (!any) continue;
          const Side left_v = rows_of(probs + from - start, BLOCK), left_k = rows_of(dscores + from - start, BLOCK);
          for (i64 d = 0; d < W; d += SIDE) {
            block(left_v, pairs_of(dout_pairs + from * W + 2 * d, W), (end - from) / SIDE, dv + key * W + d, W, true);
            block(left_k, pairs_of(q_pairs + from * W + 2 * d, W), (end - from) / SIDE, dk + key * W + d, W, true);
          }
        }
        for (i64 query = start; query < end; query += SIDE) {
          const i64 steps = (std::min(key_end, query + SIDE) - key_start) / SIDE;
          for (i64 d = 0; d < W; d += SIDE)
            block(turned_of(keys_turned + key_start * W + d * SIDE, W),
                  panel_of(dscores_pairs + (query - start) * BLOCK), steps, dq + query * W + d * SIDE, SIDE, true);
        }
      }
    for (i64 query = 0; query < p.S; query += SIDE) write_rows(dq + query * W, p.dq.at(b, h), p, query, nullptr);
  }
  write(dk, p.dk.at(b, unit % p.K), p);
  write(dv, p.dv.at(b, unit % p.K), p);
}

}  // namespace

#if defined(TILES)
extern "C" int tw_ask_for_tiles() { return ask_for_tiles(); }
#endif

// Work `unit` on each head of keys. Tensors: q, k, v, out, lse, first keys (or null); for backward then dout, dq, dk, dv.
// Strides of all but lse and first keys: batch, head, row. Sizes: B, H, K, S, D. Returns 1 where there is no memory.
static int work(void (*unit)(const Problem&, i64), void* const* tensors, const i64* strides, const i64* sizes, float scale,
                bool back, int threads) {
  std::atomic<bool> no_memory{false};
  Problem p{};
  p.no_memory = &no_memory;
  Rows* const named[] = {&p.q, &p.k, &p.v, &p.out, nullptr, nullptr, &p.dout, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < (back ? 10 : 6); i++)
    if (named[i]) {
      *named[i] = {(bf16*)tensors[i], strides[0], strides[1], strides[2]};
      strides += 3;
    }
  p.lse = (float*)tensors[4], p.first = (const int*)tensors[5];
  p.B = sizes[0], p.H = sizes[1], p.K = sizes[2], p.S = sizes[3], p.D = sizes[4], p.scale = scale;
  run(p, unit, p.B * p.K, p.B * p.H * p.S * p.S, threads);
  return no_memory;
}

extern "C" int tw_attention(void* const* tensors, const i64* strides, const i64* sizes, float scale, int threads) {
  return work(forward, tensors, strides, sizes, scale, false, threads);
}

extern "C" int tw_attention_backward(void* const* tensors, const i64* strides, const i64* sizes, float scale, int threads) {
  return work(backward, tensors, strides, sizes, scale, true, threads);
}
