#include "ffi/cudnn_handles.h"

#include <memory>
#include <utility>

#include "ffi/capture.h"
#include "ffi/counters.h"
#include "ffi/per_device.h"

namespace cudnn_jax {
namespace {

// What a new handle works on.
constexpr void* kDefaultStream = nullptr;

}  // namespace

CudnnHandlePool::Entry* CudnnHandlePool::make() {
  CudnnDescriptor variant_pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  RelaxedCapture relaxed;
  cudnnHandle_t handle = nullptr;
  cudnn().check(cudnn().create(&handle), "cudnnCreate");
  add(counters().handles);
  return new Entry{handle, kDefaultStream, std::move(variant_pack)};
}

void CudnnHandlePool::give_back(Entry* entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(entry);  // allocates nothing: room was made before the entry was
}

void CudnnHandlePool::expect_another() { free_.reserve(++entries_); }

void CudnnHandlePool::give(cudnnHandle_t handle, void* stream, CudnnDescriptor&& variant_pack) {
  std::lock_guard<std::mutex> lock(mutex_);
  expect_another();
  free_.push_back(new Entry{handle, stream, std::move(variant_pack)});
}

void CudnnHandlePool::prepare() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (prepared_) return;
  expect_another();
  free_.push_back(make());
  prepared_ = true;
}

CudnnHandlePool::Lease::Lease(CudnnHandlePool& pool, void* stream) : pool_(pool), entry_(nullptr) {
  {
    std::lock_guard<std::mutex> lock(pool_.mutex_);
    auto& free = pool_.free_;
    auto chosen = free.begin();
    while (chosen != free.end() && (*chosen)->stream != stream) ++chosen;
    if (chosen == free.end()) chosen = free.begin();
    if (chosen != free.end()) {
      entry_ = *chosen;
      free.erase(chosen);
    } else {
      pool_.expect_another();
    }
  }
  // As many handles as there were calls at one time; the last ones are made outside the lock.
  if (entry_ == nullptr) entry_ = make();
  if (entry_->stream == stream) return;
  const cudnnStatus_t status = cudnn().set_stream(entry_->handle, static_cast<cudaStream_t>(stream));
  if (status != CUDNN_STATUS_SUCCESS) {
    pool_.give_back(entry_);
    cudnn().check(status, "cudnnSetStream");
  }
  entry_->stream = stream;
}

CudnnHandlePool::Lease::~Lease() { pool_.give_back(entry_); }

CudnnHandlePool& cudnn_handles(int device, CudnnHandleUse use) {
  static auto& running = *new PerDevice<CudnnHandlePool>;
  static auto& planning = *new PerDevice<CudnnHandlePool>;
  PerDevice<CudnnHandlePool>& pools = use == CudnnHandleUse::kRun ? running : planning;
  return pools.get_or_make(device, [] { return std::make_unique<CudnnHandlePool>(); });
}

}  // namespace cudnn_jax
