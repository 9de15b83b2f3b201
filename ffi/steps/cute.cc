// "cute": runs a function of an object that CuTe-DSL compiled.
#include <atomic>
#include <optional>
#include <utility>

#include "ffi/arguments.h"
#include "ffi/capture.h"
#include "ffi/cute_module.h"
#include "ffi/per_device.h"
#include "ffi/steps/table.h"

namespace cudnn_jax {
namespace {

class CuteStep final : public Step {
 public:
  CuteStep(std::shared_ptr<CuteModule> module, std::string function, std::string made_with,
           std::vector<Arg> args)
      : module_(std::move(module)),
        name_(std::move(function)),
        made_with_(std::move(made_with)),
        args_(std::move(args)) {}

  std::string name() const override { return name_; }

  void load(int) override {
    // For every device, so the next one finds it, while calls on this one read it.
    if (function_ == nullptr) function_ = module_->function(name_, made_with_);
  }

  void run(const Call& call) const override {
    ArgumentPack arguments(args_, call);
    void* stream = call.stream;
    int32_t status = 0;
    arguments.push(&stream);
    arguments.push(&status);
    // The first launch on a device loads the kernel's code, which a capture allows in relaxed mode only.
    std::optional<RelaxedCapture> relaxed;
    const uint64_t device = uint64_t{1} << call.device;
    if ((executed_.load(std::memory_order_relaxed) & device) == 0) relaxed.emplace();
    run_cute_function(function_, arguments.data(), arguments.size());
    if (relaxed.has_value()) executed_.fetch_or(device, std::memory_order_relaxed);
  }

 private:
  static_assert(kMaxDevices <= 64, "one bit per device");

  const std::shared_ptr<CuteModule> module_;
  const std::string name_;
  const std::string made_with_;
  const std::vector<Arg> args_;
  void* function_ = nullptr;
  mutable std::atomic<uint64_t> executed_{0};
};

}  // namespace

std::unique_ptr<Step> make_cute_step(const Json& step, ProgramContext& context) {
  return std::make_unique<CuteStep>(
      CuteModule::share(step.at("object").get_binary()), step.at("function").get<std::string>(),
      context.requirements->at("cutedsl").get<std::string>(), context.args(step.at("args")));
}

}  // namespace cudnn_jax
