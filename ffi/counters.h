// Process-wide counts, for tests and for measuring the handler. Relaxed: they order nothing.
#pragma once

#include <atomic>
#include <cstdint>

namespace cudnn_jax {

struct Counters {
  std::atomic<int64_t> programs_created{0};
  std::atomic<int64_t> programs_destroyed{0};
  std::atomic<int64_t> states_created{0};  // one per call site and compile
  std::atomic<int64_t> states_destroyed{0};
  std::atomic<int64_t> loads{0};  // programs loaded for a device
  std::atomic<int64_t> executions{0};
  std::atomic<int64_t> handler_ns{0};  // host time inside execute, of calls that succeeded
};

inline Counters& counters() {
  static Counters instance;
  return instance;
}

inline void add(std::atomic<int64_t>& counter, int64_t amount = 1) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace cudnn_jax
