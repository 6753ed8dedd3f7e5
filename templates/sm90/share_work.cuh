// Before the forward pass by stream-K: how much work each sequence of a cache is.
#pragma once

#include "flashjit/sm90/stream_k.cuh"

namespace flashjit::sm90 {

/// Fills p.work. One CTA.
template <class P>
__device__ void share_work(const Params& p) {
  __shared__ long long of_warp[32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  long long before = 0;  // of the sequences of earlier rounds
  for (int first = 0; first <= p.batch; first += static_cast<int>(blockDim.x)) {
    const int b = first + static_cast<int>(threadIdx.x);
    Range tiles{0, 0};
    long long own = 0;
    if (b < p.batch) {
      const Sequence<P> sequence(p, b);
      tiles = kv_tiles_of<P>(p, sequence);
      own = static_cast<long long>(tiles.end - tiles.begin) * q_tiles_of<P>(p, sequence) *
            scheduled_heads<P>(p);
    }
    long long sum = own;  // with those of the lanes before
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const long long other = __shfl_up_sync(kWholeWarp, sum, lanes);
      if (lane >= lanes) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    long long all = 0;
    for (int other = 0; other < static_cast<int>(blockDim.x) / 32; ++other) {
      if (other == warp) sum += all;
      all += of_warp[other];
    }
    if (b <= p.batch) p.work[b] = {before + sum - own, tiles.begin, tiles.end - tiles.begin};
    before += all;
    __syncthreads();
  }
}

}  // namespace flashjit::sm90
