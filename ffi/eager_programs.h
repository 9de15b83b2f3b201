// Binds the classes that read a graph's buffers and run its program on them.
#pragma once

#include <nanobind/nanobind.h>

namespace cudnn_jax {

void bind_programs(nanobind::module_& module);

}  // namespace cudnn_jax
