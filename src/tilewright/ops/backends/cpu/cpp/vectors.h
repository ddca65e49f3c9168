// Vectors of FP32 in GCC's vector types, as wide as the processor has them, and BF16 to and from FP32.

#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;  // bytes of a vector
#else
constexpr int WIDTH = 32;
#endif
constexpr int LANES = WIDTH / 4;

typedef float floats __attribute__((vector_size(WIDTH)));
typedef uint32_t ints __attribute__((vector_size(WIDTH)));

inline floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
template <class Vector>
inline Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, WIDTH);
  return v;
}
inline float sum_of(floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
#endif
}
inline float from_bf16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline floats wide(const float* from) { return load<floats>(from); }
inline floats wide(const uint16_t* from) {
  typedef uint16_t halves __attribute__((vector_size(WIDTH / 2)));
  halves v;
  std::memcpy(&v, from, WIDTH / 2);
  return (floats)(__builtin_convertvector(v, ints) << 16);
}

}  // namespace
