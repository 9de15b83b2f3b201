// The JSON value type of the runtime, and bounded readers for the two texts it meets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "cudnn_frontend/thirdparty/nlohmann/json.hpp"

namespace cudnn_jax {

using Json = nlohmann::json;

// Both throw Error naming `field`. Nesting is bounded: the reader recurses, and a few kilobytes of opening
// brackets would otherwise exhaust the stack. Duplicate keys are refused.
Json parse_msgpack(const uint8_t* data, size_t size, const std::string& field);
Json parse_json(std::string_view text, const std::string& field);

}  // namespace cudnn_jax
