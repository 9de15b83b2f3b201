// The "cubin" and "cute" steps without a GPU, under sanitizers: kernel_steps_test LIBRARY [RUNTIME] OBJECT.
// Exits with 1 and says why. LIBRARY is recording_cute.c, OBJECT an object of cute_object.c, and RUNTIME the
// real libcute_dsl_runtime, if it is to run the object.
#include <dlfcn.h>

#include <fstream>
#include <iterator>

#include "ffi/counters.h"
#include "ffi/driver.h"
#include "ffi/library.h"
#include "testing.h"

namespace cudnn_jax {
namespace {

const char* (*take_journal)();
bool real_runtime = false;  // it writes no journal

Bytes object;

Json kernel_program(Json step) {
  Json made =
      payload("cuda", {operand("float32", {8}), operand("float32", {8})}, {operand("float32", {8})}, 0);
  made["steps"].push_back(std::move(step));
  return made;
}

// out = 2.5 * x + y through the kernel that the recording driver knows.
Json axpy(const std::string& image, const char* kernel = "axpy", int64_t n = 8) {
  const Json args =
      Json::parse(R"([["operand", 0], ["operand", 1], ["operand", 2], ["immediate", ["int64", )" +
                  std::to_string(n) + R"(]], ["immediate", ["float32", 2.5]]])");
  return kernel_program({{"kind", "cubin"},
                         {"kernel", kernel},
                         {"image", Json::binary(Bytes(image.c_str(), image.c_str() + image.size() + 1))},
                         {"grid", {4, 2, 1}},
                         {"args", args}});
}

// out = -3 * x.
Json scale(const Bytes& data, const char* function = "scale", int32_t n = 8) {
  const Json args = Json::parse(R"([["operand", 0], ["operand", 2], ["immediate", ["int32", )" +
                                std::to_string(n) + R"(]], ["immediate", ["float32", -3]]])");
  return kernel_program(
      {{"kind", "cute"}, {"function", function}, {"object", Json::binary(data)}, {"args", args}});
}

std::shared_ptr<Program> share(const Json& payload) {
  const Bytes artifact = seal(payload);
  return Program::share(artifact.data(), artifact.size(), Platform::kCuda);
}

std::string problem_of(const Json& payload) {
  const auto program = share(payload);
  return message_of([&] { program->load(0); });
}

void expect_journal(const std::string& wanted) {
  const std::string got = take_journal();
  if (!real_runtime) expect_equal(got, wanted);
}

void images_and_kernels() {
  const std::string image = "IMAGE 90 axpy:ppplf other:p";
  take_journal();
  auto program = share(axpy(image));
  expect_equal(take_journal(), "");  // parsing opens nothing
  program->load(0);
  program->load(0);
  expect_equal(take_journal(), "load image of 2 kernels; load axpy in d0; ");

  Buffers buffers(*program);
  for (int i = 0; i < 8; ++i) {
    buffers.at<float>(0)[i] = static_cast<float>(i);
    buffers.at<float>(1)[i] = 100;
  }
  void* context_c5 = reinterpret_cast<void*>(0xc5);
  buffers.run(&context_c5, 0);
  expect_equal(take_journal(), "launch axpy on 4,2,1 in c5 bound d0 p p p 8 2.5; ");
  for (int i = 0; i < 8; ++i)
    expect(buffers.at<float>(2)[i] == 2.5F * static_cast<float>(i) + 100, "a wrong sum");

  // The image is in the driver once, and goes with its last program.
  auto other = share(axpy(image, "axpy", 4));
  other->load(0);
  expect_equal(take_journal(), "load axpy in d0; ");
  program.reset();
  expect_equal(take_journal(), "");
  other.reset();
  expect_equal(take_journal(), "unload image; ");
}

void kernels_that_do_not_fit() {
  const std::string image = "IMAGE 90 axpy:ppplf other:p";
  expect_equal(
      problem_of(axpy(image, "gone")),
      "payload.steps[0]: cubin gone: cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND, named symbol not "
      "found");
  expect_equal(
      problem_of(axpy("no image")),
      "payload.steps[0]: cubin axpy: cuLibraryLoadData failed: CUDA_ERROR_INVALID_IMAGE, device kernel "
      "image is invalid");
  expect_equal(
      problem_of(axpy("IMAGE 100 axpy:ppplf")),
      "payload.steps[0]: cubin axpy: cuKernelGetFunction failed: CUDA_ERROR_NO_BINARY_FOR_GPU, no kernel "
      "image is available");
  expect_equal(problem_of(axpy("IMAGE 90 axpy:ppplfi")),
               "payload.steps[0]: cubin axpy: the kernel takes 6 arguments, the step has 5");
  expect_equal(problem_of(axpy("IMAGE 90 axpy:pppif")),
               "payload.steps[0]: cubin axpy: args[3] has 8 bytes, the kernel takes 4");

  const auto failing = share(axpy(image));
  failing->load(0);
  expect_equal(
      message_of([&] { Buffers(*failing).run(reinterpret_cast<void*>(1), 0); }),
      "payload.steps[0]: cubin axpy: cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_FAILED, unspecified launch "
      "failure");
}

void objects_and_functions() {
  take_journal();
  auto program = share(scale(object));
  expect_journal("");
  program->load(0);
  program->load(0);
  expect_journal("load object; get scale in d0; ");

  Buffers buffers(*program);
  const auto run = [&](void* stream) {
    for (int i = 0; i < 8; ++i) buffers.at<float>(0)[i] = static_cast<float>(i);
    buffers.run(stream, 0);
    for (int i = 0; i < 8; ++i)
      expect(buffers.at<float>(2)[i] == -3 * static_cast<float>(i), "a wrong product");
  };
  run(nullptr);
  // The first launch may load code, which a capture allows in relaxed mode only.
  expect_journal("capture mode 2; run scale bound d0; capture mode 0; ");
  run(nullptr);
  expect_journal("run scale bound d0; ");

  struct {
    void* context = nullptr;
    int32_t status = 0;  // what the function ends with
  } stream;
  run(&stream);
  stream.status = 719;
  expect_equal(
      message_of([&] { run(&stream); }),
      "payload.steps[0]: cute scale: CuteDSLRT_Function_Run failed: CUDA_ERROR_LAUNCH_FAILED, unspecified "
      "launch failure");
  stream.status = 9;
  expect_equal(message_of([&] { run(&stream); }),
               "payload.steps[0]: cute scale: CuteDSLRT_Function_Run failed: cudaErrorInvalidConfiguration");
  take_journal();

  auto other = share(scale(object, "scale", 4));
  other->load(0);
  expect_journal("get scale in d0; ");
  program.reset();
  expect_journal("");
  other.reset();
  expect_journal("unload object; ");
}

void the_runtime_is_opened_when_a_function_is_loaded(const std::string& runtime) {
  set_library_candidates("cute_dsl_runtime", {"/nowhere/libcute_dsl_runtime.so"});
  const auto program = share(scale(object));
  const std::string missing = message_of([&] { program->load(0); });
  expect(
      missing.find("libcute_dsl_runtime could not be opened, tried: /nowhere/libcute_dsl_runtime.so (") == 0,
      missing);
  const std::string hint = "; to get it: pip install cudnn_jax[cutedsl]";
  expect(missing.size() > hint.size() && missing.substr(missing.size() - hint.size()) == hint, missing);

  set_library_candidates("cute_dsl_runtime", {runtime});
  const auto is_open = [&runtime] { return dlopen(runtime.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr; };
  expect(!real_runtime || !is_open(), "the runtime was opened for nothing");
  program->load(0);
  expect(is_open(), "the runtime is another one");
}

void functions_that_do_not_fit(const std::string& runtime) {
  expect_equal(problem_of(scale(object, "gone")),
               "payload.steps[0]: cute gone: the object has no function gone");
  expect_equal(problem_of(scale(Bytes(100, 7))),
               "payload.steps[0]: cute scale: the object is not a relocatable ELF file");
  Bytes foreign = object;
  foreign[18] = 21;  // e_machine
  const std::string foreign_problem = problem_of(scale(foreign));
  expect(foreign_problem.find(
             "payload.steps[0]: cute scale: the object is for machine 21, this process runs on ") == 0,
         foreign_problem);
  expect_equal(
      problem_of(scale(object, "old")),
      "payload.steps[0]: cute old: CuteDSLRT_Module_Get_Function failed: CuteDSLRT_Error_InvalidVersion, the "
      "object has interface version 9.9 and was made with CuTe-DSL 4.8.1, the runtime " +
          runtime + " takes other versions");
  // Cut off anywhere, an object is refused, by our reading of it or by the library's.
  for (size_t size = 1; size < object.size(); size += 97) {
    const std::string problem =
        problem_of(scale(Bytes(object.begin(), object.begin() + static_cast<long>(size))));
    expect(problem.find("payload.steps[0]: cute scale: ") == 0, problem);
  }
}

void measured_calls() {
  Json filling = payload("cuda", Json::array(), Json::array({operand("float32", {4})}), 0);
  filling["steps"].push_back(
      {{"kind", "fill"}, {"dest", {"operand", 0}}, {"value", 0}, {"width", 4}, {"bytes", 16}});
  for (const Json& made : {axpy("IMAGE 90 axpy:ppplf"), filling}) {
    const auto program = share(made);
    program->load(0);
    const int64_t before = counters().library_ns;
    Buffers(*program).run(nullptr, 0);
    expect(counters().library_ns == before, "time was counted unasked");
    measures_library_calls() = true;
    Buffers(*program).run(nullptr, 0);
    measures_library_calls() = false;
    expect(counters().library_ns > before, "no time was counted");
  }
}

}  // namespace
}  // namespace cudnn_jax

int main(int argc, char** argv) {
  using namespace cudnn_jax;
  expect(argc == 3 || argc == 4, "usage: kernel_steps_test LIBRARY [RUNTIME] OBJECT");
  real_runtime = argc == 4;
  const std::string runtime = argv[argc - 2];
  set_library_candidates("cuda", {argv[1]});
  take_journal = reinterpret_cast<const char* (*)()>(dlsym(dlopen(argv[1], RTLD_NOW), "take_journal"));
  expect(take_journal != nullptr, "the recording driver has no journal");
  std::ifstream file(argv[argc - 1], std::ios::binary);
  object.assign(std::istreambuf_iterator<char>(file), {});
  expect(!object.empty(), "no object");

  ContextScope scope(nullptr, 0);
  if (!real_runtime) {
    images_and_kernels();
    kernels_that_do_not_fit();
    measured_calls();
  }
  the_runtime_is_opened_when_a_function_is_loaded(runtime);
  objects_and_functions();
  functions_that_do_not_fit(runtime);
  std::puts("kernel_steps_test passed");
  return 0;
}
