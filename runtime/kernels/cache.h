// Sixteen elements of a cache row at a time, whatever the cache holds.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd.h"

namespace trtllm_lite {

struct Float32Cache {
  using Element = float;
  static __m512 load(const Element* at, const float*) { return _mm512_loadu_ps(at); }
  static void store(Element* at, __m512 x, const float*) { _mm512_storeu_ps(at, x); }
};

struct Float16Cache {
  using Element = uint16_t;
  static __m512 load(const Element* at, const float*) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  static void store(Element* at, __m512 x, const float*) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(x, 0));
  }
};

// `scale` points at the sixteen channels' scales.
struct Int8Cache {
  using Element = int8_t;
  static __m512 load(const Element* at, const float* scale) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), _mm512_loadu_ps(scale));
  }
  static void store(Element* at, __m512 x, const float* scale) {
    const __m512i codes = _mm512_cvtps_epi32(_mm512_div_ps(x, _mm512_loadu_ps(scale)));
    const __m512i kept = _mm512_max_epi32(codes, _mm512_set1_epi32(-127));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtsepi32_epi8(kept));
  }
};

}  // namespace trtllm_lite
