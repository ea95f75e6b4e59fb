// Factors of attention's products in bfloat16, in pairs that VDPBF16PS multiplies and adds to float32.
// Included by attention.cc alone. Nothing here may be called where the processor has no AVX512-BF16.
#pragma once

#include "attention_softmax.h"

#pragma GCC push_options
#pragma GCC target("avx512bf16")

namespace trtllm_lite {
namespace {

// A pair of neighbours along the depth of a product, the first in the low half.
using Pair = uint32_t;

inline __m512i to_pairs(__m512 first, __m512 second) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Thirty-two neighbours of a row as sixteen pairs.
inline __m512i as_pairs(__m512 first, __m512 second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

inline __m512 dot_pairs(__m512 sum, __m512i x, __m512i y) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

// C [rows, 16 * wide] = factor x C + A [rows, depth] B [depth, 16 * wide]; depth, of A and B, in pairs.
// Without factors C is new. Loops are unrolled by hand, or GCC keeps `sum` in memory.
template <int rows, int wide>
void pair_product(const Pair* x, int64_t x_stride, const Pair* y, int64_t y_stride, int64_t depth,
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
    __m512i right[wide];
#pragma GCC unroll 8
    for (int j = 0; j < wide; ++j) right[j] = _mm512_loadu_si512(y + i * y_stride + 16 * j);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const __m512i left = _mm512_set1_epi32(int(x[r * x_stride + i]));
#pragma GCC unroll 8
      for (int j = 0; j < wide; ++j) sum[r][j] = dot_pairs(sum[r][j], left, right[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < wide; ++j) _mm512_storeu_ps(c + r * c_stride + 16 * j, sum[r][j]);
  }
}

using PairProduct = void (*)(const Pair*, int64_t, const Pair*, int64_t, int64_t, float*, int64_t,
                             const float*);
template <int rows>
constexpr PairProduct kPairWide[4] = {pair_product<rows, 1>, pair_product<rows, 2>,
                                      pair_product<rows, 3>, pair_product<rows, 4>};
struct Bfloat16Factors {
  using Item = Pair;

  static constexpr const PairProduct* kProducts[kHeight] = {
      kPairWide<1>, kPairWide<2>, kPairWide<3>, kPairWide<4>, kPairWide<5>, kPairWide<6>};

  static int64_t depth(int64_t dim) { return (dim + 31) / 32 * 16; }
  static int64_t length(int64_t keys) { return (keys + 1) / 2; }
  static int64_t key_items(int64_t dim) { return depth(dim) * kTile; }
  static int64_t value_items(int64_t dim) { return dim * kTile / 2; }

  static void pack_query(const float* from, int64_t dim, Pair* out) {
    for (int64_t d = 0; d < dim; d += 32) {
      const __m512 second = d + 16 < dim ? in_powers(from + d + 16) : _mm512_setzero_ps();
      _mm512_storeu_si512(out + d / 2, as_pairs(in_powers(from + d), second));
    }
  }

  // Keys [count, dim] -> [depth, kTile] pairs along the head, zeros where there is no key.
  template <class Cache>
  static void pack_keys(const typename Cache::Element* keys, const float* scale, int64_t count,
                        int64_t dim, Pair* out) {
    for (int64_t t = 0; t < kTile; t += 16) {
      for (int64_t d = 0; d < dim; d += 32) {
        __m512 rows[16];
        for (int64_t i = 0; i < 16; ++i) {
          __m512 first = _mm512_setzero_ps(), second = first;
          const auto* key = keys + (t + i) * dim + d;
          if (t + i < count) {
            first = Cache::load(key, scale + d);
            if (d + 16 < dim) second = Cache::load(key + 16, scale + d + 16);
          }
          rows[i] = _mm512_castsi512_ps(as_pairs(first, second));
        }
        transpose16(rows, reinterpret_cast<float*>(out + d / 2 * kTile + t), kTile);
      }
    }
  }

  // Values [count, dim] -> [(count + 1) / 2, dim] pairs of neighbouring tokens; zeros fill the last.
  template <class Cache>
  static const Pair* pack_values(const typename Cache::Element* values, const float* scale,
                                 int64_t count, int64_t dim, Pair* out) {
    for (int64_t t = 0; t < count; t += 2) {
      for (int64_t d = 0; d < dim; d += 16) {
        const auto* at = values + t * dim + d;
        const __m512 second =
            t + 1 < count ? Cache::load(at + dim, scale + d) : _mm512_setzero_ps();
        const __m512i pairs = to_pairs(Cache::load(at, scale + d), second);
        _mm512_storeu_si512(out + t / 2 * dim + d, pairs);
      }
    }
    return out;
  }

  // Scores of a tile become weights, in place: pairs, in the first half. The sum is of the weights as
  // they are rounded.
  template <bool whole>
  static float weigh(float* scores, float cap, int64_t from, int64_t to, Row& row) {
    __m512 s[kTile / 16];
    const float factor = lowered<whole>(scores, cap, from, to, row, s);
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    __m512 sum = row.sum;
    for (int i = 0; i < kTile / 32; ++i) {
      const __m512i pairs =
          as_pairs(power_of_two<false>(s[2 * i]), power_of_two<false>(s[2 * i + 1]));
      sum = dot_pairs(sum, pairs, ones);
      _mm512_storeu_si512(scores + 16 * i, pairs);
    }
    row.sum = sum;
    return factor;
  }
};

}  // namespace
}  // namespace trtllm_lite

#pragma GCC pop_options
