// A model of a kernel's warps as far as they wait for each other: mbarriers, named barriers, asynchronous
// copies, and the buffers that these guard. explore() goes through every interleaving and says what can go
// wrong.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>

namespace flashjit::test {

class BarrierModel {
 public:
  /// A pipeline, as Ring in templates/async/ring.cuh: element n, counted from the start, takes stage n modulo
  /// their number. A ring has no buffers if others than its own are read, and no `empty` barriers if nothing
  /// waits for them.
  struct Ring {
    std::vector<int> buffers, full, empty;

    int full_of(int n) const { return of(full, n); }
    int empty_of(int n) const { return of(empty, n); }
    int buffer_of(int n) const { return of(buffers, n); }
    /// Elements before n that took its stage.
    static int before(const std::vector<int>& stages, int n) { return n / static_cast<int>(stages.size()); }

   private:
    static int of(const std::vector<int>& stages, int n) {
      return stages.at(static_cast<std::size_t>(n) % stages.size());
    }
  };

  /// The steps of one warp, or of a warpgroup whose warps go together, in their order.
  class Agent {
   public:
    Agent(BarrierModel& model, std::string name) : model_(model), name_(std::move(name)) {}
    /// Waits by parity, as barrier_wait() does, until `phases` phases of an mbarrier are complete.
    Agent& wait(int barrier, int phases) { return add({Kind::wait, barrier, phases}); }
    Agent& arrive(int barrier) { return add({Kind::arrive, barrier}); }
    /// Arrives, and lets the phase end no sooner than so many copies.
    Agent& expect(int barrier, int copies) { return add({Kind::expect, barrier, copies}); }
    /// Starts a copy, which ends at any time after, and then counts on an mbarrier.
    Agent& copy(int buffer, int content, int barrier) {
      model_.copies_.push_back({buffer, content, barrier});
      return add({Kind::copy, buffer, static_cast<int>(model_.copies_.size()) - 1});
    }
    Agent& write(int buffer, int content) { return add({Kind::write, buffer, content}); }
    Agent& begin_read(int buffer, int content) { return add({Kind::begin_read, buffer, content}); }
    Agent& end_read(int buffer) { return add({Kind::end_read, buffer}); }
    Agent& read(int buffer, int content) { return begin_read(buffer, content).end_read(buffer); }

    // The same for element n of a ring. Its buffer then holds n.
    Agent& wait_full(const Ring& ring, int n) {
      return wait(ring.full_of(n), Ring::before(ring.full, n) + 1);
    }
    Agent& acquire(const Ring& ring, int n) { return wait(ring.empty_of(n), Ring::before(ring.empty, n)); }
    Agent& release(const Ring& ring, int n) { return arrive(ring.empty_of(n)); }
    Agent& commit(const Ring& ring, int n) { return arrive(ring.full_of(n)); }
    Agent& expect(const Ring& ring, int n, int copies) { return expect(ring.full_of(n), copies); }
    Agent& copy(const Ring& ring, int n) { return copy(ring.buffer_of(n), n, ring.full_of(n)); }
    Agent& write(const Ring& ring, int n) { return write(ring.buffer_of(n), n); }
    Agent& begin_read(const Ring& ring, int n) { return begin_read(ring.buffer_of(n), n); }
    Agent& end_read(const Ring& ring, int n) { return end_read(ring.buffer_of(n)); }
    Agent& read(const Ring& ring, int n) { return begin_read(ring, n).end_read(ring, n); }
    /// A named barrier of two: bar.arrive; and bar.sync, which arrives and waits.
    Agent& named_arrive(int barrier) { return add({Kind::named_arrive, barrier}); }
    Agent& named_sync(int barrier) {
      int syncs = 1;
      for (const Step& step : steps_) syncs += step.kind == Kind::named_wait && step.object == barrier;
      return named_arrive(barrier).add({Kind::named_wait, barrier, syncs});
    }

   private:
    friend BarrierModel;
    enum class Kind { wait, arrive, expect, copy, write, begin_read, end_read, named_arrive, named_wait };
    struct Step {
      Kind kind;
      int object = 0, value = 0;
    };
    Agent& add(Step step) {
      steps_.push_back(step);
      return *this;
    }
    BarrierModel& model_;
    std::string name_;
    std::vector<Step> steps_;
  };

  int mbarrier(std::string name, int arrivals) {
    mbarriers_.push_back({std::move(name), arrivals});
    return static_cast<int>(mbarriers_.size()) - 1;
  }
  int named_barrier(std::string name) {
    named_.push_back(std::move(name));
    return static_cast<int>(named_.size()) - 1;
  }
  int buffer(std::string name) {
    buffers_.push_back(std::move(name));
    return static_cast<int>(buffers_.size()) - 1;
  }
  /// Several of a name, such as the stages of a pipeline.
  std::vector<int> mbarriers(const std::string& name, int count, int arrivals) {
    std::vector<int> all;
    for (int i = 0; i < count; ++i) all.push_back(mbarrier(fmt::format("{}[{}]", name, i), arrivals));
    return all;
  }
  std::vector<int> buffers(const std::string& name, int count) {
    std::vector<int> all;
    for (int i = 0; i < count; ++i) all.push_back(buffer(fmt::format("{}[{}]", name, i)));
    return all;
  }
  /// A ring of so many stages with a buffer each. `commits` and `releases`: the arrivals that complete a
  /// phase.
  Ring ring(const std::string& name, int stages, int commits, int releases = 0) {
    Ring made = barriers_of_ring(name, stages, commits, releases);
    made.buffers = buffers(name, stages);
    return made;
  }
  /// The same for buffers that the ring does not have. 0: no barriers of that side.
  Ring barriers_of_ring(const std::string& name, int stages, int commits, int releases = 0) {
    Ring made;
    if (commits > 0) made.full = mbarriers(name + " full", stages, commits);
    if (releases > 0) made.empty = mbarriers(name + " empty", stages, releases);
    return made;
  }
  Agent& agent(std::string name) { return agents_.emplace_back(*this, std::move(name)); }

  /// What is wrong in some interleaving: a wait that never ends or takes one phase for another, a buffer that
  /// is overwritten while it is read, or read before it holds what is expected. Empty: nothing, in any of
  /// them.
  std::string explore() {
    std::vector<State> open;
    std::string fault = add_with_its_starts(first_state(), open);
    std::unordered_set<std::string> seen;
    while (fault.empty() && !open.empty()) {
      const State state = std::move(open.back());
      open.pop_back();
      if (!seen.insert(state.key()).second) continue;
      std::size_t moves = 0;
      for (std::size_t copy = 0; copy < copies_.size(); ++copy) {
        if (!state.in_flight[copy]) continue;
        State next = state;
        end_copy(next, copy);
        open.push_back(std::move(next));
        ++moves;
      }
      for (std::size_t who = 0; who < agents_.size(); ++who) {
        if (!may_step(state, who)) continue;
        State next = state;
        take_step(next, who, fault);
        if (fault.empty()) fault = add_with_its_starts(std::move(next), open);
        if (!fault.empty()) return fault;
        ++moves;
      }
      for (std::size_t who = 0; moves == 0 && who < agents_.size(); ++who)
        if (state.at[who] < agents_[who].steps_.size()) return describe(state, who, "waits for ever:");
    }
    states_ = seen.size();
    return fault;
  }
  std::size_t states() const { return states_; }

 private:
  using Kind = Agent::Kind;
  static constexpr std::int16_t kNothing = -1;  // what a buffer holds at first, and while a copy is under way
  struct Mbarrier {
    std::string name;
    int arrivals;
  };
  struct Copy {
    int buffer, content, barrier;
  };
  struct State {
    struct Phase {
      std::int16_t complete, pending, copies;  // phases; arrivals and copies that the present one lacks
    };
    struct Buffer {
      std::int16_t content, readers, writers;
    };
    std::vector<std::uint16_t> at;
    std::vector<Phase> mbarriers;
    std::vector<std::int16_t> named;  // arrivals
    std::vector<Buffer> buffers;
    std::vector<char> in_flight;

    std::string key() const {
      std::string out;
      const auto add = [&](const auto& all) {
        out.append(reinterpret_cast<const char*>(all.data()), all.size() * sizeof all[0]);
      };
      add(at), add(mbarriers), add(named), add(buffers), add(in_flight);
      return out;
    }
  };

  /// Reads and copies start as soon as they can: whatever happens to a buffer in between would then happen
  /// while it is in use. That leaves fewer interleavings to go through.
  std::string add_with_its_starts(State state, std::vector<State>& open) const {
    std::string fault;
    for (std::size_t who = 0; fault.empty() && who < agents_.size(); ++who) {
      const auto starts = [&] {
        if (state.at[who] == agents_[who].steps_.size()) return false;
        const Kind kind = agents_[who].steps_[state.at[who]].kind;
        return kind == Kind::begin_read || kind == Kind::copy;
      };
      while (fault.empty() && starts()) take_step(state, who, fault);
    }
    if (fault.empty()) open.push_back(std::move(state));
    return fault;
  }

  State first_state() const {
    State state;
    state.at.resize(agents_.size());
    for (const Mbarrier& barrier : mbarriers_)
      state.mbarriers.push_back({0, static_cast<std::int16_t>(barrier.arrivals), 0});
    state.named.resize(named_.size());
    state.buffers.resize(buffers_.size(), {kNothing, 0, 0});
    state.in_flight.resize(copies_.size());
    return state;
  }

  std::string describe(const State& state, std::size_t who, const std::string& what) const {
    const Agent::Step& step = agents_[who].steps_[state.at[who]];
    auto object = static_cast<std::size_t>(step.object);
    const bool named = step.kind == Kind::named_arrive || step.kind == Kind::named_wait;
    const bool mbarrier = step.kind == Kind::wait || step.kind == Kind::arrive || step.kind == Kind::expect;
    return fmt::format("{}, step {}: {} {}", agents_[who].name_, state.at[who], what,
                       named      ? named_[object]
                       : mbarrier ? mbarriers_[object].name
                                  : buffers_[object]);
  }

  void end_phase(State& state, std::size_t barrier) const {
    State::Phase& phase = state.mbarriers[barrier];
    if (phase.pending != 0 || phase.copies != 0) return;
    ++phase.complete;
    phase.pending = static_cast<std::int16_t>(mbarriers_[barrier].arrivals);
  }
  void end_copy(State& state, std::size_t index) const {
    const Copy& copy = copies_[index];
    State::Buffer& buffer = state.buffers[static_cast<std::size_t>(copy.buffer)];
    buffer.content = static_cast<std::int16_t>(copy.content);
    --buffer.writers;
    state.in_flight[index] = 0;
    const auto barrier = static_cast<std::size_t>(copy.barrier);
    --state.mbarriers[barrier].copies;
    end_phase(state, barrier);
  }

  /// False: the agent has to wait, or is done.
  bool may_step(const State& state, std::size_t who) const {
    if (state.at[who] == agents_[who].steps_.size()) return false;
    const Agent::Step& step = agents_[who].steps_[state.at[who]];
    const auto object = static_cast<std::size_t>(step.object);
    if (step.kind == Kind::wait) return state.mbarriers[object].complete % 2 == step.value % 2;
    return step.kind != Kind::named_wait || state.named[object] >= 2 * step.value;
  }

  void take_step(State& state, std::size_t who, std::string& fault) const {
    const Agent::Step& step = agents_[who].steps_[state.at[who]];
    const auto object = static_cast<std::size_t>(step.object);
    switch (step.kind) {
      case Kind::wait: {
        const int complete = state.mbarriers[object].complete;
        if (complete != step.value)
          fault = describe(state, who, fmt::format("takes phase {} for {} of", complete, step.value));
        break;
      }
      case Kind::arrive:
      case Kind::expect: {
        State::Phase& phase = state.mbarriers[object];
        if (phase.pending == 0) fault = describe(state, who, "arrives once too often on");
        if (step.kind == Kind::expect) phase.copies = static_cast<std::int16_t>(phase.copies + step.value);
        --phase.pending;
        end_phase(state, object);
        break;
      }
      case Kind::copy: {
        State::Buffer& buffer = state.buffers[object];
        if (buffer.readers != 0 || buffer.writers != 0) fault = describe(state, who, "copies over, in use,");
        state.in_flight[static_cast<std::size_t>(step.value)] = 1;
        buffer.content = kNothing;
        ++buffer.writers;
        break;
      }
      case Kind::write: {
        State::Buffer& buffer = state.buffers[object];
        if (buffer.readers != 0 || buffer.writers != 0) fault = describe(state, who, "overwrites, in use,");
        buffer.content = static_cast<std::int16_t>(step.value);
        break;
      }
      case Kind::begin_read: {
        State::Buffer& buffer = state.buffers[object];
        if (buffer.content != step.value)
          fault = describe(state, who, fmt::format("finds {} for {} in", buffer.content, step.value));
        ++buffer.readers;
        break;
      }
      case Kind::end_read:
        --state.buffers[object].readers;
        break;
      case Kind::named_arrive:
        ++state.named[object];
        break;
      case Kind::named_wait:
        break;
    }
    ++state.at[who];
  }

  std::vector<Mbarrier> mbarriers_;
  std::vector<std::string> named_, buffers_;
  std::vector<Copy> copies_;
  std::deque<Agent> agents_;
  std::size_t states_ = 0;
};

}  // namespace flashjit::test
