// The process itself.
#pragma once

#include <cstdint>

namespace flashjit {

/// Another one in a child that was forked.
std::int64_t process_id();

}  // namespace flashjit
