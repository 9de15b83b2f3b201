#include "ffi/cudnn_plan_text.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "ffi/error.h"
#include "ffi/json.h"

namespace cudnn_jax {
namespace {

constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::optional<std::vector<uint8_t>> from_base64(const std::string& text) {
  std::vector<uint8_t> bytes;
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    if (c == '=') break;
    const char* digit = std::strchr(kDigits, c);
    if (digit == nullptr || c == '\0') return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(digit - kDigits);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<uint8_t>(bits >> count));
    }
  }
  return bytes;
}

std::string to_base64(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t present = std::min<size_t>(3, bytes.size() - i);
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j) bits = bits << 8 | (j < present ? bytes[i + j] : 0u);
    for (size_t j = 0; j < 4; ++j) {
      text += j <= present ? kDigits[bits >> (18 - 6 * static_cast<int>(j)) & 63] : '=';
    }
  }
  return text;
}

// One parameter of a kernel: where it starts, and how many bytes there are before the next.
struct Parameter {
  size_t begin = 0;
  size_t room = 0;
  std::string patched;  // what cuDNN writes there at a launch: "", "pointer", "value", "tma_desc"
  size_t size = 0;      // of a "value"
};

class Kernel {
 public:
  Kernel(std::string name, std::vector<uint8_t> bytes) : name_(std::move(name)), bytes_(std::move(bytes)) {}

  void clear(const Parameter& parameter) {
    if (parameter.patched == "pointer") {
      zero(parameter, 0, sizeof(void*));
    } else if (parameter.patched == "value") {
      zero(parameter, 0, parameter.size);
    } else if (parameter.patched.empty() && is("sdpa")) {
      clear_attention_tensor(parameter);
    } else if (parameter.patched.empty() && is("matMul")) {
      clear_matmul_tensor(parameter);
    }
  }

  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  bool is(const char* what) const { return name_.find(what) != std::string::npos; }

  void zero(const Parameter& parameter, size_t from, size_t to) {
    to = std::min(to, parameter.room);
    if (from < to) {
      std::fill(bytes_.begin() + static_cast<std::ptrdiff_t>(parameter.begin + from),
                bytes_.begin() + static_cast<std::ptrdiff_t>(parameter.begin + to), uint8_t{0});
    }
  }

  template <typename Number>
  Number number(const Parameter& parameter, size_t offset) const {
    Number value;
    std::memcpy(&value, bytes_.data() + parameter.begin + offset, sizeof(value));
    return value;
  }

  // struct { int64_t rank, dim[12], stride[12]; }
  void clear_attention_tensor(const Parameter& parameter) {
    constexpr size_t kMost = 12;
    constexpr size_t kWord = sizeof(int64_t);
    constexpr size_t kDims = kWord;
    constexpr size_t kStrides = kDims + kMost * kWord;
    constexpr size_t kEnd = kStrides + kMost * kWord;
    if (parameter.room < kEnd) return;
    const auto rank = number<int64_t>(parameter, 0);
    if (rank < 1 || rank > static_cast<int64_t>(kMost)) return;
    const auto used = static_cast<size_t>(rank) * kWord;
    for (size_t i = 0; i < used; i += kWord) {
      if (number<int64_t>(parameter, kDims + i) < 1) return;
    }
    zero(parameter, kDims + used, kStrides);
    zero(parameter, kStrides + used, kEnd);
  }

  // struct { int32_t dim[3]; int64_t stride[2]; } and what follows it up to 32 bytes.
  void clear_matmul_tensor(const Parameter& parameter) {
    constexpr size_t kRoom = 32;
    constexpr size_t kDimsEnd = 3 * sizeof(int32_t);
    if (parameter.room != kRoom) return;
    zero(parameter, kDimsEnd, kDimsEnd + sizeof(int32_t));
  }

  const std::string name_;
  std::vector<uint8_t> bytes_;
};

std::vector<Parameter> parameters_of(const Json& offsets, size_t size) {
  std::vector<Parameter> found;
  for (const Json& entry : offsets) {
    Parameter parameter;
    parameter.begin = std::min(entry.at("value").get<size_t>(), size);
    parameter.patched = entry.value("update_as", std::string());
    parameter.size = entry.value("size", size_t{0});
    if (!found.empty()) {
      if (parameter.begin < found.back().begin) return {};
      found.back().room = parameter.begin - found.back().begin;
    }
    found.push_back(parameter);
  }
  if (!found.empty()) found.back().room = size - found.back().begin;
  return found;
}

}  // namespace

std::string without_stray_bytes(std::string plan) {
  try {
    const Json value = parse_json(plan, "cuDNN's plan");
    for (const Json& kernel : value.at("engine").at("payload").at("kernels")) {
      const Json& parameters = kernel.at("kernelParams");
      const auto& text = parameters.at("rawData").get_ref<const std::string&>();
      std::optional<std::vector<uint8_t>> bytes = from_base64(text);
      const size_t at = plan.find('"' + text + '"');
      if (!bytes || at == std::string::npos) continue;
      Kernel cleared(kernel.at("kernelName").get<std::string>(), std::move(*bytes));
      for (const Parameter& parameter : parameters_of(parameters.at("offsets"), cleared.bytes().size())) {
        cleared.clear(parameter);
      }
      const std::string clean = to_base64(cleared.bytes());
      // cuDNN reads the text as it wrote it, so nothing of it moves.
      if (clean.size() == text.size()) plan.replace(at + 1, text.size(), clean);
    }
  } catch (const nlohmann::json::exception&) {
    // A plan of another shape, say of kernels that come with cuDNN.
  } catch (const Error&) {
  }
  return plan;
}

}  // namespace cudnn_jax
