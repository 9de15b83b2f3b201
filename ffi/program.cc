#include "ffi/program.h"

#include <algorithm>
#include <utility>

#include "ffi/counters.h"
#include "ffi/driver.h"
#include "ffi/dtypes.h"
#include "ffi/error.h"
#include "ffi/shared.h"
#include "ffi/spec.h"
#include "ffi/steps/table.h"

namespace cudnn_jax {
namespace {

const char* platform_name(Platform platform) { return platform == Platform::kCuda ? "cuda" : "cpu"; }

struct Envelope {
  Digest digest;
  Json::binary_t payload;
};

// An unsigned value above the signed range compares as negative to a signed one.
bool is_newer(const Json& version) {
  if (version.is_number_unsigned()) return version.get<uint64_t>() > static_cast<uint64_t>(spec().version());
  return version.is_number_integer() && version.get<int64_t>() > spec().version();
}

// Everything around the payload, and its hash: what follows is what the builder wrote.
Envelope open_envelope(const uint8_t* data, size_t size) {
  const auto limit = static_cast<size_t>(spec().limit("artifact_bytes"));
  if (size > limit) {
    throw Error(ErrorKind::kInvalidArgument,
                "artifact: " + std::to_string(size) + " bytes, the rule is at most " + std::to_string(limit));
  }
  Json outer = parse_msgpack(data, size, "artifact");
  // Magic and version come before the fields: another version may have other fields.
  const auto magic = outer.is_object() ? outer.find("magic") : outer.end();
  if (!outer.is_object() || magic == outer.end() || *magic != spec().magic()) {
    throw Error(ErrorKind::kInvalidArgument, "artifact.magic: not a cudnn_jax program");
  }
  const auto version = outer.find("version");
  if (version != outer.end() && is_newer(*version)) {
    throw Error(ErrorKind::kInvalidArgument,
                "artifact.version: " + show(*version) + ", this build reads version " +
                    std::to_string(spec().version()) + "; a newer cudnn_jax made it");
  }
  spec().check_record(outer, "artifact", "artifact");

  Envelope envelope{{}, std::move(outer.at("payload").get_binary())};
  envelope.digest = sha256(envelope.payload.data(), envelope.payload.size());
  const Json::binary_t& stated = outer.at("sha256").get_binary();
  if (!std::equal(stated.begin(), stated.end(), envelope.digest.begin(), envelope.digest.end())) {
    throw Error(ErrorKind::kInvalidArgument,
                "artifact.sha256: does not match the payload, the artifact is damaged");
  }
  return envelope;
}

Json open_payload(const Envelope& envelope) {
  Json payload = parse_msgpack(envelope.payload.data(), envelope.payload.size(), "payload");
  spec().check_record(payload, "payload", "payload");
  return payload;
}

OperandSpec make_operand(const Json& value, const std::string& field) {
  OperandSpec operand;
  operand.dtype = value.at("dtype").get<std::string>();
  operand.xla_dtype = xla_dtype_of(operand.dtype);
  if (operand.xla_dtype < 0) {
    throw Error(ErrorKind::kUnimplemented, field + ".dtype: XLA's FFI has no \"" + operand.dtype + "\"");
  }
  operand.shape = value.at("shape").get<std::vector<int64_t>>();
  int64_t bits = spec().dtype_bits(operand.dtype);
  bool overflow = false;
  for (int64_t dim : operand.shape) overflow = __builtin_mul_overflow(bits, dim, &bits) || overflow;
  operand.bytes = bits / 8 + (bits % 8 != 0);
  const int64_t limit = spec().limit("buffer_bytes");
  // A zero dimension makes any shape empty, also one whose other dimensions overflow.
  const bool empty = std::find(operand.shape.begin(), operand.shape.end(), 0) != operand.shape.end();
  if (empty) operand.bytes = 0;
  if (!empty && (overflow || operand.bytes > limit)) {
    throw Error(ErrorKind::kInvalidArgument,
                field + ".shape: the buffer is over the limit of " + std::to_string(limit) + " bytes");
  }
  return operand;
}

std::optional<int64_t> optional_integer(const Json& value) {
  return value.is_null() ? std::nullopt : std::optional<int64_t>(value.get<int64_t>());
}

std::string step_field(size_t index) { return "payload.steps[" + std::to_string(index) + "]"; }

uint64_t device_bit(int device) { return uint64_t{1} << (device == kNoDevice ? 0 : device); }

}  // namespace

Program::Program(const Digest& digest, const Json& payload) : digest_(digest) {
  const Json& needs = payload.at("requires");
  platform_ = needs.at("platform") == "cuda" ? Platform::kCuda : Platform::kCpu;
  arch_ = optional_integer(needs.at("arch"));
  cudnn_ = optional_integer(needs.at("cudnn"));
  if (!needs.at("cutedsl").is_null()) cutedsl_ = needs.at("cutedsl").get<std::string>();
  workspace_ = payload.at("workspace").get<int64_t>();

  inputs_ = static_cast<int64_t>(payload.at("inputs").size());
  for (const char* side : {"inputs", "outputs"}) {
    const Json& list = payload.at(side);
    for (size_t i = 0; i < list.size(); ++i) {
      operands_.push_back(
          make_operand(list[i], "payload." + std::string(side) + "[" + std::to_string(i) + "]"));
      nbytes_.push_back(operands_.back().bytes);
    }
  }
  if (static_cast<int64_t>(operands_.size()) > spec().limit("operands")) {
    throw Error(ErrorKind::kInvalidArgument, "payload.outputs: inputs and outputs together are " +
                                                 std::to_string(operands_.size()) + ", the rule is at most " +
                                                 std::to_string(spec().limit("operands")));
  }

  ProgramContext context;
  context.platform = platform_;
  context.requirements = &needs;
  context.operands = &operands_;
  context.inputs = inputs_;
  context.workspace = workspace_;
  const Json& steps = payload.at("steps");
  for (size_t i = 0; i < steps.size(); ++i) {
    context.field = step_field(i);
    spec().check_step(steps[i], context);
    kinds_.push_back(steps[i].at("kind").get<std::string>());
    steps_.push_back(step_factory(kinds_.back(), context.field)(steps[i], context));
  }
  add(counters().programs_created);
}

Program::~Program() { add(counters().programs_destroyed); }

std::shared_ptr<const Program> Program::parse(const uint8_t* data, size_t size) {
  const Envelope envelope = open_envelope(data, size);
  return std::make_shared<Program>(envelope.digest, open_payload(envelope));
}

std::shared_ptr<Program> Program::share(const uint8_t* data, size_t size, Platform platform) {
  const Envelope envelope = open_envelope(data, size);
  static auto& programs = *new SharedByContent<Program>;
  std::shared_ptr<Program> program = programs.find_or_make(
      envelope.digest, [&] { return new Program(envelope.digest, open_payload(envelope)); });
  if (program->platform() != platform) {
    throw Error(ErrorKind::kFailedPrecondition,
                std::string("payload.requires.platform: the program is for ") +
                    platform_name(program->platform()) + ", this call runs on " + platform_name(platform));
  }
  return program;
}

template <typename Body>
void Program::each_step(Body&& body) const {
  size_t at = 0;
  try {
    for (; at < steps_.size(); ++at) body(*steps_[at]);
  } catch (const CallError& error) {
    const std::string name = steps_[at]->name();
    throw CallError(step_field(at) + ": " + kinds_[at] + (name.empty() ? "" : " " + name) + ": " +
                    error.what());
  }
}

bool Program::loaded(int device) const {
  return (loaded_.load(std::memory_order_acquire) & device_bit(device)) != 0;
}

void Program::load(int device) {
  if (device != kNoDevice && (device < 0 || device >= kMaxDevices)) {
    throw Error(ErrorKind::kInvalidArgument, "device ordinal " + std::to_string(device) +
                                                 ": the rule is 0 <= ordinal < " +
                                                 std::to_string(kMaxDevices));
  }
  if (loaded(device)) return;
  std::lock_guard<std::mutex> lock(load_mutex_);
  if (loaded(device)) return;
  if (platform_ == Platform::kCuda && arch_.has_value()) {
    const int64_t present = driver().arch(device);
    if (present != *arch_) {
      throw Error(ErrorKind::kFailedPrecondition,
                  "payload.requires.arch: the program is for sm_" + std::to_string(*arch_) + ", device " +
                      std::to_string(device) + " is sm_" + std::to_string(present));
    }
  }
  each_step([device](Step& step) { step.load(device); });
  loaded_.fetch_or(device_bit(device), std::memory_order_release);
  add(counters().loads);
}

void Program::run(const Call& call) const {
  each_step([&call](const Step& step) { step.run(call); });
}

}  // namespace cudnn_jax
