// The Rings of sm90's kernels on the host: their stages, phases and arrivals by the kernels' own code, for
// barrier_model.hpp. Included before other headers of templates/sm90.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/barrier_model.hpp"
#include "tests/support/kernel_headers.hpp"

namespace flashjit::test {

/// The mbarriers that a kernel has made, by address: arrivals of a phase.
using Barriers = std::map<unsigned, int>;
inline Barriers& made_barriers() {
  static Barriers barriers;
  return barriers;
}

}  // namespace flashjit::test

#define asm(...) static_cast<void>(0)
#define volatile(...) ("")
#include "flashjit/async/mbarrier.cuh"
#define barrier_init(barrier, arrivals) ::flashjit::test::made_barriers()[barrier] = (arrivals)
#include "flashjit/sm90/backward_rings.cuh"
#include "flashjit/sm90/forward_rings.cuh"
#undef barrier_init
#undef asm
#undef volatile

namespace flashjit_emulator {
/// Shared memory begins at address 0.
inline unsigned shared_offset(const void*) { return 0; }
}  // namespace flashjit_emulator

namespace flashjit::test {

/// What a Ring says of itself. Arrivals are of threads, or of a warp's elected one.
struct RingFacts {
  int stages = 0;
  int commits = 0, releases = 0;  ///< arrivals that complete a phase; 0: the ring has no such barriers
  bool has_phases = true;  ///< the parity of an element's phase is that of elements before in its stage
};

/// Of a Ring whose elements are (`before`..., n) in shared memory whose barriers have been made.
template <class Ring, class Smem, class... Before>
RingFacts facts_of(const Smem& smem, Before... before) {
  constexpr int kElements = 64;
  const auto barriers_of = [&](const auto& of_element) {
    std::vector<unsigned> found;
    for (int n = 0; n < kElements; ++n) {
      const unsigned barrier = of_element(n);
      if (n > 0 && barrier == found.front()) break;
      found.push_back(barrier);
    }
    return found;
  };
  RingFacts facts;
  const auto take = [&](const std::vector<unsigned>& barriers, int& arrivals) {
    facts.stages = static_cast<int>(barriers.size());
    arrivals = made_barriers().at(barriers.front());
    for (int n = 0; n < kElements; ++n)
      facts.has_phases &= Ring::phase(smem, before..., n) == n / facts.stages % 2;
  };
  if constexpr (requires { Ring::empty(smem, before..., 0); })
    if (const auto barriers = barriers_of([&](int n) { return Ring::empty(smem, before..., n); });
        made_barriers().contains(barriers.front()))
      take(barriers, facts.releases);
  if constexpr (requires { Ring::full(smem, before..., 0); })
    take(barriers_of([&](int n) { return Ring::full(smem, before..., n); }), facts.commits);
  return facts;
}

/// A ring with a kernel's stages. An agent of the model stands for so many of the kernel's arrivals.
inline BarrierModel::Ring ring_of(BarrierModel& model, const std::string& name, const RingFacts& facts,
                                  int commits_of_agent, int releases_of_agent, bool has_buffers = true) {
  EXPECT_TRUE(facts.has_phases) << name;
  EXPECT_EQ(facts.commits % commits_of_agent + facts.releases % releases_of_agent, 0) << name;
  const int commits = facts.commits / commits_of_agent, releases = facts.releases / releases_of_agent;
  return has_buffers ? model.ring(name, facts.stages, commits, releases)
                     : model.barriers_of_ring(name, facts.stages, commits, releases);
}

/// The agent that finds the work tiles, `rounds` of them, and loads each warpgroup's Q.
inline void add_q_producer(BarrierModel& model, const BarrierModel::Ring& work,
                           const std::vector<BarrierModel::Ring>& q, int rounds) {
  auto& producer = model.agent("Q producer");
  for (int round = 0; round <= rounds; ++round) {
    producer.write(work, round).commit(work, round);
    for (const BarrierModel::Ring& ring : q) {
      producer.acquire(ring, round).expect(ring, round, round < rounds ? 1 : 0);
      if (round < rounds) producer.copy(ring, round);
    }
  }
}

}  // namespace flashjit::test
