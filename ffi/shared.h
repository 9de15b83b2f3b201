// Things of one content that exist once in the process while anybody holds them.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "ffi/sha256.h"

namespace cudnn_jax {

// T has `const Digest& digest() const`. A table is never destroyed: XLA may still hold programs while the
// process ends.
template <typename T>
class SharedByContent {
 public:
  // The live one of that content, or the one that `make` returns as a T*. Made outside the lock: of two
  // threads at it, the first to store wins.
  template <typename Make>
  std::shared_ptr<T> find_or_make(const Digest& digest, Make&& make) {
    if (std::shared_ptr<T> found = find(digest)) return found;
    std::shared_ptr<T> made(make(), [this](T* last) { forget_and_delete(last); });
    std::lock_guard<std::mutex> lock(mutex_);
    std::weak_ptr<T>& slot = live_[digest];
    std::shared_ptr<T> kept = slot.lock();
    if (kept == nullptr) slot = kept = std::move(made);
    return kept;
  }

 private:
  std::shared_ptr<T> find(const Digest& digest) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(digest);
    return found == live_.end() ? nullptr : found->second.lock();
  }

  void forget_and_delete(T* last) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // Another thread may have put a new one of the same content there already.
      const auto found = live_.find(last->digest());
      if (found != live_.end() && found->second.expired()) live_.erase(found);
    }
    delete last;
  }

  std::mutex mutex_;
  std::map<Digest, std::weak_ptr<T>> live_;
};

}  // namespace cudnn_jax
