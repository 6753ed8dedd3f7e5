// The parts of a consumer's step in the forward pass: products, waits and releases of pipeline stages, the
// bias tile, dropout. forward.cuh puts them together. `n` counts KV tiles and `round` work tiles since the
// kernel's start: see ForwardStorage.
#pragma once

#include "flashjit/sm90/forward_epilogue.cuh"
#include "flashjit/sm90/forward_mask.cuh"
#include "flashjit/sm90/forward_rings.cuh"
#include "flashjit/sm90/forward_scores.cuh"
#include "flashjit/sm90/forward_weights.cuh"
#include "flashjit/tma/bias_tile.cuh"

namespace flashjit::sm90 {

// A thread's accumulators of S and O, and P as the left operand of P V.
template <class P>
using SAccumulator = float[P::kBc / 2];
template <class P>
using OAccumulator = float[kOwnColumns<P> / 2];
template <class P>
using POperand = unsigned[P::kBc / (kCodeProducts<P> ? 32 : 16)][4];

// --- Products ---------------------------------------------------------------------------------------------

/// wgmma's descriptors of K of tile n and of V of the tile before, found a step ahead, so that a warpgroup
/// starts its products as soon as it passes the ping-pong barrier.
template <class P>
__device__ __forceinline__ void find_descriptors(const ForwardStorage<P>& smem, int n, int wg,
                                                 unsigned long long& k, unsigned long long& v) {
  using Storage = ForwardStorage<P>;
  if (kVDescriptorFromK<P>)
    v = k + (tile_descriptor(smem.v(0), Storage::kSliceBytes) - tile_descriptor(smem.k(0), 0));
  else
    v = tile_descriptor(smem.v(n - 1) + first_column<P>(wg) / kSliceColumns * Storage::kSliceBytes,
                        Storage::kSliceBytes);
  k = tile_descriptor(smem.k(n), 0);
}
/// S = Q K^T
template <class P>
__device__ __forceinline__ void start_qk(SAccumulator<P>& s, unsigned long long q, unsigned long long k) {
  constexpr int kStatements = kOneStatementPerProduct<P> ? 1 : (kQkColumns<P> + 15) / 16;
  pin(s);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kStatements; ++step) {
    // Four steps of 16 columns (32 bytes) make a slice.
    const int q_offset = step / 4 * kWarpgroupRows * kRowBytes + step % 4 * 32;
    const int k_offset = step / 4 * ForwardStorage<P>::kSliceBytes + step % 4 * 32;
    P::multiply_scores(s, q + (q_offset >> 4), k + (k_offset >> 4), step > 0);
  }
  wgmma_commit();
  pin(s);
}
/// O += P V, or O = P V if `adds` is 0; the next one adds.
template <class P>
__device__ __forceinline__ void start_pv(OAccumulator<P>& o, POperand<P>& p_operand, unsigned long long v,
                                         int& adds) {
  constexpr int kStatements = kOneStatementPerProduct<P> ? 1 : P::kBc / 16,
                kParts = pv_parts(kOwnColumns<P>, kLoadsCodes<P>, false, P::kMinBlocks),
                kValues = kOwnColumns<P> / 2 / kParts, kSlices = slices(kOwnColumns<P>) / kParts;
  pin(o);
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int step = 0; step < kStatements; ++step)
      P::multiply_output(reinterpret_cast<float(&)[kValues]>(o[part * kValues]), &p_operand[step],
                         v + (part * kSlices * ForwardStorage<P>::kSliceBytes + step * 16 * kRowBytes >> 4),
                         step > 0 ? 1 : adds);
  adds = 1;
  pin(o);
}

// --- Pipeline ---------------------------------------------------------------------------------------------

/// Ping-pong: the warpgroups of a slot alternate in starting products.
template <class P>
__device__ __forceinline__ void ping_pong_wait(const ForwardStorage<P>& smem, int wg) {
  if (ForwardStorage<P>::kWarpgroups > 1) named_barrier_sync(smem.ping_pong(wg), 256);
}
template <class P>
__device__ __forceinline__ void ping_pong_arrive(const ForwardStorage<P>& smem, int wg) {
  if (ForwardStorage<P>::kWarpgroups > 1)
    named_barrier_arrive(smem.ping_pong(wg + 1 == ForwardStorage<P>::kWarpgroups ? 0 : wg + 1), 256);
}
/// `ready`: the barrier was polled in the step before.
template <class P>
__device__ __forceinline__ void wait_k(const ForwardStorage<P>& smem, int n, bool ready) {
  if (!ready) KRing<P>::wait_full(smem, n);
  if (kGathers<P> && !kLoadsCodes<P>) publish_to_async_proxy();
}
// The rest of the wait when V of tile n has arrived; VArrival<P> names one of these types.

/// Converters have written it, and published that.
template <class P>
struct ConvertedV {
  static __device__ __forceinline__ void end(const ForwardStorage<P>&, const int&, const int&,
                                             const RowState<P>&, const int&) {}
};
/// Threads have copied it, with zeros behind the last key.
template <class P>
struct GatheredV {
  static __device__ __forceinline__ void end(const ForwardStorage<P>&, const int&, const int&,
                                             const RowState<P>&, const int&) {
    publish_to_async_proxy();
  }
};
/// It is cleared behind the last key that exists: it may be NaN, which P = 0 does not hide.
template <class P>
struct CopiedV {
  static __device__ __forceinline__ void end(const ForwardStorage<P>& smem, const int& n, const int& wg,
                                             const RowState<P>& rows, const int& kv_begin) {
    if (const int valid = rows.seqused_kv - kv_begin; kOutOfRangeKeys<P> && valid < P::kBc) {
      clear_rows<P::kBc, P::kHeadDimV>(smem.shared + (smem.v(n) - smem.base), valid);
      publish_to_async_proxy();
      named_barrier_sync(smem.warpgroup_barrier(wg), 128);
    }
  }
};
template <class P>
using VArrival =
    Conditional<kLoadsCodes<P>, ConvertedV<P>, Conditional<kGathers<P>, GatheredV<P>, CopiedV<P>>>;

/// Waits for V of tile n. `rows` and `kv_begin` are still tile n's.
template <class P>
__device__ __forceinline__ void wait_v(const ForwardStorage<P>& smem, int n, bool ready, int wg,
                                       const RowState<P>& rows, int kv_begin) {
  if (!ready) VRing<P>::wait_full(smem, n);
  VArrival<P>::end(smem, n, wg, rows, kv_begin);
}
/// Releases K of tile n, unless V is the same memory, which VRing releases. `last_of_q`: and Q, if that has
/// one stage.
template <class P>
__device__ __forceinline__ void release_k(const ForwardStorage<P>& smem, int n, int wg, int round,
                                          bool last_of_q) {
  if (kThreadsReleaseK<P>)
    KRing<P>::release_thread(smem, n);
  else if (!P::kSharedKv)
    KRing<P>::release(smem, n);
  if (ForwardStorage<P>::kQStages == 1 && last_of_q) QRing<P>::release(smem, wg, round);
}
/// Looks whether K of tile n + 1 and V of tile n are there already.
template <class P>
__device__ __forceinline__ void poll(const ForwardStorage<P>& smem, int n, bool& k_ready, bool& v_ready) {
  // Not is_full(): n + 1 as one value changes the order of code
  // (NOTES.md#ptxas-orders-equal-sources-differently).
  k_ready = barrier_ready(smem.k_full(n + 1), smem.phase(n + 1));
  if (kPollsV<P>) v_ready = VRing<P>::is_full(smem, n);
}
/// What the score reads: the bias tile, or the column terms.
template <class P>
__device__ __forceinline__ void wait_terms(const ForwardStorage<P>& smem, int n) {
  if (P::kBiasTile || P::kScoreColumnTerm) TermsRing<P>::wait_full(smem, n);
}
template <class P>
__device__ __forceinline__ void release_terms(const ForwardStorage<P>& smem, int n) {
  if (P::kBiasTile)
    TermsRing<P>::release(smem, n);
  else if (P::kScoreColumnTerm)
    TermsRing<P>::release_thread(smem, n);
}

/// Waits for S of tile n, releases its K, and waits for what its scores read.
template <class P>
__device__ __forceinline__ void end_qk(const ForwardStorage<P>& smem, SAccumulator<P>& s, int n, int wg,
                                       int round, bool last_of_q) {
  wgmma_wait<1>();
  pin(s);
  if constexpr (P::kKeyScales) scale_keys(s, smem.key_scales(n) + threadIdx.x % 4 * 2);
  release_k(smem, n, wg, round, last_of_q);
  wait_terms(smem, n);
}

// --- Q ----------------------------------------------------------------------------------------------------

/// Converts a warpgroup's rows of Q in shared memory to fp16, each times the power of two that brings its
/// largest element next to fp16's largest: values 2^39 times smaller are lost. Each four lanes convert the
/// two rows that they have in accumulators; `undo` is what makes scores of these.
template <class P>
__device__ __forceinline__ void convert_q(const ForwardStorage<P>& smem, int wg, int round,
                                          float (&undo)[2]) {
  constexpr int kChunks = 2 * slices(P::kHeadDim);
  char* tile = smem.shared + (smem.q(wg, round) - smem.base);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own_row() + half * 8;
    // Neighbouring rows at different chunks, so that banks are different.
    const auto chunk = [&](int i) -> uint4& {
      const int at = static_cast<int>(threadIdx.x) % 4 + (i + row) % 2 * 4;
      return *reinterpret_cast<uint4*>(tile + (i / 2 * kWarpgroupRows + row) * kRowBytes + at * 16);
    };
    int largest = 0;  // as bits, which of floats without sign are ordered as these
#pragma unroll 2
    for (int i = 0; i < kChunks; ++i) {
      const uint4 eight = chunk(i);
      for (const unsigned two : {eight.x, eight.y, eight.z, eight.w})
        largest = max(largest, max(two << 16 & 0x7fff0000u, two & 0x7fff0000u));
    }
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 1));
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 2));
    const int exponent = max(largest >> 23, 15);
    const float factor = __int_as_float((268 - exponent) << 23);
    undo[half] = __int_as_float((exponent - 14) << 23);
#pragma unroll 2
    for (int i = 0; i < kChunks; ++i) {
      using Element = typename P::Element;
      const auto converted = [&](unsigned two) {
        return pack<fp16>(low_of<Element>(two) * factor, high_of<Element>(two) * factor);
      };
      const uint4 eight = chunk(i);
      chunk(i) = {converted(eight.x), converted(eight.y), converted(eight.z), converted(eight.w)};
    }
  }
  publish_to_async_proxy();
  named_barrier_sync(smem.warpgroup_barrier(wg), 128);
}

// --- KV tiles ---------------------------------------------------------------------------------------------

/// Waits for a work tile and its Q; `i` becomes its last KV tile's number. Whether there is one.
template <class P>
__device__ __forceinline__ bool next_work_tile(const ForwardStorage<P>& smem, int wg, int round, int& i,
                                               int& entry) {
  QRing<P>::wait_full(smem, wg, round);
  const WorkTile<P>& work = smem.work(round);
  i = work.count() - 1;
  if (kConsumersReadList<P> && i >= 0) entry = work.kv_tiles.entry(i);
  return work.h >= 0;
}

/// Whether any of the warpgroup's rows visit tile n, as its list entry says.
template <class P>
__device__ __forceinline__ bool visits(const ForwardStorage<P>& smem, int n, int wg) {
  return (smem.entry(n) >> (kListedRowsBit + wg) & 1) != 0;
}
/// Whether a warpgroup computes tile n: it skips the KV tiles that only other warpgroups' rows visit. But it
/// computes one of each work tile, so that O and LSE are written, and skips no more than there are stages,
/// since its last V waits for its next step: else nothing could be loaded. `last` is the tile that it
/// computed last.
template <class P>
__device__ __forceinline__ bool computes_tile(const ForwardStorage<P>& smem, int n, int wg, int last,
                                              bool only_one) {
  const bool must = n - last >= P::kStages || only_one;
  return __any_sync(kWholeWarp, must || visits(smem, n, wg)) != 0;
}
/// Keeps the pipeline going for tile n without computing it.
template <class P>
__device__ __forceinline__ void skip_tile(const ForwardStorage<P>& smem, int n, int wg, int round,
                                          bool last_of_q) {
  ping_pong_wait(smem, wg);
  ping_pong_arrive(smem, wg);
  KRing<P>::release_thread(smem, n);
  if (ForwardStorage<P>::kQStages == 1 && last_of_q) QRing<P>::release(smem, wg, round);
  VRing<P>::wait_full(smem, n);
  VRing<P>::release(smem, n);
}
/// The same for KV tiles i to 0 of a work tile.
template <class P>
__device__ __forceinline__ void skip_tiles(const ForwardStorage<P>& smem, int n, int wg, int round, int i) {
  for (; i >= 0; --i, ++n) {
    ping_pong_wait(smem, wg);
    ping_pong_arrive(smem, wg);
    KRing<P>::wait_full(smem, n);
    if (!P::kSharedKv) release_k(smem, n, wg, round, false);
    VRing<P>::wait_full(smem, n);
    VRing<P>::release(smem, n);
    wait_terms(smem, n);
    release_terms(smem, n);
  }
}
/// The tail-wave split: keeps the pipeline going for KV tiles i to 0 of a work tile in which only other
/// warpgroups have rows.
template <class P>
__device__ __forceinline__ void skip_work_tile(const ForwardStorage<P>& smem, int n, int wg, int round,
                                               int i) {
  if (i >= 0) {
    QRing<P>::release(smem, wg, round);
    VRing<P>::release(smem, n - 1);
  }
  skip_tiles(smem, n, wg, round, i);
}
// Whether all pairs of tile n attend, whose keys begin at `kv_begin`; TileFullness<P> names one of these
// types.

/// By the bits of its list of keys.
template <class P>
struct FullByKeys {
  static __device__ __forceinline__ void find(const Params&, const ForwardStorage<P>& smem,
                                              const WorkTile<P>&, RowState<P>& rows, const int& n, const int&,
                                              const int&, bool& full, const int&) {
    rows.present = smem.present_keys(n);
    full = true;
    for (int word = 0; word < P::kBc / 32; ++word) full = full && rows.present[word] == ~0u;
  }
};
/// The tile's entry tells, if the warpgroup's rows visit it: a tile that is not visited is masked whole.
template <class P>
struct FullIfVisited {
  static __device__ __forceinline__ void find(const Params& p, const ForwardStorage<P>& smem,
                                              const WorkTile<P>& work, RowState<P>& rows, const int& n,
                                              const int& wg, const int&, bool& full, const int& entry) {
    static_assert(kProducerPostsEntries<P>);
    const bool visited = visits(smem, n, wg);
    full = visited && is_full(entry);
    rows.seqused_kv = visited ? work.sequence.seqused_kv(p) : 0;
  }
};
/// By its entry.
template <class P>
struct FullByEntry {
  static __device__ __forceinline__ void find(const Params&, const ForwardStorage<P>&, const WorkTile<P>&,
                                              RowState<P>&, const int&, const int&, const int&, bool& full,
                                              const int& entry) {
    full = is_full(entry);
  }
};
/// By the mask's bounds, or as the KV tiles say.
template <class P>
struct FullByMask {
  static __device__ __forceinline__ void find(const Params& p, const ForwardStorage<P>&,
                                              const WorkTile<P>& work, RowState<P>& rows, const int&,
                                              const int&, const int& kv_begin, bool& full, const int& entry) {
    full = kv_begin + P::kBc <= rows.full_keys.end &&
           (kFullTilesByBounds<P> ? rows.full_keys.begin <= kv_begin
                                  : work.kv_tiles.full(p, rows.head, rows.q, entry));
  }
};
template <class P>
using TileFullness =
    Conditional<P::kIndices, Conditional<P::kJoinsLists, FullByKeysOfRows<P>, FullByKeys<P>>,
                Conditional<kEntriesHaveRowBits<P>, FullIfVisited<P>,
                            Conditional<kProducerPostsEntries<P>, FullByEntry<P>, FullByMask<P>>>>;

/// Finds the keys of tile n, KV tile i of its work tile, and whether all pairs attend.
template <class P>
__device__ __forceinline__ void find_tile(const Params& p, const ForwardStorage<P>& smem,
                                          const WorkTile<P>& work, RowState<P>& rows, int n, int i, int wg,
                                          int& kv_begin, bool& full, int& entry) {
  if (!kConsumersReadList<P>) entry = kProducerPostsEntries<P> ? smem.entry(n) : work.kv_tiles.entry(i);
  kv_begin = tile_of_entry<P>(entry) * P::kBc;
  TileFullness<P>::find(p, smem, work, rows, n, wg, kv_begin, full, entry);
  if (kConsumersReadList<P> && i > 0) entry = work.kv_tiles.entry(i - 1);
}
/// This lane's address in the bias tile. Where TMA cannot load the tile, each warp loads its own rows: it
/// starts before it waits for anything else, and finishes under the products.
template <class P, class Fill>
__device__ __forceinline__ void fill_bias(const Params& p, const TensorMaps& maps,
                                          const ForwardStorage<P>& smem, const WorkTile<P>& work, int n,
                                          int i, int wg, unsigned& bias, const Fill& fill) {
  if constexpr (P::kBiasTile) {
    const BiasTile of = P::bias_tile(p, work.sequence.head(p, work.h));
    const int row = wg * kWarpgroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
    if (!tma_loads_bias_tile(p, maps, of))
      fill(BiasTileRows<P::kBr, kWarpRows, P::kBc, 8>{smem.shared + (smem.bias_tile(n) - smem.base), of,
                                                      work.q_begin, work.kv_begin(i), row, 0});
    const int lane = threadIdx.x % 32;
    bias = smem.bias_tile(n) + chunk_offset<P::kBr>(row + lane % 16, lane / 16);
  }
}

// --- Dropout and P ----------------------------------------------------------------------------------------

/// Draws what dropout drops of 16 keys of P.
template <class P>
__device__ __forceinline__ void draw_dropout(const Params& p, const WorkTile<P>& work,
                                             const RowState<P>& rows, int kv_begin, int keys,
                                             unsigned (&dropped)[4]) {
  drop_masks<P>(dropped, p, dropout_head<P>(p, work.sequence.b, work.h), rows.first_query(),
                kv_begin + keys * 16 + static_cast<int>(threadIdx.x) % 4 * 2);
}

// --- From S to P, and O -----------------------------------------------------------------------------------

/// P = exp2(S - m) of tile n; O is multiplied by `rescale` then.
template <class P, int kValues>
__device__ __forceinline__ void weigh_tile(const Params& p, const ForwardStorage<P>& smem,
                                           const WorkTile<P>& work, RowState<P>& rows, int n, int kv_begin,
                                           unsigned bias, bool full, bool first, float (&scores)[kValues],
                                           float (&rescale)[2]) {
  if (kSkipsIdleWarps<P> && rows.warp_is_idle()) {
    rescale[0] = rescale[1] = 1.0f;
    return release_terms(smem, n);
  }
  scale_products(rows, rows, scores);
  ScoreStage<P>::apply(p, rows, kv_begin, bias, smem.column_terms(n) + threadIdx.x % 4 * 2, scores);
  release_terms(smem, n);
  RowWeights<P>::weigh(p, work, rows, kv_begin, full, first, scores, rescale);
}
/// O of the next work tile: zero, or the first P V overwrites it.
template <class P>
__device__ __forceinline__ void begin_o(OAccumulator<P>& o, int& adds) {
  if (kFirstPvOverwritesO<P>) {
    adds = 0;
  } else {
#pragma unroll
    for (int value = 0; value < kOwnColumns<P> / 2; ++value) o[value] = 0.0f;
  }
}
/// The end of a CTA's last work tile, whose last P V has been started.
template <class P>
__device__ __forceinline__ void end_last_work_tile(const Params& p, const TensorMaps& maps,
                                                   const ForwardStorage<P>& smem, const WorkTile<P>& work,
                                                   int wg, RowState<P>& rows, RunningState<P>& state,
                                                   float (&scale)[2], OAccumulator<P>& o) {
  wgmma_commit();
  RowWeights<P>::finalize(p, work, rows, wg, scale, state);
  wgmma_wait<0>();
  pin(o);
  store_o(p, maps, smem, work, wg, state, scale, o);
  if (kTmaStoresO<P> && elected()) bulk_wait_read();  // before the next CTA gets this shared memory
}

}  // namespace flashjit::sm90
