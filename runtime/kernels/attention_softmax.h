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

  // A row that has seen nothing yet has no largest; all its weights are 2^-inf.
  float base() const { return largest == kNone ? 0.0f : largest; }
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

// 2^x by the polynomial that has the least relative error on [0, 1), 7.5e-8. 0 under 2^-100, so that
// nothing denormal comes of it.
inline __m512 power_of_two(__m512 x) {
  const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-100.0f), _CMP_GE_OQ);
  const __m512 r = _mm512_reduce_ps(x, 1);  // x - floor(x)
  constexpr float by[] = {0.00187757668f, 0.00898934020f, 0.0558263180f,
                          0.240153617f,   0.693153073f,   0.999999925f};
  __m512 p = _mm512_set1_ps(by[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 6; ++i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(by[i]));
  return _mm512_maskz_scalef_ps(alive, p, x);  // scalef takes the floor of its exponent
}

// Takes a tile's largest score into the row. Returns what its earlier results are to be multiplied with.
float raised(__m512 largest, Row& row) {
  const __m512 limit = _mm512_set1_ps(row.largest + kSlack);
  if (_mm512_cmp_ps_mask(largest, limit, _CMP_GT_OQ) == 0) return 1.0f;
  const float top = _mm512_reduce_max_ps(largest);
  const float before = row.largest;
  row.largest = top;
  const float factor = before == kNone ? 0.0f : std::exp2(before - top);
  row.sum = _mm512_mul_ps(row.sum, _mm512_set1_ps(factor));
  return factor;
}

// Scores of a tile, of which the row sees [from, to): capped, -inf where it sees none.
[[gnu::always_inline]] inline void take_scores(const float* scores, float cap, int64_t from, int64_t to,
                                               __m512 (&s)[kTile / 16]) {
#pragma GCC unroll 4
  for (int i = 0; i < kTile / 16; ++i) {
    const __mmask16 seen = lanes(to - 16 * i) & ~lanes(from - 16 * i);
    const __m512 score = capped(_mm512_loadu_ps(scores + 16 * i), cap);
    s[i] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kNone), score);
  }
}

inline __m512 largest_of(const __m512 (&s)[kTile / 16]) {
  return _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
}

}  // namespace
}  // namespace trtllm_lite
