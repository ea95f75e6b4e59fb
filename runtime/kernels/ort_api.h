// A minimal view of ONNX Runtime's C ABI: what a CPU custom-op library calls, and nothing else.
//
// The Python wheel ships no headers, so a library that is built beside it declares the ABI itself.
// The ABI is append-only: a slot of the function table and a field of CustomOp keep their position
// for ever, and GetApi returns null for a version that the installed runtime does not know.
// Source: include/onnxruntime/core/session/onnxruntime_c_api.h (structs OrtApi and OrtCustomOp) and
// the table with its position asserts in onnxruntime/core/session/onnxruntime_c_api.cc.
//
// Functions that return Status* give null on success; the caller owns a status that is not null.
// Linux only: elsewhere the ABI has another calling convention.
#ifndef TRTLLM_LITE_KERNELS_ORT_API_H_
#define TRTLLM_LITE_KERNELS_ORT_API_H_

#include <cstddef>
#include <cstdint>

namespace trtllm_lite::ort {

// The version that both GetApi and CustomOp::version ask for: the first with all slots and fields
// below. ONNX Runtime 1.18 and later have it.
inline constexpr uint32_t kApiVersion = 18;

// Opaque objects of the runtime.
struct Status;
struct Value;
struct MemoryInfo;
struct TensorInfo;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct Allocator;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };

enum ElementType : int {
  kUndefined = 0,  // as a declared type: any tensor type
  kFloat32 = 1,
  kUint8 = 2,
  kInt8 = 3,
  kUint16 = 4,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kBfloat16 = 16,
};

enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum MemType : int { kMemTypeDefault = 0 };
enum AllocatorType : int { kDeviceAllocator = 0, kArenaAllocator = 1 };

// The runtime's table of functions, up to the end of version 18.
struct Api {
  void* slots[280];
};

struct ApiBase {
  const Api* (*get_api)(uint32_t version);  // null, and a line on stderr: unknown version
  const char* (*get_version_string)();
};

// An operator, as the runtime reads it: it keeps the pointer and reads each field again, so the
// object must outlive every session. Fields after get_end_version may be null.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);  // unused: see _v2
  const char* (*get_name)(const CustomOp*);
  const char* (*get_execution_provider_type)(const CustomOp*);  // null result: CPU
  ElementType (*get_input_type)(const CustomOp*, size_t index);
  size_t (*get_input_type_count)(const CustomOp*);
  ElementType (*get_output_type)(const CustomOp*, size_t index);
  size_t (*get_output_type_count)(const CustomOp*);
  void (*kernel_compute)(void* kernel, KernelContext*);  // unused: see _v2
  void (*kernel_destroy)(void* kernel);
  // Version 8.
  Characteristic (*get_input_characteristic)(const CustomOp*, size_t index);
  Characteristic (*get_output_characteristic)(const CustomOp*, size_t index);
  // Version 13: called for every operator, so it must not be null.
  MemType (*get_input_memory_type)(const CustomOp*, size_t index);
  // Version 14: called for variadic inputs and outputs only.
  int (*get_variadic_input_min_arity)(const CustomOp*);
  int (*get_variadic_input_homogeneity)(const CustomOp*);
  int (*get_variadic_output_min_arity)(const CustomOp*);
  int (*get_variadic_output_homogeneity)(const CustomOp*);
  // Version 16: the forms that can fail. They win over the older ones when not null.
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*kernel_compute_v2)(void* kernel, KernelContext*);
  // Version 17. The runtime builds its context from the type of every input and follows a null
  // pointer where an optional one is absent: leave infer_output_shape null for such operators.
  Status* (*infer_output_shape)(const CustomOp*, ShapeInferContext*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  // Version 18: pairs of input and output that may share (may) or always share (alias) a buffer.
  size_t (*get_may_inplace)(int** input_index, int** output_index);
  void (*release_may_inplace)(int* input_index, int* output_index);
  size_t (*get_alias_map)(int** input_index, int** output_index);
  void (*release_alias_map)(int* input_index, int* output_index);
};
static_assert(offsetof(CustomOp, create_kernel) == 8 && sizeof(CustomOp) == 26 * 8, "64-bit ABI");

template <typename Signature>
struct Slot {
  size_t index;
};

// Calls a slot with the signature that the C header gives it.
template <typename Result, typename... Args, typename... Given>
Result call(const Api* api, Slot<Result(Args...)> slot, Given... given) {
  return reinterpret_cast<Result (*)(Args...)>(api->slots[slot.index])(given...);
}

// Version 1: statuses and registration.
inline constexpr Slot<Status*(ErrorCode, const char*)> kCreateStatus{0};
inline constexpr Slot<ErrorCode(const Status*)> kGetErrorCode{1};
inline constexpr Slot<const char*(const Status*)> kGetErrorMessage{2};
inline constexpr Slot<void(Status*)> kReleaseStatus{93};
inline constexpr Slot<Status*(const char*, CustomOpDomain**)> kCreateCustomOpDomain{26};
inline constexpr Slot<Status*(CustomOpDomain*, const CustomOp*)> kCustomOpDomainAdd{27};
inline constexpr Slot<Status*(SessionOptions*, CustomOpDomain*)> kAddCustomOpDomain{28};
inline constexpr Slot<void(CustomOpDomain*)> kReleaseCustomOpDomain{101};

// Version 1: tensors.
inline constexpr Slot<Status*(Value*, void**)> kGetTensorMutableData{51};
inline constexpr Slot<Status*(const TensorInfo*, ElementType*)> kGetTensorElementType{60};
inline constexpr Slot<Status*(const TensorInfo*, size_t*)> kGetDimensionsCount{61};
inline constexpr Slot<Status*(const TensorInfo*, int64_t*, size_t)> kGetDimensions{62};
inline constexpr Slot<Status*(const TensorInfo*, size_t*)> kGetTensorShapeElementCount{64};
inline constexpr Slot<Status*(const Value*, TensorInfo**)> kGetTensorTypeAndShape{65};
inline constexpr Slot<void(TensorInfo*)> kReleaseTensorInfo{99};

// Version 1: memory. The caller owns an Allocator that a kernel function returned. There is no slot
// for KernelContext_GetScratchBuffer: nobody frees the buffers it gives on a CPU.
inline constexpr Slot<Status*(AllocatorType, MemType, MemoryInfo**)> kCreateCpuMemoryInfo{69};
inline constexpr Slot<void(MemoryInfo*)> kReleaseMemoryInfo{94};
inline constexpr Slot<Status*(Allocator*, size_t, void**)> kAllocatorAlloc{75};
inline constexpr Slot<Status*(Allocator*, void*)> kAllocatorFree{76};
inline constexpr Slot<void(Allocator*)> kReleaseAllocator{132};  // version 5

// Attributes. A null buffer asks for the size: of a string with its closing zero, of an array in
// elements.
inline constexpr Slot<Status*(const KernelInfo*, const char*, float*)> kAttributeFloat{85};
inline constexpr Slot<Status*(const KernelInfo*, const char*, int64_t*)> kAttributeInt64{86};
inline constexpr Slot<Status*(const KernelInfo*, const char*, char*, size_t*)> kAttributeString{87};
inline constexpr Slot<Status*(const KernelInfo*, const char*, float*, size_t*)>
    kAttributeFloats{162};  // version 8
inline constexpr Slot<Status*(const KernelInfo*, const char*, int64_t*, size_t*)>
    kAttributeInt64s{163};  // version 8

// Facts about a node when its kernel is made.
inline constexpr Slot<Status*(const KernelInfo*, size_t*)> kInfoInputCount{230};   // version 14
inline constexpr Slot<Status*(const KernelInfo*, size_t*)> kInfoOutputCount{231};  // version 14
inline constexpr Slot<Status*(const KernelInfo*, char*, size_t*)> kInfoNodeName{244};  // version 15
// The value is null where the input is no constant; the session owns it.
inline constexpr Slot<Status*(const KernelInfo*, size_t, int*, const Value**)>
    kInfoConstantInput{249};  // version 15
inline constexpr Slot<Status*(const KernelInfo*, MemType, Allocator**)>
    kInfoAllocator{278};  // version 18

// One run of a kernel. The value of an absent optional input or output is null; the session owns
// the values.
inline constexpr Slot<Status*(const KernelContext*, size_t*)> kContextInputCount{88};
inline constexpr Slot<Status*(const KernelContext*, size_t*)> kContextOutputCount{89};
inline constexpr Slot<Status*(const KernelContext*, size_t, const Value**)> kContextInput{90};
inline constexpr Slot<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>
    kContextOutput{91};
inline constexpr Slot<Status*(const KernelContext*, const MemoryInfo*, Allocator**)>
    kContextAllocator{253};  // version 15
// fn(data, i) for i in [0, total) on the session's threads; batches 0 deals single indices out.
inline constexpr Slot<Status*(const KernelContext*, void (*)(void*, size_t), size_t total,
                              size_t batches, void* data)>
    kContextParallelFor{274};  // version 17

}  // namespace trtllm_lite::ort

#endif  // TRTLLM_LITE_KERNELS_ORT_API_H_
