// After a forward pass whose CTAs shared the keys of each Q tile: O = sum of exp(LSE_i - LSE) O_i over the
// splits i of the keys, where LSE is of all splits.
#pragma once

#include "flashjit/common/out_codes.cuh"
#include "flashjit/common/out_element.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/common/running_state.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

/// The largest score of a row, from each split's largest.
template <class P>
__device__ __forceinline__ float row_max_of_splits(const Params& p, int count, long long row) {
  float largest = -infinity();
  for (int split = 0; split < count; ++split) largest = fmaxf(largest, row_max_of<P>(p, split)[row]);
  return largest;
}

constexpr int kCombineWarps = 4;

/// Columns of one of the kLanes lanes that have a row: chunk lane + kLanes * i.
template <class P, int kLanes>
struct LaneColumns {
  static constexpr int kChunks = P::kHeadDimV / 4, kCount = (kChunks + kLanes - 1) / kLanes;
  float4 of[kCount] = {};

  __device__ __forceinline__ static int chunk(int i) {
    return static_cast<int>(threadIdx.x) % kLanes + i * kLanes;
  }
  __device__ __forceinline__ void add(const LaneColumns& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] = add_columns(of[i], other.of[i]);
  }
};

/// The LSE of all splits of a row, by kLanes lanes of a warp that goes on as a whole, and what their O are
/// multiplied by.
template <class P, int kLanes>
struct SplitWeights {
  const Params& p;
  int count;  ///< of splits
  long long row;
  float shift, highest, sum;
  bool far;

  __device__ __forceinline__ float lse_at(int split) const { return lse_of<P>(p, split)[row]; }
  __device__ __forceinline__ float weight_of(float lse) const {
    if constexpr (P::kNearMinScores)
      if (far) return far_sum(lse, highest);
    return expf(lse - shift);
  }

  __device__ __forceinline__ SplitWeights(const Params& p, int count, long long row)
      : p(p), count(count), row(row), highest(-infinity()), sum(0.0f) {
    const int lane = threadIdx.x % kLanes;
    for (int split = lane; split < count; split += kLanes) highest = fmaxf(highest, lse_at(split));
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, lanes));
    shift = highest == -infinity() ? 0.0f : highest;
    far = P::kNearMinScores && highest != -infinity() && is_near_min(highest);
    sum = sum_of_lanes(lane);
  }
  /// In the same order for any number of lanes: 32 partial sums, added by halves.
  __device__ __forceinline__ float sum_of_lanes(int lane) const {
    constexpr int kParts = 32 / kLanes;
    float parts[kParts] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      for (int split = lane + part * kLanes; split < count; split += 32)
        parts[part] += weight_of(lse_at(split));
#pragma unroll
    for (int half = kParts / 2; half > 0; half /= 2)
#pragma unroll
      for (int part = 0; part < half; ++part) parts[part] += parts[part + half];
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
      parts[0] += __shfl_xor_sync(kWholeWarp, parts[0], lanes);
    return parts[0];
  }

  __device__ __forceinline__ float lse() const {
    if (!has_keys(sum)) return -infinity();
    return far && sum == sum ? far_highest(highest) : shift + logf(sum);
  }

  /// The sum over every fourth split from `first` on.
  __device__ __forceinline__ LaneColumns<P, kLanes> sum_from(int first, float factor) const {
    // A batch may be large: more rows at once are then worth more than more splits of one.
    constexpr int kSplitsAtOnce = kLanes < 32 ? 1 : P::kInvariant ? 4 : 8;
    LaneColumns<P, kLanes> o;
#pragma unroll kSplitsAtOnce
    for (int split = first; split < count; split += kCombineWarps) {
      const float split_lse = lse_at(split);
      const bool has_o = split_lse != -infinity();  // else there is memory, but it was not written
      const float weight = weight_of(split_lse) * factor;
      const float4* from = reinterpret_cast<const float4*>(o_of_split<P>(p, split) + row * P::kHeadDimV);
#pragma unroll
      for (int i = 0; i < o.kCount; ++i) {
        const int chunk = o.chunk(i);
        if (chunk >= o.kChunks) break;
        const float4 x = from[chunk];
        const auto add = [&](float& to, float value) { to = has_o ? fmaf(weight, value, to) : to; };
        add(o.of[i].x, x.x), add(o.of[i].y, x.y), add(o.of[i].z, x.z), add(o.of[i].w, x.w);
      }
    }
    return o;
  }
};

/// A row of O among the splits.
template <class P>
struct CombinedRow {
  long long row;
  int q, h;
  Sequence<P> sequence;

  __device__ __forceinline__ CombinedRow(const Params& p, long long row)
      : row(row),
        q(static_cast<int>(row % p.seqlen_q)),
        h(static_cast<int>(row / p.seqlen_q % p.heads_q)),
        sequence(p, static_cast<int>(row / p.seqlen_q / p.heads_q)) {}
  __device__ __forceinline__ bool exists(const Params& p) const { return q < sequence.seqlen_q(p); }
};

/// The first lane writes a row's LSE, and its largest score.
template <class P, int kLanes>
__device__ __forceinline__ void write_row_stats(const Params& p, const CombinedRow<P>& at,
                                                const SplitWeights<P, kLanes>& splits, const RowEnd& end) {
  if (threadIdx.x % kLanes != 0) return;
  if (p.lse.data != nullptr) p.lse.data[at.sequence.lse_row(p, at.h, at.q)] = end.lse;
  if constexpr (P::kRowMax)
    p.row_max[at.sequence.lse_row(p, at.h, at.q)] =
        largest_or_nan(row_max_of_splits<P>(p, splits.count, at.row), splits.sum);
}

/// Writes a row of O from the sums of its splits, and what goes with it.
template <class P, int kLanes>
__device__ __forceinline__ void write_row(const Params& p, const CombinedRow<P>& at,
                                          const SplitWeights<P, kLanes>& splits, const RowEnd& end,
                                          float of_state, LaneColumns<P, kLanes>& all) {
#pragma unroll
  for (int i = 0; i < all.kCount; ++i) {
    const int chunk = all.chunk(i);
    if (chunk >= all.kChunks) break;
    if constexpr (P::kRunningState) {
      const float* from = at.sequence.template q_pointer<float>(p.o_state, at.h, at.q) + chunk * 4;
      all.of[i] = add_columns(all.of[i], state_columns(from, of_state));
    }
    store_columns(at.sequence.template q_pointer<OutElement<P>>(p.o, at.h, at.q) + chunk * 4, all.of[i]);
  }
  write_row_stats<P>(p, at, splits, end);
}

// Who writes a row that `exists`; RowWriter<P> names one of these types.

template <class P>
struct ElementWriter {
  template <int kLanes>
  static __device__ __forceinline__ void write(const Params& p, const CombinedRow<P>& at,
                                               const SplitWeights<P, kLanes>& splits, const RowEnd& end,
                                               float of_state, LaneColumns<P, kLanes>& all, bool exists,
                                               bool writes) {
    if (exists && writes) write_row<P>(p, at, splits, end, of_state, all);
  }
};
/// O as codes, by whole warps.
template <class P>
struct CodeWriter {
  template <int kLanes>
  static __device__ __forceinline__ void write(const Params& p, const CombinedRow<P>& at,
                                               const SplitWeights<P, kLanes>& splits, const RowEnd& end,
                                               float /*of_state*/, LaneColumns<P, kLanes>& all, bool exists,
                                               bool writes) {
    if (!writes) return;
    store_codes_of_lanes<P, kLanes>(coded_row(p, at.sequence, at.h, at.q, exists), all.of);
    if (exists) write_row_stats<P>(p, at, splits, end);
  }
};
template <class P>
using RowWriter = Conditional<kOutCodes<P>, CodeWriter<P>, ElementWriter<P>>;

/// A row by kLanes lanes; `sum` gives the columns of all splits to those that write it. Where there is no row
/// the last one is computed, too, and not written.
template <class P, int kLanes, class Sum>
__device__ __forceinline__ void combine_row(const Params& p, long long row, long long rows, bool writes,
                                            const Sum& sum) {
  const CombinedRow<P> at(p, row < rows ? row : rows - 1);
  const int parts = splits_with_keys<P>(p, at.sequence.seqused_kv(p));
  const bool is_whole = P::kFixedParts && parts <= 1;  // the main kernel has written it
  const SplitWeights<P, kLanes> splits(p, is_whole ? 0 : parts, at.row);
  RowEnd end = with_sink<P>(p, at.h, splits.lse());
  const bool exists = row < rows && at.exists(p) && !is_whole;
  const float of_state = join_state<P>(p, exists, at.sequence.lse_row(p, at.h, at.q), end);
  LaneColumns<P, kLanes> all = sum(splits, has_keys(splits.sum) ? end.factor / splits.sum : 0.0f);
  RowWriter<P>::write(p, at, splits, end, of_state, all, exists, writes);
}

/// One CTA of 128 threads for one query of one head, whose warps share the splits, or of many rows for
/// combined_rows_of_cta(); grid: batch * heads_q * seqlen_q, or that many less. Both add in the same order.
template <class P>
__device__ void combine(const Params& p) {
  if (P::kFixedParts) let_next_grid_start<P>();  // the next call's forward pass, which waits by itself, too
  wait_for_prior_grid<P>();
  const long long rows = static_cast<long long>(p.batch) * p.heads_q * p.seqlen_q;
  if (gridDim.x < rows) {
    constexpr int kRows = combined_rows_of_cta(P::kHeadDimV), kLanes = kCombineWarps * 32 / kRows;
    const long long row = static_cast<long long>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    return combine_row<P, kLanes>(p, row, rows, true, [](const auto& splits, float factor) {
      auto all = splits.sum_from(0, factor);
#pragma unroll 1
      for (int first = 1; first < kCombineWarps; ++first) all.add(splits.sum_from(first, factor));
      return all;
    });
  }
  __shared__ LaneColumns<P, 32> sums[kCombineWarps][32];
  combine_row<P, 32>(p, blockIdx.x, rows, threadIdx.x < 32, [&](const auto& splits, float factor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sums[warp][lane] = splits.sum_from(warp, factor);
    __syncthreads();
    auto all = sums[0][lane];
#pragma unroll
    for (int other = 1; other < kCombineWarps; ++other) all.add(sums[other][lane]);
    return all;
  });
}

}  // namespace flashjit::auxiliary
