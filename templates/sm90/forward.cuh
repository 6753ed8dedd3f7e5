// Forward pass for Hopper: of one warp group a thread loads K and V through the TMA unit, another Q, a warp
// writes the rows that meet no keys, and a warp finds what the score reads of the keys; the other groups each
// own 64 rows of Q and compute with wgmma. The products of one tile run under the softmax of the tile before,
// and the warp groups take turns, so that one group's softmax runs under another's products
// (FlashAttention-3, sections 3.1 and 3.2).
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/common/tile_mask.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/unused_rows.cuh"
#include "flashjit/sm90/fragment.cuh"
#include "flashjit/sm90/plane.cuh"
#include "flashjit/sm90/tile_order.cuh"

namespace flashjit::sm90 {

/// How many Q tiles a block computes at a time, each by a team: groups that take turns, warps that load for
/// them, and places of their own. Four groups in two teams leave each thread more registers than two blocks
/// of two groups do, since only one warp group loads.
template <class P>
constexpr int kTeams = (P::kWarps * kWarpRows) / P::kBr;
/// Of all blocks, and this block's among them: first teams first, so that few tiles have a block each.
template <class P>
__device__ __forceinline__ unsigned teams_at_once() {
  return gridDim.x * kTeams<P>;
}
template <class P>
__device__ __forceinline__ unsigned team_index(int team) {
  return blockIdx.x + team * gridDim.x;
}

/// By how many powers of two a row's exponentials may exceed one before O is rescaled: their sum and O share
/// the factor. Asking whether to rescale costs more than doing it for few columns.
template <class P>
constexpr float kSlack = P::kHeadDimV > 64 ? 8.0f : 0.0f;

/// Whether a warp group's own P V runs under its softmax, too. For few columns it is so short that the other
/// groups' products fill the time, and then a wait in the right place is worth more.
template <class P>
constexpr bool kOutputUnderSoftmax = P::kHeadDimV > 64;

/// Whether the first P V of a Q tile overwrites O, so that nobody clears it. Short rows gain 2%. ptxas finds
/// another order for the rest, though, which costs few columns more than that where a row's keys are many or
/// of no bounds, and spills with two bounds and two tiles at a time.
template <class P>
constexpr bool kOverwritesOutput = P::kHeadDimV > 64 || P::kBlockMap || P::kMaskBounds == 1;

/// Without a mask all tiles cost the same, and the last round may have few: its tiles are cut, so that more
/// blocks have some warp groups' rows of them.
template <class P>
constexpr bool kCutsTiles = !P::kHasMask && !kLists<P> && !P::kSplit && P::kBr > kGroupRows;

/// A mask that ends within a KV tile, as causal ones do, leaves some warp groups without the rest: then the
/// softmax of a Q tile's first step may be over so many keys alone.
template <class P>
constexpr int kFewKeys = (P::kBc / 2 + 15) / 16 * 16;

/// Whether it is. With more columns the products take longer than the softmax, and two tiles at a time are
/// small and short of registers.
template <class P>
constexpr bool kShortSteps = P::kHasMask && !kLists<P> && !P::kPacksHeads && P::kHeadDim <= 64 &&
                             kFewKeys<P> != P::kBc && (P::kBr > kGroupRows) && kTeams<P> == 1;

/// A warp group has the rows of so many queries: one a row, of one head, unless heads are packed: then of
/// several that share K and V, which are read once for all of them.
template <class P>
__device__ __forceinline__ int queries_of_group(const Params& p) {
  return P::kPacksHeads ? p.packed.queries : kGroupRows;
}
template <class P>
__device__ __forceinline__ int queries_of_tile(const Params& p) {
  return P::kBr / kGroupRows * queries_of_group<P>(p);
}
/// Which of those queries a row is of.
template <class P>
__device__ __forceinline__ int query_of_row(const Params& p, int row) {
  return P::kPacksHeads ? static_cast<int>(row * p.packed.inverse >> 16) : row;
}
/// Of a head, or a set of packed ones, Q tiles for all queries; and how many of these a batch entry has.
template <class P>
__device__ __forceinline__ unsigned forward_tiles(const Params& p) {
  return P::kPacksHeads ? (p.seqlen_q + queries_of_tile<P>(p) - 1) / queries_of_tile<P>(p) : q_tiles<P>(p);
}
template <class P>
__device__ __forceinline__ unsigned forward_heads(const Params& p) {
  return P::kPacksHeads ? p.heads_kv * p.packed.sets : p.heads_q;
}

/// A Q tile, which of its warp groups' rows, and which part of its keys.
struct ForwardPiece {
  unsigned batch_head;  ///< among batch entries and their sets of heads
  unsigned tile;
  Range groups;
  int part;
};

/// The walk over all Q tiles, of which each team takes one a round. Without a mask the tiles of a head follow
/// each other, so that its K and V are read once. A mask makes some rows longer: then tiles are mixed, so
/// that all blocks get the same. The blocks of a cluster take neighbouring tiles of a head, where its tiles
/// make whole sets of them: they are near to the same half of L2, and what the other half has of K and V
/// comes to it once for all of them. Where lists know what a tile meets, the blocks ask for the next one
/// instead of taking one a round.
template <class P>
struct ForwardWalk {
  static constexpr unsigned kGroups = P::kBr / kGroupRows;
  static constexpr bool kWindows = P::kMaskBounds > 1;
  TileOrder order;
  unsigned whole, pieces = 1;  ///< from which tile on they are cut, and in how many pieces
  unsigned parts;              ///< of the keys, of which each is a piece of work

  __device__ explicit ForwardWalk(const Params& p)
      : order(forward_tiles<P>(p), p.batch * forward_heads<P>(p), cluster_size()),
        whole(order.size()),
        parts(num_splits<P>(p)) {
    const unsigned teams = teams_at_once<P>();
    if (teams >= order.size() * parts) return;  // every team has one piece: no rounds
    if constexpr (kCutsTiles<P>) {
      const unsigned over = whole % teams;
      whole -= over;
      for (pieces = kGroups; over * pieces > teams;) --pieces;
    }
    // To a mask of keys alone all rows are alike, and those that must be evaluated to be classed are of
    // blocks here and there: no row is known to be long.
    if (P::kHasMask && P::kMaskBlockQ > 0 && !P::kEvaluateTiles) order.mix(teams, kWindows);
  }
  /// The number of a piece of work. What lists leave of a tile differs: then blocks take the next when they
  /// are done with the last.
  __device__ unsigned number(const Params& p, int team, unsigned round) const {
    if constexpr (kLists<P>) return static_cast<unsigned>(atomicAdd(q_tile_counter(p), 1));
    return order.number(team_index<P>(team), round, teams_at_once<P>(), kWindows);
  }
  /// False when there is no such number.
  __device__ bool find(unsigned index, ForwardPiece& found) const {
    found.groups = {0, static_cast<int>(kGroups)};
    found.part = static_cast<int>(index % parts);
    index /= parts;
    if (kCutsTiles<P> && index >= whole) {
      const unsigned piece = (index - whole) % pieces, size = (kGroups + pieces - 1) / pieces;
      index = whole + (index - whole) / pieces;
      found.groups = {static_cast<int>(piece * size), static_cast<int>(min((piece + 1) * size, kGroups))};
    }
    if (index >= order.size()) return false;
    // Without a mask no heads are mixed, and fewer divisions stand before a block's first load. Beside few
    // columns ptxas would order the softmax in a slower way then.
    if constexpr (!P::kHasMask && P::kHeadDimV > 64) {
      found.batch_head = index / order.rows;
      found.tile = order.rows - 1 - index % order.rows;
    } else {
      const OrderedTile tile = order.at(index);
      found.batch_head = tile.head;
      found.tile = tile.tile;
    }
    return true;
  }
};

/// The heads of a Q tile, from its first on: one, or a set of packed ones.
template <bool kPacked>
struct HeadsOfWork {
  __device__ int end(int h) const { return h + 1; }
};
template <>
struct HeadsOfWork<true> {
  int h_kv, heads;
  __device__ int end(int h) const { return h + heads; }
};

/// A Q tile and the KV tiles that it meets. The producer finds it, the consumers read it in shared memory.
template <class P>
struct ForwardWork : HeadsOfWork<P::kPacksHeads> {
  Sequence<P> sequence;
  int h = -1;  ///< the first of the tile's; -1: there is no more work
  int q_begin = 0;
  int groups = 0;         ///< whose rows these are
  unsigned is_short = 0;  ///< bit n: warp group n has a short first step
  int part = 0;           ///< of the keys
  KvTiles<P> tiles;       ///< visited from the last to the first

  __device__ ForwardWork() {}
  __device__ ForwardWork(const Params& p, const ForwardPiece& piece)
      : sequence(p, static_cast<int>(piece.batch_head / forward_heads<P>(p))),
        h(static_cast<int>(piece.batch_head % forward_heads<P>(p))),
        q_begin(static_cast<int>(piece.tile) * queries_of_tile<P>(p) + piece.groups.begin * kGroupRows),
        groups(piece.groups.end - piece.groups.begin),
        part(piece.part) {
    if constexpr (P::kPacksHeads) {
      const int first = h % p.packed.sets * p.packed.heads;
      this->h_kv = h / p.packed.sets;
      this->heads = min(p.packed.heads, p.packed.shared - first);
      h = this->h_kv * p.packed.shared + first;
    }
    const int tile = static_cast<int>(piece.tile);
    const Range q_range = tile_range(tile, queries_of_tile<P>(p), sequence.seqlen_q(p));
    if (q_range.begin >= q_range.end) return;
    const auto head = sequence.head(p, h);
    tiles = KvTiles<P>(p, head, tile, q_range, sequence.seqused_kv(p));
    if constexpr (P::kSplit) tiles.keep_split(p, part);
    if constexpr (kShortSteps<P>) {
      const int end = kv_begin(count() - 1) + kFewKeys<P>;
#pragma unroll
      for (int group = 0; group < P::kBr / kGroupRows; ++group) {
        const Range q = tile_range(q_begin / kGroupRows + group, kGroupRows, q_range.end);
        if (q.begin >= q.end || min(P::kv_bounds(p, head, q).end, sequence.seqused_kv(p)) <= end)
          is_short |= 1u << group;
      }
    }
  }
  __device__ int count() const { return tiles.count; }
  __device__ int kv_begin(int i) const { return tiles.tile(i) * P::kBc; }
};

/// Whether those who compute read lists themselves, a step ahead. Else the loader says of a tile what its
/// list has of it, and nobody waits for that: 2 to 4% of two Q tiles at a time. Beside a mask that is tested
/// pair by pair ptxas takes back more than that.
template <class P>
constexpr bool kReadsList = (kLists<P> && kTestsMask<P> && kTeams<P> == 1);
template <class P>
constexpr bool kTellsTiles = kLists<P> && !kReadsList<P>;

/// What counts tiles: without a sign a stage and its phase are fewer instructions.
template <bool kSigned>
struct CountOf {
  using Type = unsigned;
};
template <>
struct CountOf<true> {
  using Type = int;
};

/// Where a team's things are in shared memory. `n` counts the tiles of K and V, `round` the Q tiles with
/// keys, through all of its work.
template <class P>
struct ForwardPlaces {
  static constexpr ForwardLayout kLayout{P::kBr,     P::kBc,       P::kHeadDim,         P::kHeadDimV,
                                         P::kStages, P::kBiasTile, P::kScoreColumnTerm, kLists<P>,
                                         kTeams<P>};
  static constexpr int kGroups = kLayout.groups(), kQStages = kLayout.q_stages();
  static constexpr int kQBytes = tile_bytes(kGroupRows, P::kHeadDim);  // a warp group's
  static constexpr int kKBytes = tile_bytes(P::kBc, P::kHeadDim), kVBytes = tile_bytes(P::kBc, P::kHeadDimV);
  static constexpr int kSliceBytes = P::kBc * kRowBytes;
  static_assert(sizeof(ForwardWork<P>) <= kWorkBytes);
  using Count = CountOf<kReadsList<P>>::Type;

  int team;
  char* shared;   ///< its part, aligned
  unsigned base;  ///< the address of that

  __device__ ForwardPlaces(int team, char* all) : team(team) {
    const unsigned begin = (shared_address(all) + kAlignment - 1) / kAlignment * kAlignment;
    base = begin + team * kLayout.team_bytes();
    shared = all + (base - shared_address(all));
  }
  /// Named barriers: those of the groups' turns, and those where a group's warps meet.
  __device__ int turn(int group) const { return 1 + (kTeams<P> > 1 ? team * 2 * kGroups : 0) + group; }
  __device__ int meeting(int group) const { return turn(group) + kGroups; }

  __device__ ForwardWork<P>& work(Count round) const {
    return *reinterpret_cast<ForwardWork<P>*>(shared + kLayout.work() + round % kKeptWorks * kWorkBytes);
  }
  /// Of tile n, where tiles are listed: twice the tile, and 1 more if every pair of it attends.
  __device__ int& entry(Count n) const {
    return reinterpret_cast<int*>(shared + kLayout.entries())[n % P::kStages];
  }
  __device__ unsigned q(int group, Count round) const {
    return base + kLayout.q() + (group + round % kQStages * kGroups) * kQBytes;
  }
  __device__ unsigned o(int group) const {
    return base + kLayout.o() + group * tile_bytes(kGroupRows, P::kHeadDimV);
  }
  __device__ unsigned k(Count n) const { return base + kLayout.k() + n % P::kStages * kKBytes; }
  __device__ unsigned v(Count n) const { return base + kLayout.v() + n % P::kStages * kVBytes; }
  /// The part of a captured plane that the scores of tile n read.
  __device__ unsigned plane(Count n) const {
    return base + kLayout.plane() + n % P::kStages * kLayout.plane_bytes();
  }
  /// What the score reads of the keys of tile n.
  __device__ float* values(Count n) const {
    return reinterpret_cast<float*>(shared + kLayout.values() + n % P::kStages * kLayout.values_bytes());
  }
  __device__ unsigned q_full(int group, Count round) const {
    return base + kLayout.barriers() + (group + round % kQStages * kGroups) * 16;
  }
  __device__ unsigned q_empty(int group, Count round) const { return q_full(group, round) + 8; }
  /// That `work(round)` is there.
  __device__ unsigned found(Count round) const {
    return k_full(0) + P::kStages * 32 + round % kKeptWorks * 8;
  }
  __device__ int found_phase(Count round) const { return round / kKeptWorks & 1; }
  __device__ int q_phase(Count round) const { return round / kQStages & 1; }
  __device__ unsigned k_full(Count n) const {
    return base + kLayout.barriers() + kQStages * kGroups * 16 + n % P::kStages * 32;
  }
  __device__ unsigned k_empty(Count n) const { return k_full(n) + 8; }
  __device__ unsigned v_full(Count n) const { return k_full(n) + 16; }
  __device__ unsigned v_empty(Count n) const { return k_full(n) + 24; }
  /// What the score reads of tile n, a plane or values of its keys: that it is there, and has been read.
  __device__ unsigned reads_full(Count n) const { return found(0) + kKeptWorks * 8 + n % P::kStages * 16; }
  __device__ unsigned reads_empty(Count n) const { return reads_full(n) + 8; }
  __device__ int phase(Count n) const { return n / P::kStages & 1; }
};

/// Whether O leaves through shared memory and the TMA unit: half of the instructions of stores by threads.
/// Packed sequences have each other's rows behind their last; parts of the keys have O in fp32.
template <class P>
constexpr bool kStagesOutput = ForwardPlaces<P>::kLayout.stages_output() && !P::kVarlen && !P::kSplit;

/// Writes O and LSE of the tiles without keys, which the other warps pass over: LSE alone where that is a
/// part of the keys. By the threads of one warp, or most of them.
template <class P>
__device__ __forceinline__ void write_rows_without_keys(const Params& p, int team, int thread, int threads) {
  constexpr int kChunks = P::kHeadDimV / 8;
  const unsigned rows = forward_tiles<P>(p), parts = num_splits<P>(p),
                 all = rows * p.batch * forward_heads<P>(p) * parts;
#pragma unroll 1
  for (unsigned index = team_index<P>(team); index < all; index += teams_at_once<P>()) {
    const ForwardWork<P> work(p, {index / parts / rows,
                                  index / parts % rows,
                                  {0, P::kBr / kGroupRows},
                                  static_cast<int>(index % parts)});
    if (work.count() > 0) continue;
    const int count = min(work.sequence.seqlen_q(p) - work.q_begin, queries_of_tile<P>(p));
    if constexpr (!P::kSplit) {
      unsigned short* o = work.sequence.q_pointer(p.o, work.h, work.q_begin);
#pragma unroll 1
      for (int chunk = thread; chunk < count * kChunks; chunk += threads)
        *reinterpret_cast<uint4*>(o + chunk / kChunks * p.o.stride_s + chunk % kChunks * 8) =
            uint4{0, 0, 0, 0};
    }
    float* lse = lse_of<P>(p, work.part);
    if (lse == nullptr) continue;
#pragma unroll 1
    for (int h = work.h; h < work.end(work.h); ++h) {
      float* of_head = lse + work.sequence.lse_row(p, h) + work.q_begin;
#pragma unroll 1
      for (int row = thread; row < count; row += threads) of_head[row] = end_of_row<P>(p, h, -infinity()).lse;
    }
  }
}

/// Loads K and V in the order in which they are needed: V of a tile after K of the next one, which may be
/// another Q tile's. What the scores of a tile read of a plane is read sooner than its V, and so comes with
/// its K. By one thread.
template <class P>
__device__ __forceinline__ void load_keys(const Params& p, const ForwardPlaces<P>& at,
                                          const TensorMaps& maps) {
  using Places = ForwardPlaces<P>;
  int v_row = 0, v_head = 0, v_batch = 0;  // of the tile of which K was loaded last
  const auto load_v = [&](int n) {
    barrier_wait<P>(at.v_empty(n), at.phase(n) ^ 1);
    barrier_expect(at.v_full(n), Places::kVBytes);
    load_tile<P::kBc, P::kHeadDimV>(at.v(n), maps.v, at.v_full(n), v_row, v_head, v_batch);
  };
  int n = 0;
#pragma unroll 1
  for (int round = 0;; ++round) {
    barrier_wait<P>(at.found(round), at.found_phase(round));
    const ForwardWork<P>& work = at.work(round);
    if (work.h < 0) break;
    const int head = work.h / p.qhead_per_kvhead(), batch = work.sequence.batch();
#pragma unroll 1
    for (int i = work.count() - 1; i >= 0; --i, ++n) {
      const int entry = work.tiles.entry(i), begin = tile_of_entry<P>(entry) * P::kBc;
      const int row = work.sequence.kv_row(begin);
      barrier_wait<P>(at.k_empty(n), at.phase(n) ^ 1);
      if constexpr (kTellsTiles<P>)
        at.entry(n) = begin + P::kBc <= work.sequence.seqused_kv(p) ? entry : entry & ~1;
      barrier_expect(at.k_full(n), Places::kKBytes);
      load_tile<P::kBc, P::kHeadDim>(at.k(n), maps.k, at.k_full(n), row, head, batch);
      if constexpr (P::kBiasTile) {
        barrier_wait<P>(at.reads_empty(n), at.phase(n) ^ 1);
        expect_with_plane<P::kBr, P::kBc>(p, maps, at.reads_full(n), 0,
                                          P::bias_tile(p, work.sequence.head(p, work.h)), at.plane(n),
                                          work.q_begin, begin);
      }
      if (n > 0) load_v(n - 1);
      v_row = row, v_head = head, v_batch = batch;
    }
  }
  if (n > 0) load_v(n - 1);
}

/// Loads a warp group's rows of Q of all heads of the tile; without a tile none come.
template <class P>
__device__ __forceinline__ void load_packed_queries(const Params& p, const ForwardPlaces<P>& at,
                                                    const TensorMaps& maps, int group, int round, bool more) {
  const ForwardWork<P>& work = at.work(round);
  const int row = work.sequence.q_row(work.q_begin) + group * p.packed.queries;
  const unsigned full = at.q_full(group, round);
  const int row_bytes = ForwardPlaces<P>::kQBytes / kGroupRows;
  barrier_expect(full, more ? p.packed.queries * p.packed.heads * row_bytes : 0);
  for (int slice = 0; more && slice < slices(P::kHeadDim); ++slice)
    load_packed_box(at.q(group, round) + slice * kGroupRows * kRowBytes, maps.q, full, slice * kSliceColumns,
                    work.h - work.h_kv * p.packed.shared, row, work.h_kv, work.sequence.batch());
}

/// Finds the work, and loads each warp group's Q as soon as there is room. By one thread.
template <class P>
__device__ __forceinline__ void load_queries(const Params& p, const ForwardPlaces<P>& at,
                                             const TensorMaps& maps) {
  using Places = ForwardPlaces<P>;
  const ForwardWalk<P> walk(p);
#pragma unroll 1
  for (int round = 0, index = 0;; ++index) {
    ForwardWork<P>& work = at.work(round);
    ForwardPiece piece;
    const bool more = walk.find(walk.number(p, at.team, index), piece);
    work = more ? ForwardWork<P>(p, piece) : ForwardWork<P>();
    if (more && work.count() == 0) continue;
    barrier_arrive(at.found(round));
#pragma unroll 1
    for (int group = 0; group < Places::kGroups; ++group) {
      barrier_wait<P>(at.q_empty(group, round), at.q_phase(round) ^ 1);
      if constexpr (P::kPacksHeads) {
        load_packed_queries(p, at, maps, group, round, more);
      } else {
        barrier_expect(at.q_full(group, round), more ? Places::kQBytes : 0);
        if (!more) continue;
        load_tile<kGroupRows, P::kHeadDim>(at.q(group, round), maps.q, at.q_full(group, round),
                                           work.sequence.q_row(work.q_begin) + group * kGroupRows, work.h,
                                           work.sequence.batch());
      }
    }
    if (!more) break;
    ++round;
  }
}

/// Finds what the score reads of each tile's keys, once for all queries of the Q tile. By one warp.
template <class P>
__device__ __forceinline__ void find_key_values(const Params& p, const ForwardPlaces<P>& at) {
  constexpr int kOwn = (P::kBc + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int n = 0;
#pragma unroll 1
  for (int round = 0;; ++round) {
    barrier_wait<P>(at.found(round), at.found_phase(round));
    const ForwardWork<P>& work = at.work(round);
    if (work.h < 0) break;
    const auto head = work.sequence.head(p, work.h);
#pragma unroll 1
    for (int i = work.count() - 1; i >= 0; --i, ++n) {
      float values[kOwn];
#pragma unroll
      for (int own = 0; own < kOwn; ++own)
        values[own] = P::score_column_term(p, head, position(work.kv_begin(i) + own * 32 + lane));
      barrier_wait<P>(at.reads_empty(n), at.phase(n) ^ 1);
#pragma unroll
      for (int own = 0; own < kOwn; ++own)
        if (own * 32 + lane < P::kBc) at.values(n)[own * 32 + lane] = values[own];
      barrier_arrive(at.reads_full(n));
    }
  }
}

/// The warp groups take turns at starting products.
template <class Places>
__device__ __forceinline__ void wait_for_turn(const Places& at, int group) {
  if constexpr (Places::kGroups > 1) named_barrier_sync(at.turn(group), 256);
}
template <class Places>
__device__ __forceinline__ void pass_turn(const Places& at, int group) {
  if constexpr (Places::kGroups > 1)
    named_barrier_arrive(at.turn(group + 1 == Places::kGroups ? 0 : group + 1), 256);
}

/// Whether bounds tell which KV tiles are full, once a Q tile.
template <class P>
constexpr bool kBoundsTell = (P::kMaskBounds > 0 && !kLists<P>);

/// The keys that are no padding and, where bounds tell, that all of some queries attend to.
template <class P>
__device__ __forceinline__ Range keys_of_all(const Params& p, const typename P::Head& head, Range q,
                                             int seqused_kv) {
  if constexpr (!kBoundsTell<P>) {
    return {0, seqused_kv};
  } else {
    const Range keys = P::kv_bounds_of_all(p, head, q);
    return {keys.begin, min(keys.end, seqused_kv)};
  }
}

/// What the steps read most of a warp group's rows of a Q tile, and of this thread's two rows, of which the
/// second is eight on, the maximum and the sum of the exponentials so far.
template <class P>
struct ForwardRows {
  Range q{0, 0};          ///< the group's
  Range full_keys{0, 0};  ///< that all of them attend to
  int seqused_kv = 0;
  typename P::Head head;
  float max[2], sum[2];
  float value[2] = {};  ///< what the score reads of the rows
  int packed[2];        ///< their queries, where heads are packed: else they follow from `q`

  __device__ void begin(const Params& p, const ForwardWork<P>& work, int group) {
    const int queries = queries_of_group<P>(p), q_begin = work.q_begin + group * queries;
    q = {q_begin, min(q_begin + queries, work.sequence.seqlen_q(p))};
    if constexpr (P::kPacksHeads)
      for (int half = 0; half < 2; ++half) packed[half] = q_begin + query_of_row<P>(p, own_row() + half * 8);
    seqused_kv = work.sequence.seqused_kv(p);
    head = work.sequence.head(p, work.h);
    full_keys = keys_of_all<P>(p, head, q, seqused_kv);
    max[0] = max[1] = -infinity();
    sum[0] = sum[1] = 0.0f;
    if constexpr (P::kScoreRowTerm)
      for (int half = 0; half < 2; ++half)
        value[half] = P::score_row_term(p, head, position(first_query() + half * to_second()));
  }
  __device__ int first_query() const { return P::kPacksHeads ? packed[0] : q.begin + own_row(); }
  __device__ int to_second() const { return P::kPacksHeads ? packed[1] - packed[0] : 8; }
};

/// Whether a word of bits tells which keys of a row attend: quicker than two comparisons of every pair.
template <class P>
constexpr bool kMasksByBits = (P::kMaskBounds > 1);

/// -infinity for the pairs that do not attend, in a tile of which not all do.
template <class P, int kCount>
__device__ __forceinline__ void mask_scores(const Params& p, const ForwardWork<P>& work,
                                            const ForwardRows<P>& rows, int kv_begin, float (&s)[kCount]) {
  const int lane = threadIdx.x % 32, row = rows.first_query(), column = kv_begin + lane % 4 * 2;
  const Position row_position = position(row), column_position = position(column);
  const bool any = kTestsMask<P> || P::mask(p, rows.head, row_position, column_position);
  TileMask<P, P::kBc> mask;
  const auto row_at = [&](int half) { return row + half * rows.to_second(); };
  mask.find(p, rows.head, row_at, kv_begin);
  [[maybe_unused]] unsigned attend[2][(kCount + 63) / 64];
  if constexpr (kMasksByBits<P>) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kCount; n += 64)
        attend[half][n / 64] =
            own_keys<P>(p, rows.head, row + half * rows.to_second(), column + n * 2, rows.seqused_kv);
  }
#pragma unroll
  for (int n = 0; n < kCount; n += 4) {
    // The map's blocks are multiples of 16, so a warp's sixteen rows and these eight columns lie in one.
    bool block = true;
    if constexpr (kTestsMap<P>) {
      const int q = min(row - lane / 4, rows.q.end - 1), kv = min(kv_begin + n * 2, rows.seqused_kv - 1);
      block = block_map_row<P>(p, work.sequence.b, work.h, q)[kv / P::kBlockKv] != 0;
    }
    const auto columns = mask.columns(n * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Position kv = column_position + (n / 4 * 8 + e % 2);
      if constexpr (kMasksByBits<P>)
        s[n + e] = mask_score(s[n + e], block, true, attend[e / 2][n / 64] >> (n % 64 / 2 + e % 2) & 1u);
      else
        s[n + e] = mask_score(s[n + e], block, kv.at < rows.seqused_kv,
                              kTestsMask<P> ? mask.attends(p, rows.head, e / 2, columns, e % 2,
                                                           row_position + e / 2 * rows.to_second(), kv)
                                            : any);
    }
  }
}

/// Whether the exponentials of a thread's two rows follow each other column by column. ptxas keeps what it
/// reads, and 2 to 5% depend on it: so for two Q tiles at a time where these are listed, row by row else.
template <class P>
constexpr bool kRowsTogether = (kTellsTiles<P> && kTeams<P> > 1);

/// Makes scores of dot products, where a program does so pair by pair. `plane`: where this lane's row of the
/// first four matrices of the tile's elements lies, where the score reads a plane. `values`: what it reads of
/// this thread's first key.
template <class P, int kCount>
__device__ __forceinline__ void apply_score(const Params& p, const ForwardRows<P>& rows, int kv_begin,
                                            unsigned plane, const float* values, float (&s)[kCount]) {
  if constexpr (P::kHasScore && !P::kScoreLine) {
    const Position row = position(rows.first_query()),
                   column = position(kv_begin + static_cast<int>(threadIdx.x) % 4 * 2);
    [[maybe_unused]] unsigned elements[4];
    [[maybe_unused]] float2 of_keys{};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const Position q = row + n / 2 % 2 * rows.to_second(), kv = column + (n / 4 * 8 + n % 2);
      if constexpr (P::kBiasTile) {
        const int chunk = n / 4;
        if (n % 8 == 0) load_matrix_x4(elements, (plane ^ (chunk % 8 * 16)) + chunk / 8 * P::kBr * kRowBytes);
        const unsigned word = elements[n % 8 / 2] >> n % 2 * 16;
        s[n] = P::score_of_element(p, rows.head, s[n], static_cast<unsigned short>(word), q, kv);
      } else if constexpr (P::kScoreRowTerm || P::kScoreColumnTerm) {
        if (P::kScoreColumnTerm && n % 4 == 0) of_keys = *reinterpret_cast<const float2*>(values + n * 2);
        s[n] = P::score_of_terms(p, rows.head, s[n], rows.value[n / 2 % 2], n % 2 ? of_keys.y : of_keys.x, q,
                                 kv);
      } else {
        s[n] = P::score(p, rows.head, s[n], q, kv);
      }
    }
  }
}

/// Scores to exponentials; returns what O and the sums so far are multiplied with.
template <class P, int kCount>
__device__ __forceinline__ void softmax(const Params& p, const ForwardWork<P>& work, ForwardRows<P>& rows,
                                        int kv_begin, bool full, float (&s)[kCount], float (&rescale)[2]) {
  constexpr bool kLazy = (kSlack<P>) != 0.0f;
  const int lane = threadIdx.x % 32, row = rows.first_query(), column = kv_begin + lane % 4 * 2;
  const float scale = scale_operand<P>(p);
  // Scores of a line stay in the units of dot products, without what is added at this thread's first key:
  // `unit` and `line` make them scores. A scale beside which no slope can be told is not asked for.
  [[maybe_unused]] const float unit = fmaxf(p.softmax_scale, 1e-30f);
  [[maybe_unused]] float line[2], slope;
  if constexpr (P::kScoreLine) {
    slope = __fdividef(P::score_slope(p, rows.head), unit);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      line[half] = P::score_offset(p, rows.head, position(row + half * rows.to_second()), position(column));
  }
  if (!full) mask_scores(p, work, rows, kv_begin, s);
  float offset[2], sum[2] = {0.0f, 0.0f};
  const float factor = P::kScoreLine ? unit * scale : scale;
  const auto find_offset = [&](int half) {
    const float before = rows.max[half];
    float highest = P::kScoreLine ? -infinity() : before;
#pragma unroll
    for (int n = 2 * half; n < kCount; n += 4) {
      if constexpr (P::kScoreLine)
        for (int e = 0; e < 2; ++e) s[n + e] = fmaf(slope, static_cast<float>(n / 4 * 8 + e), s[n + e]);
      highest = fmaxf(highest, fmaxf(s[n], s[n + 1]));
    }
    if constexpr (P::kScoreLine) highest = fmaxf(before, fmaf(highest, unit, line[half]));
    highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
    if (kLazy && !((highest - before) * scale > kSlack<P>)) highest = before;
    const float shift = highest == -infinity() ? 0.0f : __fmul_rn(highest, scale);
    rescale[half] = before == -infinity() ? 0.0f : exp2_approx(__fmul_rn(before, scale) - shift);
    rows.max[half] = highest;
    offset[half] = -shift;
    if constexpr (P::kScoreLine) offset[half] = fmaf(line[half], scale, -shift);
  };
  const auto exponentiate = [&](int n) {
    const int half = n / 2 % 2;
    s[n] = exp2_approx(fmaf(s[n], factor, offset[half]));
    sum[half] += s[n];
  };
  const auto add_sum = [&](int half) { rows.sum[half] = rows.sum[half] * rescale[half] + sum[half]; };
  if constexpr (kRowsTogether<P>) {
    find_offset(0), find_offset(1);
#pragma unroll
    for (int n = 0; n < kCount; ++n) exponentiate(n);
    add_sum(0), add_sum(1);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      find_offset(half);
#pragma unroll
      for (int n = 2 * half; n < kCount; n += 4) exponentiate(n), exponentiate(n + 1);
      add_sum(half);
    }
  }
}

/// Which row of LSE, and of parts of O, one of a thread's two rows is; -1: none. Where heads are packed.
template <class P>
__device__ __forceinline__ long long packed_row(const Params& p, const ForwardWork<P>& work, int group,
                                                int half) {
  const int row = own_row() + half * 8, query = query_of_row<P>(p, row);
  const int head = row - query * p.packed.heads, q = work.q_begin + group * p.packed.queries + query;
  if (query >= p.packed.queries || head >= work.heads || q >= work.sequence.seqlen_q(p)) return -1;
  return work.sequence.lse_row(p, work.h + head) + q;
}

/// Writes the rows' LSE; returns what makes them rows of O.
template <class P>
__device__ __forceinline__ void end_rows(const Params& p, const ForwardWork<P>& work,
                                         const ForwardRows<P>& rows, int group, float (&scale)[2]) {
  const float to_log2 = scale_operand<P>(p);
  float lse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(kWholeWarp, sum, 1);
    sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    // As in sm80/forward.cuh: the sum is relative to a rounded shift, and the LSE is not.
    const float highest = P::kHasScore ? rows.max[half] : __fmul_rn(rows.max[half], p.softmax_scale);
    const float rest = fmaf(rows.max[half], to_log2, -__fmul_rn(rows.max[half], to_log2));
    lse[half] = sum > 0.0f ? highest + (log2_approx(sum) - rest) * kLn2 : -infinity();
    const RowEnd end = end_of_row<P>(p, work.h, lse[half]);
    lse[half] = end.lse;
    scale[half] = sum > 0.0f ? __fdividef(P::kDropout ? p.keep_scale : 1.0f, sum) * end.factor : 0.0f;
  }
  float* to = lse_of<P>(p, work.part);
  if (to == nullptr || threadIdx.x % 4 != 0) return;
  if constexpr (P::kPacksHeads) {
    for (int half = 0; half < 2; ++half)
      if (const long long row = packed_row(p, work, group, half); row >= 0) to[row] = lse[half];
    return;
  }
  const int q = work.q_begin + group * kGroupRows + own_row(), count = work.sequence.seqlen_q(p) - q;
  to += work.sequence.lse_row(p, work.h) + q;
  if (count > 0) to[0] = lse[0];
  if (count > 8) to[8] = lse[1];
}

/// Multiplies rows of O by what they have each.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&o)[kCount], const float (&scale)[2]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) o[n] *= scale[n / 2 % 2];
}

/// Stores O of a Q tile, scaled already.
template <class P, int kCount>
__device__ __forceinline__ void store_output(const Params& p, const TensorMaps& maps,
                                             const ForwardPlaces<P>& at, const ForwardWork<P>& work,
                                             int group, const float (&o)[kCount]) {
  using Element = typename P::Element;
  const int q_begin = work.q_begin + group * kGroupRows;
  if constexpr (P::kPacksHeads) {
    for (int half = 0; half < 2; ++half)
      if (const long long row = packed_row(p, work, group, half); row >= 0)
        store_split<P>(p, work.part, row, half, o);
  } else if constexpr (P::kSplit) {
    for (int half = 0; half < 2; ++half)
      if (const int q = q_begin + own_row() + half * 8; q < work.sequence.seqlen_q(p))
        store_split<P>(p, work.part, work.sequence.lse_row(p, work.h) + q, half, o);
  } else if constexpr (kStagesOutput<P>) {
    const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
    if (elected()) bulk_wait_read();  // the last tile's
    __syncwarp();
    stage_rows<Element, kGroupRows>(o, at.o(group), first_row);
    publish_to_async_proxy();
    __syncwarp();
    if (!elected()) return;
    for (int slice = 0; slice < slices(P::kHeadDimV); ++slice)
      store_box(maps.o, at.o(group) + (slice * kGroupRows + first_row) * kRowBytes, slice * kSliceColumns,
                q_begin + first_row, work.h, work.sequence.batch());
    bulk_commit();
  } else {
    const int q = q_begin + own_row();
    store_rows<Element>(o, P::kHeadDimV / 8, work.sequence.q_pointer(p.o, work.h, q), p.o.stride_s,
                        work.sequence.seqlen_q(p) - q);
  }
}

/// Whether V of a tile, which lies as far from its K in every stage, is found by that. Few columns are slower
/// so, as ptxas orders their softmax otherwise.
template <class P>
constexpr bool kFindsVByK =
    P::kHeadDim > 64 && ForwardPlaces<P>::kKBytes == ForwardPlaces<P>::kVBytes && !kReadsList<P>;

/// Whether V, too, is asked for ahead, so that a turn is short. Only listed tiles gain; a wide O leaves no
/// register for the answer.
template <class P>
constexpr bool kAsksForV = (kTellsTiles<P> && P::kHeadDim <= 128);

/// Whether what dropout drops of a tile is drawn while its scores are computed, which needs registers for the
/// masks until P is there; else when it is: quicker for few columns, and a wide O leaves no registers.
template <class P>
constexpr bool kDrawsEarly = (P::kDropout && P::kHeadDimV > 64 && P::kHeadDimV <= 128);

/// Computes a warp group's rows of O. The steps, one a tile of K and V, follow each other without a gap, also
/// from one Q tile to the next: each starts its own scores and then the last step's P V.
template <class P>
__device__ __forceinline__ void consume(const Params& p, const TensorMaps& maps, const ForwardPlaces<P>& at,
                                        int group) {
  using Element = typename P::Element;
  using Places = ForwardPlaces<P>;
  constexpr int kGroups = Places::kGroups;
  constexpr int kS = P::kBc / 2, kO = P::kHeadDimV / 2;  // accumulators of a thread
  constexpr bool kWhole = has_whole_products(P::kHeadDimV);
  constexpr int kScoreStatements = kWhole ? 1 : (P::kHeadDim + 15) / 16;
  constexpr int kOutputStatements = kWhole ? 1 : P::kBc / 16;
  constexpr bool kLazy = (kSlack<P>) != 0.0f;
  int round = 0, i = 0;  // of the Q tile and the KV tile, of which the last is 0
  ForwardRows<P> rows;
  // Of the step, until the next one looks at its tile: its first key, and whether every pair attends.
  int kv_begin = 0;
  bool full = false;
  int entry = 0;  // of the tile, read a step ahead where it stands in a list of which nobody tells
  float o[kO] = {};
  float s[kS];
  unsigned probability[P::kBc / 16][4];
  unsigned plane = 0;  // of the step

  // False when there is no more work.
  const auto find_work = [&] {
    barrier_wait<P>(at.q_full(group, round), at.q_phase(round));
    const ForwardWork<P>& work = at.work(round);
    i = work.count() - 1;
    if (kReadsList<P> && i >= 0) entry = work.tiles.entry(i);
    return work.h >= 0;
  };
  // Who has the turn is to start at once: what it needs is known from the step before.
  unsigned long long q_tile, k_tile = 0, v_tile;
  const auto find_tiles = [&](int n) {
    if constexpr (kFindsVByK<P>)
      v_tile = k_tile + (tile_descriptor(at.v(0), Places::kSliceBytes) - tile_descriptor(at.k(0), 0));
    else
      v_tile = tile_descriptor(at.v(n - 1), Places::kSliceBytes);
    k_tile = tile_descriptor(at.k(n), 0);
  };
  // Asked at the end of the step before.
  bool keys_ready = false;
  [[maybe_unused]] bool v_ready = false;
  const auto ask = [&](int n) {
    keys_ready = barrier_ready(at.k_full(n + 1), at.phase(n + 1));
    if constexpr (kAsksForV<P>) v_ready = barrier_ready(at.v_full(n), at.phase(n));
  };
  const auto wait_for_k = [&](int n) {
    if (!keys_ready) barrier_wait<P>(at.k_full(n), at.phase(n));
  };
  const auto start_scores = [&] {
    pin(s);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kScoreStatements; ++step) {
      // Four steps of 16 columns (32 bytes) make a slice.
      const int q_offset = step / 4 * kGroupRows * kRowBytes + step % 4 * 32;
      const int k_offset = step / 4 * Places::kSliceBytes + step % 4 * 32;
      P::multiply_scores(s, q_tile + (q_offset >> 4), k_tile + (k_offset >> 4), step > 0);
    }
    multiply_commit();
    pin(s);
  };
  // What stands behind the last key may be anything, and zero times anything is not zero.
  const auto wait_for_v = [&](int n) {
    if (!v_ready) barrier_wait<P>(at.v_full(n), at.phase(n));
    if (const int valid = rows.seqused_kv - kv_begin; kForeignKeys<P> && valid < P::kBc) {
      clear_rows<P::kBc, P::kHeadDimV>(at.shared + (at.v(n) - at.base), valid);
      publish_to_async_proxy();
      named_barrier_sync(at.meeting(group), 128);
    }
  };
  int adds = kOverwritesOutput<P> ? 0 : 1;  // whether the next P V adds to O
  // What dropout drops of 16 keys of the step's P.
  [[maybe_unused]] unsigned dropped[P::kBc / 16][4];
  const auto draw = [&](int keys) {
    const ForwardWork<P>& work = at.work(round);
    drop_masks(dropped[keys], p, work.sequence.b * p.heads_q + work.h, rows.first_query(),
               kv_begin + keys * 16 + static_cast<int>(threadIdx.x) % 4 * 2);
  };
  const auto draw_early = [&] {
    if constexpr (kDrawsEarly<P>) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) draw(keys);
    }
  };
  // P of the step as the left operand of its product with V.
  const auto pack_probabilities = [&] {
    as_left_operand<Element>(probability, s);
    if constexpr (P::kDropout) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) {
        if constexpr (!kDrawsEarly<P>) draw(keys);
#pragma unroll
        for (int r = 0; r < 4; ++r) probability[keys][r] &= ~dropped[keys][r];
      }
    }
  };
  const auto start_output = [&] {
    pin(o);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kOutputStatements; ++step)
      P::multiply_output(o, &probability[step], v_tile + (step * 16 * kRowBytes >> 4), step > 0 ? 1 : adds);
    adds = 1;
    pin(o);
  };
  // One arrival a warp, when all of its lanes have read. What threads wrote each reader gives back for
  // itself: racecheck does not see that a warp's lanes have read where one says so for all.
  const auto release = [&](unsigned barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  };
  const auto scores_are_done = [&](int n) {
    pin(s);
    if constexpr (kTellsTiles<P>)
      barrier_arrive(at.k_empty(n));
    else
      release(at.k_empty(n));
    if (Places::kQStages == 1 && i == 0) release(at.q_empty(group, round));
  };
  static_assert(kTellsTiles<P> || !kTellsRows<P>);
  // Whether any of the group's rows meet the tile, of which K is there.
  const auto meets = [&](int n) { return (at.entry(n) >> (kListedRowsBit + group) & 1) != 0; };
  const auto look_at_tile = [&](int n) {
    const ForwardWork<P>& work = at.work(round);
    if constexpr (!kReadsList<P>) entry = kTellsTiles<P> ? at.entry(n) : work.tiles.entry(i);
    kv_begin = tile_of_entry<P>(entry) * P::kBc;
    if constexpr (kTellsRows<P>) {
      // Of a tile that it does not meet the group masks all.
      const bool met = meets(n);
      full = met && (entry & 1);
      rows.seqused_kv = met ? work.sequence.seqused_kv(p) : 0;
    } else if constexpr (kTellsTiles<P>)
      full = entry & 1;
    else
      full =
          kv_begin + P::kBc <= rows.full_keys.end &&
          (kBoundsTell<P> ? rows.full_keys.begin <= kv_begin : work.tiles.full(p, rows.head, rows.q, entry));
    if (kReadsList<P> && i > 0) entry = work.tiles.entry(i - 1);
  };
  const auto await_reads = [&](int n) {
    if constexpr (P::kBiasTile || P::kScoreColumnTerm) barrier_wait<P>(at.reads_full(n), at.phase(n));
  };
  const auto reads_are_done = [&](int n) {
    if constexpr (P::kBiasTile)
      release(at.reads_empty(n));
    else if constexpr (P::kScoreColumnTerm)
      barrier_arrive(at.reads_empty(n));
  };
  // A group passes over the tiles that only others' rows meet. But it computes one of each Q tile, so that O
  // and LSE are written, and its V waits for P no longer than there are stages: else nobody could go on.
  int last = -1;  // the tile that was computed last
  const auto computes = [&](int n, bool is_first) {
    const bool must = n - last >= P::kStages || (is_first && i == 0);
    return __any_sync(kWholeWarp, must || meets(n)) != 0;
  };
  const auto pass_over = [&](int n) {
    wait_for_turn(at, group);
    pass_turn(at, group);
    barrier_arrive(at.k_empty(n));
    if (Places::kQStages == 1 && i == 0) release(at.q_empty(group, round));
    barrier_wait<P>(at.v_full(n), at.phase(n));
    release(at.v_empty(n));
    k_tile = tile_descriptor(at.k(n + 1), 0);
    keys_ready = false;
  };
  // The tile before n that was computed.
  const auto before = [&](int n) {
    if constexpr (kTellsRows<P>) return last;
    return n - 1;
  };
  // Where the TMA unit does not copy the plane, each warp fills in what it reads: starts so before it waits
  // for anything else, and ends under the products.
  const auto fill_plane = [&](int n, auto fill) {
    if constexpr (P::kBiasTile) {
      const ForwardWork<P>& work = at.work(round);
      const BiasTile of = P::bias_tile(p, work.sequence.head(p, work.h));
      const int row = group * kGroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
      if (!unit_copies(p, maps, of))
        fill(PlaneRows<P::kBr, kWarpRows, P::kBc, 8>{at.shared + (at.plane(n) - at.base), of, work.q_begin,
                                                     work.kv_begin(i), row, 0});
      const int lane = threadIdx.x % 32;
      plane = at.plane(n) + chunk_offset<P::kBr>(row + lane % 16, lane / 16);
    }
  };
  const auto start_plane = [&](int n) { fill_plane(n, [](const auto& rows) { rows.start(); }); };
  const auto finish_plane = [&](int n) { fill_plane(n, [](const auto& rows) { rows.finish(); }); };
  float rescale[2], scale[2];
  // Of tile n, whose dot products and reads are there.
  const auto to_exponentials = [&](int n, auto& scores) {
    apply_score(p, rows, kv_begin, plane, at.values(n) + threadIdx.x % 4 * 2, scores);
    reads_are_done(n);
    softmax(p, at.work(round), rows, kv_begin, full, scores, rescale);
  };
  int n = 0;
  find_tiles(0);
  if (group == kGroups - 1) pass_turn(at, group);
  for (; find_work(); ++round) {
    if (kCutsTiles<P> && group >= at.work(round).groups) break;  // its last
    const bool follows = n > 0;
    q_tile = tile_descriptor(at.q(group, round), 0);
    wait_for_k(n);
    if constexpr (kTellsRows<P>) {
      for (; !computes(n, true); --i) {
        pass_over(n);
        wait_for_k(++n);
      }
    }
    wait_for_turn(at, group);
    start_scores();
    // The vote tells ptxas that all lanes go one way: else it may make products wait for each other.
    if (__any_sync(kWholeWarp, follows)) {
      wait_for_v(before(n));
      start_output();
    }
    multiply_commit();
    pass_turn(at, group);
    find_tiles(n + 1);
    if (follows) end_rows(p, at.work(round - 1), rows, group, scale);
    rows.begin(p, at.work(round), group);
    look_at_tile(n);
    draw_early();
    start_plane(n);
    finish_plane(n);
    multiply_wait<1>();
    scores_are_done(n);
    await_reads(n);
    if (kShortSteps<P> && at.work(round).is_short >> group & 1u) {
      auto& few = reinterpret_cast<float(&)[kFewKeys<P> / 2]>(s);
      to_exponentials(n, few);
#pragma unroll
      for (int value = kFewKeys<P> / 2; value < kS; ++value) s[value] = 0.0f;
    } else {
      to_exponentials(n, s);
    }
    if constexpr (kOutputUnderSoftmax<P>) finish_before_wait(rows.sum[0] + rows.sum[1], at.base);
    multiply_wait<0>();
    ask(n);
    pin(o);
    pack_probabilities();
    if (follows) {
      release(at.v_empty(before(n)));
      scale_rows(o, scale);
      store_output(p, maps, at, at.work(round - 1), group, o);
    }
    last = n;
    if constexpr (kOverwritesOutput<P>) {
      adds = 0;
    } else {
#pragma unroll
      for (int value = 0; value < kO; ++value) o[value] = 0.0f;
    }
    for (++n; i > 0; ++n) {
      --i;
      start_plane(n);
      wait_for_k(n);
      if constexpr (kTellsRows<P>) {
        if (!computes(n, false)) {
          pass_over(n);
          continue;
        }
      }
      wait_for_turn(at, group);
      start_scores();
      wait_for_v(before(n));
      start_output();
      multiply_commit();
      pass_turn(at, group);
      find_tiles(n + 1);
      look_at_tile(n);
      draw_early();
      finish_plane(n);
      multiply_wait<1>();
      scores_are_done(n);
      await_reads(n);
      to_exponentials(n, s);
      if constexpr (kOutputUnderSoftmax<P>) finish_before_wait(rows.sum[0] + rows.sum[1], at.base);
      multiply_wait<0>();
      ask(n);
      pin(o);
      release(at.v_empty(before(n)));
      last = n;
      if (!kLazy || __any_sync(kWholeWarp, rescale[0] != 1.0f || rescale[1] != 1.0f)) scale_rows(o, rescale);
      pack_probabilities();
    }
    // Where there are two, nobody waits for this one yet.
    if (Places::kQStages == 2) release(at.q_empty(group, round));
  }
  if (n > 0) {
    wait_for_v(before(n));
    start_output();
    multiply_commit();
    end_rows(p, at.work(round - 1), rows, group, scale);
    multiply_wait<0>();
    pin(o);
    scale_rows(o, scale);
    store_output(p, maps, at, at.work(round - 1), group, o);
    if (kStagesOutput<P> && elected()) bulk_wait_read();  // before shared memory is another block's
  }
  if constexpr (kCutsTiles<P>) {
    // Other groups have rows of one more tile: the order in which its KV tiles come and go is kept.
    if (i >= 0) {
      release(at.q_empty(group, round));
      release(at.v_empty(n - 1));
    }
    for (; i >= 0; --i, ++n) {
      wait_for_turn(at, group);
      pass_turn(at, group);
      barrier_wait<P>(at.k_full(n), at.phase(n));
      release(at.k_empty(n));
      barrier_wait<P>(at.v_full(n), at.phase(n));
      release(at.v_empty(n));
      await_reads(n);
      reads_are_done(n);
    }
  }
  if (group == 0) wait_for_turn(at, group);  // takes the turn that nobody else wants
}

/// A team's. By one thread.
template <class P>
__device__ __forceinline__ void init_barriers(const ForwardPlaces<P>& at) {
  using Places = ForwardPlaces<P>;
  for (int group = 0; group < Places::kGroups; ++group) {
    for (int round = 0; round < Places::kQStages; ++round) {
      barrier_init(at.q_full(group, round), 1);
      barrier_init(at.q_empty(group, round), 4);
    }
  }
  for (int round = 0; round < kKeptWorks; ++round) barrier_init(at.found(round), 1);
  for (int stage = 0; stage < P::kStages; ++stage) {
    barrier_init(at.k_full(stage), 1);
    barrier_init(at.v_full(stage), 1);
    barrier_init(at.k_empty(stage), Places::kGroups * (kTellsTiles<P> ? 128 : 4));
    barrier_init(at.v_empty(stage), Places::kGroups * 4);
    if constexpr (P::kBiasTile) {
      barrier_init(at.reads_full(stage), 1);
      barrier_init(at.reads_empty(stage), Places::kGroups * 4);
    } else if constexpr (P::kScoreColumnTerm) {
      barrier_init(at.reads_full(stage), 32);
      barrier_init(at.reads_empty(stage), Places::kGroups * 128);
    }
  }
}

template <class P>
__device__ void forward(const Params& p, const TensorMaps& maps) {
  using Places = ForwardPlaces<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  if (threadIdx.x == 0) {
    for (int team = 0; team < kTeams<P>; ++team) init_barriers(Places(team, shared));
    barrier_init_fence();
  }
  __syncthreads();
  zero_unused_rows_of_output<P>(p);
  if constexpr (kLists<P>) wait_for_prior_grid<P>();

  constexpr int kAllGroups = kTeams<P> * Places::kGroups;
  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  if (group < 0) {
    lower_register_limit<producer_registers(kAllGroups, P::kMinBlocks)>();
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0), team = warp % kTeams<P>;
    const Places at(team, shared);
    if (warp / kTeams<P> == 0) {
      if (elected()) load_keys(p, at, maps);
    } else if (warp / kTeams<P> == 1) {
      if constexpr (kTeams<P> == 2) {
        const bool loads = elected();
        const unsigned others = __ballot_sync(kWholeWarp, !loads);
        if (!loads)
          write_rows_without_keys<P>(p, team, __popc(others & ((1u << threadIdx.x % 32) - 1u)), 31);
        else
          load_queries(p, at, maps);
      } else if (elected())
        load_queries(p, at, maps);
    } else if (warp / kTeams<P> == 2) {
      write_rows_without_keys<P>(p, team, threadIdx.x % 32, 32);
    } else if constexpr (P::kScoreColumnTerm) {
      find_key_values(p, at);
    }
  } else {
    raise_register_limit<consumer_registers(kAllGroups, P::kMinBlocks)>();
    const int team = kTeams<P> > 1 ? group / Places::kGroups : 0;
    consume(p, maps, Places(team, shared), group - team * Places::kGroups);
  }
}

}  // namespace flashjit::sm90
