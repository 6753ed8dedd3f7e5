// The order in which the blocks of family sm90's forward pass take Q tiles: all of them, alike for each
// block, and not too many heads at a time.
#include "templates/sm90/tile_order.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

namespace flashjit::sm90 {
namespace {

constexpr unsigned kH100 = 132;

TileOrder mixed(unsigned rows, unsigned heads, unsigned cluster, unsigned teams, bool windows) {
  TileOrder order(rows, heads, cluster);
  if (teams < order.size()) order.mix(teams, windows);
  return order;
}

/// The tile of each number.
std::vector<OrderedTile> all_of(const TileOrder& order) {
  std::vector<OrderedTile> tiles;
  for (unsigned number = 0; number < order.size(); ++number) tiles.push_back(order.at(number));
  return tiles;
}

/// The longest team's time by all teams' mean, where `cost` tells what a row's tile takes.
double imbalance(const TileOrder& order, unsigned teams, bool windows, const auto& cost) {
  const std::vector<OrderedTile> tiles = all_of(order);
  std::vector<double> times(teams);
  for (unsigned round = 0; round * teams < tiles.size(); ++round)
    for (unsigned team = 0; team < teams; ++team) {
      const unsigned number = TileOrder::number(team, round, teams, windows);
      if (number < tiles.size()) times[team] += cost(tiles[number].tile);
    }
  return *std::ranges::max_element(times) * teams / std::accumulate(times.begin(), times.end(), 0.0);
}

/// The most heads of which teams compute tiles in the same round.
std::size_t most_heads_at_a_time(const TileOrder& order, unsigned teams) {
  const std::vector<OrderedTile> tiles = all_of(order);
  std::size_t most = 0;
  for (unsigned begin = 0; begin < tiles.size(); begin += teams) {
    std::set<unsigned> heads;
    for (unsigned n = begin; n < std::min<std::size_t>(begin + teams, tiles.size()); ++n)
      heads.insert(tiles[n].head);
    most = std::max(most, heads.size());
  }
  return most;
}

TEST(TileOrder, HasEachTileOnce) {
  for (const unsigned teams : {1u, 8u, 114u, kH100, 2 * kH100})
    for (unsigned rows = 1; rows <= 40; ++rows)
      for (const unsigned heads : {1u, 2u, 3u, 16u, 53u, 211u})
        for (const unsigned cluster : {1u, 2u})
          for (const bool windows : {false, true}) {
            const TileOrder order = mixed(rows, heads, teams % cluster == 0 ? cluster : 1, teams, windows);
            std::vector<int> times(order.size());
            for (const OrderedTile& tile : all_of(order)) {
              ASSERT_LT(tile.head, heads);
              ASSERT_LT(tile.tile, rows);
              ++times[tile.head * rows + tile.tile];
            }
            ASSERT_EQ(times, std::vector<int>(order.size(), 1))
                << rows << " tiles of " << heads << " heads, " << teams << " teams, clusters of " << cluster;
          }
}

TEST(TileOrder, GivesEachTeamOneTileARound) {
  for (const unsigned teams : {1u, 7u, kH100})
    for (const bool windows : {false, true})
      for (unsigned round = 0; round < 12; ++round) {
        std::vector<unsigned> numbers, all(teams);
        for (unsigned team = 0; team < teams; ++team)
          numbers.push_back(TileOrder::number(team, round, teams, windows));
        std::ranges::sort(numbers);
        std::iota(all.begin(), all.end(), round * teams);
        EXPECT_EQ(numbers, all);
      }
}

TEST(TileOrder, LeavesHeadsAsTheyAreUnlessMixed) {
  const TileOrder order(3, 2, 1);
  const std::vector<OrderedTile> tiles = all_of(order);
  for (unsigned n = 0; n < 6; ++n) {
    EXPECT_EQ(tiles[n].head, n / 3);
    EXPECT_EQ(tiles[n].tile, 2 - n % 3) << "the last first";
  }
}

TEST(TileOrder, ClustersTakeNeighbouringTiles) {
  for (const unsigned rows : {2u, 6u, 10u, 34u}) {
    const std::vector<OrderedTile> tiles = all_of(mixed(rows, 300, 2, kH100, false));
    for (unsigned n = 0; n < tiles.size(); n += 2) {
      ASSERT_EQ(tiles[n].head, tiles[n + 1].head) << rows;
      ASSERT_EQ(tiles[n].tile, tiles[n + 1].tile + 1) << rows;
    }
  }
}

// Lengths whose tiles make no whole pairs of rounds with those of less than hundreds of heads had all of
// these mixed, so that each block had a head of its own: 640 keys took 1.5 times as long as 768.
TEST(TileOrder, MixesFewHeads) {
  for (unsigned rows = 5; rows <= 128; ++rows) {
    const unsigned heads = 128 * 16 / rows;  // 16k tokens, hidden size 2048
    EXPECT_LE(most_heads_at_a_time(mixed(rows, heads, 2, kH100, false), kH100), 63u) << rows;
    EXPECT_LE(most_heads_at_a_time(mixed(rows, 2 * heads, 1, 2 * kH100, false), 2 * kH100), 2 * 63u) << rows;
  }
}

TEST(TileOrder, GivesAllTeamsTheSame) {
  const auto causal = [](unsigned tile) { return tile + 2.4; };
  const auto window = [](unsigned tile) { return std::min(tile, 8u) + 2.4; };
  for (unsigned rows = 2; rows <= 64; ++rows) {
    const unsigned heads = 128 * 16 / rows;
    const TileOrder order = mixed(rows, heads, 2, kH100, false);
    const TileOrder of_windows = mixed(rows, heads, 2, kH100, true);
    EXPECT_LT(imbalance(order, kH100, false, causal), 1.11) << rows;
    EXPECT_LT(imbalance(of_windows, kH100, true, window), 1.13) << rows;
  }
}

}  // namespace
}  // namespace flashjit::sm90
