// Forward pass for Hopper: FlashAttention-3 (sections 3.1 and 3.2). A producer warpgroup loads Q, K and V by
// TMA; each consumer warpgroup owns 64 rows of Q and computes them by wgmma. Consumers alternate in starting
// products (ping-pong), so that the softmax of one runs under the products of another; and above 64
// columns of V a consumer's own P V runs under its next softmax. README.md has the files and their roles.
#pragma once

#include "flashjit/async/warp_roles.cuh"
#include "flashjit/sm90/forward_codes.cuh"
#include "flashjit/sm90/forward_mainloop.cuh"
#include "flashjit/sm90/forward_roles.cuh"
#include "flashjit/sm90/forward_skip_softmax.cuh"
#include "flashjit/sm90/forward_weights.cuh"
#include "flashjit/sm90/forward_wide.cuh"

namespace flashjit::sm90 {

/// Computes a consumer warpgroup's rows of O, work tile after work tile. A step starts S = Q K^T of its KV
/// tile and O += P V of the KV tile before, and turns S into P while P V runs. Steps follow each other
/// without a gap, also from one work tile to the next: the first step of a work tile ends the one before.
///
/// The step is there twice, and state is captured instead of being a struct with member functions: as one
/// loop with branches the step costs 2.5 to 13%, and as a struct ptxas makes other code
/// (NOTES.md#order-of-a-step, NOTES.md#ptxas-orders-equal-sources-differently).
template <class P>
__device__ __forceinline__ void consume(const Params& p, const TensorMaps& maps,
                                        const ForwardStorage<P>& smem, int wg) {
  using Storage = ForwardStorage<P>;
  using Weights = RowWeights<P>;
  int round = 0, i = 0;  // the work tile, and the KV tile among its own, whose last is 0
  RowState<P> rows;
  int kv_begin = 0;   // the first key of the KV tile
  bool full = false;  // every pair of the KV tile attends
  int entry = 0;      // of the KV tile's list; read a step ahead where consumers read it
  OAccumulator<P> o = {};
  SAccumulator<P> s;
  POperand<P> p_operand;
  unsigned bias = 0;  // this lane's address in the bias tile
  const auto next_work = [&] { return next_work_tile(smem, wg, round, i, entry); };
  unsigned long long q_tile, k_tile = 0, v_tile;  // wgmma's descriptors
  bool k_ready = false;                           // polled in the step before
  [[maybe_unused]] bool v_ready = false;
  const auto start_s = [&] { start_qk<P>(s, q_tile, k_tile); };
  const auto wait_v_tile = [&](int n) { wait_v(smem, n, v_ready, wg, rows, kv_begin); };
  int adds = kFirstPvOverwritesO<P> ? 0 : 1;  // whether the next P V adds to O
  [[maybe_unused]] POperand<P> dropped;
  const auto draw = [&](int keys) { draw_dropout(p, smem.work(round), rows, kv_begin, keys, dropped[keys]); };
  const auto draw_early = [&] {
    if constexpr (kDrawsEarly<P>) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) draw(keys);
    }
  };
  const auto pack_p = [&] {
    if (kSkipsIdleWarps<P> && rows.warp_is_idle()) {
#pragma unroll
      for (auto& keys : p_operand)
        for (unsigned& pair : keys) pair = 0;
      return;
    }
    as_left_operand<ProductElement<P>>(p_operand, s);
    if constexpr (P::kDropout) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) {
        if constexpr (!kDrawsEarly<P>) draw(keys);
#pragma unroll
        for (int r = 0; r < 4; ++r) p_operand[keys][r] &= ~dropped[keys][r];
      }
    }
  };
  const auto start_o = [&] { start_pv<P>(o, p_operand, v_tile, adds); };
  const auto find = [&](int n) {
    find_tile(p, smem, smem.work(round), rows, n, i, wg, kv_begin, full, entry);
  };
  int last = -1;  // the KV tile that was computed last
  const auto computes = [&](int n, bool is_first) {
    return computes_tile(smem, n, wg, last, is_first && i == 0);
  };
  const auto skip = [&](int n) {
    skip_tile(smem, n, wg, round, i == 0);
    k_tile = tile_descriptor(smem.k(n + 1), 0);
    k_ready = false;
  };
  const auto before = [&](int n) {
    if constexpr (kEntriesHaveRowBits<P>) return last;
    return n - 1;
  };
  const auto fill = [&](int n, auto how) { fill_bias(p, maps, smem, smem.work(round), n, i, wg, bias, how); };
  const auto start_bias = [&](int n) { fill(n, [](const auto& warp_rows) { warp_rows.start(); }); };
  const auto finish_bias = [&](int n) { fill(n, [](const auto& warp_rows) { warp_rows.finish(); }); };
  float rescale[2], scale[2];
  RunningState<P> state;
  const auto softmax = [&](int n, bool first, auto& scores) {
    weigh_tile(p, smem, smem.work(round), rows, n, kv_begin, bias, full, first, scores, rescale);
  };

  int n = 0;
  find_descriptors(smem, 0, wg, k_tile, v_tile);
  if (wg == Storage::kWarpgroups - 1) ping_pong_arrive(smem, wg);
  for (; next_work(); ++round) {
    if (kSplitTailWave<P> && wg >= smem.work(round).warpgroups) break;  // it has no rows of this one
    const bool has_previous = n > 0;
    q_tile = tile_descriptor(smem.q(wg, round), 0);
    [[maybe_unused]] float q_scale[2];  // of the thread's rows
    if constexpr (kConvertsQ<P>) convert_q(smem, wg, round, q_scale);
    wait_k(smem, n, k_ready);
    if constexpr (kEntriesHaveRowBits<P>) {
      for (; !computes(n, true); --i) {
        skip(n);
        wait_k(smem, ++n, k_ready);
      }
    }
    ping_pong_wait(smem, wg);
    start_s();  // S = Q K^T of the work tile's first KV tile
    // The vote lets ptxas see that all lanes branch alike: else it may serialise products.
    if (__any_sync(kWholeWarp, has_previous)) {
      wait_v_tile(before(n));
      start_o();  // O += P V, the last of the work tile before
    }
    wgmma_commit();
    ping_pong_arrive(smem, wg);
    find_descriptors(smem, n + 1, wg, k_tile, v_tile);
    if (has_previous) Weights::finalize(p, smem.work(round - 1), rows, wg, scale, state);  // LSE = m + log(l)
    rows.begin(p, smem.work(round), wg);
    if constexpr (kConvertsQ<P>) rows.k_scale[0] *= q_scale[0], rows.k_scale[1] *= q_scale[1];
    find(n);
    draw_early();
    start_bias(n);
    finish_bias(n);
    end_qk(smem, s, n, wg, round, i == 0);
    if (kPartialFirstStep<P> && smem.work(round).partial >> wg & 1u) {
      softmax(n, true, reinterpret_cast<float(&)[kPartialKvTile<P> / 2]>(s));
#pragma unroll
      for (int value = kPartialKvTile<P> / 2; value < P::kBc / 2; ++value) s[value] = 0.0f;
    } else {
      softmax(n, true, s);  // P = exp2(S - m)
    }
    if (kIntraWarpgroupOverlap<P>) finish_before_wait(Weights::last_value(rows, s), smem.base);
    wgmma_wait<0>();  // O of the work tile before is there
    poll(smem, n, k_ready, v_ready);
    pin(o);
    pack_p();
    if (has_previous) {
      VRing<P>::release(smem, before(n));
      store_o(p, maps, smem, smem.work(round - 1), wg, state, scale, o);  // O / l
    }
    last = n;
    begin_o<P>(o, adds);
    for (++n; i > 0; ++n) {
      --i;
      start_bias(n);
      wait_k(smem, n, k_ready);
      if constexpr (kEntriesHaveRowBits<P>) {
        if (!computes(n, false)) {
          skip(n);
          continue;
        }
      }
      ping_pong_wait(smem, wg);
      start_s();  // S = Q K^T
      wait_v_tile(before(n));
      start_o();  // O += P V of the KV tile before
      wgmma_commit();
      ping_pong_arrive(smem, wg);
      find_descriptors(smem, n + 1, wg, k_tile, v_tile);
      find(n);
      draw_early();
      finish_bias(n);
      end_qk(smem, s, n, wg, round, i == 0);
      softmax(n, false, s);  // P = exp2(S - m)
      if (kIntraWarpgroupOverlap<P>) finish_before_wait(Weights::last_value(rows, s), smem.base);
      wgmma_wait<0>();  // O is there
      poll(smem, n, k_ready, v_ready);
      pin(o);
      VRing<P>::release(smem, before(n));
      last = n;
      Weights::rescale(o, rescale);  // O *= exp2(m before - m)
      pack_p();
    }
    if (Storage::kQStages == 2) QRing<P>::release(smem, wg, round);  // the producer does not wait for it yet
  }
  if (n > 0) {
    wait_v_tile(before(n));
    start_o();
    end_last_work_tile(p, maps, smem, smem.work(round - 1), wg, rows, state, scale, o);
  }
  if (kSplitTailWave<P>) skip_work_tile(smem, n, wg, round, i);
  if (wg == 0) ping_pong_wait(smem, wg);  // the last arrival, which no other warpgroup waits for
}

template <class P>
struct PlainConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const ForwardStorage<P>& smem, int wg) {
    consume(p, maps, smem, wg);
  }
};
/// The main loop of a consumer warpgroup.
template <class P>
using Consumer = Conditional<
    kHasFewRows<P>, FewRowsConsumer<P>,
    Conditional<kSharesRows<P>, WideConsumer<P>,
                Conditional<kCodeProducts<P>, QuantizedConsumer<P>,
                            Conditional<P::kSkipSoftmax, SkippingConsumer<P>, PlainConsumer<P>>>>>;

template <class P>
__device__ void forward(const Params& p, const TensorMaps& maps) {
  using Storage = ForwardStorage<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  init_barriers<P>(shared);
  const SegmentStart start = begin_schedule<P>(p, maps, shared);

  using Roles = ForwardRoles<P>;
  const int wg = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  const int consumer = wg - Roles::kConsumers.first;  // negative: the producer
  if (kConvertsKv<P> && wg >= Roles::kConverters.first) {
    set_register_limit<Roles::kConverters>();
    KvConverter<P>::run(p, Storage(0, shared), wg - Roles::kConverters.first);
  } else if (wg < Roles::kConsumers.first) {
    set_register_limit<Roles::kProducer>();
    run_producer<P>(p, maps, shared, start);
  } else {
    set_register_limit<Roles::kConsumers>();
    const int slot = kQTilesPerCta<P> > 1 ? consumer / Storage::kWarpgroups : 0;
    Consumer<P>::run(p, maps, Storage(slot, shared), consumer - slot * Storage::kWarpgroups);
  }
}

}  // namespace flashjit::sm90
