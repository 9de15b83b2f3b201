// "fill": sets bytes of an output or of the workspace.
#include <cstring>

#include "ffi/driver.h"
#include "ffi/steps/table.h"

namespace cudnn_jax {
namespace {

class FillStep final : public Step {
 public:
  FillStep(Platform platform, Arg dest, uint8_t byte, size_t bytes)
      : platform_(platform), dest_(dest), byte_(byte), bytes_(bytes) {}

  void load(int) override {
    if (platform_ == Platform::kCuda) driver();
  }

  void run(const Call& call) const override {
    if (bytes_ == 0) return;
    void* dest = call.pointer(dest_);
    if (platform_ == Platform::kCuda) {
      driver().fill(dest, byte_, bytes_, call.stream);
    } else {
      std::memset(dest, byte_, bytes_);
    }
  }

 private:
  const Platform platform_;
  const Arg dest_;
  const uint8_t byte_;
  const size_t bytes_;
};

}  // namespace

std::unique_ptr<Step> make_fill_step(const Json& step, ProgramContext& context) {
  return std::make_unique<FillStep>(context.platform, context.arg(step.at("dest")),
                                    step.at("byte").get<uint8_t>(), step.at("bytes").get<size_t>());
}

}  // namespace cudnn_jax
