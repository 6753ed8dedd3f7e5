// Values that are made once and serve to the very end. Destructors of static objects and atexit handlers run
// in the reverse order of their making, so one of the program's may call the library after the library's own
// static objects have gone.
#pragma once

#include <utility>

namespace flashjit {

/// Destroys it when the library is unloaded, or when all that runs at exit has run; on Windows never.
void destroy_at_unload(const void* value, void (*destroy)(const void*));

/// Keeps the value until then. For a function's static reference: made once, by whichever thread comes first.
template <class Value>
const Value& until_unload(Value value) {
  const auto* kept = new Value(std::move(value));
  destroy_at_unload(kept, [](const void* it) { delete static_cast<const Value*>(it); });
  return *kept;
}

}  // namespace flashjit
