#include "isa.h"

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "cache.h"
#include "simd.h"

namespace trtllm_lite {
namespace {

constexpr int64_t kTile = 64;      // keys at a time for many queries
constexpr int64_t kSplit = 256;    // keys of one part for few queries; parts are merged
constexpr int64_t kRows = 192;     // queries (heads of a group x tokens) that share packed keys
constexpr int kHeight = 6;         // rows of a register tile, 4 vectors wide
constexpr float kNone = -std::numeric_limits<float>::infinity();

using Floats = std::unique_ptr<float[], void (*)(void*)>;

// Grows and stays: threads of a pool live as long as their sessions.
float* thread_buffer(size_t floats) {
  thread_local Floats buffer(nullptr, std::free);
  thread_local size_t size = 0;
  if (floats > size) {
    size = (floats + 4095) / 4096 * 4096;
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, size * sizeof(float))));
  }
  return buffer.get();
}

// One head of one token, rotated by its position and scaled: pairs (i, i + half).
void rotate_halves(const float* __restrict x, const float* __restrict cos,
                   const float* __restrict sin, int64_t half, float factor, float* __restrict out) {
  for (int64_t i = 0; i < half; ++i) {
    out[i] = (x[i] * cos[i] - x[i + half] * sin[i]) * factor;
    out[i + half] = (x[i + half] * cos[i] + x[i] * sin[i]) * factor;
  }
}

// The same for pairs (2i, 2i + 1).
void rotate_neighbours(const float* __restrict x, const float* __restrict cos,
                       const float* __restrict sin, int64_t half, float factor,
                       float* __restrict out) {
  for (int64_t i = 0; i < half; ++i) {
    out[2 * i] = (x[2 * i] * cos[i] - x[2 * i + 1] * sin[i]) * factor;
    out[2 * i + 1] = (x[2 * i + 1] * cos[i] + x[2 * i] * sin[i]) * factor;
  }
}

void rotate(const Attention& a, const float* x, int64_t position, float factor, float* out) {
  const int64_t half = a.rotary_dim / 2;
  const float *cos = a.cos + position * half, *sin = a.sin + position * half;
  (a.interleaved ? rotate_neighbours : rotate_halves)(x, cos, sin, half, factor, out);
  for (int64_t i = a.rotary_dim; i < a.dim; ++i) out[i] = x[i] * factor;
}

template <class Cache>
typename Cache::Element* cache_row(const Attention& a, void* cache, int64_t b, int64_t head,
                                   int64_t token) {
  auto* base = static_cast<typename Cache::Element*>(cache);
  return base + ((b * a.kv_heads + head) * a.capacity + token) * a.dim;
}

template <class Cache>
void append(const Attention& a, int64_t b, int64_t s, float* scratch) {
  const int64_t position = a.past(b) + s;
  const float* k = a.k + (b * a.seq + s) * a.kv_stride;
  const float* v = a.v + (b * a.seq + s) * a.kv_stride;
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    const float* key = k + h * a.dim;
    if (a.rotary_dim > 0) {
      rotate(a, key, position, 1.0f, scratch);
      key = scratch;
    }
    auto* k_row = cache_row<Cache>(a, a.k_cache, b, h, position);
    auto* v_row = cache_row<Cache>(a, a.v_cache, b, h, position);
    for (int64_t i = 0; i < a.dim; i += 16) {
      const int64_t channel = h * a.dim + i;
      Cache::store(k_row + i, _mm512_loadu_ps(key + i), a.k_scale + channel);
      Cache::store(v_row + i, _mm512_loadu_ps(v + h * a.dim + i), a.v_scale + channel);
    }
  }
}

// Queries, rotated and scaled: [batch, seq, heads, dim].
float* query_row(const Attention& a, float* queries, int64_t b, int64_t s, int64_t h) {
  return queries + ((b * a.seq + s) * a.heads + h) * a.dim;
}

void prepare_queries(const Attention& a, int64_t b, int64_t s, float* queries) {
  const float* q = a.q + (b * a.seq + s) * a.q_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    rotate(a, q + h * a.dim, a.past(b) + s, a.scale, query_row(a, queries, b, s, h));
  }
}

__m512 capped(__m512 score, float softcap) {
  if (softcap == 0.0f) return score;
  const __m512 cap = _mm512_set1_ps(softcap);
  return _mm512_mul_ps(cap, tanh_ps(_mm512_div_ps(score, cap)));
}

// First key that a query at `position` sees.
int64_t first_key(const Attention& a, int64_t position) {
  return a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
}

// Running maximum and sum of one row's softmax.
struct Softmax {
  float largest = kNone;
  float sum = 0.0f;
};

// Takes a tile's largest score into the state. Returns what earlier results are to be multiplied
// with; 1 in most tiles, for which no exponential is computed.
float raise(Softmax& state, float largest) {
  const float before = state.largest;
  if (largest <= before) return 1.0f;
  state.largest = largest;
  const float factor = before == kNone ? 0.0f : std::exp(before - largest);
  state.sum *= factor;
  return factor;
}

// The weights of a whole tile that the row sees from end to end.
float weigh_all(float* scores, Softmax& state) {
  __m512 s[kTile / 16];
  for (int i = 0; i < kTile / 16; ++i) s[i] = _mm512_loadu_ps(scores + 16 * i);
  const __m512 top = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
  const float factor = raise(state, _mm512_reduce_max_ps(top));
  const __m512 base = _mm512_set1_ps(state.largest);
  for (int i = 0; i < kTile / 16; ++i) {
    s[i] = exp_ps(_mm512_sub_ps(s[i], base));
    _mm512_storeu_ps(scores + 16 * i, s[i]);
  }
  state.sum += _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(s[0], s[1]),
                                                  _mm512_add_ps(s[2], s[3])));
  return factor;
}

// Scores of keys [0, keys) of a tile that starts at key `start` become weights, in place, for a row
// that sees [from, to]. Returns what the row's earlier results are to be multiplied with.
float weigh(const Attention& a, float* scores, int64_t keys, int64_t start, int64_t from,
            int64_t to, Softmax& state) {
  __m512 top = _mm512_set1_ps(kNone);
  for (int64_t i = 0; i < keys; i += 16) {
    const __mmask16 seen = lanes(to + 1 - start - i) & ~lanes(from - start - i) & lanes(keys - i);
    __m512 s = capped(_mm512_loadu_ps(scores + i), a.softcap);
    s = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kNone), s);
    _mm512_storeu_ps(scores + i, s);
    top = _mm512_max_ps(top, s);
  }
  const float factor = raise(state, _mm512_reduce_max_ps(top));
  if (state.largest == kNone) {
    std::memset(scores, 0, ((keys + 15) / 16 * 16) * sizeof(float));
    return 1.0f;
  }
  const __m512 base = _mm512_set1_ps(state.largest);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < keys; i += 16) {
    const __m512 p = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i), base));
    _mm512_storeu_ps(scores + i, p);
    sum = _mm512_add_ps(sum, p);
  }
  state.sum += _mm512_reduce_add_ps(sum);
  return factor;
}

// ---- Few queries: keys are read as they lie, 256 to a part -------------------------------------

// Sums of sixteen vectors, in order, as one vector.
__m512 sums(const __m512* x) {
  __m512 y[8];
  for (int i = 0; i < 8; ++i) {
    const __m512 lo = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    const __m512 hi = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    y[i] = _mm512_add_ps(lo, hi);  // even lanes of vector 2i, odd lanes of 2i+1
  }
  __m512 z[4];
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    z[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // z[i] holds four partial sums, one a 128-bit lane, of vectors 4i .. 4i+3.
  const __m512 u = _mm512_add_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x88),
                                 _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
  const __m512 w = _mm512_add_ps(_mm512_shuffle_f32x4(z[2], z[3], 0x88),
                                 _mm512_shuffle_f32x4(z[2], z[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(u, w, 0x88), _mm512_shuffle_f32x4(u, w, 0xdd));
}

// Scores of `count` keys, for heads of `vectors` x 16 elements (0: any size).
template <class Cache, int vectors>
void dots(int64_t dim, const float* q, const typename Cache::Element* keys, const float* scale,
          int64_t count, float* scores) {
  __m512 query[vectors > 0 ? vectors : 1];
  for (int j = 0; j < vectors; ++j) query[j] = _mm512_loadu_ps(q + 16 * j);
  for (int64_t t = 0; t < count; t += 16) {
    __m512 part[16];
    const int64_t here = std::min<int64_t>(16, count - t);
    for (int64_t i = 0; i < 16; ++i) part[i] = _mm512_setzero_ps();
    for (int64_t i = 0; i < here; ++i) {
      const auto* row = keys + (t + i) * dim;
      __m512 sum = _mm512_setzero_ps();
      for (int j = 0; j < vectors; ++j) {
        sum = _mm512_fmadd_ps(query[j], Cache::load(row + 16 * j, scale + 16 * j), sum);
      }
      for (int64_t d = 16 * vectors; d < dim; d += 16) {
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(q + d), Cache::load(row + d, scale + d), sum);
      }
      part[i] = sum;
    }
    _mm512_storeu_ps(scores + t, sums(part));
  }
}

template <class Cache>
void dot_scores(const Attention& a, const float* q, const typename Cache::Element* keys,
                const float* scale, int64_t count, float* scores) {
  if (a.dim == 64) return dots<Cache, 4>(a.dim, q, keys, scale, count, scores);
  if (a.dim == 128) return dots<Cache, 8>(a.dim, q, keys, scale, count, scores);
  return dots<Cache, 0>(a.dim, q, keys, scale, count, scores);
}

// out [16 * wide] = sum over keys of weight x value, for `rows` rows at once.
template <class Cache, int rows, int wide>
void mix(const float* weights, int64_t count, const typename Cache::Element* values, int64_t stride,
         const float* scale, float* const* out, int64_t at) {
  __m512 sum[rows][wide];
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < wide; ++j) sum[r][j] = _mm512_setzero_ps();
  }
  for (int64_t t = 0; t < count; ++t) {
    const auto* row = values + t * stride + at;
    __m512 v[wide];
    for (int j = 0; j < wide; ++j) v[j] = Cache::load(row + 16 * j, scale + at + 16 * j);
    for (int r = 0; r < rows; ++r) {
      const __m512 weight = _mm512_set1_ps(weights[r * kSplit + t]);
      for (int j = 0; j < wide; ++j) sum[r][j] = _mm512_fmadd_ps(weight, v[j], sum[r][j]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < wide; ++j) _mm512_storeu_ps(out[r] + at + 16 * j, sum[r][j]);
  }
}

template <class Cache, int rows>
void mix_rows(int64_t dim, const float* weights, int64_t count,
              const typename Cache::Element* values, const float* scale, float* const* out) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) mix<Cache, rows, 4>(weights, count, values, dim, scale, out, d);
  for (; d < dim; d += 16) mix<Cache, rows, 1>(weights, count, values, dim, scale, out, d);
}

template <class Cache>
void mix_values(int64_t rows, int64_t dim, const float* weights, int64_t count,
                const typename Cache::Element* values, const float* scale, float* const* out) {
  switch (rows) {
    case 1: return mix_rows<Cache, 1>(dim, weights, count, values, scale, out);
    case 2: return mix_rows<Cache, 2>(dim, weights, count, values, scale, out);
    case 3: return mix_rows<Cache, 3>(dim, weights, count, values, scale, out);
    case 4: return mix_rows<Cache, 4>(dim, weights, count, values, scale, out);
    case 5: return mix_rows<Cache, 5>(dim, weights, count, values, scale, out);
    default: return mix_rows<Cache, 6>(dim, weights, count, values, scale, out);
  }
}

// Results of the parts of one call: for each (b, s, h, part) largest, sum and dim values.
struct Parts {
  float* base;
  int64_t count;  // parts of the longest row
  int64_t dim;

  float* at(const Attention& a, int64_t b, int64_t s, int64_t h, int64_t part) const {
    return base + (((b * a.seq + s) * a.heads + h) * count + part) * (dim + 16);
  }
};

int64_t longest(const Attention& a) {
  int64_t most = 0;
  for (int64_t b = 0; b < a.batch; ++b) most = std::max(most, int64_t(a.last[b]) + 1);
  return most;
}

int64_t parts_of(const Attention& a) {
  return std::max<int64_t>(1, (longest(a) + kSplit - 1) / kSplit);
}

template <class Cache>
void few_rows(const Attention& a, float* queries, const Parts& parts, int64_t b, int64_t head,
              int64_t part) {
  const int64_t start = part * kSplit, past = a.past(b), tokens = a.tokens(b);
  const int64_t end = std::min(start + kSplit, past + tokens), group = a.group();
  if (start >= end) return;
  if (first_key(a, past) >= end) {  // the window has left this part behind
    for (int64_t r = 0; r < tokens * group; ++r) {
      parts.at(a, b, r / group, head * group + r % group, part)[0] = kNone;
    }
    return;
  }
  const float* k_scale = a.k_scale + head * a.dim;
  const float* v_scale = a.v_scale + head * a.dim;
  const auto* keys = cache_row<Cache>(a, a.k_cache, b, head, start);
  const auto* values = cache_row<Cache>(a, a.v_cache, b, head, start);
  alignas(64) float weights[kHeight][kSplit];
  const int64_t rows = tokens * group;
  for (int64_t top = 0; top < rows; top += kHeight) {
    const int64_t height = std::min<int64_t>(kHeight, rows - top);
    float* out[kHeight];
    int64_t seen = 0;
    for (int64_t r = 0; r < height; ++r) {
      const int64_t s = (top + r) / group, h = head * group + (top + r) % group;
      const int64_t position = past + s;
      const int64_t count = std::clamp<int64_t>(position + 1 - start, 0, end - start);
      float* result = parts.at(a, b, s, h, part);
      Softmax state;
      dot_scores<Cache>(a, query_row(a, queries, b, s, h), keys, k_scale, count, weights[r]);
      if (count > 0) {
        weigh(a, weights[r], count, start, first_key(a, position), position, state);
      }
      const int64_t filled = (count + 15) / 16 * 16;
      std::memset(weights[r] + filled, 0, (kSplit - filled) * sizeof(float));
      result[0] = state.largest;
      result[1] = state.sum;
      out[r] = result + 16;
      seen = std::max(seen, count);
    }
    mix_values<Cache>(height, a.dim, weights[0], seen, values, v_scale, out);
  }
}

// The parts of one (b, s, h), and the sink, become the result.
void merge(const Attention& a, const Parts& parts, int64_t b, int64_t s, int64_t h) {
  float* out = a.out + (b * a.seq + s) * a.heads * a.dim + h * a.dim;
  const int64_t count = (a.past(b) + s) / kSplit + 1;
  Softmax state;
  if (a.sinks != nullptr) state = {a.sinks[h], 1.0f};
  for (int64_t p = 0; p < count; ++p) {
    state.largest = std::max(state.largest, parts.at(a, b, s, h, p)[0]);
  }
  if (a.sinks != nullptr) state.sum = std::exp(a.sinks[h] - state.largest);
  for (int64_t p = 0; p < count; ++p) {
    const float* part = parts.at(a, b, s, h, p);
    if (part[0] != kNone) state.sum += part[1] * std::exp(part[0] - state.largest);
  }
  for (int64_t d = 0; d < a.dim; d += 16) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t p = 0; p < count; ++p) {
      const float* part = parts.at(a, b, s, h, p);
      if (part[0] == kNone) continue;
      const __m512 factor = _mm512_set1_ps(std::exp(part[0] - state.largest) / state.sum);
      sum = _mm512_fmadd_ps(factor, _mm512_loadu_ps(part + 16 + d), sum);
    }
    _mm512_storeu_ps(out + d, sum);
  }
}

// ---- Many queries: keys are packed by tiles, scores and results are matrix products ------------

// C [rows, 16 * wide] = factor x C + A [rows, depth] B [depth, 16 * wide].
template <int rows, int wide>
void product(const float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t depth,
             float* c, int64_t c_stride, const float* factor) {
  __m512 sum[rows][wide];
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < wide; ++j) {
      sum[r][j] = factor == nullptr ? _mm512_setzero_ps()
                                    : _mm512_mul_ps(_mm512_set1_ps(factor[r]),
                                                    _mm512_loadu_ps(c + r * c_stride + 16 * j));
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    __m512 right[wide];
    for (int j = 0; j < wide; ++j) right[j] = _mm512_loadu_ps(y + i * y_stride + 16 * j);
    for (int r = 0; r < rows; ++r) {
      const __m512 left = _mm512_set1_ps(x[r * x_stride + i]);
      for (int j = 0; j < wide; ++j) sum[r][j] = _mm512_fmadd_ps(left, right[j], sum[r][j]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < wide; ++j) _mm512_storeu_ps(c + r * c_stride + 16 * j, sum[r][j]);
  }
}

using Product = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t,
                         const float*);
template <int rows>
constexpr Product kWide[4] = {product<rows, 1>, product<rows, 2>, product<rows, 3>,
                              product<rows, 4>};
constexpr const Product* kProducts[kHeight] = {kWide<1>, kWide<2>, kWide<3>,
                                               kWide<4>, kWide<5>, kWide<6>};

void transpose16(const __m512* in, float* out, int64_t stride) {
  __m512 t[16], u[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(in[2 * i], in[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(in[2 * i], in[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const __m512d lo = _mm512_castps_pd(t[4 * i + j]), hi = _mm512_castps_pd(t[4 * i + 2 + j]);
      u[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
      u[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
    }
  }
  // u[4i + c] holds column c + 4 lane of rows 4i .. 4i+3, one 128-bit lane each.
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    _mm512_storeu_ps(out + c * stride, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(out + (8 + c) * stride, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(out + (4 + c) * stride, _mm512_shuffle_f32x4(d, e, 0x88));
    _mm512_storeu_ps(out + (12 + c) * stride, _mm512_shuffle_f32x4(d, e, 0xdd));
  }
}

// Keys [count, dim] -> [dim, kTile], zeros where there is no key.
template <class Cache>
void pack_keys(const Attention& a, const typename Cache::Element* keys, const float* scale,
               int64_t count, float* out) {
  for (int64_t t = 0; t < kTile; t += 16) {
    for (int64_t d = 0; d < a.dim; d += 16) {
      __m512 rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        rows[i] = t + i < count ? Cache::load(keys + (t + i) * a.dim + d, scale + d)
                                : _mm512_setzero_ps();
      }
      transpose16(rows, out + d * kTile + t, kTile);
    }
  }
}

template <class Cache>
const float* plain_values(const Attention& a, const typename Cache::Element* values,
                          const float* scale, int64_t count, float* room) {
  if constexpr (sizeof(typename Cache::Element) == sizeof(float)) return values;
  for (int64_t i = 0; i < count * a.dim; i += 16) {
    _mm512_storeu_ps(room + i, Cache::load(values + i, scale + i % a.dim));
  }
  return room;
}

// Tokens of one unit of work, so that all heads of a group together have about kRows queries.
int64_t unit_tokens(const Attention& a) { return std::max<int64_t>(8, kRows / a.group()); }

template <class Cache>
void many_rows(const Attention& a, float* queries, int64_t b, int64_t head, int64_t first) {
  const int64_t group = a.group(), dim = a.dim, past = a.past(b);
  const int64_t tokens = std::min(unit_tokens(a), a.tokens(b) - first);
  if (tokens <= 0) return;
  const int64_t rows = tokens * group;
  float* q = thread_buffer(rows * (dim * 2 + kTile + 3) + kTile * dim * 2);
  float* out = q + rows * dim;
  float* scores = out + rows * dim;
  float* packed = scores + rows * kTile;
  float* room = packed + kTile * dim;
  auto* state = reinterpret_cast<Softmax*>(room + kTile * dim);
  float* factor = reinterpret_cast<float*>(state + rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t h = head * group + r % group;
    std::memcpy(q + r * dim, query_row(a, queries, b, first + r / group, h), dim * sizeof(float));
    state[r] = a.sinks != nullptr ? Softmax{a.sinks[h], 1.0f} : Softmax{};
  }
  std::memset(out, 0, rows * dim * sizeof(float));
  const int64_t newest = past + first + tokens - 1;
  const int64_t oldest = first_key(a, past + first) / kTile * kTile;
  for (int64_t start = oldest; start <= newest; start += kTile) {
    const int64_t keys = std::min(kTile, newest + 1 - start);
    const float* k_scale = a.k_scale + head * dim;
    const float* v_scale = a.v_scale + head * dim;
    pack_keys<Cache>(a, cache_row<Cache>(a, a.k_cache, b, head, start), k_scale, keys, packed);
    const float* values = plain_values<Cache>(a, cache_row<Cache>(a, a.v_cache, b, head, start),
                                              v_scale, keys, room);
    // Three passes over the rows, so that keys and values each stay in the first-level cache.
    const int64_t skipped = std::max<int64_t>(0, start - past - first) * group / kHeight * kHeight;
    for (int64_t top = skipped; top < rows; top += kHeight) {
      const int64_t height = std::min<int64_t>(kHeight, rows - top);
      kProducts[height - 1][3](q + top * dim, dim, packed, kTile, dim, scores + top * kTile, kTile,
                               nullptr);
    }
    for (int64_t r = skipped; r < rows; ++r) {
      const int64_t position = past + first + r / group, from = first_key(a, position);
      const bool whole = keys == kTile && position >= start + kTile - 1 && from <= start;
      factor[r] = whole && a.softcap == 0.0f
                      ? weigh_all(scores + r * kTile, state[r])
                      : weigh(a, scores + r * kTile, keys, start, from, position, state[r]);
    }
    for (int64_t top = skipped; top < rows; top += kHeight) {
      const int64_t height = std::min<int64_t>(kHeight, rows - top);
      const int64_t last = past + first + (top + height - 1) / group;
      const int64_t seen = std::min(keys, last + 1 - start);
      for (int64_t d = 0; d < dim && seen > 0; d += 64) {
        const int64_t wide = std::min<int64_t>(4, (dim - d) / 16);
        kProducts[height - 1][wide - 1](scores + top * kTile, kTile, values + d, dim, seen,
                                        out + top * dim + d, dim, factor + top);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* to = a.out + (b * a.seq + first + r / group) * a.heads * dim;
    to += (head * group + r % group) * dim;
    const __m512 inverse = _mm512_set1_ps(1.0f / state[r].sum);
    for (int64_t d = 0; d < dim; d += 16) {
      _mm512_storeu_ps(to + d, _mm512_mul_ps(inverse, _mm512_loadu_ps(out + r * dim + d)));
    }
  }
}

// ---- The call -----------------------------------------------------------------------------------

constexpr size_t aligned(size_t floats) { return (floats + 15) / 16 * 16; }

size_t query_floats(const Attention& a) { return aligned(a.batch * a.seq * a.heads * a.dim); }

// Below this many products of a query and a key, waking other threads costs more than it gives.
constexpr int64_t kAlone = 4096;
constexpr int64_t kChunks = 16;

template <class Cache>
void run(const Attention& a, float* queries, Parallel& parallel) {
  const int64_t all = a.batch * a.seq;
  const int64_t chunks = std::min<int64_t>(kChunks, (all + 7) / 8);
  parallel.run(chunks, [&](size_t c) {
    for (int64_t i = all * c / chunks; i < int64_t(all * (c + 1) / chunks); ++i) {
      const int64_t b = i / a.seq, s = i % a.seq;
      if (s < a.tokens(b)) {
        append<Cache>(a, b, s, thread_buffer(a.dim));
        prepare_queries(a, b, s, queries);
      } else {
        std::memset(a.out + i * a.heads * a.dim, 0, a.heads * a.dim * sizeof(float));
      }
    }
  });
  if (a.seq > kFewTokens) {
    const int64_t each = unit_tokens(a), units = (a.seq + each - 1) / each;
    parallel.run(a.batch * a.kv_heads * units, [&](size_t i) {
      // The last tokens of a row have the most keys: they go first.
      const int64_t unit = units - 1 - int64_t(i) / (a.batch * a.kv_heads);
      const int64_t rest = int64_t(i) % (a.batch * a.kv_heads);
      many_rows<Cache>(a, queries, rest / a.kv_heads, rest % a.kv_heads, unit * each);
    });
    return;
  }
  const int64_t count = parts_of(a);
  const Parts parts{queries + query_floats(a), count, a.dim};
  const auto few = [&](size_t i) {
    few_rows<Cache>(a, queries, parts, int64_t(i) / count / a.kv_heads,
                    int64_t(i) / count % a.kv_heads, int64_t(i) % count);
  };
  const auto join = [&](size_t i) {
    const int64_t b = i / a.seq, s = i % a.seq;
    if (s >= a.tokens(b)) return;
    for (int64_t h = 0; h < a.heads; ++h) merge(a, parts, b, s, h);
  };
  const size_t units = a.batch * a.kv_heads * count;
  if (all * a.heads * longest(a) < kAlone) {
    for (size_t i = 0; i < units; ++i) few(i);
  } else {
    parallel.run(units, few);
  }
  parallel.run(chunks, [&](size_t c) {
    for (int64_t i = all * c / chunks; i < int64_t(all * (c + 1) / chunks); ++i) join(i);
  });
}

}  // namespace

size_t attention_scratch_bytes(const Attention& a) {
  size_t floats = query_floats(a);
  if (a.seq <= kFewTokens) floats += a.batch * a.seq * a.heads * parts_of(a) * (a.dim + 16);
  return floats * sizeof(float);
}

void attend(const Attention& a, void* scratch, Parallel& parallel) {
  auto* queries = static_cast<float*>(scratch);
  switch (a.cache_type) {
    case CacheType::float32: return run<Float32Cache>(a, queries, parallel);
    case CacheType::float16: return run<Float16Cache>(a, queries, parallel);
    case CacheType::int8: return run<Int8Cache>(a, queries, parallel);
  }
}

}  // namespace trtllm_lite
