// Forward pass with mma.sync (FlashAttention-2, algorithm 1): one CTA a Q tile, KV tiles streamed
// through shared memory by cp.async or TMA, each warp owns rows of S, P and O in registers. Where registers
// allow, P V of a tile is computed among the softmax of the next one (FlashAttention-3, section 3.2): tensor
// cores and exponentials then work at the same time within a warp, too.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/unused_out_rows.cuh"
#include "flashjit/sm80/forward_heads.cuh"
#include "flashjit/sm80/forward_loader.cuh"
#include "flashjit/sm80/forward_out_mod.cuh"
#include "flashjit/sm80/forward_pv.cuh"
#include "flashjit/sm80/forward_running_state.cuh"
#include "flashjit/sm80/forward_smem.cuh"
#include "flashjit/sm80/forward_weights.cuh"
#include "flashjit/sm80/instructions.cuh"
#include "flashjit/sm80/kv_loader.cuh"
#include "flashjit/sm80/products.cuh"
#include "flashjit/sm80/query_heads.cuh"
#include "flashjit/sm80/shared_rows.cuh"

namespace flashjit::sm80 {

/// The offsets of a lane's first matrices in a tile of Q, K and V.
template <class P>
struct MatrixOffsets {
  using Policy = ForwardPolicy<P>;
  unsigned q = matrix_offset<true>(pitch(Policy::kQColumns));
  unsigned k =
      matrix_offset<false>(pitch(Policy::kKColumns)) + first_key_of_warp<P>() * pitch(Policy::kKColumns) * 2;
  unsigned v =
      Policy::kCodeProducts ? lane_index() * Policy::kVPitch * 2 : matrix_offset<true>(Policy::kVPitch);
};

/// O, m and l of a warp's rows over the KV tiles, whose first copies have been started. How it gets its many
/// arguments decides the order of the machine code (NOTES.md#functions-of-sm80).
template <class P, class List, class LoadK, class LoadV, class WarpRow>
__device__ __forceinline__ void compute_tiles(const Params& p, ForwardSmem<P>& smem,
                                              const Sequence<P>& sequence, const typename P::Head& head,
                                              const KvTiles<P>& tiles, const Range& q_range, const int& h,
                                              const int& q_begin, const int& seqlen_q, const int& seqused_kv,
                                              const MatrixOffsets<P>& offsets, const HeadScales& scales,
                                              const float& scale_log2, const List& list, const LoadK& load_k,
                                              const LoadV& load_v, const WarpRow& warp_row, int lane,
                                              OutTiles<P>& o, RowValues<P>& row_max, RowValues<P>& row_sum) {
  using Policy = ForwardPolicy<P>;
  using Pv = PvStage<P>;
  using Stages = KvStages<P>;
  using Weights = RowWeights<P>;
  constexpr int kMt = Policy::kMt, kNt = Policy::kNt;
  unsigned q_fragments[P::kQInRegisters ? Policy::kQSteps : 1][kMt][4];
  const auto load_q = [&](unsigned(&a)[4], int mt, int k) {
    load_matrix_x4(a, smem.q + offsets.q + (warp_row(mt) * pitch(Policy::kQColumns) + k * 16) * 2);
  };
  PFragments<P> p_fragments;
  const auto add_pv = [&](int i, int k, float after) {
    multiply_pv<P>(o, p_fragments[k], smem.v(i) + offsets.v, smem.v_scales(i), k, after);
  };
  QFragments<P>::load(q_fragments, load_q);

  // S and P of KV tile i, and a P V: its own, or, among the softmax, that of the tile before.
  const auto step = [&](int i, auto first) {
    Stages::begin_step(smem, i, load_k, load_v);
    ForwardScores<P> s = {};
    const unsigned k_tile = smem.k(i) + offsets.k;
    multiply_qk<P>(s, q_fragments, k_tile, load_q);  // S = Q K^T
    if (P::kKeyScales) scale_keys<P>(s, smem.k_scales(i));
    Stages::end_qk(smem, i, load_k);

    const int tile_begin = tiles.tile(i) * P::kBc, kv_begin = tile_begin + first_key_of_warp<P>();
    const Position q_position = position(q_begin + warp_row(0) + lane / 4);
    const Position kv_position = position(kv_begin + lane % 4 * 2);
    const auto at_q = [&](int mt, int e) { return q_position + (mt * 16 * Policy::kRowWarps + e / 2 * 8); };
    const auto at_kv = [&](int nt, int e) { return kv_position + (nt * 8 + e % 2); };
    // The map's blocks are multiples of 16, so an m16n8 tile lies in one of them.
    const auto in_map = [&](int mt, int nt) {
      if constexpr (!kTestsMap<P>)
        return true;
      else
        return in_block_map<P>(p, sequence.b, h, min(q_begin + warp_row(mt), seqlen_q - 1),
                               min(kv_begin + nt * 8, seqused_kv - 1));
    };
    ScoreStage<P>::apply(s, p, head, scales.k, at_q, at_kv);
    if (P::kIndices) mask_entries<P>(s, list(), kv_begin + lane % 4 * 2);
    const bool unmasked =
        P::kIndices || (tile_begin + P::kBc <= seqused_kv && tiles.full(p, head, q_range, tiles.entry(i)));
    if (!unmasked)
      apply_mask<P, false, Policy::kKeyBits>(s, p, head, at_q, at_kv, kv_begin, seqused_kv, in_map);

    RowValues<P> shift, rescale;
    if constexpr (P::kSkipSoftmax)
      if (leaves_out_tile<P>(p, smem, s, row_max, shift, scale_log2, seqlen_q, at_q))
        return Stages::end_step(i, load_k);
    const bool same_max =
        Weights::update(row_max, row_sum, shift, rescale, scale_log2, s, smem, warp_row);  // m = rowmax(S)
    float exponential = 0.0f;
#pragma unroll
    for (int k = 0; k < (kNt + 1) / 2; ++k) {
      Pv::among(first, i, k, exponential, add_pv);
      exponential = Weights::weigh(s, row_sum, row_max, shift, scale_log2, 2 * k);  // P = exp2(S - m)
      Pv::keep(p_fragments, s, k);
    }
    Pv::rescale(o, rescale, same_max);
    Pv::multiply(
        i, o, p_fragments, s, rescale, smem, smem.v(i) + offsets.v, p,
        [&] { return dropout_head<P>(p, sequence.b, h); }, seqused_kv, warp_row, at_q, at_kv, add_pv);
    Stages::end_step(i, load_k);
  };

  StepLoop<P>::run(smem, tiles.count, step, load_v, add_pv);
}

/// `maps`: where TMA copies K and V, their tensor maps.
template <class P, class... Maps>
__device__ void forward(const Params& p, const Maps&... maps) {
  using Policy = ForwardPolicy<P>;
  extern __shared__ __align__(128) char shared[];
  ForwardSmem<P> smem(shared);

  const auto [split, q_tile_index, h, b] = work_tile_of_cta<P>(p);
  const int h_kv = h / p.qhead_per_kvhead();
  const Sequence<P> sequence(p, b);
  const int seqlen_q = end_of_rows<P>(p, sequence, q_tile_index, h), seqused_kv = sequence.seqused_kv(p);
  zero_unused_rows_of_output<P>(p);
  const int q_begin = P::kIndices ? 0 : q_tile_index * P::kBr;
  const Range q_range = tile_range(P::kIndices ? 0 : q_tile_index, P::kBr, seqlen_q);
  if (P::kVarlen && q_range.begin == q_range.end) return;
  const auto head = sequence.head(p, h);
  KvTiles<P> tiles(p, head, q_tile_index, q_range, seqused_kv);
  if (P::kSplit) tiles.keep_split(p, split);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto warp_row = [&](int mt) { return mt * 16 * Policy::kRowWarps + row_warp<P>(warp) * 16; };
  const int first_key_read = first_key_of<P>(p, head, q_range);
  const auto k = TileSources<P>::k(p, sequence, h_kv, first_key_read, maps...);
  const auto v = TileSources<P>::v(p, sequence, h_kv, first_key_read, maps...);
  const KvScales<P> k_scales(p, p.k_scale, sequence, h_kv, first_key_read),
      v_scales(p, p.v_scale, sequence, h_kv, first_key_read);
  const auto list = [&] { return IndexList<P>(p, sequence, h_kv, q_tile_index); };
  const auto load_k = [&](int i) {
    if (i >= tiles.count) return;
    const int kv = tiles.tile(i) * P::kBc;
    KvTileLoader<P>::template load<Policy::kKColumns>(smem, smem.k(i), k, list, p, b, kv, seqused_kv - kv);
    load_key_scales<P>(smem.k_scales(i), k_scales, kv, seqused_kv - kv);
  };
  const auto load_v = [&](int i) {
    if (P::kSharedKv || i < 0 || i >= tiles.count) return;
    const int kv = tiles.tile(i) * P::kBc;
    KvTileLoader<P>::template load<Policy::kVColumns>(smem, smem.v(i), v, list, p, b, kv, seqused_kv - kv);
    load_key_scales<P>(smem.v_scales(i), v_scales, kv, seqused_kv - kv);
  };
  const auto rows_of = [&](const TensorParam& q) {
    return QRows<P>{sequence.template q_pointer<QBits<P>>(q, h, P::kIndices ? q_tile_index : q_begin),
                    P::kIndices ? q.stride_h : q.stride_s};
  };
  QLoader<P>::load(smem, p, rows_of, seqlen_q - q_begin);
  KvStages<P>::start(load_k, load_v);

  const MatrixOffsets<P> offsets;
  const HeadScales scales = head_scales(q_scale<P>(p, b, h_kv), k_scales, v_scales);
  const float scale_log2 = score_scale_log2<P>(p, scales.k);
  OutTiles<P> o = {};
  RowValues<P> row_max, row_sum;
  clear_rows<P>(row_max, row_sum);
  compute_tiles<P>(p, smem, sequence, head, tiles, q_range, h, q_begin, seqlen_q, seqused_kv, offsets, scales,
                   scale_log2, list, load_k, load_v, warp_row, lane, o, row_max, row_sum);
  if (kScaledKv<P>) in_order(o);
  smem.count(p, tiles.count);

  // O = O / rowsum(P), and LSE; warps that share rows write the same. (NOTES.md#functions-of-sm80)
  RowWeights<P>::share(row_sum, smem, warp_row);
  if constexpr (P::kIndices) {
    store_heads<P>(p, sequence, q_tile_index, h, seqlen_q, o, row_max, row_sum, warp_row, lane, scale_log2);
  } else {
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt) {
      RunningState<P> state;
      float scale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float max = row_max[mt][half], sum = whole_sum<P>(row_sum[mt][half]);
        const int q = q_begin + warp_row(mt) + lane / 4 + half * 8;
        RowEnd end = end_of_row<P>(p, h, row_lse<P>(p, max, sum / Policy::kLargestP, scale_log2, scales.k));
        const long long at = sequence.written_row(p, h, q);
        state.join(p, q < seqlen_q, at, end, half);
        if (float* to = lse_of<P>(p, split); to != nullptr && lane % 4 == 0 && q < seqlen_q) to[at] = end.lse;
        if (P::kRowMax && lane % 4 == 0 && q < seqlen_q)
          row_max_of<P>(p, split)[at] = largest_or_nan(largest_score<P>(p, max, scales.k), sum);
        scale[half] = RowWeights<P>::scale(p, end, max, sum, scale_log2, scales.v);
      }
      state.add_to(p, sequence, h, q_begin + warp_row(mt) + lane / 4, o[mt], scale);
      Output<P>::store(p, sequence, h, split, q_begin, warp_row(mt), seqlen_q, lane, smem.o(), o[mt], scale);
    }
  }
}

}  // namespace flashjit::sm80
