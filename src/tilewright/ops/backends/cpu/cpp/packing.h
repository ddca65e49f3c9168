// Packing of BF16 operands for products of blocks (tiles.h, pairs.h), and the memory that it goes to.
//
// A step of a product takes, per tile, 16 rows x 32 values of the left operand and, of the right one, 32 values x 16
// columns with the values in pairs: [16 pairs][16 columns][2].

#pragma once
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "threads.h"

namespace {

typedef uint16_t bf16;
constexpr i64 SIDE = 32;         // of a block of results: 2 x 2 tiles of 16 x 16 sums
constexpr i64 PAIRS = 16;        // pairs of values that a tile is summed over in a step
constexpr i64 STEP = 2 * PAIRS;  // values

inline i64 whole(i64 size) { return (size + SIDE - 1) / SIDE * SIDE; }

// A packed operand: its first tile, elements from there to the next tile (of rows or columns) and to the next step,
// bytes between the rows of a tile.
struct Side {
  const bf16* from;
  i64 tile, step, stride;
};

// 32 values; zeros beyond the first `count`.
inline __m512i row(const bf16* from, i64 count) {
  if (count >= SIDE) return _mm512_loadu_si512(from);
  return count <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

// Two rows of 32 values -> 32 pairs, 16 in each result.
inline void interleave(__m512i first, __m512i second, __m512i& low, __m512i& high) {
  alignas(64) static const uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                               8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i from = _mm512_load_si512(LOW);
  low = _mm512_permutex2var_epi16(first, from, second);
  high = _mm512_permutex2var_epi16(first, _mm512_add_epi16(from, _mm512_set1_epi16(16)), second);
}

// 16 x 16 values of 32 bits, turned.
inline void turn(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline void store(bf16* to, const __m512i rows[16], i64 stride) {
  for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * stride, rows[i]);
}

// Memory of a thread, kept between calls and outside of malloc's heap, where blocks of a MiB would come and go many times a
// step among the tensors. It grows to what the largest call needs.
class Scratch {
  void* from = nullptr;
  i64 size = 0;

 public:
  ~Scratch() { release(); }
  void release() {
    if (from) munmap(from, size);
    from = nullptr, size = 0;
  }
  // At least `bytes`, of a page's alignment; null where there is no memory.
  char* get(i64 bytes) {
    if (bytes > size) {
      release();
      void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (found == MAP_FAILED) return nullptr;
      from = found, size = bytes;
    }
    return (char*)from;
  }
};
thread_local Scratch scratch;

}  // namespace
