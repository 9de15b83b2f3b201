#include "ffi/eager_operands.h"

#include <nanobind/stl/string.h>

#include <utility>

#include "ffi/dtypes.h"
#include "ffi/eager_layout.h"
#include "ffi/error.h"

namespace nb = nanobind;

namespace cudnn_jax {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorKind::kInvalidArgument, what); }

bool same_dims(const std::vector<int64_t>& wanted, const BufferView& view) {
  if (view.rank != static_cast<int64_t>(wanted.size())) return false;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (view.shape[i] != wanted[i]) return false;
  }
  return true;
}

// An axis of length 1 is never stepped along, and an empty buffer has no elements to step between.
bool same_strides(const GraphOperand& operand, const BufferView& view) {
  if (operand.extent == 0) return true;
  int64_t dense = 1;
  for (size_t i = operand.shape.size(); i-- > 0;) {
    const int64_t stride = view.strides == nullptr ? dense : view.strides[i];
    if (operand.shape[i] != 1 && stride != operand.strides[i]) return false;
    dense *= operand.shape[i];
  }
  return true;
}

std::vector<int64_t> strides_of(const BufferView& view) {
  if (view.strides != nullptr) return {view.strides, view.strides + view.rank};
  std::vector<int64_t> strides(static_cast<size_t>(view.rank), 1);
  for (size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * view.shape[i];
  return strides;
}

std::string describe_strides(const BufferView& view) {
  const std::vector<int64_t> strides = strides_of(view);
  return describe_dims(strides.data(), view.rank);
}

int64_t extent_of(const GraphOperand& operand) {
  int64_t last = 0;
  for (size_t i = 0; i < operand.shape.size(); ++i) {
    if (operand.shape[i] == 0) return 0;
    last += (operand.shape[i] - 1) * operand.strides[i];
  }
  return ((last + 1) * dlpack_dtype_of(operand.xla_dtype).bits + 7) / 8;
}

bool ranges_meet(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a);
  const auto second = reinterpret_cast<uintptr_t>(b);
  return first < second + static_cast<uintptr_t>(b_bytes) && second < first + static_cast<uintptr_t>(a_bytes);
}

// Whether two buffers share memory. Where their ranges meet, such as those of the halves of one array, it is
// found out exactly for elements of one size that lie on one grid.
bool overlap(const GraphOperand& a, const void* a_data, const GraphOperand& b, const void* b_data) {
  if (!ranges_meet(a_data, a.extent, b_data, b.extent)) return false;
  const int64_t bits = dlpack_dtype_of(a.xla_dtype).bits;
  if (dlpack_dtype_of(b.xla_dtype).bits != bits) return true;
  // Multiples of 16 bytes apart, and so of an element.
  const int64_t apart = static_cast<const char*>(b_data) - static_cast<const char*>(a_data);
  return layout::meet(a.shape, a.strides, b.shape, b.strides, 8 * apart / bits);
}

}  // namespace

GraphOperand GraphOperand::as_given(const BufferView& view) const {
  GraphOperand given = *this;
  if (view.address) return given;
  given.strides = strides_of(view);
  given.extent = extent_of(given);
  if (output && given.extent > 0 && layout::folds(shape, given.strides)) {
    refuse(label + ": an output, and two elements of the buffer of stride " + describe_strides(view) +
           " lie on one address");
  }
  return given;
}

void GraphOperand::check(const BufferView& view, const Place& place, bool any_strides) const {
  if (!view.address) {
    if (!place.takes(view.device)) {
      refuse(label + ": the graph runs on " + place.describe() + ", the buffer is on " +
             describe(view.device));
    }
    if (view.xla_dtype != xla_dtype) {
      refuse(label + ": the graph has " + dtype_name_of(xla_dtype) + ", the buffer is " +
             dtype_name_of(view.xla_dtype));
    }
    const auto rank = static_cast<int64_t>(shape.size());
    if (!same_dims(shape, view)) {
      refuse(label + ": the graph has dim " + describe_dims(shape.data(), rank) + ", the buffer has " +
             describe_dims(view.shape, view.rank));
    }
    if (!any_strides && !same_strides(*this, view)) {
      refuse(label + ": the graph has stride " + describe_dims(strides.data(), rank) + ", the buffer has " +
             describe_strides(view));
    }
    for (int64_t i = 0; any_strides && view.strides != nullptr && i < view.rank; ++i) {
      if (view.strides[i] < 0 && view.shape[i] > 1) {
        refuse(label + ": the buffer has stride " + describe_strides(view) + ", the rule is 0 or more");
      }
    }
    if (output && view.immutable) {
      refuse(label +
             ": an output, and the buffer is a jax.Array, which is immutable; the rule is a buffer that may "
             "be written, such as numpy's or torch's");
    }
    if (output && view.read_only) refuse(label + ": an output, and the buffer is read-only");
  }
  if (extent == 0) return;
  if (view.data == nullptr) refuse(label + ": the buffer's address is 0");
  const uintptr_t past = reinterpret_cast<uintptr_t>(view.data) % kOperandAlignment;
  if (past != 0) {
    refuse(label + ": the buffer's address is " + std::to_string(past) + " bytes past a multiple of " +
           std::to_string(kOperandAlignment) + ", the rule is a multiple of " +
           std::to_string(kOperandAlignment));
  }
}

void GraphOperands::add(const void* tensor, GraphOperand operand) {
  if (operands_.size() == kMaxOperands) {
    refuse("the graph has more than " + std::to_string(kMaxOperands) +
           " inputs and outputs, the rule is at most that");
  }
  operand.extent = extent_of(operand);
  if (operand.output && operand.extent > 0 && layout::folds(operand.shape, operand.strides)) {
    const auto rank = static_cast<int64_t>(operand.shape.size());
    refuse(operand.label + ": an output with dim " + describe_dims(operand.shape.data(), rank) +
           " and stride " + describe_dims(operand.strides.data(), rank) +
           ", the rule is that no two elements lie on one address");
  }
  expected_ |= uint64_t{1} << operands_.size();
  operands_.push_back(std::move(operand));
  tensors_.push_back(tensor);
}

void GraphOperands::write_over(size_t output, size_t input) {
  if (output >= operands_.size() || input >= operands_.size() || !operands_[output].output ||
      operands_[input].output) {
    refuse("write_over: the rule is an output and an input");
  }
  operands_[output].over = static_cast<int64_t>(input);
}

nb::object GraphOperands::as_dict(nb::handle buffers) {
  if (PyDict_Check(buffers.ptr())) return nb::borrow(buffers);
  PyObject* made =
      PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(&PyDict_Type), buffers.ptr(), nullptr);
  if (made != nullptr) return nb::steal(made);
  PyErr_Clear();
  const std::string what = "buffers: got " + nb::cast<std::string>(nb::repr(buffers)) +
                           ", the rule is a dictionary from tensors or uids to buffers";
  throw nb::type_error(what.c_str());
}

size_t GraphOperands::slot_of(PyObject* key) const {
  for (size_t slot = 0; slot < tensors_.size(); ++slot) {
    if (tensors_[slot] == key) return slot;
  }
  if (PyIndex_Check(key) && !PyBool_Check(key)) {
    const nb::object number = nb::steal(PyNumber_Index(key));
    const long long uid = number.is_valid() ? PyLong_AsLongLong(number.ptr()) : -1;
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    for (size_t slot = 0; slot < operands_.size(); ++slot) {
      if (operands_[slot].uid == uid) return slot;
    }
  }
  refuse_key(key);
}

void GraphOperands::refuse_key(PyObject* key) const {
  std::string known;
  for (const GraphOperand& operand : operands_) known += (known.empty() ? "" : ", ") + operand.label;
  refuse("buffers: " + nb::cast<std::string>(nb::repr(nb::handle(key))) +
         " is no input or output of the graph; those are " + known);
}

void GraphOperands::refuse_twice(size_t slot) const {
  refuse(operands_[slot].label + ": given twice, by the tensor and by its uid");
}

void GraphOperands::refuse_missing(uint64_t seen) const {
  std::string missing;
  for (size_t slot = 0; slot < operands_.size(); ++slot) {
    if ((seen >> slot & 1) != 0) continue;
    missing += (missing.empty() ? "" : ", ") + operands_[slot].label +
               (operands_[slot].output ? " (output)" : " (input)");
  }
  refuse("buffers: none for " + missing);
}

void GraphOperands::check_overlaps(const std::vector<GraphOperand>& operands, void* const* pointers) {
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!operands[i].output) continue;
    for (size_t j = 0; j < operands.size(); ++j) {
      if (operands[i].over == static_cast<int64_t>(j)) {
        if (pointers[i] == pointers[j]) continue;
        refuse(operands[i].label + ": it is " + operands[j].label +
               ", written over; the rule is one buffer for both");
      }
      const bool once = !operands[j].output || j < i;
      if (i != j && once && overlap(operands[i], pointers[i], operands[j], pointers[j])) {
        refuse(operands[i].label + ": an output, and its buffer overlaps that of " + operands[j].label);
      }
    }
  }
}

void GraphOperands::check_apart(const void* data, int64_t bytes, const char* label,
                                void* const* pointers) const {
  for (size_t i = 0; i < operands_.size(); ++i) {
    if (ranges_meet(data, bytes, pointers[i], operands_[i].extent)) {
      refuse(std::string(label) + ": it overlaps the buffer of " + operands_[i].label);
    }
  }
}

}  // namespace cudnn_jax
