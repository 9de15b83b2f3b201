// The operands of one call in one form, whatever platform or caller they come from. Filled once, checked
// against the program before anything runs, and held on the caller's stack: two threads may run one program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/dtypes.h"
#include "ffi/error.h"
#include "ffi/program.h"
#include "program_spec.h"

namespace cudnn_jax {

// A buffer as the caller passes it.
struct Buffer {
  void* data = nullptr;
  int xla_dtype = 0;
  const int64_t* dims = nullptr;
  int64_t rank = 0;
};

class VariantPack {
 public:
  explicit VariantPack(const Program& program) : program_(program) {}

  // The caller passes all inputs, then all outputs, then the workspace when the program has one.
  void expect(int64_t inputs, int64_t outputs) const {
    const int64_t results = program_.outputs() + (program_.workspace() > 0);
    if (inputs != program_.inputs() || outputs != results) refuse_counts(inputs, outputs);
  }

  void put(int64_t index, const Buffer& buffer) {
    const OperandSpec& operand = program_.operands()[static_cast<size_t>(index)];
    bool fits =
        buffer.xla_dtype == operand.xla_dtype && buffer.rank == static_cast<int64_t>(operand.shape.size());
    for (int64_t i = 0; fits && i < buffer.rank; ++i)
      fits = buffer.dims[i] == operand.shape[static_cast<size_t>(i)];
    if (!fits) refuse(name_of(index), describe(operand), buffer);
    // XLA may give an empty buffer any address.
    if (operand.bytes > 0 && past_multiple(buffer.data, kOperandAlignment) != 0) {
      refuse_address(name_of(index), buffer.data, kOperandAlignment);
    }
    pointers_[static_cast<size_t>(index)] = buffer.data;
  }

  void put_workspace(const Buffer& buffer) {
    const bool fits =
        buffer.xla_dtype == kUint8 && buffer.rank == 1 && buffer.dims[0] == program_.workspace();
    if (!fits) refuse("workspace", "uint8[" + std::to_string(program_.workspace()) + "]", buffer);
    // XLA aligns results to 256 bytes on CUDA and to 64 on the CPU, where host steps ask for no more than 16.
    const int alignment = program_.platform() == Platform::kCuda ? kWorkspaceAlignment : kOperandAlignment;
    if (past_multiple(buffer.data, alignment) != 0) refuse_address("workspace", buffer.data, alignment);
    workspace_ = static_cast<std::byte*>(buffer.data);
  }

  Call call(void* stream, int device) const {
    return {stream, device, pointers_.data(), program_.nbytes(), workspace_};
  }

 private:
  static inline const int kUint8 = xla_dtype_of("uint8");

  std::string name_of(int64_t index) const {
    const int64_t inputs = program_.inputs();
    return index < inputs ? "input " + std::to_string(index) : "output " + std::to_string(index - inputs);
  }

  static std::string describe(const std::string& dtype, const int64_t* dims, size_t rank) {
    std::string text = dtype + "[";
    for (size_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ",") + std::to_string(dims[i]);
    return text + "]";
  }
  static std::string describe(const OperandSpec& operand) {
    return describe(operand.dtype, operand.shape.data(), operand.shape.size());
  }

  [[noreturn]] static void refuse(const std::string& name, const std::string& expected,
                                  const Buffer& buffer) {
    throw Error(ErrorKind::kInvalidArgument,
                name + ": the program has " + expected + ", the call passes " +
                    describe(dtype_name_of(buffer.xla_dtype), buffer.dims, static_cast<size_t>(buffer.rank)));
  }

  static uintptr_t past_multiple(const void* address, int alignment) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment);
  }

  [[noreturn]] static void refuse_address(const std::string& name, const void* address, int alignment) {
    throw Error(ErrorKind::kInvalidArgument, name + ": its address is " +
                                                 std::to_string(past_multiple(address, alignment)) +
                                                 " bytes past a multiple of " + std::to_string(alignment) +
                                                 ", the rule is a multiple of " + std::to_string(alignment));
  }

  [[noreturn]] void refuse_counts(int64_t inputs, int64_t outputs) const {
    throw Error(ErrorKind::kInvalidArgument,
                "operands: the program has " + std::to_string(program_.inputs()) + " inputs and " +
                    std::to_string(program_.outputs()) + " outputs" +
                    (program_.workspace() > 0 ? " and a workspace" : "") + ", the call passes " +
                    std::to_string(inputs) + " inputs and " + std::to_string(outputs) + " results");
  }

  const Program& program_;
  std::byte* workspace_ = nullptr;
  std::array<void*, kMaxOperands> pointers_;  // only the program's operands are written
};

}  // namespace cudnn_jax
