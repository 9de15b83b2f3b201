// What the runtime knows of cuda.h, declared here because the driver keeps its ABI and a build needs no CUDA
// headers for a handful of calls. tests/ffi/cuda_abi_test.cc compares this with a real cuda.h.
#pragma once

#include <cstdint>

namespace cudnn_jax {

inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
inline constexpr int kCudaCapabilityMinor = 76;
inline constexpr int kCudaCaptureRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr uintptr_t kCudaStreamLegacy = 1;
inline constexpr uintptr_t kCudaStreamPerThread = 2;

struct CudaLaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

}  // namespace cudnn_jax
