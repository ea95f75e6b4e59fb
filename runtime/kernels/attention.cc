#include "isa.h"

#include "attention.h"

#include "attention_few.h"
#include "attention_many.h"

namespace trtllm_lite {
namespace {

constexpr size_t aligned(size_t floats) { return (floats + 15) / 16 * 16; }

size_t query_floats(const Attention& a) { return aligned(a.batch * a.seq * a.heads * a.dim); }

// Below this many products of a query and a key, waking other threads costs more than it gives.
constexpr int64_t kAlone = 4096;
constexpr int64_t kChunks = 16;

template <class Cache>
void run(const Attention& a, float* queries, Parallel& parallel) {
  const int64_t all = a.batch * a.seq;
  const int64_t chunks = std::min<int64_t>(kChunks, (all + 7) / 8);
  parallel.run(chunks, [&](size_t c) {
    for (int64_t i = all * c / chunks; i < int64_t(all * (c + 1) / chunks); ++i) {
      const int64_t b = i / a.seq, s = i % a.seq;
      if (s < a.tokens(b)) {
        append<Cache>(a, b, s, thread_buffer(a.dim));
        prepare_queries(a, b, s, queries);
      } else {
        std::memset(a.out + i * a.heads * a.dim, 0, a.heads * a.dim * sizeof(float));
      }
    }
  });
  if (a.seq > kFewTokens) {
    const int64_t each = unit_tokens(a), units = (a.seq + each - 1) / each;
    parallel.run(a.batch * a.kv_heads * units, [&](size_t i) {
      // The last tokens of a row have the most keys: they go first.
      const int64_t unit = units - 1 - int64_t(i) / (a.batch * a.kv_heads);
      const int64_t rest = int64_t(i) % (a.batch * a.kv_heads);
      const int64_t b = rest / a.kv_heads, head = rest % a.kv_heads;
      if (a.bfloat16) {
        Unit<Cache, Bfloat16Factors>(a, b, head, unit * each).run(queries);
      } else {
        Unit<Cache, Float32Factors>(a, b, head, unit * each).run(queries);
      }
    });
    return;
  }
  const int64_t count = parts_of(a);
  const Parts parts{queries + query_floats(a), count, a.dim};
  const auto few = [&](size_t i) {
    few_rows<Cache>(a, queries, parts, int64_t(i) / count / a.kv_heads,
                    int64_t(i) / count % a.kv_heads, int64_t(i) % count);
  };
  const auto join = [&](size_t i) {
    const int64_t b = i / a.seq, s = i % a.seq;
    if (s >= a.tokens(b)) return;
    for (int64_t h = 0; h < a.heads; ++h) merge(a, parts, b, s, h);
  };
  const size_t units = a.batch * a.kv_heads * count;
  if (all * a.heads * longest(a) < kAlone) {
    for (size_t i = 0; i < units; ++i) few(i);
  } else {
    parallel.run(units, few);
  }
  parallel.run(chunks, [&](size_t c) {
    for (int64_t i = all * c / chunks; i < int64_t(all * (c + 1) / chunks); ++i) join(i);
  });
}

}  // namespace

size_t attention_scratch_bytes(const Attention& a) {
  size_t floats = query_floats(a);
  if (a.seq <= kFewTokens) floats += a.batch * a.seq * a.heads * parts_of(a) * (a.dim + 16);
  return floats * sizeof(float);
}

void attend(const Attention& a, void* scratch, Parallel& parallel) {
  auto* queries = static_cast<float*>(scratch);
  switch (a.cache_type) {
    case CacheType::float32: return run<Float32Cache>(a, queries, parallel);
    case CacheType::float16: return run<Float16Cache>(a, queries, parallel);
    case CacheType::int8: return run<Int8Cache>(a, queries, parallel);
  }
}

}  // namespace trtllm_lite
