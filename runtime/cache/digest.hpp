// XXH3's 128-bit digest: fast, and wide enough that accidents never collide. It is no defence against
// forgery.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace flashjit::cache {

/// 32 lower-case hexadecimal digits.
std::string digest_of(std::string_view bytes);

/// Whether all of it are lower-case hexadecimal digits, as digests are written.
bool is_hexadecimal(std::string_view text);

/// Fields run together unambiguously: each is preceded by its length.
class Fields {
 public:
  Fields& add(std::string_view field);
  Fields& add(std::int64_t value);
  std::string digest() const { return digest_of(bytes_); }

 private:
  std::string bytes_;
};

}  // namespace flashjit::cache
