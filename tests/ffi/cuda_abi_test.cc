// Compiles where the runtime's own view of cuda.h is that of a real one.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "ffi/cuda_abi.h"

using cudnn_jax::CudaLaunchConfig;

static_assert(cudnn_jax::kCudaSuccess == CUDA_SUCCESS);
static_assert(cudnn_jax::kCudaCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(cudnn_jax::kCudaCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(cudnn_jax::kCudaCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);

static_assert(sizeof(CudaLaunchConfig) == sizeof(CUlaunchConfig));
static_assert(alignof(CudaLaunchConfig) == alignof(CUlaunchConfig));
#define SAME(ours, theirs) \
  static_assert(offsetof(CudaLaunchConfig, ours) == offsetof(CUlaunchConfig, theirs), #theirs)
SAME(grid[0], gridDimX);
SAME(grid[1], gridDimY);
SAME(grid[2], gridDimZ);
SAME(block[0], blockDimX);
SAME(block[1], blockDimY);
SAME(block[2], blockDimZ);
SAME(shared_bytes, sharedMemBytes);
SAME(stream, hStream);
SAME(attributes, attrs);
SAME(attribute_count, numAttrs);

// The calls, by their signatures with handles and enumerations as what they are in C.
static_assert(std::is_same_v<decltype(&cuLaunchKernelEx),
                             CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**)>);
static_assert(
    std::is_same_v<decltype(&cuLibraryLoadData), CUresult (*)(CUlibrary*, const void*, CUjit_option*, void**,
                                                              unsigned, CUlibraryOption*, void**, unsigned)>);
static_assert(std::is_same_v<decltype(&cuLibraryGetKernel), CUresult (*)(CUkernel*, CUlibrary, const char*)>);
static_assert(std::is_same_v<decltype(&cuKernelGetFunction), CUresult (*)(CUfunction*, CUkernel)>);
static_assert(
    std::is_same_v<decltype(&cuKernelGetParamInfo), CUresult (*)(CUkernel, size_t, size_t*, size_t*)>);
static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUdevice) == sizeof(int) && sizeof(CUdeviceptr) == 8);
