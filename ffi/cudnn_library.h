// libcudnn, opened when first needed, and the part of its C interface that running a plan takes.
#pragma once

#include <cudnn.h>

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/error.h"

namespace cudnn_jax {

// cuDNN does not serve what it was asked, or what another version of it made.
class CudnnRefusal : public CallError {
 public:
  explicit CudnnRefusal(const std::string& message) : CallError(message) {}
};

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
  decltype(&cudnnBackendInitialize) initialize_descriptor;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendGetAttribute) get_attribute;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;

  // Throws CudnnRefusal or another CallError: the call, cuDNN's status and the last of its reasons, on one
  // line.
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
  CudnnDescriptor(CudnnDescriptor&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  cudnnBackendDescriptor_t get() const { return descriptor_; }
  // Forgets all attributes: a descriptor that is finalized takes no others.
  void clear();
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
           const void* values);
  void finalize(const char* what);

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

}  // namespace cudnn_jax
