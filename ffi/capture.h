// Lets this thread do, while its stream is being captured, what a capture forbids by default: cuDNN takes a
// little device memory for a new handle, and libraries load a kernel at its first execution.
#pragma once

#include "ffi/cuda_abi.h"
#include "ffi/driver.h"

namespace cudnn_jax {

class RelaxedCapture {
 public:
  RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCudaCaptureRelaxed;  // then what was in force before
};

}  // namespace cudnn_jax
