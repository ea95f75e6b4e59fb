// The softmax of many queries, in powers of two: queries come multiplied with log2 e. Included by
// attention.cc alone.
#pragma once

#include "attention_common.h"

namespace trtllm_lite {
namespace {

// One query's softmax so far: `sum` by lane, `largest` in powers of two.
struct Row {
  __m512 sum;
  float largest;
  int64_t position;
};

// While no score exceeds the largest by more, earlier results are left as they are: weights then reach
// 2^8, which floats hold as precisely as 1.
constexpr float kSlack = 8.0f;

Row start_row(int64_t position, const float* sink) {
  if (sink == nullptr) return {_mm512_setzero_ps(), kNone, position};
  return {_mm512_maskz_mov_ps(1, _mm512_set1_ps(1.0f)), *sink * kLog2e, position};
}

// A head of a query, [dim] -> [dim], so that its scores are powers of two.
inline __m512 in_powers(const float* query) {
  return _mm512_mul_ps(_mm512_loadu_ps(query), _mm512_set1_ps(kLog2e));
}

// 2^x by polynomials that have the least relative error on [0, 1): 7.5e-8 when `exact`, else 7.5e-5, a
// fiftieth of what rounding to bfloat16 costs. 0 under 2^-100, so that nothing denormal comes of it.
template <bool exact>
[[gnu::always_inline]] inline __m512 power_of_two(__m512 x) {
  const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-100.0f), _CMP_GE_OQ);
  const __m512 r = _mm512_reduce_ps(x, 1);  // x - floor(x)
  constexpr float near[] = {0.0780245236f, 0.2260671626f, 0.6958335332f, 0.9999252198f};
  constexpr float close[] = {0.00187757668f, 0.00898934020f, 0.0558263180f,
                             0.240153617f,   0.693153073f,   0.999999925f};
  __m512 p = _mm512_set1_ps(exact ? close[0] : near[0]);
#pragma GCC unroll 8
  for (int i = 1; i < (exact ? 6 : 4); ++i) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(exact ? close[i] : near[i]));
  }
  return _mm512_maskz_scalef_ps(alive, p, x);  // scalef takes the floor of its exponent
}

// Scores of a tile, of which the row sees [from, to), less its largest: in `s`. With `whole` it sees all,
// and there is no cap. Returns what the row's earlier results are to be multiplied with.
template <bool whole>
[[gnu::always_inline]] inline float lowered(const float* scores, float cap, int64_t from, int64_t to,
                                            Row& row, __m512 (&s)[kTile / 16]) {
#pragma GCC unroll 4
  for (int i = 0; i < kTile / 16; ++i) {
    s[i] = _mm512_loadu_ps(scores + 16 * i);
    if constexpr (!whole) {
      const __mmask16 seen = lanes(to - 16 * i) & ~lanes(from - 16 * i);
      s[i] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kNone), capped(s[i], cap));
    }
  }
  const __m512 top = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
  float factor = 1.0f;
  if (_mm512_cmp_ps_mask(top, _mm512_set1_ps(row.largest + kSlack), _CMP_GT_OQ) != 0) {
    const float before = row.largest;
    row.largest = _mm512_reduce_max_ps(top);
    factor = before == kNone ? 0.0f : std::exp2(before - row.largest);
    row.sum = _mm512_mul_ps(row.sum, _mm512_set1_ps(factor));
  }
  // A row that has seen nothing yet has no largest; all its weights are 2^-inf.
  const __m512 base = _mm512_set1_ps(row.largest == kNone ? 0.0f : row.largest);
#pragma GCC unroll 4
  for (int i = 0; i < kTile / 16; ++i) s[i] = _mm512_sub_ps(s[i], base);
  return factor;
}

}  // namespace
}  // namespace trtllm_lite
