// Forward pass for Hopper: FlashAttention-3 (sections 3.1 and 3.2). A producer warpgroup loads Q, K and V by
// TMA; each consumer warpgroup owns 64 rows of Q and computes them by wgmma. Consumers alternate in starting
// products (ping-pong), so that the softmax of one runs under the products of another; and above 64
// columns of V a consumer's own P V runs under its next softmax. README.md has the files and their roles.
#pragma once

#include "flashjit/async/warp_roles.cuh"
#include "flashjit/sm90/forward_code_sums.cuh"
#include "flashjit/sm90/forward_codes.cuh"
#include "flashjit/sm90/forward_held_q.cuh"
#include "flashjit/sm90/forward_mainloop.cuh"
#include "flashjit/sm90/forward_roles.cuh"
#include "flashjit/sm90/forward_skip_softmax.cuh"
#include "flashjit/sm90/forward_weights.cuh"
#include "flashjit/sm90/forward_wide.cuh"

namespace flashjit::sm90 {

/// The state that a consumer warpgroup keeps from step to step.
template <class P>
struct ConsumerState {
  int round = 0, i = 0;  ///< the work tile, and the KV tile among its own, whose last is 0
  int n = 0;             ///< the KV tile among all
  RowState<P> rows;
  int kv_begin = 0;   ///< the first key of the KV tile
  bool full = false;  ///< every pair of the KV tile attends
  int entry = 0;      ///< of the KV tile's list; read a step ahead where consumers read it
  int last = -1;      ///< the KV tile that was computed last
  OAccumulator<P> o = {};
  SAccumulator<P> s;
  POperand<P> p_operand, dropped;
  unsigned bias = 0;                              ///< this lane's address in the bias tile
  unsigned long long q_tile, k_tile = 0, v_tile;  ///< wgmma's descriptors
  typename QSource<P>::Held held;
  bool k_ready = false, v_ready = false;      ///< polled in the step before
  int adds = kFirstPvOverwritesO<P> ? 0 : 1;  ///< whether the next P V adds to O
  float rescale[2], scale[2];
  RunningState<P> state;
};

/// Computes a consumer warpgroup's rows of O, work tile after work tile. A step starts S = Q K^T of its KV
/// tile and O += P V of the KV tile before, and turns S into P while P V runs. Steps follow each other
/// without a gap, also from one work tile to the next: the first step of a work tile ends the one before.
///
/// The step is there twice: as one loop with branches it costs 2.5 to 13%. The functions are static and get
/// the state as an argument: as members of the state they cost 0.7% (NOTES.md#order-of-a-step).
template <class P>
struct PlainConsumer {
  using Storage = ForwardStorage<P>;
  using State = ConsumerState<P>;
  using Weights = RowWeights<P>;

  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps, const Storage& smem,
                                             int wg) {
    State c;
    find_descriptors(smem, 0, wg, c.k_tile, c.v_tile);
    if (wg == Storage::kWarpgroups - 1) ping_pong_arrive(smem, wg);
    for (; next_work_tile(smem, wg, c.round, c.i, c.entry); ++c.round) {
      if (kSplitTailWave<P> && wg >= smem.work(c.round).warpgroups) break;  // it has no rows of this one
      compute_first_tile(p, maps, smem, wg, c);
      for (++c.n; c.i > 0; ++c.n) compute_next_tile(p, maps, smem, wg, c);
      if (Storage::kQStages == 2) QRing<P>::release(smem, wg, c.round);  // the producer does not wait yet
    }
    if (c.n > 0) {
      wait_v_tile(smem, wg, c);
      start_pv<P>(c.o, c.p_operand, c.v_tile, c.adds);
      end_last_work_tile(p, maps, smem, smem.work(c.round - 1), wg, c.rows, c.state, c.scale, c.o);
    }
    if (kSplitTailWave<P>) skip_work_tile(smem, c.n, wg, c.round, c.i);
    if (wg == 0) ping_pong_wait(smem, wg);  // the last arrival, which no other warpgroup waits for
  }

 private:
  /// The first step of a work tile, and the end of the one before.
  static __device__ __forceinline__ void compute_first_tile(const Params& p, const TensorMaps& maps,
                                                            const Storage& smem, int wg, State& c) {
    const bool has_previous = c.n > 0;
    QSource<P>::find(smem, wg, c);
    [[maybe_unused]] float q_scale[2];  // of the thread's rows
    if constexpr (kConvertsQ<P>) convert_q(smem, wg, c.round, q_scale);
    wait_k(smem, c.n, c.k_ready);
    if constexpr (kEntriesHaveRowBits<P>) {
      for (; !computes_tile(smem, c.n, wg, c.last, c.i == 0); --c.i) {
        skip(smem, wg, c);
        wait_k(smem, ++c.n, c.k_ready);
      }
    }
    ping_pong_wait(smem, wg);
    QSource<P>::start_qk(c);  // S = Q K^T of the work tile's first KV tile
    // The vote lets ptxas see that all lanes branch alike: else it may serialise products.
    if (__any_sync(kWholeWarp, has_previous)) {
      wait_v_tile(smem, wg, c);
      start_pv<P>(c.o, c.p_operand, c.v_tile, c.adds);  // O += P V, the last of the work tile before
    }
    wgmma_commit();
    ping_pong_arrive(smem, wg);
    find_descriptors(smem, c.n + 1, wg, c.k_tile, c.v_tile);
    if (has_previous)  // LSE = m + log(l)
      Weights::finalize(p, smem.work(c.round - 1), c.rows, wg, c.scale, c.state);
    c.rows.begin(p, smem.work(c.round), wg);
    if constexpr (kConvertsQ<P>) c.rows.k_scale[0] *= q_scale[0], c.rows.k_scale[1] *= q_scale[1];
    find_tile(p, smem, smem.work(c.round), c.rows, c.n, c.i, wg, c.kv_begin, c.full, c.entry);
    draw_early(p, smem, c);
    start_bias(p, maps, smem, wg, c);
    finish_bias(p, maps, smem, wg, c);
    end_qk(smem, c.s, c.n, wg, c.round, c.i == 0);
    Weights::wait_before(c.o);
    weigh_first_tile(p, smem, wg, c);  // P = exp2(S - m)
    if (kIntraWarpgroupOverlap<P>) finish_before_wait(Weights::last_value(c.rows, c.s), smem.base);
    wgmma_wait<0>();  // O of the work tile before is there
    poll(smem, c.n, c.k_ready, c.v_ready);
    pin(c.o);
    pack_p(p, smem, c);
    if (has_previous) {
      VRing<P>::release(smem, tile_before(c));
      store_o(p, maps, smem, smem.work(c.round - 1), wg, c.state, c.scale, c.o);  // O / l
    }
    OutTileFetch<P>::fetch(p, smem, smem.work(c.round), wg);
    c.last = c.n;
    begin_o<P>(c.o, c.adds);
  }

  /// A further step of a work tile.
  static __device__ __forceinline__ void compute_next_tile(const Params& p, const TensorMaps& maps,
                                                           const Storage& smem, int wg, State& c) {
    --c.i;
    start_bias(p, maps, smem, wg, c);
    wait_k(smem, c.n, c.k_ready);
    if constexpr (kEntriesHaveRowBits<P>)
      if (!computes_tile(smem, c.n, wg, c.last, false)) return skip(smem, wg, c);
    ping_pong_wait(smem, wg);
    QSource<P>::start_qk(c);  // S = Q K^T
    wait_v_tile(smem, wg, c);
    start_pv<P>(c.o, c.p_operand, c.v_tile, c.adds);  // O += P V of the KV tile before
    wgmma_commit();
    ping_pong_arrive(smem, wg);
    find_descriptors(smem, c.n + 1, wg, c.k_tile, c.v_tile);
    find_tile(p, smem, smem.work(c.round), c.rows, c.n, c.i, wg, c.kv_begin, c.full, c.entry);
    draw_early(p, smem, c);
    finish_bias(p, maps, smem, wg, c);
    end_qk(smem, c.s, c.n, wg, c.round, c.i == 0);
    Weights::wait_before(c.o);
    weigh(p, smem, c, false, c.s);  // P = exp2(S - m)
    if (kIntraWarpgroupOverlap<P>) finish_before_wait(Weights::last_value(c.rows, c.s), smem.base);
    wgmma_wait<0>();  // O is there
    poll(smem, c.n, c.k_ready, c.v_ready);
    pin(c.o);
    VRing<P>::release(smem, tile_before(c));
    c.last = c.n;
    Weights::rescale(c.o, c.rescale);  // O *= exp2(m before - m)
    pack_p(p, smem, c);
  }

  /// The KV tile whose P V comes next.
  static __device__ __forceinline__ int tile_before(const State& c) {
    if constexpr (kEntriesHaveRowBits<P>) return c.last;
    return c.n - 1;
  }
  static __device__ __forceinline__ void wait_v_tile(const Storage& smem, int wg, State& c) {
    wait_v(smem, tile_before(c), c.v_ready, wg, c.rows, c.kv_begin);
  }
  static __device__ __forceinline__ void skip(const Storage& smem, int wg, State& c) {
    skip_tile(smem, c.n, wg, c.round, c.i == 0);
    c.k_tile = tile_descriptor(smem.k(c.n + 1), 0);
    c.k_ready = false;
  }

  static __device__ __forceinline__ void start_bias(const Params& p, const TensorMaps& maps,
                                                    const Storage& smem, int wg, State& c) {
    fill_bias(p, maps, smem, smem.work(c.round), c.n, c.i, wg, c.bias,
              [](const auto& warp_rows) { warp_rows.start(); });
  }
  static __device__ __forceinline__ void finish_bias(const Params& p, const TensorMaps& maps,
                                                     const Storage& smem, int wg, State& c) {
    fill_bias(p, maps, smem, smem.work(c.round), c.n, c.i, wg, c.bias,
              [](const auto& warp_rows) { warp_rows.finish(); });
  }

  template <class Scores>
  static __device__ __forceinline__ void weigh(const Params& p, const Storage& smem, State& c, bool first,
                                               Scores& scores) {
    weigh_tile(p, smem, smem.work(c.round), c.rows, c.n, c.kv_begin, c.bias, c.full, first, scores,
               c.rescale);
  }
  static __device__ __forceinline__ void weigh_first_tile(const Params& p, const Storage& smem, int wg,
                                                          State& c) {
    if (kPartialFirstStep<P> && smem.work(c.round).partial >> wg & 1u) {
      weigh(p, smem, c, true, reinterpret_cast<float(&)[kPartialKvTile<P> / 2]>(c.s));
#pragma unroll
      for (int value = kPartialKvTile<P> / 2; value < P::kBc / 2; ++value) c.s[value] = 0.0f;
    } else {
      weigh(p, smem, c, true, c.s);
    }
  }

  static __device__ __forceinline__ void draw(const Params& p, const Storage& smem, State& c, int keys) {
    draw_dropout(p, smem.work(c.round), c.rows, c.kv_begin, keys, c.dropped[keys]);
  }
  static __device__ __forceinline__ void draw_early(const Params& p, const Storage& smem, State& c) {
    if constexpr (kDrawsEarly<P>) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) draw(p, smem, c, keys);
    }
  }
  static __device__ __forceinline__ void pack_p(const Params& p, const Storage& smem, State& c) {
    if (kSkipsIdleWarps<P> && c.rows.warp_is_idle()) {
#pragma unroll
      for (auto& keys : c.p_operand)
        for (unsigned& pair : keys) pair = 0;
      return;
    }
    as_left_operand<ProductElement<P>>(c.p_operand, c.s);
    if constexpr (P::kDropout) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) {
        if constexpr (!kDrawsEarly<P>) draw(p, smem, c, keys);
#pragma unroll
        for (int r = 0; r < 4; ++r) c.p_operand[keys][r] &= ~c.dropped[keys][r];
      }
    }
  }
};
/// The main loop of a consumer warpgroup.
template <class P>
using Consumer = Conditional<
    kHasFewRows<P>, FewRowsConsumer<P>,
    Conditional<kSharesRows<P>, WideConsumer<P>,
                Conditional<kCodeProducts<P>, CodeConsumer<P>,
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
    Conditional<P::kClusterSplit, ClusterJoin<P>, NoJoin<P>>::run(p);
  }
}

}  // namespace flashjit::sm90
