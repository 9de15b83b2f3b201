#include "ffi/cudnn_handles.h"

#include <memory>

#include "ffi/capture.h"
#include "ffi/per_device.h"

namespace cudnn_jax {
namespace {

// What a new handle works on.
constexpr void* kDefaultStream = nullptr;

}  // namespace

CudnnHandlePool::Free CudnnHandlePool::make() {
  RelaxedCapture relaxed;
  cudnnHandle_t handle = nullptr;
  cudnn().check(cudnn().create(&handle), "cudnnCreate");
  return {handle, kDefaultStream};
}

void CudnnHandlePool::prepare() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (prepared_) return;
  free_.push_back(make());
  prepared_ = true;
}

void CudnnHandlePool::give(cudnnHandle_t handle, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back({handle, stream});
}

CudnnHandlePool::Lease::Lease(CudnnHandlePool& pool, void* stream) : pool_(pool) {
  Free found{nullptr, nullptr};
  {
    std::lock_guard<std::mutex> lock(pool_.mutex_);
    auto& free = pool_.free_;
    auto chosen = free.begin();
    while (chosen != free.end() && chosen->stream != stream) ++chosen;
    if (chosen == free.end()) chosen = free.begin();
    if (chosen != free.end()) {
      found = *chosen;
      free.erase(chosen);
    }
  }
  // As many handles as there were calls at one time; the last ones are made outside the lock.
  if (found.handle == nullptr) found = make();
  handle_ = found.handle;
  stream_ = found.stream;
  if (stream_ == stream) return;
  const cudnnStatus_t status = cudnn().set_stream(handle_, static_cast<cudaStream_t>(stream));
  if (status != CUDNN_STATUS_SUCCESS) {
    pool_.give(handle_, stream_);
    cudnn().check(status, "cudnnSetStream");
  }
  stream_ = stream;
}

CudnnHandlePool::Lease::~Lease() { pool_.give(handle_, stream_); }

CudnnHandlePool& cudnn_handles(int device, CudnnHandleUse use) {
  static auto& running = *new PerDevice<CudnnHandlePool>;
  static auto& planning = *new PerDevice<CudnnHandlePool>;
  PerDevice<CudnnHandlePool>& pools = use == CudnnHandleUse::kRun ? running : planning;
  return pools.get_or_make(device, [] { return std::make_unique<CudnnHandlePool>(); });
}

}  // namespace cudnn_jax
