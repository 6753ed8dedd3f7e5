// The main loops of the forward pass above 256 columns of V, where two warpgroups share 64 rows of Q. The
// first computes S and P of them, and its half of the columns of O; it hands P on through shared memory to
// the second, which computes the other half. So S is computed once, and the second one's products run under
// the first one's softmax.
//
//   first    S(n)  softmax(n)         P V left(n)  S(n + 1)  softmax(n + 1)
//   second         P V right(n - 1)                          P V right(n)
#pragma once

#include "flashjit/sm90/forward_mainloop.cuh"

namespace flashjit::sm90 {

/// V of a tile of its own, or the right half of K's: both are in the stage's second load.
template <class P>
__device__ __forceinline__ void wait_v_stage(const ForwardStorage<P>& smem, int n) {
  VRing<P>::wait_full(smem, n);
  if (kGathers<P> && !kLoadsCodes<P>) publish_to_async_proxy();
}
/// Clears a warpgroup's columns of V behind the last of `keys`: they may be NaN, which P = 0 does not hide.
template <class P>
__device__ __forceinline__ void clear_own_v(const ForwardStorage<P>& smem, int n, int wg, int keys) {
  if constexpr (kOutOfRangeKeys<P> && !kGathers<P>) {
    if (keys >= P::kBc) return;
    const unsigned columns = smem.v(n) + first_column<P>(wg) / kSliceColumns * ForwardStorage<P>::kSliceBytes;
    clear_rows<P::kBc, kOwnColumns<P>>(smem.shared + (columns - smem.base), keys);
    publish_to_async_proxy();
    named_barrier_sync(smem.warpgroup_barrier(wg), 128);
  }
}
/// wgmma's descriptor of these columns.
template <class P>
__device__ __forceinline__ unsigned long long own_v_descriptor(const ForwardStorage<P>& smem, int n, int wg) {
  using Storage = ForwardStorage<P>;
  return tile_descriptor(smem.v(n) + first_column<P>(wg) / kSliceColumns * Storage::kSliceBytes,
                         Storage::kSliceBytes);
}

/// S = Q K^T of tile n. If the tile comes in halves, the right one may come later.
template <class P>
__device__ __forceinline__ void start_wide_qk(const ForwardStorage<P>& smem, int n, unsigned long long q,
                                              SAccumulator<P>& s) {
  const unsigned long long k = tile_descriptor(smem.k(n), 0);
  const auto multiply = [&](TileHalf half) {
#pragma unroll
    for (int step = 0; step < (P::kHeadDim + 15) / 16; ++step) {
      if (!is_in_half<P>(half, step / 4)) continue;
      const int q_offset = step / 4 * kWarpgroupRows * kRowBytes + step % 4 * 32,
                k_offset = step / 4 * ForwardStorage<P>::kSliceBytes + step % 4 * 32;
      P::multiply_scores(s, q + (q_offset >> 4), k + (k_offset >> 4), step > 0);
    }
  };
  pin(s);
  wgmma_fence();
  multiply(kKHalf<P>);
  if constexpr (kTileInHalves<P>) {
    wait_v_stage(smem, n);
    multiply(TileHalf::right);
  }
  pin(s);
}
/// O += P V, or O = P V if `adds` is 0, with P in shared memory.
template <class P>
__device__ __forceinline__ void start_wide_pv(const ForwardStorage<P>& smem, int n, OAccumulator<P>& o,
                                              int adds) {
  constexpr int kParts = pv_parts(kOwnColumns<P>, kLoadsCodes<P>, false, P::kMinBlocks),
                kValues = kOwnColumns<P> / 2 / kParts, kSlices = slices(kOwnColumns<P>) / kParts;
  const unsigned long long v = own_v_descriptor(smem, n, 1), p_tile = tile_descriptor(smem.p_tile(), 0);
  pin(o);
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int step = 0; step < P::kBc / 16; ++step)
      P::multiply_output_of_tile(
          reinterpret_cast<float(&)[kValues]>(o[part * kValues]),
          p_tile + (step / 4 * kWarpgroupRows * kRowBytes + step % 4 * 32 >> 4),
          v + (part * kSlices * ForwardStorage<P>::kSliceBytes + step * 16 * kRowBytes >> 4),
          step > 0 ? 1 : adds);
  pin(o);
}

/// Says that P is full, or empty. racecheck does not follow arrivals: see tests/gpu/sanitize.sh.
template <class P>
__device__ __forceinline__ void arrive_for_p(int barrier) {
  if (P::kCheckWaits)
    named_barrier_sync(barrier, 256);
  else
    named_barrier_arrive(barrier, 256);
}
/// Hands P on, with what O must be multiplied by, and `scale` after the work tile's last KV tile.
template <class P>
__device__ __forceinline__ void hand_p_on(const ForwardStorage<P>& smem, const POperand<P>& p_operand,
                                          const float (&rescale)[2], const float (&scale)[2], int keys) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const unsigned address =
      smem.p_tile() + chunk_offset<kWarpgroupRows>(warp * kWarpRows + lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < P::kBc / 16; ++step)  // of two chunks of eight columns
    store_matrices((address ^ (step % 4 * 32)) + step / 4 * kWarpgroupRows * kRowBytes, p_operand[step]);
  PHandoff& handoff = smem.handoff();
  if (lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      handoff.rescale[own_row() + half * 8] = rescale[half];
      handoff.scale[own_row() + half * 8] = scale[half];
    }
  }
  if (lane == 0 && warp == 0) handoff.keys = keys;
  publish_to_async_proxy();
  arrive_for_p<P>(smem.p_full());
}

/// The first warpgroup.
template <class P>
__device__ __forceinline__ void consume_left(const Params& p, const TensorMaps& maps,
                                             const ForwardStorage<P>& smem) {
  constexpr int wg = 0;
  int round = 0, i = 0, n = 0;  // the work tile; the KV tile among its own, whose last is 0, and among all
  RowState<P> rows;
  int kv_begin = 0;   // the first key of the KV tile
  bool full = false;  // every pair of the KV tile attends
  int entry = 0;      // of the KV tile's list; read a step ahead where consumers read it
  OAccumulator<P> o;
  SAccumulator<P> s;
  POperand<P> p_operand;
  float rescale[2], scale[2] = {};
  RunningState<P> state;
  bool held = false;  // the second warpgroup's P V
  const auto let_pv_start = [&] {
    if (held) named_barrier_arrive(smem.may_start_pv(), 256);
    held = false;
  };
  const auto next_work = [&] { return next_work_tile(smem, wg, round, i, entry); };
  const auto start_s = [&] {
    const bool ready = KRing<P>::is_full(smem, n);
    if (!__all_sync(kWholeWarp, ready)) let_pv_start();
    wait_k(smem, n, ready);
    start_wide_qk<P>(smem, n, tile_descriptor(smem.q(wg, round), 0), s);
  };
  const auto pack_p = [&] {
    as_left_operand<typename P::Element>(p_operand, s);
    if constexpr (P::kDropout) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) {
        unsigned dropped[4];
        draw_dropout(p, smem.work(round), rows, kv_begin, keys, dropped);
#pragma unroll
        for (int r = 0; r < 4; ++r) p_operand[keys][r] &= ~dropped[r];
      }
    }
  };
  bool more = next_work();
  if (more) start_s();
  wgmma_commit();
  for (bool first = true; more;) {  // a step, `first` being a work tile's first
    if (first) rows.begin(p, smem.work(round), wg);
    find_tile(p, smem, smem.work(round), rows, n, i, wg, kv_begin, full, entry);
    const bool last = i == 0;
    wgmma_wait<0>();  // S is there
    pin(s);
    if (last) QRing<P>::release(smem, wg, round);
    if (!kTileInHalves<P>) release_k(smem, n, wg, round, false);
    let_pv_start();
    wait_terms(smem, n);
    ScoreStage<P>::apply(p, rows, kv_begin, 0, smem.column_terms(n) + threadIdx.x % 4 * 2, s);
    release_terms(smem, n);
    online_softmax<ScoreMask<P>>(p, smem.work(round), rows, kv_begin, full, false, s,
                                 rescale);                                 // P = exp2(S - m)
    if (last) finalize_rows(p, smem.work(round), rows, wg, scale, state);  // LSE = m + log(l)
    pack_p();
    if (n > 0) named_barrier_sync(smem.p_empty(), 256);
    hand_p_on(smem, p_operand, rescale, scale, rows.seqused_kv - kv_begin);
    held = kHoldsPv<P>;
    if (!first) rescale_o<P>(o, rescale);  // O *= exp2(m before - m)
    if (!kTileInHalves<P>) wait_v_stage(smem, n);
    clear_own_v(smem, n, wg, rows.seqused_kv - kv_begin);
    int adds = first ? 0 : 1;
    start_pv<P>(o, p_operand, own_v_descriptor(smem, n, wg), adds);  // O += P V
    wgmma_commit();
    ++n;
    if (last)
      ++round, more = next_work();
    else
      --i;
    if (more) start_s();  // S = Q K^T of the next KV tile, which may be another work tile's
    wgmma_commit();
    wgmma_wait<1>();  // O is there
    pin(o);
    release(kTileInHalves<P> ? smem.k_empty(n - 1) : smem.v_empty(n - 1));
    if (last) {
      store_o(p, maps, smem, smem.work(round - 1), wg, state, scale, o);  // O / l
    }
    first = last;
  }
  let_pv_start();
  if (n > 0) named_barrier_sync(smem.p_empty(), 256);  // an arrival that nothing else waits for
}

/// The second warpgroup.
template <class P>
__device__ __forceinline__ void consume_right(const Params& p, const TensorMaps& maps,
                                              const ForwardStorage<P>& smem) {
  constexpr int wg = 1;
  const int row = own_row();
  const PHandoff& handoff = smem.handoff();
  OAccumulator<P> o;
  int n = 0;
  for_each_work_tile(smem, [&](const WorkTile<P>& work) {
    float scale[2];
    int adds = 0;
    for (int i = work.count(); i > 0; --i, ++n) {
      named_barrier_sync(smem.p_full(), 256);
      const float rescale[2] = {handoff.rescale[row], handoff.rescale[row + 8]};
      scale[0] = handoff.scale[row], scale[1] = handoff.scale[row + 8];
      if (adds) rescale_o<P>(o, rescale);  // O *= exp2(m before - m)
      wait_v_stage(smem, n);
      clear_own_v(smem, n, wg, handoff.keys);
      if (kHoldsPv<P>) named_barrier_sync(smem.may_start_pv(), 256);
      start_wide_pv(smem, n, o, adds);  // O += P V
      adds = 1;
      wgmma_commit();
      wgmma_wait<0>();
      pin(o);
      VRing<P>::release(smem, n);
      arrive_for_p<P>(smem.p_empty());
    }
    store_o(p, maps, smem, work, wg, RunningState<P>(), scale, o);  // O / l
  });
}

template <class P>
struct WideConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const ForwardStorage<P>& smem, int wg) {
    if (wg == 0)
      consume_left(p, maps, smem);
    else
      consume_right(p, maps, smem);
  }
};

}  // namespace flashjit::sm90
