#include "isa.h"

#include "linear.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace trtllm_lite {
namespace {

// Rows of one tile. Twelve would fit in the registers; six with their operands is what the compiler
// keeps there, and is the fastest (measured on Zen 4: 6 360, 8 340, 12 190 GOP/s).
constexpr int64_t kMaxTile = 6;
constexpr int64_t kMaxExactTile = 4;
// Rows that pass over a panel before the next panel: their codes stay in the second-level cache.
constexpr int64_t kRowBlock = 192;
constexpr size_t kAlign = 64;
// A part of the work is worth handing to a thread from this many products on; more parts than
// threads even out what other processes take from them.
constexpr int64_t kPartProducts = 64 * 1024;
constexpr int64_t kParts = 32;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The rounded rows: codes [terms][rows, k], and per block the scale of the last term and the sum of
// all codes, each counted in that scale. One step of a term is `kFiner` steps of the next.
struct Rows {
  int8_t* codes;
  float* scale;
  float* sum;
  int32_t* offset;  // [terms][rows, blocks]: -128 x sum of the term's codes
  int64_t plane;    // codes of one term
  int64_t blocks;   // blocks of one term
};

constexpr float kFiner = 254.0f;
// Smaller magnitudes count as zero: 127 divided by them would not be finite.
constexpr float kLeast = 1e-36f;

Rows rows_in(const PackedWeights& w, void* scratch, int64_t rows, int64_t terms) {
  auto* base = static_cast<uint8_t*>(scratch);
  const int64_t plane = rows * w.k, blocks = rows * w.blocks();
  const size_t codes = aligned(terms * plane), floats = aligned(blocks * sizeof(float));
  return {reinterpret_cast<int8_t*>(base), reinterpret_cast<float*>(base + codes),
          reinterpret_cast<float*>(base + codes + floats),
          reinterpret_cast<int32_t*>(base + codes + 2 * floats), plane, blocks};
}

// One block of one row, of which `width` elements exist. A term's scale is its largest possible
// magnitude / 127, codes are rounded to nearest even.
template <int terms>
void round_block(const float* x, int64_t width, int64_t block, const Rows& out, int64_t at,
                 int64_t index) {
  // Magnitudes compare as integers do, and a NaN is then the largest. A scale that is not finite
  // makes the result NaN, whatever the codes are.
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < block; i += 16) {
    const __m512 value = _mm512_maskz_loadu_ps(lanes(width - i), x + i);
    largest = _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(value)));
  }
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(
      _mm512_reduce_max_epi32(largest))));
  const __m512 inverse = _mm512_set1_ps(amax >= kLeast ? 127.0f / amax : 0.0f);
  __m512i total[terms];
  for (int t = 0; t < terms; ++t) total[t] = _mm512_setzero_si512();
  for (int64_t i = 0; i < block; i += 16) {
    __m512 value = _mm512_maskz_loadu_ps(lanes(width - i), x + i);
    value = _mm512_mul_ps(value, inverse);
    for (int t = 0; t < terms; ++t) {
      const __mmask16 number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
      const __m512i q = _mm512_maskz_cvtps_epi32(number, value);
      total[t] = _mm512_add_epi32(total[t], q);
      auto* to = reinterpret_cast<__m128i*>(out.codes + t * out.plane + at + i);
      _mm_storeu_si128(to, _mm512_cvtsepi32_epi8(q));
      value = _mm512_mul_ps(_mm512_sub_ps(value, _mm512_cvtepi32_ps(q)), _mm512_set1_ps(kFiner));
    }
  }
  float sum = 0.0f;
  for (int t = 0; t < terms; ++t) {
    const int32_t codes = _mm512_reduce_add_epi32(total[t]);
    out.offset[t * out.blocks + index] = -128 * codes;
    sum = sum * kFiner + float(codes);
  }
  out.scale[index] = amax / 127.0f / (terms == 1 ? 1.0f : kFiner);
  out.sum[index] = sum;
}

void round_row(const PackedWeights& w, const float* x, int64_t row, Rounding rounding,
               const Rows& out) {
  for (int64_t b = 0; b < w.blocks(); ++b) {
    const int64_t first = b * w.block, at = row * w.k + first, index = row * w.blocks() + b;
    const auto round = rounding == Rounding::exact ? round_block<2> : round_block<1>;
    round(x + row * w.width + first, w.width - first, w.block, out, at, index);
  }
}

inline __m512i four_of(const int8_t* codes) {
  int32_t value;
  std::memcpy(&value, codes, sizeof value);
  return _mm512_set1_epi32(value);
}

// What becomes of the sums of one panel, whose first output feature is `first`.
template <int rows>
void finish(const PackedWeights& w, const float (*totals)[kPanel], float* y, int64_t first) {
  const int64_t width = w.outputs(), left = width - first;
  const __mmask16 m0 = lanes(left), m1 = lanes(left - 16);
  __m512 b0 = _mm512_setzero_ps(), b1 = b0;
  if (w.bias != nullptr && w.gated()) {
    b0 = _mm512_maskz_loadu_ps(m0, w.bias + first);
    b1 = _mm512_maskz_loadu_ps(m0, w.bias + width + first);
  } else if (w.bias != nullptr) {
    b0 = _mm512_maskz_loadu_ps(m0, w.bias + first);
    b1 = _mm512_maskz_loadu_ps(m1, w.bias + first + 16);
  }
  for (int r = 0; r < rows; ++r) {
    const __m512 t0 = _mm512_add_ps(_mm512_load_ps(totals[r]), b0);
    const __m512 t1 = _mm512_add_ps(_mm512_load_ps(totals[r] + 16), b1);
    float* out = y + r * width + first;
    if (w.gated()) {
      const __m512 gate = w.activation == Activation::silu ? silu_ps(t0) : gelu_tanh_ps(t0);
      _mm512_mask_storeu_ps(out, m0, _mm512_mul_ps(gate, t1));
    } else {
      _mm512_mask_storeu_ps(out, m0, t0);
      _mm512_mask_storeu_ps(out + 16, m1, t1);
    }
  }
}

// `rows` rows of x, from row `top` on, times one panel, whose first output is `first`. Sums of a
// block are exact integers: codes of weights are unsigned and, in 8 bit, 128 too large, which the
// start value of the sum takes back.
template <int bits, int terms, int rows>
void tile(const PackedWeights& w, const uint8_t* codes, const float* wscale, const float* wzero,
          const Rows& x, int64_t top, float* y, int64_t first) {
  const int64_t k = w.k, blocks = w.blocks(), groups = w.block / 4;
  const int8_t* a = x.codes + top * k;
  alignas(64) float totals[rows][kPanel];
  std::memset(totals, 0, sizeof totals);
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t b = 0; b < blocks; ++b) {
    __m512i s[terms][rows][2];
    for (int t = 0; t < terms; ++t) {
      for (int r = 0; r < rows; ++r) {
        const int32_t* start = x.offset + t * x.blocks + (top + r) * blocks + b;
        s[t][r][0] = s[t][r][1] = bits == 8 ? _mm512_set1_epi32(*start) : _mm512_setzero_si512();
      }
    }
    const int8_t* at = a + b * w.block;
    for (int64_t g = 0; g < groups; g += bits == 8 ? 1 : 2) {
      const __m512i w0 = _mm512_loadu_si512(codes), w1 = _mm512_loadu_si512(codes + 64);
      _mm_prefetch(reinterpret_cast<const char*>(codes + 2048), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(codes + 2112), _MM_HINT_T0);
      codes += 128;
      if constexpr (bits == 8) {
        for (int t = 0; t < terms; ++t) {
          for (int r = 0; r < rows; ++r) {
            const __m512i v = four_of(at + t * x.plane + r * k + g * 4);
            s[t][r][0] = _mm512_dpbusd_epi32(s[t][r][0], w0, v);
            s[t][r][1] = _mm512_dpbusd_epi32(s[t][r][1], w1, v);
          }
        }
      } else {
        const __m512i l0 = _mm512_and_si512(w0, low), l1 = _mm512_and_si512(w1, low);
        const __m512i h0 = _mm512_and_si512(_mm512_srli_epi16(w0, 4), low);
        const __m512i h1 = _mm512_and_si512(_mm512_srli_epi16(w1, 4), low);
        for (int t = 0; t < terms; ++t) {
          for (int r = 0; r < rows; ++r) {
            const int8_t* from = at + t * x.plane + r * k + g * 4;
            const __m512i u = four_of(from), v = four_of(from + 4);
            s[t][r][0] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(s[t][r][0], l0, u), h0, v);
            s[t][r][1] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(s[t][r][1], l1, u), h1, v);
          }
        }
      }
    }
    const __m512 ws0 = _mm512_loadu_ps(wscale + b * kPanel);
    const __m512 ws1 = _mm512_loadu_ps(wscale + b * kPanel + 16);
    for (int r = 0; r < rows; ++r) {
      const int64_t index = (top + r) * blocks + b;
      const __m512 as = _mm512_set1_ps(x.scale[index]);
      __m512 s0 = _mm512_cvtepi32_ps(s[0][r][0]), s1 = _mm512_cvtepi32_ps(s[0][r][1]);
      if constexpr (terms == 2) {
        const __m512 finer = _mm512_set1_ps(kFiner);
        s0 = _mm512_fmadd_ps(s0, finer, _mm512_cvtepi32_ps(s[1][r][0]));
        s1 = _mm512_fmadd_ps(s1, finer, _mm512_cvtepi32_ps(s[1][r][1]));
      }
      __m512 t0 = _mm512_load_ps(totals[r]), t1 = _mm512_load_ps(totals[r] + 16);
      t0 = _mm512_fmadd_ps(s0, _mm512_mul_ps(ws0, as), t0);
      t1 = _mm512_fmadd_ps(s1, _mm512_mul_ps(ws1, as), t1);
      if constexpr (bits == 4) {
        const __m512 total = _mm512_set1_ps(x.scale[index] * x.sum[index]);
        t0 = _mm512_fnmadd_ps(_mm512_loadu_ps(wzero + b * kPanel), total, t0);
        t1 = _mm512_fnmadd_ps(_mm512_loadu_ps(wzero + b * kPanel + 16), total, t1);
      }
      _mm512_store_ps(totals[r], t0);
      _mm512_store_ps(totals[r] + 16, t1);
    }
  }
  finish<rows>(w, totals, y, first);
}

using Tile = void (*)(const PackedWeights&, const uint8_t*, const float*, const float*,
                      const Rows&, int64_t, float*, int64_t);

template <int bits, int terms>
constexpr Tile kTiles[kMaxTile] = {tile<bits, terms, 1>, tile<bits, terms, 2>,
                                   tile<bits, terms, 3>, tile<bits, terms, 4>,
                                   tile<bits, terms, 5>, tile<bits, terms, 6>};

const Tile* tiles_of(int bits, Rounding rounding) {
  if (rounding == Rounding::exact) return bits == 8 ? kTiles<8, 2> : kTiles<4, 2>;
  return bits == 8 ? kTiles<8, 1> : kTiles<4, 1>;
}

// Panels [first, last) for rows [top, bottom), tiles of nearly equal height.
void panels(const PackedWeights& w, const Rows& x, Rounding rounding, float* y, int64_t first,
            int64_t last, int64_t top, int64_t bottom) {
  const Tile* tiles = tiles_of(w.bits, rounding);
  const int64_t most = rounding == Rounding::exact ? kMaxExactTile : kMaxTile;
  const int64_t rows = bottom - top, count = (rows + most - 1) / most;
  for (int64_t p = first; p < last; ++p) {
    const uint8_t* codes = w.codes + p * w.panel_bytes();
    const float* scale = w.scale + p * w.blocks() * kPanel;
    const float* zero = w.bits == 4 ? w.zero + p * w.blocks() * kPanel : nullptr;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t from = top + rows * t / count, height = top + rows * (t + 1) / count - from;
      tiles[height - 1](w, codes, scale, zero, x, from, y + from * w.outputs(),
                        p * w.panel_outputs());
    }
  }
}

}  // namespace

size_t linear_scratch_bytes(const PackedWeights& w, int64_t rows, Rounding rounding) {
  const int64_t terms = int64_t(rounding), blocks = rows * w.blocks();
  return aligned(terms * rows * w.k) + 2 * aligned(blocks * sizeof(float)) +
         aligned(terms * blocks * sizeof(int32_t));
}

void linear(const PackedWeights& w, const float* x, float* y, int64_t rows, Rounding rounding,
            void* scratch, Parallel& parallel) {
  const Rows rounded = rows_in(w, scratch, rows, int64_t(rounding));
  const int64_t chunks = std::min<int64_t>(kParts, (rows + 7) / 8);
  parallel.run(chunks, [&](size_t i) {
    for (int64_t r = rows * i / chunks; r < int64_t(rows * (i + 1) / chunks); ++r) {
      round_row(w, x, r, rounding, rounded);
    }
  });
  const int64_t parts = std::clamp<int64_t>(w.n * w.k * rows / kPartProducts, 1,
                                            std::min(w.panels(), kParts));
  const int64_t heights = (rows + kRowBlock - 1) / kRowBlock;
  parallel.run(parts, [&](size_t i) {
    for (int64_t h = 0; h < heights; ++h) {
      panels(w, rounded, rounding, y, w.panels() * i / parts, w.panels() * (i + 1) / parts,
             rows * h / heights, rows * (h + 1) / heights);
    }
  });
}

void gather_row(const PackedWeights& w, int64_t index, float* out) {
  const int64_t panel = index / kPanel, lane = index % kPanel;
  const uint8_t* codes = w.codes + panel * w.panel_bytes();
  for (int64_t i = 0; i < w.width; ++i) {
    const int64_t block = i / w.block, at = (panel * w.blocks() + block) * kPanel + lane;
    const int64_t group = i / 4;
    float value;
    if (w.bits == 8) {
      value = (float(codes[group * 128 + lane * 4 + i % 4]) - 128.0f) * w.scale[at];
    } else {
      const uint8_t pair = codes[group / 2 * 128 + lane * 4 + i % 4];
      value = float(group % 2 ? pair >> 4 : pair & 15) * w.scale[at] - w.zero[at];
    }
    out[i] = value;
  }
}

}  // namespace trtllm_lite
