// The machine that emulated kernels run on: a fiber a thread, in an order that a seed decides, and what
// threads wait for. What is asynchronous happens as late as its waits allow, or sooner, as the seed decides.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/emulator/device.hpp"

namespace flashjit_emulator {

constexpr std::size_t kPage = 4096;
constexpr int kLanes = 32;
constexpr unsigned kAllLanes = ~0u;
constexpr unsigned kMultiprocessors = 4;
constexpr unsigned kSharedOfMultiprocessor = 233472, kThreadsOfMultiprocessor = 2048;

struct Launch {
  const Entry* entry;
  unsigned grid, threads, shared_bytes;
  void** parameters;
  bool early;  ///< may start before the grid before it has ended: must wait for that before it touches memory
  bool (*is_device_memory)(const void* address);
};
/// Runs a grid to its end. Returns what went wrong; empty: nothing.
std::string launch(const Launch& launch);

/// Ends the launch with this message. It does not throw, since a kernel's frames are on the stack.
[[noreturn]] void fail(const std::string& message);

struct Warp;
struct Block;
using Action = std::function<void()>;
using Groups = std::vector<std::vector<Action>>;  ///< the oldest first; the last is not committed

/// Does what all but the `pending` newest committed groups have left to do.
void complete(Groups& groups, std::size_t pending);

/// A warp's products by wgmma, in groups.
struct Products {
  std::vector<Action> open;  ///< before their commit
  std::deque<std::vector<Action>> groups;
  std::uint64_t committed = 0, completed = 0;  ///< groups

  void commit();
  /// Computes all groups up to this number.
  void complete(std::uint64_t number);
};

/// What a thread waits for, as the report of a deadlock formats it.
struct Wait {
  const char* format = "its turn";
  unsigned a = 0, b = 0, c = 0, d = 0;
};

/// A CUDA thread.
struct Fiber {
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;

  Warp* warp = nullptr;
  int lane = 0;
  uint3 index{};
  Wait waits_for;
  const Statement* statement = nullptr;  ///< the last that ran
  bool waited_for_prior_grid = false;
  std::uint64_t cluster_phase = 0;   ///< in which it arrived at the cluster's barrier
  std::vector<unsigned> written;     ///< words of shared memory, since its last fence.proxy.async
  Groups copies{1}, bulk_copies{1};  ///< cp.async; bulk copies out of shared memory
  struct Context;
  std::unique_ptr<Context> context;
};

/// What lanes bring to an instruction that they execute together.
using Brought = std::array<void*, kLanes>;
using Together = void (*)(Warp& warp, const Brought& brought, unsigned lanes);

struct Warp {
  Block* block = nullptr;
  unsigned live = 0, ready = 0;
  int priority = 0;
  unsigned elected = 0;  ///< the lane that elect.sync chooses
  std::vector<Fiber> lanes;
  Products products;  ///< its part of wgmma's

  /// Parks until all of `lanes` are here; the last to come acts for all.
  void gather(const void* instruction, unsigned lanes, void* mine, Together act);
  void lane_exits(int lane);

 private:
  struct Gathering {
    const void* instruction;
    unsigned lanes, arrived;
    Brought brought;
    Together act;
  };
  bool release_if_complete(std::size_t index);

  std::vector<Gathering> gatherings_;
};

/// A barrier of threads that count.
struct Barrier {
  int arrived = 0, expected = 0;
  int holding = 0, last_holding = 0;  ///< threads that brought true
  std::uint64_t phase = 0;
  std::vector<Fiber*> waiting;

  void release_if_complete(int threads);
};

/// A block's shared memory: a window of addresses from 0 on, with pages before and behind it that fault.
class SharedMemory {
 public:
  explicit SharedMemory(unsigned dynamic_bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* dynamic() const { return base_ + dynamic_; }
  void* variable(const void* key, unsigned bytes, unsigned alignment);
  unsigned offset(const void* pointer) const;
  char* at(unsigned offset, unsigned bytes) const;
  bool has(const void* pointer) const { return pointer >= base_ && pointer < base_ + size_; }

  // What threads write, wgmma and the TMA unit may read after the thread's fence.proxy.async.
  void note_write(unsigned offset, unsigned bytes, Fiber& by);
  /// cp.async that arrived on an mbarrier: a fence of whoever waited for that will do.
  void note_copy(unsigned offset, unsigned bytes);
  void fence(Fiber& by);
  char* read_async(unsigned offset, unsigned bytes) const;
  char* write_async(unsigned offset, unsigned bytes);

 private:
  struct Variable {
    const void* key;
    unsigned offset;
  };
  char* base_;
  unsigned size_, dynamic_, end_of_variables_;
  std::vector<Variable> variables_;
  std::vector<std::uint16_t> writers_;  ///< of each word: the thread that wrote it without a fence; 0: none
  std::vector<unsigned> copied_;        ///< words that cp.async wrote, since the last fence
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  Barrier barrier;
  int live = 0;  ///< threads
};

struct Block {
  Block(Cluster& cluster, unsigned rank, const Launch& launch, unsigned index);

  /// bar.sync, bar.arrive; of 0 threads: all that have not exited.
  void synchronise(int name, int threads, bool waits, bool holds = false);
  void thread_exits();

  struct Waiter {
    unsigned barrier;
    Fiber* fiber;
  };
  Cluster& cluster;
  unsigned rank;
  uint3 index, size, grid;
  SharedMemory shared;
  int live = 0;       ///< threads
  int in_flight = 0;  ///< copies to this shared memory
  std::array<Barrier, 16> barriers;
  std::vector<Waiter> waiters;               ///< for mbarriers
  std::vector<Fiber*> waiting_for_products;  ///< that other warps of their warpgroups commit
  std::vector<Warp> warps;
};

Fiber& current();
/// The first address behind the running thread's stack.
inline const char*& current_stack_end() {
  static const char* end = nullptr;
  return end;
}
/// The thread that runs, and the last asm statement that it ran.
std::string what_runs();
/// Fails where the grid before may still write there, or read.
void touch_device_memory(const void* address);
/// The same of a tensor that the grid before does not write.
void touch_input(const void* address);
void let_next_grid_start();
void park(const Wait& waits_for);
void wake(Fiber& fiber);
/// Uniform in [0, below).
unsigned random_below(unsigned below);
/// A copy to shared memory, which happens when the machine likes: at the latest when no thread can run.
void start_copy(Block& to, Action copy);

/// What an address of 32 bits names: shared memory of this block, or, as mapa makes them, of another of its
/// cluster.
struct SharedPlace {
  Block* block;
  unsigned offset;

  char* bytes(unsigned count) const { return block->shared.at(offset, count); }
  char* read_async(unsigned count) const { return block->shared.read_async(offset, count); }
  char* write_async(unsigned count) const { return block->shared.write_async(offset, count); }
};
SharedPlace shared_place(unsigned address);
unsigned map_to_rank(unsigned address, unsigned rank);

void arrive_at_cluster();
void wait_for_cluster();

// mbarriers: eight bytes of shared memory.
void barrier_init(SharedPlace barrier, unsigned arrivals);
void barrier_arrive(SharedPlace barrier, int expected_bytes);
void barrier_complete(SharedPlace barrier, int bytes);
bool barrier_is_complete(SharedPlace barrier, unsigned parity);
void barrier_wait(SharedPlace barrier, unsigned parity);

}  // namespace flashjit_emulator
