// What an operator is written with: checked calls, tensors, and the glue that turns a kernel class
// into a CustomOp. Exceptions stop here: they reach ONNX Runtime as statuses.
#ifndef TRTLLM_LITE_KERNELS_ORT_OP_H_
#define TRTLLM_LITE_KERNELS_ORT_OP_H_

#include <array>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ort_api.h"

namespace trtllm_lite {

// A call to the runtime failed, or an operator was given what it cannot compute.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check(const ort::Api* api, ort::Status* status) {
  if (status == nullptr) return;
  std::string message = ort::call(api, ort::kGetErrorMessage, status);
  ort::call(api, ort::kReleaseStatus, status);
  throw Error(message);
}

// A view of a tensor that the session owns, valid until compute() returns. `value` is null when an
// optional input or output is absent.
struct Tensor {
  static constexpr size_t kMaxRank = 8;

  const ort::Value* value = nullptr;
  void* data = nullptr;
  ort::ElementType type = ort::kUndefined;
  size_t rank = 0;
  std::array<int64_t, kMaxRank> dims{};

  explicit operator bool() const { return value != nullptr; }

  int64_t count() const {
    int64_t product = 1;
    for (size_t i = 0; i < rank; ++i) product *= dims[i];
    return product;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline Tensor view(const ort::Api* api, const ort::Value* value) {
  Tensor tensor;
  if (value == nullptr) return tensor;
  tensor.value = value;
  ort::TensorInfo* raw = nullptr;
  check(api, ort::call(api, ort::kGetTensorTypeAndShape, value, &raw));
  auto release = [api](ort::TensorInfo* info) { ort::call(api, ort::kReleaseTensorInfo, info); };
  std::unique_ptr<ort::TensorInfo, decltype(release)> info(raw, release);
  check(api, ort::call(api, ort::kGetTensorElementType, info.get(), &tensor.type));
  check(api, ort::call(api, ort::kGetDimensionsCount, info.get(), &tensor.rank));
  if (tensor.rank > Tensor::kMaxRank) throw Error("a tensor has more than 8 dimensions");
  check(api, ort::call(api, ort::kGetDimensions, info.get(), tensor.dims.data(), tensor.rank));
  // The C function takes a non-const value, for inputs as well.
  check(api, ort::call(api, ort::kGetTensorMutableData, const_cast<ort::Value*>(value),
                       &tensor.data));
  return tensor;
}

// The node that a kernel is made for. Every attribute read without a default is required: a missing one,
// or one of another type, throws.
class Info {
 public:
  Info(const ort::Api* api, const ort::KernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name) const {
    int64_t value = 0;
    check(api_, ort::call(api_, ort::kAttributeInt64, info_, name, &value));
    return value;
  }

  // With what a graph means that does not have the attribute.
  int64_t integer(const char* name, int64_t absent) const {
    int64_t value = absent;
    ort::Status* status = ort::call(api_, ort::kAttributeInt64, info_, name, &value);
    if (status == nullptr) return value;
    ort::call(api_, ort::kReleaseStatus, status);
    return absent;
  }

  float real(const char* name) const {
    float value = 0;
    check(api_, ort::call(api_, ort::kAttributeFloat, info_, name, &value));
    return value;
  }

  std::string text(const char* name) const {
    size_t size = 0;
    check(api_, ort::call(api_, ort::kAttributeString, info_, name, nullptr, &size));
    std::string value(size, '\0');
    check(api_, ort::call(api_, ort::kAttributeString, info_, name, value.data(), &size));
    value.resize(size - 1);
    return value;
  }

  std::string node_name() const {
    size_t size = 0;
    check(api_, ort::call(api_, ort::kInfoNodeName, info_, nullptr, &size));
    std::string value(size, '\0');
    check(api_, ort::call(api_, ort::kInfoNodeName, info_, value.data(), &size));
    value.resize(size - 1);
    return value;
  }

  size_t input_count() const {
    size_t count = 0;
    check(api_, ort::call(api_, ort::kInfoInputCount, info_, &count));
    return count;
  }

  // The initializer behind an input; an empty tensor when the input is absent or computed.
  Tensor constant(size_t index) const {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    check(api_, ort::call(api_, ort::kInfoConstantInput, info_, index, &is_constant, &value));
    return view(api_, is_constant != 0 ? value : nullptr);
  }

 private:
  friend class Arena;
  const ort::Api* api_;
  const ort::KernelInfo* info_;
};

// The session's memory for intermediate results: recycled, 64-byte aligned, safe to use from
// several threads. A kernel makes one from its Info and keeps it.
class Arena {
 public:
  explicit Arena(const Info& info) : api_(info.api_), allocator_(nullptr, Release{info.api_}) {
    ort::Allocator* raw = nullptr;
    check(api_, ort::call(api_, ort::kInfoAllocator, info.info_, ort::kMemTypeDefault, &raw));
    allocator_.reset(raw);
  }

  struct Free {
    const ort::Api* api;
    ort::Allocator* allocator;
    void operator()(void* data) const {
      ort::Status* status = ort::call(api, ort::kAllocatorFree, allocator, data);
      if (status != nullptr) ort::call(api, ort::kReleaseStatus, status);
    }
  };
  template <typename T>
  using Buffer = std::unique_ptr<T, Free>;

  // `count` elements, not initialized, freed with the buffer; the arena must outlive it.
  template <typename T>
  Buffer<T> allocate(size_t count) const {
    static_assert(std::is_trivial_v<T>, "the arena runs no constructors");
    void* data = nullptr;
    check(api_, ort::call(api_, ort::kAllocatorAlloc, allocator_.get(), count * sizeof(T), &data));
    return Buffer<T>(static_cast<T*>(data), Free{api_, allocator_.get()});
  }

 private:
  struct Release {
    const ort::Api* api;
    void operator()(ort::Allocator* allocator) const {
      ort::call(api, ort::kReleaseAllocator, allocator);
    }
  };
  const ort::Api* api_;
  std::unique_ptr<ort::Allocator, Release> allocator_;
};

// One run of a kernel.
class Context {
 public:
  Context(const ort::Api* api, ort::KernelContext* context) : api_(api), context_(context) {}

  Tensor input(size_t index) const {
    const ort::Value* value = nullptr;
    check(api_, ort::call(api_, ort::kContextInput, context_, index, &value));
    return view(api_, value);
  }

  // Only the data of an input, for inputs whose shape is known: reading a shape allocates, and
  // costs ten times as much. Null when the input is absent.
  template <typename T>
  const T* data(size_t index) const {
    const ort::Value* value = nullptr;
    check(api_, ort::call(api_, ort::kContextInput, context_, index, &value));
    void* data = nullptr;
    if (value != nullptr) {
      check(api_, ort::call(api_, ort::kGetTensorMutableData, const_cast<ort::Value*>(value),
                            &data));
    }
    return static_cast<const T*>(data);
  }

  // Allocates the output, or gives the buffer that was bound to it. An absent optional output is an
  // empty tensor. The type of the result stays undefined: the operator declares it.
  Tensor output(size_t index, std::initializer_list<int64_t> dims) const {
    if (dims.size() > Tensor::kMaxRank) throw Error("a tensor has more than 8 dimensions");
    Tensor tensor;
    for (int64_t dim : dims) tensor.dims[tensor.rank++] = dim;
    return output(index, tensor);
  }

  // The same, with the shape of another tensor.
  Tensor output(size_t index, const Tensor& like) const {
    Tensor tensor;
    tensor.rank = like.rank;
    tensor.dims = like.dims;
    ort::Value* value = nullptr;
    check(api_, ort::call(api_, ort::kContextOutput, context_, index, tensor.dims.data(),
                          tensor.rank, &value));
    if (value == nullptr) return Tensor{};
    tensor.value = value;
    check(api_, ort::call(api_, ort::kGetTensorMutableData, value, &tensor.data));
    return tensor;
  }

  // body(i) for each i in [0, total), on the session's threads; returns when all are done. The body
  // must not throw: it runs on threads that have no one to catch.
  template <typename Body>
  void parallel_for(size_t total, const Body& body) const {
    static_assert(std::is_nothrow_invocable_v<const Body&, size_t>, "mark the body noexcept");
    if (total == 1) return body(size_t{0});
    auto step = [](void* data, size_t i) { (*static_cast<const Body*>(data))(i); };
    void* data = const_cast<void*>(static_cast<const void*>(&body));
    check(api_, ort::call(api_, ort::kContextParallelFor, context_, step, total, size_t{0}, data));
  }

 private:
  const ort::Api* api_;
  ort::KernelContext* context_;
};

struct Port {
  ort::ElementType type;
  ort::Characteristic characteristic = ort::kRequired;
};

// Makes an operator of a class with
//   static constexpr const char* kName;
//   static constexpr Port kInputs[] = {...}, kOutputs[] = {...};
//   explicit Kernel(const Info&);   // reads attributes, checks constants; throws
//   void compute(const Context&);   // must be safe to run from several threads; throws
template <typename Kernel>
class Operator : public ort::CustomOp {
 public:
  Operator() : ort::CustomOp{} {
    version = ort::kApiVersion;
    get_name = [](const CustomOp*) { return Kernel::kName; };
    get_execution_provider_type = [](const CustomOp*) -> const char* { return nullptr; };
    get_input_type = [](const CustomOp*, size_t i) { return Kernel::kInputs[i].type; };
    get_input_type_count = [](const CustomOp*) { return std::size(Kernel::kInputs); };
    get_output_type = [](const CustomOp*, size_t i) { return Kernel::kOutputs[i].type; };
    get_output_type_count = [](const CustomOp*) { return std::size(Kernel::kOutputs); };
    get_input_characteristic = [](const CustomOp*, size_t i) {
      return Kernel::kInputs[i].characteristic;
    };
    get_output_characteristic = [](const CustomOp*, size_t i) {
      return Kernel::kOutputs[i].characteristic;
    };
    get_input_memory_type = [](const CustomOp*, size_t) { return ort::kMemTypeDefault; };
    create_kernel_v2 = &create;
    kernel_compute_v2 = &compute;
    kernel_destroy = [](void* holder) { delete static_cast<Holder*>(holder); };
  }

 private:
  struct Holder {
    const ort::Api* api;
    Kernel kernel;
  };

  template <typename Body>
  static ort::Status* guard(const ort::Api* api, const Body& body) {
    try {
      body();
      return nullptr;
    } catch (const std::exception& error) {
      return ort::call(api, ort::kCreateStatus, ort::kInvalidArgument, error.what());
    }
  }

  static ort::Status* create(const CustomOp*, const ort::Api* api, const ort::KernelInfo* info,
                             void** holder) {
    return guard(api, [&] {
      try {
        *holder = new Holder{api, Kernel(Info(api, info))};
      } catch (const std::exception& error) {
        // A failed run names its node; the making of a kernel does not.
        const std::string node = Info(api, info).node_name();
        throw Error(std::string(Kernel::kName) + " node '" + node + "': " + error.what());
      }
    });
  }

  static ort::Status* compute(void* opaque, ort::KernelContext* context) {
    auto* holder = static_cast<Holder*>(opaque);
    return guard(holder->api, [&] { holder->kernel.compute(Context(holder->api, context)); });
  }
};

// Registers operators in a domain; the body of the library's RegisterCustomOps entry point. The
// domain lives as long as the process: sessions refer to it and never say when they stop.
template <typename... Ops>
ort::Status* register_operators(ort::SessionOptions* options, const ort::ApiBase* base,
                                const char* domain_name, const Ops&... ops) {
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (api == nullptr) {
    return ort::call(base->get_api(1), ort::kCreateStatus, ort::kNotImplemented,
                     "the kernels need ONNX Runtime 1.18 or later");
  }
  ort::CustomOpDomain* domain = nullptr;
  ort::Status* status = ort::call(api, ort::kCreateCustomOpDomain, domain_name, &domain);
  for (const ort::CustomOp* op : {static_cast<const ort::CustomOp*>(&ops)...}) {
    if (status == nullptr) status = ort::call(api, ort::kCustomOpDomainAdd, domain, op);
  }
  if (status == nullptr) status = ort::call(api, ort::kAddCustomOpDomain, options, domain);
  return status;
}

}  // namespace trtllm_lite

#endif  // TRTLLM_LITE_KERNELS_ORT_OP_H_
