#include "ffi/cute_module.h"

#include "ffi/counters.h"
#include "ffi/driver.h"
#include "ffi/elf_object.h"
#include "ffi/error.h"
#include "ffi/library.h"
#include "ffi/shared.h"

namespace cudnn_jax {
namespace {

// Declared here, not taken from CuteDSLRuntime.h, which only a large wheel brings.
struct CuteApi {
  int (*module_create)(void** module, const unsigned char* bytes, size_t size, const char** shared_libraries,
                       size_t count);
  int (*module_destroy)(void* module);
  int (*module_get_function)(void** function, void* module, const char* prefix);
  int (*function_run)(void* function, void** args, size_t count);
  const char* (*error_name)(int error);
  const char* (*error_string)(int error);
  std::string path;

  void check(int error, const char* call) const {
    if (error == 0) return;
    throw CallError(std::string(call) + " failed: " + error_name(error) + ", " + error_string(error));
  }
};

constexpr int kCudaError = 1;       // CuteDSLRT_Error_CudaError
constexpr int kInvalidVersion = 4;  // CuteDSLRT_Error_InvalidVersion

// cudaError_t has CUresult's numbers and a few of its own.
void check_cuda(int status, const char* call) {
  constexpr struct {
    int status;
    const char* name;
  } kOwn[] = {
      {9, "cudaErrorInvalidConfiguration"},
      {35, "cudaErrorInsufficientDriver"},
      {98, "cudaErrorInvalidDeviceFunction"},
  };
  for (const auto& own : kOwn) {
    if (own.status == status) throw CallError(std::string(call) + " failed: " + own.name);
  }
  driver().check(status, call);
}

CuteApi load_api() {
  const DynamicLibrary library = DynamicLibrary::open("cute_dsl_runtime", {"libcute_dsl_runtime.so"});
  CuteApi api;
  api.path = library.path();
  library.bind(api.module_create, "CuteDSLRT_Module_Create_From_Bytes");
  library.bind(api.module_destroy, "CuteDSLRT_Module_Destroy");
  library.bind(api.module_get_function, "CuteDSLRT_Module_Get_Function");
  library.bind(api.function_run, "CuteDSLRT_Function_Run");
  library.bind(api.error_name, "CuteDSLRT_GetErrorName");
  library.bind(api.error_string, "CuteDSLRT_GetErrorString");
  return api;
}

const CuteApi& cute() {
  static const CuteApi& api = *new CuteApi(load_api());
  return api;
}

}  // namespace

std::shared_ptr<CuteModule> CuteModule::share(const std::vector<uint8_t>& data) {
  static auto& modules = *new SharedByContent<CuteModule>;
  const Digest digest = sha256(data.data(), data.size());
  return modules.find_or_make(digest, [&] { return new CuteModule(digest, data); });
}

CuteModule::~CuteModule() {
  // A failure means that the process ends and the driver has gone first.
  if (module_ != nullptr) cute().module_destroy(module_);
}

void* CuteModule::function(const std::string& name, const std::string& made_with) {
  const ElfObject object(data_.data(), data_.size());
  object.require_this_machine();
  const auto version = object.text_of(name + "_version");
  if (!version.has_value()) throw CallError("the object has no function " + name);

  std::lock_guard<std::mutex> lock(mutex_);
  if (module_ == nullptr) {
    void* made = nullptr;
    cute().check(cute().module_create(&made, data_.data(), data_.size(), nullptr, 0),
                 "CuteDSLRT_Module_Create_From_Bytes");
    module_ = made;
  }
  void* function = nullptr;
  const int error = cute().module_get_function(&function, module_, name.c_str());
  if (error == kInvalidVersion) {
    throw CallError("CuteDSLRT_Module_Get_Function failed: " + std::string(cute().error_name(error)) +
                    ", the object has interface version " + std::string(*version) +
                    " and was made with CuTe-DSL " + made_with + ", the runtime " + cute().path +
                    " takes other versions");
  }
  cute().check(error, "CuteDSLRT_Module_Get_Function");
  return function;
}

void run_cute_function(void* function, void** args, size_t count) {
  int error = 0;
  {
    const LibraryCall measured;
    error = cute().function_run(function, args, count);
  }
  // The runtime only says that it was CUDA; the function says what.
  if (error == kCudaError) check_cuda(*static_cast<const int*>(args[count - 1]), "CuteDSLRT_Function_Run");
  cute().check(error, "CuteDSLRT_Function_Run");
}

}  // namespace cudnn_jax
