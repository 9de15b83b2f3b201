// The XLA handlers without XLA and without a GPU: handler_test LIBRARY OBJECT CALLS. Exits with 1 and says
// why. LIBRARY is recording_cute.c, OBJECT an object of cute_object.c, CALLS what each of 16 threads makes.
#include <fstream>
#include <iterator>
#include <thread>

#include "counted.h"
#include "fake_xla.h"
#include "ffi/counters.h"
#include "ffi/library.h"
#include "ffi/steps/host.h"

namespace cudnn_jax {
namespace {

const char* (*take_journal)();
int (*bind)(void* context);

constexpr int kCount = 16;

// Writes 7 over the workspace, out0 = 2.5 * x + y, and out1 = -3 * out0.
Json cuda_program(const Bytes& object) {
  static const std::string image = "IMAGE 90 axpy:ppplf";
  Json made = payload("cuda", {operand("float32", {kCount}), operand("float32", {kCount})},
                      {operand("float32", {kCount}), operand("float32", {kCount})}, 256);
  const Json axpy = Json::parse(
      R"([["operand", 0], ["operand", 1], ["operand", 2], ["immediate", ["int64", 16]], ["immediate", ["float32", 2.5]]])");
  const Json scale = Json::parse(
      R"([["operand", 2], ["operand", 3], ["immediate", ["int32", 16]], ["immediate", ["float32", -3]]])");
  made["steps"] = {
      {{"kind", "fill"}, {"dest", {"workspace", 0}}, {"value", 7}, {"width", 1}, {"bytes", 256}},
      {{"kind", "cubin"},
       {"kernel", "axpy"},
       {"image", Json::binary(Bytes(image.c_str(), image.c_str() + image.size() + 1))},
       {"grid", {1, 1, 1}},
       {"args", axpy}},
      {{"kind", "cute"}, {"function", "scale"}, {"object", Json::binary(object)}, {"args", scale}}};
  return made;
}

// The same sums by functions of this process.
Json cpu_program() {
  Json made = payload("cpu", {operand("float32", {kCount}), operand("float32", {kCount})},
                      {operand("float32", {kCount}), operand("float32", {kCount})}, 256);
  const Json axpy =
      Json::parse(R"([["operand", 0], ["operand", 1], ["operand", 2], ["immediate", ["float32", 2.5]]])");
  const Json scale = Json::parse(R"([["operand", 2], ["operand", 3], ["immediate", ["float64", -3]]])");
  made["steps"] = {{{"kind", "fill"}, {"dest", {"workspace", 0}}, {"value", 7}, {"width", 1}, {"bytes", 256}},
                   {{"kind", "host"}, {"symbol", "axpy"}, {"args", axpy}},
                   {{"kind", "host"}, {"symbol", "scale"}, {"args", scale}}};
  return made;
}

void host_axpy(void* const* args, const int64_t* nbytes, int64_t) {
  const auto* x = static_cast<const float*>(args[0]);
  const auto* y = static_cast<const float*>(args[1]);
  for (int64_t i = 0; i < nbytes[2] / 4; ++i) {
    static_cast<float*>(args[2])[i] = *static_cast<const float*>(args[3]) * x[i] + y[i];
  }
}

void host_scale(void* const* args, const int64_t* nbytes, int64_t) {
  for (int64_t i = 0; i < nbytes[1] / 4; ++i) {
    static_cast<float*>(args[1])[i] =
        static_cast<float>(*static_cast<const double*>(args[2])) * static_cast<const float*>(args[0])[i];
  }
}

// Fresh inputs and poisoned outputs for a call, and whether it then did its work.
void prepare(const XlaBuffers& buffers, int value) {
  for (int i = 0; i < kCount; ++i) {
    buffers.at<float>(0)[i] = static_cast<float>(value + i);
    buffers.at<float>(1)[i] = static_cast<float>(2 * value);
    buffers.at<float>(2)[i] = buffers.at<float>(3)[i] = -1;
  }
  std::memset(buffers.at<void>(4), 1, 256);
}

bool is_right(const XlaBuffers& buffers, int value) {
  for (int i = 0; i < kCount; ++i) {
    const float sum = 2.5F * static_cast<float>(value + i) + static_cast<float>(2 * value);
    if (buffers.at<float>(2)[i] != sum || buffers.at<float>(3)[i] != -3 * sum) return false;
  }
  for (int i = 0; i < 256; ++i) {
    if (buffers.at<uint8_t>(4)[i] != 7) return false;
  }
  return true;
}

struct Case {
  Case(const Json& payload, Platform on)
      : platform(on),
        artifact(seal(payload)),
        program(Program::parse(artifact.data(), artifact.size())),
        site(artifact, on) {
    expect_equal(site.problem(), "");
  }
  int device() const { return platform == Platform::kCuda ? 0 : kNoDevice; }

  const Platform platform;
  const Bytes artifact;
  const std::shared_ptr<const Program> program;
  const CallSite site;
};

// Which context is bound for the work, whatever the calling thread had, and that it has it back afterwards.
void test_contexts(const Case& on_cuda) {
  const auto from_thread = [&](void* foreign, void* stream) {
    std::string seen;
    std::thread([&] {
      if (foreign != nullptr) bind(foreign);
      XlaBuffers buffers(*on_cuda.program);
      prepare(buffers, 1);
      take_journal();
      expect_equal(on_cuda.site.initialize(stream, 0), "");
      const std::string loaded = take_journal();
      expect_equal(on_cuda.site.execute(stream, 0, buffers.args, buffers.results), "");
      expect(is_right(buffers, 1), "a wrong result");
      seen = loaded + "| " + take_journal();
    }).join();
    return seen;
  };
  const std::string work =
      "fill 100 with 7 in %; launch axpy on 1,1,1 in % bound % p p p 16 2.5; run scale bound %; ";
  const auto in = [&work](const std::string& context) {
    std::string made = work;
    for (size_t at; (at = made.find('%')) != std::string::npos;) made.replace(at, 1, context);
    return made;
  };
  // The first call loads, and runs the function for the first time.
  std::string first = in("d0");
  first.replace(first.find("run scale"), std::string("run scale bound d0; ").size(),
                "capture mode 2; run scale bound d0; capture mode 0; ");
  expect_equal(
      from_thread(nullptr, nullptr),
      "retain d0; bind d0; load image of 1 kernels; load axpy in d0; load object; get scale in d0; bind 0; | "
      "bind d0; " +
          first + "bind 0; ");
  void* d1 = reinterpret_cast<void*>(0xd1);
  expect_equal(from_thread(nullptr, nullptr), "| bind d0; " + in("d0") + "bind 0; ");
  expect_equal(from_thread(d1, nullptr), "| bind d0; " + in("d0") + "bind d1; ");
  expect_equal(from_thread(reinterpret_cast<void*>(0xd0), nullptr), "| " + in("d0"));
  // A stream's own context comes before the device's.
  struct {
    void* context = reinterpret_cast<void*>(0xc5);
    int32_t status = 0;
  } stream;
  expect_equal(from_thread(d1, &stream), "| bind c5; " + in("c5") + "bind d1; ");
  expect_equal(from_thread(nullptr, &stream), "| bind c5; " + in("c5") + "bind 0; ");
}

// What does not fit is refused before anything is launched.
void test_refusals(const Case& on_cuda, const Bytes& object) {
  XlaBuffers buffers(*on_cuda.program);
  take_journal();
  const auto problem = [&] { return on_cuda.site.execute(nullptr, 0, buffers.args, buffers.results); };
  int64_t other = kCount - 1;
  int64_t* dims = std::exchange(buffers.args[1].dims, &other);
  expect_equal(problem(),
               "cudnn_jax.program: input 1: the program has float32[16], the call passes float32[15]");
  buffers.args[1].dims = dims;
  buffers.args[1].dtype = XLA_FFI_DataType_S32;
  expect_equal(problem(),
               "cudnn_jax.program: input 1: the program has float32[16], the call passes int32[16]");
  buffers.args[1].dtype = XLA_FFI_DataType_F32;
  void* data = buffers.results[0].data;
  buffers.results[0].data = static_cast<std::byte*>(data) + 4;
  expect_equal(
      problem(),
      "cudnn_jax.program: output 0: its address is 4 bytes past a multiple of 16, the rule is a multiple of "
      "16");
  buffers.results[0].data = data;
  const XLA_FFI_Buffer workspace = buffers.results.back();
  buffers.results.pop_back();
  expect_equal(problem(),
               "cudnn_jax.program: operands: the program has 2 inputs and 2 outputs and a workspace, the "
               "call passes 2 "
               "inputs and 2 results");
  buffers.results.push_back(workspace);
  expect_equal(take_journal(), "");

  expect_equal(on_cuda.site.initialize(nullptr, 1),
               "cudnn_jax.program: payload.requires.arch: the program is for sm_90, device 1 is sm_80");
  const Json cuda = cuda_program(object);
  expect_equal(
      CallSite(seal(cuda), Platform::kCpu).problem(),
      "cudnn_jax.program: payload.requires.platform: the program is for cuda, this call runs on cpu");
  Json newer = Json::from_msgpack(seal(cuda));
  newer["version"] = spec().version() + 1;
  expect_equal(
      CallSite(Json::to_msgpack(newer), Platform::kCuda).problem(),
      "cudnn_jax.program: artifact.version: 2, this build reads version 1; a newer cudnn_jax made it");
}

// Nothing is allocated and no lock is taken by an execution.
void test_costs(const Case& one) {
  XlaBuffers buffers(*one.program);
  CallSite::Frame frame(one.site, nullptr, one.device(), buffers.args, buffers.results);
  prepare(buffers, 1);
  expect(frame.execute(), "a failed call");
  const Counted before = counted;
  for (int i = 0; i < 100; ++i) expect(frame.execute(), "a failed call");
  const Counted after = counted;
  expect(after.allocations == before.allocations,
         std::to_string(after.allocations - before.allocations) + " allocations in 100 calls");
  expect(after.locks == before.locks, std::to_string(after.locks - before.locks) + " locks in 100 calls");
  expect(is_right(buffers, 1), "a wrong result");
}

void test_counting_counts() {
  const Counted before = counted;
  void* volatile block = std::malloc(10);  // an allocation that is not seen may be left out
  std::free(block);
  std::mutex mutex;
  mutex.lock();
  mutex.unlock();
  const Counted after = counted;
#ifdef COUNT_CALLS
  const long wanted = 1;
#else
  const long wanted = 0;
#endif
  expect_equal(std::to_string(after.allocations - before.allocations), std::to_string(wanted));
  expect_equal(std::to_string(after.locks - before.locks), std::to_string(wanted));
}

// Many threads call one site with buffers of their own; every result is checked.
void test_threads(const Case& one, int calls) {
  constexpr int kThreads = 16;
  const int64_t before = counters().executions;
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) {
    threads.emplace_back([&one, calls, id] {
      XlaBuffers buffers(*one.program);
      CallSite::Frame frame(one.site, nullptr, one.device(), buffers.args, buffers.results);
      for (int call = 0; call < calls; ++call) {
        const int value = (id * calls + call) % 100'003;
        prepare(buffers, value);
        expect(frame.execute(), "a failed call");
        expect(is_right(buffers, value), "a wrong result");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect(counters().executions == before + kThreads * calls, "calls were not counted");
}

}  // namespace
}  // namespace cudnn_jax

int main(int argc, char** argv) {
  using namespace cudnn_jax;
  expect(argc == 4, "usage: handler_test LIBRARY OBJECT CALLS");
  set_library_candidates("cuda", {argv[1]});
  set_library_candidates("cute_dsl_runtime", {argv[1]});
  void* library = dlopen(argv[1], RTLD_NOW);
  expect(library != nullptr, "no library");
  take_journal = reinterpret_cast<const char* (*)()>(dlsym(library, "take_journal"));
  bind = reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
  std::ifstream file(argv[2], std::ios::binary);
  const Bytes object{std::istreambuf_iterator<char>(file), {}};
  register_host_symbol("axpy", host_axpy);
  register_host_symbol("scale", host_scale);
  {
    const Case on_cuda(cuda_program(object), Platform::kCuda);
    const Case on_cpu(cpu_program(), Platform::kCpu);
    test_contexts(on_cuda);
    test_refusals(on_cuda, object);
    reinterpret_cast<void (*)()>(dlsym(library, "be_quiet"))();
    test_counting_counts();
    for (const Case* one : {&on_cuda, &on_cpu}) {
      test_costs(*one);
      test_threads(*one, std::atoi(argv[3]));
    }
  }
  expect(counters().states_created == counters().states_destroyed, "a state was not released");
  expect(counters().programs_created == counters().programs_destroyed, "a program was not released");
  std::puts("handler_test passed");
  return 0;
}
