#include <windows.h>

#include <array>

#include "support/environment.hpp"
#include "support/utf16.hpp"

namespace flashjit {
namespace {

constexpr std::array<CachePlace, 1> kPlaces{{{"LOCALAPPDATA", "flashjit"}}};

}  // namespace

const char kPathSeparator = ';';

// Windows has no setuid: a program that runs with more rights has an environment of its own.
std::string environment_value(const char* name) {
  const std::wstring wide = utf16_of(name);
  std::wstring value;
  for (DWORD size = ::GetEnvironmentVariableW(wide.c_str(), nullptr, 0); size > value.size();) {
    value.resize(size);
    size = ::GetEnvironmentVariableW(wide.c_str(), value.data(), size);
    if (size < value.size()) {
      value.resize(size);
      return utf8_of(value);
    }
  }
  return {};
}

std::span<const CachePlace> cache_places() { return kPlaces; }

}  // namespace flashjit
