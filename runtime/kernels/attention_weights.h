// Weights of many queries in bfloat16: powers of two from scores, in integers. Included by attention.cc
// alone. Nothing here may be called where the processor lacks AVX512-BF16 or AVX512-VBMI.
#pragma once

#include "attention_softmax.h"

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vbmi")

namespace trtllm_lite {
namespace {

// A pair of neighbours along the depth of a product, the first in the low half.
using Pair = uint32_t;

inline __m512 dot_pairs(__m512 sum, __m512i x, __m512i y) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

// The bits of a bfloat16 w are 128 (127 + log2 w) as an integer, but for how far 2^f lies under its chord.
constexpr float kFine = 128.0f, kOne = 127.0f * kFine;

// f - (2^f - 1) in 128ths, at f = 0, 1/128, .. 127/128.
struct Bulge {
  alignas(64) uint8_t at[128];
  constexpr Bulge() : at() {
    double power = 1.0;
    for (int i = 0; i < 128; ++i, power *= 1.0054299011128028229) {
      at[i] = uint8_t(i - int((power - 1.0) * 128 + 0.5));
    }
  }
};
constexpr Bulge kBulge;

// Thirty-two x = kOne + kFine log2 w -> w in bfloat16, off by at most half a step of x and half a step
// of the mantissa, 0.27% and 0.39%; 0 where x is negative. In which order: see `place`.
inline __m512i weights_of(__m512 a, __m512 b) {
  const __m512i low = _mm512_load_si512(kBulge.at), high = _mm512_load_si512(kBulge.at + 64);
  const __m512i x = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  const __m512i bulge = _mm512_maskz_permutex2var_epi8(0x5555555555555555, low, x, high);
  return _mm512_max_epi16(_mm512_sub_epi16(x, bulge), _mm512_setzero_si512());
}

// Where `weights_of` leaves pair p of a tile's keys: packing takes four of each operand by turns.
inline int64_t place(int64_t p) { return p / 16 * 16 + p % 8 / 2 * 4 + p / 8 % 2 * 2 + p % 2; }

// Stores a row's weights, and adds them to its sum as they are rounded.
[[gnu::always_inline]] inline void give_weights(const __m512 (&x)[kTile / 16], Row& row, float* out) {
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i pairs = weights_of(x[2 * i], x[2 * i + 1]);
    row.sum = dot_pairs(row.sum, pairs, ones);
    _mm512_storeu_si512(out + 16 * i, pairs);
  }
}

// A row's scores as numbers of `weights_of`.
[[gnu::always_inline]] inline void as_integers(__m512 (&s)[kTile / 16], float scale, float base) {
  const __m512 by = _mm512_set1_ps(scale * kFine), less = _mm512_set1_ps(base * kFine - kOne);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) s[j] = _mm512_fmsub_ps(s[j], by, less);
}

// Keeps what a loop has summed up in registers until here: GCC would store it in each turn.
template <int rows, int wide, class Vector>
[[gnu::always_inline]] inline void hold(Vector (&sum)[rows][wide]) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < wide; ++j) asm("" : "+v"(sum[r][j]));
  }
}

// Of rows whose largest rises: scores, [rows, kTile], become weights in place.
[[gnu::noinline]] void raise_and_weigh(int rows, const float* scale, const float* more, Row* row,
                                       float* scores, float* factor) {
  for (int r = 0; r < rows; ++r) {
    __m512 s[4];
    float* at = scores + r * kTile;
    for (int j = 0; j < 4; ++j) s[j] = _mm512_loadu_ps(at + 16 * j);
    const __m512 top = _mm512_mul_ps(largest_of(s), _mm512_set1_ps(scale[r]));
    factor[r] = raised(_mm512_add_ps(top, _mm512_set1_ps(more[r])), row[r]);
    as_integers(s, scale[r], row[r].base() - more[r]);
    give_weights(s, row[r], at);
  }
}

// Weights of rows that see all of a tile. The score of row r and a key is scale[r] x s + more[r]. What
// rows' earlier results are to be multiplied with goes to `factor`.
template <int rows>
[[gnu::always_inline]] inline void weigh_rows(__m512 (&s)[rows][4], const float* scale, const float* more,
                                              Row* row, float* out, float* factor) {
  __mmask16 over = 0;
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    const __m512 top = _mm512_mul_ps(largest_of(s[r]), _mm512_set1_ps(scale[r]));
    over |= _mm512_cmp_ps_mask(_mm512_add_ps(top, _mm512_set1_ps(more[r])),
                               _mm512_set1_ps(row[r].largest + kSlack), _CMP_GT_OQ);
  }
  if (__builtin_expect(over != 0, 0)) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < 4; ++j) _mm512_storeu_ps(out + r * kTile + 16 * j, s[r][j]);
    }
    return raise_and_weigh(rows, scale, more, row, out, factor);
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    as_integers(s[r], scale[r], row[r].base() - more[r]);
    give_weights(s[r], row[r], out + r * kTile);
    factor[r] = 1.0f;
  }
}

}  // namespace
}  // namespace trtllm_lite

#pragma GCC pop_options
