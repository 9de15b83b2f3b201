#include "ffi/kernel_image.h"

#include "ffi/counters.h"
#include "ffi/driver.h"
#include "ffi/error.h"
#include "ffi/shared.h"

namespace cudnn_jax {

std::shared_ptr<KernelImage> KernelImage::share(const std::vector<uint8_t>& data) {
  static auto& images = *new SharedByContent<KernelImage>;
  const Digest digest = sha256(data.data(), data.size());
  return images.find_or_make(digest, [&] { return new KernelImage(digest, data); });
}

KernelImage::~KernelImage() {
  if (library_ == nullptr) return;
  try {
    driver().unload_library(library_);
    add(counters().images_unloaded);
  } catch (const Error&) {
    // The process ends and the driver has gone first, with everything in it.
  }
}

void* KernelImage::kernel(const std::string& symbol) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (library_ == nullptr) {
    library_ = driver().load_library(data_.data());
    add(counters().images_loaded);
    data_ = {};  // the driver has a copy
  }
  return driver().kernel_of(library_, symbol.c_str());
}

}  // namespace cudnn_jax
