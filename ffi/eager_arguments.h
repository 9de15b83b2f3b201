// What Python functions of graph.execute take and give: handles, streams, ordinals, dims.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/cudnn_user_handle.h"

namespace cudnn_jax {

using Dims = std::vector<int64_t>;

// TypeError for anything but a Handle, a number above all.
UserHandle& handle_of(nanobind::handle value);
// A stream's address: the number itself, or what the CUDA stream protocol, torch or cupy keep it in.
void* stream_of(nanobind::handle stream);
// TypeError naming `name` for what is no integer, True and False among it.
int integer_of(nanobind::handle value, const char* name);
int ordinal_of(int device);

nanobind::tuple tuple_of(const Dims& dims);
inline uintptr_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace cudnn_jax
