#include "ffi/step.h"

namespace cudnn_jax {

Arg ProgramContext::arg(const Json& value) const {
  const auto& kind = value.at(0).get_ref<const std::string&>();
  const Json& what = value.at(1);
  Arg arg;
  if (kind == "immediate") {
    arg.kind = Arg::Kind::kImmediate;
    arg.immediate = what.get<double>();
    arg.integral = what.is_number_integer();
  } else {
    arg.kind = kind == "operand" ? Arg::Kind::kOperand : Arg::Kind::kWorkspace;
    arg.index = what.get<int64_t>();
  }
  return arg;
}

std::vector<Arg> ProgramContext::args(const Json& list) const {
  std::vector<Arg> args;
  args.reserve(list.size());
  for (const Json& value : list) args.push_back(arg(value));
  return args;
}

}  // namespace cudnn_jax
