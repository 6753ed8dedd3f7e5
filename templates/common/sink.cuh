// Attention sinks: one more logit a head in the softmax's denominator, which attends to nothing.
#pragma once

#include "flashjit/common/ptx.cuh"

namespace flashjit {

/// The row sum that O is divided by. P V adds up P rounded to the element type, so the sum counts the rounded
/// P of the row's largest key, too: exp2(rest), as its exponent is computed with one rounding. O of a row
/// with one strong key is then that key's V, however large the scores are.
template <class Element>
__device__ __forceinline__ float sum_of_products(float sum, float rest) {
  const float largest = exp2_approx(rest);
  return sum + (low_of<Element>(pack<Element>(largest, 0.0f)) - largest);
}

/// A head's sink; -infinity: it has none.
template <class P>
__device__ __forceinline__ float sink_of_head(const Params& p, int h) {
  return P::kSinks ? p.sinks[h] : -infinity();
}

/// The end of a row of O.
struct RowEnd {
  float lse;
  float factor;  ///< factor for O, which is divided by its own sum already
};

/// From the LSE over the keys alone.
template <class P>
__device__ __forceinline__ RowEnd with_sink(const Params& p, int h, float lse) {
  if constexpr (!P::kSinks) return {lse, 1.0f};
  const float sink = sink_of_head<P>(p, h);
  if (sink == -infinity()) return {lse, 1.0f};
  const float more = expf(sink - lse);  // infinity where the row attends to nothing
  return {sink > lse ? sink + log1pf(expf(lse - sink)) : lse + log1pf(more), 1.0f / (1.0f + more)};
}
/// The same for a kernel that visits the keys. With split-KV the combine entry adds the sink.
template <class P>
__device__ __forceinline__ RowEnd end_of_row(const Params& p, int h, float lse) {
  if constexpr (P::kSplit) return {lse, 1.0f};
  return with_sink<P>(p, h, lse);
}

}  // namespace flashjit
