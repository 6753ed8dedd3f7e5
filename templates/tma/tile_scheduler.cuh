// The tile scheduler of the forward pass: which Q tile a CTA computes next, and which KV tiles that one
// visits.
#pragma once

#include "flashjit/async/cluster.cuh"
#include "flashjit/tma/forward_policy.cuh"
#include "flashjit/tma/tile_order.cuh"

namespace flashjit::tma {

/// The sum of the values of this lane and the lanes before it.
template <class Number>
__device__ __forceinline__ Number sum_up_to_lane(Number value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Number other = __shfl_up_sync(kWholeWarp, value, lanes);
    if (lane >= lanes) value += other;
  }
  return value;
}

/// Q tile slots of the whole grid, and this slot's index among them: first slots first, so that few Q tiles
/// have a CTA each.
template <class P>
__device__ __forceinline__ unsigned grid_slots() {
  return gridDim.x * kQTilesPerCta<P>;
}
template <class P>
__device__ __forceinline__ unsigned slot_index(int slot) {
  return blockIdx.x + slot * gridDim.x;
}

/// A warpgroup has one row for each query of one head; with PackGQA its rows are of several query heads that
/// share K and V, which are then read once for all of them.
template <class P>
__device__ __forceinline__ int queries_per_warpgroup(const Params& p) {
  return P::kPackGqa ? p.packed.queries : warpgroup_rows(P::kBr);
}
template <class P>
__device__ __forceinline__ int queries_per_tile(const Params& p) {
  return row_warpgroups(P::kBr) * queries_per_warpgroup<P>(p);
}
/// The query of a row, counted from the warpgroup's first.
template <class P>
__device__ __forceinline__ int query_of_row(const Params& p, int row) {
  return P::kPackGqa ? static_cast<int>(row * p.packed.inverse >> 16) : row;
}
/// Q tiles of a head, or of a set of packed heads; and how many of these a batch entry has.
template <class P>
__device__ __forceinline__ unsigned q_tiles_per_head(const Params& p) {
  return P::kPackGqa ? (p.seqlen_q + queries_per_tile<P>(p) - 1) / queries_per_tile<P>(p) : q_tiles<P>(p);
}
template <class P>
__device__ __forceinline__ unsigned scheduled_heads(const Params& p) {
  return P::kPackGqa ? p.heads_kv * p.packed.sets : p.heads_q;
}

/// CTAs have shares of all work: stream_k.cuh, fixed_parts.cuh.
template <class P>
constexpr bool kSharesWork = P::kStreamK || P::kFixedParts;

/// Stream-K, fixed parts and PackGQA: in the place of a split, the whole work tile.
constexpr int kWhole = -1;
/// Rows of a work tile do not follow each other in O: each has its own place, and so do rows of parts.
template <class P>
constexpr bool kScattersRows = P::kStreamK || (P::kPackGqa && !P::kSplit);

/// Cascade: the whole KV tiles of the prefix that all sequences share.
template <class P>
__device__ __forceinline__ int prefix_tiles(const Params& p) {
  return clamped(p.prefix_length[0], 0, p.seqlen_kv) / P::kBc;
}
/// A sequence; with a cascade the one behind the last is the prefix. Its queries are the queries of all
/// sequences, and as many keys follow its own, so that a causal mask lets each query see all of these. Its
/// pages are the first sequence's.
template <class P>
__device__ __forceinline__ Sequence<P> sequence_at(const Params& p, int b) {
  if constexpr (P::kCascade) {
    const bool is_prefix = b == p.batch;
    const PackedRows q = packed_rows(p.cu_seqlens_q[is_prefix ? 0 : b], p.cu_seqlens_q[is_prefix ? b : b + 1],
                                     p.rows_q, is_prefix ? p.batch * p.seqlen_q : p.seqlen_q);
    Sequence<P> sequence;
    sequence.b = is_prefix ? 0 : b;
    sequence.q_first_ = q.first, sequence.q_length_ = q.count;
    sequence.kv_length_ =
        is_prefix ? prefix_tiles<P>(p) * P::kBc + q.count : clamped(p.kv_lengths[b], 0, p.seqlen_kv);
    return sequence;
  }
  return Sequence<P>(p, b);
}

/// What the scheduler hands out: a Q tile, some of its warpgroups, and one split of its keys.
struct TileCoord {
  unsigned batch_head;  ///< among batch entries and their scheduled heads
  unsigned q_tile;
  Range warpgroups;
  int split;       ///< or kWhole; stream-K: or a part's number
  Range kv_tiles;  ///< stream-K: of the part
};

/// Whether a sequence has too few keys for a split.
template <class P>
__device__ __forceinline__ bool is_behind_keys(const Params& p, unsigned batch_head, int split) {
  if constexpr (!P::kSplit || !P::kInvariant || P::kFixedParts) return false;
  const Sequence<P> sequence = sequence_at<P>(p, static_cast<int>(batch_head / scheduled_heads<P>(p)));
  return split >= splits_with_keys<P>(p, sequence.seqused_kv(p));
}

/// All Q tiles of a grid for the longest sequence, and their splits, in any order.
template <class P>
struct GridTiles {
  unsigned rows, splits, all;

  __device__ GridTiles(const Params& p)
      : rows(q_tiles_per_head<P>(p)),
        splits(num_splits<P>(p)),
        all(rows * p.batch * scheduled_heads<P>(p) * splits) {}
  __device__ unsigned count() const { return all; }
  __device__ TileCoord coord(unsigned index) const {
    const int split = kScattersRows<P> ? kWhole : static_cast<int>(index % splits);
    return {index / splits / rows, index / splits % rows, {0, row_warpgroups(P::kBr)}, split, {}};
  }
};

/// Hands out the Q tiles, one a wave to each slot of the grid; where Q tiles differ in cost as only the
/// device knows, by lists of KV tiles or lengths of a cache, dynamically by a counter. Without a mask the
/// tiles of a head follow each other, so that its K and V are read once. A mask makes some rows longer: LPT
/// order then balances the CTAs. The CTAs of a cluster share nothing, but take neighbouring tiles of a head,
/// where its tiles make whole sets of them: they are near to the same half of L2, and what the other half has
/// of K and V crosses once for all of them.
template <class P>
struct TileScheduler {
  static constexpr unsigned kWarpgroups = row_warpgroups(P::kBr);
  static constexpr bool kWindows = P::kMaskBounds > 1;
  TileOrder order;
  unsigned whole, tail_parts = 1;  ///< the first Q tile of the split tail wave, and the splits of each
  unsigned splits;                 ///< splits of the keys, each a work tile of its own
  int slot;

  __device__ TileScheduler(const Params& p, int slot_of_cta, unsigned cluster = cluster_size())
      : order(q_tiles_per_head<P>(p), p.batch * scheduled_heads<P>(p), cluster),
        whole(order.size()),
        splits(num_splits<P>(p)),
        slot(slot_of_cta) {
    const unsigned slots = grid_slots<P>();
    if (slots >= order.size() * splits) return;  // a single wave
    static_assert(!(kSplitTailWave<P> && P::kCountsTiles), "a warpgroup ends in the tail wave");
    if (kSplitTailWave<P>) {
      const unsigned over = whole % slots;
      whole -= over;
      tail_parts = tail_splits(kWarpgroups, over, slots);
    }
    if (kQTileLptOrder<P>) order.use_lpt(slots, kWindows);
  }

  // The interface of tile schedulers, in both passes: first() makes one, before its first tile; next() gives
  // the tile after `taken` others, or false if there are no more; finish_tile() is called when the loads of
  // that tile have been issued, or it has none.
  template <class Start>
  static __device__ TileScheduler first(const Params& p, const Start&, int slot) {
    return TileScheduler(p, slot);
  }
  __device__ bool next(const Params& p, unsigned taken, TileCoord& found) const {
    return find(next_index(p, taken), found);
  }
  template <class Start>
  __device__ void finish_tile(const Params&, const Start&, const TileCoord&) const {}

 private:
  __device__ unsigned next_index(const Params& p, unsigned wave) const {
    if constexpr (P::kCountsTiles) return static_cast<unsigned>(atomicAdd(q_tile_counter(p), 1));
    return order.index(slot_index<P>(slot), wave, grid_slots<P>(), kWindows);
  }
  /// The tile of an index; false after the last.
  __device__ bool find(unsigned index, TileCoord& found) const {
    found.warpgroups = {0, static_cast<int>(kWarpgroups)};
    // Where splits are of a fixed length (kInvariant), those behind a sequence's keys come late, and are
    // skipped.
    if constexpr (P::kSplit && P::kInvariant) {
      found.split = static_cast<int>(index / order.size());
      if (found.split >= static_cast<int>(splits)) return false;
      index %= order.size();
    } else {
      found.split = kScattersRows<P> ? kWhole : static_cast<int>(index % splits);
      index /= splits;
    }
    if (kSplitTailWave<P> && index >= whole) {
      const unsigned part = (index - whole) % tail_parts, size = (kWarpgroups + tail_parts - 1) / tail_parts;
      index = whole + (index - whole) / tail_parts;
      found.warpgroups = {static_cast<int>(part * size),
                          static_cast<int>(min((part + 1) * size, kWarpgroups))};
    }
    if (index >= order.size()) return false;
    if (kHeadMajorOrder<P>) {
      found.batch_head = index / order.tiles_per_head;
      found.q_tile = order.tiles_per_head - 1 - index % order.tiles_per_head;
    } else {
      const OrderedTile tile = order.at(index);
      found.batch_head = tile.head;
      found.q_tile = tile.tile;
    }
    return true;
  }
};

/// The query heads of a work tile, from its first: one, or with PackGQA a set. find() makes of a scheduled
/// head the first.
template <bool kPackGqa>
struct WorkTileHeads {
  __device__ void find(const Params&, int&) {}
  __device__ int end(int h) const { return h + 1; }
};
template <>
struct WorkTileHeads<true> {
  int h_kv, heads;

  __device__ void find(const Params& p, int& h) {
    const int first = h % p.packed.sets * p.packed.heads;
    h_kv = h / p.packed.sets;
    heads = min(p.packed.heads, p.packed.shared - first);
    h = h_kv * p.packed.shared + first;
  }
  __device__ int end(int h) const { return h + heads; }
};

// Which of the KV tiles that a Q tile visits are the work tile's; KeysOfWorkTile<P> names one of these types.
template <class P>
struct AllKeys {
  static __device__ void keep(const Params&, const TileCoord&, KvTiles<P>&) {}
};
template <class P>
struct KeysOfSplit {
  static __device__ void keep(const Params& p, const TileCoord& coord, KvTiles<P>& tiles) {
    tiles.keep_split(p, coord.split);
  }
};
template <class P>
struct KeysOfPart {
  static __device__ void keep(const Params&, const TileCoord& coord, KvTiles<P>& tiles) {
    tiles.keep(coord.kv_tiles);
  }
};
template <class P>
using KeysOfWorkTile =
    Conditional<kSharesWork<P>, KeysOfPart<P>, Conditional<P::kSplit, KeysOfSplit<P>, AllKeys<P>>>;

/// A Q tile and the KV tiles that it visits. The producer makes it in shared memory, the consumers read it
/// there.
template <class P>
struct WorkTile : WorkTileHeads<P::kPackGqa> {
  Sequence<P> sequence;
  int h = -1;  ///< the first query head; -1: there is no more work
  int q_begin = 0;
  int warpgroups = 0;    ///< that have rows
  unsigned partial = 0;  ///< bit n: the first step of warpgroup n is over a partial KV tile
  int split = 0;         ///< the split of the keys, see TileCoord
  KvTiles<P> kv_tiles;   ///< visited from the last to the first

  __device__ WorkTile() {}
  __device__ WorkTile(const Params& p, const TileCoord& coord)
      : sequence(sequence_at<P>(p, static_cast<int>(coord.batch_head / scheduled_heads<P>(p)))),
        h(static_cast<int>(coord.batch_head % scheduled_heads<P>(p))),
        q_begin(static_cast<int>(coord.q_tile) * queries_per_tile<P>(p) +
                coord.warpgroups.begin * kWarpgroupRows),
        warpgroups(coord.warpgroups.end - coord.warpgroups.begin),
        split(coord.split) {
    this->find(p, h);
    const int q_tile = static_cast<int>(coord.q_tile);
    const Range q_range = tile_range(q_tile, queries_per_tile<P>(p), sequence.seqlen_q(p));
    if (q_range.begin >= q_range.end) return;
    const auto head = sequence.head(p, h);
    kv_tiles = KvTiles<P>(p, head, q_tile, q_range, sequence.seqused_kv(p));
    KeysOfWorkTile<P>::keep(p, coord, kv_tiles);
    if constexpr (kPartialFirstStep<P>) {
      const int end = kv_begin(count() - 1) + kPartialKvTile<P>;
#pragma unroll
      for (int wg = 0; wg < P::kBr / kWarpgroupRows; ++wg) {
        const Range q = tile_range(q_begin / kWarpgroupRows + wg, kWarpgroupRows, q_range.end);
        if (q.begin >= q.end || min(P::kv_bounds(p, head, q).end, sequence.seqused_kv(p)) <= end)
          partial |= 1u << wg;
      }
    }
  }
  __device__ int count() const { return kv_tiles.count; }
  /// Not a part, whose O and LSE the combine entry reads.
  __device__ bool is_whole() const { return !P::kSplit || split == kWhole; }
  __device__ int kv_begin(int i) const { return kv_tiles.tile(i) * P::kBc; }
  /// The first key that may be read: see kLeavesPages.
  __device__ int first_key_read(const Params& p) const {
    if constexpr (!kLeavesPages<P>) return 0;
    const int end = min(q_begin + queries_per_tile<P>(p), sequence.seqlen_q(p));
    return first_key_of<P>(p, sequence.head(p, h), {q_begin, end});
  }
};

}  // namespace flashjit::tma
