// A program: the parsed, checked form of an artifact, and its steps. Immutable after parsing apart from what
// is loaded per device. Programs are shared by content hash, so one artifact is parsed and loaded once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ffi/per_device.h"
#include "ffi/sha256.h"
#include "ffi/step.h"

namespace cudnn_jax {

class Program {
 public:
  // Parses and checks everything, always afresh. Throws Error naming the field.
  static std::shared_ptr<const Program> parse(const uint8_t* data, size_t size);
  // The same for the platform that runs it, shared with every live program of the same content.
  static std::shared_ptr<Program> share(const uint8_t* data, size_t size, Platform platform);

  Program(const Digest& digest, const Json& payload);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  Platform platform() const { return platform_; }
  const std::optional<int64_t>& arch() const { return arch_; }
  const std::optional<int64_t>& cudnn() const { return cudnn_; }
  const std::optional<std::string>& cutedsl() const { return cutedsl_; }
  const std::vector<OperandSpec>& operands() const { return operands_; }
  const int64_t* nbytes() const { return nbytes_.data(); }
  int64_t inputs() const { return inputs_; }
  int64_t outputs() const { return static_cast<int64_t>(operands_.size()) - inputs_; }
  int64_t workspace() const { return workspace_; }
  const std::vector<std::string>& kinds() const { return kinds_; }
  const Digest& digest() const { return digest_; }

  // True after load(device). No lock.
  bool loaded(int device) const;
  // Idempotent. Called with the device's context bound.
  void load(int device);
  void run(const Call& call) const;

 private:
  // Adds the step to what a CallError says.
  template <typename Body>
  void each_step(Body&& body) const;

  const Digest digest_;
  Platform platform_ = Platform::kCpu;
  std::optional<int64_t> arch_;
  std::optional<int64_t> cudnn_;
  std::optional<std::string> cutedsl_;
  std::vector<OperandSpec> operands_;
  std::vector<int64_t> nbytes_;
  int64_t inputs_ = 0;
  int64_t workspace_ = 0;
  std::vector<std::string> kinds_;
  std::vector<std::unique_ptr<Step>> steps_;

  std::mutex load_mutex_;
  std::atomic<uint64_t> loaded_{0};  // a bit per device; the CPU platform uses bit 0
  static_assert(kMaxDevices <= 64, "one bit per device");
};

}  // namespace cudnn_jax
