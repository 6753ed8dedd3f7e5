// The epilogue of the backward pass: dK and dV of a KV tile, and zeros for keys that no query attends to.
#pragma once

#include "flashjit/sm90/backward_products.cuh"
#include "flashjit/sm90/backward_schedule.cuh"

namespace flashjit::sm90 {

/// Writes dK = dV = 0 for KV tiles that no query attends to, which the scheduler leaves out. By any number of
/// warps. With split-Q the combine_dkdv entry writes them; here they are only counted as done.
template <class P>
__device__ __forceinline__ void write_keys_without_queries(const Params& p) {
  if (!P::kHasMask && !kLists<P> && !kOutOfRangeKeys<P> && !P::kSplit && p.seqlen_q > 0) return;
  const unsigned tiles = kv_work_tiles<P>(p), lane = threadIdx.x % 32;
  // Without queries the counters are not cleared, or there are none, and nothing waits for what they count.
  const bool counts = p.seqlen_q > 0 && !finds_row_stats<P>(p);
  const auto take = [&](unsigned before) {
    if (!counts) return before + gridDim.x * 32;
    const unsigned index = lane == 0 ? atomicAdd(empty_tile_counter(p), 32) : 0u;
    return __shfl_sync(kWholeWarp, index, 0);
  };
  const auto is_empty = [&](const KvWorkTile<P>& work) {
    const Sequence<P> sequence(p, work.b);
    return p.seqlen_q == 0 || QWalk<P>(p, sequence, work, cta_keys<P>(p, 0)).next(p, sequence).head < 0;
  };
  const auto clear = [&](const KvWorkTile<P>& work, const TensorParam& tensor, int columns) {
    const Sequence<P> sequence(p, work.b);
    const int first = work.kv_tile * P::kBc, rows = min(sequence.seqlen_kv(p) - first, P::kBc);
    constexpr int kVector = 16 / sizeof(GradBits<P>);
    auto* to = sequence.template kv_pointer<GradBits<P>>(tensor, work.h_kv, first);
#pragma unroll 1
    for (int row = 0; row < rows; ++row)
      for (int chunk = lane; chunk < columns / kVector; chunk += 32)
        *reinterpret_cast<uint4*>(to + row * tensor.stride_s + chunk * kVector) = uint4{0, 0, 0, 0};
  };
#pragma unroll 1
  for (unsigned first = counts ? take(0) : blockIdx.x * 32; first < tiles; first = take(first)) {
    // Each lane looks at one tile; then the warp clears the empty ones together.
    const bool empty = first + lane < tiles && is_empty(KvWorkTile<P>(p, first + lane));
#pragma unroll 1
    for (unsigned left = __ballot_sync(kWholeWarp, empty); left != 0; left &= left - 1) {
      const KvWorkTile<P> work(p, first + __ffs(static_cast<int>(left)) - 1);
      if constexpr (!P::kSplit && !P::kAddGrads) {
        clear(work, p.dk, P::kHeadDim);
        clear(work, p.dv, P::kHeadDimV);
      }
      if (counts && lane == 0) atomicAdd(done_semaphore(p, work.b, work.h_kv), kDqParts<P>);
    }
  }
}

/// Stores a warpgroup's rows or columns of dK or dV, of those from `first_shared` on, and clears them for the
/// next KV tile. With split-Q they go to `splits`, in fp32.
template <class P, int kCount>
__device__ __forceinline__ void store_gradient(const Params& p, const BackwardSmem<P>& smem, unsigned i,
                                               int wg, float (&c)[kCount], int columns, int first_columns,
                                               float scale, const TensorParam& to, float* splits,
                                               int first_shared = 0) {
  using Policy = BackwardPolicy<P>;
  constexpr int kChunks = kCount / 4;  // of a warpgroup
  const KvTileInfo<P>& kv_tile = smem.kv_tile_of(i);
  int first_chunk = Policy::kWide ? wg * kChunks : 0, end_chunk = columns / 8;
  if constexpr (Policy::kFifthSlice > 0) first_chunk += first_shared / 8;
  if constexpr (Policy::kSplitsColumns) {
    first_chunk = (Policy::first_column(columns) + wg * first_columns) / 8;
    end_chunk = Policy::end_column(columns) / 8;
    if (wg == 0) end_chunk = min(end_chunk, first_chunk + first_columns / 8);
  }
  const int thread = thread_now(), row = smem.kv_begin(i) + Policy::first_row(wg) + own_row(thread);
#pragma unroll
  for (float& value : c) value *= scale;
  const int chunks = min(end_chunk - first_chunk, kChunks), rows = kv_tile.sequence.seqlen_kv(p) - row;
  if constexpr (P::kSplit) {
    const int split = smem.q_tile(i).last - 1;
    const long long at =
        kv_row_of_split(p, split, kv_tile.sequence.b, kv_tile.h_kv, row) * columns + first_chunk * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half * 8 < rows) store_row<kChunks>(splits + at + half * 8 * columns, half, c, chunks);
  } else {
    store_grad_rows<P>(
        c, chunks, kv_tile.sequence.template kv_pointer<GradBits<P>>(to, kv_tile.h_kv, row) + first_chunk * 8,
        to.stride_s, rows, thread);
  }
#pragma unroll
  for (float& value : c) value = 0.0f;
}

/// Stores dK and dV of the KV tile that ends with Q tile i.
template <class P>
__device__ __forceinline__ void store_dk_dv(const Params& p, const BackwardSmem<P>& smem, unsigned i, int wg,
                                            typename BackwardFragments<P>::Dk& dk,
                                            typename BackwardFragments<P>::Dv& dv) {
  ColumnSlices<P>::store_dk(p, smem, i, wg, dk);
  store_gradient(p, smem, i, wg, dv, P::kHeadDimV, BackwardPolicy<P>::kFirstDimV,
                 P::kDropout ? p.keep_scale : 1.0f, p.dv, p.dv_splits);
}

}  // namespace flashjit::sm90
