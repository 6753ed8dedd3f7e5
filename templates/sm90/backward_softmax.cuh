// P and dS of the backward pass: P = exp(S - LSE), dP = dO V^T, dS = P (dP - D), for a warpgroup's pairs of
// a Q tile and the KV tile.
#pragma once

#include "flashjit/common/tile_mask.cuh"
#include "flashjit/sm90/backward_products.cuh"
#include "flashjit/sm90/backward_weights.cuh"
#include "flashjit/tma/bias_tile.cuh"

namespace flashjit::sm90 {

/// What a thread's pairs add to those gradients of captures that the consumers add.
template <class P>
using PairSums = CaptureSums<P::kCaptureGrads - BackwardPolicy<P>::kGradsFromDs, 2>;

/// A consumer thread's pairs of Q tile i and the KV tile, in the order of its values of S^T: four at a time,
/// the first two are of neighbouring queries and one key, the others of the same queries and the key eight
/// on. Where CTAs split columns, these are half of the pairs whose partial S it has.
template <class P>
struct ScoreTile {
  using Policy = BackwardPolicy<P>;
  static constexpr int kCount = Policy::kPairQueries / 2;  ///< values of a thread

  unsigned i;
  int wg, lane;
  int warp_row;                     ///< the warp's first key among the CTA's
  int row;                          ///< the thread's
  int h;                            ///< the Q tile's head
  int q_begin;                      ///< the warpgroup's first query
  Position q, kv;                   ///< of the thread's first pair
  const char *lse, *d, *row_terms;  ///< of the thread's first query

  __device__ __forceinline__ ScoreTile(const BackwardSmem<P>& smem, unsigned i, int wg)
      : i(i), wg(wg), lane(threadIdx.x % 32) {
    const int warp = threadIdx.x / 32 % 4;
    const int first_query = Policy::first_pair_query(wg), stage = i % P::kStages;
    warp_row = Policy::first_row(wg) + warp * 16;
    const QTileInfo& now = smem.q_tile(i);
    h = now.head, q_begin = now.tile * P::kBr + first_query;
    // Opaque, so that the other queries' are offsets in the instructions.
    const int first = opaque((stage * P::kBr + first_query + lane % 4 * 2) * 4);
    lse = smem.lse_at(first), d = smem.d_at(first), row_terms = smem.row_terms_at(first);
    q = position(q_begin + lane % 4 * 2);
    row = warp_row + lane / 4;
    kv = position(smem.kv_begin(i) + row);
  }
  __device__ Position at_q(int n) const { return q + (n / 4 * 8 + n % 2); }
  __device__ Position at_kv(int n) const { return kv + n / 2 % 2 * 8; }
  /// LSE, D or the row term of two queries.
  static __device__ float2 of_queries(const char* row, int n) {
    return *reinterpret_cast<const float2*>(row + n * 8);
  }
};

/// The address of this lane's row of the first four matrices of the bias tile. Where TMA does not load the
/// tile, a warp loads the elements that it needs.
template <class P>
__device__ __forceinline__ unsigned prepare_bias_tile(const Params& p, const TensorMaps& maps,
                                                      const BackwardSmem<P>& smem,
                                                      const typename P::Head& head,
                                                      const ScoreTile<P>& tile) {
  using Policy = BackwardPolicy<P>;
  const BiasTile bias = P::bias_tile(p, head);
  const int stage = tile.i % Policy::kDoutStages;
  const int first_query = Policy::first_query(tile.wg), first_chunk = tile.warp_row / 8;
  if (!tma_loads_bias_tile(p, maps, bias)) {
    const BiasTileRows<P::kBr, Policy::kWgQueries, 16, 4> rows{smem.pointer(smem.bias_tile(stage)),
                                                               bias,
                                                               smem.q_tile(tile.i).tile * P::kBr,
                                                               smem.kv_begin(tile.i),
                                                               first_query,
                                                               first_chunk * 8};
    rows.start();
    rows.finish();
  }
  return smem.bias_tile(stage) + chunk_offset<P::kBr>(first_query + tile.lane / 16 * 8 + tile.lane % 8,
                                                      first_chunk + tile.lane / 8 % 2);
}

/// Bit n says whether the block map lets the n-th eight queries attend to the warp's sixteen keys, which lie
/// in one block: block sizes are multiples of 16.
template <class P>
__device__ __forceinline__ unsigned find_map_bits(const Params& p, const BackwardSmem<P>& smem,
                                                  const Sequence<P>& sequence, const ScoreTile<P>& tile) {
  const unsigned char* column =
      block_map_row<P>(p, sequence.b, tile.h, 0) +
      min(smem.kv_begin(tile.i) + tile.row - tile.lane / 4, smem.seqused_kv(p, tile.i) - 1) / P::kBlockKv;
  const int q = min(tile.q_begin + tile.lane % (ScoreTile<P>::kCount / 4) * 8, sequence.seqlen_q(p) - 1);
  return __ballot_sync(kWholeWarp, column[static_cast<long long>(q / P::kBlockQ) * p.map_columns] != 0);
}

/// Makes S -infinity where one of four pairs does not attend, by block map, length or mask program; and dP 0,
/// where P does not say so. `any`: what the program says of all pairs where it is the same for all of them.
template <class P>
__device__ __forceinline__ void apply_mask(const Params& p, const BackwardSmem<P>& smem,
                                           const typename P::Head& head, const ScoreTile<P>& tile, int n,
                                           const TileMask<P, BackwardPolicy<P>::kPairQueries>& mask,
                                           unsigned map_bits, bool any, typename BackwardFragments<P>::S& s,
                                           [[maybe_unused]] typename BackwardFragments<P>::S& dp) {
  const bool block = !kTestsMap<P> || (map_bits >> (n / 4) & 1u) != 0;
  const auto columns = mask.columns(n * 2);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Position q = tile.at_q(n + e), kv = tile.at_kv(n + e);
    const auto masked = [&](float x) {
      return mask_score<P>(x, block, kv.at < smem.seqused_kv(p, tile.i),
                           kTestsMask<P> ? mask.attends(p, head, e / 2, columns, e % 2, q, kv) : any);
    };
    s[n + e] = masked(s[n + e]);
    if (PairWeights<P>::kMasksDp) dp[n + e] = masked(dp[n + e]);
  }
}

/// Stores sixteen queries of a warp's part of P^T or dS^T to a tile in shared memory, [key][query].
template <class P>
struct OperandStore {
  /// Lane l gives the address of row l % 8 of matrix l / 8. The swizzle lets a step change two bits of it.
  int first_offset;

  __device__ __forceinline__ OperandStore(const ScoreTile<P>& tile)
      : first_offset(opaque(chunk_offset<BackwardPolicy<P>::kKeys>(
            tile.warp_row + tile.lane % 16,
            BackwardPolicy<P>::first_pair_query(tile.wg) / 8 + tile.lane / 16))) {}
  __device__ __forceinline__ void operator()(unsigned to, int step, const unsigned (&words)[4]) const {
    store_matrices(to + (first_offset ^ (step % 4 * 32)) + step / 4 * BackwardSmem<P>::kKvSlice, words);
  }
  /// Sends the other CTA the first sixteen queries of a tile that the warp has stored, a row of a matrix a
  /// lane.
  __device__ __forceinline__ void send(const BackwardSmem<P>& smem, unsigned tile, unsigned full) const {
    const int other = 1 - BackwardPolicy<P>::rank();
    const float4 row = *reinterpret_cast<const float4*>(smem.pointer(tile + first_offset));
    store_remote(in_cta(tile + first_offset, other), row, in_cta(full, other));
  }
};

/// Where CTAs split columns: sends the other CTA partial S or dP of the pairs whose P it computes.
template <class P>
__device__ __forceinline__ void send_partial(const BackwardSmem<P>& smem, int wg, int which,
                                             const typename BackwardFragments<P>::S& c) {
  constexpr int kCount = ScoreTile<P>::kCount;
  const int rank = BackwardPolicy<P>::rank(), other = 1 - rank;
  const unsigned to = in_cta(smem.partial_sums(wg) + threadIdx.x % 128 * 16, other);
  const unsigned full = in_cta(smem.partial_sums_full(wg), other);
  const auto of_other = [&](int n) { return rank == 0 ? c[kCount + n] : c[n]; };
#pragma unroll
  for (int n = 0; n < kCount; n += 4)
    store_remote(to + (which * kCount + n) / 4 * 128 * 16,
                 float4{of_other(n), of_other(n + 1), of_other(n + 2), of_other(n + 3)}, full);
}
/// Makes partial S or dP whole: of the pairs whose P this CTA computes, which then are the first.
template <class P>
__device__ __forceinline__ void add_partial(const BackwardSmem<P>& smem, int wg, int which,
                                            typename BackwardFragments<P>::S& c) {
  constexpr int kCount = ScoreTile<P>::kCount;
  const int rank = BackwardPolicy<P>::rank();
  const char* from = smem.pointer(smem.partial_sums(wg)) + threadIdx.x % 128 * 16;
#pragma unroll
  for (int n = 0; n < kCount; n += 4) {
    const float4 part = *reinterpret_cast<const float4*>(from + (which * kCount + n) / 4 * 128 * 16);
    const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n + e] = (rank == 0 ? c[n + e] : c[kCount + n + e]) + parts[e];
  }
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
  using Element = typename P::Element;
  using Policy = BackwardPolicy<P>;
  constexpr int kCount = ScoreTile<P>::kCount;
  const ScoreTile<P> tile(smem, i, wg);
  const Sequence<P>& sequence = smem.kv_tile_of(i).sequence;
  [[maybe_unused]] const auto head = sequence.head(p, tile.h);
  clear_foreign_queries(p, smem, i, wg);
  [[maybe_unused]] unsigned bias_tile = 0;
  // Before dP takes the registers.
  if constexpr (Policy::kHasBiasTile) bias_tile = prepare_bias_tile(p, maps, smem, head, tile);
  [[maybe_unused]] float column_term[2] = {};
  if constexpr (Policy::kFindsColumnTermsEarly)
    for (int half = 0; half < 2; ++half)
      column_term[half] = P::score_column_term(p, head, tile.at_kv(half * 2));

  if constexpr (!Policy::kStartsSEarly) start_s(smem, wg, q_rows, s);  // S = Q K^T
  [[maybe_unused]] DroppedValues<kCount> dropped;
  const auto draw = [&] {
    dropped.template draw<P>(p, dropout_head<P>(p, sequence.b, tile.h), tile.q.at, tile.kv.at);
  };
  if constexpr (P::kDropout && !Policy::kDrawsBesideDp) draw();
  const int full = smem.q_tile(i).full;
  const bool partial =
      (P::kLseLog2 ? full <= 0 : full == 0) || smem.kv_begin(tile.i) + Policy::kKeys > smem.seqused_kv(p, i);
  typename BackwardFragments<P>::S dp;
  smem.wait_dout(i);
  start_dp(smem, i, wg, dp);  // dP = dO V^T
  if constexpr (P::kDropout && Policy::kDrawsBesideDp) draw();
  TileMask<P, Policy::kPairQueries> mask;
  const auto key_at = [&](int half) { return tile.kv.at + half * 8; };
  if (partial) mask.find(p, head, key_at, tile.q_begin);
  [[maybe_unused]] unsigned map_bits = ~0u;
  if constexpr (kTestsMap<P>)
    if (partial) map_bits = find_map_bits(p, smem, sequence, tile);

  const OperandStore<P> store(tile);
  const float2 first_lse = tile.of_queries(tile.lse, 0), first_d = tile.of_queries(tile.d, 0);
  if constexpr (Policy::kSplitsColumns) {
    named_barrier_sync(kBothConsumers, 2 * 128);  // both have read P and dS of the Q tile before
    if (threadIdx.x % 128 == 0)
      barrier_expect(smem.partial_sums_full(wg), Policy::kLayout.partial_sums_bytes());
    wgmma_wait<1>();
    pin(s);
    send_partial(smem, wg, 0, s);
  }
  wgmma_wait<0>();
  pin(s);
  pin(dp);
  if constexpr (Policy::kSplitsColumns) {
    send_partial(smem, wg, 1, dp);
    barrier_wait<P>(smem.partial_sums_full(wg), i & 1);
    add_partial(smem, wg, 0, s);
    add_partial(smem, wg, 1, dp);
  }
  // Both consumers have written dS of the Q tile before, so they have read the dS that this one overwrites.
  // Before the first Q tile this does not wait.
  if constexpr (!Policy::kWide) barrier_wait<P>(smem.ds_full(i - 1), (i - 1) / 2 & 1);
  if constexpr (Policy::kReadsDs) barrier_wait<P>(smem.ds_added(i), i / 2 & 1 ^ 1);
  // Of this CTA's threads all have read the tiles that P and dS overwrite.
  if constexpr (Policy::kOtherDsOverP) barrier_wait<P>(smem.sent_ds_read(), i & 1 ^ 1);
  // LSE's, see common/lse_log2.cuh.
  struct {
    float scale, log2;
  } units{p.softmax_scale, kLog2E};
  if (P::kLseLog2 && full != kLargeLse) units = {p.softmax_scale_log2, 1.0f};
  const auto store_step = [&](int step) {
    if constexpr (Policy::kWide) store(smem.p(i), step, p_operand[step]);
    store(smem.ds(i), step, ds[step]);
  };
  // NVRTC before 12.4 looks up names of P in branches that are not taken; of a parameter of the lambda's it
  // does not.
  const auto eight_queries_at_a_time = [&]<class Scores = P>(auto masked) {
    const bool any = !masked.value || kTestsMask<P> || P::mask(p, head, tile.q, tile.kv);
    [[maybe_unused]] unsigned bias[4];
    constexpr bool late = Policy::kStoresDsLate && !(masked.value && kTestsMask<P>);
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float2 lse = n == 0 ? first_lse : tile.of_queries(tile.lse, n);
      const float2 d = n == 0 ? first_d : tile.of_queries(tile.d, n);
      [[maybe_unused]] float slope[4], dots[4];
      // S = score(Q K^T); `slope` is the program's derivative. (As a function of its own, some programs
      // compile to other code.)
      if constexpr (P::kHasScore) {
        [[maybe_unused]] float2 row_term_pair{};
        if constexpr (P::kScoreRowTerm) row_term_pair = tile.of_queries(tile.row_terms, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float dot = dots[e] = s[n + e];
          if constexpr (Policy::kHasBiasTile) {
            if (n % 8 + e == 0) load_matrix_x4_transposed(bias, bias_tile + n / 8 * 16 * kRowBytes);
            const auto element = static_cast<unsigned short>(bias[(n + e) % 8 / 2] >> e % 2 * 16);
            if constexpr (P::kScoreGrad)
              slope[e] =
                  Scores::score_grad_of_element(p, head, dot, element, tile.at_q(n + e), tile.at_kv(n + e));
            s[n + e] = Scores::score_of_element(p, head, dot, element, tile.at_q(n + e), tile.at_kv(n + e));
          } else if constexpr (P::kScoreRowTerm || P::kScoreColumnTerm) {
            const float row_term = e % 2 ? row_term_pair.y : row_term_pair.x;
            if constexpr (P::kScoreColumnTerm && !Policy::kFindsColumnTermsEarly)
              column_term[e / 2] = Scores::score_column_term(p, head, tile.at_kv(n + e));
            if constexpr (P::kScoreGrad)
              slope[e] = Scores::score_grad_of_terms(p, head, dot, row_term, column_term[e / 2],
                                                     tile.at_q(n + e), tile.at_kv(n + e));
            s[n + e] = Scores::score_of_terms(p, head, dot, row_term, column_term[e / 2], tile.at_q(n + e),
                                              tile.at_kv(n + e));
          } else {
            if constexpr (P::kScoreGrad)
              slope[e] = Scores::score_grad(p, head, dot, tile.at_q(n + e), tile.at_kv(n + e));
            s[n + e] = Scores::score(p, head, dot, tile.at_q(n + e), tile.at_kv(n + e));
          }
        }
      }
      // S = -inf where masked
      if constexpr (masked.value) apply_mask(p, smem, head, tile, n, mask, map_bits, any, s, dp);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // P = exp(S - LSE)
        const float of_query = e % 2 ? lse.y : lse.x;
        const float pair_p = !P::kLseLog2   ? PairWeights<P>::weigh(p, s[n + e], of_query)
                             : masked.value ? exp2_approx(fmaf(s[n + e], units.scale, -of_query) * units.log2)
                                            : exp2_approx(fmaf(s[n + e], p.softmax_scale_log2, -of_query));
        const bool drop = P::kDropout && dropped[n + e];
        const float pair_dp = !P::kDropout ? dp[n + e] : drop ? 0.0f : dp[n + e] * p.keep_scale;
        s[n + e] = drop ? 0.0f : pair_p;
        // dS = P (dP - D)
        dp[n + e] = PairWeights<P>::grad(pair_p, pair_dp, e % 2 ? d.y : d.x);
        if constexpr (P::kCaptureGrads > Policy::kGradsFromDs)
          P::add_capture_grads(p, head, dp[n + e], dots[e], tile.at_q(n + e), tile.at_kv(n + e),
                               [&](auto which, float* at, float value) {
                                 if constexpr (!Policy::is_from_ds(which))
                                   sums.of_key(e / 2)(which, at, value);
                               });
        // Where nothing attends a slope may be NaN.
        [[maybe_unused]] const float deciding = PairWeights<P>::kMasksDp ? dp[n + e] : pair_p;
        if constexpr (P::kScoreGrad) dp[n + e] = deciding == 0.0f ? 0.0f : dp[n + e] * slope[e];
      }
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        p_operand[n / 8][n % 8 / 2 + e / 2] = pack<Element>(s[n + e], s[n + e + 1]);
        ds[n / 8][n % 8 / 2 + e / 2] = pack<Element>(dp[n + e], dp[n + e + 1]);
      }
      if (n % 8 == 0) continue;
      // Sixteen queries late, as loads of LSE and D of the next ones stay behind the store.
      if constexpr (late) {
        if (n > 8) store_step(n / 8 - 1);
        if (n + 4 == kCount) store_step(n / 8);
      } else {
        store_step(n / 8);
      }
    }
  };
  // Two copies, since a branch inside costs what it saves.
  if (partial)
    eight_queries_at_a_time(Flag<true>{});
  else
    eight_queries_at_a_time(Flag<false>{});
  if constexpr (Policy::kSplitsColumns) {
    __syncwarp();
    store.send(smem, smem.p(i), smem.ds_full(i));
    store.send(smem, smem.ds(i), smem.ds_full(i));
  }
}

}  // namespace flashjit::sm90
