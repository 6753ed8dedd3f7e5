// Stream-K (Lean Attention): the KV tiles of all work tiles in a row, of which each CTA takes an equal share.
// The lengths of a cache's sequences are on the device, and so is the division: CTAs end together, be one
// sequence a hundred times as long as the others. A share's first and last work tile may be parts of one,
// whose O and LSE the combine_parts entry joins.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/sm90/forward_schedule.cuh"

namespace flashjit::sm90 {

/// With fewer KV tiles for each CTA, fewer CTAs work.
constexpr int kFewestTilesOfShare = 2;

/// Work tiles of a sequence.
template <class P>
__device__ __forceinline__ int q_tiles_of(const Params& p, const Sequence<P>& sequence) {
  return (sequence.seqlen_q(p) + queries_per_tile<P>(p) - 1) / queries_per_tile<P>(p);
}

/// The KV tiles that any of a sequence's work tiles meets.
template <class P>
__device__ __forceinline__ Range kv_tiles_of(const Params& p, const Sequence<P>& sequence) {
  const int queries = sequence.seqlen_q(p), keys = sequence.seqused_kv(p);
  if (queries == 0 || keys == 0) return {0, 0};
  Range bounds{0, keys};
  if constexpr (!P::kMaskUsesHead) bounds = P::kv_bounds(p, sequence.head(p, 0), {0, queries});
  const int end = min(bounds.end, keys);
  if (bounds.begin >= end) return {0, 0};
  return {bounds.begin / P::kBc, (end + P::kBc - 1) / P::kBc};
}

/// The CTAs' shares of `tiles` KV tiles.
struct Shares {
  long long tiles;
  int count;

  __device__ explicit Shares(const Params& p) : tiles(p.work[p.batch].begin) {
    count =
        static_cast<int>(min(static_cast<long long>(p.num_splits), max(tiles / kFewestTilesOfShare, 1ll)));
  }
  __device__ long long begin(int share) const { return tiles * min(share, count) / count; }
};

/// Hands out the parts of work tiles that a share consists of. Also combine_parts asks what they are.
template <class P>
struct StreamKScheduler {
  Shares shares;
  int share, b = 0;
  long long at, end;

  __device__ StreamKScheduler(const Params& p, int share)
      : shares(p), share(share), at(shares.begin(share)), end(shares.begin(share + 1)) {
    seek(p, at);
  }
  /// The sequence of a KV tile: the last that begins there or before.
  __device__ void seek(const Params& p, long long tile) {
    int low = 0, high = p.batch;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.work[middle].begin <= tile)
        low = middle;
      else
        high = middle - 1;
    }
    b = low;
  }
  /// The next part; false behind the share.
  __device__ bool next(const Params& p, TileCoord& found) {
    if (at >= end) return false;
    while (p.work[b + 1].begin <= at) ++b;
    const SequenceWork work = p.work[b];
    const long long tile = (at - work.begin) % work.count;
    const auto index = static_cast<unsigned>((at - work.begin) / work.count);
    const unsigned q_tiles = q_tiles_of<P>(p, Sequence<P>(p, b));
    const long long tile_end = min(tile + (end - at), static_cast<long long>(work.count));
    found.batch_head = b * scheduled_heads<P>(p) + index / q_tiles;
    found.q_tile = index % q_tiles;
    found.warpgroups = {0, P::kBr / kWarpgroupRows};
    found.kv_tiles = {work.first + static_cast<int>(tile), work.first + static_cast<int>(tile_end)};
    const bool begins = tile == 0, ends = tile_end == work.count;
    found.split = begins && ends ? kWhole : 2 * share + !ends;
    at += tile_end - tile;
    return true;
  }
  __device__ bool next(const Params& p, int /*slot*/, unsigned /*wave*/, TileCoord& found) {
    return next(p, found);
  }
};

/// The scheduler of the kernel's CTAs.
template <class P>
__device__ __forceinline__ auto make_scheduler(const Params& p) {
  if constexpr (P::kStreamK)
    return StreamKScheduler<P>(p, static_cast<int>(blockIdx.x));
  else
    return TileScheduler<P>(p);
}

/// Where a row of a tile is: its query, -1 for none, and its head.
struct RowPlace {
  int q, h;
};
template <class P>
__device__ __forceinline__ RowPlace row_place(const Params& p, const WorkTile<P>& work, int wg, int row) {
  const int query = query_of_row<P>(p, row),
            q = work.q_begin + row_group<P>(wg) * queries_per_warpgroup<P>(p) + query;
  int h = work.h;
  bool exists = q < work.sequence.seqlen_q(p);
  if constexpr (P::kPackGqa) {
    const int head = row - query * p.packed.heads;
    exists = exists && query < p.packed.queries && head < work.heads;
    h += head;
  }
  return {exists ? q : -1, h};
}

/// LSE and O of a row of a part, which are in no order that a tensor has.
template <class P>
__device__ __forceinline__ long long row_of_part(int part, int wg, int row) {
  return static_cast<long long>(part) * P::kBr + row_group<P>(wg) * kWarpgroupRows + row;
}
template <class P>
__device__ __forceinline__ float* o_of_part(const Params& p, long long row) {
  return p.o_splits + row * P::kHeadDimV;
}

/// Writes the rows of work tiles, or of parts, that meet no keys, which the other warps skip. By `threads`
/// threads of the CTA.
template <class P>
__device__ __forceinline__ void write_rows_without_keys(const Params& p, const WorkTile<P>& work, int thread,
                                                        int threads) {
  constexpr int kChunks = P::kHeadDimV / kOutVector<P>;
  if (work.split != kWhole) {
    for (int row = thread; row < P::kBr; row += threads)
      p.lse_splits[row_of_part<P>(work.split, 0, row)] = -infinity();
    return;
  }
  for (int row = thread; row < P::kBr; row += threads) {
    const RowPlace place = row_place(p, work, row / kWarpgroupRows, row % kWarpgroupRows);
    if (place.q < 0) continue;
    OutElement<P>* o = work.sequence.template q_pointer<OutElement<P>>(p.o, place.h, place.q);
    for (int chunk = 0; chunk < kChunks; ++chunk)
      *reinterpret_cast<uint4*>(o + chunk * kOutVector<P>) = uint4{};
    if (p.lse != nullptr)
      p.lse[work.sequence.lse_row(p, place.h) + place.q] = with_sink<P>(p, place.h, -infinity()).lse;
  }
}
template <class P>
__device__ __forceinline__ void write_empty_parts(const Params& p, int thread, int threads) {
  StreamKScheduler<P> scheduler(p, static_cast<int>(blockIdx.x));
  for (TileCoord coord; scheduler.next(p, coord);)
    if (const WorkTile<P> work(p, coord); work.count() == 0)
      write_rows_without_keys(p, work, thread, threads);
  // Sequences without keys are in no share.
  const unsigned q_tiles = q_tiles_per_head<P>(p), heads = scheduled_heads<P>(p);
  for (unsigned index = blockIdx.x; index < p.batch * heads * q_tiles; index += gridDim.x) {
    if (p.work[index / q_tiles / heads].count > 0) continue;
    const WorkTile<P> work(p, {index / q_tiles, index % q_tiles, {0, P::kBr / kWarpgroupRows}, kWhole, {}});
    write_rows_without_keys(p, work, thread, threads);
  }
}

}  // namespace flashjit::sm90
