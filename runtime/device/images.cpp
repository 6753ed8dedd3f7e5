#include "device/images.hpp"

#include <elf.h>

#include <algorithm>
#include <cstring>

namespace flashjit::device {
namespace {

/// A structure at an offset; all zeros where the bytes end before.
template <class T>
T read_at(std::string_view bytes, std::size_t offset) {
  T value{};
  if (offset <= bytes.size() && bytes.size() - offset >= sizeof(T))
    std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

/// Where the ELF file at the beginning of the bytes ends, if it is one: behind its sections and its tables.
std::size_t end_of_first(std::string_view bytes) {
  const auto header = read_at<Elf64_Ehdr>(bytes, 0);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64)
    return bytes.size();
  const auto sections = std::uint64_t{header.e_shnum} * sizeof(Elf64_Shdr);
  const auto segments = std::uint64_t{header.e_phnum} * sizeof(Elf64_Phdr);
  std::uint64_t end = std::max({sizeof(header), header.e_shoff + sections, header.e_phoff + segments});
  for (std::uint64_t at = 0; at < sections; at += sizeof(Elf64_Shdr)) {
    const auto section = read_at<Elf64_Shdr>(bytes, header.e_shoff + at);
    if (section.sh_type != SHT_NOBITS) end = std::max(end, section.sh_offset + section.sh_size);
  }
  return std::min<std::uint64_t>(end, bytes.size());
}

}  // namespace

std::vector<std::string_view> images(std::string_view cubin) {
  std::vector<std::string_view> found;
  while (!cubin.empty()) {
    const std::size_t end = end_of_first(cubin);
    // A compiler may fill up what it writes.
    const std::size_t next = std::min(cubin.find(ELFMAG, end), cubin.size());
    found.push_back(cubin.substr(0, next));
    cubin.remove_prefix(next);
  }
  return found;
}

}  // namespace flashjit::device
