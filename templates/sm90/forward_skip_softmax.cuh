// Skip-softmax in the forward pass: a warpgroup decides for its own 64 rows whether a KV tile's exponentials
// and P V are left out. The consumers' loop is the one of forward.cuh, but the P V that a step starts may be
// missing. V of a skipped tile arrives and is released all the same.
#pragma once

#include "flashjit/common/skip_softmax.cuh"
#include "flashjit/sm90/forward_mainloop.cuh"
#include "flashjit/sm90/forward_weights.cuh"

namespace flashjit::sm90 {

/// The largest score of each of a thread's rows in a KV tile, and whether any row of the warp wants it.
template <class P>
__device__ __forceinline__ bool find_tile_max(const Params& p, const RowState<P>& rows,
                                              const SAccumulator<P>& s, float (&tile_max)[2]) {
  bool wanted = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = -infinity();
#pragma unroll
    for (int n = 2 * half; n < P::kBc / 2; n += 4) highest = max_or_nan(highest, max_or_nan(s[n], s[n + 1]));
    tile_max[half] = max_or_nan_of_quad(highest);
    const bool exists = rows.first_query() + half * rows.to_second() < rows.q.end;
    wanted |= exists && wants_tile(p, tile_max[half], rows.max[half], exponent_scale(p, rows, half));
  }
  return wanted;
}

/// What online_softmax() makes of S, bit by bit, where the KV tile's maxima are known: P = exp2(S * scale -
/// m), with m and l carried on, and what O must be multiplied by.
template <class P>
__device__ __forceinline__ void weigh_wanted(const Params& p, RowState<P>& rows, const float (&tile_max)[2],
                                             SAccumulator<P>& s, float (&rescale)[2]) {
  const ScoreUnit<P> unit(p, rows, 0, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = exponent_scale(p, rows, half), before = rows.max[half];
    const float highest = fmaxf(before, tile_max[half]), of_m = exponent_factor<P>(highest, scale);
    const float shift = highest == -infinity() ? 0.0f : __fmul_rn(highest, of_m);
    const float factor = P::kNearMinScores ? unit.near_min_factor(of_m, scale) : unit.factor(scale);
    float sum = 0.0f;
#pragma unroll
    for (int n = 2 * half; n < P::kBc / 2; n += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[n + e] = exp2_approx(fmaf(s[n + e], factor, -shift));
        sum += s[n + e];
      }
    rescale[half] = before == -infinity() ? 0.0f : exp2_approx(__fmul_rn(before, of_m) - shift);
    rows.max[half] = highest;
    rows.sum[half] = rows.sum[half] * rescale[half] + sum;
  }
}

/// S becomes P = exp2(S - m), unless no row of the warpgroup wants the KV tile: whether one does. A work
/// tile's `first` KV tile is always computed, so that there is an O.
template <class P>
__device__ __forceinline__ bool weigh_unless_far(const Params& p, const WorkTile<P>& work, RowState<P>& rows,
                                                 int barrier, int kv_begin, bool full, bool first,
                                                 SAccumulator<P>& s, float (&rescale)[2]) {
  const bool idle = kSkipsIdleWarps<P> && rows.warp_is_idle();
  if (!full && !idle) ScoreMask<P>::apply(p, work, rows, kv_begin, s);
  rescale[0] = rescale[1] = 1.0f;
  float tile_max[2];
  bool wanted = !idle && find_tile_max<P>(p, rows, s, tile_max);
  // The vote lets ptxas see that all lanes branch alike: else it may serialise products.
  wanted = first || __any_sync(kWholeWarp, named_barrier_any(barrier, 128, wanted));
  if (wanted && !idle) weigh_wanted<P>(p, rows, tile_max, s, rescale);
  return wanted;
}

/// Waits for S of KV tile n, releases K, and makes scores of S.
template <class P>
__device__ __forceinline__ void find_scores(const Params& p, const ForwardStorage<P>& smem,
                                            const RowState<P>& rows, int n, int wg, int round, bool last_of_q,
                                            int kv_begin, unsigned bias, SAccumulator<P>& s) {
  end_qk(smem, s, n, wg, round, last_of_q);
  scale_products(rows, rows, s);
  ScoreStage<P>::apply(p, rows, kv_begin, bias, smem.column_terms(n) + threadIdx.x % 4 * 2, s);
  release_terms(smem, n);
}

/// As PlainConsumer; `wanted` says of the KV tile before whether it has a P V to start.
template <class P>
__device__ __forceinline__ void consume_wanted(const Params& p, const TensorMaps& maps,
                                               const ForwardStorage<P>& smem, int wg) {
  static_assert(!kConvertsQ<P> && !kEntriesHaveRowBits<P>, "the planner leaves these out");
  using Storage = ForwardStorage<P>;
  int round = 0, i = 0, n = 0, kv_begin = 0, entry = 0, skipped = 0;
  bool full = false, wanted = false;
  RowState<P> rows;
  OAccumulator<P> o = {};
  SAccumulator<P> s;
  POperand<P> p_operand;
  unsigned bias = 0;
  unsigned long long q_tile, k_tile = 0, v_tile;
  bool k_ready = false;
  int adds = 0;  // whether the next P V adds to O
  float rescale[2], scale[2];
  RunningState<P> state;
  const auto start_o = [&] {  // O += P V of the KV tile before
    if (__any_sync(kWholeWarp, wanted)) {
      wait_v(smem, n - 1, false, wg, rows, kv_begin);
      start_pv<P>(o, p_operand, v_tile, adds);
    }
    wgmma_commit();
  };
  const auto start_products = [&] {
    wait_k(smem, n, k_ready);
    ping_pong_wait(smem, wg);
    start_qk<P>(s, q_tile, k_tile);  // S = Q K^T
    start_o();
    ping_pong_arrive(smem, wg);
  };
  const auto release_v_tile = [&] {
    if (!wanted) barrier_wait<P>(smem.v_full(n - 1), smem.phase(n - 1));
    release(smem.v_empty(n - 1));
  };
  const auto fill = [&](auto how) { fill_bias(p, maps, smem, smem.work(round), n, i, wg, bias, how); };
  const auto start_bias = [&] { fill([](const auto& warp_rows) { warp_rows.start(); }); };
  // From S, which is under way, to P.
  const auto weigh = [&](bool first) {
    find_descriptors(smem, n + 1, wg, k_tile, v_tile);
    find_tile(p, smem, smem.work(round), rows, n, i, wg, kv_begin, full, entry);
    fill([](const auto& warp_rows) { warp_rows.finish(); });
    find_scores<P>(p, smem, rows, n, wg, round, i == 0, kv_begin, bias, s);
    return weigh_unless_far<P>(p, smem.work(round), rows, smem.warpgroup_barrier(wg), kv_begin, full, first,
                               s, rescale);
  };
  const auto finish_o = [&] {
    if (kIntraWarpgroupOverlap<P>) finish_before_wait(rows.sum[0] + rows.sum[1], smem.base);
    wgmma_wait<0>();
    k_ready = barrier_ready(smem.k_full(n + 1), smem.phase(n + 1));
    pin(o);
  };

  find_descriptors(smem, 0, wg, k_tile, v_tile);
  if (wg == Storage::kWarpgroups - 1) ping_pong_arrive(smem, wg);
  for (; next_work_tile(smem, wg, round, i, entry); ++round) {
    if (kSplitTailWave<P> && wg >= smem.work(round).warpgroups) break;  // it has no rows of this one
    const bool has_previous = n > 0;
    q_tile = tile_descriptor(smem.q(wg, round), 0);
    start_products();
    if (has_previous) finalize_rows(p, smem.work(round - 1), rows, wg, scale, state);
    rows.begin(p, smem.work(round), wg);
    start_bias();
    weigh(true);
    finish_o();
    if (has_previous) {
      release_v_tile();
      store_o(p, maps, smem, smem.work(round - 1), wg, state, scale, o);  // O / l
    }
    as_left_operand<ProductElement<P>>(p_operand, s);
    wanted = true;
    adds = 0;
    for (++n; i > 0; ++n) {
      --i;
      start_bias();
      start_products();
      const bool wants = weigh(false);
      finish_o();
      release_v_tile();
      wanted = wants;
      skipped += !wanted && rows.q.begin < rows.q.end;  // else the warpgroup has no rows
      if (!wanted) continue;
      rescale_o<P>(o, rescale);  // O *= exp2(m before - m)
      as_left_operand<ProductElement<P>>(p_operand, s);
    }
    if (Storage::kQStages == 2) QRing<P>::release(smem, wg, round);  // the producer does not wait for it yet
  }
  if (n > 0) {  // the end of the last work tile
    start_o();
    finalize_rows(p, smem.work(round - 1), rows, wg, scale, state);
    wgmma_wait<0>();
    pin(o);
    if (!wanted) barrier_wait<P>(smem.v_full(n - 1), smem.phase(n - 1));  // no copy outlives the CTA
    store_o(p, maps, smem, smem.work(round - 1), wg, state, scale, o);
    if (kTmaStoresO<P> && elected()) bulk_wait_read();  // before the next CTA gets this shared memory
  }
  if (kSplitTailWave<P>) skip_work_tile(smem, n, wg, round, i);
  if (threadIdx.x % 128 == 0) add_skip_counts(p, n, skipped);
  if (wg == 0) ping_pong_wait(smem, wg);  // the last arrival, which no other warpgroup waits for
}

template <class P>
struct SkippingConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const ForwardStorage<P>& smem, int wg) {
    consume_wanted(p, maps, smem, wg);
  }
};

}  // namespace flashjit::sm90
