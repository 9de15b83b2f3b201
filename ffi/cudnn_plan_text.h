// cuDNN's serialised plan, made the same for the same plan.
#pragma once

#include <string>

namespace cudnn_jax {

// cuDNN 9 writes a kernel's parameters as it built them on its stack, gaps and all: addresses of the process
// that planned, other bytes each time. Programs are compared, cached and hashed by their bytes, so the bytes
// that no kernel reads are zeroed: what cuDNN overwrites at each launch, unused dimensions and padding.
// Kernels and parameters of unknown shape are left as they are.
std::string without_stray_bytes(std::string plan);

}  // namespace cudnn_jax
