#include "ffi/cudnn_library.h"

#include <array>
#include <string>

#include "ffi/cudnn_version.h"
#include "ffi/driver.h"
#include "ffi/error.h"
#include "ffi/library.h"

namespace cudnn_jax {
namespace {

CudnnApi load_api() {
  const DynamicLibrary library = DynamicLibrary::open("cudnn", {"libcudnn.so.9", "libcudnn.so"});
  CudnnApi api;
  api.library = library.handle();
  library.bind(api.version, "cudnnGetVersion");
  library.bind(api.error_string, "cudnnGetErrorString");
  library.bind(api.last_error_string, "cudnnGetLastErrorString");
  library.bind(api.create, "cudnnCreate");
  library.bind(api.destroy, "cudnnDestroy");
  library.bind(api.set_stream, "cudnnSetStream");
  library.bind(api.create_descriptor, "cudnnBackendCreateDescriptor");
  library.bind(api.destroy_descriptor, "cudnnBackendDestroyDescriptor");
  library.bind(api.initialize_descriptor, "cudnnBackendInitialize");
  library.bind(api.set_attribute, "cudnnBackendSetAttribute");
  library.bind(api.get_attribute, "cudnnBackendGetAttribute");
  library.bind(api.finalize, "cudnnBackendFinalize");
  library.bind(api.execute, "cudnnBackendExecute");
  return api;
}

}  // namespace

const CudnnApi& cudnn() {
  static const CudnnApi api = load_api();
  return api;
}

void CudnnApi::check(cudnnStatus_t status, const char* call) const {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::string message = std::string(call) + " failed: " + error_string(status);
  std::array<char, 1024> reason{};
  last_error_string(reason.data(), reason.size());
  std::string detail = reason.data();
  while (!detail.empty() && detail.back() == '\n') detail.pop_back();
  for (char& c : detail) c = c == '\n' ? ' ' : c;
  if (!detail.empty()) message += ", " + detail;
  const bool refused = CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED ||
                       status == CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH ||
                       status == CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH;
  if (refused) throw CudnnRefusal(message);
  throw CallError(message);
}

void open_planning_libraries() {
  cuda_driver_version();
  try {
    DynamicLibrary::open("nvrtc", {"libnvrtc.so.13", "libnvrtc.so.12"});
  } catch (const LibraryNotFound&) {
    // cuDNN then plans with the engines that it has compiled already.
  }
}

CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  cudnn().check(cudnn().create_descriptor(type, &descriptor_), "cudnnBackendCreateDescriptor");
}

CudnnDescriptor::~CudnnDescriptor() {
  if (descriptor_ != nullptr) cudnn().destroy_descriptor(descriptor_);
}

void CudnnDescriptor::clear() {
  cudnn().check(cudnn().initialize_descriptor(descriptor_), "cudnnBackendInitialize");
}

void CudnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                          const void* values) {
  cudnn().check(cudnn().set_attribute(descriptor_, name, type, count, values), "cudnnBackendSetAttribute");
}

void CudnnDescriptor::finalize(const char* what) { cudnn().check(cudnn().finalize(descriptor_), what); }

int64_t cudnn_version() { return static_cast<int64_t>(cudnn().version()); }

std::string cudnn_version_text(int64_t version) {
  // Since 9.0 the parts are major * 10000, minor * 100 and patch.
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace cudnn_jax
