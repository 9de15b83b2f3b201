// The C ABI of DLPack 1, as far as buffers are read and given: dlpack.h of github.com/dmlc/dlpack, whose
// layouts these are.
#pragma once

#include <cstdint>

namespace cudnn_jax::dlpack {

// The newest version whose additions are known here. Within major version 1 the layouts stay.
inline constexpr uint32_t kMajor = 1;
inline constexpr uint32_t kMinor = 3;

struct Version {
  uint32_t major;
  uint32_t minor;
};

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null for row-major
  uint64_t byte_offset;
};

// In a capsule named "dltensor".
struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

inline constexpr uint64_t kReadOnly = 1;
inline constexpr uint64_t kPadded = 4;  // elements of less than a byte that take one each

// In a capsule named "dltensor_versioned".
struct ManagedVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // the table of an older major version, or null
};

// What a type offers as __dlpack_c_exchange_api__, in a capsule named "dlpack_exchange_api". The functions
// return 0, or -1 with a Python exception set, and wait for no stream.
struct Exchange {
  ExchangeHeader header;
  void* allocate;
  int (*managed_from_object)(void* object, ManagedVersioned** out);
  int (*object_from_managed)(ManagedVersioned* managed, void** out);
  int (*tensor_from_object)(void* object,
                            Tensor* out);  // borrowed, for as long as nothing else runs; may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace cudnn_jax::dlpack
