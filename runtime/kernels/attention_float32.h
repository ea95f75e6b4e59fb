// Factors of attention's products in float32. Included by attention.cc alone.
#pragma once

#include "attention_softmax.h"

namespace trtllm_lite {
namespace {

// C [rows, 16 * wide] = factor x C + A [rows, depth] B [depth, 16 * wide]; without factors C is new. Loops
// are unrolled by hand, or GCC keeps `sum` in memory.
template <int rows, int wide>
void product(const float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t depth,
             float* c, int64_t c_stride, const float* factor) {
  __m512 sum[rows][wide];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < wide; ++j) {
      sum[r][j] = factor == nullptr ? _mm512_setzero_ps()
                                    : _mm512_mul_ps(_mm512_set1_ps(factor[r]),
                                                    _mm512_loadu_ps(c + r * c_stride + 16 * j));
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    __m512 right[wide];
#pragma GCC unroll 8
    for (int j = 0; j < wide; ++j) right[j] = _mm512_loadu_ps(y + i * y_stride + 16 * j);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const __m512 left = _mm512_set1_ps(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int j = 0; j < wide; ++j) sum[r][j] = _mm512_fmadd_ps(left, right[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < wide; ++j) _mm512_storeu_ps(c + r * c_stride + 16 * j, sum[r][j]);
  }
}

using Product = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t,
                         const float*);
template <int rows>
constexpr Product kWide[4] = {product<rows, 1>, product<rows, 2>, product<rows, 3>,
                              product<rows, 4>};

struct Float32Factors {
  using Item = float;
  static constexpr bool kRounds = false;

  static constexpr const Product* kProducts[kHeight] = {kWide<1>, kWide<2>, kWide<3>,
                                                        kWide<4>, kWide<5>, kWide<6>};

  static int64_t depth(int64_t dim) { return dim; }
  static int64_t length(int64_t keys) { return keys; }
  static int64_t key_items(int64_t dim) { return dim * kTile; }
  static int64_t value_items(int64_t dim) { return dim * kTile; }

  static void pack_query(const float* from, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; d += 16) _mm512_storeu_ps(out + d, in_powers(from + d));
  }

  template <int rows, int wide>
  static void scores(const float* q, int64_t depth, const float* keys, float* out) {
    product<rows, wide>(q, depth, keys, kTile, depth, out, kTile, nullptr);
  }

  // Keys [count, dim] -> [dim, kTile], zeros where there is no key.
  template <class Cache>
  static bool pack_keys(const typename Cache::Element* keys, const float* scale, int64_t count,
                        int64_t dim, float* out) {
    for (int64_t t = 0; t < kTile; t += 16) {
      for (int64_t d = 0; d < dim; d += 16) {
        __m512 rows[16];
        for (int64_t i = 0; i < 16; ++i) {
          rows[i] = t + i < count ? Cache::load(keys + (t + i) * dim + d, scale + d)
                                  : _mm512_setzero_ps();
        }
        transpose16(rows, out + d * kTile + t, kTile);
      }
    }
    return true;  // what is not finite shows in the weights
  }

  template <class Cache>
  static const float* pack_values(const typename Cache::Element* values, const float* scale,
                                  int64_t count, int64_t dim, float* room) {
    if constexpr (sizeof(typename Cache::Element) == sizeof(float)) return values;
    for (int64_t i = 0; i < count * dim; i += 16) {
      _mm512_storeu_ps(room + i, Cache::load(values + i, scale + i % dim));
    }
    return room;
  }

  // Scores of a tile, of which the row sees [from, to), become weights, in place.
  static float weigh(float* scores, float cap, int64_t from, int64_t to, Row& row) {
    __m512 s[kTile / 16];
    take_scores(scores, cap, from, to, s);
    const float factor = raised(largest_of(s), row);
    const __m512 base = _mm512_set1_ps(row.base());
    for (int i = 0; i < kTile / 16; ++i) {
      s[i] = power_of_two(_mm512_sub_ps(s[i], base));
      _mm512_storeu_ps(scores + 16 * i, s[i]);
    }
    row.sum = _mm512_add_ps(row.sum, _mm512_add_ps(_mm512_add_ps(s[0], s[1]),
                                                   _mm512_add_ps(s[2], s[3])));
    return factor;
  }
};

}  // namespace
}  // namespace trtllm_lite
