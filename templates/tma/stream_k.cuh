// Stream-K (Lean Attention): the KV tiles of all work tiles in a row, divided into equal shares for the CTAs.
// The lengths of a cache's sequences are on the device, and so is the division: CTAs end together even if one
// sequence is a hundred times as long as the others. A share's first and last work tile may be parts of one,
// whose O and LSE the combine_parts entry joins.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/tma/tile_scheduler.cuh"

namespace flashjit::tma {

/// With fewer KV tiles for each CTA, fewer CTAs work.
constexpr int kFewestTilesOfShare = 2;

/// Work tiles come by sequence, Q tile and scheduled head. Those of a Q tile's heads, a row, meet the same KV
/// tiles, where the mask does not differ by head; else they are taken to meet all. Where Q tiles count as
/// heads, as those of a sequence all meet the same KV tiles, a sequence is one row. Heads that are side by
/// side in memory are in lanes: CTA c has a share of the work of each p.head_lanes-th head, from c %
/// p.head_lanes on, so that neighbours read neighbouring memory at a time. As all lanes have the same work,
/// what follows is of one.
template <class P>
__device__ __forceinline__ int rows_of_sequence(const Params& p) {
  return P::kQTilesAsHeads ? 1 : static_cast<int>(q_tiles_per_head<P>(p));
}
/// Rows of the sequences; with a cascade the prefix is one row more. Its heads are those of all its Q tiles,
/// of one head after the other, so that the Q tiles that need a KV tile are in lanes: at the time when L2 has
/// it.
template <class P>
__device__ __forceinline__ int own_rows(const Params& p) {
  return p.batch * rows_of_sequence<P>(p);
}
template <class P>
__device__ __forceinline__ int work_rows(const Params& p) {
  return own_rows<P>(p) + P::kCascade;
}
template <class P>
__device__ __forceinline__ bool is_prefix(const Params& p, int row) {
  return P::kCascade && row == own_rows<P>(p);
}
template <class P>
__device__ __forceinline__ int prefix_q_tiles(const Params& p) {
  const int queries = queries_per_tile<P>(p);
  return (sequence_at<P>(p, p.batch).seqlen_q(p) + queries - 1) / queries;
}
template <class P>
__device__ __forceinline__ int heads_of_row(const Params& p, int row) {
  if (is_prefix<P>(p, row)) return static_cast<int>(scheduled_heads<P>(p)) * prefix_q_tiles<P>(p);
  return static_cast<int>(P::kQTilesAsHeads ? scheduled_heads<P>(p) * q_tiles_per_head<P>(p)
                                            : scheduled_heads<P>(p));
}
/// The place of a row's work tile, of `heads` heads.
template <class P>
__device__ __forceinline__ void place_in_row(const Params& p, int row, int heads, int head,
                                             TileCoord& found) {
  const int scheduled = static_cast<int>(scheduled_heads<P>(p));
  const bool q_tiles_are_heads = P::kQTilesAsHeads || is_prefix<P>(p, row);
  const int at = q_tiles_are_heads ? head : row;
  const int q_tiles = q_tiles_are_heads ? heads / scheduled : static_cast<int>(q_tiles_per_head<P>(p));
  const int rest = at / q_tiles;
  found.q_tile = at - rest * q_tiles;
  if (q_tiles_are_heads)
    found.batch_head = (P::kQTilesAsHeads ? row : p.batch) * scheduled + rest;
  else
    found.batch_head = rest * scheduled + head;
}
template <class P>
__device__ __forceinline__ Range kv_tiles_of_row(const Params& p, int row) {
  int first = 0;
  if constexpr (P::kCascade) {
    first = prefix_tiles<P>(p);
    if (is_prefix<P>(p, row)) return {0, first};
  }
  const int q_tiles = rows_of_sequence<P>(p);
  const Sequence<P> sequence(p, row / q_tiles);
  const Range queries = tile_range(row % q_tiles, queries_per_tile<P>(p), sequence.seqlen_q(p));
  const int keys = sequence.seqused_kv(p);
  if (queries.begin >= queries.end || keys == 0) return {0, 0};
  if constexpr (P::kIndices) return {0, tiles_of_list<P>(p, sequence, row % q_tiles)};
  Range bounds{0, keys};
  if constexpr (!P::kMaskUsesHead) bounds = P::kv_bounds(p, sequence.head(p, 0), queries);
  const int end = min(bounds.end, keys);
  if (bounds.begin >= end) return {0, 0};
  int met = bounds.begin / P::kBc, count = (end + P::kBc - 1) / P::kBc - met;
  EmptyEnds<P, (kClassesTiles<P> && !P::kMaskUsesHead)>::take_off(p, sequence.head(p, 0), queries, met,
                                                                  count);
  first = max(first, met);
  return {first, max(first, met + count)};
}
template <class P>
__device__ __forceinline__ long long work_of_row(const Params& p, int row) {
  const Range tiles = kv_tiles_of_row<P>(p, row);
  return static_cast<long long>(tiles.end - tiles.begin) * (heads_of_row<P>(p, row) / p.head_lanes);
}

/// How many shares a lane's `tiles` KV tiles make. Where all its `work_tiles` are alike (else that is 0),
/// shares that have whole ones, or of which some make a whole one, leave fewest parts: a part is O in fp32,
/// written and read. One CTA of 16 may be idle for that.
__device__ __forceinline__ int count_of_shares(const Params& p, long long tiles, int work_tiles) {
  const int most = static_cast<int>(
      min(static_cast<long long>(p.num_splits / p.head_lanes), max(tiles / kFewestTilesOfShare, 1ll)));
  if (work_tiles == 0) return most;
  const int of_share = (work_tiles + most - 1) / most;
  const int even = work_tiles <= most           ? most / work_tiles * work_tiles
                   : work_tiles % of_share == 0 ? work_tiles / of_share
                                                : 0;
  return even * 16 >= most * 15 ? even : most;
}

/// A lane's shares of its KV tiles, which differ by a tile at most.
struct Shares {
  long long each = 0;  ///< tiles of a share, rounded down
  int rest = 0;        ///< and those that are left
  int count = 1;

  Shares() = default;
  __device__ Shares(long long tiles, int count)
      : each(tiles / count), rest(static_cast<int>(tiles - each * count)), count(count) {}
  __device__ long long begin(int share) const {
    const int at = min(share, count);
    return each * at + rest * at / count;
  }
  /// The first share that begins at a tile or behind it.
  __device__ int first_from(long long tile) const {
    const float size = static_cast<float>(each) + static_cast<float>(rest) / static_cast<float>(count);
    int share = static_cast<int>(static_cast<float>(tile) / size);  // or one next to it
    while (share > 0 && begin(share - 1) >= tile) --share;
    while (begin(share) < tile) ++share;
    return share;
  }
  __device__ int share_of(long long tile) const { return first_from(tile + 1) - 1; }
};

/// Where a share begins: the row, its KV tiles, and those of all rows before it.
struct ShareStart {
  Shares shares;
  long long before = 0;
  int row = 0;
  Range tiles{0, 0};
};

/// What find_share() needs of shared memory.
struct ShareScratch {
  long long of_warp[32];
  bool alike[32];  ///< the work of a warp's rows
  ShareStart start;
};

/// By all threads of the CTA, each of which counts the work of some rows. `scratch` is free again when it
/// returns.
template <class P>
__device__ ShareStart find_share(const Params& p, int share, ShareScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int rows = work_rows<P>(p), threads = static_cast<int>(blockDim.x);
  const int each = (rows + threads - 1) / threads, first = static_cast<int>(threadIdx.x) * each;
  const long long of_first = rows > 0 ? work_of_row<P>(p, 0) : 0;
  long long own = 0;
  bool alike = true;
  for (int row = first; row < min(first + each, rows); ++row) {
    const long long work = work_of_row<P>(p, row);
    own += work;
    alike = alike && work == of_first;
  }
  long long end = own;  // with the work of the threads before
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const long long other = __shfl_up_sync(kWholeWarp, end, lanes);
    if (lane >= lanes) end += other;
  }
  alike = __all_sync(kWholeWarp, alike);
  if (lane == 31) scratch.of_warp[warp] = end, scratch.alike[warp] = alike;
  if (threadIdx.x == 0) scratch.start = {};
  __syncthreads();
  long long tiles = 0;
  for (int other = 0; other < threads / 32; ++other) {
    if (other == warp) end += tiles;
    tiles += scratch.of_warp[other];
    alike = alike && scratch.alike[other];
  }
  const Shares shares(tiles,
                      count_of_shares(p, tiles, alike ? rows * (heads_of_row<P>(p, 0) / p.head_lanes) : 0));
  const long long begin = shares.begin(share);
  long long before = end - own;
  if (before <= begin && begin < end) {
    int row = first;
    for (long long work; (work = work_of_row<P>(p, row)) <= begin - before; ++row) before += work;
    scratch.start = {{}, before, row, kv_tiles_of_row<P>(p, row)};
  }
  __syncthreads();
  ShareStart start = scratch.start;
  start.shares = shares;
  __syncthreads();
  return start;
}

/// The number of a CTA's part that begins its share, or of the one that ends it.
__device__ __forceinline__ int part_of_share(const Params& p, int share, int lane, bool last) {
  return 2 * (share * p.head_lanes + lane) + last;
}

/// Cascade: the place of a row's work tile in Params::shares_of_tile.
template <class P>
__device__ __forceinline__ int tile_index(const Params& p, int row, int head) {
  return row * static_cast<int>(scheduled_heads<P>(p)) + head;
}
/// Cascade: the number of a share's part of a work tile. All work tiles are parts, for a row of O has two.
/// Shares and work tiles of a lane ascend together, so no two parts have the same.
__device__ __forceinline__ int part_of_tile(const Params& p, int index, int share) {
  return index + share * p.head_lanes;
}

/// Cascade: the shares that have the parts of a row of O, of a sequence's own keys or of the prefix.
struct PartsOfRow {
  int index, row;  ///< the work tile, and the row there
  SharesOfTile shares;

  __device__ int count() const { return shares.end - shares.begin; }
};
template <class P>
__device__ __forceinline__ PartsOfRow parts_of_row(const Params& p, int sequence, int query, int h) {
  const int tile_queries = queries_per_tile<P>(p), q_tile = query / tile_queries;
  int row_of_tile = query - q_tile * tile_queries, head = h;
  if constexpr (P::kPackGqa) {
    const int h_kv = h / p.packed.shared, of_shared = h - h_kv * p.packed.shared;
    const int set = of_shared / p.packed.heads, group = row_of_tile / p.packed.queries;
    head = h_kv * p.packed.sets + set;
    row_of_tile = group * kWarpgroupRows + (row_of_tile - group * p.packed.queries) * p.packed.heads +
                  of_shared - set * p.packed.heads;
  }
  int row = own_rows<P>(p);
  if (sequence == p.batch)
    head = head * prefix_q_tiles<P>(p) + q_tile;
  else
    row = sequence * rows_of_sequence<P>(p) + q_tile;
  const int index = tile_index<P>(p, row, head);
  return {index, row_of_tile, p.shares_of_tile[index]};
}

/// Where a row of a tile is: its query, -1 for none, and its head.
struct RowCoord {
  int q, h;
};
template <class P>
__device__ __forceinline__ RowCoord row_coord(const Params& p, const WorkTile<P>& work, int wg, int row) {
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
  if (!work.is_whole()) {
    for (int row = thread; row < P::kBr; row += threads)
      p.lse_splits[row_of_part<P>(work.split, 0, row)] = -infinity();
    return;
  }
  for (int row = thread; row < P::kBr; row += threads) {
    const RowCoord target = row_coord(p, work, row / kWarpgroupRows, row % kWarpgroupRows);
    if (target.q < 0) continue;
    OutElement<P>* o = work.sequence.template q_pointer<OutElement<P>>(p.o, target.h, target.q);
    for (int chunk = 0; chunk < kChunks; ++chunk)
      *reinterpret_cast<uint4*>(o + chunk * kOutVector<P>) = uint4{};
    if (p.lse.data != nullptr)
      p.lse.data[work.sequence.lse_row(p, target.h, target.q)] = with_sink<P>(p, target.h, -infinity()).lse;
  }
}
// How the combine entry learns which parts of a work tile there are; TileParts<P> names one of these types.
// A part has `before` and `behind` it KV tiles of its work tile, the row's `head`.

/// Only a share's first and last work tile may be cut: each CTA tells combine_parts of its own.
template <class P>
struct CutTiles {
  static __device__ __forceinline__ void begin(const Params& p) { p.cut_tiles[blockIdx.x] = {0, 0, 0, -1}; }
  /// The part's number, or kWhole.
  static __device__ __forceinline__ int number(const Params& p, int, int, int share, int lane, int before,
                                               int behind) {
    return before == 0 && behind == 0 ? kWhole : part_of_share(p, share, lane, behind > 0);
  }
  /// Tells of the part handed out last.
  template <class Scheduler>
  static __device__ __forceinline__ void finish(const Params& p, const Scheduler& scheduler,
                                                const Shares& shares, const TileCoord& coord) {
    CutTile& cut = p.cut_tiles[blockIdx.x];
    if (const int first = scheduler.continues(shares); first >= 0) cut.continues = first;
    if (const int end = scheduler.shares_end(shares); end > 0) {
      cut.batch_head = static_cast<int>(coord.batch_head), cut.q_tile = static_cast<int>(coord.q_tile);
      cut.shares_end = end;
    }
  }
  /// A row whose work tiles have no keys, and so are in no share.
  static __device__ __forceinline__ void write_empty_row(const Params& p, int row, int thread, int threads) {
    for (int head = 0; head < heads_of_row<P>(p, row); ++head) {
      TileCoord coord{0, 0, {0, P::kBr / kWarpgroupRows}, kWhole, {}};
      place_in_row<P>(p, row, heads_of_row<P>(p, row), head, coord);
      const WorkTile<P> work(p, coord);
      write_rows_without_keys(p, work, thread, threads);
    }
  }
};
/// Cascade: all work tiles are parts. The first and the last share that have one of a work tile say so.
template <class P>
struct CascadeTiles {
  static __device__ __forceinline__ void begin(const Params&) {}
  static __device__ __forceinline__ int number(const Params& p, int row, int head, int share, int, int before,
                                               int behind) {
    const int index = tile_index<P>(p, row, head);
    if (before == 0) p.shares_of_tile[index].begin = share;
    if (behind == 0) p.shares_of_tile[index].end = share + 1;
    return part_of_tile(p, index, share);
  }
  template <class Scheduler>
  static __device__ __forceinline__ void finish(const Params&, const Scheduler&, const Shares&,
                                                const TileCoord&) {}
  static __device__ __forceinline__ void write_empty_row(const Params& p, int row, int thread, int threads) {
    for (int head = thread; head < heads_of_row<P>(p, row); head += threads)
      p.shares_of_tile[tile_index<P>(p, row, head)] = {0, 0};
  }
};
template <class P>
using TileParts = Conditional<P::kCascade, CascadeTiles<P>, CutTiles<P>>;

/// Hands out the parts of work tiles that a CTA's share consists of. What it keeps is small, as producer
/// warps have few registers.
template <class P>
struct StreamKScheduler {
  int share;
  int row, heads;  ///< and the lane's heads of it
  Range tiles;     ///< of the row's work tiles
  int at, left;    ///< the next KV tile of the share, counted from the row's first, and how many there are
  int before, behind = 0;  ///< the KV tiles of a work tile around the part that was handed out last

  __device__ StreamKScheduler(const Params& p, const ShareStart& start)
      : share(static_cast<int>(blockIdx.x) / p.head_lanes),
        row(start.row),
        heads(heads_of_row<P>(p, row) / p.head_lanes),
        tiles(start.tiles),
        before(0) {
    const long long begin = start.shares.begin(share);
    at = static_cast<int>(begin - start.before);
    left = static_cast<int>(start.shares.begin(share + 1) - begin);
  }
  __device__ int count() const { return tiles.end - tiles.begin; }

  // The interface of TileScheduler. A tile is a part of a work tile, or a whole one.
  static __device__ StreamKScheduler first(const Params& p, const ShareStart& start, int) {
    StreamKScheduler scheduler(p, start);
    TileParts<P>::begin(p);
    return scheduler;
  }
  __device__ bool next(const Params& p, unsigned, TileCoord& found) {
    if (left <= 0) return false;
    while (count() * heads <= at) {
      at -= count() * heads;
      tiles = kv_tiles_of_row<P>(p, ++row);
      if (is_prefix<P>(p, row)) heads *= prefix_q_tiles<P>(p);
    }
    const int of_lane = at / count(), tile = at - of_lane * count(), size = min(left, count() - tile);
    const int lane = static_cast<int>(blockIdx.x) - share * p.head_lanes;
    const int head = of_lane * p.head_lanes + lane;
    before = tile, behind = count() - tile - size;
    found.split = TileParts<P>::number(p, row, head, share, lane, before, behind);
    place_in_row<P>(p, row, heads * p.head_lanes, head, found);
    found.warpgroups = {0, P::kBr / kWarpgroupRows};
    found.kv_tiles = {tiles.begin + tile, tiles.begin + tile + size};
    at += size;
    left -= size;
    return true;
  }
  __device__ void finish_tile(const Params& p, const ShareStart& start, const TileCoord& coord) const {
    TileParts<P>::finish(p, *this, start.shares, coord);
  }

  /// If the part handed out last begins a work tile and does not end it: the end of the shares that have its
  /// other parts; else 0.
  __device__ int shares_end(const Shares& shares) const {
    return before == 0 && behind > 0 ? shares.first_from(shares.begin(share + 1) + behind) : 0;
  }
  /// If it does not begin one: the share in which that begins; else -1.
  __device__ int continues(const Shares& shares) const {
    return before == 0 ? -1 : shares.share_of(shares.begin(share) - before);
  }
};

/// The scheduler of the kernel's CTAs.
template <class P>
using ForwardScheduler = Conditional<P::kStreamK, StreamKScheduler<P>, TileScheduler<P>>;

template <class P>
__device__ __forceinline__ void write_empty_parts(const Params& p, const ShareStart& start, int thread,
                                                  int threads) {
  if constexpr (P::kMaskUsesHead) {
    StreamKScheduler<P> scheduler(p, start);
    for (TileCoord coord; scheduler.next(p, 0, coord);)
      if (const WorkTile<P> work(p, coord); work.count() == 0)
        write_rows_without_keys(p, work, thread, threads);
  }
  // Work tiles without keys are in no share.
  for (int row = static_cast<int>(blockIdx.x); row < work_rows<P>(p); row += static_cast<int>(gridDim.x)) {
    if (work_of_row<P>(p, row) > 0) continue;
    TileParts<P>::write_empty_row(p, row, thread, threads);
  }
}

}  // namespace flashjit::tma
