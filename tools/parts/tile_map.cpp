#include "tools/parts/tile_map.hpp"

#include <algorithm>
#include <optional>

#include "plan/tiles.hpp"
#include "reference/inputs.hpp"

namespace flashjit::command {
namespace {

constexpr std::int64_t kSamples = 12;  // a side of a tile
constexpr std::uint64_t kSeed = 1;     // of captures, as the tuner measures with

std::vector<std::int64_t> spaced(std::int64_t count) {
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(std::min(count, kMostDrawn)));
  const auto drawn = static_cast<std::int64_t>(chosen.size());
  for (std::int64_t i = 0; i < drawn; ++i) chosen[i] = drawn == count ? i : i * (count - 1) / (drawn - 1);
  return chosen;
}

/// Positions of a range, its first and last among them.
std::vector<std::int64_t> samples(std::int64_t begin, std::int64_t end) {
  const std::int64_t count = std::min(end - begin, kSamples);
  std::vector<std::int64_t> chosen;
  for (std::int64_t i = 0; i < count; ++i)
    chosen.push_back(count == 1 ? begin : begin + i * (end - begin - 1) / (count - 1));
  return chosen;
}

/// What a mask program and a block map leave of pairs of one head.
class Pairs {
 public:
  Pairs(const AttentionSpec& spec, const AttentionShape& shape, const BlockPattern& map)
      : mask_only_(without_score(spec)), shape_(shape), map_(map) {
    if (spec.mask.empty()) return;
    captures_ = reference::plausible_captures(mask_only_, shape, kSeed);
    programs_.emplace(mask_only_, captures_);
  }

  bool attends(std::int64_t q, std::int64_t kv) const {
    const BlockSize block = mask_only_.block_map;
    if (mask_only_.has_block_map() && !map_.at(q / block.q, kv / block.kv)) return false;
    const std::int64_t h = shape_.heads_q / 2,
                       h_kv = h / std::max<std::int64_t>(shape_.heads_q / shape_.heads_kv, 1);
    return !programs_ || programs_->attends({0, h, h_kv, q, kv, shape_.seqlen_q, shape_.seqlen_kv});
  }

 private:
  static AttentionSpec without_score(AttentionSpec spec) {
    spec.score = {};
    return spec;
  }

  AttentionSpec mask_only_;
  AttentionShape shape_;
  const BlockPattern& map_;
  std::vector<reference::Captured> captures_;
  std::optional<reference::Programs> programs_;
};

/// `visited`: the bounds of the mask do not rule the tile out. `listed`: a list does, where no pair attends.
TileKind kind_of(const Pairs& pairs, const std::vector<std::int64_t>& queries,
                 const std::vector<std::int64_t>& keys, bool listed) {
  std::size_t attending = 0;
  for (const std::int64_t q : queries)
    for (const std::int64_t kv : keys) attending += pairs.attends(q, kv);
  if (attending == 0) return listed ? TileKind::skipped : TileKind::empty;
  return attending == queries.size() * keys.size() ? TileKind::computed : TileKind::masked;
}

}  // namespace

TileMap tile_map(const plan::ExecutionPlan& plan, const BlockPattern& map) {
  const AttentionShape& shape = plan.shape;
  TileMap tiles;
  // Where heads are packed, a tile's rows are of several heads.
  tiles.queries = plan.config.br;
  if (plan.spec.pass == Pass::forward) {
    const std::int64_t rows = plan::forward_tiles(plan.spec, shape, plan.config).queries;
    tiles.queries = static_cast<int>(std::clamp<std::int64_t>(rows, 1, plan.config.br));
  }
  tiles.keys = plan.config.bc;
  tiles.q_tiles = plan::tiles(shape.seqlen_q, tiles.queries);
  tiles.kv_tiles = plan::tiles(shape.seqlen_kv, tiles.keys);
  tiles.rows = spaced(tiles.q_tiles);
  tiles.columns = spaced(tiles.kv_tiles);

  const Pairs pairs(plan.spec, shape, map);
  const std::vector<Range> bounds = plan::keys_of_tiles(plan.spec, shape, tiles.queries);
  for (const std::int64_t row : tiles.rows) {
    const auto queries = samples(row * tiles.queries, std::min((row + 1) * tiles.queries, shape.seqlen_q));
    for (const std::int64_t column : tiles.columns) {
      const std::int64_t begin = column * tiles.keys, end = std::min(begin + tiles.keys, shape.seqlen_kv);
      const Range keys = bounds[static_cast<std::size_t>(row)];
      tiles.kinds.push_back(end <= keys.begin || begin >= keys.end
                                ? TileKind::skipped
                                : kind_of(pairs, queries, samples(begin, end), plan.spec.has_tile_lists));
    }
  }
  return tiles;
}

}  // namespace flashjit::command
