// Lowering, part four: attention of float8 tensors, with one scale each or a scale for each block of 32.
// Included by cudnn_frontend_unit.cc only.
#pragma once

#include "ffi/cudnn_lower_attention.h"

namespace cudnn_jax::lowering {

// Scales of blocks lie in tiles of 128 x 4: cuDNN knows attention of such tensors in no other order.
template <size_t kCount>
std::array<FrontendTensor, kCount> block_scales(NodeReader& node,
                                                const std::array<const char*, kCount>& ports) {
  const std::array<FrontendTensor, kCount> scales = all_required<kCount>(node, ports);
  for (const FrontendTensor& each : scales) each->set_reordering_type(fe::TensorReordering_t::F8_128x4);
  return scales;
}

inline void lower_attention_fp8(NodeReader& node, fe::graph::Graph& graph) {
  const fe::graph::SDPA_fp8_attributes attributes = forward_attributes(node);
  const auto [q, k, v] = all_alone<3>(node, {"q", "k", "v"});
  const auto [descale_q, descale_k, descale_v, descale_s, scale_s, scale_o] =
      all_required<6>(node, {"descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"});
  const auto [o, stats, amax_s, amax_o] =
      graph.sdpa_fp8(q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, attributes);
  node.output("O", o);
  node.output("Stats", stats);
  node.told_output("Amax_S", amax_s);
  node.told_output("Amax_O", amax_o);
}

inline void lower_attention_mxfp8(NodeReader& node, fe::graph::Graph& graph) {
  const fe::graph::SDPA_fp8_attributes attributes = forward_attributes(node);
  const auto [q, k, v] = all_alone<3>(node, {"q", "k", "v"});
  const auto [descale_q, descale_k, descale_v] =
      block_scales<3>(node, {"descale_q", "descale_k", "descale_v"});
  const auto [o, stats, amax_o] = graph.sdpa_fp8(q, k, v, descale_q, descale_k, descale_v, attributes);
  node.output("O", o);
  node.output("Stats", stats);
  node.told_output("Amax_O", amax_o);
}

inline fe::graph::SDPA_fp8_backward_attributes backward_fp8_attributes(NodeReader& node) {
  fe::graph::SDPA_fp8_backward_attributes attributes;
  set_masks(node, attributes);
  set_backward_ports(node, attributes);
  return attributes;
}

inline void lower_attention_fp8_backward(NodeReader& node, fe::graph::Graph& graph) {
  const auto attributes = backward_fp8_attributes(node);
  const auto [q, k, v, o, d_o] = all_alone<5>(node, {"q", "k", "v", "o", "dO"});
  const FrontendTensor stats = node.required("stats");
  const auto [descale_q, descale_k, descale_v, descale_o, descale_d_o, descale_s, descale_d_p] =
      all_required<7>(node, {"descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s",
                             "descale_dP"});
  const auto [scale_s, scale_d_q, scale_d_k, scale_d_v, scale_d_p] =
      all_required<5>(node, {"scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"});
  const auto made = graph.sdpa_fp8_backward(q, k, v, o, d_o, stats, descale_q, descale_k, descale_v,
                                            descale_o, descale_d_o, descale_s, descale_d_p, scale_s,
                                            scale_d_q, scale_d_k, scale_d_v, scale_d_p, attributes);
  set_gradients<7>(node, made, {"dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"});
}

inline void lower_attention_mxfp8_backward(NodeReader& node, fe::graph::Graph& graph) {
  const auto attributes = backward_fp8_attributes(node);
  const auto [q, q_t, k, k_t, v, o_f16, d_o_f16, d_o, d_o_t] =
      all_alone<9>(node, {"q", "q_T", "k", "k_T", "v", "o_f16", "dO_f16", "dO", "dO_T"});
  const FrontendTensor stats = node.required("stats");
  const auto [descale_q, descale_q_t, descale_k, descale_k_t, descale_v, descale_d_o, descale_d_o_t] =
      block_scales<7>(node, {"descale_q", "descale_q_T", "descale_k", "descale_k_T", "descale_v",
                             "descale_dO", "descale_dO_T"});
  const auto made =
      graph.sdpa_fp8_backward(q, q_t, k, k_t, v, o_f16, d_o_f16, d_o, d_o_t, stats, descale_q, descale_q_t,
                              descale_k, descale_k_t, descale_v, descale_d_o, descale_d_o_t, attributes);
  set_gradients<6>(node, made, {"dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV"});
}

}  // namespace cudnn_jax::lowering
