// numpy names of the element types, and their numbers in XLA's FFI (XLA_FFI_DataType). Widths are in the
// spec.
#pragma once

#include <string>

namespace cudnn_jax {

// -1 for a name that the table lacks.
int xla_dtype_of(const std::string& name);
// "dtype 42" for a number that the table lacks.
std::string dtype_name_of(int xla_dtype);

}  // namespace cudnn_jax
