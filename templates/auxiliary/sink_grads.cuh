// Gradient of each head's attention sink. Its probability is exp(sink - LSE) and its value is zero, so that
// its dP is zero and its dS is -P * D.
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

/// One CTA of 128 threads for one query head, after preprocess; grid: heads_q. Rows in a fixed order: the
/// same bits on every run.
template <class P>
__device__ void sink_grads(const Params& p) {
  constexpr int kThreads = 128;
  __shared__ float sums[kThreads];
  if (p.dsinks == nullptr) return;
  const int h = blockIdx.x;
  const float sink = sink_of_head<P>(p, h);
  float sum = 0.0f;
  if (sink != -infinity()) {
    for (int b = 0; b < p.batch; ++b) {
      const Sequence<P> sequence(p, b);
      const long long stats = sequence.stats_row(p, h);
#pragma unroll 8
      for (int q = threadIdx.x; q < sequence.seqlen_q(p); q += kThreads)
        sum -= expf(sink - p.lse.data[sequence.lse_row(p, h, q)]) * p.d[stats + q];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.dsinks[h] += sums[0];
}

}  // namespace flashjit::auxiliary
