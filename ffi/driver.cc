#include "ffi/driver.h"

#include <memory>
#include <string>
#include <type_traits>

#include "ffi/error.h"
#include "ffi/library.h"

namespace cudnn_jax {

// Declared here, not taken from cuda.h: a handful of calls, whose ABI the driver keeps.
struct Driver::Api {
  int (*init)(unsigned flags);
  int (*driver_version)(int* version);
  int (*error_string)(int status, const char** text);
  int (*device_get)(int* device, int ordinal);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*primary_context_retain)(void** context, int device);
  int (*context_get_current)(void** context);
  int (*context_set_current)(void* context);
  int (*stream_get_context)(void* stream, void** context);
  int (*memset_d8_async)(uint64_t dest, unsigned char byte, size_t count, void* stream);
  int (*memset_d32_async)(uint64_t dest, unsigned int word, size_t count, void* stream);
};

namespace {

constexpr int kSuccess = 0;
constexpr int kCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kCapabilityMinor = 76;

// The default stream, and its legacy and per-thread names, belong to whatever context is current.
bool names_no_context(void* stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }

const DynamicLibrary& cuda_library() {
  static const DynamicLibrary library = DynamicLibrary::open("cuda", {"libcuda.so.1", "libcuda.so"});
  return library;
}

template <typename Api>
Api load_api(const DynamicLibrary& cuda) {
  Api api;
  const auto bind = [&cuda](auto& slot, const char* symbol) {
    slot = cuda.require_as<std::remove_reference_t<decltype(slot)>>(symbol);
  };
  bind(api.init, "cuInit");
  bind(api.driver_version, "cuDriverGetVersion");
  bind(api.error_string, "cuGetErrorString");
  bind(api.device_get, "cuDeviceGet");
  bind(api.device_attribute, "cuDeviceGetAttribute");
  bind(api.primary_context_retain, "cuDevicePrimaryCtxRetain");
  bind(api.context_get_current, "cuCtxGetCurrent");
  bind(api.context_set_current, "cuCtxSetCurrent");
  bind(api.stream_get_context, "cuStreamGetCtx");
  bind(api.memset_d8_async, "cuMemsetD8Async");
  bind(api.memset_d32_async, "cuMemsetD32Async");
  return api;
}

}  // namespace

Driver& driver() {
  // Never destroyed: programs may be released while the process ends.
  static Driver& instance = []() -> Driver& {
    static const Driver::Api api = load_api<Driver::Api>(cuda_library());
    std::unique_ptr<Driver> made(new Driver(api));
    made->check(api.init(0), "cuInit");
    return *made.release();
  }();
  return instance;
}

int cuda_driver_version() {
  int version = 0;
  const auto call = cuda_library().require_as<int (*)(int*)>("cuDriverGetVersion");
  const int status = call(&version);
  if (status != kSuccess) {
    throw Error(ErrorKind::kInternal, "cuDriverGetVersion failed: error " + std::to_string(status));
  }
  return version;
}

void Driver::check(int status, const char* call) const {
  if (status == kSuccess) return;
  const char* text = nullptr;
  std::string message = std::string(call) + " failed: error " + std::to_string(status);
  if (api_.error_string(status, &text) == kSuccess && text != nullptr) message += std::string(", ") + text;
  throw Error(ErrorKind::kInternal, message);
}

void Driver::fill(void* dest, uint8_t byte, size_t bytes, void* stream) const {
  check(api_.memset_d8_async(reinterpret_cast<uint64_t>(dest), byte, bytes, stream), "cuMemsetD8Async");
}

void Driver::fill_words(void* dest, uint32_t word, size_t bytes, void* stream) const {
  check(api_.memset_d32_async(reinterpret_cast<uint64_t>(dest), word, bytes / sizeof word, stream),
        "cuMemsetD32Async");
}

int Driver::device_handle(int device) const {
  int handle = 0;
  check(api_.device_get(&handle, device), "cuDeviceGet");
  return handle;
}

int64_t Driver::arch(int device) {
  return archs_.get_or_make(device, [&] {
    const int handle = device_handle(device);
    int major = 0;
    int minor = 0;
    check(api_.device_attribute(&major, kCapabilityMajor, handle), "cuDeviceGetAttribute");
    check(api_.device_attribute(&minor, kCapabilityMinor, handle), "cuDeviceGetAttribute");
    return std::make_unique<int64_t>(major * 10 + minor);
  });
}

void* Driver::context_of(void* stream, int device) {
  void* context = nullptr;
  if (!names_no_context(stream)) {
    check(api_.stream_get_context(stream, &context), "cuStreamGetCtx");
    if (context != nullptr) return context;
  }
  // Retained once and for good, as the CUDA runtime does.
  return primary_contexts_.get_or_make(device, [&] {
    auto made = std::make_unique<void*>(nullptr);
    check(api_.primary_context_retain(made.get(), device_handle(device)), "cuDevicePrimaryCtxRetain");
    return made;
  });
}

void* Driver::current_context() const {
  void* context = nullptr;
  check(api_.context_get_current(&context), "cuCtxGetCurrent");
  return context;
}

void Driver::set_current_context(void* context) const {
  check(api_.context_set_current(context), "cuCtxSetCurrent");
}

ContextScope::ContextScope(void* stream, int device)
    : previous_(driver().current_context()), replaced_(false) {
  void* wanted = driver().context_of(stream, device);
  if (wanted == previous_) return;
  driver().set_current_context(wanted);
  replaced_ = true;
}

ContextScope::~ContextScope() {
  if (!replaced_) return;
  try {
    driver().set_current_context(previous_);
  } catch (const Error&) {
    // The old context was destroyed meanwhile; the thread keeps the one that works.
  }
}

}  // namespace cudnn_jax
