// A small fuzzer over LLVMFuzzerTestOneInput, for where there is no libFuzzer: fuzz SECONDS CORPUS. Changes
// inputs of the corpus and keeps those that reach code which none before has reached, as
// -fsanitize-coverage=trace-pc tells.
#include <fcntl.h>
#include <unistd.h>

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

// The pairs of places that ran one after the other: whether in this input and in any so far, and which in
// this one.
constexpr size_t kPairs = 1 << 16;
std::array<bool, kPairs> now{};
std::array<bool, kPairs> ever{};
std::array<uint16_t, kPairs> reached;
size_t reached_count = 0;
uintptr_t previous = 0;

Bytes changed(std::mt19937_64& random, const std::vector<Bytes>& corpus, size_t given) {
  const auto pick = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  // What was found is mostly damaged: half of the time something sound is changed.
  Bytes bytes = corpus[pick(pick(2) == 0 ? given : corpus.size())];
  for (size_t edits = 1 + pick(2) * pick(4); edits > 0; --edits) {
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

// Where a crash leaves the input that made it.
void note_input(const Bytes& bytes) {
  static const int file = open("fuzz-input", O_CREAT | O_TRUNC | O_WRONLY, 0600);
  const bool written = pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  if (!written || ftruncate(file, static_cast<off_t>(bytes.size())) != 0) std::perror("fuzz-input");
}

// Whether the input reached something new.
bool run(const Bytes& bytes) {
  note_input(bytes);
  previous = reached_count = 0;
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  bool fresh = false;
  for (size_t i = 0; i < reached_count; ++i) {
    now[reached[i]] = false;
    fresh = fresh || !ever[reached[i]];
    ever[reached[i]] = true;
  }
  return fresh;
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) * 0x9e3779b97f4a7c15u >> 48;
  const auto pair = static_cast<uint16_t>(previous >> 1 ^ place);
  if (!now[pair]) {
    now[pair] = true;
    reached[reached_count++] = pair;
  }
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
    Bytes next = changed(random, corpus, given);
    if (next.size() < 65536 && run(next)) corpus.push_back(std::move(next));
  }
  std::printf("seed %lu, %ld executions, %zu inputs grew to %zu\n", static_cast<unsigned long>(seed),
              executions, given, corpus.size());
  return 0;
}
