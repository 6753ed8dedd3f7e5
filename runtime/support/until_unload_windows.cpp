#include "support/until_unload.hpp"

namespace flashjit {

// When Windows ends a process it ends the other threads first, wherever they are: what they hold stays as it
// is, and the system takes the memory back. To free it then is to risk a lock that nobody will open.
void destroy_at_unload(const void*, void (*)(const void*)) {}

}  // namespace flashjit
