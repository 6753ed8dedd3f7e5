// The order in which the CTAs of family sm90's forward pass take Q tiles: every tile once, equal work for
// each slot, and not too many heads at a time.
#include "templates/tma/tile_order.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

namespace flashjit::tma {
namespace {

constexpr unsigned kH100 = 132;

TileOrder lpt_order(unsigned rows, unsigned heads, unsigned cluster, unsigned slots, bool windows) {
  TileOrder order(rows, heads, cluster);
  if (slots < order.size()) order.use_lpt(slots, windows);
  return order;
}

/// The tiles by index.
std::vector<OrderedTile> all_of(const TileOrder& order) {
  std::vector<OrderedTile> tiles;
  for (unsigned index = 0; index < order.size(); ++index) tiles.push_back(order.at(index));
  return tiles;
}

/// The longest slot's time divided by the mean, where `cost` is a tile's time.
double imbalance(const TileOrder& order, unsigned slots, bool windows, const auto& cost) {
  const std::vector<OrderedTile> tiles = all_of(order);
  std::vector<double> times(slots);
  for (unsigned wave = 0; wave * slots < tiles.size(); ++wave)
    for (unsigned slot = 0; slot < slots; ++slot) {
      const unsigned index = TileOrder::index(slot, wave, slots, windows);
      if (index < tiles.size()) times[slot] += cost(tiles[index].tile);
    }
  return *std::ranges::max_element(times) * slots / std::accumulate(times.begin(), times.end(), 0.0);
}

/// The most heads whose tiles run in the same wave.
std::size_t most_heads_at_a_time(const TileOrder& order, unsigned slots) {
  const std::vector<OrderedTile> tiles = all_of(order);
  std::size_t most = 0;
  for (unsigned begin = 0; begin < tiles.size(); begin += slots) {
    std::set<unsigned> heads;
    for (unsigned n = begin; n < std::min<std::size_t>(begin + slots, tiles.size()); ++n)
      heads.insert(tiles[n].head);
    most = std::max(most, heads.size());
  }
  return most;
}

TEST(TileOrder, HasEachTileOnce) {
  for (const unsigned slots : {1u, 8u, 114u, kH100, 2 * kH100})
    for (unsigned rows = 1; rows <= 40; ++rows)
      for (const unsigned heads : {1u, 2u, 3u, 16u, 53u, 211u})
        for (const unsigned cluster : {1u, 2u})
          for (const bool windows : {false, true}) {
            const TileOrder order =
                lpt_order(rows, heads, slots % cluster == 0 ? cluster : 1, slots, windows);
            std::vector<int> times(order.size());
            for (const OrderedTile& tile : all_of(order)) {
              ASSERT_LT(tile.head, heads);
              ASSERT_LT(tile.tile, rows);
              ++times[tile.head * rows + tile.tile];
            }
            ASSERT_EQ(times, std::vector<int>(order.size(), 1))
                << rows << " tiles of " << heads << " heads, " << slots << " slots, clusters of " << cluster;
          }
}

TEST(TileOrder, GivesEachSlotOneTileAWave) {
  for (const unsigned slots : {1u, 7u, kH100})
    for (const bool windows : {false, true})
      for (unsigned wave = 0; wave < 12; ++wave) {
        std::vector<unsigned> indices, all(slots);
        for (unsigned slot = 0; slot < slots; ++slot)
          indices.push_back(TileOrder::index(slot, wave, slots, windows));
        std::ranges::sort(indices);
        std::iota(all.begin(), all.end(), wave * slots);
        EXPECT_EQ(indices, all);
      }
}

TEST(TileOrder, IsHeadAfterHeadWithoutLpt) {
  const TileOrder order(3, 2, 1);
  const std::vector<OrderedTile> tiles = all_of(order);
  for (unsigned n = 0; n < 6; ++n) {
    EXPECT_EQ(tiles[n].head, n / 3);
    EXPECT_EQ(tiles[n].tile, 2 - n % 3) << "the last first";
  }
}

TEST(TileOrder, ClustersTakeNeighbouringTiles) {
  for (const unsigned rows : {2u, 6u, 10u, 34u}) {
    const std::vector<OrderedTile> tiles = all_of(lpt_order(rows, 300, 2, kH100, false));
    for (unsigned n = 0; n < tiles.size(); n += 2) {
      ASSERT_EQ(tiles[n].head, tiles[n + 1].head) << rows;
      ASSERT_EQ(tiles[n].tile, tiles[n + 1].tile + 1) << rows;
    }
  }
}

// Where only hundreds of heads make whole pairs of waves, a group once had all of them, so that each CTA had
// a head of its own: 640 keys took 1.5 times as long as 768.
TEST(TileOrder, GroupsFewHeads) {
  for (unsigned rows = 5; rows <= 128; ++rows) {
    const unsigned heads = 128 * 16 / rows;  // 16k tokens, hidden size 2048
    EXPECT_LE(most_heads_at_a_time(lpt_order(rows, heads, 2, kH100, false), kH100), 63u) << rows;
    EXPECT_LE(most_heads_at_a_time(lpt_order(rows, 2 * heads, 1, 2 * kH100, false), 2 * kH100), 2 * 63u)
        << rows;
  }
}

TEST(TileOrder, BalancesTheSlots) {
  const auto causal = [](unsigned tile) { return tile + 2.4; };
  const auto window = [](unsigned tile) { return std::min(tile, 8u) + 2.4; };
  for (unsigned rows = 2; rows <= 64; ++rows) {
    const unsigned heads = 128 * 16 / rows;
    const TileOrder order = lpt_order(rows, heads, 2, kH100, false);
    const TileOrder of_windows = lpt_order(rows, heads, 2, kH100, true);
    EXPECT_LT(imbalance(order, kH100, false, causal), 1.11) << rows;
    EXPECT_LT(imbalance(of_windows, kH100, true, window), 1.13) << rows;
  }
}

}  // namespace
}  // namespace flashjit::tma
