// Shared memory of a CTA of the backward pass: tiles and barriers by name, and how many threads arrive
// on each barrier. BackwardLayout in layout.cuh decides where each lies.
#pragma once

#include "flashjit/sm90/backward_policy.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

/// What the producer posts about a KV tile.
template <class P>
struct KvTileInfo {
  Sequence<P> sequence;
  int h_kv;
  int kv_begin;    ///< this CTA's first key
  int seqused_kv;  ///< keys of the sequence that are no padding
};
/// QTileInfo::full where rows have a large LSE, which then is in natural units: common/lse_log2.cuh.
constexpr int kLargeLse = -1;
/// What it posts about a Q tile. A negative head: there are no more.
struct alignas(16) QTileInfo : StagedTile {
  long long stats_row;  ///< its first row in [batch, heads_q, seqlen_q_padded]
  int kv_slot;          ///< where its KV tile's KvTileInfo is
  short first;          ///< whether it is its KV tile's first
  short last;           ///< 0 if it is not its KV tile's last, else 1 + the index of the query split
};

/// Addresses are of the shared window, in bytes. Q tiles are counted by `i` and KV tiles by `n`, each from
/// the CTA's first on: stage, buffer and phase follow from the count, since registers are short.
template <class P>
struct BackwardSmem {
  using Policy = BackwardPolicy<P>;
  static constexpr BackwardLayout kLayout = Policy::kLayout;
  static constexpr int kQBytes = tile_bytes(Policy::kStageRows, Policy::kDim);
  static constexpr int kDoutBytes = tile_bytes(Policy::kStageRows, Policy::kDimV);
  /// What arrives in a stage, beside K, V and the bias tile.
  static constexpr int kQStageBytes = kQBytes + (P::kScoreRowTerm ? 2 : 1) * Policy::kStageRows * 4;
  static constexpr int kDoutStageBytes = kDoutBytes + Policy::kStageRows * 4;
  static constexpr int kKBytes = tile_bytes(Policy::kKeys, Policy::kDim);
  static constexpr int kVBytes = tile_bytes(Policy::kKeys, Policy::kDimV);
  static constexpr int kOtherKBytes = tile_bytes(Policy::kKeys, kLayout.other_columns());
  static constexpr int kDsBytes = tile_bytes(Policy::kKeys, Policy::kStageRows);
  /// From one 64 columns of a tile to the next.
  static constexpr int kKvSlice = Policy::kKeys * kRowBytes, kQSlice = P::kBr * kRowBytes;
  static_assert(sizeof(KvTileInfo<P>) == kKvTileInfoBytes && sizeof(QTileInfo) == kQTileInfoBytes);

  char* shared;
  unsigned base;  ///< its address

  __device__ BackwardSmem(char* memory, unsigned address) : shared(memory), base(address) {}

  /// A slot, of the first one's.
  __device__ __forceinline__ BackwardSmem at_slot(int slot) const {
    const int offset = Policy::kSlots > 1 ? slot * kLayout.bytes_of_slot() : 0;
    return BackwardSmem(shared + offset, base + offset);
  }

  __device__ __forceinline__ char* pointer(unsigned address) const { return shared + (address - base); }
  /// A column of a tile at `tile`.
  static __device__ unsigned column(unsigned tile, int column, int slice_bytes) {
    return tile + column / kSliceColumns * slice_bytes + column % kSliceColumns * 2;
  }

  // The KV tile. Where CTAs exchange dS, also half of the columns of the other CTA's K.
  __device__ unsigned k() const { return base + kLayout.k(); }
  __device__ unsigned v() const { return base + kLayout.v(); }
  __device__ unsigned other_k() const { return base + kLayout.other_k(); }
  static __device__ int first_other_column() {
    return Policy::rank() * ((Policy::kDim - Policy::kFifthSlice) / 2);
  }

  // The stages: Q with LSE and the score's row term, dO with D and the bias tile.
  __device__ unsigned q(int stage) const { return base + kLayout.q() + stage * kQBytes; }
  __device__ unsigned lse(int stage) const { return base + kLayout.lse() + stage * Policy::kStageRows * 4; }
  __device__ unsigned row_terms(int stage) const { return base + kLayout.row_terms() + stage * P::kBr * 4; }
  __device__ unsigned dout(int stage) const { return base + kLayout.dout() + stage * kDoutBytes; }
  __device__ unsigned d(int stage) const { return base + kLayout.d() + stage * Policy::kStageRows * 4; }
  __device__ unsigned bias_tile(int stage) const {
    return base + kLayout.bias_tile() + stage * kLayout.bias_tile_bytes();
  }
  // The same rows' values, from byte `at` of all stages' on.
  __device__ const char* lse_at(int at) const { return shared + kLayout.lse() + at; }
  __device__ const char* d_at(int at) const { return shared + kLayout.d() + at; }
  __device__ const char* row_terms_at(int at) const { return shared + kLayout.row_terms() + at; }

  // dS and, wide, P of Q tile i; the other CTA's dS. Two buffers each, or one where CTAs split columns or K
  // has five slices.
  __device__ unsigned ds(unsigned i) const {
    return base + kLayout.ds() + i % kLayout.ds_buffers() * kDsBytes;
  }
  __device__ unsigned p(unsigned i) const { return base + kLayout.p() + i % kLayout.ds_buffers() * kDsBytes; }
  __device__ unsigned other_ds(unsigned i) const {
    return base + kLayout.other_ds() + i % (Policy::kOtherDsOverP ? 1 : 2) * kDsBytes;
  }
  /// Where CTAs split columns, the other CTA's S and then dP of those pairs whose P this one computes.
  __device__ unsigned partial_sums(int wg) const {
    return base + kLayout.partial_sums() + wg * kLayout.partial_sums_bytes();
  }
  __device__ unsigned zeros() const { return base + kLayout.zeros(); }

  /// A step of a warpgroup's dQ. Wide, its first steps overlap what this warpgroup alone reads of the
  /// stage's dO and Q, half of their columns, and are stored when it has read them. The thread that adds dQ
  /// to global memory then releases the stage.
  __device__ unsigned dq(int wg, int stage, int step) const {
    if (step < Policy::kDqStepsInDout)
      return dout(stage) + wg * (Policy::kDqStepsInDout * kDqStepBytes) + step * kDqStepBytes;
    step -= Policy::kDqStepsInDout;
    if (step < Policy::kDqStepsInQ)
      return q(stage) + wg * (Policy::kDqStepsInQ * kDqStepBytes) + step * kDqStepBytes;
    return base + kLayout.dq() + wg * kLayout.dq_bytes(0) + (step - Policy::kDqStepsInQ) * kDqStepBytes;
  }
  /// Where CTAs sum up dQ: CTA `from`'s partial dQ of Q tile i, in the columns of a warpgroup that this
  /// CTA sums up.
  __device__ unsigned dq_from(int from, int wg, unsigned i) const {
    return base + kLayout.dq() +
           ((i % kDqSlots * Policy::kWgs + wg) * Policy::kClusterSize + from) * Policy::kSummedSteps *
               kDqStepBytes;
  }
  /// From byte `at` of the first CTA's on.
  __device__ const char* partial_dq(int wg, unsigned i, int at) const {
    return shared + (dq_from(0, wg, i) - base) + at;
  }

  // What the producer posts about tiles.
  __device__ KvTileInfo<P>* kv_tiles() const {
    return reinterpret_cast<KvTileInfo<P>*>(shared + kLayout.kv_tiles());
  }
  __device__ QTileInfo& q_tile(unsigned i) const {
    return reinterpret_cast<QTileInfo*>(shared + kLayout.q_tiles())[i % kKeptQTiles];
  }
  /// The KV tile of Q tile i: read again where needed, since registers are short.
  __device__ const KvTileInfo<P>& kv_tile_of(unsigned i) const { return kv_tiles()[q_tile(i).kv_slot]; }
  __device__ int kv_begin(unsigned i) const { return kv_tile_of(i).kv_begin; }
  __device__ int seqused_kv(const Params& params, unsigned i) const {
    return kOutOfRangeKeys<P> ? kv_tile_of(i).seqused_kv : params.seqlen_kv;
  }
  /// The index of the cluster's n-th KV tile, from its first CTA.
  __device__ unsigned tile_index(unsigned n) const {
    return base + kLayout.tile_indices() + n % kKeptTileIndices * 4;
  }

  // Barriers: "full" when there is something to read, "empty" when it has been read.
  __device__ __forceinline__ unsigned barrier(int number) const {
    return base + kLayout.barriers() + number * 8;
  }
  // The stages. The first Q tile's of a KV tile are K's (with Q) and V's (with dO), too.
  __device__ unsigned q_full(int stage) const { return barrier(kLayout.stage_barriers(stage)); }
  __device__ unsigned q_empty(int stage) const { return q_full(stage) + 8; }
  __device__ unsigned dout_full(int stage) const { return q_full(stage) + 16; }
  __device__ unsigned dout_empty(int stage) const { return q_full(stage) + 24; }
  /// Both warpgroups are done with the KV tile.
  __device__ unsigned kv_empty() const { return barrier(kLayout.kv_barrier()); }
  /// Both warpgroups have written dS and P of Q tile i, and have read dS and P of the tile before.
  __device__ unsigned ds_full(unsigned i) const { return barrier(kLayout.ds_barriers()) + i % 2 * 8; }
  /// What dS of Q tile i gives to gradients of captures is added.
  __device__ unsigned ds_added(unsigned i) const { return kv_empty() + (1 + i % 2) * 8; }
  /// A warpgroup's dQ, on its way to global memory.
  __device__ unsigned dq_full(int wg) const { return barrier(kLayout.dq_barriers() + wg * 2); }
  __device__ unsigned dq_empty(int wg) const { return dq_full(wg) + 8; }
  // Where CTAs sum up dQ of Q tile i, instead of these: this CTA has sent its partial dQ (or there is no such
  // tile); all CTAs have read what they were sent; and all CTAs' partial dQ is here.
  static_assert(kDqSlots <= kDqWgs, "these are the warpgroups' barriers");
  __device__ unsigned dq_sent(unsigned i) const { return dq_full(i % kDqSlots); }
  __device__ unsigned dq_read(unsigned i) const { return dq_empty(i % kDqSlots); }
  __device__ unsigned partial_dq_full(int wg, unsigned i) const {
    return tile_index_full(0) + (kKeptTileIndices + i % kDqSlots * Policy::kWgs + wg) * 8;
  }
  /// Where CTAs find row stats: all of the cluster's are found.
  __device__ unsigned row_stats_full() const {
    return barrier(kLayout.exchange_barriers() + kDqSlots * Policy::kWgs);
  }
  /// Where CTAs exchange dS: the other CTA's of Q tile i is here. It is sent when that of the tile before
  /// has been read.
  __device__ unsigned other_ds_full(unsigned i) const {
    return barrier(kLayout.exchange_barriers()) + i % 2 * 8;
  }
  // With one buffer: the other CTA has read P of Q tile i, so that dS may be sent there; and it has read the
  // dS that it was sent.
  __device__ unsigned other_p_read() const { return barrier(kLayout.exchange_barriers() + 2); }
  __device__ unsigned sent_ds_read() const { return barrier(kLayout.exchange_barriers() + 3); }
  /// Where CTAs split columns: the other CTA's partial sums for a warpgroup are here.
  __device__ unsigned partial_sums_full(int wg) const {
    return barrier(kLayout.exchange_barriers()) + wg * 8;
  }
  __device__ unsigned tile_index_full(unsigned n) const {
    return barrier(kLayout.tile_index_barriers()) + n % kKeptTileIndices * 8;
  }

  /// Makes `count` barriers, from `first` on.
  static __device__ __forceinline__ void init_each(int count, unsigned first, int arrivals) {
    for (int n = 0; n < count; ++n) barrier_init(first + n * 8, arrivals);
  }
  /// Makes the barriers that the kernel uses, and the zeros. By one thread.
  __device__ __forceinline__ void init() const {
    constexpr int kConsumers = Policy::kWgs * 128;
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(ds_full(buffer), kConsumers);
      init_each(Policy::kReadsDs, ds_added(buffer), 2 * 32);
    }
    // Wide, the threads that add dQ release the stage, one for each warpgroup.
    for (int stage = 0; stage < P::kStages; ++stage) {
      barrier_init(q_full(stage), 1);
      barrier_init(dout_full(stage), 1);
      barrier_init(q_empty(stage), Policy::kAdderReleases ? Policy::kWgs : kConsumers);
      barrier_init(dout_empty(stage),
                   Policy::kAdderReleases && !Policy::kExchangesDs ? Policy::kWgs : kConsumers);
    }
    // Where dQ is summed up, a warp for each warpgroup reads it in every CTA of the cluster.
    for (int wg = 0; wg < Policy::kWgs; ++wg) {
      barrier_init(dq_full(wg), Policy::kSumsDq ? kConsumers : 128);
      barrier_init(dq_empty(wg), Policy::kSumsDq ? Policy::kWgs * (32 + Policy::kClusterSize - 1) : 1);
    }
    init_each(Policy::kSumsDq ? kDqSlots * Policy::kWgs : 0, partial_dq_full(0, 0), 1);
    init_each(P::kFindsRowStats, row_stats_full(), Policy::kClusterSize * kRowStatsWarps);
    barrier_init(kv_empty(), kConsumers);
    if constexpr (P::kDifferenceGrads > 0)
      *reinterpret_cast<uint4*>(shared + kLayout.zeros()) = uint4{0, 0, 0, 0};
    init_each(Policy::kExchangesDs ? 2 : 0, other_ds_full(0), 1);
    init_each(Policy::kOtherDsOverP, other_p_read(), kConsumers / 32);
    init_each(Policy::kOtherDsOverP, sent_ds_read(), 1);
    init_each(Policy::kSplitsColumns ? Policy::kWgs : 0, partial_sums_full(0), 1);
    init_each(Policy::kClusterSize > 1 ? kKeptTileIndices : 0, tile_index_full(0), 1);
    barrier_init_fence();
  }

  /// Says that this thread has stored its part of P and dS of Q tile i. Where CTAs split columns, the other
  /// CTA sends half of both.
  __device__ __forceinline__ void signal_ds(unsigned i) const {
    if (Policy::kSplitsColumns && threadIdx.x == 128)
      barrier_expect(ds_full(i), kDsBytes);
    else
      barrier_arrive(ds_full(i));
  }
  /// Says to the other CTA that this warp has read P, and, by one thread, that this CTA has read the dS that
  /// it was sent.
  __device__ __forceinline__ void signal_p_read() const {
    if (threadIdx.x % 32 == 0) barrier_arrive_remote(in_cta(other_p_read(), 1 - Policy::rank()));
  }
  __device__ __forceinline__ void signal_ds_read() const {
    if (threadIdx.x == 128) barrier_arrive_remote(in_cta(sent_ds_read(), 1 - Policy::rank()));
  }
};

}  // namespace flashjit::sm90
