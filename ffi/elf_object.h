// Looks into an object file before anything loads it: what a name of it stands for, and for which machine it
// is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace cudnn_jax {

class ElfObject {
 public:
  // Throws CallError for anything but a relocatable ELF file for 64-bit machines of this byte order. Keeps
  // `data`.
  ElfObject(const uint8_t* data, size_t size);

  // Throws CallError naming both machines.
  void require_this_machine() const;
  // The zero-terminated text that a symbol stands for; nothing if there is no such symbol, or no text.
  std::optional<std::string_view> text_of(const std::string& symbol) const;

 private:
  template <typename T>
  std::optional<T> read(uint64_t offset) const;
  std::optional<std::string_view> text_at(uint64_t offset) const;

  const uint8_t* data_;
  const uint64_t size_;
};

}  // namespace cudnn_jax
