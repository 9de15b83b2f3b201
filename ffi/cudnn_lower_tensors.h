// Lowering, part one: types and tensors. Included by cudnn_frontend_unit.cc only.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cudnn_frontend.h"
#include "ffi/cudnn_backend.h"
#include "ffi/cudnn_graph_text.h"

namespace cudnn_jax::lowering {

namespace fe = cudnn_frontend;
using FrontendTensor = std::shared_ptr<fe::graph::Tensor_attributes>;

inline fe::DataType_t data_type(const std::string& name) {
  static const std::map<std::string, fe::DataType_t> kTypes = {
      {"", fe::DataType_t::NOT_SET},
      {"float32", fe::DataType_t::FLOAT},
      {"float16", fe::DataType_t::HALF},
      {"bfloat16", fe::DataType_t::BFLOAT16},
      {"float64", fe::DataType_t::DOUBLE},
      {"int8", fe::DataType_t::INT8},
      {"uint8", fe::DataType_t::UINT8},
      {"int32", fe::DataType_t::INT32},
      {"int64", fe::DataType_t::INT64},
      {"bool", fe::DataType_t::BOOLEAN},
      {"float8_e4m3fn", fe::DataType_t::FP8_E4M3},
      {"float8_e5m2", fe::DataType_t::FP8_E5M2},
      {"float8_e8m0fnu", fe::DataType_t::FP8_E8M0},
      {"float4_e2m1fn", fe::DataType_t::FP4_E2M1},
  };
  const auto found = kTypes.find(name);
  if (found == kTypes.end()) throw BackendNotSupported("data type " + name + ": cuDNN has none of that name");
  return found->second;
}

// cuDNN's BOOLEAN is one bit an element. A caller's boolean is a byte, 0 or 1, and goes in as a number.
inline fe::DataType_t buffer_type(const GraphTensor& tensor) {
  if (tensor.data_type == "bool" && !tensor.is_virtual) return fe::DataType_t::UINT8;
  return data_type(tensor.data_type);
}

inline fe::graph::Tensor_attributes scalar(double value, fe::DataType_t type) {
  using Attributes = fe::graph::Tensor_attributes;
  switch (type) {
    case fe::DataType_t::FLOAT: return Attributes(static_cast<float>(value));
    case fe::DataType_t::DOUBLE: return Attributes(value);
    case fe::DataType_t::HALF: return Attributes(__float2half(static_cast<float>(value)));
    case fe::DataType_t::BFLOAT16: return Attributes(__float2bfloat16(static_cast<float>(value)));
    case fe::DataType_t::INT32: return Attributes(static_cast<int32_t>(value));
    case fe::DataType_t::INT64: return Attributes(static_cast<int64_t>(value));
    default: throw BackendNotSupported("a scalar by value: cuDNN takes float, half, int32 and int64 types");
  }
}

// The graph's tensors on cuDNN's side, by canonical index. A tensor that a node makes is empty until then.
class Tensors {
 public:
  Tensors(const GraphText& text, fe::graph::Graph& graph)
      : text_(text), graph_(graph), made_(text.tensors.size()), uses_(text.tensors.size()) {
    for (const GraphNode& node : text.nodes) {
      for (const auto& port : node.inputs) ++uses_[port.second];
    }
  }

  bool is_shared(size_t index) const { return uses_[index] > 1; }

  // An input of a node.
  FrontendTensor get(size_t index) {
    if (made_[index] == nullptr) made_[index] = make(index);
    return made_[index];
  }

  // A node's result: takes the canonical uid, type and layout. Between nodes cuDNN infers a layout that the
  // user left open, unless the graph has to tell it; a buffer has the layout that the graph tells.
  void settle(size_t index, const FrontendTensor& tensor, bool is_told) {
    const GraphTensor& wanted = text_.tensors[index];
    tensor->set_uid(uid_of(index)).set_name(name(index)).set_data_type(buffer_type(wanted));
    tensor->set_is_virtual(wanted.is_virtual);
    is_told = is_told || !wanted.is_virtual;
    if (wanted.dim_is_user || is_told) tensor->set_dim(wanted.dim);
    if (wanted.stride_is_user || is_told) tensor->set_stride(wanted.stride);
    if (wanted.ragged_offset) tensor->set_ragged_offset(get(*wanted.ragged_offset));
    made_[index] = tensor;
  }

  // A buffer that one port alone sees may be told under other dims of the same bytes.
  bool is_input_of_one(size_t index) const {
    return uses_[index] == 1 && made_[index] == nullptr && !text_.tensors[index].is_virtual;
  }
  bool is_output_alone(size_t index) const { return uses_[index] == 0 && !text_.tensors[index].is_virtual; }
  FrontendTensor get_as(size_t index, const TensorLayout& layout) {
    get(index)->set_dim(layout.dim).set_stride(layout.stride);
    return made_[index];
  }
  void settle_as(size_t index, const FrontendTensor& tensor, const TensorLayout& layout) {
    settle(index, tensor, true);
    tensor->set_dim(layout.dim).set_stride(layout.stride);
  }

  const GraphTensor& told(size_t index) const { return text_.tensors[index]; }

  // Of every tensor that was made, once the frontend has inferred what the lowering left open.
  std::map<int64_t, TensorLayout> layouts() const {
    std::map<int64_t, TensorLayout> told;
    for (const FrontendTensor& tensor : made_) {
      if (tensor != nullptr) told[tensor->get_uid()] = {tensor->get_dim(), tensor->get_stride()};
    }
    return told;
  }

 private:
  static std::string name(size_t index) { return "tensor " + std::to_string(index); }

  FrontendTensor make(size_t index) {
    const GraphTensor& wanted = text_.tensors[index];
    fe::graph::Tensor_attributes attributes;
    if (wanted.value) {
      attributes = scalar(*wanted.value, data_type(wanted.data_type));
    } else {
      attributes.set_data_type(buffer_type(wanted)).set_is_virtual(wanted.is_virtual);
    }
    attributes.set_dim(wanted.dim).set_stride(wanted.stride).set_uid(uid_of(index)).set_name(name(index));
    if (wanted.ragged_offset) attributes.set_ragged_offset(get(*wanted.ragged_offset));
    return graph_.tensor(attributes);
  }

  const GraphText& text_;
  fe::graph::Graph& graph_;
  std::vector<FrontendTensor> made_;
  std::vector<int> uses_;  // input ports that take the tensor
};

}  // namespace cudnn_jax::lowering
