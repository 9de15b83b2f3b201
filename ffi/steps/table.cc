#include "ffi/steps/table.h"

#include <map>

#include "ffi/error.h"
#ifdef CUDNN_JAX_WITH_CUDNN
#include "ffi/cudnn_step.h"
#endif

namespace cudnn_jax {

StepFactory step_factory(const std::string& kind, const std::string& field) {
  static const std::map<std::string, StepFactory> kFactories = {
      {"cubin", make_cubin_step}, {"cute", make_cute_step},
      {"fill", make_fill_step},   {"host", make_host_step},
#ifdef CUDNN_JAX_WITH_CUDNN
      {"cudnn", make_cudnn_step},
#endif
  };
  const auto found = kFactories.find(kind);
  if (found == kFactories.end()) {
    throw Error(ErrorKind::kUnimplemented, field + ".kind: this build has no \"" + kind + "\" steps");
  }
  return found->second;
}

}  // namespace cudnn_jax
