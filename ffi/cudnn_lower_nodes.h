// Lowering, part two: matmul and pointwise nodes, and what every node's lowering shares. Included by
// cudnn_frontend_unit.cc only.
#pragma once

#include <optional>
#include <utility>

#include "ffi/cudnn_lower_tensors.h"

namespace cudnn_jax::lowering {

// One node while it is lowered. Ports and parameters are taken one by one; what nobody took is what cuDNN
// does not know.
class NodeReader {
 public:
  NodeReader(const GraphNode& node, size_t position, Tensors& tensors)
      : node_(node),
        tensors_(tensors),
        name_("node " + std::to_string(position)),
        inputs_(node.inputs),
        outputs_(node.outputs),
        params_(node.params) {}

  const std::string& name() const { return name_; }
  fe::DataType_t compute_type() const { return data_type(node_.compute_data_type); }

  // Null when the node has no such port.
  FrontendTensor input(const std::string& port) {
    const auto found = inputs_.find(port);
    if (found == inputs_.end()) return nullptr;
    const size_t index = found->second;
    inputs_.erase(found);
    return tensors_.get(index);
  }

  // The tensors at "port[0]", "port[1]" and so on.
  std::vector<FrontendTensor> numbered(const std::string& port) {
    std::vector<FrontendTensor> tensors;
    while (FrontendTensor tensor = input(port + "[" + std::to_string(tensors.size()) + "]")) {
      tensors.push_back(tensor);
    }
    return tensors;
  }

  FrontendTensor required(const std::string& port) {
    FrontendTensor tensor = input(port);
    if (tensor == nullptr) throw BackendNotSupported(node_.type + " without " + port);
    return tensor;
  }

  // cudnn_frontend transposes attention's operands in place, so another port would see them transposed.
  FrontendTensor required_alone(const std::string& port) {
    const auto found = node_.inputs.find(port);
    if (found != node_.inputs.end() && tensors_.is_shared(found->second)) {
      throw BackendNotSupported(node_.type + ": the tensor at " + port + " is at another port too");
    }
    return required(port);
  }

  // An output that the caller makes, rather than cuDNN; null when the node has no such port.
  FrontendTensor made_output(const std::string& port) {
    const auto found = outputs_.find(port);
    if (found == outputs_.end()) return nullptr;
    const size_t index = found->second;
    outputs_.erase(found);
    return tensors_.get(index);
  }

  bool has_output(const std::string& port) const { return outputs_.count(port) != 0; }

  // An output that cuDNN makes. One that the node does not name stays inside cuDNN.
  void output(const std::string& port, const FrontendTensor& tensor) { settle(port, tensor, false); }

  // One whose dims cuDNN's frontend does not infer: the graph tells them.
  void told_output(const std::string& port, const FrontendTensor& tensor) { settle(port, tensor, true); }

  // The buffers at two ports, if they may be told under other dims; null if something else sees them too.
  struct Buffers {
    const GraphTensor& in;
    const GraphTensor& out;
  };
  std::optional<Buffers> own_buffers(const std::string& in, const std::string& out) const {
    const auto from = node_.inputs.find(in);
    const auto to = node_.outputs.find(out);
    if (from == node_.inputs.end() || !tensors_.is_input_of_one(from->second)) return std::nullopt;
    if (to == node_.outputs.end() || !tensors_.is_output_alone(to->second)) return std::nullopt;
    return Buffers{tensors_.told(from->second), tensors_.told(to->second)};
  }
  FrontendTensor input_as(const std::string& port, const TensorLayout& layout) {
    inputs_.erase(port);
    return tensors_.get_as(node_.inputs.at(port), layout);
  }
  void output_as(const std::string& port, const FrontendTensor& tensor, const TensorLayout& layout) {
    outputs_.erase(port);
    tensors_.settle_as(node_.outputs.at(port), tensor, layout);
  }

  const GraphParam* param(const std::string& name) {
    const auto found = params_.find(name);
    if (found == params_.end()) return nullptr;
    params_.erase(found);
    return &node_.params.at(name);
  }

  bool flag(const std::string& name) {
    const GraphParam* value = param(name);
    if (value == nullptr) return false;
    if (const auto* is = std::get_if<bool>(value)) return *is;
    fail(name, "true or false");
  }

  std::optional<int64_t> integer(const std::string& name) {
    const GraphParam* value = param(name);
    if (value == nullptr) return std::nullopt;
    if (const auto* is = std::get_if<int64_t>(value)) return *is;
    fail(name, "an integer");
  }

  std::optional<double> number(const std::string& name) {
    const GraphParam* value = param(name);
    if (value == nullptr) return std::nullopt;
    if (const auto* is = std::get_if<double>(value)) return *is;
    if (const auto* is = std::get_if<int64_t>(value)) return static_cast<double>(*is);
    fail(name, "a number");
  }

  std::optional<GraphList> list(const std::string& name) {
    const GraphParam* value = param(name);
    if (value == nullptr) return std::nullopt;
    if (const auto* is = std::get_if<GraphList>(value)) return *is;
    fail(name, "a list of integers");
  }

  std::vector<GraphList> lists(const std::string& name) {
    const GraphParam* value = param(name);
    if (value == nullptr) return {};
    if (const auto* is = std::get_if<std::vector<GraphList>>(value)) return *is;
    fail(name, "a list of lists");
  }

  std::string text(const std::string& name) {
    const GraphParam* value = param(name);
    if (value == nullptr) return "";
    if (const auto* is = std::get_if<std::string>(value)) return *is;
    fail(name, "text");
  }

  // Throws for what was given and not taken: to leave it out would be a wrong answer.
  void finish() const {
    std::string unknown;
    const auto add = [&unknown](const auto& names) {
      for (const auto& item : names) unknown += (unknown.empty() ? "" : ", ") + item.first;
    };
    add(inputs_);
    add(outputs_);
    add(params_);
    if (!unknown.empty()) throw BackendNotSupported(node_.type + ": the cuDNN backend has no " + unknown);
  }

 private:
  void settle(const std::string& port, const FrontendTensor& tensor, bool is_told) {
    const auto found = outputs_.find(port);
    if (found == outputs_.end()) return;
    if (tensor == nullptr) throw BackendNotSupported(node_.type + " does not make " + port + " here");
    tensors_.settle(found->second, tensor, is_told);
    outputs_.erase(found);
  }

  [[noreturn]] void fail(const std::string& name, const std::string& rule) const {
    throw Error(ErrorKind::kInvalidArgument, "graph." + node_.type + "." + name + ": expected " + rule);
  }

  const GraphNode& node_;
  Tensors& tensors_;
  const std::string name_;
  std::map<std::string, size_t> inputs_;
  std::map<std::string, size_t> outputs_;
  std::map<std::string, GraphParam> params_;
};

inline void lower_matmul(NodeReader& node, fe::graph::Graph& graph) {
  fe::graph::Matmul_attributes attributes;
  attributes.set_name(node.name()).set_compute_data_type(node.compute_type());
  if (const auto padding = node.number("padding")) attributes.set_padding(*padding);
  const FrontendTensor a = node.required("A");
  const FrontendTensor b = node.required("B");
  node.output("C", graph.matmul(a, b, attributes));
}

struct PointwiseMode {
  fe::PointwiseMode_t mode;
  std::vector<const char*> ports;
};

inline const PointwiseMode& pointwise_mode(const std::string& name) {
  using Mode = fe::PointwiseMode_t;
  static const std::vector<const char*> kInput = {"input"};
  static const std::vector<const char*> kPair = {"a", "b"};
  static const std::vector<const char*> kNumbered = {"input0", "input1"};
  static const std::vector<const char*> kCompared = {"input", "comparison"};
  static const std::vector<const char*> kBackward = {"loss", "input"};
  static const std::map<std::string, PointwiseMode> kModes = {
      {"abs", {Mode::ABS, kInput}},
      {"add", {Mode::ADD, kPair}},
      {"add_square", {Mode::ADD_SQUARE, kPair}},
      {"bias", {Mode::ADD, {"input", "bias"}}},
      {"binary_select", {Mode::BINARY_SELECT, {"input0", "input1", "mask"}}},
      {"ceil", {Mode::CEIL, kInput}},
      {"cmp_eq", {Mode::CMP_EQ, kCompared}},
      {"cmp_ge", {Mode::CMP_GE, kCompared}},
      {"cmp_gt", {Mode::CMP_GT, kCompared}},
      {"cmp_le", {Mode::CMP_LE, kCompared}},
      {"cmp_lt", {Mode::CMP_LT, kCompared}},
      {"cmp_neq", {Mode::CMP_NEQ, kCompared}},
      {"cos", {Mode::COS, kInput}},
      {"div", {Mode::DIV, kPair}},
      {"elu", {Mode::ELU_FWD, kInput}},
      {"elu_backward", {Mode::ELU_BWD, kBackward}},
      {"erf", {Mode::ERF, kInput}},
      {"exp", {Mode::EXP, kInput}},
      {"floor", {Mode::FLOOR, kInput}},
      {"gelu", {Mode::GELU_FWD, kInput}},
      {"gelu_approx_tanh", {Mode::GELU_APPROX_TANH_FWD, kInput}},
      {"gelu_approx_tanh_backward", {Mode::GELU_APPROX_TANH_BWD, kBackward}},
      {"gelu_backward", {Mode::GELU_BWD, kBackward}},
      {"gen_index", {Mode::GEN_INDEX, kInput}},
      {"identity", {Mode::IDENTITY, kInput}},
      {"leaky_relu", {Mode::RELU_FWD, kInput}},
      {"leaky_relu_backward", {Mode::RELU_BWD, kBackward}},
      {"log", {Mode::LOG, kInput}},
      {"logical_and", {Mode::LOGICAL_AND, kPair}},
      {"logical_not", {Mode::LOGICAL_NOT, kInput}},
      {"logical_or", {Mode::LOGICAL_OR, kPair}},
      {"max", {Mode::MAX, kNumbered}},
      {"min", {Mode::MIN, kNumbered}},
      {"mod", {Mode::MOD, kNumbered}},
      {"mul", {Mode::MUL, kPair}},
      {"neg", {Mode::NEG, kInput}},
      {"pow", {Mode::POW, kNumbered}},
      {"reciprocal", {Mode::RECIPROCAL, kInput}},
      {"relu", {Mode::RELU_FWD, kInput}},
      {"relu_backward", {Mode::RELU_BWD, kBackward}},
      {"rsqrt", {Mode::RSQRT, kInput}},
      {"scale", {Mode::MUL, {"input", "scale"}}},
      {"sigmoid", {Mode::SIGMOID_FWD, kInput}},
      {"sigmoid_backward", {Mode::SIGMOID_BWD, kBackward}},
      {"sin", {Mode::SIN, kInput}},
      {"softplus", {Mode::SOFTPLUS_FWD, kInput}},
      {"softplus_backward", {Mode::SOFTPLUS_BWD, kBackward}},
      {"sqrt", {Mode::SQRT, kInput}},
      {"sub", {Mode::SUB, kPair}},
      {"swish", {Mode::SWISH_FWD, kInput}},
      {"swish_backward", {Mode::SWISH_BWD, kBackward}},
      {"tan", {Mode::TAN, kInput}},
      {"tanh", {Mode::TANH_FWD, kInput}},
      {"tanh_backward", {Mode::TANH_BWD, kBackward}},
  };
  const auto found = kModes.find(name);
  if (found == kModes.end()) throw BackendNotSupported("POINTWISE: the cuDNN backend has no mode " + name);
  return found->second;
}

inline void lower_pointwise(NodeReader& node, fe::graph::Graph& graph) {
  const PointwiseMode& mode = pointwise_mode(node.text("mode"));
  fe::graph::Pointwise_attributes attributes;
  attributes.set_name(node.name()).set_compute_data_type(node.compute_type()).set_mode(mode.mode);
  if (const auto axis = node.integer("axis")) attributes.set_axis(*axis);
  if (const auto slope = node.number("negative_slope")) {
    attributes.set_relu_lower_clip_slope(static_cast<float>(*slope));
  }
  if (const auto clip = node.number("lower_clip")) attributes.set_relu_lower_clip(static_cast<float>(*clip));
  if (const auto clip = node.number("upper_clip")) attributes.set_relu_upper_clip(static_cast<float>(*clip));
  if (const auto beta = node.number("swish_beta")) attributes.set_swish_beta(static_cast<float>(*beta));

  std::vector<FrontendTensor> in;
  for (const char* port : mode.ports) in.push_back(node.required(port));
  FrontendTensor out;
  switch (in.size()) {
    case 1: out = graph.pointwise(in[0], attributes); break;
    case 2: out = graph.pointwise(in[0], in[1], attributes); break;
    default: out = graph.pointwise(in[0], in[1], in[2], attributes);
  }
  node.output("OUT_0", out);
}

}  // namespace cudnn_jax::lowering
