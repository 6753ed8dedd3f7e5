// LSE in units of log2, from the preprocess entry: then P = exp2(S scale_log2 - LSE_log2) is one
// multiplication less for each pair than exp2((S scale - LSE) log2(e)). But the two products round apart, by
// more than LSE itself where that is large: for scores of 1e5 P would be wrong in its third digit. So rows
// whose LSE is large keep it in natural units, and the difference comes first.
#pragma once

#include "flashjit/common/params.cuh"

namespace flashjit {

/// Below this in units of log2 P is off by 2e-5 at most.
constexpr float kLargeLseLog2 = 256.0f;

/// Floats of D, and of LSE in either unit.
__device__ __forceinline__ long long row_stats_count(const Params& p) {
  return static_cast<long long>(p.batch) * p.heads_q * p.seqlen_q_padded;
}
/// [batch, heads_q, seqlen_q_padded], behind the other.
__device__ __forceinline__ float* lse_log2(const Params& p) { return p.lse_padded + row_stats_count(p); }
/// Whether any of kLseRows rows has a large LSE, a byte for each such group.
__device__ __forceinline__ unsigned char* large_lse(const Params& p, long long first_row) {
  return reinterpret_cast<unsigned char*>(lse_log2(p) + row_stats_count(p)) + first_row / kLseRows;
}
/// The same of all rows of a Q tile, as one word.
template <class P>
__device__ __forceinline__ unsigned large_lse_of_tile(const Params& p, long long first_row) {
  static_assert(P::kBr == 2 * kLseRows || P::kBr == 4 * kLseRows);
  const unsigned char* from = large_lse(p, first_row);
  if constexpr (P::kBr == 2 * kLseRows) return *reinterpret_cast<const unsigned short*>(from);
  return *reinterpret_cast<const unsigned*>(from);
}

}  // namespace flashjit
