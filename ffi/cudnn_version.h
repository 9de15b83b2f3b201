// The version of the cuDNN at hand, for files that see none of cuDNN's headers.
#pragma once

#include <cstdint>
#include <string>

namespace cudnn_jax {

// 91900 for 9.19.0. Opens libcudnn; throws LibraryNotFound naming what was tried.
int64_t cudnn_version();

// "9.19.0" for 91900.
std::string cudnn_version_text(int64_t version);

}  // namespace cudnn_jax
