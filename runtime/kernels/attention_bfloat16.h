// Factors of attention's products in bfloat16, in pairs that VDPBF16PS multiplies and adds to float32.
// Included by attention.cc alone. Nothing here may be called where the processor lacks AVX512-BF16 or
// AVX512-VBMI.
#pragma once

#include "attention_weights.h"

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vbmi")

namespace trtllm_lite {
namespace {

// Thirty-two neighbours of a row as sixteen pairs.
inline __m512i as_pairs(__m512 first, __m512 second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

// What is neither a number nor finite: NaN and both infinities.
inline bool odd(__m512 x) { return _mm512_fpclass_ps_mask(x, 0x99) != 0; }

// sum + A [rows, depth] B [depth, 16 * wide], depth in pairs. Loops are unrolled by hand, or GCC keeps
// `sum` in memory.
template <int rows, int wide>
[[gnu::always_inline]] inline void add_products(const Pair* x, int64_t x_stride, const Pair* y,
                                                int64_t y_stride, int64_t depth,
                                                __m512 (&sum)[rows][wide]) {
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
  hold(sum);
}

// C [rows, 16 * wide] = factor x C + A [rows, depth] B [depth, 16 * wide]; depth, of A and B, in pairs.
// Without factors C is new.
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
  add_products<rows, wide>(x, x_stride, y, y_stride, depth, sum);
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

// Elements of two rows by turns.
struct Turns {
  alignas(64) uint16_t at[32];
  constexpr Turns() : at() {
    for (int i = 0; i < 32; ++i) at[i] = uint16_t(i / 2 + i % 2 * 16);
  }
};
constexpr Turns kTurns;

struct Bfloat16Factors {
  using Item = Pair;
  static constexpr bool kRounds = true;

  static constexpr const PairProduct* kProducts[kHeight] = {
      kPairWide<1>, kPairWide<2>, kPairWide<3>, kPairWide<4>, kPairWide<5>, kPairWide<6>};

  static int64_t depth(int64_t dim) { return (dim + 31) / 32 * 16; }
  static int64_t length(int64_t keys) { return (keys + 31) / 32 * 16; }
  static int64_t key_items(int64_t dim) { return depth(dim) * kTile; }
  static int64_t value_items(int64_t dim) { return dim * kTile / 2; }

  static void pack_query(const float* from, int64_t dim, Pair* out) {
    for (int64_t d = 0; d < dim; d += 32) {
      const __m512 second = d + 16 < dim ? in_powers(from + d + 16) : _mm512_setzero_ps();
      _mm512_storeu_si512(out + d / 2, as_pairs(in_powers(from + d), second));
    }
  }

  template <int rows, int wide>
  static void scores(const Pair* q, int64_t depth, const Pair* keys, float* out) {
    pair_product<rows, wide>(q, depth, keys, kTile, depth, out, kTile, nullptr);
  }

  // Weights of rows that see all of a tile.
  template <int rows>
  static void weights(const Pair* q, int64_t depth, const Pair* keys, Row* row, float* out,
                      float* factor) {
    constexpr float kScale[kHeight] = {1, 1, 1, 1, 1, 1}, kMore[kHeight] = {};
    __m512 sum[rows][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_setzero_ps();
    }
    add_products<rows, 4>(q, depth, keys, kTile, depth, sum);
    weigh_rows<rows>(sum, kScale, kMore, row, out, factor);
  }

  // Keys [count, dim] -> [depth, kTile] pairs along the head, zeros where there is no key.
  // Returns whether all are finite.
  template <class Cache>
  static bool pack_keys(const typename Cache::Element* keys, const float* scale, int64_t count,
                        int64_t dim, Pair* out) {
    bool finite = true;
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
          finite = finite && !odd(first) && !odd(second);
          rows[i] = _mm512_castsi512_ps(as_pairs(first, second));
        }
        transpose16(rows, reinterpret_cast<float*>(out + d / 2 * kTile + t), kTile);
      }
    }
    return finite;
  }

  // Values [count, dim] -> pairs of neighbouring tokens, [kTile / 2, dim], where `weights_of` leaves
  // their weights. Zeros fill the last thirty-two tokens.
  template <class Cache>
  static const Pair* pack_values(const typename Cache::Element* values, const float* scale,
                                 int64_t count, int64_t dim, Pair* out) {
    const __m512i turns = _mm512_load_si512(kTurns.at);
    for (int64_t t = 0; t < 2 * length(count); t += 2) {
      Pair* to = out + place(t / 2) * dim;
      for (int64_t d = 0; d < dim; d += 16) {
        const auto* at = values + t * dim + d;
        __m512 first = _mm512_setzero_ps(), second = first;
        if (t < count) first = Cache::load(at, scale + d);
        if (t + 1 < count) second = Cache::load(at + dim, scale + d);
        _mm512_storeu_si512(to + d, _mm512_permutexvar_epi16(turns, as_pairs(first, second)));
      }
    }
    return out;
  }

  // Scores of a tile, of which the row sees [from, to), become weights, in place: pairs, in the first
  // half. To the bit as in `weights`: how a prompt was cut decides which of them a row meets.
  static float weigh(float* scores, float cap, int64_t from, int64_t to, Row& row) {
    __m512 s[kTile / 16];
    take_scores(scores, cap, from, to, s);
    const float factor = raised(largest_of(s), row);
    as_integers(s, 1.0f, row.base());
    give_weights(s, row, scores);
    return factor;
  }
};

}  // namespace
}  // namespace trtllm_lite

#pragma GCC pop_options
