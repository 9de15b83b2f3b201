#include "ffi/streams.h"

#include <cstdint>
#include <string>

#include "ffi/driver.h"
#include "ffi/error.h"
#include "ffi/library.h"

namespace cudnn_jax {
namespace {

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kDeviceOrdinal = 9;       // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

struct EventApi {
  int (*event_create)(void** event, unsigned flags);
  int (*event_record)(void* event, void* stream);
  int (*event_destroy)(void* event);
  int (*stream_wait_event)(void* stream, void* event, unsigned flags);
  int (*pointer_attribute)(void* value, int attribute, uint64_t address);

  EventApi() {
    driver();  // opens and initialises
    const DynamicLibrary cuda = DynamicLibrary::open("cuda", {"libcuda.so.1", "libcuda.so"});
    cuda.bind(event_create, "cuEventCreate");
    cuda.bind(event_record, "cuEventRecord");
    cuda.bind(event_destroy, "cuEventDestroy_v2");
    cuda.bind(stream_wait_event, "cuStreamWaitEvent");
    cuda.bind(pointer_attribute, "cuPointerGetAttribute");
  }
};

const EventApi& event_api() {
  static const EventApi instance;
  return instance;
}

void check_event(int status, const char* call) {
  if (status != 0) {
    throw Error(ErrorKind::kInternal, std::string(call) + " failed: error " + std::to_string(status));
  }
}

uintptr_t canonical(const void* stream) {
  const auto value = reinterpret_cast<uintptr_t>(stream);
  return value == 1 ? 0 : value;
}

}  // namespace

bool same_stream(const void* a, const void* b) { return canonical(a) == canonical(b); }

void order_after(void* stream, void* other) {
  void* event = nullptr;
  check_event(event_api().event_create(&event, kDisableTiming), "cuEventCreate");
  const int recorded = event_api().event_record(event, other);
  const int waits = recorded == 0 ? event_api().stream_wait_event(stream, event, 0) : 0;
  // The driver keeps an event until what waits for it is done.
  event_api().event_destroy(event);
  check_event(recorded, "cuEventRecord");
  check_event(waits, "cuStreamWaitEvent");
}

int device_of_address(const void* address) {
  int ordinal = -1;
  const int status =
      event_api().pointer_attribute(&ordinal, kDeviceOrdinal, reinterpret_cast<uint64_t>(address));
  return status == 0 ? ordinal : -1;
}

}  // namespace cudnn_jax
