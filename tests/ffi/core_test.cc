// The core without Python, JAX or a GPU, under sanitizers: core_test DRIVER ROUNDS. Exits with 1 and says
// why.
//
// Artifacts are built, damaged and sealed again; what still passes is run on buffers of exactly the stated
// sizes, so that a step which leaves them is caught. Then the rule for the CUDA context is checked against a
// driver that records its calls.
#include <dlfcn.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ffi/counters.h"
#include "ffi/driver.h"
#include "ffi/library.h"
#include "ffi/steps/host.h"
#include "testing.h"

namespace cudnn_jax {
namespace {

// Steps without a host's function, in either platform's form.
Json sample(const char* platform) {
  Json made = payload(platform, {operand("bfloat16", {2, 3}), operand("float32", {})},
                      {operand("float32", {4}), operand("uint8", {0, 7})}, 600);
  made["steps"] = {
      {{"kind", "fill"}, {"dest", {"operand", 2}}, {"value", 7}, {"width", 1}, {"bytes", 16}},
      {{"kind", "fill"}, {"dest", {"workspace", 256}}, {"value", 9}, {"width", 1}, {"bytes", 344}}};
  if (std::string(platform) == "cpu") {
    // Spelt out: a braced list of pairs would become a map.
    const Json args =
        Json::parse(R"([["operand", 0], ["operand", 2], ["workspace", 0], ["immediate", ["float32", 1.5]]])");
    made["steps"].push_back({{"kind", "host"}, {"symbol", "touch"}, {"args", args}});
  }
  return made;
}

bool is_small(const Program& program) {
  int64_t total = program.workspace();
  for (const OperandSpec& one : program.operands()) total += one.bytes > (1 << 20) ? (1 << 20) : one.bytes;
  return total < (1 << 20);
}

void damaged_artifacts(std::mt19937& random, int rounds) {
  const Bytes sound = seal(sample("cpu"));
  expect_equal(message_of([&] { Program::share(sound.data(), sound.size(), Platform::kCpu); }), "no error");
  int passed = 0;
  for (int round = 0; round < rounds; ++round) {
    Bytes payload = Json::to_msgpack(sample("cpu"));
    const size_t edits = 1 + random() % 3;
    for (size_t i = 0; i < edits; ++i) {
      const size_t at = random() % payload.size();
      switch (random() % 4) {
        case 0: payload[at] ^= static_cast<uint8_t>(1u << random() % 8); break;
        case 1: payload[at] = static_cast<uint8_t>(random()); break;
        case 2: payload.erase(payload.begin() + static_cast<long>(at)); break;
        case 3:
          payload.insert(payload.begin() + static_cast<long>(at), static_cast<uint8_t>(random()));
          break;
      }
    }
    const Bytes artifact = random() % 8 == 0 ? payload : seal(payload);
    try {
      const auto program = Program::share(artifact.data(), artifact.size(), Platform::kCpu);
      if (!is_small(*program)) continue;
      program->load(kNoDevice);
      Buffers(*program).run();
      ++passed;
    } catch (const Error& error) {
      expect(std::strchr(error.what(), '\n') == nullptr, "a message of two lines");
    }
  }
  expect(passed > 0, "no damaged artifact passed: nothing was run");
  std::printf("%d of %d damaged artifacts still passed and ran\n", passed, rounds);
}

void shared_programs() {
  const Bytes artifact = seal(sample("cpu"));
  const int64_t before = counters().programs_created;
  const int64_t loads = counters().loads;
  std::vector<std::thread> threads;
  const auto keep = Program::share(artifact.data(), artifact.size(), Platform::kCpu);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 50; ++j) {
        const auto program = Program::share(artifact.data(), artifact.size(), Platform::kCpu);
        expect(program == keep, "two live programs of one content");
        program->load(kNoDevice);
        Buffers(*program).run();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect(counters().programs_created == before + 1, "a program was parsed again");
  expect(counters().loads == loads + 1, "a program was loaded again");
}

void racing_programs() {
  // Nobody keeps it: the last thread to let go removes it while others make it anew.
  const Bytes artifact = seal(sample("cpu"));
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 200; ++j)
        Program::share(artifact.data(), artifact.size(), Platform::kCpu)->load(kNoDevice);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void contexts(const char* (*journal)()) {
  const Bytes artifact = seal(sample("cuda"));
  const auto program = Program::share(artifact.data(), artifact.size(), Platform::kCuda);
  void* context_c5 = reinterpret_cast<void*>(0xc5);  // what the stream at &context_c5 names
  void* stream = &context_c5;
  {
    ContextScope scope(nullptr, 0);
    expect_equal(journal(), "retain d0; bind d0; ");
    program->load(0);
    Buffers(*program).run(nullptr, 0);
    expect_equal(journal(), "fill 10 with 7 in d0; fill 158 with 9 in d0; ");
    {
      ContextScope same(nullptr, 0);
      expect_equal(journal(), "");
    }
    {
      ContextScope foreign(stream, 0);
      expect_equal(journal(), "bind c5; ");
    }
    expect_equal(journal(), "bind d0; ");
    {
      ContextScope other(reinterpret_cast<void*>(2), 1);
      expect_equal(journal(), "retain d1; bind d1; ");
    }
    expect_equal(journal(), "bind d0; ");
  }
  expect_equal(journal(), "bind 0; ");

  expect_equal(message_of([&] { program->load(1); }),
               "payload.requires.arch: the program is for sm_90, device 1 is sm_80");
  expect_equal(message_of([&] { program->load(2); }),
               "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE, invalid device");
  expect_equal(message_of([&] { program->load(64); }), "device ordinal 64: the rule is 0 <= ordinal < 64");
  expect_equal(
      message_of([&] { Buffers(*program).run(reinterpret_cast<void*>(1), 0); }),
      "payload.steps[0]: fill: cuMemsetD8Async failed: CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure");
  expect_equal(message_of([&] { Program::share(artifact.data(), artifact.size(), Platform::kCpu); }),
               "payload.requires.platform: the program is for cuda, this call runs on cpu");
}

// What a call's buffers must keep to.
void alignment() {
  const auto check = [](const char* platform, size_t operand, size_t workspace) {
    Json made = payload(platform, Json::array(), {cudnn_jax::operand("uint8", {4})}, 512);
    const Bytes artifact = seal(made);
    const auto program = Program::parse(artifact.data(), artifact.size());
    const Block block(2048);
    VariantPack pack(*program);
    const int64_t shape = 4;
    const int64_t bytes = 512;
    return message_of([&] {
      pack.put(0, {block.data() + operand, xla_dtype_of("uint8"), &shape, 1});
      pack.put_workspace({block.data() + workspace, xla_dtype_of("uint8"), &bytes, 1});
    });
  };
  expect_equal(check("cuda", 16, 256), "no error");
  expect_equal(check("cpu", 16, 16), "no error");
  expect_equal(check("cuda", 8, 0),
               "output 0: its address is 8 bytes past a multiple of 16, the rule is a multiple of 16");
  expect_equal(check("cuda", 0, 128),
               "workspace: its address is 128 bytes past a multiple of 256, the rule is a multiple of 256");
  expect_equal(check("cpu", 0, 8),
               "workspace: its address is 8 bytes past a multiple of 16, the rule is a multiple of 16");
}

}  // namespace
}  // namespace cudnn_jax

int main(int argc, char** argv) {
  using namespace cudnn_jax;
  expect(argc == 3, "usage: core_test DRIVER ROUNDS");
  std::mt19937 random(seed(std::random_device{}()));
  register_host_symbol("touch", touch);
  const int rounds = std::atoi(argv[2]);
  if (rounds > 0) damaged_artifacts(random, rounds);
  shared_programs();
  racing_programs();
  alignment();
  set_library_candidates("cuda", {argv[1]});
  const auto journal = reinterpret_cast<const char* (*)()>(dlsym(dlopen(argv[1], RTLD_NOW), "take_journal"));
  expect(journal != nullptr, "the recording driver has no journal");
  contexts(journal);
  expect(counters().programs_created == counters().programs_destroyed, "a program was not released");
  std::printf("core_test passed\n");
  return 0;
}
