#include <array>
#include <cstdlib>

#include "support/environment.hpp"

namespace flashjit {
namespace {

constexpr std::array<CachePlace, 2> kPlaces{{{"XDG_CACHE_HOME", "flashjit"}, {"HOME", ".cache/flashjit"}}};

}  // namespace

const char kPathSeparator = ':';

std::string environment_value(const char* name) {
  const char* value = ::secure_getenv(name);
  return value ? value : "";
}

std::span<const CachePlace> cache_places() { return kPlaces; }

}  // namespace flashjit
