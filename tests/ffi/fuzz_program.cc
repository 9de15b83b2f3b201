// What a fuzzer calls: whatever the bytes, a program is made of them or an Error of one line says why not.
// The bytes stand for an artifact, for a payload, whose hash is put right so that a change reaches the
// fields, and for an object file. A small program for the CPU runs too, on buffers of the sizes it states.
#include <algorithm>
#include <cstdint>

#include "ffi/cudnn_backend.h"
#include "ffi/elf_object.h"
#include "ffi/steps/host.h"
#include "testing.h"

namespace cudnn_jax {

// Parsing plans nothing.
struct BackendGraph::Lowered {};
BackendGraph::BackendGraph(const std::string&, std::optional<int>, const std::optional<std::string>&) {
  std::abort();
}
BackendGraph::~BackendGraph() = default;
int64_t BackendGraph::create_execution_plans(const std::string&) { std::abort(); }
int64_t BackendGraph::create_execution_plan(const EngineChoice&) { std::abort(); }
int64_t BackendGraph::plan_count() { std::abort(); }
void BackendGraph::build_plan(int64_t) { std::abort(); }
CudnnPlan BackendGraph::plan(int64_t) { std::abort(); }

namespace {

bool is_small(const Program& program) {
  constexpr int64_t kSmall = 1 << 16;
  int64_t total = program.workspace();
  for (const OperandSpec& one : program.operands()) total += std::min(one.bytes, kSmall);
  return total < kSmall;
}

template <typename Body>
void expect_error_or_nothing(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.empty() || text.find('\n') != std::string::npos || text.size() > 4096) std::abort();
  }
}

void parse(const Bytes& artifact) {
  expect_error_or_nothing([&] {
    const auto program = Program::parse(artifact.data(), artifact.size());
    if (program->platform() != Platform::kCpu || !is_small(*program)) return;
    const auto shared = Program::share(artifact.data(), artifact.size(), Platform::kCpu);
    shared->load(kNoDevice);
    Buffers(*shared).run();
  });
}

}  // namespace
}  // namespace cudnn_jax

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cudnn_jax;
  static const bool ready = (register_host_symbol("touch", touch), true);
  (void)ready;
  const Bytes bytes(data, data + size);
  parse(bytes);
  parse(seal(bytes));
  expect_error_or_nothing([&] {
    const ElfObject object(bytes.data(), bytes.size());
    object.text_of("scale_version");
    object.require_this_machine();
  });
  return 0;
}
