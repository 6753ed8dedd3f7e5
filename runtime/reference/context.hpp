// A problem that was checked, for the reference's own files: where the rows of each head are and which pairs
// attend.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "reference/reference.hpp"
#include "support/dropout.hpp"
#include "templates/common/packed.cuh"

namespace flashjit::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The product of sizes; refuses what no memory can hold.
std::int64_t count(std::initializer_list<std::int64_t> sizes);
void check_size(const char* what, std::size_t given, std::int64_t wanted);

/// One sequence's rows among all of a tensor's.
struct Rows {
  std::int64_t begin, count;
};

/// A checked problem with everything that is derived from it.
struct Context {
  const Problem& problem;
  KernelSpec spec;  ///< normalized
  AttentionShape shape;
  Programs programs;
  std::int64_t packed_q = 0, packed_kv = 0;  ///< rows of a head, with spec.varlen
  double scale;
  Dropout dropout;
  std::int64_t map_rows = 0, map_columns = 0;
  std::vector<int> names = {};  ///< of each list, how often it names each key

  explicit Context(const Problem& problem);

  std::int64_t tasks() const { return shape.batch * shape.heads_q; }
  std::int64_t batch_of(std::int64_t task) const { return task / shape.heads_q; }
  std::int64_t head_of(std::int64_t task) const { return task % shape.heads_q; }
  std::int64_t kv_head_of(std::int64_t task) const {
    return head_of(task) / (shape.heads_q / shape.heads_kv);
  }
  Rows q_rows(std::int64_t task) const {
    if (!spec.varlen) return {task * shape.seqlen_q, shape.seqlen_q};
    return packed(problem.cu_seqlens_q, batch_of(task), head_of(task), packed_q, shape.seqlen_q);
  }
  /// Without rows past the sequence's length: what they hold does not matter, nor takes time.
  Rows kv_rows(std::int64_t task) const {
    const std::int64_t b = batch_of(task), h = kv_head_of(task);
    if (packs_kv()) return packed(problem.cu_seqlens_kv, b, h, packed_kv, shape.seqlen_kv);
    const std::int64_t length = spec.kv.has_lengths()
                                    ? std::clamp<std::int64_t>(problem.kv_lengths[b], 0, shape.seqlen_kv)
                                    : shape.seqlen_kv;
    return {(b * shape.heads_kv + h) * shape.seqlen_kv, length};
  }
  /// The seqlen_kv of programs.
  std::int64_t seqlen_kv(std::int64_t task) const {
    return spec.kv.is_cache() || packs_kv() ? kv_rows(task).count : shape.seqlen_kv;
  }
  /// All rows of Q, and of K: [batch, heads, length], or [heads, packed rows].
  std::int64_t q_count() const { return count_rows(spec.varlen, shape.heads_q, packed_q, shape.seqlen_q); }
  std::int64_t kv_count() const { return count_rows(packs_kv(), shape.heads_kv, packed_kv, shape.seqlen_kv); }
  /// Whether K and V are packed, as Q is with spec.varlen.
  bool packs_kv() const { return spec.varlen && !spec.kv.is_cache(); }

  Point point(std::int64_t task, std::int64_t q, std::int64_t kv) const {
    return {batch_of(task), head_of(task), kv_head_of(task), q, kv, q_rows(task).count, seqlen_kv(task)};
  }
  bool has_sinks() const;
  /// The head's sink; -inf, which adds nothing, if it has none.
  double sink(std::int64_t task) const;
  /// The gradient of a row's LSE. A row that attends to nothing has no P that it could change.
  double dlse(std::int64_t task, std::int64_t q, double lse) const {
    return problem.dlse.empty() || lse == -kInfinity ? 0.0 : problem.dlse[q_rows(task).begin + q];
  }
  bool attends(const Point& point) const;
  /// How often a query's list names a key; 1 without lists.
  int named(std::int64_t task, std::int64_t q, std::int64_t kv) const {
    return spec.indices ? names[list_of(task, q) * shape.seqlen_kv + kv] : 1;
  }
  /// What dropout multiplies the pair's probability with: 0 or 1 / (1 - p).
  double dropout_factor(std::int64_t task, std::int64_t q, std::int64_t kv) const;

 private:
  /// Lists are [index_batch, queries, heads_kv].
  std::int64_t list_of(std::int64_t task, std::int64_t q) const {
    const std::int64_t queries = spec.varlen ? packed_q : shape.seqlen_q;
    const std::int64_t b = problem.index_batch == 1 ? 0 : batch_of(task);
    const std::int64_t first = spec.varlen ? q_rows(task).begin - head_of(task) * packed_q : 0;
    return (b * queries + first + q) * shape.heads_kv + kv_head_of(task);
  }
  void read_indices();
  static Rows packed(const std::vector<std::int32_t>& offsets, std::int64_t b, std::int64_t h,
                     std::int64_t rows, std::int64_t longest) {
    const auto [first, count] =
        packed_rows(offsets[b], offsets[b + 1], static_cast<int>(rows), static_cast<int>(longest));
    return {h * rows + first, count};
  }
  std::int64_t count_rows(bool packed, std::int64_t heads, std::int64_t packed_length,
                          std::int64_t length) const {
    return packed ? heads * packed_length : count({shape.batch, heads, length});
  }
};

}  // namespace flashjit::reference
