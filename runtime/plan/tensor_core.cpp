#include "plan/tensor_core.hpp"

#include <algorithm>

#include "expr/analyze.hpp"
#include "plan/sm90.hpp"
#include "plan/workspace.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {
namespace {

/// What a call launches, in order.
enum class Step {
  preprocess,
  sink_grads,
  term_bounds,
  tile_lists,
  list_ranks,
  reset_work,
  main,
  convert_dq,
  combine,
  combine_dkdv
};

LaunchedWhen launched_when(Step step) {
  switch (step) {
    case Step::term_bounds:
    case Step::tile_lists:
    case Step::list_ranks:
      return LaunchedWhen::lists_are_made;
    case Step::reset_work:
      return LaunchedWhen::lists_are_given;
    default:
      return LaunchedWhen::always;
  }
}

/// Whether additions to dQ are ordered among lists of tiles.
bool has_ranks(const AttentionSpec& spec) {
  return spec.pass == Pass::backward && spec.deterministic && has_tile_lists(spec);
}

/// Whether the mask is classed by the bounds of what it reads.
bool has_term_bounds(const AttentionSpec& spec) {
  const expr::MaskTraits mask = expr::mask_traits(spec.mask);
  return mask.q_reads + mask.kv_reads > 0;
}

/// How many sets of lists there are at most: one that all share where neither mask nor map nor lengths tell
/// batch entries or heads apart. The kernels' own rule: list_batch() and list_heads() in
/// templates/common/tile_lists.cuh, which also know whether the map does.
std::int64_t list_sets(const AttentionSpec& spec, const AttentionShape& shape) {
  if (!has_tile_lists(spec)) return 0;
  const expr::MaskTraits mask = expr::mask_traits(spec.mask);
  const bool by_batch = spec.has_block_map() || spec.varlen || spec.kv_lengths || mask.uses_batch;
  const bool by_head = spec.has_block_map() || mask.uses_head;
  return (by_batch ? shape.batch : 1) * (by_head ? shape.heads_q : 1);
}

/// Whether the blocks of its backward pass take KV tiles until there are none, and convert dQ themselves.
bool takes_backward_work(Family family) { return family == Family::sm90; }

/// Whether the blocks of its forward pass take listed Q tiles until there are none.
bool takes_listed_work(const AttentionSpec& spec, Family family) {
  return family == Family::sm90 && spec.pass == Pass::forward && has_tile_lists(spec);
}

std::vector<Step> steps(const AttentionSpec& spec, const TileConfig& config) {
  const Family family = config.family;
  const bool backward = spec.pass == Pass::backward;
  std::vector<Step> all;
  if (backward) all.push_back(Step::preprocess);
  if (backward && spec.sinks) all.push_back(Step::sink_grads);
  if (has_term_bounds(spec)) all.push_back(Step::term_bounds);
  if (has_tile_lists(spec)) all.push_back(Step::tile_lists);
  if (has_ranks(spec)) all.push_back(Step::list_ranks);
  if (takes_listed_work(spec, family)) all.push_back(Step::reset_work);
  all.push_back(Step::main);
  if (backward && !takes_backward_work(family)) all.push_back(Step::convert_dq);
  if (config.in_parts) all.push_back(backward ? Step::combine_dkdv : Step::combine);
  return all;
}

Entry entry_of(Step step, Family family, const Entry& main) {
  switch (step) {
    case Step::preprocess:
      return auxiliary_entry("preprocess");
    case Step::sink_grads:
      return auxiliary_entry("sink_grads");
    case Step::term_bounds:
      return auxiliary_entry("term_bounds", "tile_lists");
    case Step::tile_lists:
      return auxiliary_entry("tile_lists");
    case Step::list_ranks:
      return auxiliary_entry("list_ranks", "tile_lists");
    case Step::reset_work:
      return auxiliary_entry("reset_work", "tile_lists");
    case Step::combine:
      return auxiliary_entry("combine");
    case Step::combine_dkdv:
      return auxiliary_entry("combine_dkdv");
    case Step::convert_dq:
      return family_entry(family, "convert_dq", "convert_dq", kAuxiliaryThreads);
    case Step::main:
      break;
  }
  return main;
}

std::int64_t blocks_of(Step step, const AttentionSpec& spec, const AttentionShape& shape,
                       const TileConfig& config) {
  const bool backward = spec.pass == Pass::backward;
  const std::int64_t heads = shape.batch * shape.heads_q;
  const std::int64_t q_tiles = tiles(shape.seqlen_q, config.br), kv_tiles = tiles(shape.seqlen_kv, config.bc);
  switch (step) {
    case Step::preprocess:
    case Step::convert_dq:
      return heads * (padded_seqlen_q(shape) / kAuxiliaryThreads);
    case Step::combine:
      return heads * shape.seqlen_q;
    case Step::combine_dkdv:
      return shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, kCombinedRows);
    case Step::sink_grads:
      return shape.heads_q;
    case Step::term_bounds:
      return tiles(list_sets(spec, shape) * (q_tiles + kv_tiles), kAuxiliaryThreads / 32);
    case Step::tile_lists:
      return list_sets(spec, shape) * (backward ? kv_tiles : q_tiles);
    case Step::list_ranks:
      return list_sets(spec, shape) * tiles(q_tiles, 32);
    case Step::reset_work:
      return 1;
    case Step::main: {
      const ForwardTiles forward = forward_tiles(shape, config);
      const std::int64_t forward_blocks =
          shape.batch * forward.heads * tiles(shape.seqlen_q, forward.queries);
      const std::int64_t backward_blocks = shape.batch * shape.heads_kv * kv_tiles;
      if (!backward)
        return config.family == Family::sm90 ? tiles(forward_blocks, sm90_forward_cluster(spec, config))
                                             : forward_blocks;
      // Without keys there is dQ to write all the same.
      return takes_backward_work(config.family) ? std::max(backward_blocks, forward_blocks) : backward_blocks;
    }
  }
  return 0;
}

}  // namespace

Entry main_entry(Family family, const AttentionSpec& spec, int threads, int shared_bytes) {
  const char* name = spec.pass == Pass::forward ? "forward" : "backward";
  Entry main = family_entry(family, name, name, threads);
  main.shared_bytes = shared_bytes;
  main.hot = true;
  return main;
}

std::vector<Entry> with_auxiliaries(const AttentionSpec& spec, const TileConfig& config, const Entry& main) {
  std::vector<Entry> all;
  for (const Step step : steps(spec, config)) all.push_back(entry_of(step, config.family, main));
  return all;
}

std::vector<Launch> tensor_core_launches(const AttentionSpec& spec, const AttentionShape& shape,
                                         const TileConfig& config) {
  const bool backward = spec.pass == Pass::backward;
  // Those that wait for what they need by themselves, with an instruction that all devices of sm90 have.
  const auto early = [&](Step step) {
    if (config.family != Family::sm90) return false;
    if (step == Step::tile_lists) return has_term_bounds(spec);
    const bool joins = step == Step::combine || step == Step::combine_dkdv;
    return joins || (step == Step::main && (backward || has_tile_lists(spec)));
  };
  std::vector<Launch> all;
  for (const Step step : steps(spec, config))
    all.push_back({all.size(), blocks_of(step, spec, shape, config), launched_when(step), early(step)});
  return all;
}

WorkspaceNeeds tensor_core_workspace(const AttentionSpec& spec, const AttentionShape& shape,
                                     const TileConfig& config) {
  const bool backward = spec.pass == Pass::backward;
  const std::int64_t q_tiles = tiles(shape.seqlen_q, config.br), kv_tiles = tiles(shape.seqlen_kv, config.bc);
  const expr::MaskTraits mask = expr::mask_traits(spec.mask);
  // Where a cluster has all keys of a row, what it sums up is dQ.
  const bool adds_dq = backward && !(clusters_sum_dq(spec, config) && kv_tiles == 1);
  return {
      .row_stats = backward,
      .row_terms = backward && config.family == Family::sm90 && sm90_backward_layout(spec, config).row_terms,
      .dq_accum = adds_dq,
      .clears_dq = adds_dq && takes_backward_work(config.family),
      .semaphores = takes_listed_work(spec, config.family) ||
                    (backward && (spec.deterministic || takes_backward_work(config.family))),
      .ranks = has_ranks(spec),
      .list_sets = list_sets(spec, shape),
      .list_rows = backward ? kv_tiles : q_tiles,
      .list_columns = backward ? q_tiles : kv_tiles,
      .term_bounds = q_tiles * mask.q_reads + kv_tiles * mask.kv_reads,
      .ordered_q_tiles = backward && spec.deterministic ? q_tiles : 0};
}

}  // namespace flashjit::plan
