// A small fuzzer over LLVMFuzzerTestOneInput, for where there is no libFuzzer: fuzz SECONDS CORPUS. Changes
// inputs of the corpus and keeps those that reach code which none before has reached, as
// -fsanitize-coverage=trace-pc tells.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

// The pairs of places that ran one after the other: in this input, and in any so far.
std::array<bool, 1 << 16> now{};
std::array<bool, 1 << 16> ever{};
uintptr_t previous = 0;

Bytes changed(std::mt19937_64& random, const std::vector<Bytes>& corpus) {
  const auto pick = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  Bytes bytes = corpus[pick(corpus.size())];
  for (size_t edits = 1 + pick(4); edits > 0; --edits) {
    const size_t at = bytes.empty() ? 0 : pick(bytes.size());
    const auto here = bytes.begin() + static_cast<long>(at);
    switch (bytes.empty() ? 3 : pick(7)) {
      case 0: bytes[at] ^= static_cast<uint8_t>(1u << pick(8)); break;
      case 1: bytes[at] = static_cast<uint8_t>(random()); break;
      case 2:
        bytes.erase(here, here + static_cast<long>(1 + pick(std::min<size_t>(8, bytes.size() - at))));
        break;
      case 3: bytes.insert(here, static_cast<uint8_t>(random())); break;
      case 4: bytes[at] = std::array<uint8_t, 6>{0, 0x7f, 0x80, 0xff, 0xcf, 0xd3}[pick(6)]; break;
      case 5: bytes.resize(at); break;
      case 6: {  // the rest of another input
        const Bytes& other = corpus[pick(corpus.size())];
        const size_t from = other.empty() ? 0 : pick(other.size());
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + static_cast<long>(from), other.end());
        break;
      }
    }
  }
  return bytes;
}

// Whether the input reached something new.
bool run(const Bytes& bytes) {
  now.fill(false);
  previous = 0;
  // Written first: a crash leaves the input that made it.
  std::ofstream("fuzz-input", std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<long>(bytes.size()));
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  bool fresh = false;
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] && !ever[i]) ever[i] = fresh = true;
  }
  return fresh;
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) * 0x9e3779b97f4a7c15u >> 48;
  now[(previous >> 1 ^ place) & 0xffff] = true;
  previous = place;
}

int main(int argc, char** argv) {
  if (argc != 3) return std::fputs("usage: fuzz SECONDS CORPUS\n", stderr), 2;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[1]));
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  std::vector<Bytes> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(argv[2])) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    run(corpus.back());
  }
  if (corpus.empty()) return std::fputs("no corpus\n", stderr), 2;
  const size_t given = corpus.size();
  long executions = 0;
  for (; std::chrono::steady_clock::now() < until; ++executions) {
    Bytes next = changed(random, corpus);
    if (next.size() < 65536 && run(next)) corpus.push_back(std::move(next));
  }
  std::printf("seed %lu, %ld executions, %zu inputs grew to %zu\n", static_cast<unsigned long>(seed),
              executions, given, corpus.size());
  return 0;
}
