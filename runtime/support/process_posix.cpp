#include <unistd.h>

#include "support/process.hpp"

namespace flashjit {

std::int64_t process_id() { return ::getpid(); }

void run_after_others() { [[maybe_unused]] const int now = ::nice(10); }  // Linux: of the thread

}  // namespace flashjit
