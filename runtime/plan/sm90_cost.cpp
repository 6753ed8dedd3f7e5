// What a configuration of family sm90's forward pass costs, to compare tiles without measuring.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "plan/sm90.hpp"
#include "plan/tiles.hpp"

namespace flashjit::plan::hopper {
namespace {

/// What a Q tile of so many warpgroups costs for a key, measured: three hide each other's waits best, one is
/// alone with its own. At (192, 128) three are quicker in long rows, causal from 8k on.
double cost_of_groups(const AnalysedSpec& spec, int groups) {
  const double exposed = is_narrow(spec) ? 1.18 : 1.1;
  const double three = std::max(spec.head_dim, spec.v_dim()) > 128 ? 196 : 192;
  // The parts of a step of products of codes wait for each other, so that a third group gains more.
  if (groups == 3 && spec.prologue.q_codes) return is_narrow(spec) ? 150 : 175;
  return groups == 1 ? 100 * exposed : groups == 2 ? 128 * exposed : three;
}
/// Two Q tiles of two warpgroups at a time: the cost of each; and where a CTA has only one of them.
constexpr double kCostOfOneOfTwo = 290, kCostOfOneAlone = 170;
/// By how much more where the tiles of a causal head are not one cluster's, which would read K and V once,
/// though two tiles of 128 rows would do.
constexpr double kApart = 1.1;
/// By how much more where three groups' tiles of 80 keys meet a causal mask's end.
constexpr double kEndsOfSmallTiles = 1.04;

/// By how much more above d192 in KV tiles of 64 instead of 80.
constexpr double kRescalesMore = 1.05;

double cost_of_tile(const AnalysedSpec& spec, const TileConfig& c) {
  if (q_tiles_per_cta(spec, c) > 1) return kCostOfOneOfTwo;
  const bool rescales_more = std::max(spec.head_dim, spec.v_dim()) > 192 && c.bc <= 64;
  return cost_of_groups(spec, c.warps / kGroupWarps) * (rescales_more ? kRescalesMore : 1);
}

/// Without a causal mask all Q tiles cost about the same: what counts is the waves of them, on so many
/// `slots`. The tail wave's tiles are split where there is no mask, see kSplitTailWave in
/// templates/sm90/forward_policy.cuh.
double cost_of_waves(const AnalysedSpec& spec, const TileConfig& c, std::int64_t count, std::int64_t slots) {
  const std::int64_t whole = count / slots, over = count % slots;
  const double all_whole = static_cast<double>(whole) * cost_of_tile(spec, c);
  if (over == 0) return all_whole;
  if (q_tiles_per_cta(spec, c) > 1)
    return all_whole + (over * q_tiles_per_cta(spec, c) > slots ? kCostOfOneOfTwo : kCostOfOneAlone);
  const int groups = c.warps / kGroupWarps;
  int splits = 1;
  if (spec.mask.empty() && !counts_tiles(spec, c) && count > slots)
    splits = static_cast<int>(
        sm90::tail_splits(groups, static_cast<unsigned>(over), static_cast<unsigned>(slots)));
  return all_whole + cost_of_groups(spec, (groups + splits - 1) / splits);
}

/// What it costs to combine splits of the keys, in keys of one warpgroup: a launch, as long as three tiles,
/// and O of each split written and read, measured.
double cost_of_combine(const AttentionShape& shape, std::int64_t splits) {
  const double of_row = 24 + 2 * static_cast<double>(splits);
  return 45000 + of_row * static_cast<double>(shape.batch * shape.heads_q * shape.seqlen_q);
}

/// The same for the parts of shares, which are few.
constexpr double kCostOfCombineParts = 60000;

double longest(const std::vector<double>& met) {
  return met.empty() ? 0 : *std::max_element(met.begin(), met.end());
}

/// When the last tile ends, in keys. `met` are the keys that one head's tiles meet. Many tiles end together.
double end_of_last(std::vector<double> met, std::int64_t heads, std::int64_t slots) {
  constexpr std::int64_t kManyForEach = 8;
  const auto count = static_cast<std::int64_t>(met.size()) * heads;
  if (count <= slots || count > kManyForEach * slots) {
    const double fair =
        std::reduce(met.begin(), met.end()) * static_cast<double>(heads) / static_cast<double>(slots);
    return std::max(fair, longest(met));
  }
  return makespan(std::move(met), heads, slots);
}

}  // namespace

double estimated_time(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& c,
                      const DeviceInfo& device) {
  const auto [queries, heads_of_entry] = forward_tiles(spec, shape, c);
  const std::int64_t heads = shape.batch * heads_of_entry, rows = tiles(shape.seqlen_q, queries);
  const std::int64_t slots = std::int64_t{device.multiprocessors} * c.min_blocks * q_tiles_per_cta(spec, c);
  const auto padded = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t met = tiles(end, c.bc) - begin / c.bc;
    return static_cast<double>(met * c.bc);
  };
  const std::int64_t together = rows_to_estimate(shape, queries);
  std::vector<double> met;  // keys that a head's Q tiles meet
  for (const Range& keys : keys_of_tiles(spec, shape, together))
    met.push_back(keys.begin < keys.end ? padded(keys.begin, keys.end) : 0);
  const std::int64_t alike = together / queries;  // tiles that are one in `met`
  const double all = std::reduce(met.begin(), met.end()) * static_cast<double>(alike);
  if (is_stream_k(spec, c))
    return all * static_cast<double>(heads) / static_cast<double>(slots) * cost_of_tile(spec, c) +
           kCostOfCombineParts;
  if (c.split) {
    const std::int64_t splits = num_splits(spec, shape, c, device);
    const auto rounds = static_cast<double>(tiles(rows * heads * splits, slots));
    const std::int64_t of_part = tiles(static_cast<std::int64_t>(longest(met)), splits);
    return rounds * padded(0, of_part) * cost_of_tile(spec, c) + cost_of_combine(shape, splits);
  }
  if (!spec.is_causal)
    return all / static_cast<double>(std::max<std::int64_t>(rows, 1)) *
           cost_of_waves(spec, c, rows * heads, slots);
  const double apart = shape.seqlen_q <= 256 && rows > forward_cluster(spec, c) ? kApart : 1;
  const double ends = c.warps / kGroupWarps == 3 && c.bc <= 80 ? kEndsOfSmallTiles : 1;
  return end_of_last(std::move(met), heads * alike, slots) * cost_of_tile(spec, c) * apart * ends;
}

}  // namespace flashjit::plan::hopper
