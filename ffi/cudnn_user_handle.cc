#include "ffi/cudnn_user_handle.h"

#include <dlfcn.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "ffi/capture.h"
#include "ffi/cudnn_handles.h"
#include "ffi/cudnn_library.h"
#include "ffi/driver.h"
#include "ffi/error.h"

namespace cudnn_jax {
namespace {

cudnnHandle_t typed(void* backend) { return static_cast<cudnnHandle_t>(backend); }

std::string stream_text(const void* stream) { return std::to_string(reinterpret_cast<uintptr_t>(stream)); }

void* stream_of(void* backend) {
  // As few ask for it, a libcudnn without it serves all else.
  const auto get_stream =
      reinterpret_cast<decltype(&cudnnGetStream)>(dlsym(cudnn().library, "cudnnGetStream"));
  if (get_stream == nullptr) throw LibraryNotFound("libcudnn lacks cudnnGetStream");
  cudaStream_t stream = nullptr;
  cudnn().check(get_stream(typed(backend), &stream), "cudnnGetStream");
  return stream;
}

}  // namespace

UserHandle::UserHandle(int device, void* stream) : device_(device), stream_(stream) {}

UserHandle::UserHandle(void* backend, int device, std::optional<void*> stream)
    : device_(device), stream_(nullptr), backend_(backend), made_here_(false) {
  if (backend == nullptr) {
    throw Error(ErrorKind::kInvalidArgument,
                "backend_handle: got 0, the rule is the address of a cuDNN handle");
  }
  backend_stream_ = stream_of(backend);
  if (stream.has_value() && *stream != backend_stream_) {
    throw Error(ErrorKind::kInvalidArgument, "stream: got " + stream_text(*stream) +
                                                 ", the cuDNN handle is on " + stream_text(backend_stream_) +
                                                 "; the rule is the same stream");
  }
  stream_ = backend_stream_;
}

UserHandle::~UserHandle() {
  if (backend_ == nullptr || !made_here_) return;
  try {
    cudnn_handles(device_, CudnnHandleUse::kRun)
        .give(typed(backend_), backend_stream_, std::move(*variant_pack_));
  } catch (const std::exception&) {
    // No memory for it: the backend handle stays unused.
  }
}

const UserHandle& UserHandle::alive() const {
  if (destroyed()) throw Error(ErrorKind::kFailedPrecondition, "handle: it was destroyed");
  return *this;
}

void* UserHandle::checked_stream() {
  void* stream = this->stream();
  if (stream != checked_.load(std::memory_order_relaxed)) require_own(stream);
  return stream;
}

void UserHandle::require_own(void* stream) {
  driver().require_device(stream, device_);
  checked_.store(stream, std::memory_order_relaxed);
}

void UserHandle::make() {
  if (backend_ != nullptr) return;
  ContextScope scope(checked_stream(), device_);
  auto variant_pack = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  RelaxedCapture relaxed;
  cudnnHandle_t made = nullptr;
  cudnn().check(cudnn().create(&made), "cudnnCreate");
  variant_pack_ = std::move(variant_pack);
  backend_ = made;
  backend_stream_ = nullptr;
}

void UserHandle::point_backend_at(void* stream) {
  if (backend_stream_ == stream) return;
  cudnn().check(cudnn().set_stream(typed(backend_), static_cast<cudaStream_t>(stream)), "cudnnSetStream");
  backend_stream_ = stream;
}

void* UserHandle::backend() {
  std::lock_guard<std::mutex> lock(mutex_);
  alive();
  make();
  point_backend_at(checked_stream());
  return backend_;
}

void UserHandle::set_stream(void* stream) {
  if (this->stream() == stream) return;
  std::lock_guard<std::mutex> lock(mutex_);
  alive();
  if (backend_ != nullptr) {
    require_own(stream);
    point_backend_at(stream);
  }
  stream_.store(stream, std::memory_order_relaxed);
}

void UserHandle::destroy() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (backend_ != nullptr) {
    ContextScope scope(backend_stream_, device_);
    cudnn().check(cudnn().destroy(typed(backend_)), "cudnnDestroy");
  }
  backend_ = nullptr;
  destroyed_.store(true, std::memory_order_release);
}

UserHandle::Use::Use(UserHandle& handle, void* stream) : handle_(handle), lock_(handle.mutex_) {
  handle_.alive();
  handle_.make();
  handle_.point_backend_at(stream);
  if (handle_.variant_pack_ == nullptr) {
    handle_.variant_pack_ = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  }
}

}  // namespace cudnn_jax
