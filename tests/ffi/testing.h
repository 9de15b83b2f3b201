// What the stand-alone C++ tests share: expectations that end the program, sealed artifacts, buffers of exact
// sizes.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ffi/dtypes.h"
#include "ffi/error.h"
#include "ffi/program.h"
#include "ffi/sha256.h"
#include "ffi/spec.h"
#include "ffi/variant_pack.h"

namespace cudnn_jax {

using Bytes = std::vector<uint8_t>;

inline void expect(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

inline void expect_equal(const std::string& got, const std::string& wanted) {
  expect(got == wanted, "got \"" + got + "\", wanted \"" + wanted + "\"");
}

// The text of the Error that `body` throws.
template <typename Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// A random number's seed, printed so that a failure can be had again: SEED=... in the environment.
inline unsigned seed(unsigned fresh) {
  const char* wanted = std::getenv("SEED");
  const unsigned chosen =
      wanted == nullptr ? fresh : static_cast<unsigned>(std::strtoul(wanted, nullptr, 10));
  std::printf("SEED=%u\n", chosen);
  return chosen;
}

inline Bytes seal(const Bytes& payload) {
  const Digest digest = sha256(payload.data(), payload.size());
  return Json::to_msgpack({{"magic", spec().magic()},
                           {"version", spec().version()},
                           {"sha256", Json::binary({digest.begin(), digest.end()})},
                           {"payload", Json::binary(payload)}});
}

inline Bytes seal(const Json& payload) { return seal(Json::to_msgpack(payload)); }

inline Json operand(const char* dtype, std::vector<int64_t> shape) {
  return {{"dtype", dtype}, {"shape", shape}};
}

inline Json payload(const char* platform, Json inputs, Json outputs, int64_t workspace) {
  const bool cuda = std::string(platform) == "cuda";
  return {{"requires",
           {{"platform", platform},
            {"arch", cuda ? Json(90) : Json(nullptr)},
            {"cudnn", cuda ? Json(91900) : Json(nullptr)},
            {"cutedsl", cuda ? Json("4.8.1") : Json(nullptr)}}},
          {"inputs", std::move(inputs)},
          {"outputs", std::move(outputs)},
          {"workspace", workspace},
          {"steps", Json::array()}};
}

// Heap memory of exactly the asked size, aligned as XLA's is, so that a sanitizer catches a step that leaves
// it.
class Block {
 public:
  explicit Block(int64_t bytes) {
    void* made = nullptr;
    expect(posix_memalign(&made, kWorkspaceAlignment, static_cast<size_t>(bytes)) == 0, "no memory");
    data_.reset(static_cast<std::byte*>(made));
  }
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

// One set of a program's operands, and the pack that a call makes of them.
class Buffers {
 public:
  explicit Buffers(const Program& program) : program_(program) {
    for (const OperandSpec& one : program.operands()) blocks_.emplace_back(one.bytes);
    blocks_.emplace_back(program.workspace());
  }

  template <typename T>
  T* at(size_t operand) const {
    return reinterpret_cast<T*>(blocks_[operand].data());
  }

  void run(void* stream = nullptr, int device = kNoDevice) const {
    VariantPack pack(program_);
    pack.expect(program_.inputs(), program_.outputs() + (program_.workspace() > 0));
    for (size_t i = 0; i < program_.operands().size(); ++i) {
      const OperandSpec& one = program_.operands()[i];
      pack.put(static_cast<int64_t>(i),
               {at<void>(i), one.xla_dtype, one.shape.data(), static_cast<int64_t>(one.shape.size())});
    }
    const int64_t workspace = program_.workspace();
    if (workspace > 0) pack.put_workspace({blocks_.back().data(), xla_dtype_of("uint8"), &workspace, 1});
    program_.run(pack.call(stream, device));
  }

 private:
  const Program& program_;
  std::vector<Block> blocks_;
};

// A host function that reads every byte it was told of.
inline void touch(void* const* args, const int64_t* nbytes, int64_t n) {
  volatile uint8_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < nbytes[i]; ++j) last = static_cast<const uint8_t*>(args[i])[j];
  }
  (void)last;
}

}  // namespace cudnn_jax
