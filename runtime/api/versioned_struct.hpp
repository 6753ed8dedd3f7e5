// Structs that cross the C ABI tell their size, so that an old program and a new library understand each
// other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "support/refuse.hpp"

namespace flashjit {

/// A copy of `*given`, whose first member `struct_size` says how much of T the caller knows: all of it, or
/// one of the `former` sizes, and then the rest is zero. Throws Error(invalid_argument) for null and every
/// other size.
template <class T>
T read_struct(const char* name, const T* given, std::initializer_list<std::size_t> former = {}) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0);
  if (!given) refuse("{} is null: give a {}.", name, name);
  const std::size_t size = given->struct_size;
  if (size > sizeof(T))
    refuse(
        "{}.struct_size is {}, and this library knows {} bytes: the program was built with a newer "
        "flashjit.h; install the library that belongs to it.",
        name, size, sizeof(T));
  if (size != sizeof(T) && std::find(former.begin(), former.end(), size) == former.end())
    refuse("{}.struct_size is {}: set it to sizeof({}), which is {}.", name, size, name, sizeof(T));
  T known{};
  std::memcpy(&known, given, size);
  return known;
}

}  // namespace flashjit
