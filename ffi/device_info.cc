#include "ffi/device_info.h"

#include <array>
#include <cstddef>
#include <memory>

#include "ffi/cuda_abi.h"
#include "ffi/error.h"
#include "ffi/library.h"
#include "ffi/per_device.h"

namespace cudnn_jax {
namespace {

constexpr int kNoCudaDevice = 100;  // CUDA_ERROR_NO_DEVICE

// CU_DEVICE_ATTRIBUTE_*
enum Attribute : int {
  kSharedMemoryPerBlock = 8,
  kMultiprocessors = 16,
  kL2Bytes = 38,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kSharedMemoryPerBlockOptIn = 97,
};

struct FactsApi {
  int (*init)(unsigned flags);
  int (*error_string)(int status, const char** text);
  int (*count)(int* count);
  int (*get)(int* device, int ordinal);
  int (*attribute)(int* value, int attribute, int device);
  int (*name)(char* name, int size, int device);
  int (*total_memory)(size_t* bytes, int device);
  int (*pci_bus_id)(char* id, int size, int device);

  FactsApi() {
    const DynamicLibrary cuda = DynamicLibrary::open("cuda", {"libcuda.so.1", "libcuda.so"});
    cuda.bind(init, "cuInit");
    cuda.bind(error_string, "cuGetErrorString");
    cuda.bind(count, "cuDeviceGetCount");
    cuda.bind(get, "cuDeviceGet");
    cuda.bind(attribute, "cuDeviceGetAttribute");
    cuda.bind(name, "cuDeviceGetName");
    cuda.bind(total_memory, "cuDeviceTotalMem_v2");
    cuda.bind(pci_bus_id, "cuDeviceGetPCIBusId");
  }

  void check(int status, const char* call) const {
    if (status == kCudaSuccess) return;
    const char* text = nullptr;
    std::string message = std::string(call) + " failed: error " + std::to_string(status);
    if (error_string(status, &text) == kCudaSuccess && text != nullptr) message += std::string(", ") + text;
    throw Error(ErrorKind::kInternal, message);
  }
};

// A failed attempt to open the library is tried again by the next call.
const FactsApi& facts_api() {
  static const FactsApi instance;
  return instance;
}

int count_devices() {
  int count = 0;
  int status = facts_api().init(0);
  if (status == kCudaSuccess) status = facts_api().count(&count);
  if (status == kNoCudaDevice) return 0;
  facts_api().check(status, "counting devices");
  return count;
}

std::unique_ptr<DeviceInfo> ask_facts(int ordinal) {
  auto info = std::make_unique<DeviceInfo>();
  info->ordinal = ordinal;
  int device = 0;
  facts_api().check(facts_api().get(&device, ordinal), "cuDeviceGet");
  const auto value = [device](Attribute attribute) {
    int found = 0;
    facts_api().check(facts_api().attribute(&found, attribute, device), "cuDeviceGetAttribute");
    return found;
  };
  info->sm = 10 * value(kCapabilityMajor) + value(kCapabilityMinor);
  info->sm_count = value(kMultiprocessors);
  info->shared_memory_per_block = value(kSharedMemoryPerBlock);
  info->shared_memory_per_block_opt_in = value(kSharedMemoryPerBlockOptIn);
  info->l2_bytes = value(kL2Bytes);
  size_t bytes = 0;
  facts_api().check(facts_api().total_memory(&bytes, device), "cuDeviceTotalMem");
  info->total_memory = static_cast<int64_t>(bytes);
  std::array<char, 256> text{};
  facts_api().check(facts_api().name(text.data(), static_cast<int>(text.size()), device), "cuDeviceGetName");
  info->name = text.data();
  facts_api().check(facts_api().pci_bus_id(text.data(), static_cast<int>(text.size()), device),
                    "cuDeviceGetPCIBusId");
  info->pci_bus_id = text.data();
  return info;
}

// Throws Error when there is a driver that does not work; the next call tries again.
int present_devices() {
  try {
    static const int count = count_devices();
    return count;
  } catch (const LibraryNotFound&) {
    return 0;
  }
}

}  // namespace

int device_count() {
  try {
    return present_devices();
  } catch (const Error&) {
    return 0;
  }
}

const DeviceInfo& device_info(int ordinal) {
  // Never destroyed: Python may hold a record while the process ends.
  static auto& infos = *new PerDevice<DeviceInfo>;
  if (const DeviceInfo* found = infos.find(ordinal)) return *found;
  const int count = present_devices();
  if (ordinal < 0 || ordinal >= count) {
    throw Error(ErrorKind::kInvalidArgument, "device: got " + std::to_string(ordinal) +
                                                 ", the rule is an ordinal of one of the " +
                                                 std::to_string(count) + " CUDA devices here");
  }
  return infos.get_or_make(ordinal, [ordinal] { return ask_facts(ordinal); });
}

}  // namespace cudnn_jax
