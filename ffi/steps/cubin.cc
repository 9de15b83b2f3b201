// "cubin": launches a kernel of an image that cuTile compiled.
#include <array>
#include <utility>

#include "ffi/arguments.h"
#include "ffi/driver.h"
#include "ffi/error.h"
#include "ffi/kernel_image.h"
#include "ffi/steps/table.h"

namespace cudnn_jax {
namespace {

using Grid = std::array<unsigned, 3>;

constexpr int64_t kLargestGridYZ = 65535;

size_t size_of(const Arg& arg) {
  return arg.kind == Arg::Kind::kImmediate ? arg.immediate.size : sizeof(void*);
}

class CubinStep final : public Step {
 public:
  CubinStep(std::shared_ptr<KernelImage> image, std::string kernel, Grid grid, std::vector<Arg> args)
      : image_(std::move(image)), name_(std::move(kernel)), grid_(grid), args_(std::move(args)) {}

  std::string name() const override { return name_; }

  void load(int) override {
    // Of the process, so the next device finds it, while calls on this one read it.
    if (kernel_ == nullptr) {
      void* found = image_->kernel(name_);
      check_parameters(found);
      kernel_ = found;
    }
    driver().load_kernel(kernel_);
  }

  void run(const Call& call) const override {
    ArgumentPack arguments(args_, call);
    driver().launch(kernel_, grid_, arguments.data(), call.stream);
  }

 private:
  // A launch reads as many arguments as the kernel has, of the kernel's sizes, whatever it is given.
  void check_parameters(void* kernel) const {
    const auto sizes = driver().parameters_of(kernel);
    if (!sizes.has_value()) return;
    if (sizes->size() != args_.size()) {
      throw CallError("the kernel takes " + std::to_string(sizes->size()) + " arguments, the step has " +
                      std::to_string(args_.size()));
    }
    for (size_t i = 0; i < args_.size(); ++i) {
      if ((*sizes)[i] == size_of(args_[i])) continue;
      throw CallError("args[" + std::to_string(i) + "] has " + std::to_string(size_of(args_[i])) +
                      " bytes, the kernel takes " + std::to_string((*sizes)[i]));
    }
  }

  const std::shared_ptr<KernelImage> image_;
  const std::string name_;
  const Grid grid_;
  const std::vector<Arg> args_;
  void* kernel_ = nullptr;
};

}  // namespace

std::unique_ptr<Step> make_cubin_step(const Json& step, ProgramContext& context) {
  Grid grid;
  for (size_t axis = 0; axis < grid.size(); ++axis) {
    const auto blocks = step.at("grid").at(axis).get<int64_t>();
    if (axis > 0 && blocks > kLargestGridYZ) {
      throw Error(ErrorKind::kInvalidArgument, context.field + ".grid[" + std::to_string(axis) + "]: got " +
                                                   std::to_string(blocks) + ", the rule is at most " +
                                                   std::to_string(kLargestGridYZ));
    }
    grid[axis] = static_cast<unsigned>(blocks);
  }
  return std::make_unique<CubinStep>(KernelImage::share(step.at("image").get_binary()),
                                     step.at("kernel").get<std::string>(), grid,
                                     context.args(step.at("args")));
}

}  // namespace cudnn_jax
