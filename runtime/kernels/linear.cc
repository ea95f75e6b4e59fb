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
constexpr int64_t kPartProducts = 32 * 1024;
constexpr int64_t kParts = 32;
// For fewer products with a byte of codes the processor, which fetches ahead by itself, is fastest
// alone (measured on Zen 4, one row of 8 bit: 27 GB/s, a plain read 31, other distances and hints 20
// to 26).
constexpr int64_t kFetchProducts = 4;
constexpr int64_t kFetchAhead = 4096;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The rounded rows: codes [terms][rows, k], and per block the scale of the last term. One step of a
// term is `kFiner` steps of the next.
struct Rows {
  int8_t* codes;
  float* scale;
  int32_t* start;  // [terms][rows, blocks]: what takes back the weights' zero point, `start_of`
  int64_t plane;   // codes of one term
  int64_t blocks;  // blocks of one term
  int bits;        // of the weights
};

constexpr float kFiner = 254.0f;
// Smaller magnitudes count as zero: 127 divided by them would not be finite.
constexpr float kLeast = 1e-36f;

Rows rows_in(const PackedWeights& w, void* scratch, int64_t rows, int64_t terms) {
  auto* base = static_cast<uint8_t*>(scratch);
  const int64_t plane = rows * w.k, blocks = rows * w.blocks();
  const size_t codes = aligned(terms * plane), floats = aligned(blocks * sizeof(float));
  return {reinterpret_cast<int8_t*>(base), reinterpret_cast<float*>(base + codes),
          reinterpret_cast<int32_t*>(base + codes + floats), plane, blocks, w.bits};
}

// Of a block whose codes sum up to `sum`. 8 bit: the start of its products, -128 x sum. 4 bit: the
// factor of the zero point, which differs from feature to feature: -sum in the low half.
int32_t start_of(int bits, int32_t sum) {
  return bits == 8 ? -128 * sum : int32_t(uint16_t(-sum));
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
  for (int t = 0; t < terms; ++t) {
    const int32_t sum = _mm512_reduce_add_epi32(total[t]);
    out.start[t * out.blocks + index] = start_of(out.bits, sum);
  }
  out.scale[index] = amax / 127.0f / (terms == 1 ? 1.0f : kFiner);
}

void round_row(const PackedWeights& w, const float* x, int64_t row, Rounding rounding,
               const Rows& out) {
  for (int64_t b = 0; b < w.blocks(); ++b) {
    const int64_t first = b * w.block, at = row * w.k + first, index = row * w.blocks() + b;
    const auto round = rounding == Rounding::exact ? round_block<2> : round_block<1>;
    round(x + row * w.width + first, w.width - first, w.block, out, at, index);
  }
}

inline float scale_of(uint16_t code) {
  const uint32_t bits = (uint32_t(code) << 13) + (uint32_t(127 - 47) << 23);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Sixteen scales in the form that linear.h describes.
inline __m512 scales_of(const uint16_t* from) {
  const auto* scales = reinterpret_cast<const __m256i*>(from);
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(scales)), 13);
  return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32((127 - 47) << 23)));
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

// What a tile fetches while it computes: from `from` on, `step` bytes for each 128 bytes of codes.
struct Fetch {
  const uint8_t* from;
  int64_t step;
};

// The start of a block's products for two times sixteen features.
template <int bits>
inline void begin(int32_t start, __m512i z0, __m512i z1, __m512i (&s)[2]) {
  const __m512i value = _mm512_set1_epi32(start);
  if constexpr (bits == 8) {
    s[0] = s[1] = value;
  } else {
    s[0] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), z0, value);
    s[1] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), z1, value);
  }
}

// Adds the products of 128 bytes of codes: four inputs of 32 features, or eight in 4 bit.
template <int bits>
inline void multiply(__m512i w0, __m512i w1, const int8_t* x, __m512i (&s)[2]) {
  const __m512i u = four_of(x);
  if constexpr (bits == 8) {
    s[0] = _mm512_dpbusd_epi32(s[0], w0, u);
    s[1] = _mm512_dpbusd_epi32(s[1], w1, u);
  } else {
    const __m512i low = _mm512_set1_epi8(15), v = four_of(x + 4);
    const __m512i l0 = _mm512_and_si512(w0, low), l1 = _mm512_and_si512(w1, low);
    const __m512i h0 = _mm512_and_si512(_mm512_srli_epi16(w0, 4), low);
    const __m512i h1 = _mm512_and_si512(_mm512_srli_epi16(w1, 4), low);
    s[0] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(s[0], l0, u), h0, v);
    s[1] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(s[1], l1, u), h1, v);
  }
}

// `rows` rows of x, from row `top` on, times one panel, whose first output is `first`. Sums of a
// block are exact integers: codes of weights are unsigned, and the start value of a sum takes back
// their zero point. The loop over codes stays short: the processor fetches ahead for few loads.
template <int bits, int terms, int rows>
void tile(const PackedWeights& w, const uint8_t* codes, const uint16_t* wscale,
          const uint8_t* wzero, const Rows& x, int64_t top, float* y, int64_t first, Fetch fetch) {
  constexpr int hint = rows == 1 ? 3 : 2;  // to the first-level cache, to the second
  const int64_t k = w.k, blocks = w.blocks();
  const int8_t* at = x.codes + top * k;
  const int32_t* start = x.start + top * blocks;
  const float* xscale = x.scale + top * blocks;
  alignas(64) float totals[rows][kPanel];
  std::memset(totals, 0, sizeof totals);
  for (int64_t b = 0; b < blocks; ++b) {
    __m512i z0{}, z1{};
    if constexpr (bits == 4) {
      const auto* from = reinterpret_cast<const __m128i*>(wzero + b * (kPanel / 2));
      const __m128i both = _mm_loadu_si128(from), half = _mm_set1_epi8(15);
      z0 = _mm512_cvtepu8_epi32(_mm_and_si128(both, half));
      z1 = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(both, 4), half));
    }
    __m512i s[terms][rows][2];
    for (int t = 0; t < terms; ++t) {
      for (int r = 0; r < rows; ++r) {
        begin<bits>(start[t * x.blocks + r * blocks + b], z0, z1, s[t][r]);
      }
    }
    for (int64_t i = 0; i < w.block; i += 8) {
      for (int half = 0; half < (bits == 8 ? 2 : 1); ++half) {
        const __m512i w0 = _mm512_loadu_si512(codes), w1 = _mm512_loadu_si512(codes + 64);
        __builtin_prefetch(fetch.from, 0, hint);
        __builtin_prefetch(fetch.from + 64, 0, hint);
        fetch.from += fetch.step;
        codes += 128;
        for (int t = 0; t < terms; ++t) {
          for (int r = 0; r < rows; ++r) {
            multiply<bits>(w0, w1, at + t * x.plane + r * k + half * 4, s[t][r]);
          }
        }
      }
      at += 8;
    }
    const __m512 ws0 = scales_of(wscale + b * kPanel), ws1 = scales_of(wscale + b * kPanel + 16);
    for (int r = 0; r < rows; ++r) {
      const __m512 as = _mm512_set1_ps(xscale[r * blocks + b]);
      __m512 s0 = _mm512_cvtepi32_ps(s[0][r][0]), s1 = _mm512_cvtepi32_ps(s[0][r][1]);
      if constexpr (terms == 2) {
        const __m512 finer = _mm512_set1_ps(kFiner);
        s0 = _mm512_fmadd_ps(s0, finer, _mm512_cvtepi32_ps(s[1][r][0]));
        s1 = _mm512_fmadd_ps(s1, finer, _mm512_cvtepi32_ps(s[1][r][1]));
      }
      const __m512 t0 = _mm512_load_ps(totals[r]), t1 = _mm512_load_ps(totals[r] + 16);
      _mm512_store_ps(totals[r], _mm512_fmadd_ps(s0, _mm512_mul_ps(ws0, as), t0));
      _mm512_store_ps(totals[r] + 16, _mm512_fmadd_ps(s1, _mm512_mul_ps(ws1, as), t1));
    }
  }
  finish<rows>(w, totals, y, first);
}

using Tile = void (*)(const PackedWeights&, const uint8_t*, const uint16_t*, const uint8_t*,
                      const Rows&, int64_t, float*, int64_t, Fetch);

template <int bits, int terms>
constexpr Tile kTiles[kMaxTile] = {tile<bits, terms, 1>, tile<bits, terms, 2>,
                                   tile<bits, terms, 3>, tile<bits, terms, 4>,
                                   tile<bits, terms, 5>, tile<bits, terms, 6>};

const Tile* tiles_of(int bits, Rounding rounding) {
  if (rounding == Rounding::exact) return bits == 8 ? kTiles<8, 2> : kTiles<4, 2>;
  return bits == 8 ? kTiles<8, 1> : kTiles<4, 1>;
}

// What the t-th of `tiles` tiles over a panel fetches: the next panel, half by each of the first two
// or all by the only one. One row of 4 bit: what it
// needs soon itself. products: of each weight.
Fetch fetch_of(const PackedWeights& w, const uint8_t* codes, int64_t products, int64_t t,
               int64_t tiles) {
  if (products == 1 && w.bits == 4) return {codes + kFetchAhead, 128};
  if (products * 8 / w.bits < kFetchProducts || t > 1) return {codes, 0};
  const uint8_t* next = codes + w.panel_bytes();
  return tiles == 1 ? Fetch{next, 128} : Fetch{next + t * w.panel_bytes() / 2, 64};
}

// Panels [first, last) for rows [top, bottom), tiles of nearly equal height.
void panels(const PackedWeights& w, const Rows& x, Rounding rounding, float* y, int64_t first,
            int64_t last, int64_t top, int64_t bottom) {
  const Tile* tiles = tiles_of(w.bits, rounding);
  const int64_t most = rounding == Rounding::exact ? kMaxExactTile : kMaxTile;
  const int64_t rows = bottom - top, count = (rows + most - 1) / most;
  const int64_t products = rows * int64_t(rounding);
  for (int64_t p = first; p < last; ++p) {
    const uint8_t* codes = w.codes + p * w.panel_bytes();
    const uint16_t* scale = w.scale + p * w.panel_scales();
    const uint8_t* zero = w.bits == 4 ? w.zero + p * w.panel_zeros() : nullptr;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t from = top + rows * t / count, height = top + rows * (t + 1) / count - from;
      tiles[height - 1](w, codes, scale, zero, x, from, y + from * w.outputs(),
                        p * w.panel_outputs(), fetch_of(w, codes, products, t, count));
    }
  }
}

}  // namespace

size_t linear_scratch_bytes(const PackedWeights& w, int64_t rows, Rounding rounding) {
  const int64_t terms = int64_t(rounding), blocks = rows * w.blocks();
  return aligned(terms * rows * w.k) + aligned(blocks * sizeof(float)) +
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
  const uint8_t* codes = w.codes + panel * w.panel_bytes() + lane * 4;
  const uint16_t* scale = w.scale + panel * w.panel_scales() + lane;
  for (int64_t i = 0; i < w.width; ++i) {
    const int64_t block = i / w.block, group = i / 4;
    int code, zero = 128;
    if (w.bits == 8) {
      code = codes[group * 128 + i % 4];
    } else {
      const int pair = codes[group / 2 * 128 + i % 4];
      const int zeros = w.zero[panel * w.panel_zeros() + block * (kPanel / 2) + lane % 16];
      code = group % 2 ? pair >> 4 : pair & 15;
      zero = lane < 16 ? zeros & 15 : zeros >> 4;
    }
    out[i] = float(code - zero) * scale_of(scale[block * kPanel]);
  }
}

}  // namespace trtllm_lite
