// "host": calls a C function registered in this process. CPU platform only.
#include "ffi/steps/host.h"

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "ffi/error.h"
#include "ffi/spec.h"
#include "ffi/steps/table.h"
#include "program_spec.h"

namespace cudnn_jax {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, HostFunction> functions;
};

// Never destroyed: XLA may still hold programs while the process ends.
Registry& registry() {
  static Registry& instance = *new Registry;
  return instance;
}

class HostStep final : public Step {
 public:
  HostStep(std::string symbol, std::vector<Arg> args, std::vector<int64_t> nbytes, std::string field)
      : symbol_(std::move(symbol)),
        args_(std::move(args)),
        nbytes_(std::move(nbytes)),
        field_(std::move(field)) {}

  void load(int) override {
    Registry& known = registry();
    std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.functions.find(symbol_);
    if (found == known.functions.end()) {
      throw Error(ErrorKind::kNotFound, field_ + ".symbol: " + show(symbol_) +
                                            " is not registered in this process (register_host_symbol)");
    }
    function_ = found->second;
  }

  void run(const Call& call) const override {
    std::array<void*, kMaxArgs> pointers;
    for (size_t i = 0; i < args_.size(); ++i) pointers[i] = call.pointer(args_[i]);
    function_(pointers.data(), nbytes_.data(), static_cast<int64_t>(args_.size()));
  }

 private:
  const std::string symbol_;
  const std::vector<Arg> args_;
  const std::vector<int64_t> nbytes_;
  const std::string field_;
  HostFunction function_ = nullptr;
};

int64_t size_of(const Arg& arg, const ProgramContext& context) {
  switch (arg.kind) {
    case Arg::Kind::kOperand: return (*context.operands)[static_cast<size_t>(arg.index)].bytes;
    case Arg::Kind::kWorkspace: return context.workspace - arg.index;
    case Arg::Kind::kImmediate: return static_cast<int64_t>(arg.immediate.size);
  }
  return 0;
}

}  // namespace

void register_host_symbol(const std::string& name, HostFunction function) {
  if (function == nullptr)
    throw Error(ErrorKind::kInvalidArgument, "address: got 0, the rule is a function's address");
  Registry& known = registry();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.functions[name] = function;
}

std::unique_ptr<Step> make_host_step(const Json& step, ProgramContext& context) {
  std::vector<Arg> args = context.args(step.at("args"));
  std::vector<int64_t> nbytes;
  for (const Arg& arg : args) nbytes.push_back(size_of(arg, context));
  return std::make_unique<HostStep>(step.at("symbol").get<std::string>(), std::move(args), std::move(nbytes),
                                    context.field);
}

}  // namespace cudnn_jax
