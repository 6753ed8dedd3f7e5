// One batch entry, and which of its pairs attend: the block map and the mask program together. Ragged ends
// and key padding are the caller's, who knows the tile's limits.
#pragma once

#include "flashjit/common/element.cuh"
#include "flashjit/common/packed.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit {

/// A debug mode: prints a length of a cache's sequence that is clamped, and a prefix that a sequence cannot
/// have.
template <class Problem>
__device__ __noinline__ void check_length(const Params& p, int b) {
  if (threadIdx.x % 32 != 0) return;
  const int length = p.kv_lengths[b];
  if (length < 0 || length > p.seqlen_kv)
    printf("flashjit: kv_lengths[%d] is %d, but a sequence has up to %d keys; it is clamped\n", b, length,
           p.seqlen_kv);
  if constexpr (Problem::kSharedPrefix) {
    const int prefix = p.prefix_length[0], queries = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
    const int most = max(clamped(length, 0, p.seqlen_kv) - queries, 0);
    if (prefix < 0 || (queries > 0 && prefix > most))
      printf("flashjit: prefix_length is %d, but sequence %d has %d keys before its queries' keys\n", prefix,
             b, most);
  }
}

/// One batch entry: where its rows lie in the tensors, and how many there are. Packed sequences (varlen) lie
/// one after the other in batch 0. A cache (kCache) has K and V of each elsewhere: KvSource knows where.
template <class Problem>
struct Sequence {
  int b;
  // Read with varlen only, and kv_length_ with a cache.
  int q_first_ = 0, kv_first_ = 0, q_length_ = 0, kv_length_ = 0;

  __device__ Sequence() {}
  __device__ Sequence(const Params& p, int b_) : b(b_) {
    if constexpr (Problem::kVarlen) {
      const PackedRows q = packed_rows(p.cu_seqlens_q[b], p.cu_seqlens_q[b + 1], p.rows_q, p.seqlen_q);
      q_first_ = q.first, q_length_ = q.count;
      const int queries = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
      if (queries < Problem::kFewestQueries || queries > Problem::kMostQueries) q_length_ = 0;
    }
    if constexpr (Problem::kCache) {
      kv_length_ = clamped(p.kv_lengths[b], 0, p.seqlen_kv);
      if constexpr (Problem::kCheckIndices) check_length<Problem>(p, b);
    } else if constexpr (Problem::kVarlen) {
      const PackedRows kv = packed_rows(p.cu_seqlens_kv[b], p.cu_seqlens_kv[b + 1], p.rows_kv, p.seqlen_kv);
      kv_first_ = kv.first, kv_length_ = kv.count;
    }
  }
  __device__ int batch() const { return Problem::kVarlen ? 0 : b; }  ///< its index in the tensors
  /// The same in K and V. In a cache, pages belong to no batch entry.
  __device__ int kv_batch() const { return Problem::kCache ? 0 : batch(); }
  __device__ int q_row(int q) const { return Problem::kVarlen ? q_first_ + q : q; }
  __device__ int kv_row(int kv) const { return Problem::kVarlen && !Problem::kCache ? kv_first_ + kv : kv; }
  __device__ int seqlen_q(const Params& p) const { return Problem::kVarlen ? q_length_ : p.seqlen_q; }
  __device__ int seqlen_kv(const Params& p) const {
    return Problem::kVarlen || Problem::kCache ? kv_length_ : p.seqlen_kv;
  }
  /// Number of keys that are no padding.
  __device__ int seqused_kv(const Params& p) const {
    if constexpr (Problem::kKvLengths) return clamped(p.kv_lengths[b], 0, seqlen_kv(p));
    return seqlen_kv(p);
  }
  /// The first of its rows of one query head among [batch, heads_q, seqlen_q_padded].
  __device__ long long stats_row(const Params& p, int h) const {
    return (static_cast<long long>(b) * p.heads_q + h) * p.seqlen_q_padded;
  }
  /// A row of LSE, and of what has its strides: the largest scores, LSE's gradient, a state's LSE.
  __device__ long long lse_row(const Params& p, int h, int q) const {
    return batch() * p.lse.stride_b + h * p.lse.stride_h + q_row(q) * p.lse.stride_s;
  }
  /// A row of one split's O and LSE, which are [batch, heads_q, seqlen_q].
  __device__ long long split_row(const Params& p, int h, int q) const {
    return (static_cast<long long>(b) * p.heads_q + h) * p.seqlen_q + q;
  }
  /// Where the kernel that visits the keys writes a row's LSE, see lse_of(), and its largest score.
  __device__ long long written_row(const Params& p, int h, int q) const {
    return Problem::kSplit ? split_row(p, h, q) : lse_row(p, h, q);
  }
  __device__ typename Problem::Head head(const Params& p, int h) const {
    return Problem::head(p, b, h, seqlen_q(p), seqlen_kv(p));
  }
  template <class Element = unsigned short>
  __device__ Element* q_pointer(const TensorParam& tensor, int h, int q) const {
    return static_cast<Element*>(tensor.data) + batch() * tensor.stride_b + h * tensor.stride_h +
           q_row(q) * tensor.stride_s;
  }
  template <class Element = unsigned short>
  __device__ Element* kv_pointer(const TensorParam& tensor, int h, int kv) const {
    return static_cast<Element*>(tensor.data) + kv_batch() * tensor.stride_b + h * tensor.stride_h +
           kv_row(kv) * tensor.stride_s;
  }
};

/// Whether a tile may hold rows behind a sequence's last key that belong to something else, and so may be
/// anything: zero times anything is not zero.
template <class Problem>
constexpr bool kOutOfRangeKeys = Problem::kKvLengths || Problem::kVarlen || Problem::kCache;

__device__ __forceinline__ Position position(int at) { return {at, static_cast<float>(at), 0.0f}; }
/// `offset` is known when the kernel is compiled, and so is its float.
__device__ __forceinline__ Position operator+(Position position, int offset) {
  return {position.at + offset, position.base, position.offset + static_cast<float>(offset)};
}

/// Whether P of a row comes back from its LSE. Not where the row attends to nothing, and not where it attends
/// only to keys that a mask has put next to the least float: beside these LSE has no room for the log of how
/// many there are.
__device__ __forceinline__ bool lse_gives_p(float lse) { return !(lse < -1e37f); }

/// P = exp(S - LSE) of a pair in the backward pass, from its dot product, or the score that a program made of
/// it. LSE is subtracted before anything is rounded, so that P of a row's only key is as near to 1 as LSE is
/// to the key's score: for scores of 1e5 log2(e) times both would differ by more.
template <class Problem>
__device__ __forceinline__ float p_of_pair(const Params& p, float s, float lse) {
  return exp2_approx((Problem::kHasScore ? s - lse : fmaf(s, p.softmax_scale, -lse)) * kLog2E);
}

/// What takes a score to the exponent of a power of two: one of a program is in natural units already.
template <class Problem>
__device__ __forceinline__ float score_scale_log2(const Params& p, float k_scale = 1.0f) {
  return Problem::kHasScore ? kLog2E : p.softmax_scale * k_scale * kLog2E;
}

/// Whether a row has keys, by its sum of exp(S - m): 1 or more where it has, and NaN where a score of them is
/// NaN. The maximum cannot tell, as it passes over NaN.
__device__ __forceinline__ bool has_keys(float sum) { return sum != 0.0f; }
/// The largest score of a row, NaN where one is: `sum` is the row's sum.
__device__ __forceinline__ float largest_or_nan(float largest, float sum) { return fmaf(sum, 0.0f, largest); }

/// Whether a row's highest score is next to the least float, as additive masks and parts of them put it, or
/// -infinity.
__device__ __forceinline__ bool is_near_min(float highest) { return highest < -1e30f; }

/// What takes the scores of a row to exponents of a power of two: `factor`, unless all that the row has seen
/// lie next to the least float, as additive masks put them. log2(e) times the highest would then be
/// -infinity; among such scores any factor leaves the highest alone.
template <class Problem>
__device__ __forceinline__ float exponent_factor(float highest, float factor) {
  if constexpr (Problem::kNearMinScores) return is_near_min(highest) ? 0.125f : factor;
  return factor;
}

/// The score of a pair that does not attend; with kWeightMod scores are P.
template <class Problem>
__device__ __forceinline__ float masked_score() {
  return Problem::kWeightMod ? 0.0f : -infinity();
}

/// A pair's score, masked_score() unless all three hold. Without branches among them, what a mask reads is
/// read once a row and once a column of a tile.
template <class Problem>
__device__ __forceinline__ float mask_score(float score, bool by_map, bool by_length, bool by_mask) {
  const bool attends = static_cast<int>(by_map) & static_cast<int>(by_length) & static_cast<int>(by_mask);
  return attends ? score : masked_score<Problem>();
}

/// Bit n: whether the n-th of a thread's 32 values in a row of accumulators, two of each eight columns, is in
/// columns [begin, end), which are counted from the first of them.
__device__ __forceinline__ unsigned own_columns(int begin, int end) {
  const auto before = [](int column) {
    const int count = max((column >> 3) * 2 + min(column & 7, 2), 0);
    return ~__funnelshift_lc(0u, ~0u, count);  // 32 and more: all
  };
  return before(end) & ~before(begin);
}
/// Which of the 32 keys of a thread attend to a query and are no padding, by a mask with kMaskBounds > 0.
template <class P>
__device__ __forceinline__ unsigned own_keys(const Params& p, const typename P::Head& head, int q,
                                             int first_key, int seqused_kv) {
  const Range keys = P::kv_bounds(p, head, {q, q + 1});
  return own_columns(keys.begin - first_key, min(keys.end, seqused_kv) - first_key);
}
/// The map's row of entries for one block row of batch b and head h.
template <class Problem>
__device__ __forceinline__ const unsigned char* block_map_row(const Params& p, int b, int h, int q) {
  const long long mb = p.map_batch == 1 ? 0 : b;
  const long long mh = p.map_heads == 1 ? 0 : h;
  return p.block_map + ((mb * p.map_heads + mh) * p.map_rows + q / Problem::kBlockQ) * p.map_columns;
}

/// Whether the block map lets a pair attend.
template <class Problem>
__device__ __forceinline__ bool in_block_map(const Params& p, int b, int h, int q, int kv) {
  return block_map_row<Problem>(p, b, h, q)[kv / Problem::kBlockKv] != 0;
}

/// Whether listed tiles reach across the map's blocks: else each is within one that attends.
template <class P>
constexpr bool kTestsMap = P::kBlockMap &&
                           (P::kBlockQ % (P::kListedRows < P::kBr ? P::kListedRows : P::kBr) != 0 ||
                            P::kBlockKv % P::kBc != 0);

/// Whether pairs of a tile may be unlike to the mask program.
template <class P>
constexpr bool kTestsMask = P::kMaskBlockQ % P::kBr != 0 || P::kMaskBlockKv % P::kBc != 0;

/// Whether the pair attends by block map and mask program.
template <class Problem>
__device__ __forceinline__ bool pair_attends(const Params& p, const typename Problem::Head& head, int q,
                                             int kv) {
  if constexpr (Problem::kBlockMap) {
    if (!in_block_map<Problem>(p, head.b, head.h, q, kv)) return false;
  }
  if constexpr (Problem::kHasMask) return Problem::mask(p, head, position(q), position(kv));
  return true;
}

}  // namespace flashjit
