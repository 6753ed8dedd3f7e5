// The waits of the sm90 kernels, in every interleaving of small problems: no wait is for ever, no stage is
// overwritten while it is read. The graphs follow templates/sm90: forward.cuh and forward_producer.cuh,
// backward.cuh, backward_producer.cuh and backward_dq.cuh. A change of a kernel's waits is made here first.
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/barrier_model.hpp"

namespace flashjit {
namespace {

using test::BarrierModel;

/// Uses of a ring of `stages` places before use `n`, of the place that it takes.
int uses_before(int n, int stages) { return n / stages; }

// --- Forward
// ---------------------------------------------------------------------------------------------------------

struct ForwardProblem {
  std::vector<int> kv_tiles;  ///< of each work tile
  int stages = 2, q_stages = 1, warp_groups = 2, kept_work_tiles = 8;
  bool bias_tile = false;
  bool early_release = false;  ///< the fault: K is released when its product has begun
};

BarrierModel forward_model(const ForwardProblem& problem) {
  BarrierModel model;
  const int stages = problem.stages, q_stages = problem.q_stages, groups = problem.warp_groups,
            kept = problem.kept_work_tiles, rounds = static_cast<int>(problem.kv_tiles.size());
  const auto q = model.buffers("Q", q_stages * groups), k = model.buffers("K", stages),
             v = model.buffers("V", stages), bias = model.buffers("bias tile", stages),
             work = model.buffers("work tile", kept);
  const auto q_full = model.mbarriers("q_full", q_stages * groups, 1),
             q_empty = model.mbarriers("q_empty", q_stages * groups, 1),
             work_full = model.mbarriers("work_full", kept, 1), k_full = model.mbarriers("k_full", stages, 1),
             k_empty = model.mbarriers("k_empty", stages, groups),
             v_full = model.mbarriers("v_full", stages, 1),
             v_empty = model.mbarriers("v_empty", stages, groups),
             bias_full = model.mbarriers("terms_full", stages, 1),
             bias_empty = model.mbarriers("terms_empty", stages, groups);
  std::vector<int> ping_pong;
  for (int wg = 0; wg < groups; ++wg)
    ping_pong.push_back(model.named_barrier(fmt::format("ping_pong[{}]", wg)));

  // Finds the work tiles, and loads each warpgroup's Q.
  auto& q_producer = model.agent("Q producer");
  for (int round = 0; round <= rounds; ++round) {
    q_producer.write(work[round % kept], round).arrive(work_full[round % kept]);
    for (int wg = 0; wg < groups; ++wg) {
      const int at = wg + round % q_stages * groups;
      q_producer.wait(q_empty[at], uses_before(round, q_stages)).expect(q_full[at], round < rounds ? 1 : 0);
      if (round < rounds) q_producer.copy(q[at], round, q_full[at]);
    }
  }

  // Loads K of a tile, then V of the one before.
  auto& kv_producer = model.agent("KV producer");
  const auto load = [&](int n, const std::vector<int>& to, const std::vector<int>& full,
                        const std::vector<int>& empty) {
    kv_producer.wait(empty[n % stages], uses_before(n, stages)).expect(full[n % stages], 1);
    kv_producer.copy(to[n % stages], n, full[n % stages]);
  };
  int loaded = 0;
  for (int round = 0; round <= rounds; ++round) {
    kv_producer.wait(work_full[round % kept], uses_before(round, kept) + 1)
        .begin_read(work[round % kept], round);
    for (int tile = 0; round < rounds && tile < problem.kv_tiles[round]; ++tile, ++loaded) {
      load(loaded, k, k_full, k_empty);
      if (problem.bias_tile) load(loaded, bias, bias_full, bias_empty);
      if (loaded > 0) load(loaded - 1, v, v_full, v_empty);
    }
    kv_producer.end_read(work[round % kept]);
  }
  load(loaded - 1, v, v_full, v_empty);

  for (int wg = 0; wg < groups; ++wg) {
    auto& consumer = model.agent(fmt::format("warpgroup {}", wg));
    const auto hand_on = [&] { consumer.named_arrive(ping_pong[(wg + 1) % groups]); };
    if (wg == groups - 1) hand_on();
    int n = 0;
    for (int round = 0; round < rounds; ++round) {
      const int at = wg + round % q_stages * groups;
      consumer.wait(q_full[at], uses_before(round, q_stages) + 1).begin_read(work[round % kept], round);
      for (int tile = 0; tile < problem.kv_tiles[round]; ++tile, ++n) {
        const int stage = n % stages, before = (n + stages - 1) % stages;
        consumer.wait(k_full[stage], uses_before(n, stages) + 1).named_sync(ping_pong[wg]);
        if (tile == 0) consumer.begin_read(q[at], round);
        consumer.begin_read(k[stage], n);  // S = Q K^T
        if (problem.early_release) consumer.arrive(k_empty[stage]);
        if (n > 0)
          consumer.wait(v_full[before], uses_before(n - 1, stages) + 1)
              .begin_read(v[before], n - 1);  // O += P V
        hand_on();
        consumer.end_read(k[stage]);
        if (!problem.early_release) consumer.arrive(k_empty[stage]);
        const bool last = tile + 1 == problem.kv_tiles[round];
        if (last) consumer.end_read(q[at]);
        if (last && q_stages == 1) consumer.arrive(q_empty[at]);
        if (problem.bias_tile)
          consumer.wait(bias_full[stage], uses_before(n, stages) + 1)
              .read(bias[stage], n)
              .arrive(bias_empty[stage]);
        if (n > 0) consumer.end_read(v[before]).arrive(v_empty[before]);
        if (tile == 0 && round > 0)
          consumer.end_read(work[(round - 1) % kept]);  // O of the last work tile is stored
      }
      if (q_stages == 2) consumer.arrive(q_empty[at]);
    }
    const int last = (n - 1) % stages, end = wg + rounds % q_stages * groups;
    consumer.wait(q_full[end], uses_before(rounds, q_stages) + 1).read(work[rounds % kept], rounds);
    consumer.wait(v_full[last], uses_before(n - 1, stages) + 1).read(v[last], n - 1);
    consumer.end_read(work[(rounds - 1) % kept]);
    if (wg == 0) consumer.named_sync(ping_pong[wg]);
  }
  return model;
}

TEST(ForwardBarriers, NoInterleavingGoesWrong) {
  for (const ForwardProblem& problem :
       {ForwardProblem{.kv_tiles = {3, 1, 2}}, ForwardProblem{.kv_tiles = {1, 1, 1, 2}, .q_stages = 2},
        ForwardProblem{.kv_tiles = {2, 3}, .stages = 3, .q_stages = 2},
        ForwardProblem{.kv_tiles = {2, 1}, .bias_tile = true}, ForwardProblem{.kv_tiles = {4}, .stages = 1},
        ForwardProblem{.kv_tiles = {1, 2, 1, 1, 1, 1}, .warp_groups = 1, .kept_work_tiles = 4}}) {
    BarrierModel model = forward_model(problem);
    EXPECT_EQ(model.explore(), "");
    EXPECT_GT(model.states(), 100u);
  }
}

TEST(ForwardBarriers, ThreeWarpGroups) {
  EXPECT_EQ(forward_model({.kv_tiles = {2, 1}, .warp_groups = 3}).explore(), "");
}

// The model sees what it is there for.
TEST(ForwardBarriers, AStageThatIsReleasedTooEarlyIsFound) {
  EXPECT_NE(forward_model({.kv_tiles = {4}, .early_release = true}).explore(), "");
}
TEST(ForwardBarriers, TooFewKeptWorkTilesAreFound) {
  EXPECT_NE(forward_model({.kv_tiles = {1, 1, 1, 1}, .kept_work_tiles = 1}).explore(), "");
}

// --- Forward, two warpgroups that share rows
// -------------------------------------------------------------------------------------------

struct WideProblem {
  std::vector<int> kv_tiles;  ///< of each work tile
  int stages = 2, kept_work_tiles = 8;
  bool parts = true;         ///< K's tile is V, too, in two parts
  bool holds = true;         ///< the second group's P V until the first one's S is there
  bool hands_early = false;  ///< the fault: P is overwritten without waiting
};

BarrierModel wide_model(const WideProblem& problem) {
  BarrierModel model;
  const int stages = problem.stages, kept = problem.kept_work_tiles,
            rounds = static_cast<int>(problem.kv_tiles.size());
  const auto q = model.buffers("Q", 1), left = model.buffers("K or left part", stages),
             right = model.buffers("V or right part", stages), work = model.buffers("work tile", kept),
             handed = model.buffers("P", 1);
  const auto q_full = model.mbarriers("q_full", 1, 1), q_empty = model.mbarriers("q_empty", 1, 1),
             work_full = model.mbarriers("work_full", kept, 1), k_full = model.mbarriers("k_full", stages, 1),
             k_empty = model.mbarriers("k_empty", stages, 1), v_full = model.mbarriers("v_full", stages, 1),
             v_empty = model.mbarriers("v_empty", stages, problem.parts ? 1 : 2);
  const int p_full = model.named_barrier("p_full"), p_empty = model.named_barrier("p_empty"),
            may_start_pv = model.named_barrier("may_start_pv");

  auto& q_producer = model.agent("Q producer");
  for (int round = 0; round <= rounds; ++round) {
    q_producer.write(work[round % kept], round).arrive(work_full[round % kept]);
    q_producer.wait(q_empty[0], round).expect(q_full[0], round < rounds ? 1 : 0);
    if (round < rounds) q_producer.copy(q[0], round, q_full[0]);
  }

  auto& kv_producer = model.agent("KV producer");
  int loaded = 0;
  for (int round = 0; round <= rounds; ++round) {
    kv_producer.wait(work_full[round % kept], uses_before(round, kept) + 1)
        .begin_read(work[round % kept], round);
    for (int tile = 0; round < rounds && tile < problem.kv_tiles[round]; ++tile, ++loaded) {
      const int stage = loaded % stages, uses = uses_before(loaded, stages);
      kv_producer.wait(k_empty[stage], uses)
          .expect(k_full[stage], 1)
          .copy(left[stage], loaded, k_full[stage]);
      kv_producer.wait(v_empty[stage], uses)
          .expect(v_full[stage], 1)
          .copy(right[stage], loaded, v_full[stage]);
    }
    kv_producer.end_read(work[round % kept]);
  }

  auto& first = model.agent("first warpgroup");
  const auto start_s = [&](int n, bool held) {
    const int stage = n % stages, uses = uses_before(n, stages) + 1;
    if (held && !problem.holds) first.named_arrive(may_start_pv);
    first.wait(k_full[stage], uses).begin_read(left[stage], n);
    if (problem.parts) first.wait(v_full[stage], uses).begin_read(right[stage], n);
  };
  int n = 0;
  first.wait(q_full[0], 1).begin_read(work[0], 0).begin_read(q[0], 0);
  start_s(0, false);
  for (int round = 0; round < rounds; ++round) {
    for (int tile = 0; tile < problem.kv_tiles[round]; ++tile) {
      const int stage = n % stages;
      const bool last = tile + 1 == problem.kv_tiles[round];
      if (problem.parts)
        first.end_read(right[stage]);  // S is there
      else
        first.end_read(left[stage]).arrive(k_empty[stage]);
      if (last) first.end_read(q[0]).arrive(q_empty[0]);
      if (n > 0 && problem.holds) first.named_arrive(may_start_pv);
      if (n > 0 && !problem.hands_early) first.named_sync(p_empty);
      first.write(handed[0], n).named_arrive(p_full);
      if (!problem.parts) first.wait(v_full[stage], uses_before(n, stages) + 1).begin_read(right[stage], n);
      ++n;
      if (last) first.wait(q_full[0], round + 2).begin_read(work[(round + 1) % kept], round + 1);
      if (!last || round + 1 < rounds) {
        if (last) first.begin_read(q[0], round + 1);
        start_s(n, true);
      }
      // O is there
      if (problem.parts)
        first.end_read(left[stage]).arrive(k_empty[stage]);
      else
        first.end_read(right[stage]).arrive(v_empty[stage]);
      if (last) first.end_read(work[round % kept]);
    }
  }
  first.named_arrive(may_start_pv).named_sync(p_empty);

  auto& second = model.agent("second warpgroup");
  n = 0;
  for (int round = 0; round <= rounds; ++round) {
    second.wait(work_full[round % kept], uses_before(round, kept) + 1).begin_read(work[round % kept], round);
    for (int tile = 0; round < rounds && tile < problem.kv_tiles[round]; ++tile, ++n) {
      const int stage = n % stages;
      second.named_sync(p_full).begin_read(handed[0], n).wait(v_full[stage], uses_before(n, stages) + 1);
      second.named_sync(may_start_pv).read(right[stage], n).arrive(v_empty[stage]);
      second.end_read(handed[0]).named_arrive(p_empty);
    }
    second.end_read(work[round % kept]);
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

TEST(WideForwardBarriers, POverwrittenBeforeItIsReadIsFound) {
  EXPECT_NE(wide_model({.kv_tiles = {4}, .hands_early = true}).explore(), "");
}
// With one stage V comes when P V has been computed, and S of the next tile comes before that.
TEST(WideForwardBarriers, HoldingPvWithoutAStageForTheNextTileIsFound) {
  EXPECT_NE(wide_model({.kv_tiles = {4}, .stages = 1}).explore(), "");
}

// --- Backward
// --------------------------------------------------------------------------------------------------------

struct BackwardProblem {
  std::vector<int> q_tiles;  ///< of each KV tile
  int stages = 2, dout_stages = 2, kept_q_tiles = 8;
  bool wide = false;
  bool skips_ds_wait = false;  ///< the fault: dS is written before the tile before's is there
};

BarrierModel backward_model(const BackwardProblem& problem) {
  constexpr int kGroups = 2;
  BarrierModel model;
  const int stages = problem.stages, dout_stages = problem.dout_stages, kept = problem.kept_q_tiles;
  // Wide, each warpgroup's columns of a stage are a buffer, as its dQ comes to lie over them.
  const auto q = model.buffers("Q", stages * kGroups), dout = model.buffers("dO", dout_stages * kGroups),
             ds = model.buffers("dS", 2 * kGroups), dq = model.buffers("dQ", kGroups),
             said = model.buffers("QTileInfo", kept);
  const int k = model.buffer("K"), v = model.buffer("V");
  const auto q_full = model.mbarriers("q_full", stages, 1),
             q_empty = model.mbarriers("q_empty", stages, kGroups),
             dout_full = model.mbarriers("dout_full", dout_stages, 1),
             dout_empty = model.mbarriers("dout_empty", dout_stages, kGroups),
             ds_full = model.mbarriers("ds_full", 2, kGroups),
             dq_full = model.mbarriers("dq_full", kGroups, 1),
             dq_empty = model.mbarriers("dq_empty", kGroups, 1);
  const int kv_empty = model.mbarrier("kv_empty", kGroups);

  struct QTile {
    int kv_tile;
    bool first, last;
  };
  std::vector<QTile> all;
  for (std::size_t n = 0; n < problem.q_tiles.size(); ++n)
    for (int tile = 0; tile < problem.q_tiles[n]; ++tile)
      all.push_back({static_cast<int>(n), tile == 0, tile + 1 == problem.q_tiles[n]});
  const int count = static_cast<int>(all.size());

  auto& producer = model.agent("producer");
  for (int i = 0; i < count; ++i) {
    const int stage = i % stages, dout_stage = i % dout_stages;
    producer.write(said[i % kept], i).wait(q_empty[stage], uses_before(i, stages));
    producer.expect(q_full[stage], kGroups + (all[i].first ? 1 : 0));
    for (int half = 0; half < kGroups; ++half) producer.copy(q[stage * kGroups + half], i, q_full[stage]);
    producer.wait(dout_empty[dout_stage], uses_before(i, dout_stages));
    producer.expect(dout_full[dout_stage], kGroups + (all[i].first ? 1 : 0));
    for (int half = 0; half < kGroups; ++half)
      producer.copy(dout[dout_stage * kGroups + half], i, dout_full[dout_stage]);
    if (!all[i].first) continue;
    producer.wait(kv_empty, all[i].kv_tile);
    producer.copy(k, all[i].kv_tile, q_full[stage]).copy(v, all[i].kv_tile, dout_full[dout_stage]);
  }
  producer.wait(q_empty[count % stages], uses_before(count, stages)).write(said[count % kept], count);
  producer.arrive(q_full[count % stages]);

  for (int wg = 0; wg < kGroups; ++wg) {
    auto& consumer = model.agent(fmt::format("warpgroup {}", wg));
    const auto both = [&](const std::vector<int>& buffers, int place, int content, bool begin) {
      for (int half = 0; half < kGroups; ++half) {
        const int buffer = buffers[place * kGroups + half];
        begin ? consumer.begin_read(buffer, content) : consumer.end_read(buffer);
      }
    };
    const auto wait_ds = [&](int i) { consumer.wait(ds_full[i % 2], uses_before(i, 2) + 1); };
    const auto hand_on_dq = [&](int i) {
      consumer.wait(dq_empty[wg], i).write(dq[wg], i).arrive(dq_full[wg]);
    };
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
      consumer.wait(q_full[stage], uses_before(i, stages) + 1).begin_read(said[i % kept], i);
      both(q, stage, i, true);
      consumer.begin_read(k, all[i].kv_tile);  // S = Q K^T
      consumer.wait(dout_full[dout_stage], uses_before(i, dout_stages) + 1);
      both(dout, dout_stage, i, true);
      consumer.read(v, all[i].kv_tile).end_read(k);  // dP = dO V^T
      both(q, stage, i, false);
      both(dout, dout_stage, i, false);
      if (!problem.wide && i > 0 && !problem.skips_ds_wait) wait_ds(i - 1);
      consumer.write(ds[i % 2 * kGroups + wg], i);
      if (problem.wide) {
        consumer.arrive(ds_full[i % 2]);
        wait_ds(i);
        multiply_ds_k(i, [&] { consumer.begin_read(own_dout, i).begin_read(own_q, i); });
        consumer.end_read(own_dout).wait(dq_empty[wg], i).write(own_dout, -2 - i);  // dQ over dO
        consumer.end_read(own_q).write(own_q, -2 - i).write(dq[wg], i).arrive(dq_full[wg]);
        if (all[i].last) consumer.arrive(kv_empty);
      } else {
        const auto multiply = [&] { both(q, stage, i, true), both(dout, dout_stage, i, true); };
        if (all[i].first)
          multiply();
        else
          multiply_ds_k(i - 1, multiply);
        consumer.arrive(ds_full[i % 2]);
        if (!all[i].first) hand_on_dq(i - 1);
        both(q, stage, i, false), both(dout, dout_stage, i, false);
        consumer.arrive(dout_empty[dout_stage]).arrive(q_empty[stage]);
        if (all[i].last) {
          wait_ds(i);
          multiply_ds_k(i, [] {});
          consumer.arrive(kv_empty);
          hand_on_dq(i);
        }
      }
      consumer.end_read(said[i % kept]);
    }
    consumer.wait(q_full[count % stages], uses_before(count, stages) + 1).read(said[count % kept], count);
    consumer.wait(dq_empty[wg], count).arrive(dq_full[wg]);

    // The thread that adds the warpgroup's dQ to global memory.
    auto& adder = model.agent(fmt::format("dQ of warpgroup {}", wg));
    for (int i = 0; i < count; ++i) {
      adder.wait(dq_full[wg], i + 1).begin_read(said[i % kept], i).read(dq[wg], i);
      if (problem.wide) {
        adder.read(dout[i % dout_stages * kGroups + wg], -2 - i).read(q[i % stages * kGroups + wg], -2 - i);
      }
      adder.end_read(said[i % kept]).arrive(dq_empty[wg]);
      if (problem.wide) adder.arrive(dout_empty[i % dout_stages]).arrive(q_empty[i % stages]);
    }
    adder.wait(dq_full[wg], count + 1).read(said[count % kept], count);
  }
  return model;
}

/// What the consumers of two CTAs that split columns exchange, over so many Q tiles: their loads and dQ are
/// those of a CTA alone.
BarrierModel split_columns_model(int q_tiles, bool meets_before_sending = true) {
  constexpr int kCtas = 2, kGroups = 2;
  BarrierModel model;
  const auto partial = model.buffers("partial sums", kCtas * kGroups),
             partial_full = model.mbarriers("partial_sums_full", kCtas * kGroups, 1),
             ds_full = model.mbarriers("ds_full", kCtas * 2, kGroups);
  // P and dS of a CTA, in the parts that each warpgroup of each CTA computes.
  const auto p_and_ds = model.buffers("P and dS", kCtas * kCtas * kGroups);
  const auto part = [&](int cta, int from, int wg) { return p_and_ds[(cta * kCtas + from) * kGroups + wg]; };
  std::vector<int> both;
  for (int cta = 0; cta < kCtas; ++cta) both.push_back(model.named_barrier(fmt::format("both[{}]", cta)));
  for (int cta = 0; cta < kCtas; ++cta)
    for (int wg = 0; wg < kGroups; ++wg) {
      auto& consumer = model.agent(fmt::format("warpgroup {} of CTA {}", wg, cta));
      const int own = cta * kGroups + wg, other_cta = 1 - cta, other = other_cta * kGroups + wg;
      for (int i = 0; i < q_tiles; ++i) {
        if (meets_before_sending) consumer.named_sync(both[cta]);
        consumer.expect(partial_full[own], 1).copy(partial[other], i, partial_full[other]);
        consumer.wait(partial_full[own], i + 1).read(partial[own], i);
        consumer.write(part(cta, cta, wg), i);
        consumer.copy(part(other_cta, cta, wg), i, ds_full[other_cta * 2 + i % 2]);
        const int full = ds_full[cta * 2 + i % 2];
        wg == 0 ? consumer.expect(full, kGroups) : consumer.arrive(full);
        consumer.wait(full, uses_before(i, 2) + 1);
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
  const auto ds_full = model.mbarriers("ds_full", kCtas * 2, kGroups),
             p_read = model.mbarriers("other_p_read", kCtas, kGroups),
             other_full = model.mbarriers("other_ds_full", kCtas * 2, 1),
             sent_read = model.mbarriers("sent_ds_read", kCtas, 1);
  for (int cta = 0; cta < kCtas; ++cta) {
    const int other = 1 - cta, both = model.named_barrier(fmt::format("both[{}]", cta));
    const auto each_part = [&](auto of_part) {
      for (int wg = 0; wg < kGroups; ++wg) of_part(wg);
    };
    for (int wg = 0; wg < kGroups; ++wg) {
      auto& consumer = model.agent(fmt::format("warpgroup {} of CTA {}", wg, cta));
      for (int i = 0; i < problem.q_tiles; ++i) {
        if (!problem.skips_ds_wait) consumer.wait(sent_read[cta], i);
        consumer.write(p[cta * kGroups + wg], 2 * i).write(ds[cta * kGroups + wg], i);
        consumer.arrive(ds_full[cta * 2 + i % 2]).wait(ds_full[cta * 2 + i % 2], uses_before(i, 2) + 1);
        each_part([&](int of) { consumer.begin_read(ds[cta * kGroups + of], i); });
        each_part([&](int of) { consumer.begin_read(p[cta * kGroups + of], 2 * i); });
        each_part([&](int of) { consumer.end_read(p[cta * kGroups + of]); });
        consumer.arrive(p_read[other]).wait(other_full[cta * 2 + i % 2], uses_before(i, 2) + 1);
        consumer.end_read(ds[other * kGroups + wg]);
        each_part([&](int of) { consumer.begin_read(p[cta * kGroups + of], 2 * i + 1); });
        each_part([&](int of) { consumer.end_read(p[cta * kGroups + of]).end_read(ds[cta * kGroups + of]); });
        consumer.named_sync(both);
        if (wg == 0) consumer.arrive(sent_read[other]);
      }
    }
    auto& sender = model.agent(fmt::format("copies of CTA {}", cta));
    for (int i = 0; i < problem.q_tiles; ++i) {
      sender.wait(ds_full[cta * 2 + i % 2], uses_before(i, 2) + 1);
      if (!problem.skips_p_wait) sender.wait(p_read[cta], i + 1);
      sender.expect(other_full[cta * 2 + i % 2], kGroups);
      each_part([&](int of) { sender.begin_read(ds[cta * kGroups + of], i); });
      each_part(
          [&](int of) { sender.copy(p[other * kGroups + of], 2 * i + 1, other_full[other * 2 + i % 2]); });
    }
  }
  return model;
}

TEST(BackwardBarriers, NoInterleavingGoesWrong) {
  for (const BackwardProblem& problem :
       {BackwardProblem{.q_tiles = {2, 1}}, BackwardProblem{.q_tiles = {3}, .dout_stages = 1},
        BackwardProblem{.q_tiles = {1, 2}, .stages = 1, .dout_stages = 1}}) {
    BarrierModel model = backward_model(problem);
    EXPECT_EQ(model.explore(), "");
    EXPECT_GT(model.states(), 100u);
  }
}

TEST(BackwardBarriers, NoInterleavingOfWideHeadsGoesWrong) {
  for (const BackwardProblem& problem : {BackwardProblem{.q_tiles = {2, 1}, .wide = true},
                                         BackwardProblem{.q_tiles = {2, 1}, .dout_stages = 1, .wide = true}})
    EXPECT_EQ(backward_model(problem).explore(), "");
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
  EXPECT_NE(backward_model({.q_tiles = {4}, .skips_ds_wait = true}).explore(), "");
}

}  // namespace
}  // namespace flashjit
