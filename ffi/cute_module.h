// Objects of CuTe-DSL functions: each is loaded once per process, whatever steps and programs use it.
//
// Facts of the runtime library, seen in 4.8.1: a module belongs to no context or device. Getting a function
// loads its kernels as a CUDA library, sets their attributes for every visible device, and aborts the process
// if the object lacks the function. A launch goes through the kernel's context-independent handle, so the
// kernel's code reaches a context at the first launch there.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/sha256.h"

namespace cudnn_jax {

class CuteModule {
 public:
  // The one of that content, unloaded when the last holder lets go.
  static std::shared_ptr<CuteModule> share(const std::vector<uint8_t>& data);

  CuteModule(const Digest& digest, const std::vector<uint8_t>& data) : digest_(digest), data_(data) {}
  ~CuteModule();
  CuteModule(const CuteModule&) = delete;
  CuteModule& operator=(const CuteModule&) = delete;

  const Digest& digest() const { return digest_; }
  // A function for every device. `made_with` is the version of the DSL, for messages. Throws CallError, or
  // LibraryNotFound when there is no runtime library.
  void* function(const std::string& name, const std::string& made_with);

 private:
  const Digest digest_;
  std::mutex mutex_;
  const std::vector<uint8_t> data_;  // kept: each function is looked for in it first
  void* module_ = nullptr;
};

// Runs a function. Each of `args` is an argument's address; the last two are those of the CUstream and of an
// int32 that the function sets to a cudaError_t. Throws CallError.
void run_cute_function(void* function, void** args, size_t count);

}  // namespace cudnn_jax
