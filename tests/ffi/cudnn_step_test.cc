// The "cudnn" step without a GPU, a cuDNN or cudnn_frontend, under sanitizers: cudnn_step_test LIBRARY. Exits
// with 1 and says why. LIBRARY is recording_cudnn.c: the driver, and a cuDNN that records its calls.
#include <dlfcn.h>

#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "counted.h"
#include "ffi/counters.h"
#include "ffi/cudnn_backend.h"
#include "ffi/cudnn_handles.h"
#include "ffi/cudnn_plan.h"
#include "ffi/cudnn_plan_text.h"
#include "ffi/cudnn_step.h"
#include "ffi/cudnn_user_handle.h"
#include "ffi/driver.h"
#include "ffi/library.h"
#include "testing.h"

namespace cudnn_jax {

// What planning again would give: a list of plans, of which the test says what becomes of each.
struct BackendGraph::Lowered {
  std::vector<CudnnPlan> plans;
};

namespace {

std::string journal_of_planning;
std::function<std::vector<CudnnPlan>(const std::string& asked)> planner;

std::vector<CudnnPlan> ask(const std::string& what) {
  journal_of_planning += what + "; ";
  return planner(what);
}

}  // namespace

BackendGraph::BackendGraph(const std::string&, std::optional<int>, const std::optional<std::string>&)
    : lowered_(std::make_unique<Lowered>()) {}
BackendGraph::~BackendGraph() = default;
int64_t BackendGraph::create_execution_plans(const std::string& mode) {
  const std::vector<CudnnPlan> found = ask(mode);
  if (found.empty()) throw BackendNotSupported("no plans in mode " + mode);
  lowered_->plans.insert(lowered_->plans.end(), found.begin(), found.end());
  return static_cast<int64_t>(found.size());
}
int64_t BackendGraph::create_execution_plan(const EngineChoice& choice) {
  const std::vector<CudnnPlan> found = ask("engine " + std::to_string(choice.engine_id));
  if (found.empty()) throw BackendNotSupported("no such engine");
  lowered_->plans.push_back(found[0]);
  return static_cast<int64_t>(lowered_->plans.size()) - 1;
}
int64_t BackendGraph::plan_count() { return static_cast<int64_t>(lowered_->plans.size()); }
void BackendGraph::build_plan(int64_t) {}
CudnnPlan BackendGraph::plan(int64_t index) { return lowered_->plans[static_cast<size_t>(index)]; }

namespace {

Bytes word(uint32_t value) {
  Bytes bytes(sizeof(value));
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

// Two operands, a scalar, a cleared, an uploaded and a plain part of the workspace, and a slice of operand 1.
CudnnPlan sample_plan(const std::string& backend = "plan") {
  CudnnPlan plan;
  plan.cudnn_version = 91900;
  plan.backend = backend;
  plan.workspace = 512;
  plan.backend_workspace = 256;
  plan.uids = {1, 2, 7, 8, 9, 10, 11};
  plan.caller_slots = {0, 1};
  plan.scalars = {{2, word(0xabc)}};
  plan.scratch = {{3, 0}, {4, 16}, {5, 32}};
  plan.aliases = {{6, 0, 4}};
  plan.clears = {{0, 16}};
  plan.uploads = {{16, word(0xdef)}};
  return plan;
}

constexpr char kGraph[] =
    R"({"version":1,"io_data_type":null,"intermediate_data_type":null,"compute_data_type":null,)"
    R"("tensors":[],"nodes":[],"inputs":[],"outputs":[]})";

std::unique_ptr<Step> make_step(const Bytes& plan, std::vector<int64_t> uids = {2, 1},
                                int64_t workspace = 512, bool pinned = false) {
  Json step = {{"graph", kGraph},
               {"plan", Json::binary(plan)},
               {"engine_id", 5},
               {"pinned", pinned},
               {"knobs", {{"STAGES", 2}}},
               {"uids", uids},
               {"workspace", {256, workspace}},
               {"device", nullptr}};
  step["args"] = Json::array();
  for (size_t i = 0; i < uids.size(); ++i)
    step["args"].push_back(Json::array({"operand", uids.size() - 1 - i}));
  ProgramContext context;
  context.platform = Platform::kCuda;
  context.field = "step";
  return make_cudnn_step(step, context);
}

struct Operands {
  uint32_t first[2] = {0x11, 0x12};
  uint32_t second[1] = {0x22};
  std::vector<std::byte> workspace = std::vector<std::byte>(1024, std::byte{0x77});
  void* operands[2] = {first, second};
  int64_t nbytes[2] = {sizeof(first), sizeof(second)};

  Call call(void* stream, int device) {
    Call made;
    made.stream = stream;
    made.device = device;
    made.operands = operands;
    made.nbytes = nbytes;
    made.workspace = workspace.data();
    return made;
  }
};

const char* (*take_journal)();
void (*fail_descriptors)(int fail);

void test_a_run() {
  auto step = make_step(to_bytes(sample_plan()));
  void* context = reinterpret_cast<void*>(0xd0);
  void* stream = &context;
  void* other = &stream;
  {
    ContextScope scope(nullptr, 0);
    take_journal();
    step->load(0);
    step->load(0);
  }
  // Once: a handle, with a capture in relaxed mode meanwhile, and the plan on it.
  expect_equal(take_journal(), "capture mode 2; create in d0; capture mode 0; plan; bind 0; ");

  Operands buffers;
  const std::string done =
      "fill 10 with 0 in 0; upload 4; "
      "execute 1:11 2:22 7:abc 8:0 9:def a:77777777 b:12 workspace 77; ";
  const auto run = [&](void* on) {
    step->run(buffers.call(on, 0));
    return std::string(take_journal());
  };
  char text[64];
  const auto on = [&text](void* which) {
    std::snprintf(text, sizeof(text), "stream %lx; ", reinterpret_cast<unsigned long>(which));
    return std::string(text);
  };
  const size_t before_execute = std::string("fill 10 with 0 in 0; upload 4; ").size();
  const std::string prepared = done.substr(0, before_execute);
  const std::string executed = done.substr(before_execute);
  // The first execution loads kernels, which a capture allows in relaxed mode only.
  expect_equal(run(stream), prepared + on(stream) + "capture mode 2; " + executed + "capture mode 0; ");
  expect_equal(run(stream), done);
  expect_equal(run(other), prepared + on(other) + executed);
  expect_equal(run(other), done);
}

void test_each_device_has_its_own_plan() {
  auto step = make_step(to_bytes(sample_plan()));
  for (int device : {0, 1}) {
    ContextScope scope(nullptr, device);
    take_journal();
    step->load(device);
    const std::string journal = take_journal();
    expect(journal.find("plan; ") != std::string::npos, "device " + std::to_string(device) + ": " + journal);
    if (device == 1) expect(journal.find("create in d1; ") != std::string::npos, journal);
  }
}

void test_planning_again(void (*pretend_version)(size_t)) {
  ContextScope scope(nullptr, 0);
  CudnnPlan here = sample_plan();
  here.cudnn_version = 92000;
  CudnnPlan large = here;
  large.workspace = 4096;
  CudnnPlan foreign = here;
  foreign.uids[1] = 3;
  CudnnPlan broken = here;
  broken.backend = "broken";
  std::string asked;
  const auto load = [&asked](const CudnnPlan& made, bool pinned = false) {
    journal_of_planning.clear();
    auto step = make_step(to_bytes(made), {2, 1}, 512, pinned);
    const std::string message = message_of([&] { step->load(0); });
    asked = journal_of_planning;
    return message;
  };

  pretend_version(92000);
  int64_t rebuilds = counters().rebuilds;
  planner = [&](const std::string&) { return std::vector<CudnnPlan>{here}; };
  expect_equal(load(sample_plan()), "no error");
  expect_equal(asked, "engine 5; ");
  expect_equal(load(sample_plan(), true), "no error");
  expect_equal(asked, "engine 5; ");
  expect(counters().rebuilds == rebuilds + 2, "two plans were built again");
  rebuilds += 2;

  // The engine is gone, and of what is proposed only the last plan fits the program.
  planner = [&](const std::string& what) {
    return what == "A" ? std::vector<CudnnPlan>{large, foreign, here} : std::vector<CudnnPlan>{};
  };
  expect_equal(load(sample_plan()), "no error");
  expect_equal(asked, "engine 5; A; ");
  expect_equal(load(sample_plan(), true),
               "step.plan: made with cuDNN 9.19.0, cuDNN 9.20.0 is here and does not take it (the versions "
               "differ) and does not build it again (pinned to its engine: no such engine)");
  expect_equal(asked, "engine 5; ");
  expect(counters().rebuilds == rebuilds + 1, "one plan was built again");

  planner = [&](const std::string& what) {
    return what == "FALLBACK" ? std::vector<CudnnPlan>{large} : std::vector<CudnnPlan>{};
  };
  expect_equal(load(sample_plan()),
               "step.plan: made with cuDNN 9.19.0, cuDNN 9.20.0 is here and does not take it (the versions "
               "differ) and does not build it again (step.workspace: has 512 bytes, the plan needs 4096)");
  expect_equal(asked, "engine 5; A; FALLBACK; ");

  // The same version and a plan that does not load all the same, say of another build of cuDNN.
  planner = [&](const std::string&) { return std::vector<CudnnPlan>{here}; };
  expect_equal(load(broken), "no error");
  planner = [&](const std::string&) { return std::vector<CudnnPlan>{broken}; };
  const std::string message = load(broken);
  expect(message.find(
             "made with cuDNN 9.20.0, cuDNN 9.20.0 is here and does not take it (cudnnBackendFinalize "
             "of the plan failed: CUDNN_STATUS_OF_THE_TEST, the inner reason and more)") != std::string::npos,
         message);
  // Any other failure is no reason to run another plan.
  CudnnPlan failed = here;
  failed.backend = "failed";
  expect_equal(
      load(failed),
      "cudnnBackendFinalize of the plan failed: CUDNN_STATUS_OF_THE_TEST, the inner reason and more");
  expect_equal(asked, "");
  pretend_version(91900);
}

void test_a_failure_is_told() {
  ContextScope scope(nullptr, 0);
  auto step = make_step(to_bytes(sample_plan("failing")));
  step->load(0);
  Operands buffers;
  expect_equal(message_of([&] { step->run(buffers.call(nullptr, 0)); }),
               "cudnnBackendExecute failed: CUDNN_STATUS_OF_THE_TEST, the inner reason and more");
  expect_equal(message_of([&] { step->run(buffers.call(nullptr, 0)); }).substr(0, 26),
               "cudnnBackendExecute failed");
}

void test_what_does_not_fit_is_refused() {
  const Bytes plan = to_bytes(sample_plan());
  expect_equal(message_of([&] { make_step(plan, {2, 3}); }), "step.uids: lacks 1, which the plan fills");
  expect_equal(message_of([&] { make_step(plan, {1, 2, 3}); }), "step.uids: has 3 entries, the plan fills 2");
  expect_equal(message_of([&] { make_step(plan, {2, 2}); }), "step.uids[1]: 2 comes twice");
  expect_equal(message_of([&] { make_step(plan, {2, 1}, 511); }),
               "step.workspace: has 511 bytes, the plan needs 512");
  expect_equal(message_of([&] { make_step({}); }).substr(0, 32), "step.plan: not valid MessagePack");

  const auto refused = [](auto&& change) {
    CudnnPlan changed = sample_plan();
    change(changed);
    return message_of([&] { make_step(to_bytes(changed)); });
  };
  expect_equal(refused([](CudnnPlan& plan) { plan.scalars[0].slot = 0; }),
               "step.plan.scalars: slot 0 is filled twice");
  expect_equal(refused([](CudnnPlan& plan) { plan.aliases.clear(); }),
               "step.plan.uids: nothing fills uid 11");
  for (const size_t source : {6, 8}) {  // itself, and a slot that a later alias fills
    expect_equal(
        refused([source](CudnnPlan& plan) {
          plan.uids.push_back(12);
          plan.uids.push_back(13);
          plan.scratch.push_back({7, 0});
          plan.aliases = {{6, source, 0}, {8, 0, 0}};
        }),
        "step.plan.aliases: slot " + std::to_string(source) + " is not filled before the alias of it");
  }
  expect_equal(refused([](CudnnPlan& plan) { plan.scratch[0].offset = 513; }),
               "step.plan.scratch: expected an integer from 0 to 512");
  expect_equal(refused([](CudnnPlan& plan) { plan.clears[0].offset = 241; }),
               "step.plan.clears: expected an integer from 0 to 240");
  expect_equal(refused([](CudnnPlan& plan) { plan.uploads[0].offset = 253; }),
               "step.plan.uploads: expected an integer from 0 to 252");
  expect_equal(refused([](CudnnPlan& plan) { plan.backend_workspace = 513; }),
               "step.plan.backend_workspace: expected an integer from 0 to 512");
}

// Damaged plans pass or are refused; those that pass stay inside their buffers.
void test_damaged_plans(std::mt19937_64& random) {
  const Bytes sound = to_bytes(sample_plan());
  int passed = 0;
  ContextScope scope(nullptr, 0);
  for (int round = 0; round < 4000; ++round) {
    Bytes damaged = sound;
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
    }
    try {
      auto step = make_step(damaged);
      planner = [](const std::string&) { return std::vector<CudnnPlan>{}; };
      step->load(0);
      Operands buffers;
      buffers.workspace.resize(256 + 512);
      step->run(buffers.call(nullptr, 0));
      ++passed;
    } catch (const Error& error) {
      expect(std::strchr(error.what(), '\n') == nullptr, error.what());
    }
    take_journal();
  }
  expect(passed > 100, "only " + std::to_string(passed) + " damaged plans passed");
}

void test_stray_bytes() {
  expect_equal(without_stray_bytes("no JSON"), "no JSON");
  expect_equal(without_stray_bytes("[1]"), "[1]");
  // A pointer, 8 bytes, then four of a value: zeroed; the last four bytes stay.
  const std::string head =
      R"({"engine":{"payload":{"kernels":[{"kernelName":"x","kernelParams":{"rawData":")";
  const std::string tail =
      R"(","offsets":[{"value":0,"uid":1,"update_as":"pointer"},{"value":8,"uid":2,"size":4,"update_as":"value"},)"
      R"({"value":12}]}}]}}})";
  expect_equal(without_stray_bytes(head + "AQIDBAUGBwgJCgsMDQ4PEA==" + tail),
               head + "AAAAAAAAAAAAAAAADQ4PEA==" + tail);
}

// A call that brings its own handle uses that one, on the call's stream.
void test_the_callers_handle() {
  auto step = make_step(to_bytes(sample_plan()));
  void* context = reinterpret_cast<void*>(0xd0);
  void* stream = &context;
  ContextScope scope(nullptr, 0);
  step->load(0);
  UserHandle handle(0, stream);
  Operands buffers;
  Call call = buffers.call(stream, 0);
  call.handle = &handle;
  take_journal();
  step->run(call);
  const std::string first = take_journal();
  expect(first.find("create in d0; ") != std::string::npos, first);
  char text[64];
  std::snprintf(text, sizeof(text), "stream %lx; ", reinterpret_cast<unsigned long>(stream));
  expect(first.find(text) != std::string::npos, first);
  step->run(call);
  handle.set_stream(stream);
  const std::string second = take_journal();
  expect(second.find("create") == std::string::npos && second.find("stream") == std::string::npos, second);
  handle.destroy();
  expect_equal(message_of([&] { step->run(call); }), "handle: it was destroyed");
}

// Giving a handle back, from a lease or for good, fails for no reason: room for it was made before.
void test_giving_back() {
  constexpr int kFresh = 2;  // nobody else's pool
  CudnnHandlePool& pool = cudnn_handles(kFresh, CudnnHandleUse::kRun);
  std::optional<CudnnHandlePool::Lease> one, two, three;
  for (auto* lease : {&one, &two, &three}) lease->emplace(pool, nullptr);
  const Counted before = counted;
  for (auto* lease : {&one, &two, &three}) lease->reset();
  expect_equal(std::to_string(counted.allocations - before.allocations), "0");

  auto handle = std::make_unique<UserHandle>(1, nullptr);
  expect(handle->backend() != nullptr, "no handle");
  fail_descriptors(1);
  handle.reset();  // it brings the descriptor that it used
  fail_descriptors(0);
}

void test_threads(UserHandle* handle) {
  auto step = make_step(to_bytes(sample_plan()));
  {
    ContextScope scope(nullptr, 0);
    step->load(0);
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&step, handle] {
      Operands buffers;
      void* context = reinterpret_cast<void*>(0xd0);
      Call call = buffers.call(&context, 0);
      call.handle = handle;
      for (int round = 0; round < 50; ++round) step->run(call);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A run allocates nothing and takes no lock but those of the handle's checkout and return.
void test_costs() {
  auto step = make_step(to_bytes(sample_plan()));
  {
    ContextScope scope(nullptr, 0);
    step->load(0);
  }
  Operands buffers;
  step->run(buffers.call(nullptr, 0));
  const Counted before = counted;
  for (int round = 0; round < 100; ++round) step->run(buffers.call(nullptr, 0));
  const Counted after = counted;
  expect_equal(std::to_string(after.allocations - before.allocations), "0");
#ifdef COUNT_CALLS
  expect_equal(std::to_string(after.locks - before.locks), "200");
#endif
}

}  // namespace
}  // namespace cudnn_jax

int main(int, char** arguments) {
  using namespace cudnn_jax;
  set_library_candidates("cuda", {arguments[1]});
  set_library_candidates("cudnn", {arguments[1]});
  void* library = dlopen(arguments[1], RTLD_NOW);
  expect(library != nullptr, "no library");
  take_journal = reinterpret_cast<const char* (*)()>(dlsym(library, "take_journal"));
  fail_descriptors = reinterpret_cast<void (*)(int)>(dlsym(library, "fail_descriptors"));
  std::mt19937_64 random(seed(std::random_device{}()));

  test_a_run();
  test_each_device_has_its_own_plan();
  test_planning_again(reinterpret_cast<void (*)(size_t)>(dlsym(library, "pretend_version")));
  test_a_failure_is_told();
  test_what_does_not_fit_is_refused();
  test_damaged_plans(random);
  test_stray_bytes();
  test_the_callers_handle();
  reinterpret_cast<void (*)()>(dlsym(library, "be_quiet"))();
  test_costs();
  test_giving_back();
  test_threads(nullptr);
  // One handle in several threads: cuDNN allows one call at a time.
  UserHandle handle(0, nullptr);
  test_threads(&handle);
  std::puts("cudnn_step_test passed");
}
