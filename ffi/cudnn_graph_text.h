// The canonical graph text as plain values, for the lowering to cuDNN. Knows nothing of cuDNN itself.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace cudnn_jax {

struct GraphTensor {
  std::vector<int64_t> dim;
  std::vector<int64_t> stride;
  std::string data_type;  // numpy name
  bool is_virtual = false;
  std::optional<double> value;  // a scalar passed by value
  bool dim_is_user = false;     // set, not inferred
  bool stride_is_user = false;
  std::optional<size_t> ragged_offset;
};

using GraphList = std::vector<int64_t>;
using GraphParam = std::variant<bool, int64_t, double, std::string, GraphList, std::vector<GraphList>>;

struct GraphNode {
  std::string type;
  std::map<std::string, size_t> inputs;  // port -> tensor
  std::map<std::string, size_t> outputs;
  std::map<std::string, GraphParam> params;
  std::string compute_data_type;  // empty: the graph's
};

struct GraphText {
  std::string io_data_type;  // empty: not set
  std::string intermediate_data_type;
  std::string compute_data_type;
  std::vector<GraphTensor> tensors;
  std::vector<GraphNode> nodes;
  std::vector<size_t> inputs;   // tensors whose buffers the caller gives
  std::vector<size_t> outputs;  // tensors whose buffers the caller gets
};

// Throws Error (kInvalidArgument) naming what is wrong inside `field`.
GraphText parse_graph(std::string_view text, const std::string& field);

// What cuDNN calls a tensor: 0 is not a uid there.
inline int64_t uid_of(size_t tensor) { return static_cast<int64_t>(tensor) + 1; }

}  // namespace cudnn_jax
