// A step: one thing a program does, in order, on the caller's stream. A new kind is one file with a factory,
// one line in steps/table and one entry in program_spec.json.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/error.h"
#include "ffi/json.h"

namespace cudnn_jax {

class UserHandle;

enum class Platform { kCpu, kCuda };

// The ordinal that stands for "no device" on the CPU platform.
inline constexpr int kNoDevice = -1;

// One buffer of the program as XLA passes it: row-major, shape in elements.
struct OperandSpec {
  std::string dtype;  // numpy name
  int xla_dtype = 0;  // XLA_FFI_DataType
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// A number of its dtype, at an address that lives as long as its step.
struct Immediate {
  alignas(8) std::array<std::byte, 8> bytes{};
  size_t size = 0;
};

// Where a step finds one of its arguments.
struct Arg {
  enum class Kind { kOperand, kWorkspace, kImmediate };
  Kind kind = Kind::kOperand;
  int64_t index = 0;    // kOperand: inputs, then outputs. kWorkspace: byte offset
  Immediate immediate;  // kImmediate
};

// One execution. All pointers live on the caller's stack; a step keeps none of them.
struct Call {
  void* stream = nullptr;  // CUstream; null on the CPU platform
  int device = kNoDevice;
  void* const* operands = nullptr;  // inputs, then outputs
  const int64_t* nbytes = nullptr;  // of each operand
  std::byte* workspace = nullptr;   // null when the program has none
  UserHandle* handle = nullptr;     // the caller's own cuDNN handle; null for one of the pool

  // A buffer's address, or that of an immediate's value, which is read only.
  void* pointer(const Arg& arg) const {
    switch (arg.kind) {
      case Arg::Kind::kOperand: return operands[arg.index];
      case Arg::Kind::kWorkspace: return workspace + arg.index;
      case Arg::Kind::kImmediate: return const_cast<std::byte*>(arg.immediate.bytes.data());
    }
    return nullptr;
  }
};

// What a factory may know of the program around its step. Valid during the factory call only.
struct ProgramContext {
  Platform platform = Platform::kCpu;
  const Json* requirements = nullptr;                  // payload.requires
  const std::vector<OperandSpec>* operands = nullptr;  // inputs, then outputs
  int64_t inputs = 0;
  int64_t workspace = 0;  // bytes
  std::string field;      // path of this step for messages: "payload.steps[2]"

  // Both expect what the spec already checked (an ARG, a list of ARGs) and keep indices in range.
  Arg arg(const Json& value) const;
  std::vector<Arg> args(const Json& list) const;
};

class Step {
 public:
  virtual ~Step() = default;
  // What it runs, for messages: a kernel's or a function's name.
  virtual std::string name() const { return {}; }
  // Makes everything run() needs on `device`. Called with the device's context bound, never during a graph
  // capture, under the program's lock (one load of one program at a time); a second call for the same device
  // changes nothing. May throw: an Error names the step's field itself, a CallError is given it by the
  // program.
  virtual void load(int device) = 0;
  // Launches on call.stream. load(call.device) has returned before. Several threads may be in run() at once:
  // no state is written, no lock taken and nothing allocated. May throw, as load does.
  virtual void run(const Call& call) const = 0;
};

// Factories get the step's map after program_spec.json checked its fields, types and limits.
using StepFactory = std::unique_ptr<Step> (*)(const Json& step, ProgramContext& context);

}  // namespace cudnn_jax
