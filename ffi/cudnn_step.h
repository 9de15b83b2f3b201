// "cudnn": runs a serialised cuDNN plan.
#pragma once

#include <memory>

#include "ffi/step.h"

namespace cudnn_jax {

std::unique_ptr<Step> make_cudnn_step(const Json& step, ProgramContext& context);

}  // namespace cudnn_jax
