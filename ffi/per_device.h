// One value per device, made once, read without a lock.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "ffi/error.h"

namespace cudnn_jax {

inline constexpr int kMaxDevices = 64;

template <typename T>
class PerDevice {
 public:
  PerDevice() = default;
  PerDevice(const PerDevice&) = delete;
  PerDevice& operator=(const PerDevice&) = delete;
  ~PerDevice() {
    for (auto& slot : slots_) delete slot.load(std::memory_order_acquire);
  }

  // Null until made. No lock.
  T* find(int device) const {
    return device < 0 || device >= kMaxDevices ? nullptr : slots_[device].load(std::memory_order_acquire);
  }

  // `make` returns std::unique_ptr<T>; if it throws, the slot stays empty and the next call tries again.
  template <typename Make>
  T& get_or_make(int device, Make&& make) {
    if (device < 0 || device >= kMaxDevices) {
      throw Error(ErrorKind::kInvalidArgument, "device ordinal " + std::to_string(device) +
                                                   ": the rule is 0 <= ordinal < " +
                                                   std::to_string(kMaxDevices));
    }
    if (T* found = find(device)) return *found;
    std::lock_guard<std::mutex> lock(mutex_);
    if (T* found = find(device)) return *found;
    std::unique_ptr<T> made = make();
    T* raw = made.release();
    slots_[device].store(raw, std::memory_order_release);
    return *raw;
  }

 private:
  std::array<std::atomic<T*>, kMaxDevices> slots_{};
  std::mutex mutex_;
};

}  // namespace cudnn_jax
