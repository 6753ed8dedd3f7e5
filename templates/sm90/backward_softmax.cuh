// P and dS of the backward pass: P = exp(S - LSE), dP = dO V^T, dS = P (dP - D), for a warpgroup's pairs of
// a Q tile and the KV tile.
#pragma once

#include "flashjit/sm90/backward_ds_exchange.cuh"
#include "flashjit/sm90/backward_scores.cuh"
#include "flashjit/sm90/backward_split_columns.cuh"
#include "flashjit/sm90/ds_grads.cuh"

namespace flashjit::sm90 {

/// P and dS from S and dP, eight queries at a time; P and dS become left operands of dV and dK and are
/// stored. kMasked: not all pairs attend.
template <class P, bool kMasked>
__device__ __forceinline__ void weigh_pairs(const Params& p, const BackwardSmem<P>& smem,
                                            const typename P::Head& head, const ScoreTile<P>& tile,
                                            PairInputs<P>& in, const OperandStore<P>& store,
                                            typename BackwardFragments<P>::S& s,
                                            typename BackwardFragments<P>::S& dp,
                                            typename BackwardFragments<P>::Operand& p_operand,
                                            typename BackwardFragments<P>::Operand& ds, PairSums<P>& sums) {
  using Element = typename P::Element;
  using Policy = BackwardPolicy<P>;
  constexpr int kCount = ScoreTile<P>::kCount;
  const auto store_step = [&](int step) {
    if constexpr (Policy::kWide) store(smem.p(tile.i), step, p_operand[step]);
    store(smem.ds(tile.i), step, ds[step]);
  };
  const bool any = !kMasked || kTestsMask<P> || P::mask(p, head, tile.q, tile.kv);
  PairScore<P> program;
  constexpr bool kLate = Policy::kStoresDsLate && !(kMasked && kTestsMask<P>);
#pragma unroll
  for (int n = 0; n < kCount; n += 4) {
    const float2 lse = n == 0 ? in.lse : tile.of_queries(tile.lse, n);
    const float2 d = n == 0 ? in.d : tile.of_queries(tile.d, n);
    [[maybe_unused]] float slope[4], dots[4];
    // S = score(Q K^T); `slope` is the program's derivative. (As a function of its own, some programs
    // compile to other code.)
    if constexpr (P::kHasScore) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float dot = dots[e] = s[n + e];
        program.find(p, head, tile, in, n, e);
        ScoreSlope<P, kMasked>::find(slope, program, p, head, dot, tile, n, e);
        s[n + e] = program.score(p, head, dot, tile.at_q(n + e), tile.at_kv(n + e));
      }
    }
    // S = -inf where masked
    if constexpr (kMasked) apply_mask(p, smem, head, tile, n, in.mask, in.map_bits, any, s, dp);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // P = exp(S - LSE)
      const float of_query = e % 2 ? lse.y : lse.x;
      const float pair_p = !P::kLseLog2 ? PairWeights<P>::weigh(p, s[n + e], of_query)
                           : kMasked    ? exp2_approx(fmaf(s[n + e], in.scale, -of_query) * in.log2)
                                        : exp2_approx(fmaf(s[n + e], p.softmax_scale_log2, -of_query));
      const bool drop = P::kDropout && in.dropped[n + e];
      const float pair_dp = !P::kDropout ? dp[n + e] : drop ? 0.0f : dp[n + e] * p.keep_scale;
      s[n + e] = drop ? 0.0f : pair_p;
      // dS = P (dP - D)
      dp[n + e] = PairWeights<P>::grad(pair_p, pair_dp, e % 2 ? d.y : d.x);
      PairGrads<P>::add(p, head, tile, n, e, dp[n + e], dots, sums);
      ScoreSlope<P, kMasked>::chain(dp[n + e], PairWeights<P>::kMasksDp ? dp[n + e] : pair_p, slope, e);
    }
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      p_operand[n / 8][n % 8 / 2 + e / 2] = pack<Element>(s[n + e], s[n + e + 1]);
      ds[n / 8][n % 8 / 2 + e / 2] = pack<Element>(dp[n + e], dp[n + e + 1]);
    }
    if (n % 8 == 0) continue;
    // Sixteen queries late, as loads of LSE and D of the next ones stay behind the store.
    if constexpr (kLate) {
      if (n > 8) store_step(n / 8 - 1);
      if (n + 4 == kCount) store_step(n / 8);
    } else {
      store_step(n / 8);
    }
  }
}

// When dropout's bits are drawn: DrawStage<P> names one of these types.
template <class P>
struct DrawnBeforeDp {
  template <class Draw>
  static __device__ __forceinline__ void before_dp(const Draw& draw) {
    draw();
  }
  template <class Draw>
  static __device__ __forceinline__ void beside_dp(const Draw&) {}
};
template <class P>
struct DrawnBesideDp {
  template <class Draw>
  static __device__ __forceinline__ void before_dp(const Draw&) {}
  template <class Draw>
  static __device__ __forceinline__ void beside_dp(const Draw& draw) {
    draw();
  }
};
template <class P>
struct NeverDrawn {
  template <class Draw>
  static __device__ __forceinline__ void before_dp(const Draw&) {}
  template <class Draw>
  static __device__ __forceinline__ void beside_dp(const Draw&) {}
};
template <class P>
using DrawStage =
    Conditional<!P::kDropout, NeverDrawn<P>,
                Conditional<BackwardPolicy<P>::kDrawsBesideDp, DrawnBesideDp<P>, DrawnBeforeDp<P>>>;

/// Waits until P and dS of Q tile i may be written.
template <class P>
__device__ __forceinline__ void wait_operands_empty(const BackwardSmem<P>& smem, unsigned i) {
  using Policy = BackwardPolicy<P>;
  // Both consumers have written dS of the Q tile before, so they have read the dS that this one overwrites.
  // Before the first Q tile this does not wait. (Not wait_full(): i - 1 as one value changes the order of
  // code, NOTES.md#ptxas-orders-equal-sources-differently.)
  if constexpr (!Policy::kWide && !kOwnTiles<P>) barrier_wait<P>(smem.ds_full(i - 1), (i - 1) / 2 & 1);
  DsGrads<P>::acquire(smem, i);
  // All threads of this CTA have read the tiles that P and dS overwrite.
  DsExchange<P>::wait_read(smem, i);
}

/// A warpgroup's part of P^T and dS^T of Q tile i, as left operands of a product. dS, and P where the other
/// warpgroup reads it, go to shared memory, too. `sums` collects what the pairs add to gradients of
/// captures. S has been started early, or is started here.
template <class P>
__device__ __forceinline__ void compute_p_and_ds(const Params& p, const TensorMaps& maps,
                                                 const BackwardSmem<P>& smem, unsigned i, int wg,
                                                 unsigned long long q_rows,
                                                 typename BackwardFragments<P>::S& s,
                                                 typename BackwardFragments<P>::Operand& p_operand,
                                                 typename BackwardFragments<P>::Operand& ds,
                                                 PairSums<P>& sums) {
  using Policy = BackwardPolicy<P>;
  const ScoreTile<P> tile(smem, i, wg);
  const Sequence<P>& sequence = smem.kv_tile_of(i).sequence;
  [[maybe_unused]] const auto head = sequence.head(p, tile.h);
  clear_out_of_range_queries(p, smem, i, wg);
  PairInputs<P> in;
  PairScore<P>::prepare(p, maps, smem, head, tile, in);

  SStart<P>::with_dp(smem, wg, q_rows, s);  // S = Q K^T
  const auto draw = [&] {
    in.dropped.template draw<P>(p, dropout_head<P>(p, sequence.b, tile.h), tile.q.at, tile.kv.at);
  };
  DrawStage<P>::before_dp(draw);
  const int full = smem.q_tile(i).full;
  const bool partial =
      (P::kLseLog2 ? full <= 0 : full == 0) || smem.kv_begin(tile.i) + Policy::kKeys > smem.seqused_kv(p, i);
  typename BackwardFragments<P>::S dp;
  DoutRing<P>::wait_full(smem, i);
  start_dp(smem, i, wg, dp);  // dP = dO V^T
  DrawStage<P>::beside_dp(draw);
  const auto key_at = [&](int half) { return tile.kv.at + half * 8; };
  if (partial) in.mask.find(p, head, key_at, tile.q_begin);
  if constexpr (kTestsMap<P>)
    if (partial) in.map_bits = find_map_bits(p, smem, sequence, tile);

  const OperandStore<P> store(tile);
  in.lse = tile.of_queries(tile.lse, 0), in.d = tile.of_queries(tile.d, 0);
  ColumnSplit<P>::send_s(smem, wg, s);
  wgmma_wait<0>();
  pin(s);
  pin(dp);
  ColumnSplit<P>::exchange(smem, i, wg, s, dp);
  wait_operands_empty(smem, i);
  in.scale = p.softmax_scale, in.log2 = kLog2E;
  if (P::kLseLog2 && full != kLargeLse) in.scale = p.softmax_scale_log2, in.log2 = 1.0f;
  // Two copies, since a branch inside costs what it saves.
  if (partial)
    weigh_pairs<P, true>(p, smem, head, tile, in, store, s, dp, p_operand, ds, sums);
  else
    weigh_pairs<P, false>(p, smem, head, tile, in, store, s, dp, p_operand, ds, sums);
  ColumnSplit<P>::send_operands(smem, i, store);
}

}  // namespace flashjit::sm90
