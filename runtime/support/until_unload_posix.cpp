#include "support/until_unload.hpp"

#include <atomic>

namespace flashjit {
namespace {

struct Kept {
  const void* value;
  void (*destroy)(const void*);
  Kept* next;
};

/// Has no destructor, which would run too early.
std::atomic<Kept*>& last_kept() {
  static constinit std::atomic<Kept*> last = nullptr;
  return last;
}

/// The loader calls it after every destructor of a static object and every atexit handler.
[[gnu::destructor]] void destroy_all() {
  for (Kept* kept = last_kept().exchange(nullptr); kept != nullptr;) {
    kept->destroy(kept->value);
    delete std::exchange(kept, kept->next);
  }
}

}  // namespace

void destroy_at_unload(const void* value, void (*destroy)(const void*)) {
  auto* kept = new Kept{value, destroy, last_kept().load()};
  while (!last_kept().compare_exchange_weak(kept->next, kept)) continue;
}

}  // namespace flashjit
