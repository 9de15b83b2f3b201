// cuDNN handles of one device. A handle serves one call at a time and remembers its stream, because telling
// cuDNN the same stream again costs microseconds and driver queries. With it goes the descriptor of the
// call's buffers, because making one allocates, and filling it again does not (cuDNN 9.19).
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "ffi/cudnn_library.h"

namespace cudnn_jax {

class CudnnHandlePool {
 private:
  struct Entry {
    cudnnHandle_t handle;
    void* stream;
    CudnnDescriptor variant_pack;
  };

 public:
  // Makes sure that a call can find a handle without making one. Called with the device's context bound.
  void prepare();

  // Takes over a handle that works on `stream`, and its descriptor. When it throws, for want of memory, both
  // are as they were.
  void give(cudnnHandle_t handle, void* stream, CudnnDescriptor&& variant_pack);

  // A handle on `stream` until the lease ends. A handle that is free on that stream is preferred.
  class Lease {
   public:
    Lease(CudnnHandlePool& pool, void* stream);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    cudnnHandle_t get() const { return entry_->handle; }
    // Holds whatever the last call left in it: clear() comes first.
    CudnnDescriptor& variant_pack() const { return entry_->variant_pack; }

   private:
    CudnnHandlePool& pool_;
    Entry* entry_;
  };

 private:
  static Entry* make();
  void expect_another();  // under the lock
  void give_back(Entry* entry);

  std::mutex mutex_;
  std::vector<Entry*> free_;  // the longest unused first
  size_t entries_ = 0;        // how many `free_` has room for
  bool prepared_ = false;
};

// Planning holds a handle for as long as its graph lives, and would take it from the calls that run plans.
enum class CudnnHandleUse { kRun, kPlan };

// Never destroyed: XLA may still hold programs while the process ends.
CudnnHandlePool& cudnn_handles(int device, CudnnHandleUse use);

}  // namespace cudnn_jax
