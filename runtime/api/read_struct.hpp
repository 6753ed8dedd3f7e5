// Structs that cross the C interface begin with their size, so that a program built with another flashjit.h
// is refused before its members are read.
#pragma once

#include <cstddef>
#include <type_traits>

#include "support/refuse.hpp"

namespace flashjit {

/// `*given`, whose first member `struct_size` must be sizeof(T). Throws Error(invalid_argument) for null and
/// every other size.
template <class T>
const T& checked_struct(const char* name, const T* given) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0);
  if (!given) refuse("{} is null: give a {}.", name, name);
  if (given->struct_size != sizeof(T))
    refuse(
        "{0}.struct_size is {1}, and this library's {0} has {2} bytes: set it to sizeof({0}), and build the "
        "program with the flashjit.h of this library.",
        name, given->struct_size, sizeof(T));
  return *given;
}

/// A copy of it.
template <class T>
T read_struct(const char* name, const T* given) {
  return checked_struct(name, given);
}

}  // namespace flashjit
