#include "ffi/driver.h"

#include <memory>
#include <string>

#include "ffi/counters.h"
#include "ffi/cuda_abi.h"
#include "ffi/error.h"
#include "ffi/library.h"

namespace cudnn_jax {

struct Driver::Api {
  int (*init)(unsigned flags);
  int (*driver_version)(int* version);
  int (*error_name)(int status, const char** text);
  int (*error_string)(int status, const char** text);
  int (*device_get)(int* device, int ordinal);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*primary_context_retain)(void** context, int device);
  int (*context_get_current)(void** context);
  int (*context_set_current)(void* context);
  int (*context_get_device)(int* device);
  int (*stream_get_context)(void* stream, void** context);
  int (*memset_d8_async)(uint64_t dest, unsigned char byte, size_t count, void* stream);
  int (*memset_d32_async)(uint64_t dest, unsigned int word, size_t count, void* stream);
  int (*memcpy_htod_async)(uint64_t dest, const void* source, size_t bytes, void* stream);
  int (*exchange_capture_mode)(int* mode);
  int (*library_load_data)(void** library, const void* code, void* jit_options, void** jit_values,
                           unsigned jit_count, void* library_options, void** library_values,
                           unsigned library_count);
  int (*library_unload)(void* library);
  int (*library_get_kernel)(void** kernel, void* library, const char* name);
  int (*kernel_get_function)(void** function, void* kernel);
  int (*kernel_get_param_info)(void* kernel, size_t index, size_t* offset, size_t* size);  // null before 12.4
  int (*launch_kernel_ex)(const CudaLaunchConfig* config, void* function, void** params, void** extra);
};

namespace {

// The default stream, and its legacy and per-thread names, belong to whatever context is current.
bool names_no_context(void* stream) { return reinterpret_cast<uintptr_t>(stream) <= kCudaStreamPerThread; }

const DynamicLibrary& cuda_library() {
  static const DynamicLibrary library = DynamicLibrary::open("cuda", {"libcuda.so.1", "libcuda.so"});
  return library;
}

template <typename Api>
Api load_api(const DynamicLibrary& cuda) {
  Api api;
  cuda.bind(api.init, "cuInit");
  cuda.bind(api.driver_version, "cuDriverGetVersion");
  cuda.bind(api.error_name, "cuGetErrorName");
  cuda.bind(api.error_string, "cuGetErrorString");
  cuda.bind(api.device_get, "cuDeviceGet");
  cuda.bind(api.device_attribute, "cuDeviceGetAttribute");
  cuda.bind(api.primary_context_retain, "cuDevicePrimaryCtxRetain");
  cuda.bind(api.context_get_current, "cuCtxGetCurrent");
  cuda.bind(api.context_set_current, "cuCtxSetCurrent");
  cuda.bind(api.context_get_device, "cuCtxGetDevice");
  cuda.bind(api.stream_get_context, "cuStreamGetCtx");
  cuda.bind(api.memset_d8_async, "cuMemsetD8Async");
  cuda.bind(api.memset_d32_async, "cuMemsetD32Async");
  cuda.bind(api.memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
  cuda.bind(api.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  cuda.bind(api.library_load_data, "cuLibraryLoadData");
  cuda.bind(api.library_unload, "cuLibraryUnload");
  cuda.bind(api.library_get_kernel, "cuLibraryGetKernel");
  cuda.bind(api.kernel_get_function, "cuKernelGetFunction");
  cuda.bind(api.launch_kernel_ex, "cuLaunchKernelEx");
  api.kernel_get_param_info =
      reinterpret_cast<decltype(api.kernel_get_param_info)>(cuda.find("cuKernelGetParamInfo"));
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
  if (status != kCudaSuccess) {
    throw Error(ErrorKind::kInternal, "cuDriverGetVersion failed: error " + std::to_string(status));
  }
  return version;
}

void Driver::check(int status, const char* call) const {
  if (status == kCudaSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  std::string message = std::string(call) + " failed: ";
  const bool named = api_.error_name(status, &name) == kCudaSuccess && name != nullptr;
  message += named ? name : "error " + std::to_string(status);
  if (api_.error_string(status, &text) == kCudaSuccess && text != nullptr)
    message += std::string(", ") + text;
  throw CallError(message);
}

template <typename Launch>
void Driver::launched(Launch&& launch, const char* call) const {
  int status = kCudaSuccess;
  {
    const LibraryCall measured;
    status = launch();
  }
  check(status, call);
}

void Driver::fill(void* dest, uint8_t byte, size_t bytes, void* stream) const {
  launched([&] { return api_.memset_d8_async(reinterpret_cast<uint64_t>(dest), byte, bytes, stream); },
           "cuMemsetD8Async");
}

void Driver::fill_words(void* dest, uint32_t word, size_t bytes, void* stream) const {
  const size_t words = bytes / sizeof word;
  launched([&] { return api_.memset_d32_async(reinterpret_cast<uint64_t>(dest), word, words, stream); },
           "cuMemsetD32Async");
}

void* Driver::load_library(const void* data) const {
  void* library = nullptr;
  check(api_.library_load_data(&library, data, nullptr, nullptr, 0, nullptr, nullptr, 0),
        "cuLibraryLoadData");
  return library;
}

void Driver::unload_library(void* library) const { check(api_.library_unload(library), "cuLibraryUnload"); }

void* Driver::kernel_of(void* library, const char* symbol) const {
  void* kernel = nullptr;
  check(api_.library_get_kernel(&kernel, library, symbol), "cuLibraryGetKernel");
  return kernel;
}

void Driver::load_kernel(void* kernel) const {
  void* function = nullptr;
  check(api_.kernel_get_function(&function, kernel), "cuKernelGetFunction");
}

std::optional<std::vector<size_t>> Driver::parameters_of(void* kernel) const {
  if (api_.kernel_get_param_info == nullptr) return std::nullopt;
  std::vector<size_t> sizes;
  size_t offset = 0;
  size_t size = 0;
  // The driver tells the number by refusing the next index.
  while (api_.kernel_get_param_info(kernel, sizes.size(), &offset, &size) == kCudaSuccess)
    sizes.push_back(size);
  return sizes;
}

void Driver::launch(void* kernel, const std::array<unsigned, 3>& grid, void** params, void* stream) const {
  const CudaLaunchConfig config{{grid[0], grid[1], grid[2]}, {1, 1, 1}, 0, stream, nullptr, 0};
  // A CUkernel stands for its function in whatever context the stream names; a CUfunction is of one context.
  launched([&] { return api_.launch_kernel_ex(&config, kernel, params, nullptr); }, "cuLaunchKernelEx");
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
    check(api_.device_attribute(&major, kCudaCapabilityMajor, handle), "cuDeviceGetAttribute");
    check(api_.device_attribute(&minor, kCudaCapabilityMinor, handle), "cuDeviceGetAttribute");
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

void Driver::require_device(void* stream, int device) {
  if (names_no_context(stream)) return;
  const ContextScope scope(stream, device);
  int found = 0;
  check(api_.context_get_device(&found), "cuCtxGetDevice");
  if (found == device_handle(device)) return;
  throw Error(ErrorKind::kInvalidArgument, "stream: " + std::to_string(reinterpret_cast<uintptr_t>(stream)) +
                                               " is one of device " + std::to_string(found) +
                                               ", the handle is for device " + std::to_string(device));
}

void* Driver::current_context() const {
  void* context = nullptr;
  check(api_.context_get_current(&context), "cuCtxGetCurrent");
  return context;
}

void Driver::set_current_context(void* context) const {
  check(api_.context_set_current(context), "cuCtxSetCurrent");
}

void Driver::exchange_capture_mode(int* mode) const { api_.exchange_capture_mode(mode); }

void Driver::copy_to_device(void* dest, const void* source, size_t bytes, void* stream) const {
  launched([&] { return api_.memcpy_htod_async(reinterpret_cast<uint64_t>(dest), source, bytes, stream); },
           "cuMemcpyHtoDAsync");
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
