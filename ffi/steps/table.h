// The kinds of step that this build can make.
#pragma once

#include <string>

#include "ffi/step.h"

namespace cudnn_jax {

// Throws Error (kUnimplemented) for a kind that the spec names and this build lacks.
StepFactory step_factory(const std::string& kind, const std::string& field);

std::unique_ptr<Step> make_cubin_step(const Json& step, ProgramContext& context);
std::unique_ptr<Step> make_cute_step(const Json& step, ProgramContext& context);
std::unique_ptr<Step> make_fill_step(const Json& step, ProgramContext& context);
std::unique_ptr<Step> make_host_step(const Json& step, ProgramContext& context);

}  // namespace cudnn_jax
