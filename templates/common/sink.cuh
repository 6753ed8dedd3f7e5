// Attention sinks: one more logit a head in the softmax's denominator, which attends to nothing.
#pragma once

#include "flashjit/common/ptx.cuh"

namespace flashjit {

/// The end of a row of O.
struct RowEnd {
  float lse;
  float factor;  ///< what O, already divided by its own sum, is multiplied with
};

/// From the LSE over the keys alone.
template <class P>
__device__ __forceinline__ RowEnd with_sink(const Params& p, int h, float lse) {
  if constexpr (!P::kSinks) return {lse, 1.0f};
  const float sink = p.sinks[h];
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
