#include "ffi/elf_object.h"

#include <elf.h>

#include <cstring>

#include "ffi/error.h"

namespace cudnn_jax {
namespace {

#if defined(__x86_64__)
constexpr uint16_t kThisMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr uint16_t kThisMachine = EM_AARCH64;
#endif
constexpr uint8_t kThisOrder = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? ELFDATA2LSB : ELFDATA2MSB;

std::string machine_name(uint16_t machine) {
  if (machine == EM_X86_64) return "x86-64";
  if (machine == EM_AARCH64) return "aarch64";
  return "machine " + std::to_string(machine);
}

}  // namespace

// Offsets come from the file: none is used before it is compared with the size.
template <typename T>
std::optional<T> ElfObject::read(uint64_t offset) const {
  if (offset > size_ || size_ - offset < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, data_ + offset, sizeof value);
  return value;
}

std::optional<std::string_view> ElfObject::text_at(uint64_t offset) const {
  if (offset >= size_) return std::nullopt;
  const auto* begin = reinterpret_cast<const char*>(data_ + offset);
  const void* end = std::memchr(begin, 0, size_ - offset);
  if (end == nullptr) return std::nullopt;
  return std::string_view(begin, static_cast<size_t>(static_cast<const char*>(end) - begin));
}

ElfObject::ElfObject(const uint8_t* data, size_t size) : data_(data), size_(size) {
  const auto header = read<Elf64_Ehdr>(0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
      header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != kThisOrder ||
      header->e_type != ET_REL) {
    throw CallError("the object is not a relocatable ELF file");
  }
}

void ElfObject::require_this_machine() const {
  const uint16_t machine = read<Elf64_Ehdr>(0)->e_machine;
  if (machine != kThisMachine) {
    throw CallError("the object is for " + machine_name(machine) + ", this process runs on " +
                    machine_name(kThisMachine));
  }
}

std::optional<std::string_view> ElfObject::text_of(const std::string& symbol) const {
  const Elf64_Ehdr header = *read<Elf64_Ehdr>(0);
  const auto section = [&](uint64_t index) -> std::optional<Elf64_Shdr> {
    if (index >= header.e_shnum || header.e_shoff > size_) return std::nullopt;
    return read<Elf64_Shdr>(header.e_shoff + index * sizeof(Elf64_Shdr));
  };
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const auto table = section(i);
    if (!table || table->sh_type != SHT_SYMTAB) continue;
    const auto names = section(table->sh_link);
    if (!names) continue;
    for (uint64_t at = 0; at < table->sh_size; at += sizeof(Elf64_Sym)) {
      const auto entry = read<Elf64_Sym>(table->sh_offset + at);
      if (!entry) break;
      if (names->sh_offset > size_ || text_at(names->sh_offset + entry->st_name) != symbol) continue;
      const auto home = section(entry->st_shndx);
      if (!home || home->sh_type != SHT_PROGBITS || home->sh_offset > size_ || entry->st_value > size_)
        continue;
      return text_at(home->sh_offset + entry->st_value);
    }
  }
  return std::nullopt;
}

}  // namespace cudnn_jax
