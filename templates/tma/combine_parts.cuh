// After the forward pass by stream-K: O and LSE of the work tiles that segments cut, each from its parts, by
// the formula of combine.cuh; after a cascade O and LSE of all rows.
#pragma once

#include "flashjit/tma/stream_k.cuh"

namespace flashjit::tma {

/// Warps of a CTA. Where parts are few each joins rows of its own. Of a tile of many parts a CTA joins a row
/// at a time, whose parts its warps share: all segments that have a part help. One sequence of 32k keys has
/// 132. ../sm90/NOTES.md#joining-in-one-wave
constexpr int kJoiningWarps = 4, kFewParts = 4;

/// Parts of a row that a warp loads together, LSE beside O, so that reads do not wait for each other.
template <class P, int kCount>
struct LoadedParts {
  static constexpr int kChunks = P::kHeadDimV / 4, kLaneChunks = (kChunks + 31) / 32;
  float lse[kCount];
  float4 x[kCount][kLaneChunks];

  /// Each kStep'th segment's from `first` on; `row_in(segment)` is the row of a segment's part.
  template <int kStep, class RowIn>
  __device__ __forceinline__ void load(const Params& p, int first, int end, const RowIn& row_in) {
    const int thread = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int part = 0; part < kCount; ++part) {
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
  }
};

/// The sum of some parts of a row: of exp(LSE_i - highest), and of that times O_i.
template <class P>
struct JoinedParts {
  static constexpr int kChunks = P::kHeadDimV / 4, kLaneChunks = (kChunks + 31) / 32;
  static constexpr int kAtOnce = max(8 / kLaneChunks, 2);
  float highest = -infinity(), sum = 0.0f;
  float4 o[kLaneChunks] = {};

  __device__ float shift() const { return highest == -infinity() ? 0.0f : highest; }

  template <int kCount>
  __device__ __forceinline__ void add(const LoadedParts<P, kCount>& parts) {
    const float before = highest;
#pragma unroll
    for (int part = 0; part < kCount; ++part) highest = fmaxf(highest, parts.lse[part]);
    const float rescale = expf(before - shift());
    sum *= rescale;
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i)
      o[i] = {o[i].x * rescale, o[i].y * rescale, o[i].z * rescale, o[i].w * rescale};
#pragma unroll
    for (int part = 0; part < kCount; ++part) {
      const bool has_o = parts.lse[part] != -infinity();  // else there is memory, but it was not written
      const float weight = expf(parts.lse[part] - shift());
      sum += weight;
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const auto add = [&](float& to, float value) { to = has_o ? fmaf(weight, value, to) : to; };
        add(o[i].x, parts.x[part][i].x), add(o[i].y, parts.x[part][i].y);
        add(o[i].z, parts.x[part][i].z), add(o[i].w, parts.x[part][i].w);
      }
    }
  }
  /// Adds the parts of each kStep'th segment.
  template <int kStep, class RowIn>
  __device__ __forceinline__ void add(const Params& p, int begin, int end, const RowIn& row_in) {
#pragma unroll 1
    for (int first = begin; first < end; first += kAtOnce * kStep) {
      LoadedParts<P, kAtOnce> parts;
      parts.template load<kStep>(p, first, end, row_in);
      add(parts);
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

/// A work tile that segments of a head group have cut.
template <class P>
struct CutTile {
  const Params& p;
  const PartialTile& partial;
  int first, group;  ///< the segment of the first part
  WorkTile<P> tile;

  __device__ __forceinline__ CutTile(const Params& p, const PartialTile& partial, int first, int group)
      : p(p), partial(partial), first(first), group(group), tile(p, coord_of(partial)) {}
  static __device__ __forceinline__ TileCoord coord_of(const PartialTile& partial) {
    TileCoord coord;
    coord.batch_head = partial.batch_head;
    coord.q_tile = partial.q_tile;
    coord.warpgroups = {0, row_warpgroups(P::kBr)};
    coord.split = kWhole;
    coord.kv_tiles = {0, 0};
    return coord;
  }
  __device__ __forceinline__ RowCoord target(int row) const {
    return row_coord(p, tile, row / kWarpgroupRows, row % kWarpgroupRows);
  }
  /// The row of a segment's part. The last part is its segment's first, the others are their segment's last.
  __device__ __forceinline__ long long row_in(int segment, int row) const {
    return row_of_part<P>(part_of_segment(p, segment, group, segment + 1 < partial.segments_end), 0, row);
  }
};

/// Joins a row, by kWarps warps that share its parts.
template <class P, int kWarps>
__device__ __forceinline__ void join_row(const CutTile<P>& cut, int row) {
  constexpr int kChunks = JoinedParts<P>::kChunks, kLaneChunks = JoinedParts<P>::kLaneChunks;
  const Params& p = cut.p;
  const int thread = static_cast<int>(threadIdx.x) % 32,
            warp = kWarps > 1 ? static_cast<int>(threadIdx.x) / 32 : 0;
  const RowCoord target = cut.target(row);
  if (target.q < 0) return;
  JoinedParts<P> joined;
  joined.template add<kWarps>(p, cut.first + warp, cut.partial.segments_end,
                              [&](int segment) { return cut.row_in(segment, row); });
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
  JoinedRow<P>::template store<kWarps>(p, cut.tile.sequence, target, joined, warp);
}

/// Joins a warp's rows of few parts: `row` and each `step`th from there on, up to `end`. Two at a time where
/// registers hold their parts.
template <class P>
__device__ __forceinline__ void join_rows_of_few(const CutTile<P>& cut, int row, int end, int step) {
  constexpr int kAtOnce = JoinedParts<P>::kLaneChunks == 1 ? 2 : 1,
                kParts = min(kFewParts, JoinedParts<P>::kAtOnce);
#pragma unroll 1
  for (; row < end; row += kAtOnce * step) {
    JoinedParts<P> joined[kAtOnce];
#pragma unroll 1
    for (int first = cut.first; first < cut.partial.segments_end; first += kParts) {
      LoadedParts<P, kParts> parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int own = row + i * step;
        parts[i].template load<1>(cut.p, first, own < end ? cut.partial.segments_end : 0,
                                  [&](int segment) { return cut.row_in(segment, own); });
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) joined[i].add(parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own = row + i * step;
      const RowCoord target = own < end ? cut.target(own) : RowCoord{-1, 0};
      if (target.q >= 0) JoinedRow<P>::template store<1>(cut.p, cut.tile.sequence, target, joined[i], 0);
    }
  }
}

/// Rows of Q that a work tile may have.
template <class P>
__device__ __forceinline__ int most_rows(const Params& p) {
  if (!P::kPackGqa) return min(P::kBr, p.seqlen_q);
  return p.seqlen_q > p.packed.queries ? P::kBr : p.seqlen_q * p.packed.heads;
}

/// Grid: segments * the blocks of each.
template <class P>
__device__ void combine_parts(const Params& p) {
  let_next_grid_start<P>();  // the next call's forward pass, which waits by itself, too
  wait_for_prior_grid<P>();
  const int blocks = static_cast<int>(gridDim.x) / p.num_splits;  // of a segment
  const int cta = static_cast<int>(blockIdx.x) / blocks, block = static_cast<int>(blockIdx.x) % blocks;
  const int segment = cta / p.head_groups, group = cta % p.head_groups;
  const int rows = most_rows<P>(p);
  const PartialTile own = p.partial_tiles[cta];
  if (own.segments_end > 0 && own.segments_end <= segment + kFewParts) {
    join_rows_of_few(CutTile<P>(p, own, segment, group),
                     block * kJoiningWarps + static_cast<int>(threadIdx.x) / 32, rows,
                     blocks * kJoiningWarps);
  }
#pragma unroll 1
  for (int tile = 0; tile < 2; ++tile) {  // the one that begins here, and the one that ends here or later
    const int first = tile == 0 ? segment : own.continues;
    if (first < 0) break;
    const PartialTile partial = tile == 0 ? own : p.partial_tiles[first * p.head_groups + group];
    if (partial.segments_end <= first + kFewParts) continue;
    const CutTile<P> cut(p, partial, first, group);
    const int helpers = (partial.segments_end - first) * blocks;
#pragma unroll 1
    for (int row = (segment - first) * blocks + block; row < rows; row += helpers)
      join_row<P, kJoiningWarps>(cut, row);
  }
}

/// After a cascade. A warp for a row of O; grid: batch * heads_q * seqlen_q / kJoiningWarps.
template <class P>
__device__ void combine_cascade(const Params& p) {
  let_next_grid_start<P>();
  wait_for_prior_grid<P>();
  const long long at = static_cast<long long>(blockIdx.x) * kJoiningWarps + threadIdx.x / 32;
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
