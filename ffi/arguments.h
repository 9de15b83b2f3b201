// The arguments of one launch as kernels take them: an array of addresses, one per argument. Lives on the
// stack.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "ffi/step.h"
#include "program_spec.h"

namespace cudnn_jax {

class ArgumentPack {
 public:
  ArgumentPack(const std::vector<Arg>& args, const Call& call) {
    for (const Arg& arg : args) {
      void* pointer = call.pointer(arg);
      if (arg.kind == Arg::Kind::kImmediate) {
        push(pointer);
      } else {
        buffers_[size_] = pointer;
        push(&buffers_[size_]);
      }
    }
  }
  ArgumentPack(const ArgumentPack&) = delete;
  ArgumentPack& operator=(const ArgumentPack&) = delete;

  // One more argument, by its address.
  void push(void* address) { addresses_[size_++] = address; }

  void** data() { return addresses_.data(); }
  size_t size() const { return size_; }

 private:
  std::array<void*, kMaxArgs> buffers_;        // only the program's arguments are written
  std::array<void*, kMaxArgs + 2> addresses_;  // and what a cute function takes after its own
  size_t size_ = 0;
};

}  // namespace cudnn_jax
