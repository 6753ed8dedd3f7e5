// Which KV tile is a CTA's work in the backward pass, and the copies of the Q tiles that it visits.
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm80/backward_smem.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// The index of this CTA's work tile. With ordered additions work tiles are numbered as CTAs start, so that a
/// CTA only waits for CTAs that already run. Uses the first word of shared memory.
template <class P>
__device__ __forceinline__ unsigned next_work_tile(const Params& p, char* shared) {
  unsigned work = blockIdx.x;
  if constexpr (P::kDeterministic) {
    // Without queries no CTA waits, and the counter has not been cleared.
    int* next = reinterpret_cast<int*>(shared);
    if (threadIdx.x == 0)
      *next = p.seqlen_q > 0 ? atomicAdd(kv_tile_counter(p), 1) : static_cast<int>(blockIdx.x);
    __syncthreads();
    work = static_cast<unsigned>(*next);
    __syncthreads();
  }
  return work;
}

/// Whether a work tile's keys are behind the end of their sequence, and no other tile waits for it.
template <class P>
__device__ __forceinline__ bool is_past_sequence(const Params& p, const Sequence<P>& sequence,
                                                 const KvWorkTile<P>& work) {
  return P::kVarlen && work.kv_tile * P::kBc >= sequence.seqlen_kv(p) &&
         (!kListedDqOrder<P> || QWalk<P>(p, sequence, work).next(p, sequence).head < 0);
}

/// Starts the copies of a tile of K and of V.
template <class P>
__device__ __forceinline__ void load_kv_tiles(const Params& p, const Sequence<P>& sequence,
                                              const BackwardSmem<P>& smem, int h_kv, int kv_begin,
                                              int seqused_kv) {
  constexpr int kThreads = BackwardPolicy<P>::kThreads;
  const KvSource<P> k(p, p.k, sequence, h_kv), v(p, p.v, sequence, h_kv);
  load_tile<typename P::Copies, P::kBc, P::kHeadDim, kThreads>(smem.k(), k.row(kv_begin), k.stride(),
                                                               seqused_kv - kv_begin);
  load_tile<typename P::Copies, P::kBc, P::kHeadDimV, kThreads>(smem.v(), v.row(kv_begin), v.stride(),
                                                                seqused_kv - kv_begin);
}

/// Copies a Q tile, its dO and its rows' LSE and D: load() starts, and put() ends what waits in registers
/// (`smem`, a HeldQTile), which is nothing here.
template <class P>
struct AsyncQTileLoader {
  static __device__ __forceinline__ void load(const Params& p, const Sequence<P>& sequence,
                                              const StagedTile& next, BackwardSmem<P>& smem, int stage) {
    using Policy = BackwardPolicy<P>;
    const int h = next.head, q = next.tile * P::kBr, valid = sequence.seqlen_q(p) - q;
    load_tile<typename P::Copies, P::kBr, P::kHeadDim, Policy::kThreads>(
        smem.q(stage), sequence.q_pointer(p.q, h, q), p.q.stride_s, valid);
    load_tile<typename P::Copies, P::kBr, P::kHeadDimV, Policy::kThreads>(
        smem.dout(stage), sequence.q_pointer(p.dout, h, q), p.dout.stride_s, valid);
    const long long row = sequence.stats_row(p, h) + q;
    static_assert(P::kBr / 2 <= Policy::kThreads, "one thread for each four rows of LSE and of D");
    if (threadIdx.x < P::kBr / 2) {
      const bool first = threadIdx.x < P::kBr / 4;
      const int four = static_cast<int>(threadIdx.x) % (P::kBr / 4) * 4;
      P::Copies::start_16(smem.row_stats(first, stage, four), (first ? p.lse_padded : p.d) + row + four,
                          true);
    }
  }
  static __device__ __forceinline__ void put(const BackwardSmem<P>&, int) {}
};
template <class P>
using QTileLoader = typename P::Copies::template QTileLoader<P>;

}  // namespace flashjit::sm80
