#include <windows.h>

#include "support/process.hpp"

namespace flashjit {

std::int64_t process_id() { return ::GetCurrentProcessId(); }

void run_after_others() { ::SetThreadPriority(::GetCurrentThread(), THREAD_PRIORITY_BELOW_NORMAL); }

}  // namespace flashjit
