// The backward pass: how the warp groups share a tile, and what lies where in shared memory.
#pragma once

#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm90/dq_fragments.cuh"
#include "flashjit/sm90/fragment.cuh"

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

}  // namespace flashjit::sm90
