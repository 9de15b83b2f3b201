// libcudnn, opened when first needed, and the part of its C interface that running a plan takes.
#pragma once

#include <cudnn.h>

#include <cstdint>

namespace cudnn_jax {

struct CudnnApi {
  void* library = nullptr;  // as dlopen gave it
  decltype(&cudnnGetVersion) version;
  decltype(&cudnnGetErrorString) error_string;
  decltype(&cudnnGetLastErrorString) last_error_string;
  decltype(&cudnnCreate) create;
  decltype(&cudnnDestroy) destroy;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendGetAttribute) get_attribute;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;

  // Throws CallError: the call, cuDNN's status and the last of its reasons, on one line.
  void check(cudnnStatus_t status, const char* call) const;
};

// Opens libcudnn at the first call; a failed attempt is tried again by the next. Throws LibraryNotFound.
const CudnnApi& cudnn();

// What planning needs besides: the driver's library, which cuDNN opens by its bare name, and NVRTC, which
// compiles kernels, if there is one. Throws LibraryNotFound for the driver.
void open_planning_libraries();

// An owned backend descriptor.
class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);
  ~CudnnDescriptor();
  CudnnDescriptor(const CudnnDescriptor&) = delete;
  CudnnDescriptor& operator=(const CudnnDescriptor&) = delete;

  cudnnBackendDescriptor_t get() const { return descriptor_; }
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
           const void* values);
  void finalize(const char* what);

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

}  // namespace cudnn_jax
