// Lowering, part four: attention of float8 tensors, with one scale each or a scale for each block of 32.
// Included by cudnn_frontend_unit.cc only.
#pragma once

#include "ffi/cudnn_lower_attention.h"

namespace cudnn_jax::lowering {

// Scales of blocks lie in tiles of 128 x 4: cuDNN knows attention of such tensors in no other order.
inline FrontendTensor block_scales(NodeReader& node, const char* port) {
  FrontendTensor scales = node.required(port);
  scales->set_reordering_type(fe::TensorReordering_t::F8_128x4);
  return scales;
}

inline void lower_attention_fp8(NodeReader& node, fe::graph::Graph& graph) {
  const fe::graph::SDPA_fp8_attributes attributes = forward_attributes(node);
  const FrontendTensor q = node.required_alone("q");
  const FrontendTensor k = node.required_alone("k");
  const FrontendTensor v = node.required_alone("v");
  const FrontendTensor descale_q = node.required("descale_q");
  const FrontendTensor descale_k = node.required("descale_k");
  const FrontendTensor descale_v = node.required("descale_v");
  const FrontendTensor descale_s = node.required("descale_s");
  const FrontendTensor scale_s = node.required("scale_s");
  const FrontendTensor scale_o = node.required("scale_o");
  const auto [o, stats, amax_s, amax_o] =
      graph.sdpa_fp8(q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, attributes);
  node.output("O", o);
  node.output("Stats", stats);
  node.told_output("Amax_S", amax_s);
  node.told_output("Amax_O", amax_o);
}

inline void lower_attention_mxfp8(NodeReader& node, fe::graph::Graph& graph) {
  const fe::graph::SDPA_fp8_attributes attributes = forward_attributes(node);
  const FrontendTensor q = node.required_alone("q");
  const FrontendTensor k = node.required_alone("k");
  const FrontendTensor v = node.required_alone("v");
  const FrontendTensor descale_q = block_scales(node, "descale_q");
  const FrontendTensor descale_k = block_scales(node, "descale_k");
  const FrontendTensor descale_v = block_scales(node, "descale_v");
  const auto [o, stats, amax_o] = graph.sdpa_fp8(q, k, v, descale_q, descale_k, descale_v, attributes);
  node.output("O", o);
  node.output("Stats", stats);
  node.told_output("Amax_O", amax_o);
}

inline fe::graph::SDPA_fp8_backward_attributes backward_fp8_attributes(NodeReader& node) {
  using Attributes = fe::graph::SDPA_fp8_backward_attributes;
  static constexpr std::array<OptionalPort<Attributes>, 4> kInputs = {{
      {"attn_scale", &Attributes::set_attn_scale},
      {"seq_len_q", &Attributes::set_seq_len_q},
      {"seq_len_kv", &Attributes::set_seq_len_kv},
      {"sink_token", &Attributes::set_sink_token},
  }};
  static constexpr std::array<OptionalPort<Attributes>, 1> kOutputs = {{
      {"dSink_token", &Attributes::set_dsink_token},
  }};
  Attributes attributes;
  set_masks(node, attributes);
  set_inputs(node, attributes, kInputs);
  set_outputs(node, attributes, kOutputs);
  attributes.set_deterministic_algorithm(node.flag("use_deterministic_algorithm"));
  return attributes;
}

// The gradients of q, k and v, then largest magnitudes.
template <size_t kCount>
void set_gradients(NodeReader& node, const std::array<FrontendTensor, kCount>& made,
                   const std::array<const char*, kCount>& ports) {
  for (size_t i = 0; i < 3; ++i) node.output(ports[i], made[i]);
  for (size_t i = 3; i < kCount; ++i) node.told_output(ports[i], made[i]);
}

inline void lower_attention_fp8_backward(NodeReader& node, fe::graph::Graph& graph) {
  const auto attributes = backward_fp8_attributes(node);
  const FrontendTensor q = node.required_alone("q");
  const FrontendTensor k = node.required_alone("k");
  const FrontendTensor v = node.required_alone("v");
  const FrontendTensor o = node.required_alone("o");
  const FrontendTensor d_o = node.required_alone("dO");
  const FrontendTensor stats = node.required("stats");
  const FrontendTensor descale_q = node.required("descale_q");
  const FrontendTensor descale_k = node.required("descale_k");
  const FrontendTensor descale_v = node.required("descale_v");
  const FrontendTensor descale_o = node.required("descale_o");
  const FrontendTensor descale_d_o = node.required("descale_dO");
  const FrontendTensor descale_s = node.required("descale_s");
  const FrontendTensor descale_d_p = node.required("descale_dP");
  const FrontendTensor scale_s = node.required("scale_s");
  const FrontendTensor scale_d_q = node.required("scale_dQ");
  const FrontendTensor scale_d_k = node.required("scale_dK");
  const FrontendTensor scale_d_v = node.required("scale_dV");
  const FrontendTensor scale_d_p = node.required("scale_dP");
  const auto made = graph.sdpa_fp8_backward(q, k, v, o, d_o, stats, descale_q, descale_k, descale_v,
                                            descale_o, descale_d_o, descale_s, descale_d_p, scale_s,
                                            scale_d_q, scale_d_k, scale_d_v, scale_d_p, attributes);
  set_gradients<7>(node, made, {"dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"});
}

inline void lower_attention_mxfp8_backward(NodeReader& node, fe::graph::Graph& graph) {
  const auto attributes = backward_fp8_attributes(node);
  const FrontendTensor q = node.required_alone("q");
  const FrontendTensor q_t = node.required_alone("q_T");
  const FrontendTensor k = node.required_alone("k");
  const FrontendTensor k_t = node.required_alone("k_T");
  const FrontendTensor v = node.required_alone("v");
  const FrontendTensor o_f16 = node.required_alone("o_f16");
  const FrontendTensor d_o_f16 = node.required_alone("dO_f16");
  const FrontendTensor d_o = node.required_alone("dO");
  const FrontendTensor d_o_t = node.required_alone("dO_T");
  const FrontendTensor stats = node.required("stats");
  const FrontendTensor descale_q = block_scales(node, "descale_q");
  const FrontendTensor descale_q_t = block_scales(node, "descale_q_T");
  const FrontendTensor descale_k = block_scales(node, "descale_k");
  const FrontendTensor descale_k_t = block_scales(node, "descale_k_T");
  const FrontendTensor descale_v = block_scales(node, "descale_v");
  const FrontendTensor descale_d_o = block_scales(node, "descale_dO");
  const FrontendTensor descale_d_o_t = block_scales(node, "descale_dO_T");
  const auto made =
      graph.sdpa_fp8_backward(q, q_t, k, k_t, v, o_f16, d_o_f16, d_o, d_o_t, stats, descale_q, descale_q_t,
                              descale_k, descale_k_t, descale_v, descale_d_o, descale_d_o_t, attributes);
  set_gradients<6>(node, made, {"dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV"});
}

}  // namespace cudnn_jax::lowering
