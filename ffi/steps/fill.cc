// "fill": repeats a byte, or a word of 4 bytes, over an output or a slice of the workspace.
#include <cstring>

#include "ffi/driver.h"
#include "ffi/error.h"
#include "ffi/steps/table.h"

namespace cudnn_jax {
namespace {

constexpr size_t kWord = sizeof(uint32_t);

class FillStep final : public Step {
 public:
  FillStep(Platform platform, Arg dest, uint32_t value, size_t width, size_t bytes)
      : platform_(platform), dest_(dest), value_(value), width_(width), bytes_(bytes) {}

  void load(int) override {
    if (platform_ == Platform::kCuda) driver();
  }

  void run(const Call& call) const override {
    if (bytes_ == 0) return;
    void* dest = call.pointer(dest_);
    if (platform_ == Platform::kCpu) {
      fill_on_host(dest);
    } else if (width_ == kWord) {
      driver().fill_words(dest, value_, bytes_, call.stream);
    } else {
      driver().fill(dest, static_cast<uint8_t>(value_), bytes_, call.stream);
    }
  }

 private:
  void fill_on_host(void* dest) const {
    if (width_ == 1) {
      std::memset(dest, static_cast<int>(value_), bytes_);
      return;
    }
    for (size_t at = 0; at < bytes_; at += kWord) std::memcpy(static_cast<char*>(dest) + at, &value_, kWord);
  }

  const Platform platform_;
  const Arg dest_;
  const uint32_t value_;
  const size_t width_;
  const size_t bytes_;
};

}  // namespace

std::unique_ptr<Step> make_fill_step(const Json& step, ProgramContext& context) {
  const auto value = step.at("value").get<uint32_t>();
  const auto width = step.at("width").get<size_t>();
  const auto bytes = step.at("bytes").get<size_t>();
  if (width != 1 && width != kWord) {
    throw Error(ErrorKind::kInvalidArgument,
                context.field + ".width: got " + std::to_string(width) + ", the rule is 1 or 4");
  }
  if (width == 1 && value > 0xff) {
    throw Error(ErrorKind::kInvalidArgument, context.field + ".value: got " + std::to_string(value) +
                                                 ", the rule is at most 255 at width 1");
  }
  if (bytes % width != 0) {
    throw Error(ErrorKind::kInvalidArgument, context.field + ".bytes: got " + std::to_string(bytes) +
                                                 ", the rule is a multiple of width " +
                                                 std::to_string(width));
  }
  return std::make_unique<FillStep>(context.platform, context.arg(step.at("dest")), value, width, bytes);
}

}  // namespace cudnn_jax
