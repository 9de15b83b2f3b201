// DeviceView: memory that Python code vouches for, as a buffer and as a DLPack producer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/buffer_view.h"

namespace cudnn_jax {

class DeviceView {
 public:
  DeviceView(uintptr_t address, std::vector<int64_t> shape, int xla_dtype,
             std::optional<std::vector<int64_t>> strides, std::optional<int> device, bool read_only,
             nanobind::object owner);

  uintptr_t address() const { return address_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  int xla_dtype() const { return xla_dtype_; }
  dlpack::Device device() const { return device_; }
  bool read_only() const { return read_only_; }
  const nanobind::object& owner() const { return owner_; }
  nanobind::object& owner() { return owner_; }

  void read(BufferView& view) const;
  dlpack::Tensor tensor() const;

 private:
  const uintptr_t address_;
  const std::vector<int64_t> shape_;
  const std::vector<int64_t> strides_;
  const int xla_dtype_;
  const dlpack::Device device_;
  const bool read_only_;
  nanobind::object owner_;  // whatever keeps the memory alive
};

void bind_device_view(nanobind::module_& module);

}  // namespace cudnn_jax
