#include "plan/tensor_core.hpp"

#include "plan/tiles.hpp"

namespace flashjit::plan {
namespace {

/// Whether additions to dQ are ordered among lists of tiles.
bool has_ranks(const AnalysedSpec& spec) {
  return spec.pass == Pass::backward && spec.reproducible.deterministic && spec.has_tile_lists;
}

/// Work tiles of a cascade, of the sequences' own keys and of the prefix.
std::int64_t cascade_tiles(const KernelPlan& kernel, const AttentionShape& shape) {
  const auto [queries, heads] = forward_tiles(kernel.spec, shape, kernel.config);
  return (shape.batch * tiles(shape.seqlen_q, queries) + tiles(shape.batch * shape.seqlen_q, queries)) *
         heads;
}

Entry count_tiles_entry() {
  return {.name = "count_tiles",
          .header = "flashjit/tma/ragged_tiles.cuh",
          .function = "flashjit::tma::count_tiles",
          .threads = kAuxiliaryThreads};
}

}  // namespace

Entry main_entry(Family family, const AnalysedSpec& spec, int threads, int shared_bytes) {
  const char* name = spec.pass == Pass::forward ? "forward" : "backward";
  Entry main = family_entry(family, name, name, threads);
  main.shared_bytes = shared_bytes;
  main.hot = true;
  return main;
}

KernelPlan tensor_core_kernel(const AnalysedSpec& spec, const TileConfig& config, const Entry& main,
                              const Schedule& schedule) {
  const bool backward = spec.pass == Pass::backward;
  KernelPlan kernel{.spec = spec,
                    .config = config,
                    .constants = problem_constants(spec, config, schedule.tile_lists),
                    .schedule = schedule};
  kernel.constants.push_back({"kSharedBytes", main.shared_bytes});
  kernel.constants.push_back({"kLseLog2", schedule.lse_log2});
  kernel.constants.push_back({"kFindsRowStats", schedule.finds_row_stats});
  kernel.constants.push_back({"kFixedParts", schedule.fixed_parts});
  kernel.constants.push_back({"kClaimsTiles", schedule.claims_tiles});
  add_row_mods(kernel);
  if (backward && !spec.epilogue.out_mod.empty()) kernel.add(Step::out_grads, auxiliary_entry("out_grads"));
  if (backward) kernel.add(Step::preprocess, auxiliary_entry("preprocess"));
  add_sink_grads(kernel);
  if (schedule.tile_lists && has_term_bounds(spec))
    kernel.add(Step::term_bounds, auxiliary_entry("term_bounds", "tile_lists"));
  if (schedule.tile_lists) kernel.add(Step::tile_lists, auxiliary_entry("tile_lists"));
  if (has_ranks(spec)) kernel.add(Step::list_ranks, auxiliary_entry("list_ranks", "tile_lists"));
  if (schedule.ragged_tiles)
    kernel.add(Step::reset_work, count_tiles_entry());
  else if (!backward && schedule.dynamic_tiles)
    kernel.add(Step::reset_work, auxiliary_entry("reset_work", "tile_lists"));
  kernel.add(Step::main, main);
  if (backward && spec.indices)
    kernel.add(Step::combine_dkdv, auxiliary_entry("convert_dkdv"));
  else if (backward && !schedule.dynamic_tiles)
    kernel.add(Step::convert_dq, family_entry(config.family, "convert_dq", "convert_dq", kAuxiliaryThreads));
  if (config.split && backward)
    kernel.add(Step::combine_dkdv, auxiliary_entry("combine_dkdv"));
  else if (schedule.cascade)
    kernel.add(Step::combine_cascade,
               family_entry(config.family, "combine_cascade", "combine_parts", kAuxiliaryThreads));
  else if (schedule.stream_k)
    kernel.add(Step::combine_parts,
               family_entry(config.family, "combine_parts", "combine_parts", kAuxiliaryThreads));
  else if (config.split && !schedule.cluster_split)
    kernel.add(Step::combine, auxiliary_entry("combine"));
  add_row_mod_grads(kernel);
  return kernel;
}

WorkspaceNeeds tensor_core_workspace(const KernelPlan& kernel, const AttentionShape& shape) {
  const AnalysedSpec& spec = kernel.spec;
  const bool backward = spec.pass == Pass::backward, dynamic = kernel.schedule.dynamic_tiles;
  const std::int64_t q_tiles = tiles(shape.seqlen_q, kernel.config.br),
                     kv_tiles = tiles(shape.seqlen_kv, kernel.config.bc);
  const expr::MaskTraits& mask = spec.programs.mask;
  // Where a cluster has all keys of a row, what it sums up is dQ.
  const bool adds_dq = backward && !spec.indices && !(kernel.schedule.sums_dq && kv_tiles == 1);
  return {.row_stats = backward,
          .dout = backward && !spec.epilogue.out_mod.empty(),
          .lse_log2 = kernel.schedule.lse_log2,
          .row_terms = kernel.schedule.row_terms,
          .dq_accum = adds_dq,
          .clears_dq = adds_dq && dynamic,
          .semaphores = dynamic || (backward && spec.reproducible.deterministic),
          .ranks = has_ranks(spec),
          .claims_tiles = kernel.schedule.claims_tiles,
          .list_sets = list_sets(kernel, shape),
          .list_rows = backward ? kv_tiles : q_tiles,
          .list_columns = backward ? q_tiles : kv_tiles,
          .term_bounds = kernel.schedule.tile_lists ? q_tiles * mask.q_reads + kv_tiles * mask.kv_reads : 0,
          .ordered_q_tiles = backward && spec.reproducible.deterministic ? q_tiles : 0,
          .num_splits = backward && spec.indices ? 1 : 0,
          .part_rows = kernel.schedule.stream_k ? kernel.config.br : 0,
          .cascade_tiles = kernel.schedule.cascade ? cascade_tiles(kernel, shape) : 0,
          .joined_lists = joined_lists(kernel, shape)};
}

}  // namespace flashjit::plan
