// Softmax and its derivative in the backward pass.
#pragma once

#include "flashjit/common/tile_mask.cuh"
#include "flashjit/sm90/backward_products.cuh"
#include "flashjit/sm90/plane.cuh"

namespace flashjit::sm90 {

/// Whether what the score reads of a thread's keys is found before the products are awaited. Beside lengths
/// more columns leave no registers for it, unless it also reads of queries: then to find it pair by pair
/// takes more.
template <class P>
constexpr bool kFindsKeyValues = P::kKeyValues && (P::kHeadDim <= 64 || P::kQueryValues || !kForeignKeys<P>);

/// What a thread's pairs add to those gradients of captures that do not come from dS in shared memory.
template <class P>
using PairSums = CaptureSums<P::kCaptureGrads - BackwardTile<P>::kAddedGrads, 2>;

/// A group's part of P^T and dS^T of Q tile i, as left operands of a product. dS, and P where the other group
/// reads it, go to shared memory, too. `sums` takes what the pairs add to gradients of captures.
template <class P>
__device__ __forceinline__ void differentiate(const Params& p, const TensorMaps& maps,
                                              const BackwardTile<P>& tile, unsigned i, const StagedTile& now,
                                              int group, unsigned long long q_rows,
                                              float (&s)[BackwardTile<P>::kQueries / 2],
                                              unsigned (&probability)[BackwardTile<P>::kQueries / 16][4],
                                              unsigned (&gradient)[BackwardTile<P>::kQueries / 16][4],
                                              PairSums<P>& sums) {
  using Element = typename P::Element;
  using Tile = BackwardTile<P>;
  constexpr int kS = Tile::kQueries / 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_row = Tile::first_row(group), first_query = Tile::first_query(group);
  const int kv_row = first_row + warp * 16 + lane / 4;  // in the tile; and kv_row + 8
  const int slot = i % P::kStages, dout_slot = i % Tile::kDoutStages;
  const int h = now.head, q_begin = now.tile * P::kBr + first_query;
  // Of this thread's first query; opaque, so that the others' are offsets in the instructions.
  const int own = opaque((slot * P::kBr + first_query + lane % 4 * 2) * 4);
  const char* row_lse = tile.shared + Tile::kLayout.lse() + own;
  const char* row_d = tile.shared + Tile::kLayout.d() + own;
  [[maybe_unused]] const char* row_values = tile.shared + Tile::kLayout.values() + own;
  const Position q_position = position(q_begin + lane % 4 * 2);
  const Position kv_position = position(tile.kv_begin(i) + kv_row);
  const auto at_q = [&](int n) { return q_position + (n / 4 * 8 + n % 2); };
  const auto at_kv = [&](int n) { return kv_position + n / 2 % 2 * 8; };
  const Sequence<P>& sequence = tile.place(i).sequence;
  [[maybe_unused]] const auto head = sequence.head(p, h);
  if constexpr (P::kVarlen) {
    if (const int valid = sequence.seqlen_q(p) - now.tile * P::kBr; valid < P::kBr) {
      // The rows behind belong to the next sequence.
      // Here alone what copies of the loops would keep has no registers.
      const auto count = [](int known) {
        return Tile::kWide || Tile::kSumsDq || P::kHeadDim <= 64 ? known : opaque(known);
      };
      tile.await_dout(i);
      clear_rows<P::kBr, P::kHeadDim>(tile.shared + (tile.q(slot) - tile.base), valid,
                                      count(slices(P::kHeadDim)));
      clear_rows<P::kBr, P::kHeadDimV>(tile.shared + (tile.dout(dout_slot) - tile.base), valid,
                                       count(slices(P::kHeadDimV)));
      publish_to_async_proxy();
      named_barrier_sync(2 + group, 128);
    }
  }

  // Where this lane's row of the first four matrices of the plane's elements lies. Before dP takes its
  // registers.
  [[maybe_unused]] unsigned plane = 0;
  if constexpr (Tile::kHasPlane) {
    const CapturePlane of = P::plane(p, head);
    const int first_chunk = (first_row + warp * 16) / 8;
    if (!unit_copies(p, maps, of)) {
      const PlaneRows<P::kBr, Tile::kQueries, 16, 4> rows{tile.shared + (tile.plane(dout_slot) - tile.base),
                                                          of,
                                                          now.tile * P::kBr,
                                                          tile.kv_begin(i),
                                                          first_query,
                                                          first_chunk * 8};
      rows.start();
      rows.finish();
    }
    plane = tile.plane(dout_slot) +
            chunk_offset<P::kBr>(first_query + lane / 16 * 8 + lane % 8, first_chunk + lane / 8 % 2);
  }

  // What the score reads of this thread's keys.
  [[maybe_unused]] float of_key[2] = {};
  if constexpr (kFindsKeyValues<P>)
    for (int half = 0; half < 2; ++half) of_key[half] = P::key_value(p, head, at_kv(half * 2));

  float dp[kS];
  if constexpr (kForeignKeys<P>) start_scores(tile, group, q_rows, s);
  [[maybe_unused]] DroppedValues<kS> dropped;
  const auto draw = [&] { dropped.draw(p, sequence.b * p.heads_q + h, at_q(0).at, at_kv(0).at); };
  // Wide, registers suffice beside dP, too.
  if constexpr (P::kDropout && !Tile::kWide) draw();
  const bool partial = !now.full || tile.kv_begin(i) + Tile::kKeys > tile.kv_limit(p, i);
  tile.await_dout(i);
  const unsigned long long v = tile_descriptor(tile.v() + first_row * kRowBytes, 0),
                           dout = tile_descriptor(tile.dout(dout_slot) + first_query * kRowBytes, 0);
  start_transposed(dp, [&] { P::multiply_dp(dp, v, dout, 0); });
  if constexpr (P::kDropout && Tile::kWide) draw();
  TileMask<P, Tile::kQueries> mask;
  const auto row_at = [&](int half) { return kv_position.at + half * 8; };
  if (partial) mask.find(p, head, row_at, q_begin);

  // Bit n / 4: the map lets these eight queries attend. Its blocks are multiples of 16, so that they and a
  // warp's sixteen keys lie in one.
  [[maybe_unused]] unsigned blocks = ~0u;
  if constexpr (kTestsMap<P>) {
    if (partial) {
      const unsigned char* column =
          block_map_row<P>(p, sequence.b, h, 0) +
          min(tile.kv_begin(i) + kv_row - lane / 4, tile.kv_limit(p, i) - 1) / P::kBlockKv;
      // Lane i asks for the i-th eight queries.
      const int q = min(q_begin + lane % (kS / 4) * 8, sequence.seqlen_q(p) - 1);
      blocks = __ballot_sync(kWholeWarp, column[static_cast<long long>(q / P::kBlockQ) * p.map_columns] != 0);
    }
  }
  // Of sixteen queries of a tile in shared memory, [KV row][query], lane l says where row l % 8 of matrix l /
  // 8 is to be. The swizzle lets a step change two bits of the place.
  const int first_place =
      opaque(chunk_offset<Tile::kKeys>(first_row + warp * 16 + lane % 16, first_query / 8 + lane / 16));
  const auto store_step = [&](unsigned to, int step, const unsigned(&words)[4]) {
    store_matrices(to + (first_place ^ (step % 4 * 32)) + step / 4 * Tile::kKvSlice, words);
  };
  const float scale_log2 = scale_operand<P>(p);
  const auto at_pair = [](const char* row, int n) { return *reinterpret_cast<const float2*>(row + n * 8); };
  const float2 first_lse = at_pair(row_lse, 0), first_d = at_pair(row_d, 0);
  multiply_wait<0>();
  pin(s);
  pin(dp);
  // When dS of the tile before is there, what this one overwrites has been read. The first does not wait.
  if constexpr (!Tile::kWide) barrier_wait<P>(tile.ds_full(i - 1), (i - 1) / 2 & 1);
  if constexpr (Tile::kAddsDs) barrier_wait<P>(tile.ds_added(i), i / 2 & 1 ^ 1);
  const auto eight_queries_at_a_time = [&](auto masked) {
    const bool any = !masked.value || kTestsMask<P> || P::mask(p, head, q_position, kv_position);
    [[maybe_unused]] unsigned elements[4];
#pragma unroll
    for (int n = 0; n < kS; n += 4) {
      const float2 lse = n == 0 ? first_lse : at_pair(row_lse, n);
      const float2 d = n == 0 ? first_d : at_pair(row_d, n);
      // What the gradients want.
      [[maybe_unused]] float slope[4], dots[4];
      [[maybe_unused]] float2 of_queries{};
      if constexpr (P::kQueryValues) of_queries = at_pair(row_values, n);
      if constexpr (P::kHasScore) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float dot = dots[e] = s[n + e];
          if constexpr (Tile::kHasPlane) {
            if (n % 8 + e == 0) load_matrix_x4_transposed(elements, plane + n / 8 * 16 * kRowBytes);
            const auto element = static_cast<unsigned short>(elements[(n + e) % 8 / 2] >> e % 2 * 16);
            if constexpr (P::kScoreGrad)
              slope[e] = P::score_grad_of_element(p, head, dot, element, at_q(n + e), at_kv(n + e));
            s[n + e] = P::score_of_element(p, head, dot, element, at_q(n + e), at_kv(n + e));
          } else if constexpr (P::kQueryValues || P::kKeyValues) {
            const float of_query = e % 2 ? of_queries.y : of_queries.x;
            if constexpr (P::kKeyValues && !kFindsKeyValues<P>)
              of_key[e / 2] = P::key_value(p, head, at_kv(n + e));
            if constexpr (P::kScoreGrad)
              slope[e] =
                  P::score_grad_of_values(p, head, dot, of_query, of_key[e / 2], at_q(n + e), at_kv(n + e));
            s[n + e] = P::score_of_values(p, head, dot, of_query, of_key[e / 2], at_q(n + e), at_kv(n + e));
          } else {
            if constexpr (P::kScoreGrad) slope[e] = P::score_grad(p, head, dot, at_q(n + e), at_kv(n + e));
            s[n + e] = P::score(p, head, dot, at_q(n + e), at_kv(n + e));
          }
        }
      }
      if constexpr (masked.value) {
        const bool block = !kTestsMap<P> || (blocks >> (n / 4) & 1u) != 0;
        const auto columns = mask.columns(n * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[n + e] = mask_score(
              s[n + e], block, at_kv(n + e).at < tile.kv_limit(p, i),
              kTestsMask<P> ? mask.attends(p, head, e / 2, columns, e % 2, at_q(n + e), at_kv(n + e)) : any);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float probable = exp2_approx(fmaf(s[n + e], scale_log2, e % 2 ? -lse.y : -lse.x));
        const bool drop = P::kDropout && dropped[n + e];
        const float slope_of_p = !P::kDropout ? dp[n + e] : drop ? 0.0f : dp[n + e] * p.keep_scale;
        s[n + e] = drop ? 0.0f : probable;
        dp[n + e] = probable * (slope_of_p - (e % 2 ? d.y : d.x));
        if constexpr (P::kCaptureGrads > Tile::kAddedGrads)
          P::add_capture_grads(p, head, dp[n + e], dots[e], at_q(n + e), at_kv(n + e),
                               [&](auto which, float* at, float value) {
                                 if constexpr (!Tile::adds(which)) sums.of_key(e / 2)(which, at, value);
                               });
        // A slope may be anything where P is zero.
        if constexpr (P::kScoreGrad) dp[n + e] = probable == 0.0f ? 0.0f : dp[n + e] * slope[e];
      }
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        probability[n / 8][n % 8 / 2 + e / 2] = pack<Element>(s[n + e], s[n + e + 1]);
        gradient[n / 8][n % 8 / 2 + e / 2] = pack<Element>(dp[n + e], dp[n + e + 1]);
      }
      if (n % 8 == 0) continue;
      if constexpr (Tile::kWide) store_step(tile.p(i), n / 8, probability[n / 8]);
      store_step(tile.ds(i), n / 8, gradient[n / 8]);
    }
  };
  // Two copies, since a branch inside costs what it saves.
  if (partial)
    eight_queries_at_a_time(Flag<true>{});
  else
    eight_queries_at_a_time(Flag<false>{});
}

}  // namespace flashjit::sm90
