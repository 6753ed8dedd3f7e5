// After a forward pass whose CTAs shared the keys of each Q tile: O = sum of exp(LSE_i - LSE) O_i over the
// splits i of the keys, where LSE is that of all of them.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/common/running_state.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

/// The largest score of a row, of which each split has its own.
template <class P>
__device__ __forceinline__ float row_max_of_splits(const Params& p, long long row) {
  float largest = -infinity();
  for (int split = 0; split < p.num_splits; ++split) largest = fmaxf(largest, row_max_of<P>(p, split)[row]);
  return largest;
}

/// The sum of four columns that each warp has.
template <int kWarps, int kChunks>
__device__ __forceinline__ float4 sum_of_warps(const float4 (&sums)[kWarps][kChunks], int chunk) {
  float4 all = sums[0][chunk];
#pragma unroll
  for (int other = 1; other < kWarps; ++other) all = add_columns(all, sums[other][chunk]);
  return all;
}

/// One CTA of 128 threads for one query of one head, whose warps share the splits; grid:
/// batch * heads_q * seqlen_q.
template <class P>
__device__ void combine(const Params& p) {
  constexpr int kWarps = 4, kChunks = P::kHeadDimV / 4, kLaneChunks = (kChunks + 31) / 32;
  __shared__ float4 sums[kWarps][kChunks];
  wait_for_prior_grid<P>();
  const long long row = blockIdx.x;
  const int q = static_cast<int>(row % p.seqlen_q), h = static_cast<int>(row / p.seqlen_q % p.heads_q);
  const Sequence<P> sequence(p, static_cast<int>(row / p.seqlen_q / p.heads_q));
  if (q >= sequence.seqlen_q(p)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const auto lse_at = [&](int split) { return lse_of<P>(p, split)[row]; };
  float highest = -infinity(), sum = 0.0f;
  for (int split = lane; split < p.num_splits; split += 32) highest = fmaxf(highest, lse_at(split));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, lanes));
  const float shift = highest == -infinity() ? 0.0f : highest;
  const bool far = P::kFarScores && highest != -infinity() && is_far(highest);
  const auto weight_of = [&](float lse) {
    if constexpr (P::kFarScores)
      if (far) return far_sum(lse, highest);
    return expf(lse - shift);
  };
  for (int split = lane; split < p.num_splits; split += 32) sum += weight_of(lse_at(split));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
  const float lse = !has_keys(sum)      ? -infinity()
                    : far && sum == sum ? far_highest(highest)
                                        : shift + logf(sum);
  RowEnd end = with_sink<P>(p, h, lse);
  const float of_state = join_state<P>(p, true, sequence.lse_row(p, h, q), end);
  const float factor = has_keys(sum) ? end.factor / sum : 0.0f;

  float4 o[kLaneChunks] = {};
#pragma unroll 8
  for (int split = warp; split < p.num_splits; split += kWarps) {
    const float split_lse = lse_at(split);
    const bool has_o = split_lse != -infinity();  // else there is memory, but it was not written
    const float weight = weight_of(split_lse) * factor;
    const float4* from = reinterpret_cast<const float4*>(o_of_split<P>(p, split) + row * P::kHeadDimV);
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
      const int chunk = lane + i * 32;
      if (chunk >= kChunks) break;
      const float4 x = from[chunk];
      const auto add = [&](float& to, float value) { to = has_o ? fmaf(weight, value, to) : to; };
      add(o[i].x, x.x), add(o[i].y, x.y), add(o[i].z, x.z), add(o[i].w, x.w);
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneChunks; ++i)
    if (const int chunk = lane + i * 32; chunk < kChunks) sums[warp][chunk] = o[i];
  __syncthreads();
  for (int chunk = threadIdx.x; chunk < kChunks; chunk += kWarps * 32) {
    float4 all = sum_of_warps(sums, chunk);
    if constexpr (P::kRunningState) {
      const float* from = sequence.template q_pointer<float>(p.o_state, h, q) + chunk * 4;
      all = add_columns(all, state_columns(from, of_state));
    }
    store_columns(sequence.template q_pointer<OutElement<P>>(p.o, h, q) + chunk * 4, all);
  }
  if (p.lse.data != nullptr && threadIdx.x == 0) p.lse.data[sequence.lse_row(p, h, q)] = end.lse;
  if constexpr (P::kRowMax)
    if (threadIdx.x == 0)
      p.row_max[sequence.lse_row(p, h, q)] = largest_or_nan(row_max_of_splits<P>(p, row), sum);
}

}  // namespace flashjit::auxiliary
