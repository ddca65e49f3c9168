// One layer of a dense decoder with grouped-query attention, for the next token of a few rows: norm, projections, rotary
// positions, attention to the cache, SwiGLU and both sums in one call. Apart they are forty calls, which take longer
// than the weights of a small model are read. A layer may have no attention, or no MLP.
//
// Compiled when first used (build.py), called through ctypes (cached_layer.py). What a call of its own would give out is
// rounded to the format of the weights; sums and what lies between are FP32. A row is computed without the others.

#include <cmath>

#include "few_rows.h"

namespace {

// The cache of a row: [positions, K, d], of which the last position is written here.
struct Past {
  void *keys, *values;
  i64 positions;
};

// As cached_layer.py hands it over, eight bytes each.
struct Layer {
  i64 rows, width, keys, group, dim, hidden;  // N, D, K, query heads of each, d, F; K 0: no attention, F 0: no MLP
  const void *attention_norm, *q, *k, *v, *o, *mlp_norm, *gate, *up, *down;
  const float *cos, *sin;  // [N, d / 2]
  const void* x;           // [N, D]
  void* out;               // [N, D]
  const Past* pasts;       // [N]
};

template <class Format>
float dot(const typename Format::Element* a, const typename Format::Element* b, i64 count) {
  floats sums = {};
  i64 i = 0;
  for (; i + LANES <= count; i += LANES) sums = fused(wide(a + i), wide(b + i), sums);
  float sum = sum_of(sums);
  for (; i < count; i++) sum += Format::widen(a[i]) * Format::widen(b[i]);
  return sum;
}

template <class Format>
struct Token {
  typedef typename Format::Element Element;

  const Layer& layer;
  float eps;
  int threads;
  float* scores;  // [N, K, group, longest]
  float* sums;    // [N, K, group, d]
  i64 longest;
  Element *normed, *q, *k, *v, *heads, *added, *gate, *up;

  i64 query_width() const { return layer.keys * layer.group * layer.dim; }
  i64 key_width() const { return layer.keys * layer.dim; }

  void norm(const void* from, const void* weight) const {
    for (i64 n = 0; n < layer.rows; n++) {
      const Element *x = (const Element*)from + n * layer.width, *w = (const Element*)weight;
      const float factor = 1 / std::sqrt(dot<Format>(x, x, layer.width) / layer.width + eps);
      for (i64 i = 0; i < layer.width; i++)
        normed[n * layer.width + i] = Format::narrow(Format::widen(x[i]) * factor * Format::widen(w[i]));
    }
  }
  int linear(const Element* x, const void* weight, Element* out, i64 outs, i64 width) const {
    return multiply<Format>(RowLinear{weight, width, outs, width, layer.rows, nullptr, 0, nullptr, out, 0}, x, threads);
  }
  // Halves turned against each other, as in Llama.
  void turn(const Element* from, Element* to, i64 heads, i64 row) const {
    const i64 half = layer.dim / 2;
    const float *cos = layer.cos + row * half, *sin = layer.sin + row * half;
    for (i64 h = 0; h < heads; h++, from += layer.dim, to += layer.dim)
      for (i64 i = 0; i < half; i++) {
        const float first = Format::widen(from[i]), second = Format::widen(from[half + i]);
        to[i] = Format::narrow(first * cos[i] - second * sin[i]);
        to[half + i] = Format::narrow(second * cos[i] + first * sin[i]);
      }
  }
  void keep() const {
    for (i64 n = 0; n < layer.rows; n++) {
      const Past& past = layer.pasts[n];
      const i64 last = (past.positions - 1) * key_width();
      turn(q + n * query_width(), q + n * query_width(), layer.keys * layer.group, n);
      turn(k + n * key_width(), (Element*)past.keys + last, layer.keys, n);
      std::memcpy((Element*)past.values + last, v + n * key_width(), key_width() * sizeof(Element));
    }
  }
  // The query heads of one key head of one row.
  static void attend(const Token& t, i64 unit) {
    const Layer& layer = t.layer;
    const i64 group = layer.group, dim = layer.dim, pitch = t.key_width();
    const Past& past = layer.pasts[unit / layer.keys];
    const Element *keys = (const Element*)past.keys + unit % layer.keys * dim, *q = t.q + unit * group * dim;
    const Element* values = (const Element*)past.values + unit % layer.keys * dim;
    float *scores = t.scores + unit * group * t.longest, *sums = t.sums + unit * group * dim;
    const float scale = 1 / std::sqrt((float)dim);
    for (i64 p = 0; p < past.positions; p++)
      for (i64 g = 0; g < group; g++) scores[g * t.longest + p] = scale * dot<Format>(q + g * dim, keys + p * pitch, dim);
    for (i64 g = 0; g < group; g++) {
      float *row = scores + g * t.longest, most = row[0], total = 0;
      for (i64 p = 1; p < past.positions; p++) most = row[p] > most ? row[p] : most;
      for (i64 p = 0; p < past.positions; p++) total += row[p] = std::exp(row[p] - most);
      for (i64 p = 0; p < past.positions; p++) row[p] /= total;
    }
    for (i64 i = 0; i < group * dim; i++) sums[i] = 0;
    for (i64 p = 0; p < past.positions; p++)
      for (i64 g = 0; g < group; g++) {
        const float prob = scores[g * t.longest + p];
        float* __restrict to = sums + g * dim;
        const Element* __restrict value = values + p * pitch;
        for (i64 i = 0; i < dim; i++) to[i] += prob * Format::widen(value[i]);
      }
    for (i64 i = 0; i < group * dim; i++) t.heads[unit * group * dim + i] = Format::narrow(sums[i]);
  }
  void swiglu() const {
    for (i64 i = 0; i < layer.rows * layer.hidden; i++) {
      const float x = Format::widen(gate[i]);
      gate[i] = Format::narrow(x / (1 + std::exp(-x)) * Format::widen(up[i]));
    }
  }
  void add(const void* stream) const {
    const Element* x = (const Element*)stream;
    for (i64 i = 0; i < layer.rows * layer.width; i++)
      ((Element*)layer.out)[i] = Format::narrow(Format::widen(x[i]) + Format::widen(added[i]));
  }
  int attention() const {
    const i64 D = layer.width, units = layer.rows * layer.keys;
    norm(layer.x, layer.attention_norm);
    if (linear(normed, layer.q, q, query_width(), D) || linear(normed, layer.k, k, key_width(), D) ||
        linear(normed, layer.v, v, key_width(), D))
      return 1;
    keep();
    run(*this, attend, units, units * layer.group * longest * layer.dim * 2, threads);
    if (linear(heads, layer.o, added, D, query_width())) return 1;
    add(layer.x);
    return 0;
  }
  int mlp(const void* stream) const {
    const i64 D = layer.width, F = layer.hidden;
    norm(stream, layer.mlp_norm);
    if (linear(normed, layer.gate, gate, F, D) || linear(normed, layer.up, up, F, D)) return 1;
    swiglu();
    if (linear(gate, layer.down, added, D, F)) return 1;
    add(stream);
    return 0;
  }
  int run_all() const {
    if (layer.keys && attention()) return 1;
    return layer.hidden ? mlp(layer.keys ? layer.out : layer.x) : 0;
  }
};

template <class Format>
int compute(const Layer& layer, float eps, int threads) {
  typedef typename Format::Element Element;
  i64 longest = 0;
  for (i64 n = 0; layer.keys && n < layer.rows; n++)
    longest = layer.pasts[n].positions > longest ? layer.pasts[n].positions : longest;
  const i64 N = layer.rows, heads = layer.keys * layer.group;
  const i64 parts[] = {layer.width,       heads * layer.dim, layer.keys * layer.dim, layer.keys * layer.dim,
                       heads * layer.dim, layer.width,       layer.hidden,           layer.hidden};
  i64 elements = 0;
  for (i64 part : parts) elements += N * part;
  float* scores = new (std::nothrow) float[N * heads * (longest + layer.dim)];
  Element* memory = new (std::nothrow) Element[elements];
  int failed = !scores || !memory;
  if (!failed) {
    Element* at[8];
    Element* next = memory;
    for (int i = 0; i < 8; i++) {
      at[i] = next;
      next += N * parts[i];
    }
    failed = Token<Format>{layer, eps,   threads, scores, scores + N * heads * longest, longest, at[0], at[1],
                           at[2], at[3], at[4],   at[5],  at[6],                        at[7]}
                 .run_all();
  }
  delete[] memory;
  delete[] scores;
  return failed;
}

}  // namespace

// All in BF16, or all in FP32 but angles. Not 0: no memory; keys of the new position may be written then.
extern "C" int tw_cached_layer(int bf16, const void* layer, float eps, int threads) {
  const Layer& l = *(const Layer*)layer;
  if (l.rows < 1 || l.rows > MOST_ROWS || !(l.keys || l.hidden)) return 2;
  return bf16 ? compute<Bf16>(l, eps, threads) : compute<Fp32>(l, eps, threads);
}
