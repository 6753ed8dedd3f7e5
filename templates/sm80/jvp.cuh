// O and its tangent by mma.sync: as the forward pass, with the tangents beside Q, K and V. A row sums up P
// dS, and P dS V + P dV; at the end dLSE = rowsum(P dS) and dO = P dS V + P dV - dLSE O, all of them over
// rowsum(P).
#pragma once

#include "flashjit/common/score_tangent.cuh"
#include "flashjit/common/unused_out_rows.cuh"
#include "flashjit/sm80/forward_lse.cuh"
#include "flashjit/sm80/forward_pv.cuh"
#include "flashjit/sm80/forward_softmax.cuh"
#include "flashjit/sm80/instructions.cuh"
#include "flashjit/sm80/query_heads.cuh"

namespace flashjit::sm80 {

/// The problem as the forward pass's parts take it, which have shared memory of their own.
template <class P>
struct ForwardPart : P {
  static constexpr int kSharedBytes =
      ForwardLayout{P::kBr, P::kBc, P::kHeadDim, P::kHeadDimV, P::kStages, 2, false, P::kDSplit, false}
          .bytes();
};

/// Addresses of tiles in shared memory, each followed by its tangent's.
template <class P>
struct JvpSmem {
  static constexpr JvpLayout kLayout{P::kBr, P::kBc, P::kHeadDim, P::kHeadDimV};
  static_assert(kLayout.bytes() == P::kSharedBytes, "what the planner counts on");
  static constexpr int kKBytes = tile_bytes(P::kBc, P::kHeadDim), kVBytes = tile_bytes(P::kBc, P::kHeadDimV);

  char* shared;
  unsigned q, k, v;

  __device__ __forceinline__ explicit JvpSmem(char* memory)
      : shared(memory),
        q(shared_address(memory)),
        k(shared_address(memory) + kLayout.k()),
        v(shared_address(memory) + kLayout.v()) {}
};

/// dS of a KV tile from Q K^T and its tangent, before either is changed.
template <class P, class AtQ, class AtKv>
__device__ __forceinline__ void apply_score_tangent(ForwardScores<P>& ds, const ForwardScores<P>& s,
                                                    const JvpParams& p, const typename P::Head& head,
                                                    const AtQ& at_q, const AtKv& at_kv) {
#pragma unroll
  for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt)
#pragma unroll
    for (int nt = 0; nt < ForwardPolicy<P>::kNt; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        ds[mt][nt][e] = score_tangent<P>(p, head, s[mt][nt][e], ds[mt][nt][e], at_q(mt, e), at_kv(nt, e));
}

/// What a row sums up of P (dS - shift): as it is, for LSE's tangent, and rounded as the products have it,
/// for O's. A rounding error of P dS then weighs V - O, which is 0 where a query attends to one key. O's
/// tangent is the same for any shift; the mean of dS over a row's first keys leaves nothing large that would
/// cancel.
template <class P>
struct TangentSums {
  RowValues<P> exact = {}, rounded = {}, shift = {};
  unsigned has_shift = 0;  ///< bit n: the rows of half n
};

/// Finds the shifts of rows that have none yet.
template <class P>
__device__ __forceinline__ void find_shifts(const ForwardScores<P>& ds, const ForwardScores<P>& p,
                                            TangentSums<P>& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool has_shift = (sums.has_shift >> half & 1) != 0;
    if (__all_sync(kWholeWarp, has_shift)) continue;
    float weight = 0.0f, sum = 0.0f;
#pragma unroll
    for (int nt = 0; nt < ForwardPolicy<P>::kNt; ++nt)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e)
        weight += p[0][nt][e], sum += chained(p[0][nt][e], ds[0][nt][e]);
    weight = quad_sum(weight), sum = quad_sum(sum);
    if (has_shift || !(weight > 0.0f)) continue;
    sums.shift[0][half] = sum / weight;
    sums.has_shift |= 1u << half;
  }
}

/// dS = P (dS - shift), and its row sums, after the sums before are rescaled.
template <class P>
__device__ __forceinline__ void weigh_tangents(ForwardScores<P>& ds, const ForwardScores<P>& p,
                                               const RowValues<P>& rescale, TangentSums<P>& sums) {
  find_shifts<P>(ds, p, sums);
#pragma unroll
  for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sums.exact[mt][half] *= rescale[mt][half], sums.rounded[mt][half] *= rescale[mt][half];
#pragma unroll
    for (int nt = 0; nt < ForwardPolicy<P>::kNt; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float tangent = ds[mt][nt][e] - sums.shift[mt][e / 2];
        ds[mt][nt][e] = chained(p[mt][nt][e], tangent);  // which may be anything where P is zero
        sums.exact[mt][e / 2] += ds[mt][nt][e];
      }
  }
}

/// Online softmax: S becomes P = exp2(S - m), and dS P dS; what was summed before is brought to the new m.
template <class P>
__device__ __forceinline__ void softmax_with_tangents(ForwardScores<P>& s, ForwardScores<P>& ds,
                                                      OutTiles<P>& o, OutTiles<P>& o_tangent,
                                                      RowValues<P>& row_max, RowValues<P>& row_sum,
                                                      TangentSums<P>& sums, float scale_log2) {
  RowValues<P> shift, rescale;
  update_max<P>(row_max, row_sum, shift, rescale, scale_log2,
                [&](float before, int mt, int half) { return max_of_row<P>(s, before, mt, half); });
#pragma unroll
  for (int nt = 0; nt < ForwardPolicy<P>::kNt; nt += 2)
    exponentials<P>(s, row_sum, row_max, shift, scale_log2, nt);
  weigh_tangents<P>(ds, s, rescale, sums);
  rescale_rows<P>(o, rescale);
  rescale_rows<P>(o_tangent, rescale);
}

/// Whether the block map lets a pair attend: where tiles reach across its blocks, and else.
template <class P>
struct MapAttends {
  static __device__ __forceinline__ bool at(const Params& p, int b, int h, int q, int kv) {
    return in_block_map<P>(p, b, h, q, kv);
  }
};
struct AllAttend {
  static __device__ __forceinline__ bool at(const Params&, int, int, int, int) { return true; }
};
template <class P>
using BlocksAttend = Conditional<kTestsMap<P>, MapAttends<P>, AllAttend>;

/// O += P V, and its tangent += P dV + P dS V.
template <class P, class AtQ, class AtKv>
__device__ __forceinline__ void multiply_values(OutTiles<P>& o, OutTiles<P>& o_tangent, TangentSums<P>& sums,
                                                const ForwardScores<P>& s, const ForwardScores<P>& ds,
                                                unsigned v_tile, unsigned v_tangent_tile, const JvpParams& p,
                                                unsigned batch_head, const AtQ& at_q, const AtKv& at_kv) {
  using Element = typename P::Element;
  using Policy = ForwardPolicy<P>;
#pragma unroll
  for (int k = 0; k < Policy::kNt / 2; ++k) {
    unsigned weights[Policy::kMt][4], tangents[Policy::kMt][4];
    pack_p<P>(weights, s, k);
    pack_p<P>(tangents, ds, k);
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        sums.rounded[mt][r % 2] += low_of<Element>(tangents[mt][r]) + high_of<Element>(tangents[mt][r]);
#pragma unroll
    for (int mt = 0; mt < Policy::kMt && P::kDropout; ++mt) {
      unsigned masks[4];
      drop_masks<P>(masks, p, batch_head, at_q(mt, 0).at, at_kv(2 * k, 0).at);
#pragma unroll
      for (int r = 0; r < 4; ++r) weights[mt][r] &= ~masks[r], tangents[mt][r] &= ~masks[r];
    }
    const unsigned rows = k * 16 * Policy::kVPitch * 2;
    const auto add = [&](OutTiles<P>& to, const unsigned(&a)[Policy::kMt][4], unsigned tile) {
      multiply_step<typename P::Mma, Element, Policy::kOUnitsOfAll, false>(to, a, tile + rows, 0);
    };
    add(o, weights, v_tile);
    add(o_tangent, tangents, v_tile);
    if (p.v_tangent.data) add(o_tangent, weights, v_tangent_tile);
  }
}

/// Rows of O or of its tangent from `row` of the Q tile on, by way of Q's tile, for whole cache lines.
template <class P>
__device__ __forceinline__ void store_rows(const TensorParam& to, const Sequence<P>& sequence, int h,
                                           int q_begin, int row, int seqlen_q, char* tile,
                                           const float (&o)[ForwardPolicy<P>::kOt][4]) {
  constexpr int kPitch = pitch(P::kHeadDimV);
  __syncwarp();
#pragma unroll
  for (int ot = 0; ot < ForwardPolicy<P>::kOt; ++ot)
    store_fragment<typename P::Element, kPitch>(tile, row, ot * 8, o[ot], 1.0f, 1.0f);
  __syncwarp();
  store_tile<16, P::kHeadDimV, 32>(sequence.q_pointer(to, h, q_begin + row), to.stride_s,
                                   tile + row * kPitch * 2, seqlen_q - q_begin - row, lane_index());
}

/// A row's sums over its keys.
struct RowSums {
  float p, exact, rounded, shift;
};

/// Divides by the row sums, and writes O, LSE and their tangents of 16 rows from `row` of the Q tile on.
template <class P>
__device__ __forceinline__ void finish_rows(const JvpParams& p, const Sequence<P>& sequence, int h,
                                            int q_begin, int row, int seqlen_q, char* tile,
                                            float (&o)[ForwardPolicy<P>::kOt][4],
                                            float (&o_tangent)[ForwardPolicy<P>::kOt][4],
                                            const float (&row_max)[2], const RowSums (&sums)[2],
                                            float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sums[half].p, max = row_max[half];
    const RowEnd end = with_sink<P>(p, h, row_lse<P>(p, max, sum, scale_log2, 1.0f));
    const float scale = scale_of_row<P>(p, end, max, sum, scale_log2, 1.0f);
    const float share = has_keys(sum) ? end.factor / sum : 0.0f;
    const float shift = sums[half].shift, of_keys = sums[half].exact * share + shift * end.factor;
    const float exact = with_sink_tangent<P>(p, h, of_keys, end.factor);
    const float rounded = with_sink_tangent<P>(p, h, sums[half].rounded * share, end.factor) -
                          (P::kSinks ? (1.0f - end.factor) * shift : 0.0f);
#pragma unroll
    for (int ot = 0; ot < ForwardPolicy<P>::kOt; ++ot)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        o[ot][e] *= scale;
        o_tangent[ot][e] = o_tangent[ot][e] * scale - rounded * o[ot][e];
      }
    const int q = q_begin + row + lane_index() / 4 + half * 8;
    const bool writes = lane_index() % 4 == 0 && q < seqlen_q;
    const long long at = sequence.lse_row(p, h, q);
    if (p.lse.data && writes) p.lse.data[at] = end.lse;
    if (p.lse_tangent && writes) p.lse_tangent[at] = exact;
  }
  store_rows<P>(p.o, sequence, h, q_begin, row, seqlen_q, tile, o);
  store_rows<P>(p.o_tangent, sequence, h, q_begin, row, seqlen_q, tile, o_tangent);
}

template <class Problem>
__device__ void jvp(const JvpParams& p) {
  using P = ForwardPart<Problem>;
  using Element = typename P::Element;
  using Mma = typename P::Mma;
  using Policy = ForwardPolicy<P>;
  using Smem = JvpSmem<Problem>;
  constexpr int kD = P::kHeadDim, kThreads = Policy::kThreads, kUnroll = 4;
  static_assert(Policy::kMt == 1, "a warp has 16 rows: registers hold O and its tangent");
  extern __shared__ __align__(128) char shared[];
  const Smem smem(shared);

  const auto [split, q_tile_index, h, b] = work_tile_of_cta<P>(p);
  const int h_kv = h / p.qhead_per_kvhead();
  const Sequence<P> sequence(p, b);
  const int seqlen_q = sequence.seqlen_q(p), seqused_kv = sequence.seqused_kv(p);
  zero_unused_rows_of_tangents<P>(p);
  const int q_begin = q_tile_index * P::kBr;
  const Range q_range = tile_range(q_tile_index, P::kBr, seqlen_q);
  if (P::kVarlen && q_range.begin == q_range.end) return;
  const auto head = sequence.head(p, h);
  const KvTiles<P> tiles(p, head, q_tile_index, q_range, seqused_kv);

  const auto of_kv = [&](const TensorParam& tensor, int kv) {
    return tensor.data ? sequence.kv_pointer(tensor, h_kv, kv) : nullptr;
  };
  const auto load_k = [&](int i) {
    const int kv = i < tiles.count ? tiles.tile(i) * P::kBc : 0;
    if (i < tiles.count)
      load_with_tangent<P, P::kBc, kD, kThreads>(smem.k, smem.k + Smem::kKBytes, of_kv(p.k, kv), p.k.stride_s,
                                                 of_kv(p.k_tangent, kv), p.k_tangent.stride_s,
                                                 seqused_kv - kv);
    P::Copies::commit();
  };
  const auto load_v = [&](int i) {
    const int kv = tiles.tile(i) * P::kBc;
    load_with_tangent<P, P::kBc, P::kHeadDimV, kThreads>(smem.v, smem.v + Smem::kVBytes, of_kv(p.v, kv),
                                                         p.v.stride_s, of_kv(p.v_tangent, kv),
                                                         p.v_tangent.stride_s, seqused_kv - kv);
    P::Copies::commit();
  };
  load_with_tangent<P, P::kBr, kD, kThreads>(
      smem.q, smem.q + Smem::kLayout.q_tile(), sequence.q_pointer(p.q, h, q_begin), p.q.stride_s,
      p.q_tangent.data ? sequence.q_pointer(p.q_tangent, h, q_begin) : nullptr, p.q_tangent.stride_s,
      seqlen_q - q_begin);
  load_k(0);

  const int lane = lane_index(), row = warp_index() * 16;
  const unsigned q_rows = smem.q + matrix_offset<true>(pitch(kD)) + row * pitch(kD) * 2;
  const unsigned k_rows = smem.k + matrix_offset<false>(pitch(kD));
  const unsigned v_rows = smem.v + matrix_offset<true>(Policy::kVPitch);
  const auto load_q = [&](unsigned(&a)[4], int, int k) { load_matrix_x4(a, q_rows + k * 32); };
  const auto load_q_tangent = [&](unsigned(&a)[4], int, int k) {
    load_matrix_x4(a, q_rows + Smem::kLayout.q_tile() + k * 32);
  };
  const float scale_log2 = score_scale_log2<P>(p);
  OutTiles<P> o = {}, o_tangent = {};
  RowValues<P> row_max, row_sum;
  TangentSums<P> sums;
  clear_rows<P>(row_max, row_sum);

  for (int i = 0; i < tiles.count; ++i) {
    P::Copies::template wait<0>();
    __syncthreads();
    load_v(i);
    ForwardScores<P> s = {}, ds = {};
    multiply_transposed<Mma, Element, kD, kUnroll>(s, k_rows, load_q);  // S = Q K^T
    if (p.q_tangent.data) multiply_transposed<Mma, Element, kD, kUnroll>(ds, k_rows, load_q_tangent);
    if (p.k_tangent.data) multiply_transposed<Mma, Element, kD, kUnroll>(ds, k_rows + Smem::kKBytes, load_q);
    P::Copies::template wait<0>();
    __syncthreads();
    load_k(i + 1);

    const int kv_begin = tiles.tile(i) * P::kBc;
    const Position q_position = position(q_begin + row + lane / 4);
    const Position kv_position = position(kv_begin + lane % 4 * 2);
    const auto at_q = [&](int, int e) { return q_position + e / 2 * 8; };
    const auto at_kv = [&](int nt, int e) { return kv_position + (nt * 8 + e % 2); };
    // The map's blocks are multiples of 16, so an m16n8 tile lies in one of them.
    const auto in_map = [&](int, int nt) {
      return BlocksAttend<P>::at(p, sequence.b, h, min(q_begin + row, seqlen_q - 1),
                                 min(kv_begin + nt * 8, seqused_kv - 1));
    };
    apply_score_tangent<P>(ds, s, p, head, at_q, at_kv);
    ScoreStage<P>::apply(s, p, head, 1.0f, at_q, at_kv);
    if (kv_begin + P::kBc > seqused_kv || !tiles.full(p, head, q_range, tiles.entry(i)))
      apply_mask<P, false, Policy::kKeyBits>(s, p, head, at_q, at_kv, kv_begin, seqused_kv, in_map);
    softmax_with_tangents<P>(s, ds, o, o_tangent, row_max, row_sum, sums, scale_log2);
    multiply_values<P>(o, o_tangent, sums, s, ds, v_rows, v_rows + Smem::kVBytes, p,
                       dropout_head<P>(p, sequence.b, h), at_q, at_kv);
  }
  P::Copies::template wait<0>();
  __syncthreads();
  RowSums whole[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    whole[half] = {quad_sum(row_sum[0][half]), quad_sum(sums.exact[0][half]), quad_sum(sums.rounded[0][half]),
                   sums.shift[0][half]};
  finish_rows<P>(p, sequence, h, q_begin, row, seqlen_q, shared, o[0], o_tangent[0], row_max[0], whole,
                 scale_log2);
}

}  // namespace flashjit::sm80
