// Attention of few queries: keys are read as they lie, in parts that are merged. Included by
// attention.cc alone.
#pragma once

#include "attention_common.h"

namespace trtllm_lite {
namespace {

// Sums of four vectors: each 128-bit lane of the result has a part of all four, in order.
inline __m512 quarters(const __m512* x) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}

// The sixteen sums of four such results, in order.
inline __m512 sums(const __m512* z) {
  const __m512 u = _mm512_add_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x88),
                                 _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
  const __m512 w = _mm512_add_ps(_mm512_shuffle_f32x4(z[2], z[3], 0x88),
                                 _mm512_shuffle_f32x4(z[2], z[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(u, w, 0x88), _mm512_shuffle_f32x4(u, w, 0xdd));
}

// Scores of four keys, or what there is of them, with `rows` queries.
template <class Cache, int rows>
[[gnu::always_inline]] inline void four_dots(int64_t dim, const float* const* q,
                                             const typename Cache::Element* keys,
                                             const float* scale, int64_t count,
                                             __m512 (&sum)[rows][4]) {
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[r][i] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < dim; d += 16) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      // Keys that are not there must not be read: the last is read again.
      const __m512 key = Cache::load(keys + std::min<int64_t>(i, count - 1) * dim + d, scale + d);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        sum[r][i] = _mm512_fmadd_ps(_mm512_loadu_ps(q[r] + d), key, sum[r][i]);
      }
    }
  }
}

// Scores of `count` keys with `rows` queries: scores [rows, kSplit].
template <class Cache, int rows>
void dots(int64_t dim, const float* const* q, const typename Cache::Element* keys,
          const float* scale, int64_t count, float* scores) {
  for (int64_t t = 0; t < count; t += 16) {
    __m512 part[rows][4];
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t first = std::min(t + 4 * i, count - 1);
      __m512 sum[rows][4];
      four_dots<Cache, rows>(dim, q, keys + first * dim, scale, count - first, sum);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) part[r][i] = quarters(sum[r]);
    }
    for (int r = 0; r < rows; ++r) _mm512_storeu_ps(scores + r * kSplit + t, sums(part[r]));
  }
}

// The same of any number of queries, three at a time: as many as the heads of many models share.
template <class Cache>
void dot_scores(int64_t rows, int64_t dim, const float* const* q,
                const typename Cache::Element* keys, const float* scale, int64_t count,
                float* scores) {
  for (; rows >= 3; rows -= 3, q += 3, scores += 3 * kSplit) {
    dots<Cache, 3>(dim, q, keys, scale, count, scores);
  }
  if (rows == 2) dots<Cache, 2>(dim, q, keys, scale, count, scores);
  if (rows == 1) dots<Cache, 1>(dim, q, keys, scale, count, scores);
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

// Scores of one query with the keys of a part become weights, zeros up to its end; its largest score
// and its sum become the head of the part's result.
void weigh_part(const Attention& a, float* scores, int64_t position, int64_t start, int64_t end,
                float* result) {
  const int64_t count = std::clamp<int64_t>(position + 1 - start, 0, end - start);
  Softmax state;
  if (count > 0) weigh(scores, count, first_key(a, position) - start, count, a.softcap, state);
  const int64_t filled = (count + 15) / 16 * 16;
  std::memset(scores + filled, 0, (kSplit - filled) * sizeof(float));
  result[0] = state.largest;
  result[1] = state.sum;
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
    const float* q[kHeight];
    float* out[kHeight];
    for (int64_t r = 0; r < height; ++r) {
      const int64_t s = (top + r) / group, h = head * group + (top + r) % group;
      q[r] = query_row(a, queries, b, s, h);
      out[r] = parts.at(a, b, s, h, part);
    }
    // Of these rows, the last sees most keys.
    const int64_t newest = past + (top + height - 1) / group;
    const int64_t seen = std::clamp<int64_t>(newest + 1 - start, 0, end - start);
    dot_scores<Cache>(height, a.dim, q, keys, k_scale, seen, weights[0]);
    for (int64_t r = 0; r < height; ++r) {
      weigh_part(a, weights[r], past + (top + r) / group, start, end, out[r]);
      out[r] += 16;
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
