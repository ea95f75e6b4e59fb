// The operators of the domain trtllm_lite, and the entry point that ONNX Runtime looks for.

#include <cstring>

#include "attention.h"
#include "linear.h"
#include "ort_op.h"
#include "parallel.h"

namespace trtllm_lite {
namespace {

class SessionThreads : public Parallel {
 public:
  explicit SessionThreads(const Context& context) : context_(context) {}

 protected:
  void spread(size_t count, void (*call)(void*, size_t), void* data) override {
    context_.parallel_for(count, [=](size_t i) noexcept { call(data, i); });
  }

 private:
  const Context& context_;
};

void require(bool ok, const char* what) {
  if (!ok) throw Error(what);
}

// The attributes that describe packed weights; their data come with each run.
PackedWeights described(const Info& info) {
  PackedWeights w{};
  w.n = info.integer("n");
  w.width = info.integer("k");
  w.block = info.integer("block_size");
  w.bits = int(info.integer("bits"));
  w.activation = Activation(info.integer("activation"));
  require(w.bits == 4 || w.bits == 8, "bits: allowed are 4 and 8");
  require(w.block == 32 || w.block == 64 || w.block == 128, "block_size: allowed are 32, 64, 128");
  require(w.n > 0 && w.width > 0 && w.n <= INT32_MAX && w.width <= INT32_MAX,
          "n and k: allowed are 1 to 2147483647");
  require(w.activation == Activation::none || w.n % 2 == 0, "gates and ups must be equally many");
  require(w.activation >= Activation::none && w.activation <= Activation::gelu_tanh,
          "activation: allowed are 0 (none), 1 (SiLU), 2 (tanh GELU)");
  w.k = (w.width + w.block - 1) / w.block * w.block;
  return w;
}

// Weights are constants: their sizes are checked once, when the session is made.
void check_sizes(const Info& info, const PackedWeights& w, size_t first) {
  const Tensor codes = info.constant(first), scale = info.constant(first + 1);
  require(codes && codes.count() == w.panels() * w.panel_bytes(), "codes: wrong size");
  require(scale && scale.count() == w.panels() * w.panel_scales(), "scale: wrong size");
  if (w.bits == 4) {
    const Tensor zero = info.constant(first + 2);
    require(zero && zero.count() == w.panels() * w.panel_zeros(), "zero: wrong size");
  }
}

PackedWeights with_data(PackedWeights w, const Context& context, size_t first) {
  w.codes = context.data<const uint8_t>(first);
  w.scale = context.data<const uint16_t>(first + 1);
  w.zero = context.data<const uint8_t>(first + 2);
  return w;
}

// The data of an input that may be absent and otherwise has `count` elements.
template <class T>
T* sized(const Context& context, size_t index, int64_t count, const char* what) {
  const Tensor tensor = context.input(index);
  require(!tensor || tensor.count() == count, what);
  return tensor.as<T>();
}

class BlockLinear {
 public:
  static constexpr const char* kName = "BlockLinear";
  static constexpr Port kInputs[] = {{ort::kFloat32},
                                     {ort::kUint8},
                                     {ort::kUint16},
                                     {ort::kUint8, ort::kOptional},
                                     {ort::kFloat32, ort::kOptional}};
  static constexpr Port kOutputs[] = {{ort::kFloat32}};

  explicit BlockLinear(const Info& info)
      : weights_(described(info)), exact_tokens_(info.integer("exact_tokens")), arena_(info) {
    check_sizes(info, weights_, 1);
  }

  void compute(const Context& context) const {
    const Tensor x = context.input(0);
    require(x.rank >= 1 && x.dims[x.rank - 1] == weights_.width, "x: its last dimension is not k");
    PackedWeights w = with_data(weights_, context, 1);
    w.bias = sized<const float>(context, 4, w.n, "bias: wrong size");
    Tensor like = x;
    like.dims[x.rank - 1] = w.outputs();
    const Tensor y = context.output(0, like);
    const int64_t rows = x.count() / w.width;
    if (rows == 0) return;
    // By the tokens of a row, not by the rows, so that a row does not depend on its neighbours.
    const int64_t tokens = x.rank < 2 ? 1 : x.dims[x.rank - 2];
    const bool few = tokens <= exact_tokens_;
    const Rounding rounding = few ? Rounding::exact : Rounding::fast;
    const auto scratch = arena_.allocate<uint8_t>(linear_scratch_bytes(w, rows, rounding));
    SessionThreads threads(context);
    linear(w, x.as<float>(), y.as<float>(), rows, rounding, scratch.get(), threads);
  }

 private:
  PackedWeights weights_;
  int64_t exact_tokens_;  // most tokens of a row whose activations are rounded exactly
  Arena arena_;
};

class BlockGather {
 public:
  static constexpr const char* kName = "BlockGather";
  static constexpr Port kInputs[] = {{ort::kInt64},
                                     {ort::kUint8},
                                     {ort::kUint16},
                                     {ort::kUint8, ort::kOptional}};
  static constexpr Port kOutputs[] = {{ort::kFloat32}};

  explicit BlockGather(const Info& info) : weights_(described(info)) {
    require(!weights_.gated(), "activation: a gather has none");
    check_sizes(info, weights_, 1);
  }

  void compute(const Context& context) const {
    const Tensor ids = context.input(0);
    const PackedWeights w = with_data(weights_, context, 1);
    require(ids.rank < Tensor::kMaxRank, "ids: too many dimensions");
    Tensor like = ids;
    like.dims[like.rank++] = w.width;
    float* out = context.output(0, like).as<float>();
    const auto* index = ids.as<int64_t>();
    for (int64_t i = 0; i < ids.count(); ++i) {
      require(index[i] >= 0 && index[i] < w.n, "ids: an index is out of range");
      gather_row(w, index[i], out + i * w.width);
    }
  }

 private:
  PackedWeights weights_;
};

// Types of a cache. ONNX Runtime infers no output type among several, so each has its own operator.
struct Float32 {
  static constexpr const char* kName = "Attention";
  static constexpr ort::ElementType kType = ort::kFloat32;
  static constexpr CacheType kCache = CacheType::float32;
  static constexpr size_t kBytes = 4;
};
struct Float16 {
  static constexpr const char* kName = "AttentionFloat16";
  static constexpr ort::ElementType kType = ort::kFloat16;
  static constexpr CacheType kCache = CacheType::float16;
  static constexpr size_t kBytes = 2;
};
struct Int8 {
  static constexpr const char* kName = "AttentionInt8";
  static constexpr ort::ElementType kType = ort::kInt8;
  static constexpr CacheType kCache = CacheType::int8;
  static constexpr size_t kBytes = 1;
};

bool has_bfloat16() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}

// Inputs stand where com.microsoft GroupQueryAttention has them. `bfloat16` 1 lets long calls round what
// they multiply to it, or less where it lies far behind; a processor that cannot computes in float32.
template <class Cache>
class CachedAttention {
 public:
  static constexpr const char* kName = Cache::kName;
  static constexpr Port kInputs[] = {
      {ort::kFloat32},                  // query, or query, key and value packed
      {ort::kFloat32, ort::kOptional},  // key
      {ort::kFloat32, ort::kOptional},  // value
      {Cache::kType},                   // past_key
      {Cache::kType},                   // past_value
      {ort::kInt32},                    // seqlens_k: tokens after this call, less one
      {ort::kInt32},                    // total_sequence_length: not needed here
      {ort::kFloat32, ort::kOptional},  // cos_cache
      {ort::kFloat32, ort::kOptional},  // sin_cache
      {ort::kInt64, ort::kOptional},    // position_ids: refused
      {ort::kFloat32, ort::kOptional},  // attention_bias: refused
      {ort::kFloat32, ort::kOptional},  // head_sink
      {ort::kFloat32, ort::kOptional},  // k_scale
      {ort::kFloat32, ort::kOptional},  // v_scale
      {ort::kFloat32, ort::kOptional},  // q_norm_weight: refused
      {ort::kFloat32, ort::kOptional},  // k_norm_weight: refused
      {ort::kInt32, ort::kOptional},    // query_seqlens
  };
  static constexpr Port kOutputs[] = {{ort::kFloat32}, {Cache::kType}, {Cache::kType}};

  explicit CachedAttention(const Info& info) : arena_(info) {
    call_.heads = info.integer("num_heads");
    call_.kv_heads = info.integer("kv_num_heads");
    call_.scale = info.real("scale");
    call_.softcap = info.real("softcap");
    call_.window = info.integer("local_window_size");
    call_.interleaved = info.integer("rotary_interleaved") != 0;
    rotary_ = info.integer("do_rotary") != 0;
    const int64_t bfloat16 = info.integer("bfloat16", 0);
    require(bfloat16 == 0 || bfloat16 == 1, "bfloat16: allowed are 0 and 1");
    call_.bfloat16 = bfloat16 == 1 && has_bfloat16();
    require(call_.kv_heads > 0 && call_.heads > 0 && call_.heads % call_.kv_heads == 0,
            "num_heads must be a multiple of kv_num_heads");
  }

  void compute(const Context& context) const {
    Attention a = call_;
    for (size_t i : {9, 10, 14, 15}) {
      require(context.data<void>(i) == nullptr, "position_ids, attention_bias, q_norm_weight, "
                                                "k_norm_weight: not supported");
    }
    const Tensor q = context.input(0), past_k = context.input(3), past_v = context.input(4);
    require(q.rank == 3 && past_k.rank == 4 && past_v.rank == 4, "wrong ranks");
    a.batch = q.dims[0];
    a.seq = q.dims[1];
    a.capacity = past_k.dims[2];
    a.dim = past_k.dims[3];
    require(a.dim > 0 && a.dim % 16 == 0, "head size: allowed are multiples of 16");
    require(past_k.dims[0] == a.batch && past_k.dims[1] == a.kv_heads &&
                past_v.dims == past_k.dims,
            "past_key and past_value do not fit");
    queries(context, q, a);
    caches(context, past_k, past_v, a);
    rotary(context, a);
    lengths(context, a);
    a.sinks = sized<const float>(context, 11, a.heads, "head_sink: wrong size");
    a.out = context.output(0, {a.batch, a.seq, a.heads * a.dim}).as<float>();
    const auto scratch = arena_.allocate<uint8_t>(attention_scratch_bytes(a));
    SessionThreads threads(context);
    attend(a, scratch.get(), threads);
  }

 private:
  static void queries(const Context& context, const Tensor& q, Attention& a) {
    const int64_t own = a.heads * a.dim, other = a.kv_heads * a.dim;
    a.q = q.as<float>();
    a.q_stride = q.dims[2];
    const int64_t all = a.batch * a.seq * other;
    a.k = sized<const float>(context, 1, all, "key: wrong size");
    a.v = sized<const float>(context, 2, all, "value: wrong size");
    if (a.k == nullptr) {
      require(q.dims[2] == own + 2 * other && a.v == nullptr,
              "packed query, key and value: wrong width");
      a.k = a.q + own;
      a.v = a.k + other;
      a.kv_stride = a.q_stride;
    } else {
      require(q.dims[2] == own && a.v != nullptr, "query, key and value do not fit");
      a.kv_stride = other;
    }
  }

  // Past and present are one buffer when the caller binds them so; if not, the past is copied.
  static void caches(const Context& context, const Tensor& k, const Tensor& v, Attention& a) {
    a.cache_type = Cache::kCache;
    if (Cache::kCache == CacheType::int8) {
      const int64_t channels = a.kv_heads * a.dim;
      a.k_scale = sized<const float>(context, 12, channels, "k_scale: wrong size");
      a.v_scale = sized<const float>(context, 13, channels, "v_scale: wrong size");
      require(a.k_scale != nullptr && a.v_scale != nullptr, "an int8 cache needs its scales");
    }
    a.k_cache = context.output(1, k).data;
    a.v_cache = context.output(2, v).data;
    if (a.k_cache != k.data) std::memcpy(a.k_cache, k.data, k.count() * Cache::kBytes);
    if (a.v_cache != v.data) std::memcpy(a.v_cache, v.data, v.count() * Cache::kBytes);
  }

  void rotary(const Context& context, Attention& a) const {
    if (!rotary_) return;
    const Tensor cos = context.input(7), sin = context.input(8);
    require(cos && sin && cos.rank == 2 && cos.dims == sin.dims, "cos_cache, sin_cache: missing");
    a.rotary_dim = 2 * cos.dims[1];
    a.cos = cos.as<float>();
    a.sin = sin.as<float>();
    a.positions = cos.dims[0];
    require(a.rotary_dim <= a.dim, "cos_cache: wider than a head");
  }

  static void lengths(const Context& context, Attention& a) {
    a.last = sized<const int32_t>(context, 5, a.batch, "seqlens_k: wrong size");
    a.count = sized<const int32_t>(context, 16, a.batch, "query_seqlens: wrong size");
    for (int64_t b = 0; b < a.batch; ++b) {
      const bool fits = a.tokens(b) >= 0 && a.tokens(b) <= a.seq && a.past(b) >= 0 &&
                        a.last[b] < a.capacity;
      require(fits, "seqlens_k, query_seqlens: outside the cache or the row");
      require(a.rotary_dim == 0 || a.last[b] < a.positions, "a position has no rotation");
    }
  }

  Attention call_{};
  bool rotary_ = false;
  Arena arena_;
};

bool supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace
}  // namespace trtllm_lite

#define EXPORTED extern "C" __attribute__((visibility("default")))

// 1 when this processor can run the kernels.
EXPORTED int trtllm_lite_kernels_supported() { return trtllm_lite::supported() ? 1 : 0; }

// Counts up when a graph made for an older library would compute something else.
EXPORTED int trtllm_lite_kernels_version() { return 2; }

EXPORTED trtllm_lite::ort::Status* RegisterCustomOps(trtllm_lite::ort::SessionOptions* options,
                                                     const trtllm_lite::ort::ApiBase* base) {
  using namespace trtllm_lite;
  static const Operator<BlockLinear> linear;
  static const Operator<BlockGather> gather;
  static const Operator<CachedAttention<Float32>> attention;
  static const Operator<CachedAttention<Float16>> attention_float16;
  static const Operator<CachedAttention<Int8>> attention_int8;
  if (!supported()) {
    return ort::call(base->get_api(1), ort::kCreateStatus, ort::kNotImplemented,
                     "the kernels need a processor with AVX-512 VNNI");
  }
  return register_operators(options, base, "trtllm_lite", linear, gather, attention,
                            attention_float16, attention_int8);
}
