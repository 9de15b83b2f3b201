// Lowering, part five: norms, folds, convolution, moved elements, rotation, block scales and grouped matmul.
// Included by cudnn_frontend_unit.cc only.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cudnn_lower_attention_fp8.h"
#include "ffi/cudnn_version.h"

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

// What cuDNN serves since a version, where its own refusal does not tell. `here` is the version at hand.
inline void needs_cudnn(size_t version, size_t here, const std::string& what) {
  if (here >= version) return;
  throw BackendNotSupported(what + " requires cuDNN " + cudnn_version_text(static_cast<int64_t>(version)) +
                            ", here is " + cudnn_version_text(static_cast<int64_t>(here)));
}

// Before 9.22 a slice moves the pointer of the node behind it, and the headers decide too.
inline void check_slices(const GraphText& text) {
  const auto is_slice = [](const GraphNode& node) { return node.type == "SLICE"; };
  if (!std::all_of(text.nodes.begin(), text.nodes.end(), is_slice)) return;
  const size_t here = std::min(fe::detail::get_backend_version(), fe::detail::get_compiled_version());
  needs_cudnn(92200, here, "SLICE in front of no other node");
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

// Images with their channels fastest as one image: the batch and the first spatial axis are one axis.
inline std::optional<TensorLayout> as_one_image(const GraphTensor& image) {
  TensorLayout layout{image.dim, image.stride};
  const size_t rank = image.dim.size();
  if (rank < 3 || image.stride[1] != 1) return std::nullopt;
  if (image.dim[0] != 1 && image.stride[0] != image.dim[2] * image.stride[2]) return std::nullopt;
  layout.dim[2] *= layout.dim[0];
  layout.dim[0] = 1;
  layout.stride[0] *= image.dim[0];
  return layout;
}

// Pointwise nodes: cuDNN has no engine for the node itself. It reads wrong behind an operand that broadcasts
// along the first axis, so that this has to be of length 1.
inline void lower_batchnorm_inference(NodeReader& node, fe::graph::Graph& graph) {
  const auto buffers = node.own_buffers("input", "Y");
  const auto from = buffers ? as_one_image(buffers->in) : std::nullopt;
  const auto to = buffers ? as_one_image(buffers->out) : std::nullopt;
  if (!from || !to) {
    throw BackendNotSupported(
        "BATCH_NORM_INFERENCE: the cuDNN backend serves buffers of images with the channels fastest");
  }
  const auto apply = [&](fe::PointwiseMode_t mode, const FrontendTensor& a, const char* port) {
    auto attributes = attributes_of<fe::graph::Pointwise_attributes>(node);
    attributes.set_mode(mode);
    return graph.pointwise(a, node.required(port), attributes);
  };
  FrontendTensor y = node.input_as("input", *from);
  y = apply(fe::PointwiseMode_t::SUB, y, "mean");
  y = apply(fe::PointwiseMode_t::MUL, y, "inv_variance");
  y = apply(fe::PointwiseMode_t::MUL, y, "scale");
  node.output_as("Y", apply(fe::PointwiseMode_t::ADD, y, "bias"), *to);
}

// A pair of sums: for the node itself cuDNN has engines behind a convolution of float16 alone.
inline void lower_genstats(NodeReader& node, fe::graph::Graph& graph) {
  const FrontendTensor x = node.required("input");
  auto square = attributes_of<fe::graph::Pointwise_attributes>(node);
  square.set_mode(fe::PointwiseMode_t::MUL);
  auto fold = attributes_of<fe::graph::Reduction_attributes>(node);
  fold.set_mode(fe::ReductionMode_t::ADD);
  node.told_output("SUM", graph.reduction(x, fold));
  node.told_output("SQ_SUM", graph.reduction(graph.pointwise(x, x, square), fold));
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

// A row-major tensor as one row: (1, 1, elements).
inline std::optional<TensorLayout> as_one_row(const GraphTensor& tensor) {
  int64_t count = 1;
  for (size_t axis = tensor.dim.size(); axis-- > 0;) {
    if (tensor.dim[axis] != 1 && tensor.stride[axis] != count) return std::nullopt;
    count *= tensor.dim[axis];
  }
  return TensorLayout{{1, 1, count}, {count, count, 1}};
}

// Between buffers it is a copy of one row: cuDNN has engines for the node beside others only.
inline void lower_reshape(NodeReader& node, fe::graph::Graph& graph) {
  const bool moves = node.text("reshape_mode") == "LOGICAL";
  const auto buffers = node.own_buffers("input", "OUT_0");
  const auto from = buffers ? as_one_row(buffers->in) : std::nullopt;
  const auto to = buffers ? as_one_row(buffers->out) : std::nullopt;
  if (from && to) {
    auto copy = attributes_of<fe::graph::Pointwise_attributes>(node);
    copy.set_mode(fe::PointwiseMode_t::IDENTITY);
    node.output_as("OUT_0", graph.pointwise(node.input_as("input", *from), copy), *to);
    return;
  }
  fe::graph::Reshape_attributes attributes;
  attributes.set_name(node.name());
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

// cuDNN orders the scales that it makes in tiles of 128 x 4, which no strides of a buffer say.
inline void lower_block_scale_quantize(NodeReader&, fe::graph::Graph&) {
  throw BackendNotSupported(
      "BLOCK_SCALE_QUANTIZE: cuDNN has it since Blackwell (sm_100), with scales in tiles of 128 x 4, which "
      "strides do not say");
}

inline void lower_moe_grouped_matmul(NodeReader& node, fe::graph::Graph& graph) {
  using Mode = fe::MoeGroupedMatmulMode_t;
  static const std::map<std::string, Mode> kModes = {
      {"", Mode::NONE}, {"NONE", Mode::NONE}, {"GATHER", Mode::GATHER}, {"SCATTER", Mode::SCATTER}};
  auto attributes = attributes_of<fe::graph::Moe_grouped_matmul_attributes>(node);
  const Mode mode = named(kModes, node.text("mode"), "mode");
  if (mode == Mode::SCATTER)
    needs_cudnn(92100, fe::detail::get_backend_version(), "MOE_GROUPED_MATMUL: mode SCATTER");
  attributes.set_mode(mode);
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
      {"SDPA_FP8", lower_attention_fp8},
      {"SDPA_FP8_BACKWARD", lower_attention_fp8_backward},
      {"SDPA_MXFP8", lower_attention_mxfp8},
      {"SDPA_MXFP8_BACKWARD", lower_attention_mxfp8_backward},
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
