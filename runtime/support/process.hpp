// The process itself.
#pragma once

#include <cstdint>

namespace flashjit {

/// Another one in a child that was forked.
std::int64_t process_id();

/// From now on the calling thread, and on Linux those that it starts, get a processor after other threads.
void run_after_others();

}  // namespace flashjit
