// After the forward pass by stream-K: O and LSE of the work tiles that segments cut, each from its parts, by
// the formula of combine.cuh; after a cascade those of all rows.
#pragma once

#include "flashjit/tma/stream_k.cuh"

namespace flashjit::tma {

/// Rows of a work tile that a CTA joins where parts are few, one a warp. Of a tile of many parts a CTA joins
/// one row, whose parts its warps share: all segments that have a part help. One sequence of 32k keys has
/// 132.
constexpr int kJoinedRows = 4, kFewParts = 4;

/// The sum of some parts of a row: of exp(LSE_i - highest), and of that times O_i.
template <class P>
struct JoinedParts {
  static constexpr int kChunks = P::kHeadDimV / 4, kLaneChunks = (kChunks + 31) / 32;
  static constexpr int kAtOnce = max(8 / kLaneChunks, 2);
  float highest = -infinity(), sum = 0.0f;
  float4 o[kLaneChunks] = {};

  __device__ float shift() const { return highest == -infinity() ? 0.0f : highest; }

  /// Adds the parts of each kStep'th segment; `row_in(segment)` is the row of a segment's part. Several parts
  /// at once, and LSE beside O, so that reads do not wait for each other.
  template <int kStep, class RowIn>
  __device__ __forceinline__ void add(const Params& p, int begin, int end, const RowIn& row_in) {
    const int thread = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int first = begin; first < end; first += kAtOnce * kStep) {
      float lse[kAtOnce];
      float4 x[kAtOnce][kLaneChunks];
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) {
        const int segment = first + part * kStep;
        const bool exists = segment < end;
        const long long from = exists ? row_in(segment) : 0;
        lse[part] = exists ? p.lse_splits[from] : -infinity();
#pragma unroll
        for (int i = 0; i < kLaneChunks; ++i) {
          const int chunk = thread + i * 32;
          x[part][i] = {};
          if (exists && chunk < kChunks)
            x[part][i] = reinterpret_cast<const float4*>(o_of_part<P>(p, from))[chunk];
        }
      }
      const float before = highest;
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) highest = fmaxf(highest, lse[part]);
      const float rescale = expf(before - shift());
      sum *= rescale;
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i)
        o[i] = {o[i].x * rescale, o[i].y * rescale, o[i].z * rescale, o[i].w * rescale};
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) {
        const bool has_o = lse[part] != -infinity();  // else there is memory, but it was not written
        const float weight = expf(lse[part] - shift());
        sum += weight;
#pragma unroll
        for (int i = 0; i < kLaneChunks; ++i) {
          const auto add = [&](float& to, float value) { to = has_o ? fmaf(weight, value, to) : to; };
          add(o[i].x, x[part][i].x), add(o[i].y, x[part][i].y);
          add(o[i].z, x[part][i].z), add(o[i].w, x[part][i].w);
        }
      }
    }
  }
};

/// Stores a row's O and LSE, by kWarps warps.
template <class P, int kWarps>
__device__ __forceinline__ void store_joined(const Params& p, const Sequence<P>& sequence,
                                             const RowCoord& target, const JoinedParts<P>& joined, int warp) {
  constexpr int kChunks = JoinedParts<P>::kChunks, kLaneChunks = JoinedParts<P>::kLaneChunks;
  const int thread = static_cast<int>(threadIdx.x) % 32;
  const float sum = joined.sum;
  const RowEnd row_end = with_sink<P>(p, target.h, has_keys(sum) ? joined.highest + logf(sum) : -infinity());
  const float factor = has_keys(sum) ? row_end.factor / sum : 0.0f;
  OutElement<P>* to = sequence.template q_pointer<OutElement<P>>(p.o, target.h, target.q);
#pragma unroll
  for (int i = 0; i < kLaneChunks; ++i) {
    const int chunk = thread + i * 32;
    if (i % kWarps != warp || chunk >= kChunks) continue;
    const float4 o = joined.o[i];
    store_columns(to + chunk * 4, {o.x * factor, o.y * factor, o.z * factor, o.w * factor});
  }
  if (p.lse.data != nullptr && warp == 0 && thread == 0)
    p.lse.data[sequence.lse_row(p, target.h, target.q)] = row_end.lse;
}

/// The same as codes: the first warp has all columns, as a scale may be a row's.
template <class P>
__device__ __forceinline__ void store_joined_codes(const Params& p, const Sequence<P>& sequence,
                                                   const RowCoord& target, const JoinedParts<P>& joined,
                                                   int warp) {
  if (warp != 0) return;
  const float sum = joined.sum;
  const RowEnd row_end = with_sink<P>(p, target.h, has_keys(sum) ? joined.highest + logf(sum) : -infinity());
  const float factor = has_keys(sum) ? row_end.factor / sum : 0.0f;
  float4 x[JoinedParts<P>::kLaneChunks];
#pragma unroll
  for (int i = 0; i < JoinedParts<P>::kLaneChunks; ++i) {
    const float4 o = joined.o[i];
    x[i] = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
  }
  store_codes_of_lanes<P, 32>(coded_row(p, sequence, target.h, target.q, true), x);
  if (p.lse.data != nullptr && threadIdx.x % 32 == 0)
    p.lse.data[sequence.lse_row(p, target.h, target.q)] = row_end.lse;
}

// How a joined row is stored by kWarps warps; JoinedRow<P> names one of these types.
template <class P>
struct JoinedElements {
  template <int kWarps>
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence,
                                               const RowCoord& target, const JoinedParts<P>& joined,
                                               int warp) {
    store_joined<P, kWarps>(p, sequence, target, joined, warp);
  }
};
template <class P>
struct JoinedCodes {
  template <int kWarps>
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence,
                                               const RowCoord& target, const JoinedParts<P>& joined,
                                               int warp) {
    store_joined_codes(p, sequence, target, joined, warp);
  }
};
template <class P>
using JoinedRow = Conditional<kOutCodes<P>, JoinedCodes<P>, JoinedElements<P>>;
/// Warps among which the chunks of a joined row are divided.
template <class P, int kWarps>
constexpr int kWriters = kOutCodes<P> ? 1 : kWarps;

/// Joins a row of a cut work tile, whose first part is of segment `first`. By kWarps warps that share its
/// parts.
template <class P, int kWarps>
__device__ __forceinline__ void join_parts(const Params& p, const PartialTile& partial, int first, int group,
                                           int row) {
  constexpr int kChunks = JoinedParts<P>::kChunks, kLaneChunks = JoinedParts<P>::kLaneChunks;
  const int thread = static_cast<int>(threadIdx.x) % 32,
            warp = kWarps > 1 ? static_cast<int>(threadIdx.x) / 32 : 0;
  TileCoord coord;
  coord.batch_head = partial.batch_head;
  coord.q_tile = partial.q_tile;
  coord.warpgroups = {0, row_warpgroups(P::kBr)};
  coord.split = kWhole;
  coord.kv_tiles = {0, 0};
  const WorkTile<P> tile(p, coord);
  const RowCoord target = row_coord(p, tile, row / kWarpgroupRows, row % kWarpgroupRows);
  if (target.q < 0) return;

  // The last part is its segment's first, the others are their segment's last.
  const auto row_in = [&](int segment) {
    return row_of_part<P>(part_of_segment(p, segment, group, segment + 1 < partial.segments_end), 0, row);
  };
  JoinedParts<P> joined;
  joined.template add<kWarps>(p, first + warp, partial.segments_end, row_in);
  if constexpr (kWarps > 1) {  // the warps' sums, in their order
    __shared__ float highest[kWarps];
    __shared__ float sum[kWarps];
    __shared__ float4 o[kWarps][kChunks];
    if (thread == 0) highest[warp] = joined.highest, sum[warp] = joined.sum;
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i)
      if (const int chunk = thread + i * 32; chunk < kChunks) o[warp][chunk] = joined.o[i];
    __syncthreads();
    joined = {};
#pragma unroll
    for (int other = 0; other < kWarps; ++other) joined.highest = fmaxf(joined.highest, highest[other]);
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      const float weight = expf(highest[other] - joined.shift());
      joined.sum += weight * sum[other];
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const int chunk = thread + i * 32;
        if (i % kWriters<P, kWarps> != warp || chunk >= kChunks) continue;
        const float4 x = o[other][chunk];
        joined.o[i] = {fmaf(weight, x.x, joined.o[i].x), fmaf(weight, x.y, joined.o[i].y),
                       fmaf(weight, x.z, joined.o[i].z), fmaf(weight, x.w, joined.o[i].w)};
      }
    }
    __syncthreads();  // before another row
  }
  JoinedRow<P>::template store<kWarps>(p, tile.sequence, target, joined, warp);
}

/// Grid: segments * rows that a work tile may have / kJoinedRows.
template <class P>
__device__ void combine_parts(const Params& p) {
  let_next_grid_start<P>();  // the next call's forward pass, which waits by itself, too
  wait_for_prior_grid<P>();
  const int blocks = static_cast<int>(gridDim.x) / p.num_splits;  // of a segment
  const int cta = static_cast<int>(blockIdx.x) / blocks, block = static_cast<int>(blockIdx.x) % blocks;
  const int segment = cta / p.head_groups, group = cta % p.head_groups;
  const PartialTile own = p.partial_tiles[cta];
  if (own.segments_end > 0 && own.segments_end <= segment + kFewParts)
    join_parts<P, 1>(p, own, segment, group, block * kJoinedRows + static_cast<int>(threadIdx.x) / 32);
#pragma unroll 1
  for (int tile = 0; tile < 2; ++tile) {  // the one that begins here, and the one that ends here or later
    const int first = tile == 0 ? segment : own.continues;
    if (first < 0) break;
    const PartialTile partial = p.partial_tiles[first * p.head_groups + group];
    const int row = (segment - first) * blocks + block;
    if (partial.segments_end > first + kFewParts && row < blocks * kJoinedRows)
      join_parts<P, kJoinedRows>(p, partial, first, group, row);
  }
}

/// After a cascade. A warp for a row of O; grid: batch * heads_q * seqlen_q / kJoinedRows.
template <class P>
__device__ void combine_cascade(const Params& p) {
  let_next_grid_start<P>();
  wait_for_prior_grid<P>();
  const long long at = static_cast<long long>(blockIdx.x) * kJoinedRows + threadIdx.x / 32;
  const int q = static_cast<int>(at % p.seqlen_q), h = static_cast<int>(at / p.seqlen_q % p.heads_q),
            b = static_cast<int>(at / p.seqlen_q / p.heads_q);
  if (b >= p.batch) return;
  const Sequence<P> sequence(p, b), prefix = sequence_at<P>(p, p.batch);
  if (q >= sequence.seqlen_q(p)) return;
  const PartsOfRow own = parts_of_row<P>(p, b, q, h);
  PartsOfRow shared{};
  if (const int query = sequence.q_row(q) - prefix.q_row(0); query >= 0 && query < prefix.seqlen_q(p))
    shared = parts_of_row<P>(p, p.batch, query, h);
  JoinedParts<P> joined;
  joined.template add<1>(p, 0, own.count() + shared.count(), [&](int part) {
    const bool is_own = part < own.count();
    const PartsOfRow& of = is_own ? own : shared;
    const int segment = of.segments.begin + (is_own ? part : part - own.count());
    return row_of_part<P>(part_of_tile(p, of.index, segment), 0, of.row);
  });
  JoinedRow<P>::template store<1>(p, sequence, {q, h}, joined, 0);
}

}  // namespace flashjit::tma
