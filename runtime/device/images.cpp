#include "device/images.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace flashjit::device {
namespace {

// The parts of an ELF file that are read; not every system brings its header.
constexpr std::string_view kMagic = "\177ELF";
constexpr std::uint8_t kClass64 = 2;
constexpr std::uint32_t kNoBits = 8;
constexpr std::uint64_t kSegmentHeaderBytes = 56;
struct FileHeader {
  std::uint8_t magic[4], of_class, rest[11];
  std::uint16_t type, machine;
  std::uint32_t version;
  std::uint64_t entry, segments_at, sections_at;
  std::uint32_t flags;
  std::uint16_t header_size, segment_size, segments, section_size, sections, names;
};
struct SectionHeader {
  std::uint32_t name, type;
  std::uint64_t flags, address, offset, size;
  std::uint32_t link, info;
  std::uint64_t alignment, entry_size;
};
static_assert(sizeof(FileHeader) == 64 && sizeof(SectionHeader) == 64);

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
  const auto header = read_at<FileHeader>(bytes, 0);
  if (!bytes.starts_with(kMagic) || header.of_class != kClass64) return bytes.size();
  const auto sections = std::uint64_t{header.sections} * sizeof(SectionHeader);
  const auto segments = std::uint64_t{header.segments} * kSegmentHeaderBytes;
  std::uint64_t end =
      std::max({std::uint64_t{sizeof(header)}, header.sections_at + sections, header.segments_at + segments});
  for (std::uint64_t at = 0; at < sections; at += sizeof(SectionHeader)) {
    const auto section = read_at<SectionHeader>(bytes, header.sections_at + at);
    if (section.type != kNoBits) end = std::max(end, section.offset + section.size);
  }
  return std::min<std::uint64_t>(end, bytes.size());
}

}  // namespace

std::vector<std::string_view> images(std::string_view cubin) {
  std::vector<std::string_view> found;
  while (!cubin.empty()) {
    const std::size_t end = end_of_first(cubin);
    // A compiler may fill up what it writes.
    const std::size_t next = std::min(cubin.find(kMagic, end), cubin.size());
    found.push_back(cubin.substr(0, next));
    cubin.remove_prefix(next);
  }
  return found;
}

}  // namespace flashjit::device
