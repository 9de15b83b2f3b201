// The Python face of the runtime. Nothing here is needed while a program runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <map>
#include <string>
#include <vector>

#include "cudnn_frontend_version.h"
#include "ffi/counters.h"
#include "ffi/driver.h"
#include "ffi/error.h"
#include "ffi/library.h"
#include "ffi/program.h"
#include "ffi/steps/host.h"
#include "ffi/xla_handlers.h"
#include "program_spec.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cudnn_jax {

#ifdef CUDNN_JAX_WITH_CUDNN
void bind_cudnn(nb::module_& module);
#endif
void bind_eager(nb::module_& module);

namespace {

template <typename F>
nb::capsule function_capsule(F* function) {
  return nb::capsule(reinterpret_cast<const void*>(function));
}

nb::dict stages_of(const TargetStages& target) {
  nb::dict stages;
  stages["instantiate"] = function_capsule(target.instantiate);
  if (target.initialize != nullptr) stages["initialize"] = function_capsule(target.initialize);
  stages["execute"] = function_capsule(target.execute);
  return stages;
}

nb::dict ffi_targets() {
  nb::dict targets;
  targets["cpu"] = stages_of(kCpuTarget);
  targets["cuda"] = stages_of(kCudaTarget);
  return targets;
}

nb::dict ffi_type(const std::string& platform) {
  if (platform != "cpu" && platform != "cuda") {
    throw Error(ErrorKind::kInvalidArgument,
                "platform: got \"" + platform + "\", the rule is \"cpu\" or \"cuda\"");
  }
  const StateType& state = platform == "cpu" ? kCpuState : kCudaState;
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<const void*>(state.id));
  type["type_info"] = nb::capsule(static_cast<const void*>(state.info));
  return type;
}

nb::dict counter_values() {
  Counters& all = counters();
  nb::dict values;
  values["programs_created"] = all.programs_created.load();
  values["programs_destroyed"] = all.programs_destroyed.load();
  values["states_created"] = all.states_created.load();
  values["states_destroyed"] = all.states_destroyed.load();
  values["loads"] = all.loads.load();
  values["images_loaded"] = all.images_loaded.load();
  values["images_unloaded"] = all.images_unloaded.load();
  values["executions"] = all.executions.load();
  values["handler_ns"] = all.handler_ns.load();
  values["library_ns"] = all.library_ns.load();
  values["rebuilds"] = all.rebuilds.load();
  values["handles"] = all.handles.load();
  return values;
}

nb::object or_none(const std::optional<int64_t>& value) {
  return value.has_value() ? nb::object(nb::int_(*value)) : nb::object(nb::none());
}

nb::list describe(const Program& program, size_t begin, size_t end) {
  nb::list buffers;
  for (size_t i = begin; i < end; ++i) {
    const OperandSpec& operand = program.operands()[i];
    nb::list shape;
    for (int64_t dim : operand.shape) shape.append(dim);
    nb::dict buffer;
    buffer["dtype"] = operand.dtype;
    buffer["shape"] = nb::tuple(shape);
    buffers.append(buffer);
  }
  return buffers;
}

nb::dict program_check(const nb::bytes& artifact) {
  std::shared_ptr<const Program> program;
  {
    nb::gil_scoped_release release;
    program = Program::parse(reinterpret_cast<const uint8_t*>(artifact.c_str()), artifact.size());
  }
  nb::dict summary;
  summary["platform"] = program->platform() == Platform::kCuda ? "cuda" : "cpu";
  summary["arch"] = or_none(program->arch());
  summary["cudnn"] = or_none(program->cudnn());
  summary["cutedsl"] = program->cutedsl().has_value() ? nb::object(nb::str(program->cutedsl()->c_str()))
                                                      : nb::object(nb::none());
  summary["sha256"] = to_hex(program->digest());
  const auto inputs = static_cast<size_t>(program->inputs());
  summary["inputs"] = describe(*program, 0, inputs);
  summary["outputs"] = describe(*program, inputs, program->operands().size());
  summary["workspace"] = program->workspace();
  summary["steps"] = program->kinds();
  return summary;
}

PyObject* python_type_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument: return PyExc_ValueError;
    case ErrorKind::kNotFound: return PyExc_LookupError;
    case ErrorKind::kFailedPrecondition: return PyExc_RuntimeError;
    case ErrorKind::kUnimplemented: return PyExc_NotImplementedError;
    case ErrorKind::kInternal: return PyExc_RuntimeError;
  }
  return PyExc_RuntimeError;
}

}  // namespace
}  // namespace cudnn_jax

NB_MODULE(_ffi, m) {
  using namespace cudnn_jax;
  m.doc() = "The C++ runtime of cudnn_jax: programs, XLA handlers and the cuDNN backend.";

  nb::register_exception_translator([](const std::exception_ptr& pending, void*) {
    try {
      std::rethrow_exception(pending);
    } catch (const Error& error) {
      PyErr_SetString(python_type_of(error.kind()), error.what());
    }
  });
  // An ImportError: what is missing is a library, and an engine may decline by it. Registered later, asked
  // first.
  nb::exception<LibraryNotFound>(m, "LibraryNotFound", PyExc_ImportError);

  m.attr("PROGRAM_SPEC") = kProgramSpec;
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("CUDNN_FRONTEND_VERSION") = CUDNN_FRONTEND_VERSION;

  m.def("program_check", &program_check, "artifact"_a,
        nb::sig("def program_check(artifact: bytes) -> dict[str, object]"),
        "Checks an artifact as the handlers do and tells what is in it; ValueError names the field.");
  m.def("ffi_targets", &ffi_targets, nb::sig("def ffi_targets() -> dict[str, dict[str, object]]"),
        "Per platform, the handlers that jax.ffi.register_ffi_target takes, as capsules by stage.");
  m.def("ffi_type", &ffi_type, "platform"_a, nb::sig("def ffi_type(platform: str) -> dict[str, object]"),
        "The state type that jax.ffi.register_ffi_type takes; the type comes before its target.");
  m.def("counters", &counter_values, nb::sig("def counters() -> dict[str, int]"),
        "Process-wide counts: programs, states, loads, images, executions, cuDNN plans built again, cuDNN "
        "handles, the host nanoseconds inside execute, and those inside the launching calls while "
        "measure_library_calls is on.");
  m.def(
      "measure_library_calls", [](bool on) { measures_library_calls().store(on, std::memory_order_relaxed); },
      "on"_a,
      "Counts the time inside cuLaunchKernelEx, CuteDSLRT_Function_Run and cudnnBackendExecute as "
      "library_ns.");
  m.def(
      "register_host_symbol",
      [](const std::string& name, uintptr_t address) {
        register_host_symbol(name, reinterpret_cast<HostFunction>(address));
      },
      "name"_a, "address"_a,
      "Names a C function void f(void* const* args, const int64_t* nbytes, int64_t n) for \"host\" steps.");
  m.def(
      "set_library_candidates",
      [](std::map<std::string, std::vector<std::string>> candidates) {
        for (auto& [library, paths] : candidates) set_library_candidates(library, std::move(paths));
      },
      "candidates"_a,
      "Paths to try for \"cudnn\", \"cuda\", \"cudart\", \"nvrtc\" and \"cute_dsl_runtime\", before the bare "
      "sonames.");
  m.def("cuda_driver_version", &cuda_driver_version, nb::call_guard<nb::gil_scoped_release>(),
        "13000 for CUDA 13.0. Raises LibraryNotFound naming what was tried.");

#ifdef CUDNN_JAX_WITH_CUDNN
  bind_cudnn(m);
#endif
  bind_eager(m);
}
