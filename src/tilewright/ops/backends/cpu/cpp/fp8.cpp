// Encoding to 8-bit tiles and decoding, at the speed of memory. The bits are those of tilewright.formats.
//
// Compiled when first used (build.py), called through ctypes (fp8.py). Plain C functions, no headers of torch.
//
// All scales are powers of two, 2^k. BF16 stays in 16-bit lanes throughout: scaling subtracts k from the exponent, and
// rounding is integer arithmetic on the bits. Vector types of gcc and clang, no intrinsics: right on any processor.
// Matrices are row-major; a transposed matrix is encoded as the one it is a view of, with the tile transposed.

#include <cstdint>
#include <cstring>

#include "threads.h"

namespace {

constexpr i64 TILE = 128;          // rows or columns that share a scale
constexpr i64 STRIP = 512;         // columns of which 128 rows stay in the second-level cache
constexpr i64 DECODE_STRIP = 4096; // columns whose scales stay in the first-level cache

// Wider than the registers, compilers take vectors apart badly.
#if defined(__AVX512BW__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
typedef int16_t shorts __attribute__((vector_size(WIDTH)));
typedef int32_t ints __attribute__((vector_size(WIDTH)));
typedef float floats __attribute__((vector_size(WIDTH)));
typedef uint8_t short_bytes __attribute__((vector_size(WIDTH / 2)));  // as many as `shorts`
typedef uint8_t int_bytes __attribute__((vector_size(WIDTH / 4)));    // as many as `ints`
constexpr int SHORTS = WIDTH / 2, INTS = WIDTH / 4;

template <class V, class T>
inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class T>
inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}
template <class V>
inline V smaller(V a, V b) {
  return a < b ? a : b;
}
template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

// The largest of `SIZE` bytes of lanes: the halves against each other, again and again.
template <class T, int SIZE>
inline T largest_of(const void* v) {
  if constexpr (SIZE > 16) {
    typedef T half __attribute__((vector_size(SIZE / 2)));
    half low, high;
    std::memcpy(&low, v, SIZE / 2);
    std::memcpy(&high, (const char*)v + SIZE / 2, SIZE / 2);
    const half most = low > high ? low : high;
    return largest_of<T, SIZE / 2>(&most);
  } else {
    T lane[SIZE / sizeof(T)];
    std::memcpy(lane, v, SIZE);
    T most = lane[0];
    for (unsigned i = 1; i < SIZE / sizeof(T); i++) most = lane[i] > most ? lane[i] : most;
    return most;
  }
}
template <class V>
inline bool any(V v) {
  uint64_t word[WIDTH / 8], all = 0;
  std::memcpy(word, &v, WIDTH);
  for (uint64_t each : word) all |= each;
  return all != 0;
}

// 8-bit formats. `least` and `most` bound k such that every scaled code is a normal BF16 number.
struct E4M3 {
  static constexpr int mantissa = 3, bias = 7, max_exponent = 8, least = -117, most = 119;
  static constexpr int first_nan = 0x7F, infinity = -1;
};
struct E5M2 {
  static constexpr int mantissa = 2, bias = 15, max_exponent = 15, least = -110, most = 112;
  static constexpr int first_nan = 0x7D, infinity = 0x7C;
};
constexpr int16_t NAN_CODE = 0x7F;

// BF16 in lanes of 16 bits.
struct Bf16 {
  typedef uint16_t element;
  typedef int16_t lane;
  typedef shorts vector;
  typedef short_bytes bytes;
  static constexpr int lanes = SHORTS, fraction = 7;
  static constexpr lane infinity = 0x7F80, sign_free = 0x7FFF;

  // Codes of `bits` divided by 2^k. `shift` is k << 7.
  template <class F>
  static inline bytes encode(vector bits, vector shift) {
    constexpr int dropped = 7 - F::mantissa, below = 127 - F::bias;  // below: FP32 exponent of the subnormals
    constexpr lane half = (1 << (dropped - 1)) - 1, rebias = below << F::mantissa, tiny = (below + 1) << 7;
    constexpr lane largest = (127 + F::max_exponent) << 7 | 0x60;
    const vector magnitude = bits & sign_free;
    // Half of the smallest number, and less, is zero: only at the least k does a BF16 subnormal come near it.
    vector scaled = (magnitude > 0x40 ? magnitude : magnitude * 0) - shift;
    scaled = smaller(scaled, vector{} + largest);
    const vector odd = (scaled >> dropped) & 1;
    const vector normal = ((scaled + half + odd) >> dropped) - rebias;
    // A subnormal code counts the midpoints passed; every second one is passed when it is met (ties to even).
    vector count = {};
    for (int code = 1; code <= 1 << F::mantissa; code++) count += scaled > midpoint<F>(code);
    vector code = scaled >= tiny ? normal : -count;
    code |= (bits >> 8) & 0x80;
    code = magnitude < infinity ? code : vector{} + NAN_CODE;
    return __builtin_convertvector(code, bytes);
  }
  // The same for 128 numbers in a row: subnormal codes, which are rare and dear, are left out unless there are some.
  template <class F>
  static inline void encode_tile(const element* x, const vector* shift, uint8_t* codes) {
    constexpr int dropped = 7 - F::mantissa, below = 127 - F::bias;
    constexpr lane half = (1 << (dropped - 1)) - 1, rebias = below << F::mantissa, tiny = (below + 1) << 7;
    constexpr lane largest = (127 + F::max_exponent) << 7 | 0x60;
    vector low = {};
    for (int i = 0; i < TILE / lanes; i++) {
      const vector bits = load<vector>(x + i * lanes), magnitude = bits & sign_free;
      const vector scaled = smaller(magnitude - shift[i], vector{} + largest);
      low |= (scaled < tiny) & (magnitude > 0x40);
      vector code = ((scaled + half + ((scaled >> dropped) & 1)) >> dropped) - rebias;
      code = larger(code, vector{});  // zeros
      code = magnitude > 0x40 ? code : vector{};
      code |= (bits >> 8) & 0x80;
      code = magnitude < infinity ? code : vector{} + NAN_CODE;
      store(codes + i * lanes, __builtin_convertvector(code, bytes));
    }
    if (__builtin_expect(any(low), 0))
      for (int i = 0; i < TILE / lanes; i++) store(codes + i * lanes, encode<F>(load<vector>(x + i * lanes), shift[i]));
  }
  // Largest BF16 pattern that rounds to less than `code`, a subnormal or the first normal one.
  template <class F>
  static constexpr lane midpoint(int code) {
    const int halves = 2 * code - 1;  // in units of half the smallest number
    const int top = halves >= 8 ? 3 : halves >= 4 ? 2 : halves >= 2 ? 1 : 0;
    const int exponent = 128 - F::bias - F::mantissa - 1 + top;
    return (lane)((exponent << 7) + ((halves << (7 - top)) & 0x7F) - (code % 2 == 0));
  }
  template <class F>
  static inline vector shift_of(vector amax) {
    constexpr lane top = 127 + F::max_exponent, least = F::least, most = F::most;
    const vector k = ((amax + 0x1F) >> 7) - top;
    return larger(smaller(k, vector{} + most), vector{} + least) << 7;
  }
};

// FP32 in lanes of 32 bits: the arithmetic of formats/encode.py.
struct Fp32 {
  typedef uint32_t element;
  typedef int32_t lane;
  typedef ints vector;
  typedef int_bytes bytes;
  static constexpr int lanes = INTS, fraction = 23;
  static constexpr lane infinity = 0x7F800000, sign_free = 0x7FFFFFFF;

  template <class F>
  static inline bytes encode(vector bits, vector shift) {
    constexpr int dropped = 23 - F::mantissa, below = 127 - F::bias;
    constexpr lane half = (1 << (dropped - 1)) - 1, rebias = below << F::mantissa, tiny = (below + 1) << 23;
    constexpr lane largest = (127 + F::max_exponent) << 23 | 0x600000;
    constexpr lane magic = (128 - F::bias - F::mantissa + 23) << 23;  // where the last place is the smallest number
    const vector finite = (bits & sign_free) < infinity;
    const vector scaled = (vector)((floats)bits * (floats)((127 << 23) - shift));
    vector magnitude = scaled & sign_free;
    magnitude = smaller(magnitude, vector{} + largest);
    const vector odd = (magnitude >> dropped) & 1;
    const vector normal = ((magnitude + half + odd) >> dropped) - rebias;
    const vector subnormal = (vector)((floats)magnitude + (floats)(vector{} + magic)) - magic;
    vector code = magnitude >= tiny ? normal : subnormal;
    code |= (bits >> 24) & 0x80;
    code = finite ? code : vector{} + NAN_CODE;
    return __builtin_convertvector(code, bytes);
  }
  template <class F>
  static inline void encode_tile(const element* x, const vector* shift, uint8_t* codes) {
    for (int i = 0; i < TILE / lanes; i++) store(codes + i * lanes, encode<F>(load<vector>(x + i * lanes), shift[i]));
  }
  template <class F>
  static inline vector shift_of(vector amax) {
    constexpr lane top = 127 + F::max_exponent, least = F::least, most = F::most;
    const vector k = ((amax + 0x1FFFFF) >> 23) - top;
    return larger(smaller(k, vector{} + most), vector{} + least) << 23;
  }
};

template <class X>
inline typename X::vector finite_magnitude(typename X::vector bits) {
  const typename X::vector magnitude = bits & X::sign_free;
  return magnitude < X::infinity ? magnitude : magnitude * 0;
}
template <class X>
inline float scale_inv_of(typename X::lane shift) {
  const int32_t bits = ((int32_t)(shift >> X::fraction) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return scale;
}

// Calls body(offset, count) for vectors of a row; count < lanes only for the last.
template <class X, class Body>
inline void each_vector(i64 size, Body body) {
  i64 at = 0;
  for (; at + X::lanes <= size; at += X::lanes) body(at, X::lanes);
  if (at < size) body(at, (int)(size - at));
}
template <class X>
inline typename X::vector load_some(const typename X::element* from, int count) {
  if (count == X::lanes) return load<typename X::vector>(from);
  typename X::vector v = {};
  std::memcpy(&v, from, count * sizeof(typename X::element));
  return v;
}
inline void store_some(uint8_t* to, const void* codes, int count) { std::memcpy(to, codes, count); }

// The largest magnitudes of up to 128 numbers in a row, lane by lane. Each one's also goes into `seen`, if there.
template <class X>
inline typename X::vector tile_amax(const typename X::element* x, i64 size, typename X::vector* seen) {
  typedef typename X::vector V;
  V amax = {};
  const auto look = [&](V bits, i64 at) {
    const V magnitude = finite_magnitude<X>(bits);
    if (seen) seen[at / X::lanes] = larger(seen[at / X::lanes], magnitude);
    return magnitude;
  };
  if (size == TILE) {
    for (i64 at = 0; at < TILE; at += X::lanes) amax = larger(amax, look(load<V>(x + at), at));
    return amax;
  }
  each_vector<X>(size, [&](i64 at, int n) { amax = larger(amax, look(load_some<X>(x + at, n), at)); });
  return amax;
}

// Codes of a row; `shift` has a vector for every X::lanes numbers.
template <class X, class F>
inline void encode_span(const typename X::element* x, i64 size, const typename X::vector* shift, uint8_t* codes) {
  i64 at = 0;
  for (; at + TILE <= size; at += TILE) X::template encode_tile<F>(x + at, shift + at / X::lanes, codes + at);
  each_vector<X>(size - at, [&](i64 more, int n) {
    const auto code = X::template encode<F>(load_some<X>(x + at + more, n), shift[(at + more) / X::lanes]);
    store_some(codes + at + more, &code, n);
  });
}
template <class X>
struct Shifts {
  typename X::vector of[TILE / X::lanes];  // the same for a whole tile
  explicit Shifts(typename X::vector shift) {
    for (auto& each : of) each = shift;
  }
};

// One tile of 1x128, or the shorter one at the end. Where `seen` is given it follows the columns' largest magnitudes.
template <class X, class F>
inline void encode_row_tile(
    const typename X::element* x, i64 size, uint8_t* codes, float* scale_inv, typename X::vector* seen) {
  typedef typename X::vector V;
  const V amax = tile_amax<X>(x, size, seen);
  const V shift = X::template shift_of<F>(V{} + (largest_of<typename X::lane, WIDTH>(&amax)));
  *scale_inv = scale_inv_of<X>(shift[0]);
  encode_span<X, F>(x, size, Shifts<X>(shift).of, codes);
}

// Rows of one tile's width in tiles of 1x128, with the columns' largest magnitudes held in registers.
template <class X, class F>
inline void encode_row_tiles(
    const typename X::element* x, i64 stride, i64 rows, i64 size, uint8_t* codes, i64 codes_stride, float* scale_inv,
    i64 scale_stride, typename X::vector* amax) {
  typename X::vector seen[TILE / X::lanes];
  std::memcpy(seen, amax, sizeof seen);
  for (i64 row = 0; row < rows; row++)
    encode_row_tile<X, F>(x + row * stride, size, codes + row * codes_stride, scale_inv + row * scale_stride, seen);
  std::memcpy(amax, seen, sizeof seen);
}

// A strip of up to 128 rows and STRIP columns, in tiles of 128x1, from the largest magnitudes of its columns.
template <class X, class F>
void encode_columns(
    const typename X::element* x, i64 stride, i64 rows, i64 cols, uint8_t* codes, i64 codes_stride, float* scale_inv,
    typename X::lane* amax) {
  typedef typename X::vector V;
  for (i64 at = 0; at < cols; at += X::lanes) store(amax + at, X::template shift_of<F>(load<V>(amax + at)));
  for (i64 at = 0; at < cols; at++) scale_inv[at] = scale_inv_of<X>(amax[at]);
  for (i64 row = 0; row < rows; row++)
    encode_span<X, F>(x + row * stride, cols, (const V*)amax, codes + row * codes_stride);
}

struct Encode {
  const void* x;
  i64 rows, cols, stride;     // stride of x in elements; codes and scales are dense
  uint8_t *codes, *column_codes;
  float *scale_inv, *column_scale_inv;
};
inline i64 tiles(i64 size) { return (size + TILE - 1) / TILE; }

template <class X, class F>
void row_unit(const Encode& e, i64 unit) {
  const auto* x = (const typename X::element*)e.x;
  const i64 end = (unit + 1) * 16 < e.rows ? (unit + 1) * 16 : e.rows;
  for (i64 row = unit * 16; row < end; row++) {
    for (i64 tile = 0; tile < tiles(e.cols); tile++) {
      const i64 start = tile * TILE, count = e.cols - start < TILE ? e.cols - start : TILE;
      float* scale = e.scale_inv + row * tiles(e.cols) + tile;
      encode_row_tile<X, F>(x + row * e.stride + start, count, e.codes + row * e.cols + start, scale, nullptr);
    }
  }
}

// 128 rows by a strip of columns; row tiles too where `both`.
template <class X, class F, bool both>
void column_unit(const Encode& e, i64 unit) {
  typedef typename X::vector V;
  const i64 strips = (e.cols + STRIP - 1) / STRIP, block = unit / strips, first = unit % strips * STRIP;
  const i64 rows = e.rows - block * TILE < TILE ? e.rows - block * TILE : TILE;
  const i64 cols = e.cols - first < STRIP ? e.cols - first : STRIP;
  const auto* x = (const typename X::element*)e.x + block * TILE * e.stride + first;
  alignas(64) typename X::lane amax[STRIP];
  std::memset(amax, 0, sizeof amax);
  const i64 corner = block * TILE * e.cols + first;
  for (i64 start = 0; both && start < cols; start += TILE) {
    const i64 count = cols - start < TILE ? cols - start : TILE;
    float* scales = e.scale_inv + block * TILE * tiles(e.cols) + (first + start) / TILE;
    encode_row_tiles<X, F>(
        x + start, e.stride, rows, count, e.codes + corner + start, e.cols, scales, tiles(e.cols), (V*)(amax + start));
  }
  for (i64 row = 0; !both && row < rows; row++) {
    each_vector<X>(cols, [&](i64 at, int n) {
      const V magnitude = finite_magnitude<X>(load_some<X>(x + row * e.stride + at, n));
      store(amax + at, larger(load<V>(amax + at), magnitude));
    });
  }
  float* scales = e.column_scale_inv + block * e.cols + first;
  encode_columns<X, F>(x, e.stride, rows, cols, e.column_codes + corner, e.cols, scales, amax);
}

template <class X, class F>
void block_unit(const Encode& e, i64 unit) {
  typedef typename X::vector V;
  const i64 across = tiles(e.cols), block = unit / across, first = unit % across * TILE;
  const i64 rows = e.rows - block * TILE < TILE ? e.rows - block * TILE : TILE;
  const i64 cols = e.cols - first < TILE ? e.cols - first : TILE;
  const auto* x = (const typename X::element*)e.x + block * TILE * e.stride + first;
  uint8_t* codes = e.codes + block * TILE * e.cols + first;
  V amax = {};
  for (i64 row = 0; row < rows; row++)
    amax = larger(amax, tile_amax<X>(x + row * e.stride, cols, nullptr));
  const V shift = X::template shift_of<F>(V{} + (largest_of<typename X::lane, WIDTH>(&amax)));
  e.scale_inv[unit] = scale_inv_of<X>(shift[0]);
  const Shifts<X> shifts(shift);
  for (i64 row = 0; row < rows; row++)
    encode_span<X, F>(x + row * e.stride, cols, shifts.of, codes + row * e.cols);
}

struct Decode {
  const uint8_t* codes;
  i64 rows, cols, stride;
  const float* scale_inv;
  i64 scale_row, scale_col;    // strides of the scales
  i64 tile_rows, tile_cols;
  uint16_t* out;               // dense
};

template <class F>
inline shorts decode(shorts code, shorts shift) {
  constexpr int dropped = 7 - F::mantissa;
  constexpr int16_t below = (127 - F::bias) << 7;  // exponent of the largest subnormals, in place
  constexpr int16_t step = 1 << 7, smallest = below - (F::mantissa - 1) * step;
  constexpr int16_t infinity = F::infinity, first_nan = F::first_nan;
  const shorts magnitude = code & 0x7F;
  shorts value = (magnitude << dropped) + below;
  if (F::mantissa == 3) value = magnitude >= 8 ? value : ((magnitude - 4) << 5) + below;
  value = magnitude >= 4 ? value : ((magnitude - 2) << 6) + (int16_t)(F::mantissa == 3 ? below - step : below);
  value = magnitude >= 2 ? value : shorts{} + smallest;
  value += shift;
  value = magnitude >= 1 ? value : magnitude;
  if (F::infinity > 0) value = magnitude == infinity ? shorts{} + 0x7F80 : value;
  value = magnitude >= first_nan ? shorts{} + 0x7FC0 : value;
  return value | ((code & 0x80) << 8);
}
inline int16_t shift_of_scale(float scale) {
  int32_t bits;
  std::memcpy(&bits, &scale, 4);
  return (int16_t)(((bits >> 23) - 127) * 128);
}
template <class F>
inline void decode_some(const uint8_t* codes, uint16_t* out, int n, shorts shift) {
  short_bytes code = {};
  if (n == SHORTS) code = load<short_bytes>(codes);
  else std::memcpy(&code, codes, n);
  const shorts value = decode<F>(__builtin_convertvector(code, shorts), shift);
  if (n == SHORTS) store(out, value);
  else std::memcpy(out, &value, 2 * n);
}
template <class F>
void decode_unit(const Decode& d, i64 unit) {
  alignas(64) int16_t shifts[DECODE_STRIP];
  const i64 end = (unit + 1) * TILE < d.rows ? (unit + 1) * TILE : d.rows;
  if (d.tile_cols > 1) {
    for (i64 row = unit * TILE; row < end; row++) {
      const float* scales = d.scale_inv + row / d.tile_rows * d.scale_row;
      for (i64 start = 0; start < d.cols; start += d.tile_cols, scales += d.scale_col) {
        const shorts shift = shorts{} + shift_of_scale(*scales);
        const i64 count = d.cols - start < d.tile_cols ? d.cols - start : d.tile_cols;
        const uint8_t* codes = d.codes + row * d.stride + start;
        uint16_t* out = d.out + row * d.cols + start;
        each_vector<Bf16>(count, [&](i64 at, int n) { decode_some<F>(codes + at, out + at, n, shift); });
      }
    }
    return;
  }
  for (i64 first = 0; first < d.cols; first += DECODE_STRIP) {
    const i64 cols = d.cols - first < DECODE_STRIP ? d.cols - first : DECODE_STRIP;
    i64 known = -1;
    for (i64 row = unit * TILE; row < end; row++) {
      if (row / d.tile_rows != known) {
        known = row / d.tile_rows;
        for (i64 i = 0; i < cols; i++)
          shifts[i] = shift_of_scale(d.scale_inv[known * d.scale_row + (first + i) * d.scale_col]);
      }
      const uint8_t* codes = d.codes + row * d.stride + first;
      uint16_t* out = d.out + row * d.cols + first;
      each_vector<Bf16>(cols, [&](i64 at, int n) {
        decode_some<F>(codes + at, out + at, n, load<shorts>(shifts + at));
      });
    }
  }
}

// 8x8 bytes, rows to columns, by swapping ever smaller squares (little-endian, as all machines here).
inline void turn8(const uint8_t* from, i64 stride, uint8_t* to, i64 to_stride) {
  uint64_t row[8];
  for (int i = 0; i < 8; i++) std::memcpy(row + i, from + i * stride, 8);
  constexpr uint64_t keep[3] = {0x00000000FFFFFFFF, 0x0000FFFF0000FFFF, 0x00FF00FF00FF00FF};
  for (int step = 0, size = 4; step < 3; step++, size /= 2) {
    for (int i = 0; i < 8; i++) {
      if (i & size) continue;
      const uint64_t change = ((row[i] >> (8 * size)) ^ row[i + size]) & keep[step];
      row[i + size] ^= change;
      row[i] ^= change << (8 * size);
    }
  }
  for (int i = 0; i < 8; i++) std::memcpy(to + i * to_stride, row + i, 8);
}

// Columns of the codes are contiguous, and the result's rows shall be. `stride` is between columns, tiles are 128 wide.
constexpr i64 TURNED = 64;  // rows at a time
template <class F>
void decode_turned_unit(const Decode& d, i64 unit) {
  alignas(64) uint8_t turned[TURNED][TILE];
  const i64 first = unit * TURNED, rows = d.rows - first < TURNED ? d.rows - first : TURNED;
  for (i64 start = 0; start < d.cols; start += TILE) {
    const i64 cols = d.cols - start < TILE ? d.cols - start : TILE;
    const uint8_t* codes = d.codes + start * d.stride + first;
    for (i64 col = 0; col < cols; col += 8) {
      for (i64 row = 0; row < rows; row += 8) {
        if (row + 8 <= rows && col + 8 <= cols) {
          turn8(codes + col * d.stride + row, d.stride, &turned[row][col], TILE);
          continue;
        }
        for (i64 r = row; r < rows && r < row + 8; r++)
          for (i64 c = col; c < cols && c < col + 8; c++) turned[r][c] = codes[c * d.stride + r];
      }
    }
    for (i64 row = 0; row < rows; row++) {
      const float scale = d.scale_inv[(first + row) / d.tile_rows * d.scale_row + start / TILE * d.scale_col];
      const shorts shift = shorts{} + shift_of_scale(scale);
      uint16_t* out = d.out + (first + row) * d.cols + start;
      each_vector<Bf16>(cols, [&](i64 at, int n) { decode_some<F>(&turned[row][at], out + at, n, shift); });
    }
  }
}

template <class X, class F>
void encode_as(int kind, const Encode& e, int threads) {
  const i64 strips = tiles(e.rows) * ((e.cols + STRIP - 1) / STRIP), size = e.rows * e.cols;
  if (kind == 0) run(e, row_unit<X, F>, (e.rows + 15) / 16, size, threads);
  if (kind == 1) run(e, column_unit<X, F, false>, strips, size, threads);
  if (kind == 2) run(e, block_unit<X, F>, tiles(e.rows) * tiles(e.cols), size, threads);
  if (kind == 3) run(e, column_unit<X, F, true>, strips, size, threads);
}

}  // namespace

extern "C" {

// kind 0: tiles of 1x128, 1: 128x1, 2: 128x128, 3: 1x128 and 128x1 at once. 1 and 3 write the column arguments.
void tw_encode(
    int kind, int is_fp32, int is_e5m2, const void* x, i64 rows, i64 cols, i64 stride, uint8_t* codes, float* scale_inv,
    uint8_t* column_codes, float* column_scale_inv, int threads) {
  const Encode e{x, rows, cols, stride, codes, column_codes, scale_inv, column_scale_inv};
  if (is_fp32) {
    is_e5m2 ? encode_as<Fp32, E5M2>(kind, e, threads) : encode_as<Fp32, E4M3>(kind, e, threads);
  } else {
    is_e5m2 ? encode_as<Bf16, E5M2>(kind, e, threads) : encode_as<Bf16, E4M3>(kind, e, threads);
  }
}

// Codes to BF16, for scales that tw_is_exact admits. `turned`: see decode_turned_unit.
void tw_decode(
    int is_e5m2, int turned, const uint8_t* codes, i64 rows, i64 cols, i64 stride, const float* scale_inv,
    i64 scale_row, i64 scale_col, i64 tile_rows, i64 tile_cols, uint16_t* out, int threads) {
  const Decode d{codes, rows, cols, stride, scale_inv, scale_row, scale_col, tile_rows, tile_cols, out};
  if (turned) {
    const i64 units = (rows + TURNED - 1) / TURNED;
    run(d, is_e5m2 ? decode_turned_unit<E5M2> : decode_turned_unit<E4M3>, units, rows * cols, threads);
  } else {
    run(d, is_e5m2 ? decode_unit<E5M2> : decode_unit<E4M3>, tiles(rows), rows * cols, threads);
  }
}

// 1 where every scale is a power of two under which all codes are normal BF16 numbers.
int tw_is_exact(int is_e5m2, const float* scale_inv, i64 rows, i64 cols, i64 scale_row, i64 scale_col) {
  const int32_t least = (127 + (is_e5m2 ? E5M2::least : E4M3::least)) << 23;
  const int32_t most = (127 + (is_e5m2 ? E5M2::most : E4M3::most)) << 23;
  int32_t wrong = 0;
  for (i64 row = 0; row < rows; row++) {
    for (i64 col = 0; col < cols; col++) {
      int32_t bits;
      std::memcpy(&bits, scale_inv + row * scale_row + col * scale_col, 4);
      wrong |= (bits & 0x7FFFFF) | (bits < least) | (bits > most);
    }
  }
  return wrong == 0;
}
}
