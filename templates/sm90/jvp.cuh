// O and its tangent by wgmma: as the forward pass, with the tangents beside Q, K and V. S' = Q' K^T + Q K'^T
// becomes P (S' - shift); O' sums up P S' V + P V'. common/score_tangent.cuh has the tangent of a score.
//
// A producer warpgroup loads by TMA, consumer warpgroups have 64 rows of Q each. Four accumulators leave no
// registers for a softmax under a warpgroup's own products: it starts P V and the next S behind it; then it
// lets the other one start, whose products run under its softmax.
#pragma once

#include "flashjit/common/unused_out_rows.cuh"
#include "flashjit/sm90/forward_mainloop.cuh"
#include "flashjit/sm90/jvp_producer.cuh"
#include "flashjit/sm90/jvp_softmax.cuh"

namespace flashjit::sm90 {

/// The state that a consumer warpgroup keeps from step to step.
template <class P>
struct JvpState {
  static constexpr int kValues = P::Plain::kHeadDimV / 2;

  int round = 0, i = 0;  ///< the work tile, and the KV tile among its own, whose last is 0
  int n = 0;             ///< the KV tile among all
  RowState<P> rows;
  int kv_begin = 0;
  bool full = false;
  int entry = 0;
  float o[kValues], o_tangent[kValues];
  SAccumulator<P> s, ds;
  POperand<P> weights, tangents;
  TangentSums sums;
};

template <class P>
struct JvpConsumer {
  using Storage = ForwardStorage<P>;
  using State = JvpState<P>;
  using Element = typename P::Element;
  static constexpr int kQkSteps = (P::Plain::kHeadDim + 15) / 16, kPvSteps = P::kBc / 16;
  // From a tile's columns to its tangent's, in the 16 bytes that descriptors count in.
  static constexpr int kToQTangent = tile_bytes(kWarpgroupRows, P::Plain::kHeadDim) >> 4,
                       kToKTangent = tile_bytes(P::kBc, P::Plain::kHeadDim) >> 4,
                       kToVTangent = tile_bytes(P::kBc, P::Plain::kHeadDimV) >> 4;

  static __device__ __forceinline__ void run(const JvpParams& p, const Storage& smem, int wg) {
    State c;
    if (wg == Storage::kWarpgroups - 1) ping_pong_arrive(smem, wg);
    for (; next_work_tile(smem, wg, c.round, c.i, c.entry); ++c.round) {
      begin(p, smem, wg, c);
#pragma unroll 1
      for (; c.i >= 0; --c.i, ++c.n) step(p, smem, wg, c);
      if (Storage::kQStages == 2) QRing<P>::release(smem, wg, c.round);
      finish(p, smem.work(c.round), wg, c);
    }
    if (wg == 0) ping_pong_wait(smem, wg);  // the last arrival, which no other warpgroup waits for
  }

 private:
  /// A work tile's first S.
  static __device__ __forceinline__ void begin(const JvpParams& p, const Storage& smem, int wg, State& c) {
    c.rows.begin(p, smem.work(c.round), wg);
    c.sums = {};
#pragma unroll
    for (int value = 0; value < State::kValues; ++value) c.o[value] = c.o_tangent[value] = 0.0f;
    wait_k(smem, c.n, false);
    ping_pong_wait(smem, wg);
    if (has_all_tangents(p)) {
      start_scores(smem, wg, c.n, c);
      ping_pong_arrive(smem, wg);
      end_products<0>(c.s, c.ds);
    } else {
      multiply_scores_apart(p, smem, wg, c.n, c);
    }
    leave_k(p, smem, wg, c.n, c.i, c);
  }

  /// From S of a KV tile to O, and S of the next: without a wait between them, so that the tensor cores have
  /// work until the other warpgroup's products come.
  static __device__ __forceinline__ void step(const JvpParams& p, const Storage& smem, int wg, State& c) {
    weigh(p, smem.work(c.round), c);
    wait_v(smem, c.n, false, wg, c.rows, c.kv_begin);
    if (__any_sync(kWholeWarp, c.i == 0)) return end_work_tile(p, smem, wg, c);
    wait_k(smem, c.n + 1, false);
    ping_pong_wait(smem, wg);
    if (has_all_tangents(p)) {
      start_outputs(smem, c);
      start_scores(smem, wg, c.n + 1, c);
      ping_pong_arrive(smem, wg);
      end_products<1>(c.o, c.o_tangent);
      VRing<P>::release(smem, c.n);
      end_products<0>(c.s, c.ds);
    } else {
      multiply_outputs_apart(p, smem, c);
      VRing<P>::release(smem, c.n);
      multiply_scores_apart(p, smem, wg, c.n + 1, c);
    }
    leave_k(p, smem, wg, c.n + 1, c.i - 1, c);
  }
  /// A work tile's last O.
  static __device__ __forceinline__ void end_work_tile(const JvpParams& p, const Storage& smem, int wg,
                                                       State& c) {
    ping_pong_wait(smem, wg);
    if (has_all_tangents(p)) {
      start_outputs(smem, c);
      ping_pong_arrive(smem, wg);
      end_products<0>(c.o, c.o_tangent);
    } else {
      multiply_outputs_apart(p, smem, c);
      ping_pong_arrive(smem, wg);
    }
    VRing<P>::release(smem, c.n);
  }

  /// When S of tile n is there: finds its keys, whose list entry goes with K's stage, and releases that.
  static __device__ __forceinline__ void leave_k(const JvpParams& p, const Storage& smem, int wg, int n,
                                                 int i, State& c) {
    find_tile(p, smem, smem.work(c.round), c.rows, n, i, wg, c.kv_begin, c.full, c.entry);
    release_k(smem, n, wg, c.round, i == 0);
  }

  // Products. Where all tangents are given they are stages without a branch, over which ptxas serialises
  // products that are under way; else each product of a tangent is a stage that is waited for.
  static __device__ __forceinline__ bool has_all_tangents(const JvpParams& p) {
    return __all_sync(kWholeWarp, p.q_tangent.data && p.k_tangent.data && p.v_tangent.data) != 0;
  }
  /// Calls what starts products.
  template <class Accumulator, class Start>
  static __device__ __forceinline__ void start_products(Accumulator& first, Accumulator& second,
                                                        const Start& start) {
    pin(first), pin(second);
    wgmma_fence();
    start();
    wgmma_commit();
    pin(first), pin(second);
  }
  template <int kPending, class Accumulator>
  static __device__ __forceinline__ void end_products(Accumulator& first, Accumulator& second) {
    wgmma_wait<kPending>();
    pin(first), pin(second);
  }
  template <class Accumulator, class Start>
  static __device__ __forceinline__ void run_products(Accumulator& first, Accumulator& second,
                                                      const Start& start) {
    start_products(first, second, start);
    end_products<0>(first, second);
  }

  static __device__ __forceinline__ unsigned long long q_descriptor(const Storage& smem, int wg,
                                                                    const State& c) {
    return tile_descriptor(smem.q(wg, c.round), 0);
  }
  static __device__ __forceinline__ unsigned long long v_descriptor(const Storage& smem, const State& c) {
    return tile_descriptor(smem.v(c.n), Storage::kSliceBytes);
  }
  static __device__ __forceinline__ void add_scores(SAccumulator<P>& to, unsigned long long q,
                                                    unsigned long long k, bool adds) {
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      const int q_offset = step / 4 * kWarpgroupRows * kRowBytes + step % 4 * 32;
      const int k_offset = step / 4 * Storage::kSliceBytes + step % 4 * 32;
      P::multiply_scores(to, q + (q_offset >> 4), k + (k_offset >> 4), step > 0 || adds);
    }
  }
  static __device__ __forceinline__ void add_outputs(float (&to)[State::kValues], const POperand<P>& weights,
                                                     unsigned long long v) {
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step)
      P::multiply_output(to, &weights[step], v + (step * 16 * kRowBytes >> 4), 1);
  }

  /// S = Q K^T, S' = Q' K^T + Q K'^T
  static __device__ __forceinline__ void start_scores(const Storage& smem, int wg, int n, State& c) {
    const unsigned long long q = q_descriptor(smem, wg, c), k = tile_descriptor(smem.k(n), 0);
    start_products(c.s, c.ds, [&] {
      add_scores(c.s, q, k, false);
      add_scores(c.ds, q + kToQTangent, k, false);
      add_scores(c.ds, q, k + kToKTangent, true);
    });
  }
  /// The same of what is given. The other warpgroup may start its products when the last of these are.
  static __device__ __forceinline__ void multiply_scores_apart(const JvpParams& p, const Storage& smem,
                                                               int wg, int n, State& c) {
    const unsigned long long q = q_descriptor(smem, wg, c), k = tile_descriptor(smem.k(n), 0);
#pragma unroll
    for (float& value : c.ds) value = 0.0f;
    if (__any_sync(kWholeWarp, p.q_tangent.data != nullptr))
      run_products(c.s, c.ds, [&] { add_scores(c.ds, q + kToQTangent, k, true); });
    if (__any_sync(kWholeWarp, p.k_tangent.data != nullptr))
      run_products(c.s, c.ds, [&] { add_scores(c.ds, q, k + kToKTangent, true); });
    start_products(c.s, c.ds, [&] { add_scores(c.s, q, k, false); });
    ping_pong_arrive(smem, wg);
    end_products<0>(c.s, c.ds);
  }

  /// O += P V, O' += P S' V + P V'
  static __device__ __forceinline__ void start_outputs(const Storage& smem, State& c) {
    const unsigned long long v = v_descriptor(smem, c);
    start_products(c.o, c.o_tangent, [&] {
      add_outputs(c.o_tangent, c.tangents, v);
      add_outputs(c.o_tangent, c.weights, v + kToVTangent);
      add_outputs(c.o, c.weights, v);
    });
  }
  static __device__ __forceinline__ void multiply_outputs_apart(const JvpParams& p, const Storage& smem,
                                                                State& c) {
    const unsigned long long v = v_descriptor(smem, c);
    if (__any_sync(kWholeWarp, p.v_tangent.data != nullptr))
      run_products(c.o, c.o_tangent, [&] { add_outputs(c.o_tangent, c.weights, v + kToVTangent); });
    run_products(c.o, c.o_tangent, [&] {
      add_outputs(c.o_tangent, c.tangents, v);
      add_outputs(c.o, c.weights, v);
    });
  }

  /// P and P S' of S and S'.
  static __device__ __forceinline__ void weigh(const JvpParams& p, const WorkTile<P>& work, State& c) {
    float rescale[2];
    apply_score_tangent(p, c.rows, c.kv_begin, c.s, c.ds);
    ScoreStage<P>::apply(p, c.rows, c.kv_begin, 0, nullptr, c.s);
    online_softmax<ScoreMask<P>>(p, work, c.rows, c.kv_begin, c.full, false, c.s, rescale);
    weigh_tangents(c.ds, c.s, rescale, c.sums);
    as_left_operand<Element>(c.weights, c.s);
    as_left_operand<Element>(c.tangents, c.ds);
    add_rounded<Element>(c.tangents, c.sums);
    if (P::kDropout) {
#pragma unroll
      for (int keys = 0; keys < kPvSteps; ++keys) {
        unsigned dropped[4];
        draw_dropout(p, work, c.rows, c.kv_begin, keys, dropped);
#pragma unroll
        for (int r = 0; r < 4; ++r) c.weights[keys][r] &= ~dropped[r], c.tangents[keys][r] &= ~dropped[r];
      }
    }
    rescale_o<P>(c.o, rescale);
    rescale_o<P>(c.o_tangent, rescale);
  }

  /// Divides by the row sums, and writes O, LSE and their tangents.
  static __device__ __forceinline__ void finish(const JvpParams& p, const WorkTile<P>& work, int wg,
                                                State& c) {
    const int q_begin = first_query(work, wg) + own_row(), count = work.sequence.seqlen_q(p) - q_begin;
    float scale[2], rounded[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_quad(c.rows.sum[half]), of_exact = sum_of_quad(c.sums.exact[half]),
                  of_rounded = sum_of_quad(c.sums.rounded[half]);
      const float highest = largest_score(p, c.rows, half);
      const float rest = shift_rest<P>(c.rows.max[half], exponent_scale(p, c.rows, half));
      const RowEnd end = end_of_row<P>(p, work.h, row_lse<P>(sum, highest, rest));
      scale[half] = scale_of_row(p, c.rows, sum, rest, end.factor);
      const float share = has_keys(sum) ? end.factor / sum : 0.0f, shift = c.sums.shift[half];
      const float exact = with_sink_tangent<P>(p, work.h, of_exact * share + shift * end.factor, end.factor);
      rounded[half] = with_sink_tangent<P>(p, work.h, of_rounded * share, end.factor) -
                      (P::kSinks ? (1.0f - end.factor) * shift : 0.0f);
      if (threadIdx.x % 4 != 0 || half * 8 >= count) continue;
      const long long at = work.sequence.lse_row(p, work.h, q_begin + half * 8);
      if (p.lse.data) p.lse.data[at] = end.lse;
      if (p.lse_tangent) p.lse_tangent[at] = exact;
    }
    scale_o(c.o, scale);
    scale_o(c.o_tangent, scale);
#pragma unroll
    for (int value = 0; value < State::kValues; ++value)
      c.o_tangent[value] -= rounded[value / 2 % 2] * c.o[value];
    const auto store = [&](const TensorParam& to, const float(&values)[State::kValues]) {
      store_rows<Element>(values, State::kValues / 4, work.sequence.q_pointer(to, work.h, q_begin),
                          to.stride_s, count);
    };
    store(p.o, c.o);
    store(p.o_tangent, c.o_tangent);
  }
};

template <class Problem>
__device__ void jvp(const JvpParams& p, const JvpTensorMaps& maps) {
  using P = JvpPart<Problem>;
  using Storage = ForwardStorage<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  const Storage smem(0, shared);
  if (threadIdx.x == 0) {
    smem.init_barriers();
    barrier_init_fence();
  }
  __syncthreads();
  zero_unused_rows_of_tangents<Problem>(p);
  constexpr ForwardGroups kGroups{.consumers = Storage::kWarpgroups, .ctas = P::kMinBlocks};
  constexpr WarpgroupRole kProducer{.first = 0, .registers = producer_registers(kGroups), .gives = true},
      kConsumers{.first = 1, .registers = consumer_registers(kGroups), .gives = false};
  const int wg = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (wg < kConsumers.first) {
    set_register_limit<kProducer>();
    run_jvp_producer<P>(p, maps, smem);
  } else {
    set_register_limit<kConsumers>();
    JvpConsumer<P>::run(p, smem, wg - kConsumers.first);
  }
}

}  // namespace flashjit::sm90
