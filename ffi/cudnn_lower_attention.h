// Lowering, part three: attention, forward and backward. Included by cudnn_frontend_unit.cc only.
#pragma once

#include <array>

#include "ffi/cudnn_lower_nodes.h"

namespace cudnn_jax::lowering {

template <typename Attributes>
using TensorSetter = Attributes& (Attributes::*)(FrontendTensor);

template <typename Attributes>
struct OptionalPort {
  const char* port;
  TensorSetter<Attributes> set;
};

template <typename Attributes, size_t kCount>
void set_inputs(NodeReader& node, Attributes& attributes,
                const std::array<OptionalPort<Attributes>, kCount>& ports) {
  for (const auto& entry : ports) {
    if (const FrontendTensor tensor = node.input(entry.port)) (attributes.*entry.set)(tensor);
  }
}

template <typename Attributes, size_t kCount>
void set_outputs(NodeReader& node, Attributes& attributes,
                 const std::array<OptionalPort<Attributes>, kCount>& ports) {
  for (const auto& entry : ports) {
    if (const FrontendTensor tensor = node.made_output(entry.port)) (attributes.*entry.set)(tensor);
  }
}

// The tensors at ports that the operation cannot do without.
template <size_t kCount>
std::array<FrontendTensor, kCount> all_required(NodeReader& node,
                                                const std::array<const char*, kCount>& ports) {
  std::array<FrontendTensor, kCount> tensors;
  for (size_t i = 0; i < kCount; ++i) tensors[i] = node.required(ports[i]);
  return tensors;
}

// As all_required, of operands that are at no other port.
template <size_t kCount>
std::array<FrontendTensor, kCount> all_alone(NodeReader& node, const std::array<const char*, kCount>& ports) {
  std::array<FrontendTensor, kCount> tensors;
  for (size_t i = 0; i < kCount; ++i) tensors[i] = node.required_alone(ports[i]);
  return tensors;
}

// A bound that cuDNN holds as int.
inline int narrow(int64_t value, const char* name) {
  const int narrowed = static_cast<int>(value);
  if (narrowed != value) throw BackendNotSupported(std::string(name) + ": cuDNN holds it in 32 bits");
  return narrowed;
}

// What every variant spells alike, but for the names of the bounds.
template <typename Attributes>
void set_masks(NodeReader& node, Attributes& attributes) {
  attributes.set_name(node.name()).set_compute_data_type(node.compute_type());
  if (const auto scale = node.number("attn_scale")) attributes.set_attn_scale(static_cast<float>(*scale));
  attributes.set_padding_mask(node.flag("use_padding_mask"));

  const std::string alignment = node.text("diagonal_alignment");
  if (alignment == "BOTTOM_RIGHT") {
    attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT);
  } else if (!alignment.empty() && alignment != "TOP_LEFT") {
    throw BackendNotSupported("diagonal_alignment: the cuDNN backend has no " + alignment);
  }
  for (const char* name :
       {"sliding_window_length", "sliding_window", "diagonal_band_left_bound", "left_bound"}) {
    if (const auto bound = node.integer(name)) attributes.set_diagonal_band_left_bound(narrow(*bound, name));
  }
  for (const char* name : {"diagonal_band_right_bound", "right_bound"}) {
    if (const auto bound = node.integer(name)) attributes.set_diagonal_band_right_bound(narrow(*bound, name));
  }
  // Both also align the diagonal, so they come after diagonal_alignment.
  attributes.set_causal_mask(node.flag("use_causal_mask"));
  attributes.set_causal_mask_bottom_right(node.flag("use_causal_mask_bottom_right"));
}

// What forward variants and the backward that is not of float8 spell alike.
template <typename Attributes>
void set_common(NodeReader& node, Attributes& attributes) {
  set_masks(node, attributes);
  attributes.set_alibi_mask(node.flag("use_alibi_mask"));
  if (const auto total = node.integer("max_total_seq_len_q")) attributes.set_max_total_seq_len_q(*total);
  if (const auto total = node.integer("max_total_seq_len_kv")) attributes.set_max_total_seq_len_kv(*total);
}

// Everything of a forward variant but the operands that it cannot do without.
inline fe::graph::SDPA_attributes forward_attributes(NodeReader& node) {
  using Attributes = fe::graph::SDPA_attributes;
  static constexpr std::array<OptionalPort<Attributes>, 10> kInputs = {{
      {"attn_scale", &Attributes::set_attn_scale},
      {"bias", &Attributes::set_bias},
      {"block_mask", &Attributes::set_block_mask},
      {"seq_len_q", &Attributes::set_seq_len_q},
      {"seq_len_kv", &Attributes::set_seq_len_kv},
      {"cu_seq_len_q", &Attributes::set_cu_seq_len_q},
      {"cu_seq_len_kv", &Attributes::set_cu_seq_len_kv},
      {"paged_attention_k_table", &Attributes::set_paged_attention_k_table},
      {"paged_attention_v_table", &Attributes::set_paged_attention_v_table},
      {"sink_token", &Attributes::set_sink_token},
  }};
  static constexpr std::array<OptionalPort<Attributes>, 2> kOutputs = {{
      {"score_max", &Attributes::set_logit_max},
      {"score_sum_exp", &Attributes::set_score_sum_exp},
  }};
  static const std::map<std::string, fe::AttentionImplementation_t> kImplementations = {
      {"", fe::AttentionImplementation_t::AUTO},
      {"AUTO", fe::AttentionImplementation_t::AUTO},
      {"COMPOSITE", fe::AttentionImplementation_t::COMPOSITE},
      {"UNIFIED", fe::AttentionImplementation_t::UNIFIED},
  };

  Attributes attributes;
  set_common(node, attributes);
  set_inputs(node, attributes, kInputs);
  set_outputs(node, attributes, kOutputs);
  attributes.set_generate_stats(node.flag("generate_stats"));
  attributes.set_unfuse_fma(node.flag("unfuse_fma"));
  if (const auto longest = node.integer("paged_attention_max_seq_len_kv")) {
    attributes.set_paged_attention_max_seq_len_kv(narrow(*longest, "paged_attention_max_seq_len_kv"));
  }
  const auto implementation = kImplementations.find(node.text("implementation"));
  if (implementation == kImplementations.end()) {
    throw BackendNotSupported("implementation: the cuDNN backend has AUTO, COMPOSITE and UNIFIED");
  }
  attributes.set_implementation(implementation->second);
  return attributes;
}

inline void lower_attention(NodeReader& node, fe::graph::Graph& graph) {
  const fe::graph::SDPA_attributes attributes = forward_attributes(node);
  const auto [q, k, v] = all_alone<3>(node, {"q", "k", "v"});
  const auto [o, stats] = graph.sdpa(q, k, v, attributes);
  node.output("O", o);
  node.output("Stats", stats);
}

// What every backward takes and gives where it is asked to.
template <typename Attributes>
void set_backward_ports(NodeReader& node, Attributes& attributes) {
  static constexpr std::array<OptionalPort<Attributes>, 4> kInputs = {{
      {"attn_scale", &Attributes::set_attn_scale},
      {"seq_len_q", &Attributes::set_seq_len_q},
      {"seq_len_kv", &Attributes::set_seq_len_kv},
      {"sink_token", &Attributes::set_sink_token},
  }};
  static constexpr std::array<OptionalPort<Attributes>, 1> kOutputs = {{
      {"dSink_token", &Attributes::set_dsink_token},
  }};
  set_inputs(node, attributes, kInputs);
  set_outputs(node, attributes, kOutputs);
  attributes.set_deterministic_algorithm(node.flag("use_deterministic_algorithm"));
}

// The gradients of q, k and v, then largest magnitudes.
template <size_t kCount>
void set_gradients(NodeReader& node, const std::array<FrontendTensor, kCount>& made,
                   const std::array<const char*, kCount>& ports) {
  for (size_t i = 0; i < 3; ++i) node.output(ports[i], made[i]);
  for (size_t i = 3; i < kCount; ++i) node.told_output(ports[i], made[i]);
}

inline void lower_attention_backward(NodeReader& node, fe::graph::Graph& graph) {
  fe::graph::SDPA_backward_attributes attributes;
  set_common(node, attributes);
  set_backward_ports(node, attributes);
  if (const FrontendTensor bias = node.input("bias")) attributes.set_bias(bias);
  if (const FrontendTensor d_bias = node.made_output("dBias")) attributes.set_dbias(d_bias);

  const auto [q, k, v, o, d_o] = all_alone<5>(node, {"q", "k", "v", "o", "dO"});
  const auto made = graph.sdpa_backward(q, k, v, o, d_o, node.required("stats"), attributes);
  set_gradients<3>(node, made, {"dQ", "dK", "dV"});
}

}  // namespace cudnn_jax::lowering
