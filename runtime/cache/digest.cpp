#include "cache/digest.hpp"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

namespace flashjit::cache {

std::string digest_of(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

bool is_hexadecimal(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == text.npos; }

Fields& Fields::add(std::string_view field) {
  bytes_ += fmt::format("{}:", field.size());
  bytes_ += field;
  return *this;
}

Fields& Fields::add(std::int64_t value) { return add(fmt::to_string(value)); }

}  // namespace flashjit::cache
