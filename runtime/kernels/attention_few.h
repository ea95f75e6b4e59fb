// Attention of few queries: keys are read as they lie, in parts that are merged. Included by
// attention.cc alone.
#pragma once

#include "attention_common.h"

namespace trtllm_lite {
namespace {

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

}  // namespace
}  // namespace trtllm_lite
