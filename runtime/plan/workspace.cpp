#include "plan/workspace.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>

#include "support/overflow.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kRowMultiple = 128;
constexpr std::int64_t kDimMultiple = 16;
constexpr std::int64_t kWordBytes = 4;  // fp32 or int32

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Places one part after another.
class Allocator {
 public:
  explicit Allocator(const AttentionShape& shape) : shape_(shape) {}

  /// The offset of a part of count[0] * count[1] * ... + extra words.
  std::size_t place(bool needed, std::initializer_list<std::int64_t> count, std::int64_t extra = 0) {
    const std::int64_t offset = end_;
    if (!needed) return static_cast<std::size_t>(offset);
    std::int64_t bytes = kWordBytes;
    bool overflow = false;
    for (const std::int64_t factor : count) overflow |= multiply_overflows(bytes, factor, bytes);
    overflow |= add_overflows(bytes, extra * kWordBytes + kAlignment - 1, bytes);
    overflow |= add_overflows(end_, bytes / kAlignment * kAlignment, end_);
    if (overflow) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("the workspace of {} is larger than 2^63 bytes; use a smaller batch or fewer heads",
                      to_string(shape_)));
    }
    return static_cast<std::size_t>(offset);
  }

  std::size_t bytes() const { return static_cast<std::size_t>(end_); }

 private:
  const AttentionShape& shape_;
  std::int64_t end_ = 0;
};

}  // namespace

std::int64_t padded_seqlen_q(const AttentionShape& shape) { return round_up(shape.seqlen_q, kRowMultiple); }

WorkspaceLayout workspace_layout(const WorkspaceNeeds& needs, const KernelSpec& spec,
                                 const AttentionShape& shape) {
  // Both are below 2^31, so this product fits.
  const std::int64_t heads = shape.batch * shape.heads_q;
  const std::int64_t rows = padded_seqlen_q(shape);

  Allocator allocator(shape);
  WorkspaceLayout out;
  out.d = allocator.place(needs.row_stats, {heads, rows});
  out.row_tangents = allocator.place(needs.row_tangents, {3, heads, rows});
  // Elements of 2 or 4 bytes; head dimensions are even.
  out.dout = allocator.place(needs.dout, {heads, shape.seqlen_q, spec.v_dim() / 2, size_of(spec.dtype) / 2});
  // And what templates/common/lse_log2.cuh has behind it.
  const std::int64_t words_of_log2 = needs.lse_log2 ? rows + rows / kLseRows / kWordBytes : 0;
  out.lse_padded = allocator.place(needs.row_stats, {heads, rows + words_of_log2});
  out.row_terms = allocator.place(needs.row_terms, {heads, rows});
  out.dq_accum = allocator.place(needs.dq_accum, {heads, rows, round_up(spec.head_dim, kDimMultiple)});
  const bool is_cut = needs.num_splits > 0 && !needs.whole_tiles, cascade = needs.cascade_tiles > 0;
  const bool parts = is_cut && needs.part_rows > 0;
  const bool kv_splits = is_cut && spec.pass == Pass::forward && !parts;
  out.o_splits = allocator.place(kv_splits, {needs.num_splits, heads, shape.seqlen_q, spec.v_dim()});
  out.lse_splits =
      allocator.place(kv_splits, {spec.epilogue.row_max ? 2 : 1, needs.num_splits, heads, shape.seqlen_q});
  if (parts) {
    // A cascade has a part for each work tile, and one more where a share ends within one.
    const std::int64_t count = cascade ? needs.cascade_tiles + needs.num_splits : 2 * needs.num_splits;
    out.o_splits = allocator.place(true, {count, needs.part_rows, spec.v_dim()});
    out.lse_splits = allocator.place(true, {count, needs.part_rows});
  }
  constexpr std::int64_t kPartialTileWords = sizeof(PartialTile) / kWordBytes;
  constexpr std::int64_t kSegmentsWords = sizeof(SegmentsOfTile) / kWordBytes;
  out.partial_tiles = allocator.place(parts && !cascade, {needs.num_splits, kPartialTileWords});
  out.segments_of_tile = allocator.place(cascade, {needs.cascade_tiles, kSegmentsWords});
  const bool q_splits = needs.num_splits > 0 && spec.pass == Pass::backward;
  const std::int64_t heads_kv = shape.batch * shape.heads_kv;
  out.dk_splits = allocator.place(q_splits, {needs.num_splits, heads_kv, shape.seqlen_kv, spec.head_dim});
  out.dv_splits = allocator.place(q_splits, {needs.num_splits, heads_kv, shape.seqlen_kv, spec.v_dim()});
  // The tile counters and semaphores of templates/common/semaphores.cuh.
  out.semaphores =
      allocator.place(needs.semaphores, {heads, needs.ordered_q_tiles, kDqSemaphores},
                      kTileCounters + heads_kv * kHeadSemaphores + (needs.claims_tiles ? kTileClaims : 0));
  // Head dimensions of quantized rows are multiples of 16: two elements are a word, or four codes.
  const bool apart = needs.decoded_cache && !spec.kv.shared_kv;
  const int in_word = spec.prologue.q_codes ? 4 : 2;
  out.decoded_k = allocator.place(needs.decoded_cache, {heads_kv, shape.seqlen_kv, spec.head_dim / in_word});
  out.decoded_v = allocator.place(apart, {heads_kv, shape.seqlen_kv, spec.v_dim() / in_word});
  const auto [lists, keys_of_list] = needs.joined_lists;
  out.joined_lengths = allocator.place(lists > 0, {lists});
  out.joined_keys = allocator.place(lists > 0, {lists, keys_of_list});
  out.joined_queries = allocator.place(lists > 0, {lists, keys_of_list / kWordBytes});
  const bool q_mod = !spec.prologue.q_mod.empty(), k_mod = !spec.prologue.k_mod.empty();
  const bool backward = spec.pass == Pass::backward;
  const std::int64_t words = size_of(spec.dtype) / 2, grad_words = size_of(spec.grad_type()) / 2;
  out.q_mod = allocator.place(q_mod, {heads, shape.seqlen_q, spec.head_dim / 2, words});
  out.k_mod = allocator.place(k_mod, {heads_kv, shape.seqlen_kv, spec.head_dim / 2, words});
  out.dq_of_mod = allocator.place(q_mod && backward, {heads, shape.seqlen_q, spec.head_dim / 2, grad_words});
  out.dk_of_mod =
      allocator.place(k_mod && backward, {heads_kv, shape.seqlen_kv, spec.head_dim / 2, grad_words});
  const std::int64_t sets = needs.list_sets;
  out.list_count = allocator.place(sets > 0, {sets, needs.list_rows});
  out.list_entries = allocator.place(sets > 0, {sets, needs.list_rows, needs.list_columns});
  out.list_rank = allocator.place(needs.ranks, {sets, needs.list_rows, needs.list_columns});
  out.term_bounds = allocator.place(needs.term_bounds > 0, {sets, needs.term_bounds, 2});
  out.bytes = allocator.bytes();
  return out;
}

}  // namespace flashjit::plan
