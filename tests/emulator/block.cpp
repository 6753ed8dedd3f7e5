#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tests/emulator/machine.hpp"

namespace flashjit_emulator {

void complete(Groups& groups, std::size_t pending) {
  while (groups.size() > pending + 1) {
    for (const Action& action : groups.front()) action();
    groups.erase(groups.begin());
  }
}

void Products::commit() {
  groups.push_back(std::exchange(open, {}));
  ++committed;
}
void Products::complete(std::uint64_t number) {
  for (; completed < number; ++completed) {
    for (const Action& product : groups.front()) product();
    groups.pop_front();
  }
}

void Warp::gather(const void* instruction, unsigned wanted, void* mine, Together act) {
  const Fiber& fiber = current();
  auto found = std::ranges::find_if(gatherings_, [&](const Gathering& one) {
    return one.instruction == instruction && one.lanes == wanted;
  });
  if (found == gatherings_.end()) found = gatherings_.insert(found, {instruction, wanted, 0, {}, act});
  found->arrived |= 1u << fiber.lane;
  found->brought[fiber.lane] = mine;
  if (!release_if_complete(found - gatherings_.begin())) park({"other lanes of its warp"});
}
bool Warp::release_if_complete(std::size_t index) {
  const Gathering gathering = gatherings_[index];
  if (gathering.arrived != (gathering.lanes & live)) return false;
  gatherings_.erase(gatherings_.begin() + static_cast<std::ptrdiff_t>(index));
  gathering.act(*this, gathering.brought, gathering.arrived);
  for (Fiber& fiber : lanes)
    if (gathering.arrived >> fiber.lane & 1 && &fiber != &current()) wake(fiber);
  return true;
}
void Warp::lane_exits(int lane) {
  live &= ~(1u << lane);
  for (std::size_t i = 0; i < gatherings_.size();)
    if (!release_if_complete(i)) ++i;
}

void Barrier::release_if_complete(int threads) {
  if (arrived == 0 || arrived < threads) return;
  last_holding = holding;
  arrived = holding = 0;
  ++phase;
  for (Fiber* fiber : std::exchange(waiting, {})) wake(*fiber);
}

Block::Block(Cluster& cluster, unsigned rank, const Launch& launch, unsigned index)
    : cluster(cluster),
      rank(rank),
      index{index, 0, 0},
      size{launch.threads, 1, 1},
      grid{launch.grid, 1, 1},
      shared(launch.shared_bytes),
      live(static_cast<int>(launch.threads)),
      warps(launch.threads / kLanes) {
  cluster.live += live;
  for (std::size_t w = 0; w < warps.size(); ++w) {
    Warp& warp = warps[w];
    warp.block = this;
    warp.live = kAllLanes;
    warp.lanes.resize(kLanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      Fiber& fiber = warp.lanes[lane];
      fiber.warp = &warp;
      fiber.lane = lane;
      fiber.index.x = static_cast<unsigned>(w * kLanes) + static_cast<unsigned>(lane);
    }
  }
}

void Block::synchronise(int name, int threads, bool waits, bool holds) {
  Barrier& barrier = barriers[name];
  if (barrier.arrived > 0 && barrier.expected != threads)
    fail(fmt::format("barrier {} of block {} is used with {} and {} threads at once", name, index.x,
                     barrier.expected, threads));
  barrier.expected = threads;
  ++barrier.arrived;
  barrier.holding += holds;
  const std::uint64_t phase = barrier.phase;
  barrier.release_if_complete(threads > 0 ? threads : live);
  if (!waits || barrier.phase != phase) return;
  barrier.waiting.push_back(&current());
  park({"barrier {} of {} threads", static_cast<unsigned>(name),
        static_cast<unsigned>(threads > 0 ? threads : live)});
}

void Block::thread_exits() {
  --live;
  --cluster.live;
  if (barriers[0].expected == 0) barriers[0].release_if_complete(live);
  cluster.barrier.release_if_complete(cluster.live);
  if (live == 0 && in_flight > 0)
    fail(fmt::format("block {} ended while {} copies to its shared memory were in flight", index.x,
                     in_flight));
}

void arrive_at_cluster() {
  Cluster& cluster = current().warp->block->cluster;
  current().cluster_phase = cluster.barrier.phase;
  ++cluster.barrier.arrived;
  cluster.barrier.release_if_complete(cluster.live);
}
void wait_for_cluster() {
  Barrier& barrier = current().warp->block->cluster.barrier;
  if (barrier.phase != current().cluster_phase) return;
  barrier.waiting.push_back(&current());
  park({"the cluster's barrier"});
}

namespace {
constexpr unsigned kFirstVariable = kPage, kMostVariables = 8 * kPage, kDynamicAlignment = 1024;
constexpr unsigned kMostShared = 1u << 18;  ///< that a descriptor of wgmma can address
constexpr unsigned kRankShift = 24, kWord = 4;
constexpr std::uint16_t kCopied = 0xffff;  // by cp.async, in the place of a thread

constexpr unsigned rounded_up(unsigned bytes, unsigned unit) { return (bytes + unit - 1) / unit * unit; }
constexpr unsigned shared_bytes(unsigned dynamic_bytes) {
  return std::min(kFirstVariable + kMostVariables + rounded_up(dynamic_bytes, kPage), kMostShared);
}
}  // namespace

SharedMemory::SharedMemory(unsigned dynamic_bytes)
    : size_(shared_bytes(dynamic_bytes)),
      dynamic_(size_ - rounded_up(dynamic_bytes, kDynamicAlignment)),
      end_of_variables_(kFirstVariable),
      writers_(size_ / kWord) {
  void* memory = ::mmap(nullptr, size_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for a block");
  base_ = static_cast<char*>(memory);
  std::memset(base_ + kFirstVariable, 0xff, size_ - kFirstVariable);  // NaN of every type
  ::mprotect(base_, kFirstVariable, PROT_NONE);
  ::mprotect(base_ + size_, kPage, PROT_NONE);
}
SharedMemory::~SharedMemory() { ::munmap(base_, size_ + kPage); }

void* SharedMemory::variable(const void* key, unsigned bytes, unsigned alignment) {
  const auto found = std::ranges::find(variables_, key, &Variable::key);
  if (found != variables_.end()) return base_ + found->offset;
  const unsigned offset = rounded_up(end_of_variables_, alignment);
  end_of_variables_ = offset + bytes;
  if (end_of_variables_ > dynamic_) fail("a block's variables are larger than the emulator expects");
  variables_.push_back({key, offset});
  return base_ + offset;
}
unsigned SharedMemory::offset(const void* pointer) const {
  const auto offset = static_cast<const char*>(pointer) - base_;
  if (offset < 0 || offset > size_) fail("__cvta_generic_to_shared of an address outside of shared memory");
  return static_cast<unsigned>(offset);
}
char* SharedMemory::at(unsigned offset, unsigned bytes) const {
  if (offset < kFirstVariable || offset + bytes > size_)
    fail(fmt::format(
        "shared memory was accessed at {:#x}, {} bytes; the dynamic part is {:#x} to {:#x}, in {}", offset,
        bytes, dynamic_, size_, what_runs()));
  return base_ + offset;
}

void SharedMemory::note_write(unsigned offset, unsigned bytes, Fiber& by) {
  const auto thread = static_cast<std::uint16_t>(by.index.x + 1);
  for (unsigned word = offset / kWord; word <= (offset + bytes - 1) / kWord; ++word) {
    if (writers_[word] != thread) by.written.push_back(word);
    writers_[word] = thread;
  }
}
void SharedMemory::note_copy(unsigned offset, unsigned bytes) {
  for (unsigned word = offset / kWord; word <= (offset + bytes - 1) / kWord; ++word) {
    if (writers_[word] != kCopied) copied_.push_back(word);
    writers_[word] = kCopied;
  }
}
void SharedMemory::fence(Fiber& by) {
  for (const unsigned word : by.written)
    if (writers_[word] == by.index.x + 1) writers_[word] = 0;
  by.written.clear();
  for (const unsigned word : copied_)
    if (writers_[word] == kCopied) writers_[word] = 0;
  copied_.clear();
}
char* SharedMemory::read_async(unsigned offset, unsigned bytes) const {
  char* from = at(offset, bytes);
  for (unsigned word = offset / kWord; word <= (offset + bytes - 1) / kWord; ++word)
    if (writers_[word] != 0)
      fail(fmt::format(
          "wgmma or the TMA unit reads shared memory at {:#x}, which {} has written without a "
          "fence.proxy.async since, in {}",
          word * kWord, writers_[word] == kCopied ? "cp.async" : fmt::format("thread {}", writers_[word] - 1),
          what_runs()));
  return from;
}
char* SharedMemory::write_async(unsigned offset, unsigned bytes) {
  char* to = at(offset, bytes);
  std::fill_n(&writers_[offset / kWord], (bytes + kWord - 1) / kWord, std::uint16_t{0});
  return to;
}

SharedPlace shared_place(unsigned address) {
  Block* block = current().warp->block;
  const unsigned rank = address >> kRankShift;
  if (rank == 0) return {block, address};
  block = block->cluster.blocks[rank - 1].get();
  if (block->live == 0)
    fail(fmt::format("shared memory of block {} was accessed, which has ended", block->index.x));
  return {block, address & ((1u << kRankShift) - 1)};
}
unsigned map_to_rank(unsigned address, unsigned rank) {
  if (rank >= current().warp->block->cluster.blocks.size()) fail(fmt::format("mapa to rank {}", rank));
  return (rank + 1) << kRankShift | address;
}

namespace {

/// As it is in memory.
struct MBarrier {
  std::uint64_t pending : 20, expected : 20, phase : 1;
  std::int64_t bytes : 23;
};
static_assert(sizeof(MBarrier) == 8);
constexpr std::uint64_t kMostArrivals = (1u << 20) - 1;

void store(SharedPlace place, const MBarrier& barrier) { std::memcpy(place.bytes(8), &barrier, 8); }
MBarrier load(SharedPlace place) {
  if (place.offset % 8 != 0) fail(fmt::format("an mbarrier at {:#x}", place.offset));
  MBarrier barrier;
  std::memcpy(&barrier, place.bytes(8), 8);
  if (barrier.expected == kMostArrivals)
    fail(fmt::format("the mbarrier at {:#x} of block {} is used before it is initialised", place.offset,
                     place.block->index.x));
  return barrier;
}

void change(SharedPlace place, int arrivals, int bytes) {
  MBarrier barrier = load(place);
  if (barrier.pending < static_cast<unsigned>(arrivals))
    fail(fmt::format("too many arrivals at the mbarrier at {:#x} of block {}", place.offset,
                     place.block->index.x));
  barrier.pending -= static_cast<unsigned>(arrivals);
  barrier.bytes += bytes;
  const bool complete = barrier.pending == 0 && barrier.bytes == 0;
  if (complete) {
    barrier.pending = barrier.expected;
    barrier.phase ^= 1;
  }
  store(place, barrier);
  if (!complete) return;
  std::erase_if(place.block->waiters, [&](const Block::Waiter& waiter) {
    if (waiter.barrier == place.offset) wake(*waiter.fiber);
    return waiter.barrier == place.offset;
  });
}

}  // namespace

void barrier_init(SharedPlace barrier, unsigned arrivals) {
  MBarrier fresh{};
  fresh.pending = fresh.expected = arrivals;
  store(barrier, fresh);
}
void barrier_arrive(SharedPlace barrier, int expected_bytes) { change(barrier, 1, expected_bytes); }
void barrier_complete(SharedPlace barrier, int bytes) { change(barrier, 0, -bytes); }
bool barrier_is_complete(SharedPlace barrier, unsigned parity) { return load(barrier).phase != parity; }
void barrier_wait(SharedPlace barrier, unsigned parity) {
  while (!barrier_is_complete(barrier, parity)) {
    barrier.block->waiters.push_back({barrier.offset, &current()});
    const MBarrier now = load(barrier);
    park({"the mbarrier at {:#x}, parity {}, where {} arrivals and {} bytes were missing", barrier.offset,
          parity, static_cast<unsigned>(now.pending), static_cast<unsigned>(now.bytes)});
  }
}

}  // namespace flashjit_emulator
