// What XLA registers: one target, "cudnn_jax.program", on two platforms.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace cudnn_jax {

// Null for a stage that the platform does not have.
struct TargetStages {
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

// XLA numbers the type in its own registry, one per platform's plugin: each platform has a type of its own.
struct StateType {
  XLA_FFI_TypeId* id;
  XLA_FFI_TypeInfo* info;
};

extern const TargetStages kCpuTarget;
extern const TargetStages kCudaTarget;
extern const StateType kCpuState;
extern const StateType kCudaState;

}  // namespace cudnn_jax
