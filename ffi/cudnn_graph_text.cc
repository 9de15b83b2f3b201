#include "ffi/cudnn_graph_text.h"

#include <limits>
#include <utility>

#include "ffi/error.h"
#include "ffi/json.h"

namespace cudnn_jax {
namespace {

constexpr int64_t kGraphVersion = 1;

[[noreturn]] void refuse(const std::string& field, const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, field + ": " + what);
}

const Json& member(const Json& map, const char* name, const std::string& field) {
  if (!map.is_object()) refuse(field, "expected a map");
  const auto found = map.find(name);
  if (found == map.end()) refuse(field + "." + name, "missing");
  return *found;
}

const Json& list(const Json& map, const char* name, const std::string& field) {
  const Json& value = member(map, name, field);
  if (!value.is_array()) refuse(field + "." + name, "expected a list");
  return value;
}

std::string text(const Json& map, const char* name, const std::string& field) {
  const Json& value = member(map, name, field);
  if (!value.is_string()) refuse(field + "." + name, "expected text");
  return value.get<std::string>();
}

std::string optional_text(const Json& map, const char* name, const std::string& field) {
  return member(map, name, field).is_null() ? std::string() : text(map, name, field);
}

std::vector<int64_t> integers(const Json& values, const std::string& field) {
  std::vector<int64_t> read;
  for (const Json& value : values) {
    if (!value.is_number_integer()) refuse(field, "expected a list of integers");
    read.push_back(value.get<int64_t>());
  }
  return read;
}

std::vector<int64_t> integers(const Json& map, const char* name, const std::string& field) {
  return integers(list(map, name, field), field + "." + name);
}

size_t index(const Json& value, size_t tensors, const std::string& field) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() >= tensors) {
    refuse(field, "expected a tensor's index below " + std::to_string(tensors));
  }
  return value.get<size_t>();
}

// Booleans are numbers here, and JSON has no infinities: they are text.
std::optional<double> scalar(const Json& value, const std::string& field) {
  if (value.is_null()) return std::nullopt;
  if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;
  if (value.is_number()) return value.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value == "inf") return kInfinity;
  if (value == "-inf") return -kInfinity;
  if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
  refuse(field, "expected a number, \"inf\", \"-inf\" or \"nan\"");
}

GraphTensor parse_tensor(const Json& value, size_t tensors, const std::string& field) {
  GraphTensor tensor;
  tensor.dim = integers(value, "dim", field);
  tensor.stride = integers(value, "stride", field);
  tensor.data_type = text(value, "data_type", field);
  const Json& is_virtual = member(value, "virtual", field);
  if (!is_virtual.is_boolean()) refuse(field + ".virtual", "expected true or false");
  tensor.is_virtual = is_virtual.get<bool>();
  tensor.value = scalar(member(value, "value", field), field + ".value");
  const std::string layout = text(value, "layout", field);
  if (layout != "user" && layout != "dims" && layout != "inferred")
    refuse(field + ".layout", "expected \"user\", \"dims\" or \"inferred\"");
  tensor.stride_is_user = layout == "user";
  tensor.dim_is_user = layout != "inferred";
  const Json& ragged = member(value, "ragged_offset", field);
  if (!ragged.is_null()) tensor.ragged_offset = index(ragged, tensors, field + ".ragged_offset");
  return tensor;
}

std::map<std::string, size_t> parse_ports(const Json& map, size_t tensors, const std::string& field) {
  if (!map.is_object()) refuse(field, "expected a map");
  std::map<std::string, size_t> ports;
  for (const auto& [port, value] : map.items()) ports[port] = index(value, tensors, field + "." + port);
  return ports;
}

GraphParam parse_param(const Json& value, const std::string& field) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array() && !value.empty() && value.front().is_array()) {
    std::vector<GraphList> lists;
    for (const Json& inner : value) lists.push_back(integers(inner, field));
    return lists;
  }
  if (value.is_array()) return integers(value, field);
  refuse(field, "expected true, false, a number, text or a list");
}

GraphNode parse_node(const Json& value, size_t tensors, const std::string& field) {
  GraphNode node;
  node.type = text(value, "type", field);
  node.inputs = parse_ports(member(value, "inputs", field), tensors, field + ".inputs");
  node.outputs = parse_ports(member(value, "outputs", field), tensors, field + ".outputs");
  const Json& params = member(value, "params", field);
  if (!params.is_object()) refuse(field + ".params", "expected a map");
  for (const auto& [name, param] : params.items()) {
    node.params.emplace(name, parse_param(param, field + ".params." + name));
  }
  node.compute_data_type = optional_text(value, "compute_data_type", field);
  return node;
}

std::vector<size_t> indices(const Json& graph, const char* name, size_t tensors, const std::string& field) {
  std::vector<size_t> found;
  for (const Json& value : list(graph, name, field)) {
    found.push_back(index(value, tensors, field + "." + name));
  }
  return found;
}

}  // namespace

GraphText parse_graph(std::string_view source, const std::string& field) {
  const Json value = parse_json(source, field);
  const Json& version = member(value, "version", field);
  if (version != kGraphVersion) {
    refuse(field + ".version",
           "got " + version.dump() + ", this build reads version " + std::to_string(kGraphVersion));
  }
  GraphText graph;
  graph.io_data_type = optional_text(value, "io_data_type", field);
  graph.intermediate_data_type = optional_text(value, "intermediate_data_type", field);
  graph.compute_data_type = optional_text(value, "compute_data_type", field);
  const Json& tensors = list(value, "tensors", field);
  for (size_t i = 0; i < tensors.size(); ++i) {
    graph.tensors.push_back(
        parse_tensor(tensors[i], tensors.size(), field + ".tensors[" + std::to_string(i) + "]"));
  }
  const Json& nodes = list(value, "nodes", field);
  for (size_t i = 0; i < nodes.size(); ++i) {
    graph.nodes.push_back(parse_node(nodes[i], tensors.size(), field + ".nodes[" + std::to_string(i) + "]"));
  }
  graph.inputs = indices(value, "inputs", tensors.size(), field);
  graph.outputs = indices(value, "outputs", tensors.size(), field);
  return graph;
}

}  // namespace cudnn_jax
