// Functions of this process that "host" steps may name.
#pragma once

#include <cstdint>
#include <string>

namespace cudnn_jax {

// One pointer and one size in bytes per argument of the step. An operand comes with its size, a workspace
// argument with what is left of the workspace, an immediate as one number of its dtype, read only: other
// threads read it too.
using HostFunction = void (*)(void* const* args, const int64_t* nbytes, int64_t n);

// Replaces an earlier function of that name for programs that are loaded from now on. Thread safe.
void register_host_symbol(const std::string& name, HostFunction function);

}  // namespace cudnn_jax
