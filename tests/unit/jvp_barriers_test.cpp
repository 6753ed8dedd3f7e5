// The waits of sm90's kernel of O's tangent (templates/sm90/jvp.cuh, jvp_producer.cuh) in every interleaving
// of small problems, as barrier_model_test.cpp has those of the other kernels.
#include <gtest/gtest.h>

#include "tests/support/kernel_rings.hpp"

namespace flashjit::test {
namespace {

using Ring = BarrierModel::Ring;

constexpr int kWarpsOfGroup = 4, kThreadsOfGroup = 128;

/// To the forward pass's rings a tensor and its tangent are one of twice as many columns.
template <int dim, int bc, int stages, bool listed>
struct JvpTiles : ExampleProblem {
  static constexpr int kHeadDim = 2 * dim, kHeadDimV = 2 * dim, kBr = 128, kBc = bc, kWarps = 8,
                       kStages = stages, kQTilesPerCta = 1, kDSplit = 1;
  static constexpr bool kTileLists = listed, kBiasTile = false, kScoreColumnTerm = false;
};
template <int dim, int bc, int stages, bool listed = false>
struct JvpKernel : JvpTiles<dim, bc, stages, listed> {
  static constexpr int kSharedBytes = sm90::kForwardLayout<JvpTiles<dim, bc, stages, listed>>.bytes();
};

// The faults: a tile's list entry is read when its K has been released, and V is released when its product
// has begun.
struct Faults {
  bool late_entry = false, early_v = false;
};

/// `kv_tiles`: of each work tile.
template <class P>
BarrierModel jvp_model(const std::vector<int>& kv_tiles, const Faults& faults = {}) {
  constexpr bool kListed = sm90::kProducerPostsEntries<P>;
  BarrierModel model;
  const sm90::ForwardStorage<P> storage(0, nullptr);
  made_barriers().clear();
  storage.init_barriers();
  const int groups = storage.kRowGroups, rounds = static_cast<int>(kv_tiles.size());
  const Ring k = ring_of(model, "K", facts_of<sm90::KRing<P>>(storage), 1,
                         kListed ? kThreadsOfGroup : kWarpsOfGroup),
             v = ring_of(model, "V", facts_of<sm90::VRing<P>>(storage), 1, kWarpsOfGroup),
             work = ring_of(model, "work tile", facts_of<sm90::WorkRing<P>>(storage), 1, 1);
  const auto entries = model.buffers("list entry", P::kStages);
  std::vector<Ring> q;  // of each warpgroup
  std::vector<int> ping_pong;
  for (int wg = 0; wg < groups; ++wg) {
    q.push_back(ring_of(model, "Q of a warpgroup", facts_of<sm90::QRing<P>>(storage, wg), 1, kWarpsOfGroup));
    ping_pong.push_back(model.named_barrier(fmt::format("ping_pong[{}]", wg)));
  }

  add_q_producer(model, work, q, rounds);

  auto& kv_producer = model.agent("KV producer");
  const auto load_v = [&](int n) { kv_producer.acquire(v, n).expect(v, n, 1).copy(v, n); };
  int loaded = 0;
  for (int round = 0; round <= rounds; ++round) {
    kv_producer.wait_full(work, round).begin_read(work, round);
    for (int tile = 0; round < rounds && tile < kv_tiles[round]; ++tile, ++loaded) {
      kv_producer.acquire(k, loaded);
      if (kListed) kv_producer.write(entries[loaded % P::kStages], loaded);
      kv_producer.expect(k, loaded, 1).copy(k, loaded);
      if (loaded > 0) load_v(loaded - 1);
    }
    kv_producer.end_read(work, round);
  }
  load_v(loaded - 1);

  for (int wg = 0; wg < groups; ++wg) {
    auto& consumer = model.agent(fmt::format("warpgroup {}", wg));
    const Ring& own_q = q[wg];
    const auto hand_on = [&] { consumer.named_arrive(ping_pong[(wg + 1) % groups]); };
    const auto leave_k = [&](int n, int round, bool last) {
      const auto find_tile = [&] {
        if (kListed) consumer.read(entries[n % P::kStages], n);
      };
      consumer.end_read(k, n);
      if (!faults.late_entry) find_tile();
      consumer.release(k, n);
      if (faults.late_entry) find_tile();
      if (!last) return;
      consumer.end_read(own_q, round);
      if (storage.kQStages == 1) consumer.release(own_q, round);
    };
    if (wg == groups - 1) hand_on();
    int n = 0;
    for (int round = 0; round < rounds; ++round) {
      const int tiles = kv_tiles[round];
      consumer.wait_full(own_q, round).begin_read(work, round);
      consumer.wait_full(k, n).named_sync(ping_pong[wg]);
      consumer.begin_read(own_q, round).begin_read(k, n);  // the first S
      hand_on();
      leave_k(n, round, tiles == 1);
      for (int tile = 0; tile < tiles; ++tile, ++n) {
        const bool more = tile + 1 < tiles;
        consumer.wait_full(v, n);
        if (more) consumer.wait_full(k, n + 1);
        consumer.named_sync(ping_pong[wg]).begin_read(v, n);  // O += P V
        if (more) consumer.begin_read(k, n + 1);              // and the next S
        hand_on();
        if (faults.early_v) consumer.release(v, n);
        consumer.end_read(v, n);
        if (!faults.early_v) consumer.release(v, n);
        if (more) leave_k(n + 1, round, tile + 2 == tiles);
      }
      if (storage.kQStages == 2) consumer.release(own_q, round);
      consumer.end_read(work, round);  // O is stored
    }
    consumer.wait_full(own_q, rounds).read(work, rounds);
    if (wg == 0) consumer.named_sync(ping_pong[wg]);
  }
  return model;
}

TEST(JvpBarriers, NoInterleavingGoesWrong) {
  const auto expect_right = [](BarrierModel&& model) {
    EXPECT_EQ(model.explore(), "");
    EXPECT_GT(model.states(), 100u);
  };
  using TwoQStages = JvpKernel<128, 48, 2>;
  static_assert(sm90::ForwardStorage<TwoQStages>::kQStages == 2);
  expect_right(jvp_model<TwoQStages>({2, 1}));
  expect_right(jvp_model<TwoQStages>({1, 1, 1}));
  using OneQStage = JvpKernel<128, 48, 3>;
  static_assert(sm90::ForwardStorage<OneQStage>::kQStages == 1);
  expect_right(jvp_model<OneQStage>({2, 1}));
  expect_right(jvp_model<JvpKernel<64, 64, 2, true>>({3}));
  expect_right(jvp_model<JvpKernel<64, 80, 3>>({3}));
}

// The model sees what it is there for.
TEST(JvpBarriers, AnEntryThatIsReadWhenKIsReleasedIsFound) {
  EXPECT_NE((jvp_model<JvpKernel<64, 64, 2, true>>({4}, {.late_entry = true}).explore()), "");
}
TEST(JvpBarriers, VThatIsReleasedTooEarlyIsFound) {
  EXPECT_NE((jvp_model<JvpKernel<128, 48, 2>>({4}, {.early_v = true}).explore()), "");
}

}  // namespace
}  // namespace flashjit::test
