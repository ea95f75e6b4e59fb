// Vector helpers shared by the kernels. Included after isa.h, inside AVX-512 translation units only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace trtllm_lite {

constexpr float kLog2e = 1.44269504088896341f;

// e^x. Cody-Waite reduction to |r| <= ln2/2 and a degree-6 Taylor polynomial there: relative error
// under 2e-7. Arguments under -64 give 0, so that exp(-inf) is 0 and products with what a softmax has
// forgotten do not become denormal, which would slow them down many times.
inline __m512 exp_ps(__m512 x) {
  const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-64.0f), _CMP_GE_OQ);
  x = _mm512_min_ps(x, _mm512_set1_ps(88.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2e)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(alive, p, n);
}

inline __m512 sigmoid_ps(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(one, _mm512_add_ps(one, e));
}

inline __m512 silu_ps(__m512 x) { return _mm512_mul_ps(x, sigmoid_ps(x)); }

// tanh x = 2 sigmoid(2x) - 1, exact enough where it is used (softcap, tanh-GELU): absolute 1e-7.
inline __m512 tanh_ps(__m512 x) {
  const __m512 s = sigmoid_ps(_mm512_add_ps(x, x));
  return _mm512_fmsub_ps(s, _mm512_set1_ps(2.0f), _mm512_set1_ps(1.0f));
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
inline __m512 gelu_tanh_ps(__m512 x) {
  const __m512 x2 = _mm512_mul_ps(x, x);
  const __m512 c = _mm512_fmadd_ps(x2, _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
  const __m512 u2 = _mm512_mul_ps(_mm512_mul_ps(x, c), _mm512_set1_ps(2 * 0.7978845608028654f));
  return _mm512_mul_ps(x, sigmoid_ps(u2));
}

// Lanes below `count`, all sixteen when there are more.
inline __mmask16 lanes(int64_t count) {
  return count >= 16 ? __mmask16(0xffff) : __mmask16((1u << (count > 0 ? count : 0)) - 1);
}

}  // namespace trtllm_lite
