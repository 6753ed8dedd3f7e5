#include "plan/tensor_core.hpp"

#include "plan/workspace.hpp"

namespace flashjit::plan {
namespace {

/// What a call launches, in order.
enum class Step { preprocess, sink_grads, block_lists, list_ranks, main, convert_dq };

/// Whether additions to dQ are ordered among lists of tiles.
bool has_ranks(const AttentionSpec& spec) {
  return spec.pass == Pass::backward && spec.deterministic && has_tile_lists(spec);
}

std::vector<Step> steps(const AttentionSpec& spec) {
  const bool backward = spec.pass == Pass::backward;
  std::vector<Step> all;
  if (backward) all.push_back(Step::preprocess);
  if (backward && spec.sinks) all.push_back(Step::sink_grads);
  if (has_tile_lists(spec)) all.push_back(Step::block_lists);
  if (has_ranks(spec)) all.push_back(Step::list_ranks);
  all.push_back(Step::main);
  if (backward) all.push_back(Step::convert_dq);
  return all;
}

Entry entry_of(Step step, Family family, const Entry& main) {
  switch (step) {
    case Step::preprocess:
      return auxiliary_entry("preprocess");
    case Step::sink_grads:
      return auxiliary_entry("sink_grads");
    case Step::block_lists:
      return auxiliary_entry("block_lists");
    case Step::list_ranks:
      return auxiliary_entry("list_ranks", "block_lists");
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
    case Step::sink_grads:
      return shape.heads_q;
    case Step::block_lists:
      return heads * (backward ? kv_tiles : q_tiles);
    case Step::list_ranks:
      return tiles(heads * q_tiles, kAuxiliaryThreads);
    case Step::main:
      return backward ? shape.batch * shape.heads_kv * kv_tiles : heads * q_tiles;
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

std::vector<Entry> with_auxiliaries(const AttentionSpec& spec, Family family, const Entry& main) {
  std::vector<Entry> all;
  for (const Step step : steps(spec)) all.push_back(entry_of(step, family, main));
  return all;
}

std::vector<Launch> tensor_core_launches(const AttentionSpec& spec, const AttentionShape& shape,
                                         const TileConfig& config) {
  std::vector<Launch> all;
  for (const Step step : steps(spec)) all.push_back({all.size(), blocks_of(step, spec, shape, config)});
  return all;
}

WorkspaceNeeds tensor_core_workspace(const AttentionSpec& spec, const AttentionShape& shape,
                                     const TileConfig& config) {
  const bool backward = spec.pass == Pass::backward;
  const std::int64_t q_tiles = tiles(shape.seqlen_q, config.br), kv_tiles = tiles(shape.seqlen_kv, config.bc);
  return {.row_stats = backward,
          .dq_accum = backward,
          .tickets = backward && spec.deterministic,
          .lists = has_tile_lists(spec),
          .ranks = has_ranks(spec),
          .list_rows = backward ? kv_tiles : q_tiles,
          .list_columns = backward ? q_tiles : kv_tiles,
          .q_tiles = q_tiles};
}

}  // namespace flashjit::plan
