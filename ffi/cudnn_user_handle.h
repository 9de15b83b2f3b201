// A cuDNN handle that the caller holds: {backend handle, device, stream}. Nothing of cuDNN is opened before
// the backend handle is asked for.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

namespace cudnn_jax {

class CudnnDescriptor;

class UserHandle {
 public:
  UserHandle(int device, void* stream);
  // Takes over a backend handle made elsewhere. Its stream is asked of cuDNN; Error if `stream` differs, or
  // if cuDNN does not tell.
  UserHandle(void* backend, int device, std::optional<void*> stream);
  // A backend handle that was made here serves other calls from then on: destroying it would wait for the
  // device.
  ~UserHandle();
  UserHandle(const UserHandle&) = delete;
  UserHandle& operator=(const UserHandle&) = delete;

  // Each throws Error after destroy().
  int device() const { return alive().device_; }
  void* stream() const { return alive().stream_.load(std::memory_order_relaxed); }
  // The stream for work. Error for one of another device, which is asked of the driver once per stream.
  void* checked_stream();
  void* backend();
  // The same stream again makes no backend call. One of another device is an Error, at once where cuDNN's
  // handle is made, else in checked_stream().
  void set_stream(void* stream);

  // Destroys the backend handle, if there is one. A second call does nothing; one that failed may be
  // repeated.
  void destroy();
  bool destroyed() const { return destroyed_.load(std::memory_order_acquire); }

  // The backend handle, on `stream` and for this thread alone, until the end of the scope.
  class Use {
   public:
    Use(UserHandle& handle, void* stream);
    void* get() const { return handle_.backend_; }
    // For the call's buffers. Holds whatever the last call left in it.
    CudnnDescriptor& variant_pack() const { return *handle_.variant_pack_; }

   private:
    UserHandle& handle_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  const UserHandle& alive() const;
  void require_own(void* stream);
  void make();                          // under the lock
  void point_backend_at(void* stream);  // under the lock

  const int device_;
  std::atomic<void*> stream_;
  // The last stream known to be of the device. The default one always is.
  std::atomic<void*> checked_{nullptr};
  std::atomic<bool> destroyed_{false};
  std::mutex mutex_;  // guards what follows
  void* backend_ = nullptr;
  void* backend_stream_ = nullptr;
  bool made_here_ = true;
  std::unique_ptr<CudnnDescriptor> variant_pack_;  // made with the backend handle, or at the first use
};

}  // namespace cudnn_jax
