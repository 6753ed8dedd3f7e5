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
__device__ __forceinline__ float row_max_of_splits(const Params& p, int count, long long row) {
  float largest = -infinity();
  for (int split = 0; split < count; ++split) largest = fmaxf(largest, row_max_of<P>(p, split)[row]);
  return largest;
}

constexpr int kCombineWarps = 4;

/// Columns of a lane: chunk lane + 32 i of the row.
template <class P>
struct LaneColumns {
  static constexpr int kChunks = P::kHeadDimV / 4, kCount = (kChunks + 31) / 32;
  float4 of[kCount] = {};

  __device__ __forceinline__ static int chunk(int i) { return static_cast<int>(threadIdx.x) % 32 + i * 32; }
  __device__ __forceinline__ void add(const LaneColumns& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] = add_columns(of[i], other.of[i]);
  }
};

/// The LSE of all splits of a row, by a warp, and what their O are multiplied by.
template <class P>
struct SplitWeights {
  const Params& p;
  int count;  ///< of splits
  long long row;
  float shift, highest, sum;
  bool far;

  __device__ __forceinline__ float lse_at(int split) const { return lse_of<P>(p, split)[row]; }
  __device__ __forceinline__ float weight_of(float lse) const {
    if constexpr (P::kFarScores)
      if (far) return far_sum(lse, highest);
    return expf(lse - shift);
  }

  __device__ __forceinline__ SplitWeights(const Params& p, int count, long long row)
      : p(p), count(count), row(row), highest(-infinity()), sum(0.0f) {
    const int lane = threadIdx.x % 32;
    for (int split = lane; split < count; split += 32) highest = fmaxf(highest, lse_at(split));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, lanes));
    shift = highest == -infinity() ? 0.0f : highest;
    far = P::kFarScores && highest != -infinity() && is_far(highest);
    for (int split = lane; split < count; split += 32) sum += weight_of(lse_at(split));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
  }

  __device__ __forceinline__ float lse() const {
    if (!has_keys(sum)) return -infinity();
    return far && sum == sum ? far_highest(highest) : shift + logf(sum);
  }

  /// The sum over every fourth split from `first` on.
  __device__ __forceinline__ LaneColumns<P> sum_from(int first, float factor) const {
    // Of a batch that may be large more rows at once are worth more than more splits of one.
    constexpr int kSplitsAtOnce = P::kInvariant ? 4 : 8;
    LaneColumns<P> o;
#pragma unroll kSplitsAtOnce
    for (int split = first; split < count; split += kCombineWarps) {
      const float split_lse = lse_at(split);
      const bool has_o = split_lse != -infinity();  // else there is memory, but it was not written
      const float weight = weight_of(split_lse) * factor;
      const float4* from = reinterpret_cast<const float4*>(o_of_split<P>(p, split) + row * P::kHeadDimV);
#pragma unroll
      for (int i = 0; i < LaneColumns<P>::kCount; ++i) {
        const int chunk = LaneColumns<P>::chunk(i);
        if (chunk >= LaneColumns<P>::kChunks) break;
        const float4 x = from[chunk];
        const auto add = [&](float& to, float value) { to = has_o ? fmaf(weight, value, to) : to; };
        add(o.of[i].x, x.x), add(o.of[i].y, x.y), add(o.of[i].z, x.z), add(o.of[i].w, x.w);
      }
    }
    return o;
  }
};

/// One CTA of 128 threads for one query of one head, whose warps share the splits, or of many rows for four,
/// one of each warp; grid: batch * heads_q * seqlen_q, or a quarter. Both add in the same order.
template <class P>
__device__ void combine(const Params& p) {
  using Columns = LaneColumns<P>;
  __shared__ Columns sums[kCombineWarps][32];
  wait_for_prior_grid<P>();
  const long long rows = static_cast<long long>(p.batch) * p.heads_q * p.seqlen_q;
  const bool warp_has_row = gridDim.x < rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long row = warp_has_row ? static_cast<long long>(blockIdx.x) * kCombineWarps + warp : blockIdx.x;
  if (row >= rows) return;
  const int q = static_cast<int>(row % p.seqlen_q), h = static_cast<int>(row / p.seqlen_q % p.heads_q);
  const Sequence<P> sequence(p, static_cast<int>(row / p.seqlen_q / p.heads_q));
  if (q >= sequence.seqlen_q(p)) return;

  const SplitWeights<P> splits(p, splits_with_keys<P>(p, sequence.seqused_kv(p)), row);
  RowEnd end = with_sink<P>(p, h, splits.lse());
  const float of_state = join_state<P>(p, true, sequence.lse_row(p, h, q), end);
  const float factor = has_keys(splits.sum) ? end.factor / splits.sum : 0.0f;
  Columns all;
  if (warp_has_row) {
    all = splits.sum_from(0, factor);
#pragma unroll 1
    for (int first = 1; first < kCombineWarps; ++first) all.add(splits.sum_from(first, factor));
  } else {
    sums[warp][lane] = splits.sum_from(warp, factor);
    __syncthreads();
    if (warp != 0) return;
    all = sums[0][lane];
#pragma unroll
    for (int other = 1; other < kCombineWarps; ++other) all.add(sums[other][lane]);
  }
#pragma unroll
  for (int i = 0; i < Columns::kCount; ++i) {
    const int chunk = Columns::chunk(i);
    if (chunk >= Columns::kChunks) break;
    if constexpr (P::kRunningState) {
      const float* from = sequence.template q_pointer<float>(p.o_state, h, q) + chunk * 4;
      all.of[i] = add_columns(all.of[i], state_columns(from, of_state));
    }
    store_columns(sequence.template q_pointer<OutElement<P>>(p.o, h, q) + chunk * 4, all.of[i]);
  }
  if (lane != 0) return;
  if (p.lse.data != nullptr) p.lse.data[sequence.lse_row(p, h, q)] = end.lse;
  if constexpr (P::kRowMax)
    p.row_max[sequence.lse_row(p, h, q)] =
        largest_or_nan(row_max_of_splits<P>(p, splits.count, row), splits.sum);
}

}  // namespace flashjit::auxiliary
