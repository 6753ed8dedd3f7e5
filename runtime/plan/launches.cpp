#include "plan/launches.hpp"

#include <algorithm>

#include "plan/joined_lists.hpp"
#include "plan/tiles.hpp"
#include "plan/workspace.hpp"
#include "templates/auxiliary/append_params.cuh"
#include "templates/auxiliary/decode_cache_params.cuh"
#include "templates/common/params.cuh"

namespace flashjit::plan {
namespace {

/// More than any GPU runs at once; each block takes tiles until there are no more.
constexpr std::int64_t kMostOrderedBlocks = 4096;

LaunchedWhen launched_when(Step step, const KernelPlan& kernel) {
  switch (step) {
    case Step::term_bounds:
    case Step::tile_lists:
    case Step::list_ranks:
      return LaunchedWhen::lists_are_made;
    case Step::reset_work:
      return kernel.schedule.tile_lists ? LaunchedWhen::lists_are_given : LaunchedWhen::always;
    default:
      return LaunchedWhen::always;
  }
}

/// Whether a step's launch follows another launch, for which it waits by itself where kernels can. The first
/// launch of the backward pass follows whatever the stream has before it.
bool follows_another(Step step, const KernelPlan& kernel) {
  const AnalysedSpec& spec = kernel.spec;
  switch (step) {
    case Step::tile_lists:
      return has_term_bounds(spec);
    case Step::main:
      return !kernel.config.decode_cache && (kernel.schedule.dynamic_tiles || kernel.schedule.stream_k ||
                                             kernel.schedule.fixed_parts || kernel.schedule.cluster_split);
    case Step::preprocess:
    case Step::combine:
    case Step::combine_parts:
    case Step::combine_cascade:
    case Step::combine_dkdv:
      return true;
    default:
      return false;
  }
}

/// Q tiles of all heads, or KV tiles. Without keys there is dQ to write all the same, by blocks that convert
/// it.
std::int64_t main_blocks(const KernelPlan& kernel, const AttentionShape& shape) {
  const ForwardTiles forward = forward_tiles(kernel.spec, shape, kernel.config);
  const std::int64_t q_tiles = shape.batch * forward.heads * tiles(shape.seqlen_q, forward.queries);
  if (!gives_gradients(kernel.spec.pass) || kernel.spec.indices)
    return kernel.schedule.cluster_split ? q_tiles : tiles(q_tiles, kernel.main().cluster);
  const std::int64_t kv_tiles = shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, kernel.config.bc);
  return kernel.schedule.dynamic_tiles ? std::max(kv_tiles, q_tiles) : kv_tiles;
}

/// Up to the last that may exist: with PackGQA a query's heads have rows one behind the other.
std::int64_t rows_of_work_tile(const KernelPlan& kernel, const AttentionShape& shape) {
  const std::int64_t all = kernel.config.br;
  if (!kernel.config.pack_gqa) return std::min(all, shape.seqlen_q);
  const PackedHeadsParam packed = packed_heads(shape, most_queries(kernel.spec, kernel.config));
  return shape.seqlen_q > packed.queries ? all : shape.seqlen_q * packed.heads;
}

std::int64_t new_rows(const AnalysedSpec& spec, const AttentionShape& shape) {
  return spec.varlen ? shape.seqlen_q : shape.batch * shape.seqlen_q;
}

std::int64_t blocks_of(Step step, const KernelPlan& kernel, const AttentionShape& shape) {
  const std::int64_t heads = shape.batch * shape.heads_q, sets = list_sets(kernel, shape);
  const std::int64_t q_tiles = tiles(shape.seqlen_q, kernel.config.br),
                     kv_tiles = tiles(shape.seqlen_kv, kernel.config.bc);
  switch (step) {
    case Step::join_lists:
      return joined_lists(kernel, shape).count;
    case Step::decode_cache:
      return shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, kDecodedKeys);
    case Step::row_mods:
    case Step::row_mod_grads: {
      const Prologue& prologue = kernel.spec.prologue;
      const std::int64_t of_q = heads * tiles(shape.seqlen_q, kRowsOfModCta),
                         of_k = shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, kRowsOfModCta);
      return (prologue.q_mod.empty() ? 0 : of_q) + (prologue.k_mod.empty() ? 0 : of_k);
    }
    case Step::out_grads:
    case Step::preprocess:
    case Step::convert_dq:
      return heads * (padded_seqlen_q(shape) / kAuxiliaryThreads);
    case Step::sink_grads:
      return shape.heads_q;
    case Step::term_bounds:
      return tiles(sets * (q_tiles + kv_tiles), kAuxiliaryThreads / 32);
    case Step::tile_lists:
      return sets * (kernel.spec.pass == Pass::backward ? kv_tiles : q_tiles);
    case Step::list_ranks:
      return sets * tiles(q_tiles, 32);
    case Step::reset_work:
      return 1;
    case Step::combine_parts: {  // of one share; four of them run on a multiprocessor at once
      constexpr std::int64_t kMostBlocksOfShare = 4;
      return std::min(tiles(rows_of_work_tile(kernel, shape), kAuxiliaryThreads / 32), kMostBlocksOfShare);
    }
    case Step::main:
      return main_blocks(kernel, shape);
    case Step::main_of_dq:
      return heads * q_tiles;
    case Step::combine: {
      // Enough to fill a device: half as many with fixed parts, as each row has several.
      const std::int64_t many_rows = kernel.schedule.fixed_parts ? 1 << 12 : 1 << 13;
      const std::int64_t rows = heads * shape.seqlen_q;
      return rows >= many_rows ? tiles(rows, combined_rows_of_cta(kernel.spec.v_dim())) : rows;
    }
    case Step::combine_cascade:
      return tiles(heads * shape.seqlen_q, kAuxiliaryThreads / 32);
    case Step::combine_dkdv:
      return shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, kCombinedRows);
    case Step::ordered_capture_grads:
      return std::min(std::min(heads * q_tiles, kMostOrderedBlocks) * kv_tiles, kMostOrderedBlocks);
    case Step::append:
      return new_rows(kernel.spec, shape);
    case Step::append_lanes: {
      constexpr std::int64_t kManyRows = 1 << 11;  // a warp for each fills a device
      const std::int64_t rows = new_rows(kernel.spec, shape);
      return rows >= kManyRows ? tiles(rows, kAuxiliaryThreads / 32) : rows;
    }
    case Step::clear_scales:
      return tiles(std::max<std::int64_t>(heads, 1), kAuxiliaryThreads);  // one scale may be of nothing
    case Step::quantize:
      if (const int keys = kernel.spec.kv.k_format.keys) return heads * (shape.seqlen_q / keys);
      [[fallthrough]];
    case Step::find_scales:
      return tiles(heads * shape.seqlen_q, kAuxiliaryThreads / 32);
    case Step::merge:
      return tiles(heads * shape.seqlen_q * (kernel.spec.v_dim() / kMergedDims), kAuxiliaryThreads);
  }
  return 0;
}

}  // namespace

std::vector<Launch> launches_of(const KernelPlan& kernel, const AttentionShape& shape) {
  std::vector<Launch> all;
  for (const Step step : kernel.steps) {
    // A kernel that begins before the launch before it has ended may read Q and K before it waits.
    const bool may_begin = kernel.schedule.early_launch && !kernel.spec.prologue.has_programs();
    const bool early = may_begin && follows_another(step, kernel);
    all.push_back({all.size(), blocks_of(step, kernel, shape), launched_when(step, kernel), early});
  }
  return all;
}

const Launch& main_launch(const KernelPlan& kernel, const std::vector<Launch>& launches) {
  return *std::ranges::find_if(launches,
                               [&](const Launch& launch) { return kernel.entries[launch.entry].hot; });
}

}  // namespace flashjit::plan
