// The tangents of a warpgroup's scores and weights, in registers: S' becomes P (S' - shift) while the online
// softmax makes P of S.
#pragma once

#include "flashjit/common/score_tangent.cuh"
#include "flashjit/sm90/forward_mask.cuh"
#include "flashjit/sm90/forward_scores.cuh"
#include "flashjit/sm90/forward_softmax.cuh"

namespace flashjit::sm90 {

/// What a thread's two rows sum up of P (S' - shift): as it is, for LSE's tangent, and rounded as the
/// products have it, for O's. A rounding error of P S' then weighs V - O, which is 0 where a query attends to
/// one key. O's tangent is the same for any shift; the mean of S' over a row's first keys leaves nothing
/// large that would cancel.
struct TangentSums {
  float exact[2] = {}, rounded[2] = {}, shift[2] = {};
  unsigned has_shift = 0;  ///< bit n: row n
};

/// S' of a KV tile from Q K^T and its tangent, before either is changed.
template <class P, int kCount>
__device__ __forceinline__ void apply_score_tangent(const JvpParams& p, const RowState<P>& rows, int kv_begin,
                                                    const float (&s)[kCount], float (&ds)[kCount]) {
  score_pairs(rows, kv_begin, ds, [&](float tangent, int n, Position q, Position kv) {
    return score_tangent<P>(p, rows.head, s[n], tangent, q, kv);
  });
}

/// Finds the shifts of rows that have none yet.
template <int kCount>
__device__ __forceinline__ void find_shifts(const float (&ds)[kCount], const float (&p)[kCount],
                                            TangentSums& sums) {
  if (__all_sync(kWholeWarp, sums.has_shift == 3)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float weight = 0.0f, sum = 0.0f;
#pragma unroll
    for (int n = 2 * half; n < kCount; n += 4)
#pragma unroll
      for (int e = n; e < n + 2; ++e) weight += p[e], sum += chained(p[e], ds[e]);
    weight = sum_of_quad(weight), sum = sum_of_quad(sum);
    if ((sums.has_shift >> half & 1) != 0 || !(weight > 0.0f)) continue;
    sums.shift[half] = sum / weight;
    sums.has_shift |= 1u << half;
  }
}

/// S' = P (S' - shift), and its row sums, after the sums before are rescaled.
template <int kCount>
__device__ __forceinline__ void weigh_tangents(float (&ds)[kCount], const float (&p)[kCount],
                                               const float (&rescale)[2], TangentSums& sums) {
  find_shifts(ds, p, sums);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums.exact[half] *= rescale[half], sums.rounded[half] *= rescale[half];
#pragma unroll
    for (int n = 2 * half; n < kCount; n += 4)
#pragma unroll
      for (int e = n; e < n + 2; ++e) {
        ds[e] = chained(p[e], ds[e] - sums.shift[half]);  // which may be anything where P is zero
        sums.exact[half] += ds[e];
      }
  }
}

/// Adds the weights' tangents, as the products have them, to the rows' sums.
template <class Element, int kSteps>
__device__ __forceinline__ void add_rounded(const unsigned (&tangents)[kSteps][4], TangentSums& sums) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      sums.rounded[r % 2] += low_of<Element>(tangents[step][r]) + high_of<Element>(tangents[step][r]);
}

}  // namespace flashjit::sm90
