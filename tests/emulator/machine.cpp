#include "tests/emulator/machine.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <ranges>
#include <stdexcept>
#include <utility>

namespace flashjit_emulator {

constexpr std::size_t kPage = 4096;

/// How a fiber is left and entered: makecontext() begins it, and _longjmp() goes on, as it asks nothing of
/// the kernel.
struct Fiber::Context {
  ucontext_t start;
  jmp_buf state;
  bool started = false;
};

Fiber::Fiber() : context(std::make_unique<Context>()) {}
Fiber::~Fiber() = default;
Fiber::Fiber(Fiber&&) noexcept = default;

namespace {

/// Stacks with a page before each that faults; kept for later launches.
class Stacks {
 public:
  static constexpr std::size_t kBytes = 1 << 17;

  char* take() {
    if (free_.empty()) add();
    char* stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void give_back(char* stack) { free_.push_back(stack); }

 private:
  void add() {
    constexpr std::size_t kCount = 256;
    void* memory = ::mmap(nullptr, kCount * kBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for stacks");
    for (std::size_t i = 0; i < kCount; ++i) {
      char* stack = static_cast<char*>(memory) + i * kBytes;
      ::mprotect(stack, kPage, PROT_NONE);
      free_.push_back(stack);
    }
  }

  std::vector<char*> free_;
};

class Machine {
 public:
  std::string run(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    launch_ = &launch;
    launcher_ = ::pthread_self();
    steadiness_ = 16u << 3 * random_below(4);
    patience_ = 2u << 3 * random_below(4);
    alarms_ = 0;
    takes_too_long_ = 0;
    std::string error;
    const FaultHandler handler;
    try {
      run_blocks();
    } catch (const std::runtime_error& failure) {
      error = failure.what();
    }
    in_flight_.clear();
    ready_.clear();
    clusters_.clear();
    return error;
  }

  Fiber& current() { return *running_; }
  void leave() {
    if (_setjmp(running_->context->state) == 0) _longjmp(scheduler_, kLeft);
  }
  [[noreturn]] void fail(const std::string& message) {
    error_ = message;
    _longjmp(scheduler_, kFailed);
  }
  void make_ready(Fiber& fiber) {
    Warp& warp = *fiber.warp;
    if (warp.ready == 0) ready_.push_back(&warp);
    warp.ready |= 1u << fiber.lane;
  }
  void spin() {
    spun_ = true;
    running_->warp->priority = random_below(4) == 0 ? random_priority() : --lowest_priority_;
    yield();
  }
  void yield() {
    make_ready(*running_);
    leave();
  }
  void start_copy(Block& to, Action copy) {
    ++to.in_flight;
    in_flight_.push_back({&to, std::move(copy)});
  }
  unsigned random_below(unsigned below) { return static_cast<unsigned>(random_() >> 32) % below; }
  /// What runs.
  std::string place() const {
    if (!running_) return "an asynchronous copy";
    std::string text = fmt::format("block {}, thread {}", running_->warp->block->index.x, running_->index.x);
    if (const Statement* statement = running_->statement)
      text += fmt::format(", which ran {}:{} last", statement->file, statement->line);
    return text;
  }

 private:
  enum Jump { kBegin, kLeft, kFailed };
  struct Copy {
    Block* to;
    Action action;
  };

  /// Makes a fault of a kernel the launch's failure, and a thread that runs for seconds without a pause.
  class FaultHandler {
   public:
    FaultHandler() {
      static char stack[1 << 16];
      const stack_t own{stack, 0, sizeof stack};
      ::sigaltstack(&own, &stack_before_);
      handle(SIGSEGV, &fault_before_, [](int signal, siginfo_t* info, void*) {
        if (!machine().runs_here())
          ::signal(signal, SIG_DFL);  // it comes again, and ends the process
        else
          machine().fail(fmt::format("a fault at address {} in {}", info->si_addr, machine().place()));
      });
      handle(SIGPROF, &alarm_before_, [](int, siginfo_t*, void*) { machine().check_progress(); });
      set_timer(kSecondsOfAlarm);
    }
    ~FaultHandler() {
      set_timer(0);
      ::sigaction(SIGPROF, &alarm_before_, nullptr);
      ::sigaction(SIGSEGV, &fault_before_, nullptr);
      ::sigaltstack(&stack_before_, nullptr);
    }

   private:
    static constexpr int kSecondsOfAlarm = 5;  // of the process's time

    static void handle(int signal, struct sigaction* before, void (*handler)(int, siginfo_t*, void*)) {
      struct sigaction action {};
      action.sa_sigaction = handler;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
      ::sigaction(signal, &action, before);
    }
    static void set_timer(int seconds) {
      const itimerval timer{{seconds, 0}, {seconds, 0}};
      ::setitimer(ITIMER_PROF, &timer, nullptr);
    }

    struct sigaction fault_before_ {
    }, alarm_before_{};
    stack_t stack_before_{};
  };

 public:
  static Machine& machine() {
    static Machine instance;
    return instance;
  }

 private:
  /// Whether this is the thread that launched.
  bool runs_here() const { return ::pthread_equal(launcher_, ::pthread_self()) != 0; }
  void check_progress() {
    if (!runs_here()) return;
    const std::uint64_t before = std::exchange(pauses_at_alarm_, pauses_);
    if (++alarms_ > kMostAlarms) takes_too_long_ = 1;
    if (running_ && pauses_ == before) fail("an endless loop in " + place());
  }

  /// Runs a fiber until it leaves, or an action, which may fail.
  template <class Run>
  void guarded(Run run) {
    ++pauses_;
    const int jump = _setjmp(scheduler_);
    if (jump == kBegin) run();
    running_ = nullptr;
    if (jump == kFailed) throw std::runtime_error(error_);
  }
  void resume(Fiber& fiber) {
    running_ = &fiber;
    guarded([&] {
      if (fiber.context->started) _longjmp(fiber.context->state, 1);
      fiber.context->started = true;
      ::setcontext(&fiber.context->start);
    });
  }
  static void run_thread() {
    Machine& own = machine();
    own.launch_->entry->call(own.launch_->parameters);
    own.end_thread();
  }
  [[noreturn]] void end_thread() {
    Fiber& fiber = *running_;
    if (std::ranges::any_of(fiber.bulk_copies, [](const auto& group) { return !group.empty(); }))
      fail(fmt::format("{} ended without waiting for its bulk copies", place()));
    ended_.push_back(static_cast<char*>(fiber.context->start.uc_stack.ss_sp));
    fiber.warp->lane_exits(fiber.lane);
    fiber.warp->block->thread_exits();
    _longjmp(scheduler_, kLeft);
  }

  void run_blocks() {
    const Launch& launch = *launch_;
    const unsigned per_multiprocessor = std::min(kSharedOfMultiprocessor / (launch.shared_bytes + 1024),
                                                 kThreadsOfMultiprocessor / launch.threads);
    const unsigned resident = kMultiprocessors * std::max(per_multiprocessor, 1u);
    const auto cluster = static_cast<unsigned>(launch.entry->cluster);
    unsigned next = 0, spins = 0;
    const auto blocks_alive = [&] { return static_cast<unsigned>(clusters_.size()) * cluster; };
    for (;;) {
      std::erase_if(clusters_, [](const auto& one) { return one->live == 0; });
      while (next < launch.grid && blocks_alive() + cluster <= std::max(resident, cluster)) {
        admit(next, cluster);
        next += cluster;
      }
      if (clusters_.empty()) return;
      if (takes_too_long_)
        throw std::runtime_error("the launch takes more than half a minute; now: " + report());
      if (!in_flight_.empty() && (ready_.empty() || spun_ || random_below(patience_) == 0)) {
        spun_ = false;
        finish_a_copy();
      } else if (ready_.empty()) {
        throw std::runtime_error("a deadlock: " + report());
      } else {
        spun_ = false;
        run_warp(take_warp());
        spins = spun_ ? spins + 1 : 0;
        if (spins > kMostSpins && in_flight_.empty())
          throw std::runtime_error("an endless wait: " + report());
      }
    }
  }

  void admit(unsigned first, unsigned count) {
    auto cluster = std::make_unique<Cluster>();
    for (unsigned rank = 0; rank < count; ++rank) {
      cluster->blocks.push_back(std::make_unique<Block>(*cluster, rank, *launch_, first + rank));
      for (Warp& warp : cluster->blocks.back()->warps) {
        draw_priority(warp);
        warp.elected = random_below(kLanes);
        for (Fiber& fiber : warp.lanes) begin(fiber);
      }
    }
    clusters_.push_back(std::move(cluster));
  }
  void begin(Fiber& fiber) {
    ucontext_t& start = fiber.context->start;
    ::getcontext(&start);
    for (; !ended_.empty(); ended_.pop_back()) stacks_.give_back(ended_.back());
    start.uc_stack.ss_sp = stacks_.take();
    start.uc_stack.ss_size = Stacks::kBytes;
    ::makecontext(&start, &Machine::run_thread, 0);
    make_ready(fiber);
  }

  int random_priority() { return static_cast<int>(random_below(1u << 30)); }
  /// Anew, of a warp or of its warpgroup.
  void draw_priority(Warp& warp) {
    std::vector<Warp>& all = warp.block->warps;
    const auto number = static_cast<std::size_t>(&warp - all.data());
    std::size_t first = number, end = number + 1;
    if (random_below(2) == 0) first = number / 4 * 4, end = std::min(first + 4, all.size());
    const int priority = random_priority();
    for (std::size_t i = first; i < end; ++i) all[i].priority = priority;
  }
  /// That of the highest priority. A warp may so run far ahead of others.
  Warp& take_warp() {
    const auto first = std::ranges::max_element(ready_, {}, &Warp::priority);
    Warp& warp = **first;
    *first = ready_.back();
    ready_.pop_back();
    if (random_below(steadiness_) == 0) draw_priority(warp);
    return warp;
  }
  void run_warp(Warp& warp) {
    const unsigned ready = std::exchange(warp.ready, 0u), first = random_below(kLanes);
    for (unsigned i = 0; i < kLanes; ++i) {
      const unsigned lane = (first + i) % kLanes;
      if (ready >> lane & 1) resume(warp.lanes[lane]);
    }
  }
  void finish_a_copy() {
    const unsigned which = random_below(static_cast<unsigned>(in_flight_.size()));
    std::swap(in_flight_[which], in_flight_.back());
    const Copy copy = std::move(in_flight_.back());
    in_flight_.pop_back();
    guarded([&] { copy.action(); });
    --copy.to->in_flight;
  }

  /// Who waits for what: those together that wait for the same at the same place, the most first.
  std::string report() const {
    struct Waiting {
      std::string what;
      int threads;
      uint3 block, thread;  ///< one of them
    };
    std::vector<Waiting> all;
    const auto add = [&](const Block& block, const Fiber& fiber) {
      const Wait& wait = fiber.waits_for;
      std::string what = fmt::format(fmt::runtime(wait.format), wait.a, wait.b, wait.c, wait.d);
      if (const Statement* last = fiber.statement)
        what += fmt::format(", at or after {}:{}", last->file, last->line);
      const auto same = std::ranges::find(all, what, &Waiting::what);
      if (same == all.end())
        all.push_back({what, 1, block.index, fiber.index});
      else
        ++same->threads;
    };
    for (const auto& cluster : clusters_)
      for (const auto& block : cluster->blocks)
        for (const Warp& warp : block->warps)
          for (const Fiber& fiber : warp.lanes)
            if (warp.live >> fiber.lane & 1) add(*block, fiber);
    std::ranges::sort(all, std::greater(), &Waiting::threads);
    constexpr std::size_t kMostLines = 16;
    std::string text;
    for (const Waiting& waiting : all | std::views::take(kMostLines))
      text += fmt::format("\n  {} threads, such as {} of block {}, wait for {}", waiting.threads,
                          waiting.thread.x, waiting.block.x, waiting.what);
    return text;
  }

  static std::uint64_t seed() {
    const char* text = std::getenv("FLASHJIT_EMULATOR_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 1;
  }

  static constexpr unsigned kMostSpins = 100'000;
  std::mutex mutex_;
  const Launch* launch_ = nullptr;
  pthread_t launcher_{};
  std::mt19937_64 random_{seed()};
  Stacks stacks_;
  std::vector<char*> ended_;  ///< stacks of threads that have ended
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Warp*> ready_;
  std::vector<Copy> in_flight_;
  Fiber* running_ = nullptr;
  static constexpr int kMostAlarms = 6;
  int alarms_ = 0;
  volatile sig_atomic_t takes_too_long_ = 0;
  std::uint64_t pauses_ = 0, pauses_at_alarm_ = 0;  ///< how often threads gave way
  bool spun_ = false;
  int lowest_priority_ = 0;
  unsigned steadiness_ = 0;  ///< for how many turns a priority lasts
  unsigned patience_ = 0;    ///< for how many turns a copy may wait
  std::string error_;
  jmp_buf scheduler_;
};

Machine& machine() { return Machine::machine(); }

}  // namespace

std::string launch(const Launch& launch) { return machine().run(launch); }
void fail(const std::string& message) { machine().fail(message); }
Fiber& current() { return machine().current(); }
unsigned random_below(unsigned below) { return machine().random_below(below); }
void start_copy(Block& to, Action copy) { machine().start_copy(to, std::move(copy)); }
void spin() {
  current().waits_for = {"what another thread does"};
  machine().spin();
}
void reach_atomic() {
  if (random_below(4) == 0) machine().yield();
}
void park(const Wait& waits_for) {
  current().waits_for = waits_for;
  machine().leave();
}
void wake(Fiber& fiber) {
  fiber.waits_for = {};
  machine().make_ready(fiber);
}

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
constexpr unsigned kFirstVariable = kPage, kFirstDynamic = 5 * kPage, kDynamicAlignment = 1024;
constexpr unsigned kRankShift = 24;

constexpr unsigned rounded_up(unsigned bytes, unsigned unit) { return (bytes + unit - 1) / unit * unit; }
}  // namespace

SharedMemory::SharedMemory(unsigned dynamic_bytes)
    : size_(rounded_up(kFirstDynamic + dynamic_bytes, kPage)),
      dynamic_(size_ - rounded_up(dynamic_bytes, kDynamicAlignment)),
      end_of_variables_(kFirstVariable) {
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
  if (end_of_variables_ > kFirstDynamic) fail("a block's variables are larger than the emulator expects");
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
        bytes, dynamic_, size_, machine().place()));
  return base_ + offset;
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
