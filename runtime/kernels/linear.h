// y = x W^T with block-quantized weights and activations that are quantized on the fly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace trtllm_lite {

constexpr int64_t kPanel = 32;  // output features that lie together: two vectors of sixteen

enum class Activation : int64_t { none = 0, silu = 1, gelu_tanh = 2 };

// Weights [n, k] in panels of 32 rows of W. Within a panel, for each block of `block` inputs:
// the codes of four inputs at a time for all 32 features, [block/4][32][4] bytes (8 bit), or two
// such groups in one byte, low nibble first, [block/8][32][4] (4 bit). A weight is
// (code - zero) * scale; in 8 bit zero is 128.
//
// `scale` is [panels][k/block][32] numbers of 16 bits without a sign: six of an exponent e, then ten
// of a fraction f, for 2^(e - 47) (1 + f / 1024). That is any float16 scale, and a range in which no
// scale of a weight needs more care. `zero`, of 4 bit only, is [panels][k/block][16] bytes: feature i
// in the low nibble of byte i, feature i + 16 in the high one.
//
// With an activation the n features are n/2 gates, then n/2 ups, and the result is
// activation(gate) * up, [rows, n/2]; a panel then holds 16 gates and their 16 ups.
struct PackedWeights {
  const uint8_t* codes;
  const uint16_t* scale;
  const uint8_t* zero;
  const float* bias;  // [n] or null
  int64_t n;
  int64_t k;      // inputs, filled up to a multiple of block with codes that stand for zero
  int64_t width;  // inputs that x has
  int64_t block;  // a multiple of 32
  int bits;
  Activation activation;

  bool gated() const { return activation != Activation::none; }
  int64_t outputs() const { return gated() ? n / 2 : n; }
  int64_t panel_outputs() const { return gated() ? kPanel / 2 : kPanel; }
  int64_t panels() const { return (outputs() + panel_outputs() - 1) / panel_outputs(); }
  int64_t blocks() const { return k / block; }
  int64_t panel_bytes() const { return kPanel * k * bits / 8; }
  int64_t panel_scales() const { return kPanel * blocks(); }
  int64_t panel_zeros() const { return kPanel / 2 * blocks(); }
};

// How finely activations are rounded, per block of a row. `fast`: 8 bit. `exact`: 8 bit, and what
// that leaves in 8 bit again, which is worth 16: twice the products, hidden behind the reading of
// the weights where rows are few.
enum class Rounding { fast = 1, exact = 2 };

// Bytes of scratch that `linear` needs for `rows` rows.
size_t linear_scratch_bytes(const PackedWeights& w, int64_t rows, Rounding rounding);

// x [rows, width] -> y [rows, w.outputs()]. Every row is rounded on its own, so that a row's result
// depends on nothing but the row, bit for bit.
void linear(const PackedWeights& w, const float* x, float* y, int64_t rows, Rounding rounding,
            void* scratch, Parallel& parallel);

// out [width] = row `index` of W, dequantized, of weights without an activation. For embeddings that
// share the output layer's weights.
void gather_row(const PackedWeights& w, int64_t index, float* out);

}  // namespace trtllm_lite
