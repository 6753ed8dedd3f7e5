#include "tests/emulator/machine.hpp"

#include <fmt/format.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>
#include <utility>

#include "tests/emulator/faults.hpp"

namespace flashjit_emulator {

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
  static Machine& machine() {
    static Machine instance;
    return instance;
  }

  std::string run(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    launch_ = &launch;
    inputs_are_written_ = !next_starts_early_;
    next_starts_early_ = false;
    steadiness_ = 16u << 3 * random_below(4);
    patience_ = 2u << 3 * random_below(4);
    alarms_ = 0;
    takes_too_long_ = 0;
    std::string error;
    const FaultHandler handler(
        [](const void* address) {
          machine().fail(fmt::format("a fault at address {} in {}", address, machine().what_runs()));
        },
        [] { machine().check_progress(); });
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
  void let_next_grid_start() {
    if (launch_->early && !running_->waited_for_prior_grid) next_starts_early_ = true;
  }
  /// An input's tensor map, which the grid before does not write.
  void touch_input(const void* address) {
    if (!inputs_are_written_) touch_device_memory(address);
  }
  void touch_device_memory(const void* address) {
    if (launch_->early && !running_->waited_for_prior_grid && launch_->is_device_memory(address))
      fail(what_runs() + " accesses memory before it has waited for the grid before (griddepcontrol.wait)");
  }
  std::string what_runs() const {
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

  /// Every few seconds.
  void check_progress() {
    const std::uint64_t before = std::exchange(pauses_at_alarm_, pauses_);
    if (++alarms_ > kMostAlarms) takes_too_long_ = 1;
    if (running_ && pauses_ == before) fail("an endless loop in " + what_runs());
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
    const stack_t& stack = fiber.context->start.uc_stack;
    current_stack_end() = static_cast<const char*>(stack.ss_sp) + stack.ss_size;
    guarded([&] {
      if (fiber.context->started) _longjmp(fiber.context->state, 1);
      fiber.context->started = true;
      ::setcontext(&fiber.context->start);
    });
  }
  static void run_thread() {
    machine().launch_->entry->call(machine().launch_->parameters);
    machine().end_thread();
  }
  [[noreturn]] void end_thread() {
    Fiber& fiber = *running_;
    if (std::ranges::any_of(fiber.bulk_copies, [](const auto& group) { return !group.empty(); }))
      fail(fmt::format("{} ended without waiting for its bulk copies", what_runs()));
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
    if (all.size() > kMostLines) all.resize(kMostLines);
    std::string text;
    for (const Waiting& waiting : all)
      text += fmt::format("\n  {} threads, such as {} of block {}, wait for {}", waiting.threads,
                          waiting.thread.x, waiting.block.x, waiting.what);
    return text;
  }

  static std::uint64_t seed() {
    const char* text = std::getenv("FLASHJIT_EMULATOR_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 1;
  }

  static constexpr unsigned kMostSpins = 100'000;
  static constexpr int kMostAlarms = 6;
  std::mutex mutex_;
  const Launch* launch_ = nullptr;
  /// Whether this grid lets the next one start before it has waited for the one before, whose results that
  /// one may then not read; and whether it may, as the grid before this one did not.
  bool next_starts_early_ = false, inputs_are_written_ = true;
  std::mt19937_64 random_{seed()};
  Stacks stacks_;
  std::vector<char*> ended_;  ///< stacks of threads that have ended
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Warp*> ready_;
  std::vector<Copy> in_flight_;
  Fiber* running_ = nullptr;
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
std::string what_runs() { return machine().what_runs(); }
void touch_device_memory(const void* address) { machine().touch_device_memory(address); }
void touch_input(const void* address) { machine().touch_input(address); }
void let_next_grid_start() { machine().let_next_grid_start(); }
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

}  // namespace flashjit_emulator
