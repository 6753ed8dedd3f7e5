// The usual attentions, as expressions: assign them to a spec's score or mask, or combine them.
//
//   spec.mask = programs::sliding_window(1024, 0);
//   spec.mask = programs::causal_mask() && programs::documents(1);
//   spec.score = programs::alibi();               // the call then gives a Capture named "slopes"
//
// Captures are bound by name at the call. Unless a function says otherwise, the last query is aligned with
// the last key (bottom-right), as in FlashAttention. All throw Error(invalid_argument) on parameters out of
// range.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "flashjit/expr.hpp"
#include "flashjit/programs.hpp"

namespace flashjit::programs {

// --- masks

/// Keys up to the query's own position.
FLASHJIT_API expr::Expr causal_mask(CausalAlignment alignment = CausalAlignment::bottom_right);

/// Keys from `left` before to `right` after the query's position, inclusive; -1: no limit on that side.
FLASHJIT_API expr::Expr sliding_window(std::int32_t left, std::int32_t right);

/// Causal, except that all queries see the first prefix[b] keys. Capture: int32 [batch].
FLASHJIT_API expr::Expr prefix_lm(CausalAlignment alignment = CausalAlignment::bottom_right,
                                  std::string prefix = "prefix");

/// Pairs within a document. Captures: int32 document ids of the positions, [seqlen] (rank 1) or [batch,
/// seqlen] (rank 2); one tensor for queries and keys if `kv_ids` is empty.
FLASHJIT_API expr::Expr documents(int rank, std::string q_ids = "documents", std::string kv_ids = {});

/// Every stride-th key before and after the query's position, including its own. stride > 0.
FLASHJIT_API expr::Expr dilated(std::int32_t stride);

/// The strided pattern of Child et al., "Generating Long Sequences with Sparse Transformers" (2019): the last
/// `local` keys up to the query's position, and every stride-th before. Both > 0.
FLASHJIT_API expr::Expr strided(std::int32_t local, std::int32_t stride);

/// Tokens are the pixels of a picture, row by row of `width`; those at most `radius` rows and columns apart
/// attend. Windows are cut at the borders, not shifted. Queries and keys are the same pixels. width > 0.
FLASHJIT_API expr::Expr neighborhood_2d(std::int32_t width, std::int32_t radius);

/// Chunked local attention: keys of the query's own chunk of `size` positions, up to the query. size > 0.
FLASHJIT_API expr::Expr chunked(std::int32_t size);

/// Causal, and besides keys first[b, q] <= kv < last[b, q], such as the keys of the query's own picture.
/// Captures: int32 [batch, seqlen_q]; where last <= first there are none.
FLASHJIT_API expr::Expr mm_prefix(std::string first = "mm_first", std::string last = "mm_last");

/// Drafts in a tree: the last seqlen_q keys are the queries' own. Query q sees the ones whose bits are
/// set in ancestors[b, q], bit n for the n-th; and every key before them. Capture: int64 [batch, seqlen_q].
/// Queries see no draft from the 65th on.
FLASHJIT_API expr::Expr tree(std::string ancestors = "ancestors");

/// Keys up to the query by positions that are given, in any order. Captures: int32 [batch, seqlen_q] and
/// [batch, seqlen_kv].
FLASHJIT_API expr::Expr positions(std::string q_positions = "q_positions",
                                  std::string kv_positions = "kv_positions");

/// The same where ranks have every ranks-th key, as in decode context parallelism: key kv of a rank is at
/// kv * ranks + rank. Captures: int32 [batch, seqlen_q], and the ints "ranks" and "rank".
FLASHJIT_API expr::Expr interleaved(std::string q_positions = "q_positions");

/// Causal in the batch entries whose flag is not 0; all pairs in the others. Capture: int32 [batch].
FLASHJIT_API expr::Expr causal_if(std::string flags = "causal_flags");

// --- scores

/// Press et al., "Train Short, Test Long" (2022): score - slopes[h] * distance. Capture: fp32 [heads_q].
FLASHJIT_API expr::Expr alibi(std::string slopes = "slopes");
/// The slopes of that paper: 2^(-8 i / heads); where heads is no power of two, the slopes of its code.
FLASHJIT_API std::vector<float> alibi_slopes(std::int64_t heads);

/// cap * tanh(score / cap). cap > 0.
FLASHJIT_API expr::Expr softcap(float cap);

/// score + bias[indices], such as dense_bias(ElementType::bf16, {expr::h, expr::q, expr::kv}): 1 to 4 of b,
/// h, h_kv, q and kv, each once. Capture: a tensor of those sizes (a size of 1 broadcasts).
FLASHJIT_API expr::Expr dense_bias(ElementType type, std::initializer_list<expr::NameConstant> indices,
                                   bool wants_grad = false, std::string bias = "bias");

/// The distance buckets of Raffel et al., "T5" (2020). Half of the buckets (per side, if bidirectional) are
/// single distances; the others widen logarithmically up to max_distance, and the last holds all larger
/// distances. Without `bidirectional`, keys after the query are in bucket 0.
struct RelativeBias {
  bool bidirectional = true;
  int num_buckets = 32;    ///< even, 2 to 256; at least 4 when bidirectional
  int max_distance = 128;  ///< more than the number of single distances
  ElementType type = ElementType::fp32;
  bool wants_grad = false;
  std::string table = "table";
};
/// score + table[bucket(kv - query's position), h]. Capture: [num_buckets, heads_q].
FLASHJIT_API expr::Expr relative_bias(const RelativeBias& options = {});

}  // namespace flashjit::programs
