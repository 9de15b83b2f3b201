// Lowering, part four: norms, folds, convolution, moved elements, rotation, block scales and grouped matmul.
// Included by cudnn_frontend_unit.cc only.
#pragma once

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cudnn_lower_attention.h"

namespace cudnn_jax::lowering {

template <typename Value>
const Value& named(const std::map<std::string, Value>& values, const std::string& name,
                   const char* parameter) {
  const auto found = values.find(name);
  if (found == values.end())
    throw BackendNotSupported(std::string(parameter) + ": the cuDNN backend has no " + name);
  return found->second;
}

template <typename Attributes>
Attributes attributes_of(const NodeReader& node) {
  Attributes attributes;
  attributes.set_name(node.name());
  attributes.set_compute_data_type(node.compute_type());
  return attributes;
}

// A tensor of one number, or null: the node has it at a port or as a parameter.
inline FrontendTensor number_at(NodeReader& node, fe::graph::Graph& graph, const std::string& name,
                                const FrontendTensor& like) {
  if (FrontendTensor tensor = node.input(name)) return tensor;
  const auto value = node.number(name);
  if (!value) return nullptr;
  const std::vector<int64_t> ones(like->get_dim().size(), 1);
  return graph.tensor(scalar(*value, fe::DataType_t::FLOAT).set_dim(ones).set_stride(ones));
}

inline fe::NormFwdPhase_t phase(NodeReader& node) {
  return node.text("norm_forward_phase") == "TRAINING" ? fe::NormFwdPhase_t::TRAINING
                                                       : fe::NormFwdPhase_t::INFERENCE;
}

inline void lower_rmsnorm(NodeReader& node, fe::graph::Graph& graph) {
  auto attributes = attributes_of<fe::graph::Rmsnorm_attributes>(node);
  const FrontendTensor x = node.required("input");
  FrontendTensor epsilon = number_at(node, graph, "epsilon", x);
  FrontendTensor bias = node.input("bias");
  attributes.set_forward_phase(phase(node)).set_epsilon(epsilon);
  if (bias != nullptr) attributes.set_bias(bias);
  const auto [y, inv_var] = graph.rmsnorm(x, node.required("scale"), attributes);
  node.output("Y", y);
  node.output("inv_var", inv_var);
}

inline void lower_rmsnorm_backward(NodeReader& node, fe::graph::Graph& graph) {
  auto attributes = attributes_of<fe::graph::Rmsnorm_backward_attributes>(node);
  node.param("has_dbias");  // the output says it
  attributes.has_dbias(node.has_output("DBias"));
  const FrontendTensor dy = node.required("grad");
  const FrontendTensor x = node.required("input");
  const FrontendTensor scale = node.required("scale");
  const auto [dx, dscale, dbias] =
      graph.rmsnorm_backward(dy, x, scale, node.required("inv_variance"), attributes);
  node.output("DX", dx);
  node.output("DScale", dscale);
  node.output("DBias", dbias);
}

template <typename Attributes, auto kMethod>
void lower_norm(NodeReader& node, fe::graph::Graph& graph) {
  auto attributes = attributes_of<Attributes>(node);
  const FrontendTensor x = node.required("input");
  FrontendTensor epsilon = number_at(node, graph, "epsilon", x);
  attributes.set_forward_phase(phase(node)).set_epsilon(epsilon);
  const FrontendTensor scale = node.required("scale");
  const auto [y, mean, inv_var] = (graph.*kMethod)(x, scale, node.required("bias"), attributes);
  node.output("Y", y);
  node.output("mean", mean);
  node.output("inv_var", inv_var);
}

template <typename Attributes, auto kMethod>
void lower_norm_backward(NodeReader& node, fe::graph::Graph& graph) {
  auto attributes = attributes_of<Attributes>(node);
  const FrontendTensor mean = node.required("mean");
  attributes.set_saved_mean_and_inv_variance(mean, node.required("inv_variance"));
  const FrontendTensor dy = node.required("grad");
  const FrontendTensor x = node.required("input");
  const auto [dx, dscale, dbias] = (graph.*kMethod)(dy, x, node.required("scale"), attributes);
  node.output("DX", dx);
  node.output("DScale", dscale);
  node.output("DBias", dbias);
}

inline void lower_batchnorm(NodeReader& node, fe::graph::Graph& graph) {
  auto attributes = attributes_of<fe::graph::Batchnorm_attributes>(node);
  const FrontendTensor x = node.required("input");
  FrontendTensor epsilon = number_at(node, graph, "epsilon", x);
  attributes.set_epsilon(epsilon);
  FrontendTensor running_mean = node.input("in_running_mean");
  FrontendTensor running_var = node.input("in_running_var");
  FrontendTensor momentum = number_at(node, graph, "momentum", x);
  if (running_mean != nullptr) attributes.set_previous_running_stats(running_mean, running_var, momentum);
  const FrontendTensor scale = node.required("scale");
  const auto made = graph.batchnorm(x, scale, node.required("bias"), attributes);
  const std::array<const char*, 5> ports = {"Y", "mean", "inv_var", "next_running_mean", "next_running_var"};
  for (size_t i = 0; i < ports.size(); ++i) node.output(ports[i], made[i]);
}

inline void lower_batchnorm_inference(NodeReader& node, fe::graph::Graph& graph) {
  const auto attributes = attributes_of<fe::graph::Batchnorm_inference_attributes>(node);
  const FrontendTensor x = node.required("input");
  const FrontendTensor mean = node.required("mean");
  const FrontendTensor inv_variance = node.required("inv_variance");
  const FrontendTensor scale = node.required("scale");
  node.output("Y",
              graph.batchnorm_inference(x, mean, inv_variance, scale, node.required("bias"), attributes));
}

inline void lower_genstats(NodeReader& node, fe::graph::Graph& graph) {
  const auto attributes = attributes_of<fe::graph::Genstats_attributes>(node);
  const auto [sum, squares] = graph.genstats(node.required("input"), attributes);
  node.output("SUM", sum);
  node.output("SQ_SUM", squares);
}

inline void lower_reduction(NodeReader& node, fe::graph::Graph& graph) {
  using Mode = fe::ReductionMode_t;
  static const std::map<std::string, Mode> kModes = {
      {"ADD", Mode::ADD},     {"MUL", Mode::MUL},     {"MIN", Mode::MIN},
      {"MAX", Mode::MAX},     {"AMAX", Mode::AMAX},   {"AVG", Mode::AVG},
      {"NORM1", Mode::NORM1}, {"NORM2", Mode::NORM2}, {"MUL_NO_ZEROS", Mode::MUL_NO_ZEROS},
  };
  auto attributes = attributes_of<fe::graph::Reduction_attributes>(node);
  attributes.set_mode(named(kModes, node.text("mode"), "mode"));
  if (const FrontendTensor offset = node.input("group_offset")) attributes.set_group_offset(offset);
  node.output("OUT_0", graph.reduction(node.required("input"), attributes));
}

template <typename Attributes>
Attributes convolution_of(NodeReader& node, const FrontendTensor& like) {
  auto attributes = attributes_of<Attributes>(node);
  const size_t spatial = like->get_dim().size() - 2;
  attributes.set_pre_padding(node.list("pre_padding").value_or(GraphList(spatial, 0)));
  attributes.set_post_padding(node.list("post_padding").value_or(GraphList(spatial, 0)));
  attributes.set_stride(node.list("stride").value_or(GraphList(spatial, 1)));
  attributes.set_dilation(node.list("dilation").value_or(GraphList(spatial, 1)));
  const bool mirrored = node.text("convolution_mode") == "CONVOLUTION";
  attributes.set_convolution_mode(mirrored ? fe::ConvolutionMode_t::CONVOLUTION
                                           : fe::ConvolutionMode_t::CROSS_CORRELATION);
  return attributes;
}

inline void lower_conv_fprop(NodeReader& node, fe::graph::Graph& graph) {
  const FrontendTensor image = node.required("image");
  const auto attributes = convolution_of<fe::graph::Conv_fprop_attributes>(node, image);
  node.output("Y", graph.conv_fprop(image, node.required("weight"), attributes));
}

inline void lower_conv_dgrad(NodeReader& node, fe::graph::Graph& graph) {
  const FrontendTensor loss = node.required("loss");
  const auto attributes = convolution_of<fe::graph::Conv_dgrad_attributes>(node, loss);
  node.output("DX", graph.conv_dgrad(loss, node.required("filter"), attributes));
}

inline void lower_conv_wgrad(NodeReader& node, fe::graph::Graph& graph) {
  const FrontendTensor loss = node.required("loss");
  const auto attributes = convolution_of<fe::graph::Conv_wgrad_attributes>(node, loss);
  node.output("DW", graph.conv_wgrad(loss, node.required("image"), attributes));
}

inline void lower_reshape(NodeReader& node, fe::graph::Graph& graph) {
  fe::graph::Reshape_attributes attributes;
  attributes.set_name(node.name());
  const bool moves = node.text("reshape_mode") == "LOGICAL";
  attributes.set_reshape_mode(moves ? fe::ReshapeMode_t::LOGICAL : fe::ReshapeMode_t::VIEW_ONLY);
  node.output("OUT_0", graph.reshape(node.required("input"), attributes));
}

inline void lower_slice(NodeReader& node, fe::graph::Graph& graph) {
  fe::graph::Slice_attributes attributes;
  attributes.set_name(node.name());
  const FrontendTensor x = node.required("input");
  std::vector<std::pair<int64_t, int64_t>> bounds;
  GraphList steps;
  for (const GraphList& each : node.lists("slices")) {
    bounds.emplace_back(each.at(0), each.at(1));
    steps.push_back(each.at(2));
  }
  for (size_t axis = bounds.size(); axis < x->get_dim().size(); ++axis) {
    bounds.emplace_back(0, x->get_dim()[axis]);
    steps.push_back(1);
  }
  attributes.set_slices(bounds).set_strides(steps);
  node.output("OUT_0", graph.slice(x, attributes));
}

inline void lower_transpose(NodeReader& node, fe::graph::Graph& graph) {
  fe::graph::Transpose_attributes attributes;
  attributes.set_name(node.name());
  attributes.set_permutation(node.list("permutation").value_or(GraphList()));
  node.output("OUT_0", graph.transpose(node.required("input"), attributes));
}

inline void lower_concatenate(NodeReader& node, fe::graph::Graph& graph) {
  fe::graph::Concatenate_attributes attributes;
  attributes.set_name(node.name());
  attributes.set_axis(node.integer("axis").value_or(0));
  if (const auto index = node.integer("in_place_index")) attributes.set_in_place_index(*index);
  node.output("OUT_0", graph.concatenate(node.numbered("inputs"), attributes));
}

template <typename Attributes, auto kMethod>
void lower_rope(NodeReader& node, fe::graph::Graph& graph, const char* port) {
  auto attributes = attributes_of<Attributes>(node);
  attributes.set_output_scale(static_cast<float>(node.number("output_scale").value_or(1)));
  attributes.set_rope_dim(node.integer("rope_dim").value_or(0));
  const FrontendTensor x = node.required(port);
  node.output("OUT_0", (graph.*kMethod)(x, node.required("freqs"), attributes));
}

inline void lower_rope_forward(NodeReader& node, fe::graph::Graph& graph) {
  lower_rope<fe::graph::RoPE_attributes, &fe::graph::Graph::rope>(node, graph, "input");
}

inline void lower_rope_backward(NodeReader& node, fe::graph::Graph& graph) {
  lower_rope<fe::graph::RoPE_backward_attributes, &fe::graph::Graph::rope_backward>(node, graph, "dY");
}

inline void lower_block_scale_dequantize(NodeReader& node, fe::graph::Graph& graph) {
  auto attributes = attributes_of<fe::graph::Block_scale_dequantize_attributes>(node);
  std::vector<int32_t> sizes;
  for (int64_t size : node.list("block_size").value_or(GraphList()))
    sizes.push_back(narrow(size, "block_size"));
  attributes.set_block_size(sizes).set_is_negative_scale(node.flag("is_negative_scale"));
  const FrontendTensor x = node.required("input");
  node.output("OUT_0", graph.block_scale_dequantize(x, node.required("descale"), attributes));
}

inline void lower_block_scale_quantize(NodeReader& node, fe::graph::Graph& graph) {
  auto attributes = attributes_of<fe::graph::Block_scale_quantize_attributes>(node);
  attributes.set_block_size(narrow(node.integer("block_size").value_or(0), "block_size"));
  if (const auto axis = node.integer("axis")) attributes.set_axis(*axis);
  attributes.set_transpose(node.flag("transpose"));
  const auto [y, scale] = graph.block_scale_quantize(node.required("input"), attributes);
  node.output("Y", y);
  node.output("scale", scale);
}

inline void lower_moe_grouped_matmul(NodeReader& node, fe::graph::Graph& graph) {
  using Mode = fe::MoeGroupedMatmulMode_t;
  static const std::map<std::string, Mode> kModes = {
      {"", Mode::NONE}, {"NONE", Mode::NONE}, {"GATHER", Mode::GATHER}, {"SCATTER", Mode::SCATTER}};
  auto attributes = attributes_of<fe::graph::Moe_grouped_matmul_attributes>(node);
  attributes.set_mode(named(kModes, node.text("mode"), "mode"));
  if (const auto top_k = node.integer("top_k")) attributes.set_top_k(narrow(*top_k, "top_k"));
  const FrontendTensor token = node.required("token");
  const FrontendTensor weight = node.required("weight");
  const FrontendTensor offset = node.required("first_token_offset");
  const FrontendTensor index = node.input("token_index");
  const FrontendTensor ks = node.input("token_ks");
  node.output("OUT_0", graph.moe_grouped_matmul(token, weight, offset, index, ks, attributes));
}

inline void lower_moe_grouped_matmul_backward(NodeReader& node, fe::graph::Graph& graph) {
  const auto attributes = attributes_of<fe::graph::Moe_grouped_matmul_bwd_attributes>(node);
  const FrontendTensor loss = node.required("doutput");
  const FrontendTensor token = node.required("token");
  node.output("dweight",
              graph.moe_grouped_matmul_bwd(loss, token, node.required("first_token_offset"), attributes));
}

using Lower = void (*)(NodeReader&, fe::graph::Graph&);

inline const std::map<std::string, Lower>& lowerings() {
  using fe::graph::Graph;
  static const std::map<std::string, Lower> kLowerings = {
      {"MATMUL", lower_matmul},
      {"POINTWISE", lower_pointwise},
      {"SDPA", lower_attention},
      {"SDPA_BACKWARD", lower_attention_backward},
      {"RMS_NORM", lower_rmsnorm},
      {"RMS_NORM_BACKWARD", lower_rmsnorm_backward},
      {"LAYER_NORM", lower_norm<fe::graph::Layernorm_attributes, &Graph::layernorm>},
      {"LAYER_NORM_BACKWARD",
       lower_norm_backward<fe::graph::Layernorm_backward_attributes, &Graph::layernorm_backward>},
      {"ADA_LAYER_NORM", lower_norm<fe::graph::AdaLayernorm_attributes, &Graph::adalayernorm>},
      {"ADA_LAYER_NORM_BACKWARD",
       lower_norm_backward<fe::graph::AdaLayernorm_backward_attributes, &Graph::adalayernorm_backward>},
      {"INSTANCE_NORM", lower_norm<fe::graph::Instancenorm_attributes, &Graph::instancenorm>},
      {"INSTANCE_NORM_BACKWARD",
       lower_norm_backward<fe::graph::Instancenorm_backward_attributes, &Graph::instancenorm_backward>},
      {"BATCH_NORM", lower_batchnorm},
      {"BATCH_NORM_INFERENCE", lower_batchnorm_inference},
      {"BATCH_NORM_BACKWARD",
       lower_norm_backward<fe::graph::Batchnorm_backward_attributes, &Graph::batchnorm_backward>},
      {"GENSTATS", lower_genstats},
      {"REDUCTION", lower_reduction},
      {"CONV_FPROP", lower_conv_fprop},
      {"CONV_DGRAD", lower_conv_dgrad},
      {"CONV_WGRAD", lower_conv_wgrad},
      {"RESHAPE", lower_reshape},
      {"SLICE", lower_slice},
      {"TRANSPOSE", lower_transpose},
      {"CONCATENATE", lower_concatenate},
      {"ROPE", lower_rope_forward},
      {"ROPE_BACKWARD", lower_rope_backward},
      {"BLOCK_SCALE_DEQUANTIZE", lower_block_scale_dequantize},
      {"BLOCK_SCALE_QUANTIZE", lower_block_scale_quantize},
      {"MOE_GROUPED_MATMUL", lower_moe_grouped_matmul},
      {"MOE_GROUPED_MATMUL_BWD", lower_moe_grouped_matmul_backward},
  };
  return kLowerings;
}

}  // namespace cudnn_jax::lowering
