// P and dS as operands in shared memory, and, where the CTAs of a cluster split columns, what they send each
// other before and after: ColumnSplit<P> names one of two types.
#pragma once

#include "flashjit/sm90/backward_score_tile.cuh"

namespace flashjit::sm90 {

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
};

/// Sends the other CTA partial S or dP of the pairs whose P it computes.
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

/// Each CTA has all columns: its S and dP are whole, and so are P and dS.
template <class P>
struct WholeColumns {
  using S = typename BackwardFragments<P>::S;
  static __device__ __forceinline__ void publish_received() {}
  static __device__ __forceinline__ void send_s(const BackwardSmem<P>&, int, S&) {}
  static __device__ __forceinline__ void exchange(const BackwardSmem<P>&, unsigned, int, S&, S&) {}
  static __device__ __forceinline__ void send_operands(const BackwardSmem<P>&, unsigned,
                                                       const OperandStore<P>&) {}
};

/// Each CTA has half of the columns, and S and dP are sums over its own: of half of the pairs it sends them
/// to the other CTA, of the other half it adds the other's. Then it sends P and dS.
template <class P>
struct SplitColumns {
  using Policy = BackwardPolicy<P>;
  using S = typename BackwardFragments<P>::S;

  /// What the other CTA has sent becomes visible to products.
  static __device__ __forceinline__ void publish_received() { publish_to_async_proxy(); }

  /// While dP is computed.
  static __device__ __forceinline__ void send_s(const BackwardSmem<P>& smem, int wg, S& s) {
    named_barrier_sync(kBothConsumers, 2 * 128);  // both have read P and dS of the Q tile before
    if (threadIdx.x % 128 == 0)
      barrier_expect(smem.partial_sums_full(wg), Policy::kLayout.partial_sums_bytes());
    wgmma_wait<1>();
    pin(s);
    send_partial(smem, wg, 0, s);
  }
  static __device__ __forceinline__ void exchange(const BackwardSmem<P>& smem, unsigned i, int wg, S& s,
                                                  S& dp) {
    send_partial(smem, wg, 1, dp);
    PartialSumsRing<P>::wait_full(smem, wg, i);
    add_partial(smem, wg, 0, s);
    add_partial(smem, wg, 1, dp);
  }
  static __device__ __forceinline__ void send_operands(const BackwardSmem<P>& smem, unsigned i,
                                                       const OperandStore<P>& store) {
    __syncwarp();
    send_row(smem, store, smem.p(i), smem.ds_full(i));
    send_row(smem, store, smem.ds(i), smem.ds_full(i));
  }

 private:
  /// The first sixteen queries of a tile that the warp has stored, a row of a matrix a lane.
  static __device__ __forceinline__ void send_row(const BackwardSmem<P>& smem, const OperandStore<P>& store,
                                                  unsigned tile, unsigned full) {
    const int other = 1 - Policy::rank();
    const unsigned at = tile + store.first_offset;
    const float4 row = *reinterpret_cast<const float4*>(smem.pointer(at));
    store_remote(in_cta(at, other), row, in_cta(full, other));
  }
};

template <class P>
using ColumnSplit = Conditional<BackwardPolicy<P>::kSplitsColumns, SplitColumns<P>, WholeColumns<P>>;

}  // namespace flashjit::sm90
