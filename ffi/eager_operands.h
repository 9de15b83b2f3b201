// The operands of a graph as graph.execute sees them: which key of the caller's dictionary is which, and what
// a buffer has to be.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/buffer_view.h"
#include "ffi/eager_readers.h"

namespace cudnn_jax {

struct GraphOperand {
  std::string label;  // "tensor 'q' (uid 1)"
  int64_t uid = 0;
  int xla_dtype = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  bool output = false;
  int64_t extent = 0;  // bytes from the first to behind the last element
  int64_t over = -1;   // of an output: the slot of the input whose buffer it is, written over

  // Throws Error naming what the graph has and what came. Strides are the caller's to choose if
  // `any_strides`.
  void check(const BufferView& view, const Place& place, bool any_strides) const;
  // The operand with the buffer's own strides, in place of those that the graph tells.
  GraphOperand as_given(const BufferView& view) const;
};

// The buffers of one call by slot: inputs, then outputs, in the graph's order.
struct OperandPointers {
  std::array<void*, kMaxOperands> pointers;  // those of the graph's operands are written
};

class GraphOperands {
 public:
  // Buffers have the strides of the graph's tensors, or, where what runs reads each buffer's own, any.
  explicit GraphOperands(bool any_strides) : any_strides_(any_strides) {}

  bool any_strides() const { return any_strides_; }

  // Tensors are told by identity, and no reference is kept: the graph, which owns the tensors, owns this too.
  void add(const void* tensor, GraphOperand operand);

  void write_over(size_t output, size_t input);

  const std::vector<GraphOperand>& all() const { return operands_; }

  // Calls use(slot, view) for each buffer of the dictionary, once it is found right; then sees to it that
  // none is missing and that no output lies on another buffer.
  template <typename Use>
  void read(nanobind::handle buffers, const Place& place, BufferReader& reader, Use&& use) const {
    const nanobind::object kept = as_dict(buffers);
    std::array<void*, kMaxOperands> pointers;
    std::vector<GraphOperand> given;
    if (any_strides_) given = operands_;
    BufferView view;
    uint64_t seen = 0;
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(kept.ptr(), &position, &key, &value) != 0) {
      // What a producer does meanwhile may change the dictionary.
      const nanobind::object key_kept = nanobind::borrow(key);
      const nanobind::object value_kept = nanobind::borrow(value);
      const size_t slot = slot_of(key);
      if ((seen >> slot & 1) != 0) refuse_twice(slot);
      seen |= uint64_t{1} << slot;
      reader.read(value, operands_[slot].label, view);
      operands_[slot].check(view, place, any_strides_);
      if (any_strides_) given[slot] = operands_[slot].as_given(view);
      pointers[slot] = view.data;
      use(slot, view);
    }
    if (seen != expected_) refuse_missing(seen);
    check_overlaps(any_strides_ ? given : operands_, pointers.data());
  }

  // Of a buffer that no operand may lie on.
  void check_apart(const void* data, int64_t bytes, const char* label, void* const* pointers) const;

 private:
  static nanobind::object as_dict(nanobind::handle buffers);
  size_t slot_of(PyObject* key) const;
  [[noreturn]] void refuse_key(PyObject* key) const;
  [[noreturn]] void refuse_twice(size_t slot) const;
  [[noreturn]] void refuse_missing(uint64_t seen) const;
  static void check_overlaps(const std::vector<GraphOperand>& operands, void* const* pointers);

  std::vector<GraphOperand> operands_;
  std::vector<const void*> tensors_;  // by slot
  uint64_t expected_ = 0;             // a bit per slot
  bool any_strides_ = false;
  static_assert(kMaxOperands <= 64, "one bit per operand");
};

}  // namespace cudnn_jax
