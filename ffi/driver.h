// The CUDA driver, opened when first needed, and the few calls that programs make.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ffi/per_device.h"

namespace cudnn_jax {

class Driver {
 public:
  // Repeats a byte, or a 4-byte word, over `bytes` bytes at `dest`, on `stream`.
  void fill(void* dest, uint8_t byte, size_t bytes, void* stream) const;
  void fill_words(void* dest, uint32_t word, size_t bytes, void* stream) const;

  // An image with its kernels, for every context of the process. `data` may go when the call returns.
  void* load_library(const void* data) const;
  void unload_library(void* library) const;
  void* kernel_of(void* library, const char* symbol) const;
  // Loads the kernel's code into the current context, which a first launch would do, and a capture forbids.
  void load_kernel(void* kernel) const;
  // The size in bytes of each of the kernel's parameters, nothing where the driver is too old to tell.
  std::optional<std::vector<size_t>> parameters_of(void* kernel) const;
  // Blocks of one thread, as cuTile kernels are launched, in the context of the stream.
  void launch(void* kernel, const std::array<unsigned, 3>& grid, void** params, void* stream) const;

  // 90 for compute capability 9.0. Asked once per device.
  int64_t arch(int device);
  // The context that work on `stream` of `device` belongs to.
  void* context_of(void* stream, int device);
  // Throws Error for a stream of another device than `device`; the default streams are of any.
  void require_device(void* stream, int device);
  void* current_context() const;
  void set_current_context(void* context) const;
  // Puts a capture mode in force for this thread and gives back the one before; no more can be done about a
  // failure.
  void exchange_capture_mode(int* mode) const;
  void copy_to_device(void* dest, const void* source, size_t bytes, void* stream) const;
  // Throws CallError for anything but success, whoever had `status` from CUDA: the call, CUDA's name and its
  // text.
  void check(int status, const char* call) const;

 private:
  friend Driver& driver();
  friend int cuda_driver_version();
  struct Api;
  explicit Driver(const Api& api) : api_(api) {}

  int device_handle(int device) const;
  template <typename Launch>
  void launched(Launch&& launch, const char* call) const;

  const Api& api_;
  PerDevice<int64_t> archs_;
  PerDevice<void*> primary_contexts_;
};

// Opened and initialised at the first call. Throws LibraryNotFound, or Error when there is no usable driver.
Driver& driver();
// 13000 for CUDA 13.0. Needs the library, not a device.
int cuda_driver_version();

// Binds the right context to this thread and puts the old one back. The rule: the stream's context if the
// stream names one, else the device's primary context. A current context of some other device would run work
// on the default stream there, in silence; a worker thread may have none at all.
class ContextScope {
 public:
  ContextScope(void* stream, int device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  void* previous_;
  bool replaced_;
};

}  // namespace cudnn_jax
