// Images with kernels: each is in the driver once per process, whatever steps and programs use it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/sha256.h"

namespace cudnn_jax {

class KernelImage {
 public:
  // The one of that content, which the driver forgets when the last holder lets go.
  static std::shared_ptr<KernelImage> share(const std::vector<uint8_t>& data);

  KernelImage(const Digest& digest, const std::vector<uint8_t>& data) : digest_(digest), data_(data) {}
  ~KernelImage();
  KernelImage(const KernelImage&) = delete;
  KernelImage& operator=(const KernelImage&) = delete;

  const Digest& digest() const { return digest_; }
  // A kernel for every context of the process. The first call hands the image to the driver. Throws
  // CallError.
  void* kernel(const std::string& symbol);

 private:
  const Digest digest_;
  std::mutex mutex_;
  std::vector<uint8_t> data_;  // until the driver has it
  void* library_ = nullptr;
};

}  // namespace cudnn_jax
