// Causal attention over a KV cache that is appended to in place.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace trtllm_lite {

// How K and V lie in the cache.
enum class CacheType { float32, float16, int8 };

// One call. Queries, keys and values of token (b, s) start at base + (b * seq + s) * stride; heads
// lie side by side. The caches are [batch, kv_heads, capacity, dim] and written in place.
struct Attention {
  int64_t batch, seq, heads, kv_heads, dim, capacity;
  float scale;
  float softcap;         // 0: none
  int64_t window;        // tokens that a query sees, itself included; 0: all
  int64_t rotary_dim;    // leading elements of a head that are rotated; 0: none
  bool interleaved;      // pairs are neighbours, not halves
  CacheType cache_type;
  const float* q;
  const float* k;
  const float* v;
  int64_t q_stride, kv_stride;
  void* k_cache;
  void* v_cache;
  const float* k_scale;  // int8: [kv_heads * dim] per channel
  const float* v_scale;
  const int32_t* last;   // [batch] index of the newest token after this call
  const int32_t* count;  // [batch] valid tokens of the row, or null: seq
  const float* cos;      // [positions, rotary_dim / 2]
  const float* sin;
  int64_t positions;     // rows of cos and sin
  const float* sinks;    // [heads] or null
  float* out;            // [batch, seq, heads * dim]
  // Calls of more than kFewTokens tokens a row round queries, keys, values and weights to bfloat16, and in
  // heads of at most 128 elements queries and keys to eight bits where the key lies at least 512 tokens
  // behind. That needs a processor with AVX512-BF16 and AVX512-VBMI. Sums and the softmax's largest are
  // float32 all the same.
  bool bfloat16;

  int64_t group() const { return heads / kv_heads; }
  int64_t tokens(int64_t b) const { return count != nullptr ? count[b] : seq; }
  int64_t past(int64_t b) const { return int64_t(last[b]) + 1 - tokens(b); }
};

// Bytes of scratch that `attend` needs.
size_t attention_scratch_bytes(const Attention& a);

// Runs one call. Rows beyond `count` are written as zeros. Nothing at or beyond past + count of the
// cache is read or written. A row's result depends on nothing but its own tokens; for calls of at
// most kFewTokens tokens a row it does not even depend, in its last bit, on how many there are.
void attend(const Attention& a, void* scratch, Parallel& parallel);

constexpr int64_t kFewTokens = 24;

}  // namespace trtllm_lite
