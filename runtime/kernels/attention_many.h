// Attention of many queries: keys are packed by tiles, scores and results are matrix products. Included
// by attention.cc alone.
#pragma once

#include "attention_common.h"

namespace trtllm_lite {
namespace {

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

}  // namespace
}  // namespace trtllm_lite
