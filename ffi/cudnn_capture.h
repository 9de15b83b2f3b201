// Lets this thread do, while its stream is being captured, what a capture forbids by default: cuDNN takes a
// little device memory for a new handle, and loads a plan's kernels at the plan's first execution.
#pragma once

#include "ffi/library.h"

namespace cudnn_jax {

class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  // Puts mode_ in force and keeps what was.
  void exchange() {
    static const auto call = DynamicLibrary::open("cuda", {"libcuda.so.1", "libcuda.so"})
                                 .require_as<int (*)(int*)>("cuThreadExchangeStreamCaptureMode");
    call(&mode_);
  }
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
};

}  // namespace cudnn_jax
