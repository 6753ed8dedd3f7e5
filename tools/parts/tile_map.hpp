// What becomes of each tile of S: the picture of a mask as a kernel sees it.
#pragma once

#include <cstdint>
#include <vector>

#include "flashjit/patterns.hpp"
#include "plan/plan.hpp"

namespace flashjit::command {

enum class TileKind : std::uint8_t {
  skipped,   ///< never loaded
  computed,  ///< all pairs attend
  masked,    ///< some pairs attend: the mask is evaluated for each
  empty,     ///< no pair attends, but the mask's bounds do not tell
};

/// Tiles of one head, row by row; where there are more than kMostDrawn a side, evenly spaced ones of them.
struct TileMap {
  std::int64_t q_tiles = 0, kv_tiles = 0;   ///< of the problem
  int queries = 0, keys = 0;                ///< of a tile
  std::vector<std::int64_t> rows, columns;  ///< which tiles are drawn
  std::vector<TileKind> kinds;              ///< [rows][columns]

  TileKind at(std::size_t row, std::size_t column) const { return kinds[row * columns.size() + column]; }
};
inline constexpr std::int64_t kMostDrawn = 64;

/// Up to 144 pairs of a tile are asked, its corners among them, of a head in the middle and with plausible
/// captures; which keys a mask's bounds leave is what the planner knows. `map` as given by
/// autotune::plausible_map().
TileMap tile_map(const plan::ExecutionPlan& plan, const BlockPattern& map);

}  // namespace flashjit::command
