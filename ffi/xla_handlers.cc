// The stages of the custom call. instantiate parses the program once per call site and compile, initialize
// loads it for the device before any graph capture, execute only launches. XLA:CPU has no initialize: there
// the program is loaded as it is instantiated.
#include "ffi/xla_handlers.h"

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "ffi/counters.h"
#include "ffi/driver.h"
#include "ffi/error.h"
#include "ffi/program.h"
#include "ffi/variant_pack.h"
#include "xla/ffi/api/ffi.h"

namespace cudnn_jax {
namespace {

namespace xf = ::xla::ffi;

struct ProgramState {
  explicit ProgramState(std::shared_ptr<Program> shared) : program(std::move(shared)) {
    add(counters().states_created);
  }
  ~ProgramState() { add(counters().states_destroyed); }
  const std::shared_ptr<Program> program;
};

struct CpuState final : ProgramState {
  using ProgramState::ProgramState;
  static xf::TypeId id;
};

struct CudaState final : ProgramState {
  using ProgramState::ProgramState;
  static xf::TypeId id;
};

xf::TypeId CpuState::id = XLA_FFI_UNKNOWN_TYPE_ID;
xf::TypeId CudaState::id = XLA_FFI_UNKNOWN_TYPE_ID;

// Here and not inside the classes: with an incomplete class the deleter compiles and runs no destructor.
xf::TypeInfo cpu_state_info = xf::MakeTypeInfo<CpuState>();
xf::TypeInfo cuda_state_info = xf::MakeTypeInfo<CudaState>();

xf::ErrorCode code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument: return xf::ErrorCode::kInvalidArgument;
    case ErrorKind::kNotFound: return xf::ErrorCode::kNotFound;
    case ErrorKind::kFailedPrecondition: return xf::ErrorCode::kFailedPrecondition;
    case ErrorKind::kUnimplemented: return xf::ErrorCode::kUnimplemented;
    case ErrorKind::kInternal: return xf::ErrorCode::kInternal;
  }
  return xf::ErrorCode::kUnknown;
}

xf::Error to_xla(ErrorKind kind, const char* what) {
  return xf::Error(code_of(kind), std::string("cudnn_jax.program: ") + what);
}

// No exception crosses into XLA.
template <typename Body>
xf::Error guarded(Body&& body) {
  try {
    body();
    return xf::Error::Success();
  } catch (const Error& error) {
    return to_xla(error.kind(), error.what());
  } catch (const std::exception& error) {
    return to_xla(ErrorKind::kInternal, error.what());
  }
}

std::shared_ptr<Program> program_of(const xf::Dictionary& attributes, Platform platform) {
  const auto bytes = attributes.get<xf::Span<const uint8_t>>("program");
  if (!bytes.has_value()) {
    throw Error(ErrorKind::kInvalidArgument, "attribute program: expected an array of uint8");
  }
  return Program::share(bytes->begin(), bytes->size(), platform);
}

template <typename State>
xf::ErrorOr<std::unique_ptr<State>> instantiate(const xf::Dictionary& attributes, Platform platform) {
  std::unique_ptr<State> state;
  const xf::Error error = guarded([&] {
    std::shared_ptr<Program> program = program_of(attributes, platform);
    if (platform == Platform::kCpu) program->load(kNoDevice);
    state = std::make_unique<State>(std::move(program));
  });
  if (error.failure()) return xf::Unexpected(error);
  return state;
}

Buffer buffer_of(const xf::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), static_cast<int>(buffer.element_type()), dims.begin(),
          static_cast<int64_t>(dims.size())};
}

template <typename T>
T known(const xf::ErrorOr<T>& value) {
  if (!value.has_value()) throw Error(ErrorKind::kInternal, value.error().message());
  return *value;
}

void fill_pack(VariantPack& pack, const Program& program, const xf::RemainingArgs& args,
               const xf::RemainingRets& rets) {
  const int64_t inputs = program.inputs();
  const int64_t outputs = program.outputs();
  pack.expect(static_cast<int64_t>(args.size()), static_cast<int64_t>(rets.size()));
  for (int64_t i = 0; i < inputs; ++i) {
    pack.put(i, buffer_of(known(args.get<xf::AnyBuffer>(static_cast<size_t>(i)))));
  }
  for (int64_t i = 0; i < outputs; ++i) {
    pack.put(inputs + i, buffer_of(*known(rets.get<xf::AnyBuffer>(static_cast<size_t>(i)))));
  }
  if (program.workspace() > 0) {
    pack.put_workspace(buffer_of(*known(rets.get<xf::AnyBuffer>(static_cast<size_t>(outputs)))));
  }
}

xf::Error execute(Program& program, void* stream, int device, const xf::RemainingArgs& args,
                  const xf::RemainingRets& rets) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  xf::Error error = guarded([&] {
    VariantPack pack(program);
    fill_pack(pack, program, args, rets);
    const auto run = [&] {
      if (!program.loaded(device)) program.load(device);
      program.run(pack.call(stream, device));
    };
    if (program.platform() == Platform::kCuda) {
      ContextScope scope(stream, device);
      run();
    } else {
      run();
    }
  });
  if (error.success()) {
    add(counters().executions);
    add(counters().handler_ns,
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
  }
  return error;
}

xf::ErrorOr<std::unique_ptr<CpuState>> cpu_instantiate(xf::Dictionary attributes) {
  return instantiate<CpuState>(attributes, Platform::kCpu);
}

xf::Error cpu_execute(CpuState* state, xf::RemainingArgs args, xf::RemainingRets rets, xf::Dictionary) {
  return execute(*state->program, nullptr, kNoDevice, args, rets);
}

xf::ErrorOr<std::unique_ptr<CudaState>> cuda_instantiate(xf::Dictionary attributes) {
  return instantiate<CudaState>(attributes, Platform::kCuda);
}

xf::Error cuda_initialize(CudaState* state, void* stream, int32_t device, xf::RemainingArgs,
                          xf::RemainingRets, xf::Dictionary) {
  Program& program = *state->program;
  return guarded([&] {
    if (program.loaded(device)) return;
    ContextScope scope(stream, device);
    program.load(device);
  });
}

xf::Error cuda_execute(CudaState* state, void* stream, int32_t device, xf::RemainingArgs args,
                       xf::RemainingRets rets, xf::Dictionary) {
  return execute(*state->program, stream, device, args, rets);
}

// Every stage receives every operand and attribute and has to bind them.
XLA_FFI_DEFINE_HANDLER(cpu_instantiate_handler, cpu_instantiate, xf::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(cpu_execute_handler, cpu_execute,
                       xf::Ffi::Bind().Ctx<xf::State<CpuState>>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(cuda_instantiate_handler, cuda_instantiate, xf::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(cuda_initialize_handler, cuda_initialize,
                       xf::Ffi::Bind<xf::ExecutionStage::kInitialize>()
                           .Ctx<xf::State<CudaState>>()
                           .Ctx<xf::PlatformStream<void*>>()
                           .Ctx<xf::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
// Nothing in execute allocates device memory, waits or depends on values, so XLA may record it in a CUDA
// graph.
XLA_FFI_DEFINE_HANDLER(cuda_execute_handler, cuda_execute,
                       xf::Ffi::Bind()
                           .Ctx<xf::State<CudaState>>()
                           .Ctx<xf::PlatformStream<void*>>()
                           .Ctx<xf::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {xf::Traits::kCmdBufferCompatible});

}  // namespace

const TargetStages kCpuTarget{cpu_instantiate_handler, nullptr, cpu_execute_handler};
const TargetStages kCudaTarget{cuda_instantiate_handler, cuda_initialize_handler, cuda_execute_handler};
const StateType kCpuState{&CpuState::id, &cpu_state_info};
const StateType kCudaState{&CudaState::id, &cuda_state_info};

}  // namespace cudnn_jax
