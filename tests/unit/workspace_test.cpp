// The workspace formula: sizes, alignment, order, overflow.
#include "plan/workspace.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace flashjit::plan {
namespace {

KernelSpec spec_of(int head_dim) { return {{.head_dim = head_dim}, Pass::backward}; }

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

TEST(Workspace, QueriesArePaddedTo128) {
  for (const auto& [length, padded] : std::vector<std::pair<int, int>>{
           {0, 0}, {1, 128}, {127, 128}, {128, 128}, {129, 256}, {4096, 4096}, {4097, 4224}}) {
    EXPECT_EQ(padded_seqlen_q({.seqlen_q = length}), padded);
  }
}

TEST(Workspace, NothingNeededIsNoBytes) {
  EXPECT_EQ(workspace_layout({}, spec_of(64), {2, 4, 4, 100, 100}), WorkspaceLayout{});
}

TEST(Workspace, FormulaByHand) {
  const WorkspaceNeeds needs{.row_stats = true,
                             .row_terms = true,
                             .dq_accum = true,
                             .semaphores = true,
                             .ranks = true,
                             .list_sets = 2,
                             .list_rows = 3,
                             .list_columns = 5,
                             .term_bounds = 11,
                             .ordered_q_tiles = 7};
  // batch 2, heads 3, 130 queries: 256 padded rows; head_dim 72 becomes 80.
  const WorkspaceLayout layout = workspace_layout(needs, spec_of(72), {2, 3, 1, 130, 1000});
  const std::size_t heads = 6, stats = heads * 256 * 4, dq = heads * 256 * 80 * 4;
  EXPECT_EQ(layout.d, 0u);
  EXPECT_EQ(layout.lse_padded, stats);
  EXPECT_EQ(layout.row_terms, 2 * stats);
  EXPECT_EQ(layout.dq_accum, 3 * stats);
  EXPECT_EQ(layout.semaphores, 3 * stats + dq);
  EXPECT_EQ(layout.list_count, layout.semaphores + aligned((4 + 2 * 1 * 2 + heads * 7 * 4) * 4));
  EXPECT_EQ(layout.list_entries, layout.list_count + aligned(2 * 3 * 4));
  EXPECT_EQ(layout.list_rank, layout.list_entries + aligned(2 * 3 * 5 * 4));
  EXPECT_EQ(layout.term_bounds, layout.list_rank + aligned(2 * 3 * 5 * 4));
  EXPECT_EQ(layout.bytes, layout.term_bounds + aligned(2 * 11 * 2 * 4));
  EXPECT_EQ(layout.bytes_without_lists(), layout.list_count);
  EXPECT_EQ(layout.bytes_without_lists() + layout.list_bytes(), layout.bytes);
}

TEST(Workspace, PartsAreAlignedAndDoNotOverlap) {
  std::mt19937_64 random(1);
  const auto pick = [&](int max) { return static_cast<std::int64_t>(random() % (max + 1)); };
  for (int round = 0; round < 2000; ++round) {
    const AttentionShape shape{pick(5), pick(9), 1, pick(700), pick(700)};
    const WorkspaceNeeds needs{pick(1) == 1, pick(1) == 1, pick(1) == 1, pick(1) == 1,
                               pick(1) == 1, pick(1) == 1, pick(1) == 1, pick(1) == 1,
                               pick(1) == 1, pick(1) == 1, pick(3),      pick(20),
                               pick(20),     pick(4),      pick(20),     pick(3)};
    KernelSpec spec = spec_of(8 * (1 + static_cast<int>(pick(31))));
    spec.pass = pick(1) == 1 ? Pass::backward : Pass::forward;
    const WorkspaceLayout layout = workspace_layout(needs, spec, shape);

    const std::size_t heads = shape.batch * shape.heads_q, rows = padded_seqlen_q(shape);
    const std::size_t sets = needs.list_sets, cells = sets * needs.list_rows * needs.list_columns;
    std::vector<std::pair<std::size_t, std::size_t>> parts;  // offset, bytes
    // LSE in the other unit, and a byte for 32 rows.
    const std::size_t log2_rows = needs.lse_log2 ? rows + rows / 128 : 0;
    if (needs.row_stats) parts.emplace_back(layout.d, heads * rows * 4);
    if (needs.row_tangents) parts.emplace_back(layout.row_tangents, 3 * heads * rows * 4);
    if (needs.dout)
      parts.emplace_back(layout.dout, heads * shape.seqlen_q * spec.v_dim() * size_of(spec.dtype));
    if (needs.row_stats) parts.emplace_back(layout.lse_padded, heads * (rows + log2_rows) * 4);
    if (needs.row_terms) parts.emplace_back(layout.row_terms, heads * rows * 4);
    if (needs.dq_accum)
      parts.emplace_back(layout.dq_accum, heads * rows * ((spec.head_dim + 15) / 16 * 16) * 4);
    if (needs.num_splits > 0 && spec.pass == Pass::backward) {
      const std::size_t kv_rows = needs.num_splits * shape.batch * shape.heads_kv * shape.seqlen_kv;
      parts.insert(parts.end(), {{layout.dk_splits, kv_rows * spec.head_dim * 4},
                                 {layout.dv_splits, kv_rows * spec.v_dim() * 4}});
    } else if (needs.num_splits > 0) {
      const std::size_t o_rows = needs.num_splits * heads * shape.seqlen_q;
      parts.insert(parts.end(),
                   {{layout.o_splits, o_rows * spec.v_dim() * 4}, {layout.lse_splits, o_rows * 4}});
    }
    if (needs.semaphores)
      parts.emplace_back(layout.semaphores,
                         (4 + shape.batch * shape.heads_kv * 2 + heads * needs.ordered_q_tiles * 4 +
                          (needs.claims_tiles ? 256 : 0)) *
                             4);
    if (sets > 0) {
      parts.insert(parts.end(),
                   {{layout.list_count, sets * needs.list_rows * 4}, {layout.list_entries, cells * 4}});
    }
    if (needs.ranks) parts.emplace_back(layout.list_rank, cells * 4);
    if (needs.term_bounds > 0) parts.emplace_back(layout.term_bounds, sets * needs.term_bounds * 2 * 4);

    std::size_t end = 0;
    for (const auto& [offset, bytes] : parts) {
      ASSERT_EQ(offset % 256, 0u);
      ASSERT_EQ(offset, end) << "parts follow each other without a hole";
      end = offset + aligned(bytes);
    }
    ASSERT_EQ(layout.bytes, end);
  }
}

TEST(Workspace, SizesBeyond32BitsAreExact) {
  const WorkspaceLayout layout =
      workspace_layout({.row_stats = true, .dq_accum = true}, spec_of(128), {64, 128, 128, 65536, 65536});
  EXPECT_EQ(layout.bytes, 64ull * 128 * 65536 * 4 * (2 + 128));
}

TEST(Workspace, OverflowIsRefusedWithTheShape) {
  const AttentionShape huge{2147483647, 2147483647, 2147483647, 2147482624, 2147482624};
  const WorkspaceNeeds each[] = {{.row_stats = true},
                                 {.dq_accum = true},
                                 {.num_splits = 2},
                                 {.semaphores = true, .ordered_q_tiles = 1 << 25},
                                 {.list_sets = 1 << 30, .list_rows = 1 << 20, .list_columns = 1 << 20}};
  for (const WorkspaceNeeds& needs : each) {
    try {
      workspace_layout(needs, spec_of(128), huge);
      ADD_FAILURE() << "an overflow was not noticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(error.message().find(to_string(huge)), std::string::npos) << error.message();
    }
  }
}

}  // namespace
}  // namespace flashjit::plan
