// The waits of the sm90 kernels, in every interleaving of small problems: no wait is for ever, no stage is
// overwritten while it is read. The graphs follow templates/sm90: forward.cuh and forward_producer.cuh,
// backward.cuh, backward_producer.cuh and backward_dq.cuh. Stages and arrivals of the kernels of one CTA are
// their Rings' own (forward_rings.cuh, backward_rings.cuh). A change of a kernel's waits is made here first.
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/barrier_model.hpp"
#include "tests/support/kernel_rings.hpp"

namespace flashjit {
namespace {

using test::BarrierModel;
using test::facts_of;
using test::ring_of;
using test::RingFacts;
using Ring = BarrierModel::Ring;

constexpr int kWarpsOfGroup = 4, kThreadsOfGroup = 128;

// --- Forward
// ---------------------------------------------------------------------------------------------------------

template <int dim, int br, int bc, int stages, bool bias_tile>
struct ForwardTiles : ExampleProblem {
  static constexpr int kHeadDim = dim, kHeadDimV = dim, kBr = br, kBc = bc, kWarps = br / 16,
                       kStages = stages;
  static constexpr int kQTilesPerCta = 1, kDSplit = 1;
  static constexpr bool kBiasTile = bias_tile;
};
/// A kernel's Problem, as far as its pipelines depend on it.
template <int dim, int br, int bc, int stages, bool bias_tile = false>
struct ForwardKernel : ForwardTiles<dim, br, bc, stages, bias_tile> {
  static constexpr int kSharedBytes =
      sm90::kForwardLayout<ForwardTiles<dim, br, bc, stages, bias_tile>>.bytes();
};

// The faults: K is released when its product has begun, and few work tiles are kept; 0: as many as are.
struct ForwardFaults {
  bool early_release = false;
  int kept_work_tiles = 0;
};

/// `kv_tiles`: of each work tile.
template <class P>
BarrierModel forward_model(const std::vector<int>& kv_tiles, const ForwardFaults& faults = {}) {
  BarrierModel model;
  const sm90::ForwardStorage<P> storage(0, nullptr);
  test::made_barriers().clear();
  storage.init_barriers();
  const int groups = storage.kRowGroups, q_stages = storage.kQStages,
            rounds = static_cast<int>(kv_tiles.size());
  const auto of_tiles = [&](const char* name, const RingFacts& facts) {
    return ring_of(model, name, facts, 1, kWarpsOfGroup);
  };
  const Ring k = of_tiles("K", facts_of<sm90::KRing<P>>(storage)),
             v = of_tiles("V", facts_of<sm90::VRing<P>>(storage));
  Ring bias;
  if constexpr (P::kBiasTile) bias = of_tiles("bias tile", facts_of<sm90::TermsRing<P>>(storage));
  RingFacts kept = facts_of<sm90::WorkRing<P>>(storage);
  if (faults.kept_work_tiles > 0) kept.stages = faults.kept_work_tiles;
  const Ring work = ring_of(model, "work tile", kept, 1, 1);
  std::vector<Ring> q;  // of each warpgroup
  std::vector<int> ping_pong;
  for (int wg = 0; wg < groups; ++wg) {
    q.push_back(of_tiles("Q of a warpgroup", facts_of<sm90::QRing<P>>(storage, wg)));
    ping_pong.push_back(model.named_barrier(fmt::format("ping_pong[{}]", wg)));
  }

  test::add_q_producer(model, work, q, rounds);

  // Loads K of a tile, then V of the one before.
  auto& kv_producer = model.agent("KV producer");
  const auto load = [&](int n, const Ring& ring) {
    kv_producer.acquire(ring, n).expect(ring, n, 1).copy(ring, n);
  };
  int loaded = 0;
  for (int round = 0; round <= rounds; ++round) {
    kv_producer.wait_full(work, round).begin_read(work, round);
    for (int tile = 0; round < rounds && tile < kv_tiles[round]; ++tile, ++loaded) {
      load(loaded, k);
      if (P::kBiasTile) load(loaded, bias);
      if (loaded > 0) load(loaded - 1, v);
    }
    kv_producer.end_read(work, round);
  }
  load(loaded - 1, v);

  for (int wg = 0; wg < groups; ++wg) {
    auto& consumer = model.agent(fmt::format("warpgroup {}", wg));
    const Ring& own_q = q[wg];
    const auto hand_on = [&] { consumer.named_arrive(ping_pong[(wg + 1) % groups]); };
    if (wg == groups - 1) hand_on();
    int n = 0;
    for (int round = 0; round < rounds; ++round) {
      consumer.wait_full(own_q, round).begin_read(work, round);
      for (int tile = 0; tile < kv_tiles[round]; ++tile, ++n) {
        consumer.wait_full(k, n).named_sync(ping_pong[wg]);
        if (tile == 0) consumer.begin_read(own_q, round);
        consumer.begin_read(k, n);  // S = Q K^T
        if (faults.early_release) consumer.release(k, n);
        if (n > 0) consumer.wait_full(v, n - 1).begin_read(v, n - 1);  // O += P V
        hand_on();
        consumer.end_read(k, n);
        if (!faults.early_release) consumer.release(k, n);
        const bool last = tile + 1 == kv_tiles[round];
        if (last) consumer.end_read(own_q, round);
        if (last && q_stages == 1) consumer.release(own_q, round);
        if (P::kBiasTile) consumer.wait_full(bias, n).read(bias, n).release(bias, n);
        if (n > 0) consumer.end_read(v, n - 1).release(v, n - 1);
        if (tile == 0 && round > 0) consumer.end_read(work, round - 1);  // O of the last work tile is stored
      }
      if (q_stages == 2) consumer.release(own_q, round);
    }
    consumer.wait_full(own_q, rounds).read(work, rounds);
    consumer.wait_full(v, n - 1).read(v, n - 1);
    consumer.end_read(work, rounds - 1);
    if (wg == 0) consumer.named_sync(ping_pong[wg]);
  }
  return model;
}

void expect_right(BarrierModel&& model) {
  EXPECT_EQ(model.explore(), "");
  EXPECT_GT(model.states(), 100u);
}

TEST(ForwardBarriers, NoInterleavingGoesWrong) {
  using OneQStage = ForwardKernel<256, 128, 64, 2>;
  static_assert(sm90::ForwardStorage<OneQStage>::kQStages == 1);
  expect_right(forward_model<OneQStage>({3, 1, 2}));
  using TwoQStages = ForwardKernel<128, 128, 128, 2>;
  static_assert(sm90::ForwardStorage<TwoQStages>::kQStages == 2);
  expect_right(forward_model<TwoQStages>({1, 1, 1, 2}));
  expect_right(forward_model<ForwardKernel<64, 128, 128, 3>>({2, 3}));
  expect_right(forward_model<ForwardKernel<128, 128, 128, 2, true>>({2, 1}));
  expect_right(forward_model<ForwardKernel<128, 128, 128, 1>>({4}));
  static_assert(sm90::kKeptWorkTiles < 10);
  expect_right(forward_model<ForwardKernel<64, 64, 128, 2>>({1, 2, 1, 1, 1, 1, 1, 1, 1, 1}));
}

TEST(ForwardBarriers, ThreeWarpGroups) {
  expect_right(forward_model<ForwardKernel<64, 192, 128, 2>>({2, 1}));
}

// The model sees what it is there for.
TEST(ForwardBarriers, AStageThatIsReleasedTooEarlyIsFound) {
  EXPECT_NE((forward_model<ForwardKernel<128, 128, 128, 2>>({4}, {.early_release = true}).explore()), "");
}
TEST(ForwardBarriers, TooFewKeptWorkTilesAreFound) {
  EXPECT_NE((forward_model<ForwardKernel<128, 128, 128, 2>>({1, 1, 1, 1}, {.kept_work_tiles = 1}).explore()),
            "");
}

// --- Forward, two warpgroups that share rows
// -------------------------------------------------------------------------------------------

struct WideProblem {
  std::vector<int> kv_tiles;  ///< of each work tile
  int stages = 2, kept_work_tiles = 8;
  bool parts = true;         ///< K's tile is V, too, in two parts
  int slots = 0;             ///< for latents that a warpgroup decodes; 0: none does
  bool frees_early = false;  ///< the fault: a slot is free when its left part is decoded
  bool holds = true;         ///< the second group's P V until the first one's S is there
  bool hands_early = false;  ///< the fault: P is overwritten without waiting
};

/// Rings of K, or the left part of its tile; of V, or the right part; and of work tiles.
struct WideRings {
  Ring k, v, work;
};

/// Latents: a warp copies rows to slots, and a warpgroup decodes the parts of a tile from these.
void add_decoder(BarrierModel& model, const WideProblem& problem, const WideRings& rings) {
  const int rounds = static_cast<int>(problem.kv_tiles.size());
  const Ring rows = model.ring("rows", problem.slots, 1, 1);
  const auto visit = [&](auto& agent, const auto& visit_tile) {
    int n = 0;
    for (int round = 0; round <= rounds; ++round) {
      agent.wait_full(rings.work, round).begin_read(rings.work, round);
      for (int tile = 0; round < rounds && tile < problem.kv_tiles[round]; ++tile) visit_tile(n++);
      agent.end_read(rings.work, round);
    }
  };
  auto& copier = model.agent("copier");
  visit(copier, [&](int n) { copier.acquire(rows, n).expect(rows, n, 1).copy(rows, n); });
  auto& decoder = model.agent("decoder");
  visit(decoder, [&](int n) {
    decoder.wait_full(rows, n).acquire(rings.k, n).begin_read(rows, n);
    decoder.write(rings.k, n).commit(rings.k, n);
    if (problem.frees_early) decoder.release(rows, n);
    decoder.acquire(rings.v, n).write(rings.v, n).commit(rings.v, n);
    decoder.end_read(rows, n);
    if (!problem.frees_early) decoder.release(rows, n);
  });
}

BarrierModel wide_model(const WideProblem& problem) {
  BarrierModel model;
  const int rounds = static_cast<int>(problem.kv_tiles.size());
  const WideRings rings{.k = model.ring("K or left part", problem.stages, 1, 1),
                        .v = model.ring("V or right part", problem.stages, 1, problem.parts ? 1 : 2),
                        .work = model.ring("work tile", problem.kept_work_tiles, 1)};
  const Ring &k = rings.k, &v = rings.v, &work = rings.work;
  const Ring q = model.ring("Q", 1, 1, 1);
  const int handed = model.buffer("P"), p_full = model.named_barrier("p_full"),
            p_empty = model.named_barrier("p_empty"), may_start_pv = model.named_barrier("may_start_pv");

  auto& q_producer = model.agent("Q producer");
  for (int round = 0; round <= rounds; ++round) {
    q_producer.write(work, round).commit(work, round);
    q_producer.acquire(q, round).expect(q, round, round < rounds ? 1 : 0);
    if (round < rounds) q_producer.copy(q, round);
  }

  if (problem.slots > 0) add_decoder(model, problem, rings);
  auto& kv_producer = model.agent("KV producer");
  int loaded = 0;
  for (int round = 0; problem.slots == 0 && round <= rounds; ++round) {
    kv_producer.wait_full(work, round).begin_read(work, round);
    for (int tile = 0; round < rounds && tile < problem.kv_tiles[round]; ++tile, ++loaded)
      for (const Ring* ring : {&k, &v})
        kv_producer.acquire(*ring, loaded).expect(*ring, loaded, 1).copy(*ring, loaded);
    kv_producer.end_read(work, round);
  }

  auto& first = model.agent("first warpgroup");
  const auto start_s = [&](int n, bool held) {
    if (held && !problem.holds) first.named_arrive(may_start_pv);
    first.wait_full(k, n).begin_read(k, n);
    if (problem.parts) first.wait_full(v, n).begin_read(v, n);
  };
  int n = 0;
  first.wait_full(q, 0).begin_read(work, 0).begin_read(q, 0);
  start_s(0, false);
  for (int round = 0; round < rounds; ++round) {
    for (int tile = 0; tile < problem.kv_tiles[round]; ++tile) {
      const int now = n++;
      const bool last = tile + 1 == problem.kv_tiles[round];
      if (problem.parts)
        first.end_read(v, now);  // S is there
      else
        first.end_read(k, now).release(k, now);
      if (last) first.end_read(q, round).release(q, round);
      if (now > 0 && problem.holds) first.named_arrive(may_start_pv);
      if (now > 0 && !problem.hands_early) first.named_sync(p_empty);
      first.write(handed, now).named_arrive(p_full);
      if (!problem.parts) first.wait_full(v, now).begin_read(v, now);
      if (last) first.wait_full(q, round + 1).begin_read(work, round + 1);
      if (!last || round + 1 < rounds) {
        if (last) first.begin_read(q, round + 1);
        start_s(n, true);
      }
      // O is there
      if (problem.parts)
        first.end_read(k, now).release(k, now);
      else
        first.end_read(v, now).release(v, now);
      if (last) first.end_read(work, round);
    }
  }
  first.named_arrive(may_start_pv).named_sync(p_empty);

  auto& second = model.agent("second warpgroup");
  n = 0;
  for (int round = 0; round <= rounds; ++round) {
    second.wait_full(work, round).begin_read(work, round);
    for (int tile = 0; round < rounds && tile < problem.kv_tiles[round]; ++tile, ++n) {
      second.named_sync(p_full).begin_read(handed, n).wait_full(v, n);
      second.named_sync(may_start_pv).read(v, n).release(v, n);
      second.end_read(handed).named_arrive(p_empty);
    }
    second.end_read(work, round);
  }
  return model;
}

TEST(WideForwardBarriers, NoInterleavingGoesWrong) {
  for (const WideProblem& problem :
       {WideProblem{.kv_tiles = {3, 1, 2}}, WideProblem{.kv_tiles = {3, 1, 2}, .holds = false},
        WideProblem{.kv_tiles = {1, 1, 1, 1, 1}, .kept_work_tiles = 5},
        WideProblem{.kv_tiles = {2, 3}, .stages = 3}, WideProblem{.kv_tiles = {2, 3}, .parts = false},
        WideProblem{.kv_tiles = {3, 1, 2}, .stages = 1, .parts = false, .holds = false}}) {
    BarrierModel model = wide_model(problem);
    EXPECT_EQ(model.explore(), "");
    EXPECT_GT(model.states(), 100u);
  }
}

TEST(WideForwardBarriers, DecodedLatents) {
  for (const int slots : {1, 2, 3}) {
    BarrierModel model = wide_model({.kv_tiles = {3, 1, 2}, .slots = slots});
    EXPECT_EQ(model.explore(), "") << slots;
  }
  EXPECT_NE(wide_model({.kv_tiles = {4}, .slots = 2, .frees_early = true}).explore(), "");
}

TEST(WideForwardBarriers, POverwrittenBeforeItIsReadIsFound) {
  EXPECT_NE(wide_model({.kv_tiles = {4}, .hands_early = true}).explore(), "");
}
// With one stage V comes when P V has been computed, and S of the next tile comes before that.
TEST(WideForwardBarriers, HoldingPvWithoutAStageForTheNextTileIsFound) {
  EXPECT_NE(wide_model({.kv_tiles = {4}, .stages = 1}).explore(), "");
}

// --- Backward
// --------------------------------------------------------------------------------------------------------

/// A kernel's Problem, as far as its pipelines depend on it.
template <int dim, int bc, int stages>
struct BackwardKernel : ExampleProblem {
  static constexpr bool kBackward = true;
  static constexpr int kHeadDim = dim, kHeadDimV = dim, kBr = 64, kBc = bc, kWarps = 8, kStages = stages,
                       kListedRows = 64;
  static constexpr int kSharedBytes =
      sm90::BackwardLayout{.br = 64, .bc = bc, .head_dim = dim, .head_dim_v = dim, .stages = stages}.bytes();
};

/// `q_tiles`: of each KV tile. The fault: dS is written before the tile before's is there.
template <class P>
BarrierModel backward_model(const std::vector<int>& q_tiles_of, bool skips_ds_wait = false) {
  using Policy = sm90::BackwardPolicy<P>;
  constexpr int kGroups = Policy::kWgs;
  constexpr bool kWide = Policy::kAdderReleases;
  static_assert(Policy::kClusterSize == 1);
  BarrierModel model;
  const sm90::BackwardSmem<P> smem(nullptr, 0);
  test::made_barriers().clear();
  smem.init();
  // Where dQ lies over a stage, a thread of each warpgroup releases it when dQ has been added.
  const auto of_tiles = [&](const char* name, const RingFacts& facts) {
    return ring_of(model, name, facts, 1, kWide ? 1 : kThreadsOfGroup, false);
  };
  const Ring q_tiles = of_tiles("Q", facts_of<sm90::QTileRing<P>>(smem)),
             douts = of_tiles("dO", facts_of<sm90::DoutRing<P>>(smem)),
             ds_tiles = ring_of(model, "dS", facts_of<sm90::DsRing<P>>(smem), kThreadsOfGroup, 1, false),
             kv_tiles =
                 ring_of(model, "KV tile", facts_of<sm90::KvTileRing<P>>(smem), 1, kThreadsOfGroup, false);
  const int stages = static_cast<int>(q_tiles.full.size()), dout_stages = static_cast<int>(douts.full.size()),
            kept = sm90::kKeptQTiles;
  // Wide, each warpgroup's columns of a stage are a buffer, as its dQ comes to lie over them.
  const auto q = model.buffers("Q", stages * kGroups), dout = model.buffers("dO", dout_stages * kGroups),
             ds = model.buffers("dS", 2 * kGroups), said = model.buffers("QTileInfo", kept);
  const int k = model.buffer("K"), v = model.buffer("V");

  struct QTile {
    int kv_tile;
    bool first, last;
  };
  std::vector<QTile> all;
  for (std::size_t n = 0; n < q_tiles_of.size(); ++n)
    for (int tile = 0; tile < q_tiles_of[n]; ++tile)
      all.push_back({static_cast<int>(n), tile == 0, tile + 1 == q_tiles_of[n]});
  const int count = static_cast<int>(all.size());

  auto& producer = model.agent("producer");
  for (int i = 0; i < count; ++i) {
    const auto load = [&](const Ring& ring, const std::vector<int>& buffers) {
      producer.acquire(ring, i).expect(ring, i, kGroups + (all[i].first ? 1 : 0));
      const int stage = i % static_cast<int>(ring.full.size());
      for (int half = 0; half < kGroups; ++half)
        producer.copy(buffers[stage * kGroups + half], i, ring.full_of(i));
    };
    producer.write(said[i % kept], i);
    load(q_tiles, q);
    load(douts, dout);
    if (!all[i].first) continue;
    producer.acquire(kv_tiles, all[i].kv_tile);
    producer.copy(k, all[i].kv_tile, q_tiles.full_of(i)).copy(v, all[i].kv_tile, douts.full_of(i));
  }
  producer.acquire(q_tiles, count).write(said[count % kept], count).commit(q_tiles, count);

  for (int wg = 0; wg < kGroups; ++wg) {
    const Ring dq =
        ring_of(model, "dQ of a warpgroup", facts_of<sm90::DqRing<P>>(smem, wg), kThreadsOfGroup, 1);
    auto& consumer = model.agent(fmt::format("warpgroup {}", wg));
    const auto both = [&](const std::vector<int>& buffers, int place, int content, bool begin) {
      for (int half = 0; half < kGroups; ++half) {
        const int buffer = buffers[place * kGroups + half];
        begin ? consumer.begin_read(buffer, content) : consumer.end_read(buffer);
      }
    };
    const auto hand_on_dq = [&](int i) { consumer.acquire(dq, i).write(dq, i).commit(dq, i); };
    const auto multiply_ds_k = [&](int i, const std::function<void()>& meanwhile) {  // dQ += dS K
      both(ds, i % 2, i, true);
      consumer.begin_read(k, all[i].kv_tile);
      meanwhile();
      both(ds, i % 2, i, false);
      consumer.end_read(k);
    };
    for (int i = 0; i < count; ++i) {
      const int stage = i % stages, dout_stage = i % dout_stages;
      const int own_q = q[stage * kGroups + wg], own_dout = dout[dout_stage * kGroups + wg];
      consumer.wait_full(q_tiles, i).begin_read(said[i % kept], i);
      both(q, stage, i, true);
      consumer.begin_read(k, all[i].kv_tile);  // S = Q K^T
      consumer.wait_full(douts, i);
      both(dout, dout_stage, i, true);
      consumer.read(v, all[i].kv_tile).end_read(k);  // dP = dO V^T
      both(q, stage, i, false);
      both(dout, dout_stage, i, false);
      if (!kWide && i > 0 && !skips_ds_wait) consumer.wait_full(ds_tiles, i - 1);
      consumer.write(ds[i % 2 * kGroups + wg], i);
      if (kWide) {
        consumer.commit(ds_tiles, i).wait_full(ds_tiles, i);
        multiply_ds_k(i, [&] { consumer.begin_read(own_dout, i).begin_read(own_q, i); });
        consumer.end_read(own_dout).acquire(dq, i).write(own_dout, -2 - i);  // dQ over dO
        consumer.end_read(own_q).write(own_q, -2 - i).write(dq, i).commit(dq, i);
        if (all[i].last) consumer.release(kv_tiles, all[i].kv_tile);
      } else {
        const auto multiply = [&] { both(q, stage, i, true), both(dout, dout_stage, i, true); };
        if (all[i].first)
          multiply();
        else
          multiply_ds_k(i - 1, multiply);
        consumer.commit(ds_tiles, i);
        if (!all[i].first) hand_on_dq(i - 1);
        both(q, stage, i, false), both(dout, dout_stage, i, false);
        consumer.release(douts, i).release(q_tiles, i);
        if (all[i].last) {
          consumer.wait_full(ds_tiles, i);
          multiply_ds_k(i, [] {});
          consumer.release(kv_tiles, all[i].kv_tile);
          hand_on_dq(i);
        }
      }
      consumer.end_read(said[i % kept]);
    }
    consumer.wait_full(q_tiles, count).read(said[count % kept], count);
    consumer.acquire(dq, count).commit(dq, count);

    // The thread that adds the warpgroup's dQ to global memory.
    auto& adder = model.agent(fmt::format("adder of warpgroup {}", wg));
    for (int i = 0; i < count; ++i) {
      adder.wait_full(dq, i).begin_read(said[i % kept], i).read(dq, i);
      if (kWide) {
        adder.read(dout[i % dout_stages * kGroups + wg], -2 - i).read(q[i % stages * kGroups + wg], -2 - i);
      }
      adder.end_read(said[i % kept]).release(dq, i);
      if (kWide) adder.release(douts, i).release(q_tiles, i);
    }
    adder.wait_full(dq, count).read(said[count % kept], count);
  }
  return model;
}

/// What the consumers of two CTAs that split columns exchange, over so many Q tiles: their loads and dQ are
/// those of a CTA alone.
BarrierModel split_columns_model(int q_tiles, bool meets_before_sending = true) {
  constexpr int kCtas = 2, kGroups = 2;
  BarrierModel model;
  std::vector<Ring> partial_sums, ds_tiles;  // of each warpgroup of each CTA; of each CTA
  for (int cta = 0; cta < kCtas; ++cta) {
    for (int wg = 0; wg < kGroups; ++wg)
      partial_sums.push_back(model.ring(fmt::format("partial sums[{}][{}]", cta, wg), 1, 1));
    ds_tiles.push_back(model.barriers_of_ring(fmt::format("dS[{}]", cta), 2, kGroups));
  }
  // P and dS of a CTA, in the parts that each warpgroup of each CTA computes.
  const auto p_and_ds = model.buffers("P and dS", kCtas * kCtas * kGroups);
  const auto part = [&](int cta, int from, int wg) { return p_and_ds[(cta * kCtas + from) * kGroups + wg]; };
  std::vector<int> both;
  for (int cta = 0; cta < kCtas; ++cta) both.push_back(model.named_barrier(fmt::format("both[{}]", cta)));
  for (int cta = 0; cta < kCtas; ++cta)
    for (int wg = 0; wg < kGroups; ++wg) {
      auto& consumer = model.agent(fmt::format("warpgroup {} of CTA {}", wg, cta));
      const int other_cta = 1 - cta;
      const Ring &own = partial_sums[cta * kGroups + wg], &other = partial_sums[other_cta * kGroups + wg];
      for (int i = 0; i < q_tiles; ++i) {
        if (meets_before_sending) consumer.named_sync(both[cta]);
        consumer.expect(own, i, 1).copy(other, i).wait_full(own, i).read(own, i);
        consumer.write(part(cta, cta, wg), i);
        consumer.copy(part(other_cta, cta, wg), i, ds_tiles[other_cta].full_of(i));
        wg == 0 ? consumer.expect(ds_tiles[cta], i, kGroups) : consumer.commit(ds_tiles[cta], i);
        consumer.wait_full(ds_tiles[cta], i);
        for (int from = 0; from < kCtas; ++from)
          for (int of = 0; of < kGroups; ++of) consumer.begin_read(part(cta, from, of), i);
        for (int from = 0; from < kCtas; ++from)
          for (int of = 0; of < kGroups; ++of) consumer.end_read(part(cta, from, of));
      }
    }
  return model;
}

struct SharedTileProblem {
  int q_tiles;
  // The faults: P of a tile is written before the other CTA has read dS of the one before, and dS is sent
  // before the other CTA has read P.
  bool skips_ds_wait = false, skips_p_wait = false;
};

/// What the consumers of two CTAs exchange where the other CTA's dS comes over P. Agents of their own send
/// dS, which the copies read until they have arrived.
BarrierModel shared_tile_model(const SharedTileProblem& problem) {
  constexpr int kCtas = 2, kGroups = 2;
  BarrierModel model;
  // A CTA's P, and then the other's dS; and its own dS. In the parts that the warpgroups compute.
  const auto p = model.buffers("P", kCtas * kGroups), ds = model.buffers("dS", kCtas * kGroups);
  std::vector<Ring> ds_tiles, over_p, other_ds;  // of each CTA
  for (int cta = 0; cta < kCtas; ++cta) {
    ds_tiles.push_back(model.barriers_of_ring(fmt::format("dS[{}]", cta), 2, kGroups));
    over_p.push_back(model.barriers_of_ring(fmt::format("dS over P[{}]", cta), 1, kGroups, 1));
    other_ds.push_back(model.barriers_of_ring(fmt::format("other dS[{}]", cta), 2, 1));
  }
  for (int cta = 0; cta < kCtas; ++cta) {
    const int other = 1 - cta, both = model.named_barrier(fmt::format("both[{}]", cta));
    const auto each_part = [&](auto of_part) {
      for (int wg = 0; wg < kGroups; ++wg) of_part(wg);
    };
    for (int wg = 0; wg < kGroups; ++wg) {
      auto& consumer = model.agent(fmt::format("warpgroup {} of CTA {}", wg, cta));
      for (int i = 0; i < problem.q_tiles; ++i) {
        if (!problem.skips_ds_wait) consumer.acquire(over_p[cta], i);
        consumer.write(p[cta * kGroups + wg], 2 * i).write(ds[cta * kGroups + wg], i);
        consumer.commit(ds_tiles[cta], i).wait_full(ds_tiles[cta], i);
        each_part([&](int of) { consumer.begin_read(ds[cta * kGroups + of], i); });
        each_part([&](int of) { consumer.begin_read(p[cta * kGroups + of], 2 * i); });
        each_part([&](int of) { consumer.end_read(p[cta * kGroups + of]); });
        consumer.commit(over_p[other], i).wait_full(other_ds[cta], i);
        consumer.end_read(ds[other * kGroups + wg]);
        each_part([&](int of) { consumer.begin_read(p[cta * kGroups + of], 2 * i + 1); });
        each_part([&](int of) { consumer.end_read(p[cta * kGroups + of]).end_read(ds[cta * kGroups + of]); });
        consumer.named_sync(both);
        if (wg == 0) consumer.release(over_p[other], i);
      }
    }
    auto& sender = model.agent(fmt::format("copies of CTA {}", cta));
    for (int i = 0; i < problem.q_tiles; ++i) {
      sender.wait_full(ds_tiles[cta], i);
      if (!problem.skips_p_wait) sender.wait_full(over_p[cta], i);
      sender.expect(other_ds[cta], i, kGroups);
      each_part([&](int of) { sender.begin_read(ds[cta * kGroups + of], i); });
      each_part([&](int of) { sender.copy(p[other * kGroups + of], 2 * i + 1, other_ds[other].full_of(i)); });
    }
  }
  return model;
}

TEST(BackwardBarriers, NoInterleavingGoesWrong) {
  expect_right(backward_model<BackwardKernel<128, 128, 2>>({2, 1}));
  expect_right(backward_model<BackwardKernel<128, 128, 1>>({1, 2}));
}

TEST(BackwardBarriers, NoInterleavingOfWideHeadsGoesWrong) {
  expect_right(backward_model<BackwardKernel<192, 64, 2>>({2, 1}));
}

TEST(BackwardBarriers, NoInterleavingOfCtasThatSplitColumnsGoesWrong) {
  EXPECT_EQ(split_columns_model(3).explore(), "");
}

TEST(BackwardBarriers, SumsSentBeforeTheOtherWarpgroupHasReadPAreFound) {
  EXPECT_NE(split_columns_model(3, false).explore(), "");
}

TEST(BackwardBarriers, NoInterleavingOfCtasThatSendDsOverPGoesWrong) {
  EXPECT_EQ(shared_tile_model({.q_tiles = 3}).explore(), "");
}

TEST(BackwardBarriers, TilesOverwrittenWhileTheOtherCtaNeedsThemAreFound) {
  EXPECT_NE(shared_tile_model({.q_tiles = 3, .skips_ds_wait = true}).explore(), "");
  EXPECT_NE(shared_tile_model({.q_tiles = 3, .skips_p_wait = true}).explore(), "");
}

TEST(BackwardBarriers, DsThatIsOverwrittenWhileItIsReadIsFound) {
  EXPECT_NE((backward_model<BackwardKernel<128, 128, 2>>({4}, true).explore()), "");
}

}  // namespace
}  // namespace flashjit
