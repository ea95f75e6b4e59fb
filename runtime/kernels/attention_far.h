// Scores of keys that lie far behind their queries, from codes of eight bits: twice the products of
// bfloat16. Included by attention.cc alone. Nothing here may be called where Bfloat16Factors may not.
//
// What neighbouring keys have in common, often the largest part of them by far, needs none of the eight
// bits: the mean of a span's first tile is taken out of all its keys, and the mean's product with the
// query, in bfloat16, is added to the scores again (SageAttention, arXiv 2410.02367, section 4.2, with one
// mean for all keys; rotated keys have none for long).
#pragma once

#include "attention_bfloat16.h"

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vbmi")

namespace trtllm_lite {
namespace {

// Tiles that begin so many tokens before that of a query are far from it. Nearer ones, which have the
// largest weights in most heads, stay in bfloat16.
constexpr int64_t kFar = 512;

// Larger heads lose more by codes than they gain in time.
constexpr int64_t kFarDim = 128;

// Tokens of a span.
constexpr int64_t kSpan = 512;

// Four neighbours along a head: signed in keys, in queries with 128 added.
using Quad = uint32_t;

// Elements that are packed together; a head is filled up to a multiple with zeros.
constexpr int64_t kCodes = 64;

inline int64_t quads(int64_t dim) { return (dim + kCodes - 1) / kCodes * (kCodes / 4); }

// Sixty-four elements in an order that is the same for queries and keys.
[[gnu::always_inline]] inline __m512i codes_of(const __m512 (&x)[4], __m512 inverse) {
  __m512i c[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) c[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse));
  return _mm512_packs_epi16(_mm512_packs_epi32(c[0], c[1]), _mm512_packs_epi32(c[2], c[3]));
}

inline __m512 inverse_of(__m512 largest) {
  const __mmask16 any = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ);
  return _mm512_maskz_div_ps(any, _mm512_set1_ps(127.0f), largest);
}

// The far keys of one head, tile by tile.
class FarKeys {
 public:
  static int64_t items(int64_t dim) { return (quads(dim) + 2) * kTile + 2 * dim; }

  FarKeys(Quad* items, int64_t dim)
      : dim_(dim),
        depth_(quads(dim)),
        codes_(items),
        scale_(reinterpret_cast<float*>(items + depth_ * kTile)),
        start_(reinterpret_cast<int32_t*>(scale_ + kTile)),
        mean_(scale_ + 2 * kTile),
        pairs_(reinterpret_cast<Pair*>(mean_ + dim)) {}

  // A query, [dim] -> codes of it in powers of two; returns what a step of them is.
  static float pack_query(const float* query, int64_t dim, Quad* out) {
    __m512 top = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 16) {
      top = _mm512_max_ps(top, _mm512_abs_ps(in_powers(query + d)));
    }
    const float largest = _mm512_reduce_max_ps(top);
    const __m512 inverse = inverse_of(_mm512_set1_ps(largest));
    for (int64_t d = 0; d < dim; d += kCodes) {
      __m512 x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        x[i] = d + 16 * i < dim ? in_powers(query + d + 16 * i) : _mm512_setzero_ps();
      }
      const __m512i codes = codes_of(x, inverse);
      _mm512_storeu_si512(out + d / 4, _mm512_xor_si512(codes, _mm512_set1_epi8(char(0x80))));
    }
    return largest / 127.0f;
  }

  // Takes the mean of a span's first tile.
  template <class Cache>
  void begin_span(const typename Cache::Element* keys, const float* scale) {
    for (int64_t d = 0; d < dim_; d += 16) {
      __m512 sum[4] = {};
      for (int64_t t = 0; t < kTile; ++t) {
        sum[t % 4] = _mm512_add_ps(sum[t % 4], Cache::load(keys + t * dim_ + d, scale + d));
      }
      const __m512 all =
          _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
      keep_mean(_mm512_mul_ps(all, _mm512_set1_ps(1.0f / kTile)), d);
    }
  }

  // Product of a query, [dim / 2] pairs, and the span's mean.
  float common(const Pair* query) const {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim_ / 2; i += 16) {
      const __mmask16 here = lanes(dim_ / 2 - i);
      const __m512i q = _mm512_maskz_loadu_epi32(here, query + i);
      sum = dot_pairs(sum, q, _mm512_maskz_loadu_epi32(here, pairs_ + i));
      sum = dot_pairs(sum, q, _mm512_maskz_loadu_epi32(here, pairs_ + dim_ / 2 + i));
    }
    return _mm512_reduce_add_ps(sum);
  }

  // All keys of a tile of the span. Returns whether they are finite.
  template <class Cache>
  bool pack(const typename Cache::Element* keys, const float* scale) {
    bool finite = true;
    for (int64_t t = 0; t < kTile; t += 16) {
      const __m512 largest = largest16<Cache>(keys + t * dim_, scale, finite);
      _mm512_storeu_ps(scale_ + t, _mm512_mul_ps(largest, _mm512_set1_ps(1.0f / 127.0f)));
      alignas(64) float inverse[16];
      _mm512_store_ps(inverse, inverse_of(largest));
      encode16<Cache>(keys + t * dim_, scale, inverse, t);
    }
    return finite;
  }

  // Weights of rows that see all of a tile. `q` are codes of queries, of steps `step`; `more` their
  // products with the mean.
  template <int rows>
  void weights(const Quad* q, const float* step, const float* more, Row* row, float* out,
               float* factor) const {
    __m512i sum[rows][4];
    products<rows>(q, sum);
    __m512 s[rows][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512 scale = _mm512_loadu_ps(scale_ + 16 * j);
        s[r][j] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][j]), scale);
      }
    }
    weigh_rows<rows>(s, step, more, row, out, factor);
  }

 private:
  // As it is, and in two parts: bfloat16, then what that leaves over, as bfloat16 again.
  void keep_mean(__m512 mean, int64_t d) {
    _mm512_storeu_ps(mean_ + d, mean);
    const __m256i high = (__m256i)_mm512_cvtneps_pbh(mean);
    const __m512 kept = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    auto* to = reinterpret_cast<uint16_t*>(pairs_) + d;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + dim_),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(mean, kept)));
  }

  template <class Cache>
  __m512 centered(const typename Cache::Element* key, const float* scale, int64_t d) const {
    if (d >= dim_) return _mm512_setzero_ps();
    return _mm512_sub_ps(Cache::load(key + d, scale + d), _mm512_loadu_ps(mean_ + d));
  }

  // Largest magnitude of each of sixteen keys.
  template <class Cache>
  __m512 largest16(const typename Cache::Element* keys, const float* scale, bool& finite) const {
    __m512 tops[16];
    for (int64_t i = 0; i < 16; ++i) {
      tops[i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < dim_; d += 16) {
        const __m512 x = centered<Cache>(keys + i * dim_, scale, d);
        finite = finite && !odd(x);
        tops[i] = _mm512_max_ps(tops[i], _mm512_abs_ps(x));
      }
    }
    alignas(64) float turned[16][16];
    transpose16(tops, turned[0], 16);
    __m512 top = _mm512_load_ps(turned[0]);
    for (int64_t i = 1; i < 16; ++i) top = _mm512_max_ps(top, _mm512_load_ps(turned[i]));
    return top;
  }

  // Sixteen keys -> columns [depth, 16] of codes. Products start from what the 128 in queries adds.
  template <class Cache>
  void encode16(const typename Cache::Element* keys, const float* scale, const float* inverse,
                int64_t t) {
    const __m512i offset = _mm512_set1_epi8(char(0x80));
    __m512i added = _mm512_setzero_si512();
    for (int64_t d = 0; d < dim_; d += kCodes) {
      __m512 rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        __m512 x[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) x[j] = centered<Cache>(keys + i * dim_, scale, d + 16 * j);
        rows[i] = _mm512_castsi512_ps(codes_of(x, _mm512_set1_ps(inverse[i])));
      }
      Quad* to = codes_ + d / 4 * kTile + t;
      transpose16(rows, reinterpret_cast<float*>(to), kTile);
      for (int64_t i = 0; i < kCodes / 4; ++i) {
        added = _mm512_dpbusd_epi32(added, offset, _mm512_loadu_si512(to + i * kTile));
      }
    }
    _mm512_storeu_si512(start_ + t, _mm512_sub_epi32(_mm512_setzero_si512(), added));
  }

  template <int rows>
  [[gnu::always_inline]] void products(const Quad* q, __m512i (&sum)[rows][4]) const {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_loadu_si512(start_ + 16 * j);
    }
    for (int64_t i = 0; i < depth_; ++i) {
      __m512i right[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) right[j] = _mm512_loadu_si512(codes_ + i * kTile + 16 * j);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        const __m512i left = _mm512_set1_epi32(int(q[r * depth_ + i]));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_dpbusd_epi32(sum[r][j], left, right[j]);
      }
    }
    hold(sum);
  }

  const int64_t dim_, depth_;
  Quad* const codes_;     // [depth, kTile]
  float* const scale_;    // [kTile] what a step of a key's codes is
  int32_t* const start_;  // [kTile]
  float* const mean_;     // [dim] of the span
  Pair* const pairs_;     // [2, dim / 2] the same in two parts
};

}  // namespace
}  // namespace trtllm_lite

#pragma GCC pop_options
