// The functions of device.hpp, which kernels call.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tests/emulator/machine.hpp"

namespace flashjit_emulator {

const uint3& thread_index() { return current().index; }
const uint3& block_index() { return current().warp->block->index; }
const uint3& block_size() { return current().warp->block->size; }
const uint3& grid_size() { return current().warp->block->grid; }
void* static_shared(const void* key, unsigned bytes, unsigned alignment) {
  return current().warp->block->shared.variable(key, bytes, alignment);
}
void* dynamic_shared() { return current().warp->block->shared.dynamic(); }
unsigned shared_offset(const void* pointer) { return current().warp->block->shared.offset(pointer); }

int synchronise_block(bool holds) {
  Block& block = *current().warp->block;
  block.synchronise(0, 0, true, holds);
  return block.barriers[0].last_holding;
}

namespace {
struct Value {
  Exchange kind;
  unsigned value;
  int argument;
  unsigned result;
};

unsigned exchanged(const Value& mine, int lane, const Brought& brought, unsigned lanes) {
  const auto of = [&](int other) { return static_cast<const Value*>(brought[other])->value; };
  const auto from = [&](int other) {
    if (other < 0 || other >= kLanes) return mine.value;
    if (!(lanes >> other & 1)) fail(fmt::format("a shuffle from lane {}, which takes no part", other));
    return of(other);
  };
  unsigned result = mine.value;
  switch (mine.kind) {
    case Exchange::sync:
      return 0;
    case Exchange::shuffle:
      return from(mine.argument & (kLanes - 1));
    case Exchange::shuffle_up:
      return from(lane - mine.argument);
    case Exchange::shuffle_down:
      return from(lane + mine.argument);
    case Exchange::shuffle_xor:
      return from(lane ^ mine.argument);
    case Exchange::ballot:
      result = 0;
      for (int other = 0; other < kLanes; ++other)
        if (lanes >> other & 1) result |= of(other) << other;
      return result;
    case Exchange::least:
    case Exchange::greatest:
      for (int other = 0; other < kLanes; ++other) {
        if (!(lanes >> other & 1)) continue;
        const auto a = static_cast<int>(result), b = static_cast<int>(of(other));
        result = static_cast<unsigned>(mine.kind == Exchange::least ? std::min(a, b) : std::max(a, b));
      }
      return result;
  }
  return result;
}
}  // namespace

unsigned exchange(Exchange kind, unsigned lanes, unsigned value, int argument) {
  static const std::array<char, 8> instructions{};
  Value mine{kind, value, argument, 0};
  current().warp->gather(&instructions[static_cast<std::size_t>(kind)], lanes, &mine,
                         [](Warp&, const Brought& brought, unsigned arrived) {
                           for (int lane = 0; lane < kLanes; ++lane) {
                             if (!(arrived >> lane & 1)) continue;
                             Value& own = *static_cast<Value*>(brought[lane]);
                             own.result = exchanged(own, lane, brought, arrived);
                           }
                         });
  return mine.result;
}

}  // namespace flashjit_emulator

// The compiler announces every access to memory, as it does to ThreadSanitizer.
namespace {
using namespace flashjit_emulator;

/// Most accesses are to the thread's own variables, which no other sees.
inline bool is_on_stack(const void* at) {
  return at >= __builtin_frame_address(0) && at < current_stack_end();
}
inline void note_read(const void* at) {
  if (!is_on_stack(at)) touch_device_memory(at);
}
inline void note_write(const void* at, unsigned long bytes) {
  if (is_on_stack(at)) return;
  touch_device_memory(at);
  Fiber& thread = current();
  SharedMemory& shared = thread.warp->block->shared;
  if (shared.has(at)) shared.note_write(shared.offset(at), static_cast<unsigned>(bytes), thread);
}
}  // namespace

#define FLASHJIT_ACCESS extern "C" __attribute__((visibility("default"))) void

FLASHJIT_ACCESS __tsan_init() {}
FLASHJIT_ACCESS __tsan_func_entry(void*) {}
FLASHJIT_ACCESS __tsan_func_exit() {}
FLASHJIT_ACCESS __tsan_read_range(void* at, unsigned long) { note_read(at); }
FLASHJIT_ACCESS __tsan_write_range(void* at, unsigned long bytes) { note_write(at, bytes); }
#define FLASHJIT_ACCESSES(bytes)                                            \
  FLASHJIT_ACCESS __tsan_read##bytes(void* at) { note_read(at); }           \
  FLASHJIT_ACCESS __tsan_unaligned_read##bytes(void* at) { note_read(at); } \
  FLASHJIT_ACCESS __tsan_write##bytes(void* at) { note_write(at, bytes); }  \
  FLASHJIT_ACCESS __tsan_unaligned_write##bytes(void* at) { note_write(at, bytes); }
FLASHJIT_ACCESSES(1)
FLASHJIT_ACCESSES(2)
FLASHJIT_ACCESSES(4)
FLASHJIT_ACCESSES(8)
FLASHJIT_ACCESSES(16)
