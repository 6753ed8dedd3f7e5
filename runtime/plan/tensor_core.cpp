#include "plan/tensor_core.hpp"

#include <fmt/format.h>

#include "plan/workspace.hpp"

namespace flashjit::plan {
namespace {

constexpr int kAuxiliaryThreads = 128;

Entry auxiliary(const std::string& name) {
  return {.name = name,
          .header = fmt::format("flashjit/auxiliary/{}.cuh", name),
          .function = "flashjit::auxiliary::" + name,
          .threads = kAuxiliaryThreads};
}

}  // namespace

Entry main_entry(Family family, const AttentionSpec& spec, int threads, int shared_bytes) {
  const std::string name = spec.pass == Pass::forward ? "forward" : "backward";
  return {.name = name,
          .header = fmt::format("flashjit/{}/{}.cuh", to_string(family), name),
          .function = fmt::format("flashjit::{}::{}", to_string(family), name),
          .threads = threads,
          .shared_bytes = shared_bytes,
          .hot = true};
}

std::vector<Entry> with_auxiliaries(const AttentionSpec& spec, const Entry& main) {
  const bool backward = spec.pass == Pass::backward;
  std::vector<Entry> all;
  if (backward) all.push_back(auxiliary("preprocess"));
  if (has_tile_lists(spec)) all.push_back(auxiliary("block_lists"));
  all.push_back(main);
  if (backward) all.push_back(auxiliary("convert_dq"));
  return all;
}

std::vector<Launch> tensor_core_launches(const AttentionSpec& spec, const AttentionShape& shape,
                                         const TileConfig& config) {
  const std::int64_t q_tiles = tiles(shape.seqlen_q, config.br), kv_tiles = tiles(shape.seqlen_kv, config.bc);
  const bool backward = spec.pass == Pass::backward;
  const std::int64_t rows = shape.batch * shape.heads_q * (padded_seqlen_q(shape) / kAuxiliaryThreads);
  std::vector<std::int64_t> blocks;
  if (backward) blocks.push_back(rows);
  if (has_tile_lists(spec)) blocks.push_back(shape.batch * shape.heads_q * (backward ? kv_tiles : q_tiles));
  blocks.push_back(shape.batch * (backward ? shape.heads_kv * kv_tiles : shape.heads_q * q_tiles));
  if (backward) blocks.push_back(rows);
  std::vector<Launch> all;
  for (std::size_t entry = 0; entry < blocks.size(); ++entry) all.push_back({entry, blocks[entry]});
  return all;
}

WorkspaceNeeds tensor_core_workspace(const AttentionSpec& spec, const AttentionShape& shape,
                                     const TileConfig& config) {
  const bool backward = spec.pass == Pass::backward, lists = has_tile_lists(spec);
  const std::int64_t q_tiles = tiles(shape.seqlen_q, config.br), kv_tiles = tiles(shape.seqlen_kv, config.bc);
  return {.row_stats = backward,
          .dq_accum = backward,
          .tickets = backward && spec.deterministic,
          .lists = lists,
          .ranks = backward && spec.deterministic && lists,
          .list_rows = backward ? kv_tiles : q_tiles,
          .list_columns = backward ? q_tiles : kv_tiles,
          .q_tiles = q_tiles};
}

}  // namespace flashjit::plan
