// What both forms of attention share: rotation, the cache's rows, the softmax of a tile. Included by
// attention.cc alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "attention.h"
#include "cache.h"
#include "simd.h"

namespace trtllm_lite {
namespace {

constexpr int64_t kTile = 64;      // keys at a time for many queries
constexpr int64_t kSplit = 256;    // keys of one part for few queries; parts are merged
constexpr int kHeight = 6;         // rows of a register tile, 4 vectors wide
constexpr float kNone = -std::numeric_limits<float>::infinity();

using Floats = std::unique_ptr<float[], void (*)(void*)>;

// Grows and stays: threads of a pool live as long as their sessions.
float* thread_buffer(size_t floats) {
  thread_local Floats buffer(nullptr, std::free);
  thread_local size_t size = 0;
  if (floats > size) {
    size = (floats + 4095) / 4096 * 4096;
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, size * sizeof(float))));
  }
  return buffer.get();
}

// One head of one token, rotated by its position and scaled: pairs (i, i + half).
void rotate_halves(const float* __restrict x, const float* __restrict cos,
                   const float* __restrict sin, int64_t half, float factor, float* __restrict out) {
  for (int64_t i = 0; i < half; ++i) {
    out[i] = (x[i] * cos[i] - x[i + half] * sin[i]) * factor;
    out[i + half] = (x[i + half] * cos[i] + x[i] * sin[i]) * factor;
  }
}

// The same for pairs (2i, 2i + 1).
void rotate_neighbours(const float* __restrict x, const float* __restrict cos,
                       const float* __restrict sin, int64_t half, float factor,
                       float* __restrict out) {
  for (int64_t i = 0; i < half; ++i) {
    out[2 * i] = (x[2 * i] * cos[i] - x[2 * i + 1] * sin[i]) * factor;
    out[2 * i + 1] = (x[2 * i + 1] * cos[i] + x[2 * i] * sin[i]) * factor;
  }
}

void rotate(const Attention& a, const float* x, int64_t position, float factor, float* out) {
  const int64_t half = a.rotary_dim / 2;
  const float *cos = a.cos + position * half, *sin = a.sin + position * half;
  (a.interleaved ? rotate_neighbours : rotate_halves)(x, cos, sin, half, factor, out);
  for (int64_t i = a.rotary_dim; i < a.dim; ++i) out[i] = x[i] * factor;
}

template <class Cache>
typename Cache::Element* cache_row(const Attention& a, void* cache, int64_t b, int64_t head,
                                   int64_t token) {
  auto* base = static_cast<typename Cache::Element*>(cache);
  return base + ((b * a.kv_heads + head) * a.capacity + token) * a.dim;
}

template <class Cache>
void append(const Attention& a, int64_t b, int64_t s, float* scratch) {
  const int64_t position = a.past(b) + s;
  const float* k = a.k + (b * a.seq + s) * a.kv_stride;
  const float* v = a.v + (b * a.seq + s) * a.kv_stride;
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    const float* key = k + h * a.dim;
    if (a.rotary_dim > 0) {
      rotate(a, key, position, 1.0f, scratch);
      key = scratch;
    }
    auto* k_row = cache_row<Cache>(a, a.k_cache, b, h, position);
    auto* v_row = cache_row<Cache>(a, a.v_cache, b, h, position);
    for (int64_t i = 0; i < a.dim; i += 16) {
      const int64_t channel = h * a.dim + i;
      Cache::store(k_row + i, _mm512_loadu_ps(key + i), a.k_scale + channel);
      Cache::store(v_row + i, _mm512_loadu_ps(v + h * a.dim + i), a.v_scale + channel);
    }
  }
}

// Queries, rotated and scaled: [batch, seq, heads, dim].
float* query_row(const Attention& a, float* queries, int64_t b, int64_t s, int64_t h) {
  return queries + ((b * a.seq + s) * a.heads + h) * a.dim;
}

void prepare_queries(const Attention& a, int64_t b, int64_t s, float* queries) {
  const float* q = a.q + (b * a.seq + s) * a.q_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    rotate(a, q + h * a.dim, a.past(b) + s, a.scale, query_row(a, queries, b, s, h));
  }
}

__m512 capped(__m512 score, float softcap) {
  if (softcap == 0.0f) return score;
  const __m512 cap = _mm512_set1_ps(softcap);
  return _mm512_mul_ps(cap, tanh_ps(_mm512_div_ps(score, cap)));
}

// First key that a query at `position` sees.
int64_t first_key(const Attention& a, int64_t position) {
  return a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
}

// Running maximum and sum of one row's softmax.
struct Softmax {
  float largest = kNone;
  float sum = 0.0f;
};

// Takes a tile's largest score into the state. Returns what earlier results are to be multiplied
// with; 1 in most tiles, for which no exponential is computed.
float raise(Softmax& state, float largest) {
  const float before = state.largest;
  if (largest <= before) return 1.0f;
  state.largest = largest;
  const float factor = before == kNone ? 0.0f : std::exp(before - largest);
  state.sum *= factor;
  return factor;
}

// Scores of keys [0, keys) become weights, in place, for a row that sees [from, to) of them; `keys` is
// rounded up to sixteens. Returns what the row's earlier results are to be multiplied with.
float weigh(float* scores, int64_t keys, int64_t from, int64_t to, float softcap, Softmax& state) {
  __m512 top = _mm512_set1_ps(kNone);
  for (int64_t i = 0; i < keys; i += 16) {
    const __mmask16 seen = lanes(to - i) & ~lanes(from - i);
    __m512 s = capped(_mm512_loadu_ps(scores + i), softcap);
    s = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kNone), s);
    _mm512_storeu_ps(scores + i, s);
    top = _mm512_max_ps(top, s);
  }
  const float factor = raise(state, _mm512_reduce_max_ps(top));
  if (state.largest == kNone) {
    std::memset(scores, 0, ((keys + 15) / 16 * 16) * sizeof(float));
    return 1.0f;
  }
  const __m512 base = _mm512_set1_ps(state.largest);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < keys; i += 16) {
    const __m512 p = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i), base));
    _mm512_storeu_ps(scores + i, p);
    sum = _mm512_add_ps(sum, p);
  }
  state.sum += _mm512_reduce_add_ps(sum);
  return factor;
}

// Sixteen rows of sixteen become columns, `stride` apart.
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

}  // namespace
}  // namespace trtllm_lite
