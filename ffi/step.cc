#include "ffi/step.h"

#include <cstring>
#include <map>

namespace cudnn_jax {
namespace {

template <typename T>
Immediate immediate_of(const Json& number) {
  const T value = number.get<T>();
  Immediate made;
  made.size = sizeof value;
  std::memcpy(made.bytes.data(), &value, sizeof value);
  return made;
}

Immediate make_immediate(const Json& value) {
  static const std::map<std::string, Immediate (*)(const Json&)> kMakers = {
      {"int32", immediate_of<int32_t>},
      {"int64", immediate_of<int64_t>},
      {"float32", immediate_of<float>},
      {"float64", immediate_of<double>},
  };
  return kMakers.at(value.at(0).get<std::string>())(value.at(1));
}

}  // namespace

Arg ProgramContext::arg(const Json& value) const {
  const auto& kind = value.at(0).get_ref<const std::string&>();
  const Json& what = value.at(1);
  Arg arg;
  if (kind == "immediate") {
    arg.kind = Arg::Kind::kImmediate;
    arg.immediate = make_immediate(what);
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
