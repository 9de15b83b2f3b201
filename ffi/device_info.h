// What the driver knows of a device, asked once per ordinal and process.
#pragma once

#include <cstdint>
#include <string>

namespace cudnn_jax {

struct DeviceInfo {
  int ordinal = 0;
  int sm = 0;  // 90 for compute capability 9.0
  int sm_count = 0;
  int64_t shared_memory_per_block = 0;         // bytes, without asking for more
  int64_t shared_memory_per_block_opt_in = 0;  // bytes, at most
  int64_t l2_bytes = 0;
  int64_t total_memory = 0;  // bytes
  std::string name;
  std::string pci_bus_id;
};

// 0 where there is no driver, none that works, or no device.
int device_count();
// Throws Error for an ordinal that is not there, or telling why the driver does not work.
const DeviceInfo& device_info(int ordinal);

}  // namespace cudnn_jax
