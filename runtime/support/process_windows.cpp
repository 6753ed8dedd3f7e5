#include <windows.h>

#include "support/process.hpp"

namespace flashjit {

std::int64_t process_id() { return ::GetCurrentProcessId(); }

}  // namespace flashjit
