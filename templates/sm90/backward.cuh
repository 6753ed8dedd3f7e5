// Backward pass for Hopper: thread blocks that take one KV tile after the other. Of one warp group a thread
// loads, through the TMA unit, and two add dQ to global memory; the two other groups compute with wgmma. S
// and dP are computed transposed. Where gradients of captures are sums of dS, the two threads' warps add
// them, from shared memory.
//
// Up to 128 columns a KV tile has 128 keys, each group 64 of them, and P^T and dS^T feed dV and dK from
// registers. dS goes through shared memory for dQ, for which each group needs the other's too, but only a Q
// tile later, so that neither waits and one group's products run under the other's softmax.
//
// Above, one group's registers do not hold its rows of dK and dV. There ("wide"), and in KV tiles of 64 keys,
// both groups have the same 64 keys: of S and dP each computes half of the queries, of dK and dV half of the
// columns, from P and dS in shared memory.
//
// A KV tile of more keys is of a cluster of blocks with 128 keys each. They visit the same Q tiles and give
// each other their parts of dQ, of which each block sums up some columns. Where all keys of a row are in one
// KV tile the sum is dQ, for which nothing is cleared, added to or converted in global memory.
//
// Above 128 columns, adding dQ to global memory for every 64 keys takes longer than all products. So there a
// cluster of two blocks shares a KV tile of 128 keys: each block has 64 of them, gives the other its dS, and
// computes half of dQ's columns for all 128.
//
// Where KV tiles are few and their queries many, blocks share those of one: each stores what its part gives
// to dK and dV in fp32, and the join_gradients entry adds that up.
#pragma once

#include "flashjit/common/tile_mask.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm90/convert_dq.cuh"
#include "flashjit/sm90/dq_fragments.cuh"
#include "flashjit/sm90/ds_grads.cuh"
#include "flashjit/sm90/fragment.cuh"
#include "flashjit/sm90/plane.cuh"

namespace flashjit::sm90 {

template <class P>
struct BackwardTile {
  static constexpr BackwardLayout kLayout{P::kBr,     P::kBc,         P::kHeadDim,    P::kHeadDimV,
                                          P::kStages, P::kReadsPlane, P::kQueryValues};
  static constexpr int kGroups = kDqGroups;
  static constexpr int kHelperRegisters = 56, kConsumerRegisters = 224;        // of a thread
  static constexpr int kDim = kLayout.columns(), kDimV = kLayout.columns_v();  // in shared memory
  static constexpr int kCluster = kLayout.cluster(), kKeys = kLayout.keys();
  static constexpr bool kExchangesDs = kLayout.exchanges_ds(), kSumsDq = kLayout.sums_dq();
  static constexpr int kDoutStages = kLayout.dout_stages();
  static constexpr int kKvSlice = kKeys * kRowBytes, kQSlice = P::kBr * kRowBytes;
  static constexpr int kQBytes = tile_bytes(P::kBr, kDim), kDoutBytes = tile_bytes(P::kBr, kDimV);
  static constexpr int kKBytes = tile_bytes(kKeys, kDim), kVBytes = tile_bytes(kKeys, kDimV);
  static constexpr int kOtherKBytes = kExchangesDs ? tile_bytes(kKeys, kDim / 2) : 0;
  static constexpr int kDsBytes = tile_bytes(kKeys, P::kBr);
  static constexpr bool kHasPlane = kLayout.has_plane();
  // Gradients of captures that come from dS in shared memory. Up to 64 columns, registers suffice for what
  // the warps that compute add to a plane themselves, which is quicker.
  static constexpr bool kAddsPlane = P::kPlaneGrad && P::kHeadDim > 64;
  static constexpr bool kAddsDs = kAddsPlane || P::kDifferenceGrads > 0;
  static constexpr int kAddedGrads = P::kDifferenceGrads + kAddsPlane;
  template <class Addition>
  static constexpr bool adds(Addition which) {
    return which.kPlaces == Places::by_difference || (kAddsPlane && which.kPlaces == Places::own);
  }
  static constexpr bool kWide = kLayout.wide();
  static constexpr int kShare = kWide ? 2 : 1;
  static constexpr int kQueries = P::kBr / kShare;                          // of S and dP, a group
  static constexpr int kOwnDim = kDim / kShare, kOwnDimV = kDimV / kShare;  // columns of dK and dV, a group
  // A group's part of dQ is 64 rows where there are 128, else some of the columns.
  static constexpr bool kSplitRows = P::kBr == 128;
  static constexpr int kDqColumns = kLayout.dq_columns();
  // It leaves through shared memory, eight columns a step: `kDqInDout` and `kDqInQ` steps lie in what this
  // group alone reads of dO and Q, when it has read it, the others in a place of their own.
  static constexpr int kDqSteps = kDqColumns / 8;
  static constexpr int kDqInDout = kLayout.dq_within_dout() / kDqStepBytes;
  static constexpr int kDqInQ = kLayout.dq_within_q() / kDqStepBytes;
  /// Of each group's part, those that a block of the cluster sums up.
  static constexpr int kSummedSteps = kDqSteps / kCluster;
  struct Place {
    Sequence<P> sequence;
    int h_kv;
    int kv_begin;  ///< this block's first key
    int kv_limit;  ///< keys of the sequence that are no padding
  };
  /// A Q tile; without a head the word that there are no more.
  struct alignas(16) QTile : StagedTile {
    long long row;      ///< its first among [batch, heads_q, seqlen_q_padded]
    int place;          ///< of its KV tile
    short first, last;  ///< of that KV tile's; of which the last says the part, and 1 more
  };
  static_assert(sizeof(Place) == kPlaceBytes && sizeof(QTile) == kQTileBytes);
  static_assert(kKeys == (kWide ? 64 : 128) && (P::kBr == 64 || (P::kBr == 128 && !kWide)));

  /// Of a group, in the tiles of S^T and dP^T.
  static __device__ int first_row(int group) { return kWide ? 0 : group * 64; }
  static __device__ int first_query(int group) { return kWide ? group * kQueries : 0; }

  char* shared;
  unsigned base;  ///< its address

  __device__ BackwardTile(char* memory, unsigned address) : shared(memory), base(address) {}

  /// Which block of the cluster this is.
  static __device__ int rank() { return kCluster > 1 ? cluster_rank() : 0; }
  /// Which part of dQ a group computes, and its first column.
  static __device__ int dq_part(int group) { return (kExchangesDs ? rank() * kGroups : 0) + group; }
  static __device__ int first_dq_column(int group) { return kSplitRows ? 0 : dq_part(group) * kDqColumns; }
  __device__ Place* places() const { return reinterpret_cast<Place*>(shared + kLayout.places()); }
  __device__ QTile& staged(unsigned i) const {
    return reinterpret_cast<QTile*>(shared + kLayout.staged())[i % kKeptQTiles];
  }
  /// Of Q tile i's KV tile: read again where needed, since registers are short.
  __device__ const Place& place(unsigned i) const { return places()[staged(i).place]; }
  __device__ int kv_begin(unsigned i) const { return place(i).kv_begin; }
  __device__ int kv_limit(const Params& p, unsigned i) const {
    return kForeignKeys<P> ? place(i).kv_limit : p.seqlen_kv;
  }
  __device__ unsigned k() const { return base + kLayout.k(); }
  __device__ unsigned v() const { return base + kLayout.v(); }
  __device__ unsigned q(int slot) const { return base + kLayout.q() + slot * kQBytes; }
  __device__ unsigned dout(int slot) const { return base + kLayout.dout() + slot * kDoutBytes; }
  /// The part of a captured plane that the scores of a Q tile read. It comes and goes with dO.
  __device__ unsigned plane(int slot) const { return base + kLayout.plane() + slot * kLayout.plane_bytes(); }
  // Of Q tile i there are dS and, wide, P, and a barrier that says that both groups have written them and
  // have read those of the tile before.
  __device__ unsigned ds(unsigned i) const { return base + kLayout.ds() + i % 2 * kDsBytes; }
  __device__ unsigned p(unsigned i) const { return base + kLayout.p() + i % 2 * kDsBytes; }
  __device__ unsigned zeros() const { return base + kLayout.zeros(); }
  __device__ unsigned ds_full(unsigned i) const { return q_full(P::kStages) + i % 2 * 8; }
  /// Where a step of a group's dQ lies.
  __device__ unsigned dq(int group, int slot, int step) const {
    if (step < kDqInDout) return dout(slot) + group * kLayout.dq_within_dout() + step * kDqStepBytes;
    step -= kDqInDout;
    if (step < kDqInQ) return q(slot) + group * kLayout.dq_within_q() + step * kDqStepBytes;
    return base + kLayout.dq() + group * kLayout.dq_bytes() + (step - kDqInQ) * kDqStepBytes;
  }
  /// Until dO and D of Q tile i are there.
  __device__ void await_dout(unsigned i) const {
    barrier_wait<P>(dout_full(i % kDoutStages), i / kDoutStages & 1);
  }
  /// A column of a tile of slices.
  static __device__ unsigned column(unsigned at, int column, int slice_bytes) {
    return at + column / kSliceColumns * slice_bytes + column % kSliceColumns * 2;
  }
  // The first Q tile's of a KV tile are K's and V's, too.
  __device__ unsigned q_full(int slot) const { return base + kLayout.barriers() + slot * 4 * 8; }
  __device__ unsigned q_empty(int slot) const { return q_full(slot) + 8; }
  __device__ unsigned dout_full(int slot) const { return q_full(slot) + 16; }
  __device__ unsigned dout_empty(int slot) const { return q_full(slot) + 24; }
  __device__ unsigned dq_full(int group) const { return ds_full(0) + (2 + group * 2) * 8; }
  __device__ unsigned dq_empty(int group) const { return dq_full(group) + 8; }
  __device__ unsigned kv_empty() const { return ds_full(0) + 6 * 8; }
  /// Until what dS of Q tile i gives to gradients of captures is added.
  __device__ unsigned ds_added(unsigned i) const { return kv_empty() + (1 + i % 2) * 8; }

  // Where blocks sum up dQ, of Q tile n: block `from`'s part of the columns of a group that are this block's;
  // the barriers which say that all blocks' are there, that this block has given all that it has (or that
  // this was the last tile), and that all blocks have read what they were given.
  __device__ unsigned dq_from(int from, int group, unsigned n) const {
    return base + kLayout.dq() +
           ((n % kDqSlots * kGroups + group) * kCluster + from) * kSummedSteps * kDqStepBytes;
  }
  __device__ unsigned dq_there(int group, unsigned n) const {
    return told_full(0) + (kToldWorks + n % kDqSlots * kGroups + group) * 8;
  }
  static_assert(kDqSlots <= kGroups, "in the place of the groups' barriers");
  __device__ unsigned dq_given(unsigned n) const { return dq_full(n % kDqSlots); }
  __device__ unsigned dq_read(unsigned n) const { return dq_empty(n % kDqSlots); }

  // Of the other block of the cluster: half of the columns of its K, its dS of Q tile i, which it has written
  // when its dS of the tile before has been read. From the first block, the n-th KV tile.
  __device__ unsigned other_k() const { return base + kLayout.other_k(); }
  static __device__ int first_other_column() { return rank() * (kDim / 2); }
  __device__ unsigned other_ds(unsigned i) const { return base + kLayout.other_ds() + i % 2 * kDsBytes; }
  __device__ unsigned other_ds_full(unsigned i) const { return told_full(0) + (kToldWorks + i % 2) * 8; }
  __device__ unsigned told(unsigned n) const { return base + kLayout.told() + n % kToldWorks * 4; }
  __device__ unsigned told_full(unsigned n) const { return kv_empty() + (3 + n % kToldWorks) * 8; }
};

/// The number of this block's n-th KV tile. In a cluster the first block finds those that meet any Q tile,
/// and tells the others.
template <class P>
__device__ __forceinline__ unsigned take_work(const Params& p, const BackwardTile<P>& tile, unsigned n) {
  if (tile.rank() == 0) return static_cast<unsigned>(atomicAdd(next_kv_work(p), 1));
  barrier_expect(tile.told_full(n), 4);
  barrier_wait<P>(tile.told_full(n), n / kToldWorks & 1);
  return *reinterpret_cast<const volatile unsigned*>(tile.shared + (tile.told(n) - tile.base));
}
template <class P>
__device__ __forceinline__ void tell_work(const BackwardTile<P>& tile, unsigned n, unsigned number) {
  if constexpr (BackwardTile<P>::kCluster > 1) {
    if (tile.rank() > 0) return;
    for (int other = 1; other < BackwardTile<P>::kCluster; ++other)
      store_remote(in_block(tile.told(n), other), number, in_block(tile.told_full(n), other));
  }
}

/// Whether the sum that a cluster makes is dQ: all keys of a row are in its KV tile.
template <class P>
__device__ __forceinline__ bool writes_dq(const Params& p) {
  return BackwardTile<P>::kSumsDq && p.dq_accum == nullptr;
}
/// The keys of block `rank` of a cluster.
template <class P>
__device__ __forceinline__ BlockKeys block_keys(const Params& p, int rank) {
  return {rank * BackwardTile<P>::kKeys, BackwardTile<P>::kKeys, writes_dq<P>(p)};
}

/// Finds the KV tiles and loads them and their Q tiles as soon as there is room. By one thread.
template <class P>
__device__ __forceinline__ void produce(const Params& p, const BackwardTile<P>& tile,
                                        const TensorMaps& maps) {
  using Tile = BackwardTile<P>;
  unsigned n = 0, i = 0;
  // Without queries there is no work, and nobody has cleared the counter.
  while (p.seqlen_q > 0) {
    const unsigned number = take_work(p, tile, n);
    if (number >= kv_works<P>(p)) {
      tell_work(tile, n, number);  // that there are no more
      break;
    }
    const KvWork<P> work(p, number);
    const Sequence<P> sequence(p, work.b);
    QWalk<P> walk(p, sequence, work, block_keys<P>(p, tile.rank()));
    StagedTile now = walk.next(p, sequence);
    if (now.head < 0) continue;
    tell_work(tile, n, number);
    const int place = n % Tile::kLayout.kept_places(), batch = sequence.batch();
    const int own = tile.rank() * Tile::kKeys, kv_begin = work.kv_tile * P::kBc + own;
    tile.places()[place] = {sequence, work.h_kv, kv_begin, sequence.kv_limit(p)};
    // Where there are none the tensor may be none, too: those who compute clear what is not loaded then.
    const bool has_keys = !Tile::kSumsDq || !kForeignKeys<P> || kv_begin < sequence.kv_limit(p);
    const auto await_kv_room = [&] { barrier_wait<P>(tile.kv_empty(), n & 1 ^ 1); };
    bool first = true;
#pragma unroll 1
    while (now.head >= 0) {
      const StagedTile next = walk.next(p, sequence);
      const int q_begin = now.tile * P::kBr, q_row = sequence.q_row(q_begin);
      const long long row = sequence.stats_row(p, now.head) + q_begin;
      const int last = next.head < 0 ? work.part + 1 : 0;
      tile.staged(i) = {now, row, place, first, static_cast<short>(last)};
      const int slot = i % P::kStages, dout_slot = i % Tile::kDoutStages;
      const unsigned q_full = tile.q_full(slot), dout_full = tile.dout_full(dout_slot);
      barrier_wait<P>(tile.q_empty(slot), i / P::kStages & 1 ^ 1);
      barrier_expect(q_full, Tile::kQBytes + (P::kQueryValues ? 2 : 1) * P::kBr * 4 +
                                 (first && has_keys ? Tile::kKBytes + Tile::kOtherKBytes : 0));
      load_tile<P::kBr, Tile::kDim>(tile.q(slot), maps.q, q_full, q_row, now.head, batch);
      load_line(tile.base + Tile::kLayout.lse() + slot * P::kBr * 4, p.lse_log2 + row, P::kBr * 4, q_full);
      if constexpr (P::kQueryValues)
        load_line(tile.base + Tile::kLayout.values() + slot * P::kBr * 4, p.query_values + row, P::kBr * 4,
                  q_full);
      barrier_wait<P>(tile.dout_empty(dout_slot), i / Tile::kDoutStages & 1 ^ 1);
      // By dO those who clear know that nobody reads the keys before.
      if (first && !has_keys) await_kv_room();
      const int dout_bytes = Tile::kDoutBytes + P::kBr * 4 + (first && has_keys ? Tile::kVBytes : 0);
      if constexpr (Tile::kHasPlane) {
        expect_with_plane<P::kBr, Tile::kKeys>(p, maps, dout_full, dout_bytes,
                                               P::plane(p, sequence.head(p, now.head)), tile.plane(dout_slot),
                                               q_begin, kv_begin);
      } else {
        barrier_expect(dout_full, dout_bytes);
      }
      load_tile<P::kBr, Tile::kDimV>(tile.dout(dout_slot), maps.o, dout_full, q_row, now.head, batch);
      load_line(tile.base + Tile::kLayout.d() + slot * P::kBr * 4, p.d + row, P::kBr * 4, dout_full);
      if (first && has_keys) {
        const int kv_row = sequence.kv_row(kv_begin);
        await_kv_room();
        load_tile<Tile::kKeys, Tile::kDim>(tile.k(), maps.k, q_full, kv_row, work.h_kv, batch);
        if constexpr (Tile::kExchangesDs) {
          load_tile<Tile::kKeys, Tile::kDim / 2>(tile.other_k(), maps.k, q_full,
                                                 kv_row + Tile::kKeys - 2 * own, work.h_kv, batch,
                                                 tile.first_other_column() / kSliceColumns);
        }
        load_tile<Tile::kKeys, Tile::kDimV>(tile.v(), maps.v, dout_full, kv_row, work.h_kv, batch);
      }
      first = false;
      now = next;
      ++i;
    }
    ++n;
  }
  barrier_wait<P>(tile.q_empty(i % P::kStages), i / P::kStages & 1 ^ 1);
  tile.staged(i).head = -1;
  barrier_arrive(tile.q_full(i % P::kStages));
}

/// dK and dV of keys that no query attends to, of which no group hears. By whole warps, of any number. Of
/// parts without queries the join_gradients entry knows, and they are counted here alone.
template <class P>
__device__ __forceinline__ void write_keys_without_rows(const Params& p) {
  if (!P::kHasMask && !kLists<P> && !kForeignKeys<P> && !P::kInParts && p.seqlen_q > 0) return;
  const unsigned works = kv_works<P>(p), lane = threadIdx.x % 32;
  // Without queries there are no counters, and nobody waits.
  const auto take = [&](unsigned before) {
    if (p.seqlen_q == 0) return before + gridDim.x * 32;
    const unsigned number = lane == 0 ? atomicAdd(next_empty_work(p), 32) : 0u;
    return __shfl_sync(kWholeWarp, number, 0);
  };
  const auto is_empty = [&](const KvWork<P>& work) {
    const Sequence<P> sequence(p, work.b);
    return p.seqlen_q == 0 || QWalk<P>(p, sequence, work, block_keys<P>(p, 0)).next(p, sequence).head < 0;
  };
  const auto clear = [&](const KvWork<P>& work, const TensorParam& tensor, int columns) {
    const Sequence<P> sequence(p, work.b);
    const int first = work.kv_tile * P::kBc, rows = min(sequence.seqlen_kv(p) - first, P::kBc);
    unsigned short* to = sequence.kv_pointer(tensor, work.h_kv, first);
#pragma unroll 1
    for (int row = 0; row < rows; ++row)
      for (int chunk = lane; chunk < columns / 8; chunk += 32)
        *reinterpret_cast<uint4*>(to + row * tensor.stride_s + chunk * 8) = uint4{0, 0, 0, 0};
  };
#pragma unroll 1
  for (unsigned first = p.seqlen_q == 0 ? blockIdx.x * 32 : take(0); first < works; first = take(first)) {
    // Each lane looks at one.
    const bool empty = first + lane < works && is_empty(KvWork<P>(p, first + lane));
#pragma unroll 1
    for (unsigned left = __ballot_sync(kWholeWarp, empty); left != 0; left &= left - 1) {
      const KvWork<P> work(p, first + __ffs(static_cast<int>(left)) - 1);
      if constexpr (!P::kInParts) {
        clear(work, p.dk, P::kHeadDim);
        clear(work, p.dv, P::kHeadDimV);
      }
      if (p.seqlen_q > 0 && lane == 0) atomicAdd(done_of(p, work.b, work.h_kv), kDqParts<P>);
    }
  }
}

/// Starts S^T or dP^T, which `multiply` begins anew.
template <int kCount>
__device__ __forceinline__ void start_transposed(float (&c)[kCount], auto multiply) {
  pin(c);
  multiply_fence();
  multiply();
  multiply_commit();
  pin(c);
}

/// Adds one of two warps' share of what dS of Q tile n gives to gradients of captures. Those who compute wait
/// for that before they write dS of the next tile but one.
template <class P>
__device__ __forceinline__ void add_ds(const Params& p, const BackwardTile<P>& tile, unsigned n, int half) {
  using Tile = BackwardTile<P>;
  using Element = typename P::Element;
  barrier_wait<P>(tile.ds_full(n), n / 2 & 1);
  __syncwarp();  // one lane was adding dQ
  const typename Tile::QTile& now = tile.staged(n);
  if (now.head < 0) return;
  const typename Tile::Place& place = tile.place(n);
  const auto head = place.sequence.head(p, now.head);
  const int q = now.tile * P::kBr, kv = place.kv_begin;
  if constexpr (P::kDifferenceGrads > 0)
    sum_diagonals<Element, Tile::kKeys, P::kBr>(
        tile.ds(n), tile.zeros(), half, [&](int difference, float sum) {
          P::add_capture_grads(p, head, sum, 0.0f, position(0), position(kv - q + difference),
                               [&](auto which, float* at, float value) {
                                 if constexpr (which.kPlaces == Places::by_difference)
                                   add_by_runs(at, which.kOfScore ? sum : value);
                               });
        });
  if constexpr (Tile::kAddsPlane) {
    const PlaneGrad to = P::plane_grad(p, head);
    constexpr int kKeys = Tile::kKeys / 2;
    add_plane_grads<Element, Tile::kKeys, kKeys, P::kBr>(to, to.in_fours(p.seqlen_kv), tile.ds(n), q, kv,
                                                         half * kKeys);
  }
  barrier_arrive(tile.ds_added(n));
}

/// Says of a head that one more part of a KV tile's dQ has been added, for which this thread has waited.
__device__ __forceinline__ void count_done(int* done) {
  __threadfence();
  atomicAdd(done, 1);
}

/// A thread adds a group's parts of dQ to global memory. Wide, it also gives back the stages in which they
/// lay. Where there are gradients to add, its whole warp comes for them.
template <class P>
__device__ __forceinline__ void add_dq(const Params& p, const BackwardTile<P>& tile, int group) {
  using Tile = BackwardTile<P>;
  constexpr int kColumns = dq_columns(P::kHeadDim);
  const int first_column = tile.first_dq_column(group);
  const int steps = min(kColumns - first_column, Tile::kDqColumns) / 8;
  const bool one = !Tile::kAddsDs || elected();
  // When there is dQ of a tile, there is dS of so many more.
  constexpr int kAhead = Tile::kWide ? 0 : 1;
  if constexpr (Tile::kAddsDs && kAhead > 0) add_ds(p, tile, 0, group);
  for (unsigned n = 0;; ++n) {
    barrier_wait<P>(tile.dq_full(group), n & 1);
    const typename Tile::QTile& now = tile.staged(n);
    if (now.head < 0) break;
    // Now, since all that is known of the tile is gone when it is given back.
    int* done = now.last ? done_of(p, tile.place(n).sequence.b, tile.place(n).h_kv) : nullptr;
    float* to = p.dq_accum + (now.row + (Tile::kSplitRows ? group * kDqRows : 0)) * kColumns +
                first_column / 8 * kDqStep;
    const auto add_steps = [&](int first, int end) {
      if (first < min(end, steps))
        add_line(to + first * kDqStep, tile.dq(group, n % P::kStages, first),
                 (min(end, steps) - first) * kDqStepBytes);
    };
    if (one && now.first) await_cleared<P>(p, tile.place(n).sequence.b, tile.place(n).h_kv);
    int* turn = nullptr;
    if constexpr (P::kDeterministic) {
      turn = turn_of<P>(p, tile.place(n).sequence.b, now.head, now.tile, tile.dq_part(group));
      await_turn<P, 32>(turn, now.turn);
    }
    if (one) {
      add_steps(0, Tile::kDqInDout);
      add_steps(Tile::kDqInDout, Tile::kDqInDout + Tile::kDqInQ);
      add_steps(Tile::kDqInDout + Tile::kDqInQ, Tile::kDqSteps);
    }
    if constexpr (Tile::kAddsDs) add_ds(p, tile, n + kAhead, group);  // while that is read
    if (!one) continue;
    if constexpr (P::kDeterministic) {
      added_lines_done();
      __threadfence();
      atomicAdd(turn, 1);
    } else {
      bulk_wait_read();
    }
    barrier_arrive(tile.dq_empty(group));
    if constexpr (Tile::kWide) {
      if constexpr (!Tile::kExchangesDs) barrier_arrive(tile.dout_empty(n % P::kStages));
      barrier_arrive(tile.q_empty(n % P::kStages));
    }
    if (done != nullptr) {
      added_lines_done();
      count_done(done);
    }
  }
}

/// Of sixteen rows of dQ this lane's fragments of the columns that are this block's, summed up over the
/// blocks' parts, of which the first is at `parts`.
template <class P>
__device__ __forceinline__ void sum_parts(const char* parts,
                                          float (&sum)[BackwardTile<P>::kSummedSteps * 4]) {
  constexpr int kSteps = BackwardTile<P>::kSummedSteps;
#pragma unroll
  for (float& value : sum) value = 0.0f;
#pragma unroll
  for (int i = 0; i < BackwardTile<P>::kCluster * kSteps; ++i) {
    const float4 part = *reinterpret_cast<const float4*>(parts + i * kDqStepBytes);
    float* to = sum + i % kSteps * 4;
    to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w;
  }
}

/// A warp sums up those columns of a group's dQ that are this block's, of each Q tile, and writes them, or
/// adds them to global memory where there are more keys than the cluster has.
template <class P>
__device__ __forceinline__ void sum_dq(const Params& p, const BackwardTile<P>& tile, int group) {
  using Tile = BackwardTile<P>;
  constexpr int kSteps = Tile::kSummedSteps, kColumns = dq_columns(P::kHeadDim);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_column = tile.first_dq_column(group) + tile.rank() * kSteps * 8;
  const int first_row = Tile::kSplitRows ? group * kDqRows : 0;
#pragma unroll 1
  for (unsigned n = 0;; ++n) {
    const int phase = n / kDqSlots & 1;
    barrier_wait<P>(tile.dq_given(n), phase);
    const typename Tile::QTile& now = tile.staged(n);
    if (now.head < 0) break;
    const typename Tile::Place& place = tile.place(n);
    int* done = now.last ? done_of(p, place.sequence.b, place.h_kv) : nullptr;
    if (!writes_dq<P>(p) && now.first) await_cleared<P>(p, place.sequence.b, place.h_kv);
    const int row = now.tile * P::kBr + first_row + lane / 4, rows = place.sequence.seqlen_q(p) - row;
    unsigned short* to = place.sequence.q_pointer(p.dq, now.head, row) + first_column;
    float* sum_at = p.dq_accum + (now.row + first_row) * kColumns + first_column / 8 * kDqStep + lane * 4;
    const char* parts = tile.shared + (tile.dq_from(0, group, n) - tile.base) + lane * 16;
    if (lane == 0) barrier_expect(tile.dq_there(group, n), Tile::kDqSteps * kDqStepBytes);
    barrier_wait<P>(tile.dq_there(group, n), phase);
#pragma unroll 1
    for (int warp = 0; warp < 4; ++warp) {  // of the group, whose sixteen rows these are
      alignas(16) float sum[kSteps * 4];
      sum_parts<P>(parts + warp * kDqStepBytes / 4, sum);
      if (warp == 3) {
        barrier_arrive(tile.dq_read(n));
        __syncwarp();
        if (lane < Tile::kCluster && lane != tile.rank())
          barrier_arrive_remote(in_block(tile.dq_read(n), lane));
      }
      if (writes_dq<P>(p)) {
#pragma unroll
        for (float& value : sum) value *= p.softmax_scale;
        store_rows<typename P::Element>(sum, min(P::kHeadDim / 8 - first_column / 8, kSteps),
                                        to + warp * 16 * p.dq.stride_s, p.dq.stride_s, rows - warp * 16,
                                        lane);
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (first_column + step * 8 < kColumns)
            add_global(sum_at + step * kDqStep + warp * kDqStep / 4,
                       reinterpret_cast<const float4&>(sum[step * 4]));
      }
    }
    if (writes_dq<P>(p) || done == nullptr) continue;
    __threadfence();
    __syncwarp();
    if (lane == 0) count_done(done);
  }
}

/// Stores a group's part of dQ of Q tile n with the blocks that sum it up.
template <class P>
__device__ __forceinline__ void send_dq(const BackwardTile<P>& tile, unsigned n, int group,
                                        const float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
  using Tile = BackwardTile<P>;
  const unsigned place = tile.dq_from(tile.rank(), group, n) + threadIdx.x % 128 * 16;
#pragma unroll
  for (int block = 0; block < Tile::kCluster; ++block) {
    const unsigned to = in_block(place, block), there = in_block(tile.dq_there(group, n), block);
#pragma unroll
    for (int step = 0; step < Tile::kSummedSteps; ++step) {
      const float* part = dq + (block * Tile::kSummedSteps + step) * 4;
      store_remote(to + step * kDqStepBytes, float4{part[0], part[1], part[2], part[3]}, there);
    }
  }
}

/// Stores steps [kFirst, kEnd) of a group's dQ to shared memory.
template <int kFirst, int kEnd, class P>
__device__ __forceinline__ void stage_dq(const BackwardTile<P>& tile, int group, int slot,
                                         const float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
#pragma unroll
  for (int step = kFirst; step < kEnd; ++step)
    *reinterpret_cast<float4*>(tile.shared + (tile.dq(group, slot, step) - tile.base) +
                               threadIdx.x % 128 * 16) = {dq[step * 4], dq[step * 4 + 1], dq[step * 4 + 2],
                                                          dq[step * 4 + 3]};
}

/// Until what a group's dQ of Q tile n is stored over has been read.
template <class P>
__device__ __forceinline__ void await_dq_room(const BackwardTile<P>& tile, unsigned n, int group) {
  if constexpr (BackwardTile<P>::kSumsDq)
    barrier_wait<P>(tile.dq_read(n), n / kDqSlots & 1 ^ 1);
  else
    barrier_wait<P>(tile.dq_empty(group), (n & 1) ^ 1);
}

/// Gives what a group has stored of Q tile n, or the word that this was all, to those who add it or sum up.
template <class P>
__device__ __forceinline__ void give_dq(const BackwardTile<P>& tile, unsigned n, int group) {
  if constexpr (BackwardTile<P>::kSumsDq) {
    barrier_arrive(tile.dq_given(n));
  } else {
    publish_to_async_proxy();
    barrier_arrive(tile.dq_full(group));
  }
}

/// Gives a group's part of dQ of Q tile n, when what it overwrites has been read.
template <class P>
__device__ __forceinline__ void give_whole_dq(const BackwardTile<P>& tile, unsigned n, int group,
                                              const float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
  using Tile = BackwardTile<P>;
  await_dq_room(tile, n, group);
  if constexpr (Tile::kSumsDq)
    send_dq(tile, n, group, dq);
  else
    stage_dq<0, Tile::kDqSteps>(tile, group, n % P::kStages, dq);
  give_dq(tile, n, group);
}

/// Gives dS of Q tile i to the other block of the cluster: by one thread of the first group. The other has
/// read what that overwrites, since it has written dS of the tile before.
template <class P>
__device__ __forceinline__ void give_ds(const BackwardTile<P>& tile, unsigned i, int group) {
  if (group != 0 || threadIdx.x / 32 % 4 != 0 || !elected()) return;
  const int other = 1 - tile.rank();
  barrier_expect(tile.other_ds_full(i), BackwardTile<P>::kDsBytes);
  copy_remote(in_block(tile.other_ds(i), other), tile.ds(i), BackwardTile<P>::kDsBytes,
              in_block(tile.other_ds_full(i), other));
}

/// Starts S^T of Q tile i, whose descriptor is known.
template <class P, int kCount>
__device__ __forceinline__ void start_scores(const BackwardTile<P>& tile, int group, unsigned long long q,
                                             float (&s)[kCount]) {
  const unsigned long long k = tile_descriptor(tile.k() + BackwardTile<P>::first_row(group) * kRowBytes, 0);
  start_transposed(s, [&] { P::multiply_scores(s, k, q, 0); });
}

/// Whether what the score reads of a thread's keys is found before the products are awaited. Beside lengths
/// more columns leave no registers for it, unless it also reads of queries: then to find it pair by pair
/// takes more.
template <class P>
constexpr bool kFindsKeyValues = P::kKeyValues && (P::kHeadDim <= 64 || P::kQueryValues || !kForeignKeys<P>);

/// What a thread's pairs add to those gradients of captures that do not come from dS in shared memory.
template <class P>
using PairSums = CaptureSums<P::kCaptureGrads - BackwardTile<P>::kAddedGrads, 2>;

/// A group's part of P^T and dS^T of Q tile i, as left operands of a product. dS, and P where the other group
/// reads it, go to shared memory, too. `sums` takes what the pairs add to gradients of captures.
template <class P>
__device__ __forceinline__ void differentiate(const Params& p, const TensorMaps& maps,
                                              const BackwardTile<P>& tile, unsigned i, const StagedTile& now,
                                              int group, unsigned long long q_rows,
                                              float (&s)[BackwardTile<P>::kQueries / 2],
                                              unsigned (&probability)[BackwardTile<P>::kQueries / 16][4],
                                              unsigned (&gradient)[BackwardTile<P>::kQueries / 16][4],
                                              PairSums<P>& sums) {
  using Element = typename P::Element;
  using Tile = BackwardTile<P>;
  constexpr int kS = Tile::kQueries / 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_row = Tile::first_row(group), first_query = Tile::first_query(group);
  const int kv_row = first_row + warp * 16 + lane / 4;  // in the tile; and kv_row + 8
  const int slot = i % P::kStages, dout_slot = i % Tile::kDoutStages;
  const int h = now.head, q_begin = now.tile * P::kBr + first_query;
  // Of this thread's first query; opaque, so that the others' are offsets in the instructions.
  const int own = opaque((slot * P::kBr + first_query + lane % 4 * 2) * 4);
  const char* row_lse = tile.shared + Tile::kLayout.lse() + own;
  const char* row_d = tile.shared + Tile::kLayout.d() + own;
  [[maybe_unused]] const char* row_values = tile.shared + Tile::kLayout.values() + own;
  const Position q_position = position(q_begin + lane % 4 * 2);
  const Position kv_position = position(tile.kv_begin(i) + kv_row);
  const auto at_q = [&](int n) { return q_position + (n / 4 * 8 + n % 2); };
  const auto at_kv = [&](int n) { return kv_position + n / 2 % 2 * 8; };
  const Sequence<P>& sequence = tile.place(i).sequence;
  [[maybe_unused]] const auto head = sequence.head(p, h);
  if constexpr (P::kVarlen) {
    if (const int valid = sequence.seqlen_q(p) - now.tile * P::kBr; valid < P::kBr) {
      // The rows behind belong to the next sequence.
      // Here alone what copies of the loops would keep has no registers.
      const auto count = [](int known) {
        return Tile::kWide || Tile::kSumsDq || P::kHeadDim <= 64 ? known : opaque(known);
      };
      tile.await_dout(i);
      clear_rows<P::kBr, P::kHeadDim>(tile.shared + (tile.q(slot) - tile.base), valid,
                                      count(slices(P::kHeadDim)));
      clear_rows<P::kBr, P::kHeadDimV>(tile.shared + (tile.dout(dout_slot) - tile.base), valid,
                                       count(slices(P::kHeadDimV)));
      publish_to_async_proxy();
      named_barrier_sync(2 + group, 128);
    }
  }

  // Where this lane's row of the first four matrices of the plane's elements lies. Before dP takes its
  // registers.
  [[maybe_unused]] unsigned plane = 0;
  if constexpr (Tile::kHasPlane) {
    const CapturePlane of = P::plane(p, head);
    const int first_chunk = (first_row + warp * 16) / 8;
    if (!unit_copies(p, maps, of)) {
      const PlaneRows<P::kBr, Tile::kQueries, 16, 4> rows{tile.shared + (tile.plane(dout_slot) - tile.base),
                                                          of,
                                                          now.tile * P::kBr,
                                                          tile.kv_begin(i),
                                                          first_query,
                                                          first_chunk * 8};
      rows.start();
      rows.finish();
    }
    plane = tile.plane(dout_slot) +
            chunk_offset<P::kBr>(first_query + lane / 16 * 8 + lane % 8, first_chunk + lane / 8 % 2);
  }

  // What the score reads of this thread's keys.
  [[maybe_unused]] float of_key[2] = {};
  if constexpr (kFindsKeyValues<P>)
    for (int half = 0; half < 2; ++half) of_key[half] = P::key_value(p, head, at_kv(half * 2));

  float dp[kS];
  if constexpr (kForeignKeys<P>) start_scores(tile, group, q_rows, s);
  [[maybe_unused]] DroppedValues<kS> dropped;
  const auto draw = [&] { dropped.draw(p, sequence.b * p.heads_q + h, at_q(0).at, at_kv(0).at); };
  // Wide, registers suffice beside dP, too.
  if constexpr (P::kDropout && !Tile::kWide) draw();
  const bool partial = !now.full || tile.kv_begin(i) + Tile::kKeys > tile.kv_limit(p, i);
  tile.await_dout(i);
  const unsigned long long v = tile_descriptor(tile.v() + first_row * kRowBytes, 0),
                           dout = tile_descriptor(tile.dout(dout_slot) + first_query * kRowBytes, 0);
  start_transposed(dp, [&] { P::multiply_dp(dp, v, dout, 0); });
  if constexpr (P::kDropout && Tile::kWide) draw();
  TileMask<P, Tile::kQueries> mask;
  const auto row_at = [&](int half) { return kv_position.at + half * 8; };
  if (partial) mask.find(p, head, row_at, q_begin);

  // Bit n / 4: the map lets these eight queries attend. Its blocks are multiples of 16, so that they and a
  // warp's sixteen keys lie in one.
  [[maybe_unused]] unsigned blocks = ~0u;
  if constexpr (kTestsMap<P>) {
    if (partial) {
      const unsigned char* column =
          block_map_row<P>(p, sequence.b, h, 0) +
          min(tile.kv_begin(i) + kv_row - lane / 4, tile.kv_limit(p, i) - 1) / P::kBlockKv;
      // Lane i asks for the i-th eight queries.
      const int q = min(q_begin + lane % (kS / 4) * 8, sequence.seqlen_q(p) - 1);
      blocks = __ballot_sync(kWholeWarp, column[static_cast<long long>(q / P::kBlockQ) * p.map_columns] != 0);
    }
  }
  // Of sixteen queries of a tile in shared memory, [KV row][query], lane l says where row l % 8 of matrix l /
  // 8 is to be. The swizzle lets a step change two bits of the place.
  const int first_place =
      opaque(chunk_offset<Tile::kKeys>(first_row + warp * 16 + lane % 16, first_query / 8 + lane / 16));
  const auto store_step = [&](unsigned to, int step, const unsigned(&words)[4]) {
    store_matrices(to + (first_place ^ (step % 4 * 32)) + step / 4 * Tile::kKvSlice, words);
  };
  const float scale_log2 = scale_operand<P>(p);
  const auto at_pair = [](const char* row, int n) { return *reinterpret_cast<const float2*>(row + n * 8); };
  const float2 first_lse = at_pair(row_lse, 0), first_d = at_pair(row_d, 0);
  multiply_wait<0>();
  pin(s);
  pin(dp);
  // When dS of the tile before is there, what this one overwrites has been read. The first does not wait.
  if constexpr (!Tile::kWide) barrier_wait<P>(tile.ds_full(i - 1), (i - 1) / 2 & 1);
  if constexpr (Tile::kAddsDs) barrier_wait<P>(tile.ds_added(i), i / 2 & 1 ^ 1);
  const auto eight_queries_at_a_time = [&](auto masked) {
    const bool any = !masked.value || kTestsMask<P> || P::mask(p, head, q_position, kv_position);
    [[maybe_unused]] unsigned elements[4];
#pragma unroll
    for (int n = 0; n < kS; n += 4) {
      const float2 lse = n == 0 ? first_lse : at_pair(row_lse, n);
      const float2 d = n == 0 ? first_d : at_pair(row_d, n);
      // What the gradients want.
      [[maybe_unused]] float slope[4], dots[4];
      [[maybe_unused]] float2 of_queries{};
      if constexpr (P::kQueryValues) of_queries = at_pair(row_values, n);
      if constexpr (P::kHasScore) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float dot = dots[e] = s[n + e];
          if constexpr (Tile::kHasPlane) {
            if (n % 8 + e == 0) load_matrix_x4_transposed(elements, plane + n / 8 * 16 * kRowBytes);
            const auto element = static_cast<unsigned short>(elements[(n + e) % 8 / 2] >> e % 2 * 16);
            if constexpr (P::kScoreGrad)
              slope[e] = P::score_grad_of_element(p, head, dot, element, at_q(n + e), at_kv(n + e));
            s[n + e] = P::score_of_element(p, head, dot, element, at_q(n + e), at_kv(n + e));
          } else if constexpr (P::kQueryValues || P::kKeyValues) {
            const float of_query = e % 2 ? of_queries.y : of_queries.x;
            if constexpr (P::kKeyValues && !kFindsKeyValues<P>)
              of_key[e / 2] = P::key_value(p, head, at_kv(n + e));
            if constexpr (P::kScoreGrad)
              slope[e] =
                  P::score_grad_of_values(p, head, dot, of_query, of_key[e / 2], at_q(n + e), at_kv(n + e));
            s[n + e] = P::score_of_values(p, head, dot, of_query, of_key[e / 2], at_q(n + e), at_kv(n + e));
          } else {
            if constexpr (P::kScoreGrad) slope[e] = P::score_grad(p, head, dot, at_q(n + e), at_kv(n + e));
            s[n + e] = P::score(p, head, dot, at_q(n + e), at_kv(n + e));
          }
        }
      }
      if constexpr (masked.value) {
        const bool block = !kTestsMap<P> || (blocks >> (n / 4) & 1u) != 0;
        const auto columns = mask.columns(n * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[n + e] = mask_score(
              s[n + e], block, at_kv(n + e).at < tile.kv_limit(p, i),
              kTestsMask<P> ? mask.attends(p, head, e / 2, columns, e % 2, at_q(n + e), at_kv(n + e)) : any);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float probable = exp2_approx(fmaf(s[n + e], scale_log2, e % 2 ? -lse.y : -lse.x));
        const bool drop = P::kDropout && dropped[n + e];
        const float slope_of_p = !P::kDropout ? dp[n + e] : drop ? 0.0f : dp[n + e] * p.keep_scale;
        s[n + e] = drop ? 0.0f : probable;
        dp[n + e] = probable * (slope_of_p - (e % 2 ? d.y : d.x));
        if constexpr (P::kCaptureGrads > Tile::kAddedGrads)
          P::add_capture_grads(p, head, dp[n + e], dots[e], at_q(n + e), at_kv(n + e),
                               [&](auto which, float* at, float value) {
                                 if constexpr (!Tile::adds(which)) sums.of_key(e / 2)(which, at, value);
                               });
        // A slope may be anything where P is zero.
        if constexpr (P::kScoreGrad) dp[n + e] = probable == 0.0f ? 0.0f : dp[n + e] * slope[e];
      }
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        probability[n / 8][n % 8 / 2 + e / 2] = pack<Element>(s[n + e], s[n + e + 1]);
        gradient[n / 8][n % 8 / 2 + e / 2] = pack<Element>(dp[n + e], dp[n + e + 1]);
      }
      if (n % 8 == 0) continue;
      if constexpr (Tile::kWide) store_step(tile.p(i), n / 8, probability[n / 8]);
      store_step(tile.ds(i), n / 8, gradient[n / 8]);
    }
  };
  // Two copies, since a branch inside costs what it saves.
  if (partial)
    eight_queries_at_a_time(Flag<true>{});
  else
    eight_queries_at_a_time(Flag<false>{});
}

/// Starts a group's part of dQ of Q tile i.
template <class P>
__device__ __forceinline__ void start_dq(const BackwardTile<P>& tile, unsigned i, int group,
                                         float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
  using Tile = BackwardTile<P>;
  const int first_column = tile.first_dq_column(group);
  const auto multiply_keys = [&](unsigned ds, unsigned k, int column, bool add) {
    const unsigned long long left = tile_descriptor(ds, Tile::kKvSlice);
    const unsigned long long right = tile_descriptor(Tile::column(k, column, Tile::kKvSlice), Tile::kKvSlice);
    P::multiply_dq(dq, left, right, add);
  };
  pin(dq);
  multiply_fence();
  multiply_keys(tile.ds(i) + (Tile::kSplitRows ? group * Tile::kKvSlice : 0), tile.k(), first_column, false);
  if constexpr (Tile::kExchangesDs) {
    const int first_loaded = tile.first_other_column() / kSliceColumns * kSliceColumns;
    multiply_keys(tile.other_ds(i), tile.other_k(), first_column - first_loaded, true);
  }
  multiply_commit();
  pin(dq);
}

/// Starts a group's part of dV and then of dK of Q tile i.
template <class P>
__device__ __forceinline__ void start_gradients(
    const BackwardTile<P>& tile, unsigned i, int group,
    const unsigned (&probability)[BackwardTile<P>::kQueries / 16][4],
    const unsigned (&gradient)[BackwardTile<P>::kQueries / 16][4], float (&dk)[BackwardTile<P>::kOwnDim / 2],
    float (&dv)[BackwardTile<P>::kOwnDimV / 2]) {
  using Tile = BackwardTile<P>;
  const auto own_columns = [&](unsigned at, int columns) {
    return tile_descriptor(Tile::column(at, Tile::kWide ? group * columns : 0, Tile::kQSlice), Tile::kQSlice);
  };
  const unsigned long long dout = own_columns(tile.dout(i % Tile::kDoutStages), Tile::kOwnDimV);
  const unsigned long long q = own_columns(tile.q(i % P::kStages), Tile::kOwnDim);
  pin(dv);
  pin(dk);
  multiply_fence();
  if constexpr (Tile::kWide) {
    // The summed queries are the columns of P^T and dS^T.
    const unsigned long long p_tile = tile_descriptor(tile.p(i), 0), ds_tile = tile_descriptor(tile.ds(i), 0);
    P::multiply_dv(dv, p_tile, dout, 1);
    multiply_commit();
    P::multiply_dk(dk, ds_tile, q, 1);
  } else {
    P::multiply_dv(dv, probability, dout, 1);
    multiply_commit();
    P::multiply_dk(dk, gradient, q, 1);
  }
  multiply_commit();
}

/// Clears what stands behind the last key: it may be anything, and zero times anything is not zero.
template <class P>
__device__ __forceinline__ void clear_foreign_keys(const Params& p, const BackwardTile<P>& tile, unsigned i,
                                                   int group) {
  using Tile = BackwardTile<P>;
  const int own = tile.rank() * Tile::kKeys, valid = tile.kv_limit(p, i) - tile.kv_begin(i);
  if (valid + own >= P::kBc) return;
  tile.await_dout(i);
  clear_rows<Tile::kKeys, P::kHeadDim>(tile.shared + Tile::kLayout.k(), valid);
  clear_rows<Tile::kKeys, P::kHeadDimV>(tile.shared + Tile::kLayout.v(), valid);
  if constexpr (Tile::kExchangesDs)
    clear_rows<Tile::kKeys, Tile::kDim / 2>(tile.shared + Tile::kLayout.other_k(),
                                            valid - Tile::kKeys + 2 * own);
  publish_to_async_proxy();
  named_barrier_sync(2 + group, 128);
}

/// Stores a group's part of dK or dV, or what a part of the queries gives to it, and clears it for the next
/// KV tile.
template <class P, int kCount>
__device__ __forceinline__ void store_gradient(const Params& p, const BackwardTile<P>& tile, unsigned i,
                                               int group, float (&c)[kCount], int columns, float scale,
                                               const TensorParam& to, float* parts) {
  constexpr int kChunks = kCount / 4;  // of a group
  const auto& place = tile.place(i);
  const int first_chunk = BackwardTile<P>::kWide ? group * kChunks : 0;
  const int thread = thread_now(),
            row = tile.kv_begin(i) + BackwardTile<P>::first_row(group) + own_row(thread);
#pragma unroll
  for (float& value : c) value *= scale;
  const int chunks = min(columns / 8 - first_chunk, kChunks), rows = place.sequence.seqlen_kv(p) - row;
  if constexpr (P::kInParts) {
    const int part = tile.staged(i).last - 1;
    const long long at =
        kv_row_of_part(p, part, place.sequence.b, place.h_kv, row) * columns + first_chunk * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half * 8 < rows) store_row<kChunks>(parts + at + half * 8 * columns, half, c, chunks);
  } else {
    store_rows<typename P::Element>(c, chunks,
                                    place.sequence.kv_pointer(to, place.h_kv, row) + first_chunk * 8,
                                    to.stride_s, rows, thread);
  }
#pragma unroll
  for (float& value : c) value = 0.0f;
}

template <class P>
__device__ __forceinline__ void consume(const Params& p, const TensorMaps& maps, const BackwardTile<P>& tile,
                                        int group) {
  using Tile = BackwardTile<P>;
  constexpr int kSteps = Tile::kQueries / 16;
  float dk[Tile::kOwnDim / 2] = {}, dv[Tile::kOwnDimV / 2] = {};
  // One counter for stage, phase and buffer: registers are short.
  unsigned i = 0;
  const auto q_rows_of = [&](unsigned j) {
    return tile_descriptor(tile.q(j % P::kStages) + Tile::first_query(group) * kRowBytes, 0);
  };
  unsigned long long q_rows = q_rows_of(0);
  float s[Tile::kQueries / 2];
#pragma unroll 1
  for (;; ++i) {
    const int slot = i % P::kStages;
    barrier_wait<P>(tile.q_full(slot), i / P::kStages & 1);
    // Also when there is no tile: then nobody looks at the scores of what is there.
    if constexpr (!kForeignKeys<P>) start_scores(tile, group, q_rows, s);
    const typename Tile::QTile& now = tile.staged(i);
    if (now.head < 0) break;
    if (kForeignKeys<P> && now.first) clear_foreign_keys(p, tile, i, group);
    unsigned probability[kSteps][4], gradient[kSteps][4];
    PairSums<P> sums;
    differentiate(p, maps, tile, i, now, group, q_rows, s, probability, gradient, sums);
    q_rows = q_rows_of(i + 1);
    float dq[Tile::kDqColumns / 2];
    bool last;
    if constexpr (Tile::kWide) {
      sums.end();
      publish_to_async_proxy();
      barrier_arrive(tile.ds_full(i));
      barrier_wait<P>(tile.ds_full(i), i / 2 & 1);
      if constexpr (Tile::kExchangesDs) {
        give_ds(tile, i, group);
        start_gradients(tile, i, group, probability, gradient, dk, dv);
        multiply_wait<1>();
        pin(dv);
        barrier_arrive(tile.dout_empty(i % Tile::kDoutStages));
        barrier_wait<P>(tile.other_ds_full(i), i / 2 & 1);
        start_dq(tile, i, group, dq);
        last = now.last;
        multiply_wait<0>();
        pin(dk);
        pin(dq);
        await_dq_room(tile, i, group);
      } else {
        start_dq(tile, i, group, dq);
        start_gradients(tile, i, group, probability, gradient, dk, dv);
        last = now.last;
        multiply_wait<1>();
        pin(dq);
        pin(dv);
        await_dq_room(tile, i, group);
        stage_dq<0, Tile::kDqInDout>(tile, group, slot, dq);
        multiply_wait<0>();
        pin(dk);
      }
      stage_dq<Tile::kDqInDout, Tile::kDqSteps>(tile, group, slot, dq);
      give_dq(tile, i, group);
    } else {
      // Before the first tile there is none: then nobody looks at the result, but a branch would serialise.
      start_dq(tile, i - 1, group, dq);
      start_gradients(tile, i, group, probability, gradient, dk, dv);
      publish_to_async_proxy();  // dS, which nobody has read yet: the products need not wait for it
      const bool first = now.first;
      multiply_wait<2>();
      pin(dq);
      barrier_arrive(tile.ds_full(i));
      if (!first) give_whole_dq(tile, i - 1, group, dq);
      last = now.last;
      sums.end();  // under the products
      multiply_wait<0>();
      pin(dk);
      pin(dv);
      // Every thread says for itself that it has read LSE, D and what the stage holds.
      barrier_arrive(tile.dout_empty(slot));
      barrier_arrive(tile.q_empty(slot));
      if (last) {
        barrier_wait<P>(tile.ds_full(i), i / 2 & 1);
        start_dq(tile, i, group, dq);
        multiply_wait<0>();
        pin(dq);
        barrier_arrive(tile.kv_empty());
        give_whole_dq(tile, i, group, dq);
      }
    }
    if (last) {
      if (Tile::kWide) barrier_arrive(tile.kv_empty());
      store_gradient(p, tile, i, group, dk, P::kHeadDim, p.softmax_scale, p.dk, p.dk_parts);
      store_gradient(p, tile, i, group, dv, P::kHeadDimV, P::kDropout ? p.keep_scale : 1.0f, p.dv,
                     p.dv_parts);
    }
  }
  multiply_wait<0>();
  pin(s);
  if constexpr (Tile::kAddsDs && !Tile::kWide) barrier_arrive(tile.ds_full(i));  // that this was all
  await_dq_room(tile, i, group);
  give_dq(tile, i, group);
}

template <class P>
__device__ void backward(const Params& p, const TensorMaps& maps) {
  using Tile = BackwardTile<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  // Through a shuffle, as ptxas else asks for it again in each step, before the first product.
  const Tile tile(shared, __shfl_sync(kWholeWarp, shared_address(shared), 0));

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(tile.ds_full(buffer), Tile::kGroups * 128);
      if constexpr (Tile::kAddsDs) barrier_init(tile.ds_added(buffer), 2 * 32);
    }
    for (int slot = 0; slot < P::kStages; ++slot) {
      barrier_init(tile.q_full(slot), 1);
      barrier_init(tile.dout_full(slot), 1);
      barrier_init(tile.q_empty(slot), Tile::kGroups * (Tile::kWide ? 1 : 128));
      barrier_init(tile.dout_empty(slot), Tile::kGroups * (Tile::kWide && !Tile::kExchangesDs ? 1 : 128));
    }
    for (int group = 0; group < Tile::kGroups; ++group) {
      barrier_init(tile.dq_full(group), Tile::kSumsDq ? Tile::kGroups * 128 : 128);
      barrier_init(tile.dq_empty(group), Tile::kSumsDq ? Tile::kGroups * (32 + Tile::kCluster - 1) : 1);
    }
    if constexpr (Tile::kSumsDq)
      for (int n = 0; n < kDqSlots; ++n)
        for (int group = 0; group < Tile::kGroups; ++group) barrier_init(tile.dq_there(group, n), 1);
    barrier_init(tile.kv_empty(), Tile::kGroups * 128);
    if constexpr (P::kDifferenceGrads > 0)
      *reinterpret_cast<uint4*>(shared + Tile::kLayout.zeros()) = uint4{0, 0, 0, 0};
    if constexpr (Tile::kExchangesDs)
      for (int buffer = 0; buffer < 2; ++buffer) barrier_init(tile.other_ds_full(buffer), 1);
    if constexpr (Tile::kCluster > 1)
      for (int n = 0; n < kToldWorks; ++n) barrier_init(tile.told_full(n), 1);
    barrier_init_fence();
  }
  if constexpr (Tile::kCluster > 1)
    cluster_sync();
  else
    __syncthreads();
  await_grid_before<P>();

  // A block stays as long as the other may write to its shared memory, or read from it.
  const auto leave = [] {
    if constexpr (Tile::kCluster > 1) cluster_sync();
  };
  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    lower_register_limit<Tile::kHelperRegisters>();
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < 3) {
      const bool whole = (Tile::kAddsDs || Tile::kSumsDq) && warp > 0;
      if (!whole && !elected()) return;
      if (warp == 0)
        produce(p, tile, maps);
      else if constexpr (Tile::kSumsDq)
        sum_dq(p, tile, warp - 1);
      else
        add_dq(p, tile, warp - 1);
      leave();
      return;
    }
    write_keys_without_rows<P>(p);
  } else {
    raise_register_limit<Tile::kConsumerRegisters>();
    consume(p, maps, tile, group - 1);
    lower_register_limit<Tile::kHelperRegisters>();
  }
  // Whoever computes comes for the last heads'.
  if (!writes_dq<P>(p)) convert_dq<P>(p);
  leave();
}

}  // namespace flashjit::sm90
