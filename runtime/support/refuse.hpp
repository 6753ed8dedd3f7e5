// How checks say no.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "flashjit/error.hpp"

namespace flashjit {

/// For what a caller gives.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(fmt::format_string<Parts...> format, Parts&&... parts) {
  throw Error(ErrorCode::invalid_argument, fmt::format(format, std::forward<Parts>(parts)...));
}

/// For what a file holds.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void damaged(fmt::format_string<Parts...> format, Parts&&... parts) {
  throw Error(ErrorCode::io, fmt::format(format, std::forward<Parts>(parts)...));
}

}  // namespace flashjit
