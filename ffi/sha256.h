// SHA-256 (FIPS 180-4), for the content hash of a program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace cudnn_jax {

using Digest = std::array<uint8_t, 32>;

Digest sha256(const uint8_t* data, size_t size);
std::string to_hex(const Digest& digest);

}  // namespace cudnn_jax
