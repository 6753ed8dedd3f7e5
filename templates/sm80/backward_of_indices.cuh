// Backward pass where each query has a list of keys. A CTA has some of one query's heads, as in the forward
// pass, and streams the keys that the list names: dQ stays in registers; dK and dV of a tile's keys are added
// to fp32 accumulators in global memory, in any order, which the convert_dkdv entry converts. As in
// backward_wide.cuh, warps share the rows and columns of all products.
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/sm80/backward_softmax.cuh"
#include "flashjit/sm80/backward_wide.cuh"
#include "flashjit/sm80/kv_loader.cuh"
#include "flashjit/sm80/query_heads.cuh"

namespace flashjit::sm80 {

/// LSE and D of the tile's heads; those that do not exist have P = 0.
template <class P>
__device__ __forceinline__ void load_head_stats(const Params& p, const Sequence<P>& sequence, int q, int h,
                                                int heads, const BackwardSmem<P>& smem) {
  for (int n = threadIdx.x; n < P::kBr; n += BackwardPolicy<P>::kThreads) {
    const long long at = n < heads ? sequence.stats_row(p, h + n) + q : 0;
    smem.lse(0)[n] = n < heads ? p.lse_padded[at] : infinity();
    smem.d(0)[n] = n < heads ? p.d[at] : 0.0f;
  }
}

/// Scores of entries of the list that are no keys.
template <class P>
__device__ __forceinline__ void hide_missing_keys(BackwardScores<P>& s,
                                                  const int (&keys)[BackwardPolicy<P>::kMt][2]) {
#pragma unroll
  for (int mt = 0; mt < BackwardPolicy<P>::kMt; ++mt)
#pragma unroll
    for (int nt = 0; nt < BackwardPolicy<P>::kNt; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (keys[mt][e / 2] < 0) s[mt][nt][e] = -infinity();
}

/// Adds A B for the warp's keys to their rows in global memory, some units of columns at a time. A is P^T or
/// dS^T in shared memory, and B a tile of the heads' rows.
template <class P, int kDim, class WarpRow>
__device__ __forceinline__ void add_kv_gradient(float* to, unsigned a_tile, unsigned b_tile,
                                                const int (&keys)[BackwardPolicy<P>::kMt][2],
                                                const WarpRow& warp_row, float scale) {
  using Policy = BackwardPolicy<P>;
  constexpr int kUnits = round_up(kDim, 16) / 16, kOwn = units_of(kDim, P::kDSplit);
  constexpr int kAtOnce = kOwn < 4 ? kOwn : 4;
  const int begin = column_part<P>() * kOwn, end = min(begin + kOwn, kUnits);
  const int quad = static_cast<int>(threadIdx.x) % 4;
  const bool odd = quad % 2 != 0;
#pragma unroll 1
  for (int first = begin; first < end; first += kAtOnce) {
    float c[Policy::kMt][2 * kAtOnce][4] = {};
    multiply_tiles<P, pitch(kDim), kUnits, true>(c, a_tile, b_tile, warp_row, first);
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int unit = 0; unit < kAtOnce; ++unit)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Two lanes exchange, so that one has four columns of the first eight, the other of the second.
          const float(&left)[4] = c[mt][2 * unit], (&right)[4] = c[mt][2 * unit + 1];
          const float own[2] = {(odd ? right : left)[half * 2] * scale,
                                (odd ? right : left)[half * 2 + 1] * scale};
          float other[2];
#pragma unroll
          for (int e = 0; e < 2; ++e)
            other[e] = __shfl_xor_sync(kWholeWarp, (odd ? left : right)[half * 2 + e], 1) * scale;
          const int column = (first + unit) * 16 + (odd ? 8 : 0) + quad / 2 * 4;
          if (first + unit >= end || column >= kDim || keys[mt][half] < 0) continue;
          float* at = to + static_cast<long long>(keys[mt][half]) * kDim + column;
          if (odd)
            add_four(at, other[0], other[1], own[0], own[1]);
          else
            add_four(at, own[0], own[1], other[0], other[1]);
        }
  }
}

/// dQ += dS K for a warp's rows and columns of dQ.
template <class P, int kN>
__device__ __forceinline__ void add_dq_of_heads(float (&dq)[BackwardPolicy<P>::kDqMt][kN][4],
                                                const BackwardSmem<P>& smem, int first_row, int first_unit) {
  using Policy = BackwardPolicy<P>;
#pragma unroll
  for (int step = 0; step < P::kBc / 16; ++step) {
    unsigned a[Policy::kDqMt][4];
#pragma unroll
    for (int mt = 0; mt < Policy::kDqMt; ++mt)
      load_matrix_x4_transposed(a[mt], smem.ds(0) + matrix_offset<false>(Policy::kDsPitch) +
                                           (step * 16 * Policy::kDsPitch + first_row + mt * 16) * 2);
    multiply_step<typename P::Mma, typename P::Element, Policy::kDUnits, true>(
        dq, a, smem.k() + matrix_offset<true>(Policy::kQPitch) + step * 16 * Policy::kQPitch * 2, first_unit);
  }
}

/// A warp's rows and columns of dQ, to the heads' rows of a query.
template <class P, int kUnitsOfWarp>
__device__ __forceinline__ void store_dq_of_heads(
    const Params& p, const Sequence<P>& sequence, int q, int h, int heads, int first_row, int first_unit,
    const float (&dq)[BackwardPolicy<P>::kDqMt][2 * kUnitsOfWarp][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int mt = 0; mt < BackwardPolicy<P>::kDqMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + mt * 16 + lane / 4 + half * 8;
      if (row >= heads) continue;
      GradElement<P>* to = sequence.template q_pointer<GradElement<P>>(p.dq, h + row, q);
#pragma unroll
      for (int n = 0; n < 2 * kUnitsOfWarp; ++n) {
        const int column = first_unit * 16 + n * 8 + lane % 4 * 2;
        if (column >= P::kHeadDim) continue;
        const float x = dq[mt][n][half * 2] * p.softmax_scale, y = dq[mt][n][half * 2 + 1] * p.softmax_scale;
        if constexpr (P::kFp32Grads)
          *reinterpret_cast<float2*>(to + column) = float2{x, y};
        else
          *reinterpret_cast<unsigned*>(to + column) = pack<typename P::Element>(x, y);
      }
    }
}

template <class P>
__device__ void backward_of_indices(const Params& p) {
  using Policy = BackwardPolicy<P>;
  constexpr int kThreads = Policy::kThreads, kMt = Policy::kMt;
  extern __shared__ __align__(128) char shared[];
  const BackwardSmem<P> smem(shared);

  const auto [split, q, h, b] = work_tile_of_cta<P>(p);
  const int h_kv = h / p.qhead_per_kvhead();
  const Sequence<P> sequence(p, b);
  const int heads = end_of_rows<P>(p, sequence, q, h);
  if (heads == 0) return;
  const KvSource<P> k(p, p.k, sequence, h_kv), v(p, p.v, sequence, h_kv);
  const IndexList<P> list(p, sequence, h_kv, q);
  const int count = sequence.seqused_kv(p) > 0 ? tiles_of_list<P>(p, sequence, q) : 0;
  const auto load_k = [&](int i) {
    if (i < count) load_listed_tile<P, P::kHeadDim, kThreads>(smem.k(), k, list, p, b, i * P::kBc);
    P::Copies::commit();
  };
  const auto load_v = [&](int i) {
    if (i < count) load_listed_tile<P, P::kHeadDimV, kThreads>(smem.v(), v, list, p, b, i * P::kBc);
    P::Copies::commit();
  };
  load_tile<typename P::Copies, P::kBr, P::kHeadDim, kThreads>(smem.q(0), sequence.q_pointer(p.q, h, q),
                                                               p.q.stride_h, heads);
  load_tile<typename P::Copies, P::kBr, P::kHeadDimV, kThreads>(
      smem.dout(0), sequence.q_pointer(p.dout, h, q), p.dout.stride_h, heads);
  load_k(0);
  load_v(0);
  load_head_stats(p, sequence, q, h, heads, smem);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = column_part<P>(),
            first_head = part * Policy::kNt * 8;  // of those that the warp computes S for
  const auto warp_row = [&](int mt) { return (warp % Policy::kRowWarps * kMt + mt) * 16; };
  const int dq_row = warp / Policy::kDqColumnWarps * Policy::kDqMt * 16,
            dq_unit = warp % Policy::kDqColumnWarps * Policy::kDqUnitsOfWarp;
  float* dk = p.dk_splits + kv_row_of_split(p, 0, sequence.b, h_kv, 0) * P::kHeadDim;
  float* dv = p.dv_splits + kv_row_of_split(p, 0, sequence.b, h_kv, 0) * P::kHeadDimV;
  float dq[Policy::kDqMt][2 * Policy::kDqUnitsOfWarp][4] = {};
  for (int i = 0; i < count; ++i) {
    P::Copies::template wait<0>();
    __syncthreads();
    int keys[kMt][2];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        keys[mt][half] = list.key(i * P::kBc + warp_row(mt) + lane / 4 + half * 8);
    if (part < Policy::kParts) {
      const auto at_q = [&](int, int) { return position(q); };
      const auto at_kv = [&](int mt, int e) { return position(keys[mt][e / 2]); };
      BackwardScores<P> s = {}, dp = {};
      [[maybe_unused]] Slopes<P> slope;
      [[maybe_unused]] Dots<P> dots;
      multiply_kv_by_q<P, P::kHeadDim>(s, smem.k(), smem.q(0), first_head, warp_row);  // S = Q K^T
      hide_missing_keys<P>(s, keys);
      exponentials<P>(p, s, smem.lse(0) + first_head, lane);  // P = exp(S - LSE)
      store_p<P>(smem.p_pointer(), s, warp_row, first_head, lane);
      multiply_kv_by_q<P, P::kHeadDimV>(dp, smem.v(), smem.dout(0), first_head, warp_row);  // dP = dO V^T
      // dS = P (dP - D)
      softmax_backward<P>(dp, s, slope, dots, smem.d(0) + first_head, smem.ds_pointer(0) + first_head * 2, p,
                          sequence.head(p, h), at_q, at_kv, warp_row, lane, [](int, int) {});
    }
    __syncthreads();  // P and dS are complete, V is free
    load_v(i + 1);
    add_dq_of_heads<P>(dq, smem, dq_row, dq_unit);  // dQ += dS K
    __syncthreads();                                // K is free
    load_k(i + 1);
    add_kv_gradient<P, P::kHeadDimV>(dv, smem.p(), smem.dout(0), keys, warp_row, 1.0f);  // dV += P^T dO
    add_kv_gradient<P, P::kHeadDim>(dk, smem.ds(0), smem.q(0), keys, warp_row,
                                    p.softmax_scale);  // dK += dS^T Q
  }
  P::Copies::template wait<0>();
  store_dq_of_heads<P, Policy::kDqUnitsOfWarp>(p, sequence, q, h, heads, dq_row, dq_unit, dq);
}

}  // namespace flashjit::sm80
