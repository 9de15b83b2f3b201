// Process-wide counts, for tests and for measuring the handler. Relaxed: they order nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace cudnn_jax {

struct Counters {
  std::atomic<int64_t> programs_created{0};
  std::atomic<int64_t> programs_destroyed{0};
  std::atomic<int64_t> states_created{0};  // one per call site and compile
  std::atomic<int64_t> states_destroyed{0};
  std::atomic<int64_t> loads{0};          // programs loaded for a device
  std::atomic<int64_t> images_loaded{0};  // by content, into the driver
  std::atomic<int64_t> images_unloaded{0};
  std::atomic<int64_t> executions{0};
  std::atomic<int64_t> handler_ns{0};  // host time inside execute, of calls that succeeded
  std::atomic<int64_t> library_ns{
      0};                            // the part of it inside the calls that launch, while those are measured
  std::atomic<int64_t> rebuilds{0};  // cuDNN plans that were built again on loading
  std::atomic<int64_t> handles{0};   // of cuDNN, made to run plans or to plan
};

inline Counters& counters() {
  static Counters instance;
  return instance;
}

inline void add(std::atomic<int64_t>& counter, int64_t amount = 1) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

// Off unless a benchmark asks: reading the clock twice costs as much as much of the handler.
inline std::atomic<bool>& measures_library_calls() {
  static std::atomic<bool> instance{false};
  return instance;
}

// Stands around a call that launches work.
class LibraryCall {
 public:
  LibraryCall() : measured_(measures_library_calls().load(std::memory_order_relaxed)) {
    if (measured_) begin_ = Clock::now();
  }
  ~LibraryCall() {
    if (measured_) add(counters().library_ns, std::chrono::nanoseconds(Clock::now() - begin_).count());
  }
  LibraryCall(const LibraryCall&) = delete;
  LibraryCall& operator=(const LibraryCall&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  const bool measured_;
  Clock::time_point begin_;
};

}  // namespace cudnn_jax
