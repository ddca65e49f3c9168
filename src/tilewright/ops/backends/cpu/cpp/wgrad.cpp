// Weight gradients on AMX tiles: out_MK (+)= dy_NM^T x_NK, operands in BF16, sums and result in FP32.
//
// oneDNN takes dy^T as a transposed left operand and is half as fast there as with a plain one (docs/log.md, 2026-11-20),
// and rounds the result to BF16. Here both operands are packed for the tiles as they are read, and sums stay in FP32.
//
// Compiled when first used (build.py), called through ctypes (wgrad.py).
//
// Legend: N tokens, M out features, K in features; row-major; a unit is a piece of work of one thread.

#include "tiles.h"

namespace {

constexpr i64 TOKENS = 512;  // tokens at a time
constexpr i64 CHUNK = 1024;  // columns of x, and of dy, at a time: packed, 1 MiB each of the second-level cache

// A matrix of tokens, of which `tokens` x `columns` from (`token`, `column`) on are packed now, in panels of SIDE columns.
struct Operand {
  const bf16* from;
  i64 stride, token, tokens, column, columns;
  bf16* packed;
  i64 steps() const { return (tokens + STEP - 1) / STEP; }
  i64 panel() const { return steps() * STEP * SIDE; }
};

struct Product {
  Operand dy, x;
  float* out;
  i64 K;
  bool adds;  // to what `out` holds
};

// 32 columns of two tokens from `token` on; zeros where there are no more.
inline void pair_of_rows(const Operand& o, const bf16* from, i64 token, i64 count, __m512i& low, __m512i& high) {
  const __m512i first = row(from, token < o.tokens ? count : 0);
  interleave(first, row(from + o.stride, token + 1 < o.tokens ? count : 0), low, high);
}

// Packing goes along the rows, all columns of a step: down a panel, memory came at a quarter of the speed.

// A step of x: pairs of tokens side by side, as the right operand wants them.
void pack_x(const Operand& x, i64 step) {
  const i64 token = step * STEP;
  const bf16* from = x.from + (x.token + token) * x.stride + x.column;
  for (i64 pair = 0; pair < PAIRS; pair++, from += 2 * x.stride) {
    bf16* to = x.packed + (step * PAIRS + pair) * 2 * SIDE;
    for (i64 first = 0; first < x.columns; first += SIDE, to += x.panel()) {
      __m512i low, high;
      pair_of_rows(x, from + first, token + 2 * pair, x.columns - first, low, high);
      _mm512_store_si512(to, low);
      _mm512_store_si512(to + SIDE, high);
    }
  }
}

// A step of dy, transposed: of each panel two tiles of 16 columns x STEP tokens.
void pack_dy(const Operand& dy, i64 step) {
  const i64 token = step * STEP;
  const bf16* from = dy.from + (dy.token + token) * dy.stride + dy.column;
  bf16* to = dy.packed + step * STEP * SIDE;
  for (i64 first = 0; first < dy.columns; first += SIDE, to += dy.panel()) {
    __m512i low[16], high[16];
    for (i64 pair = 0; pair < PAIRS; pair++) {
      const bf16* at = from + 2 * pair * dy.stride + first;
      _mm_prefetch((const char*)(at + SIDE), _MM_HINT_T0);
      _mm_prefetch((const char*)(at + dy.stride + SIDE), _MM_HINT_T0);
      pair_of_rows(dy, at, token + 2 * pair, dy.columns - first, low[pair], high[pair]);
    }
    turn(low);
    turn(high);
    store(to, low, STEP);
    store(to + 16 * STEP, high, STEP);
  }
}

// SIDE rows of the result.
void rows_of_out(const Product& p, i64 unit) {
  alignas(64) float edge[SIDE * SIDE];
  const i64 first = unit * SIDE, rows = std::min(SIDE, p.dy.columns - first);
  const Side dy{p.dy.packed + unit * p.dy.panel(), 16 * STEP, SIDE * STEP, 64};
  Side x{p.x.packed, SIDE, STEP * SIDE, 128};
  Multiplier multiplier;
  for (i64 column = 0; column < p.x.columns; column += SIDE, x.from += p.x.panel()) {
    float* out = p.out + (p.dy.column + first) * p.K + p.x.column + column;
    const i64 columns = std::min(SIDE, p.x.columns - column);
    if (rows == SIDE && columns == SIDE) {
      block(dy, x, p.x.steps(), out, p.K, p.adds);
      continue;
    }
    if (p.adds)
      for (i64 r = 0; r < rows; r++) std::memcpy(edge + r * SIDE, out + r * p.K, columns * sizeof(float));
    block(dy, x, p.x.steps(), edge, SIDE, p.adds);
    for (i64 r = 0; r < rows; r++) std::memcpy(out + r * p.K, edge + r * SIDE, columns * sizeof(float));
  }
}

// Columns at a time: CHUNK at most, evened out.
i64 chunk_of(i64 columns) {
  const i64 pieces = std::max<i64>(1, (columns + CHUNK - 1) / CHUNK);
  return whole((columns + pieces - 1) / pieces);
}

}  // namespace

extern "C" int tw_ask_for_tiles() { return ask_for_tiles(); }

// out[M, K] = dy^T x, or += with `adds`. Strides are of rows, in elements. Returns 1 where there is no memory.
extern "C" int tw_weight_gradient(const bf16* dy, i64 dy_stride, const bf16* x, i64 x_stride, float* out, i64 N, i64 M,
                                  i64 K, int adds, int threads) {
  const i64 height = chunk_of(M), width = chunk_of(K);
  auto* packed = (bf16*)scratch.get((height + width) * TOKENS * sizeof(bf16));
  if (!packed) return 1;
  if (N == 0 && !adds) std::memset(out, 0, M * K * sizeof(float));
  for (i64 column = 0; column < K; column += width)
    for (i64 token = 0; token < N; token += TOKENS)
      for (i64 r = 0; r < M; r += height) {
        const i64 tokens = std::min(TOKENS, N - token), columns = std::min(width, K - column), rows = std::min(height, M - r);
        const Product p{{dy, dy_stride, token, tokens, r, rows, packed + width * TOKENS},
                        {x, x_stride, token, tokens, column, columns, packed},
                        out, K, adds || token > 0};
        if (r == 0) run(p.x, pack_x, p.x.steps(), columns * tokens, threads);
        run(p.dy, pack_dy, p.dy.steps(), rows * tokens, threads);
        run(p, rows_of_out, (rows + SIDE - 1) / SIDE, rows * columns * tokens, threads);
      }
  return 0;
}
