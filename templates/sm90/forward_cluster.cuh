// Split-KV within clusters (kClusterSplit): each CTA sends its part of every row, O in fp32 and LSE, to the
// CTA that joins the row: row r to CTA r % kJoiningCtas. One launch does it all, and no part goes to global
// memory.
// NOTES.md#one-query-of-one-sequence
#pragma once

#include "flashjit/async/cluster.cuh"
#include "flashjit/sm90/forward_smem.cuh"
#include "flashjit/sm90/fragment.cuh"
#include "flashjit/tma/cluster_parts.cuh"
#include "flashjit/tma/combine_parts.cuh"

namespace flashjit::sm90 {

/// The parts of the rows that a CTA joins, in its shared memory.
template <class P>
struct RowExchange {
  static constexpr int kBytesOfPart = P::kHeadDimV * 4;
  ForwardStorage<P> smem;

  __device__ static RowExchange of_cta() {
    extern __shared__ __align__(kAlignment) char shared[];
    return {ForwardStorage<P>(0, shared)};
  }
  __device__ static int owner(int row) { return row % kJoiningCtas; }
  __device__ static int index(int row, int part) { return row / kJoiningCtas * kJoiningCtas + part; }
  __device__ unsigned o(int row, int part) const {
    return smem.joined_parts() + index(row, part) * kBytesOfPart;
  }
  __device__ unsigned lse(int row, int part) const {
    return smem.joined_parts() + kWarpgroupRows * kBytesOfPart + index(row, part) * 4;
  }
  __device__ unsigned barrier() const { return lse(kWarpgroupRows, 0); }
  __device__ const float* pointer(unsigned address) const {
    return reinterpret_cast<const float*>(smem.shared + (address - smem.base));
  }

  __device__ void send_lse(int row, float value) const {
    store_remote(in_cta(lse(row, cluster_rank()), owner(row)), __float_as_uint(value),
                 in_cta(barrier(), owner(row)));
  }
  template <class Vector>
  __device__ void send_o(int row, int column, Vector value) const {
    store_remote(in_cta(o(row, cluster_rank()) + column * 4, owner(row)), value,
                 in_cta(barrier(), owner(row)));
  }
};

/// StoredOutput's functions for a part.
template <class P>
struct ClusterOutput {
  static __device__ __forceinline__ void join_sink(const Params&, const WorkTile<P>&, int, int, float,
                                                   RowEnd&) {}
  static __device__ __forceinline__ void store_lse(const Params& p, const WorkTile<P>& work, int wg,
                                                   const float (&lse)[2], const float (&)[2]) {
    if (threadIdx.x % 4 != 0) return;
    const RowExchange<P> exchange = RowExchange<P>::of_cta();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (const int row = own_row() + half * 8; row_coord(p, work, wg, row).q >= 0)
        exchange.send_lse(row, lse[half]);
  }
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps&, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg, const float (&o)[kCount]) {
    const RowExchange<P> exchange = RowExchange<P>::of_cta();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row() + half * 8;
      if (row_coord(p, work, wg, row).q < 0) continue;
#pragma unroll
      for (int chunk = 0; chunk < P::kHeadDimV / 8; ++chunk)
        exchange.send_o(row, chunk * 8 + static_cast<int>(threadIdx.x) % 4 * 2,
                        float2{o[chunk * 4 + half * 2], o[chunk * 4 + half * 2 + 1]});
    }
  }
};

/// Sends the rows of a part without keys. `threads` threads of one warp do it.
template <class P>
struct ClusterPartsWithoutKeys {
  static __device__ __forceinline__ void write(const Params& p, const SegmentStart&, int thread,
                                               int threads) {
    const WorkTile<P> work(p, coord_in_cluster<P>(p));
    if (work.count() > 0) return;
    const RowExchange<P> exchange = RowExchange<P>::of_cta();
#pragma unroll 1
    for (int row = 0; row < kWarpgroupRows; ++row) {
      if (row_coord(p, work, 0, row).q < 0) continue;
      if (thread == 0) exchange.send_lse(row, -infinity());
      for (int column = thread * 4; column < P::kHeadDimV; column += threads * 4)
        exchange.send_o(row, column, float4{});
    }
  }
};

/// Joins a CTA's rows when all parts of these are there. By the consumer warpgroup.
template <class P>
struct ClusterJoin {
  static __device__ __forceinline__ void run(const Params& p) {
    const RowExchange<P> exchange = RowExchange<P>::of_cta();
    const WorkTile<P> work(p, coord_in_cluster<P>(p));
    const int rank = cluster_rank(), warp = static_cast<int>(threadIdx.x) / 32 % 4;
    int rows = 0;
    for (int row = rank; row < kWarpgroupRows; row += kJoiningCtas) rows += row_coord(p, work, 0, row).q >= 0;
    if (rows == 0) return;
    if (threadIdx.x % 128 == 0)
      barrier_expect(exchange.barrier(), rows * kJoiningCtas * (RowExchange<P>::kBytesOfPart + 4));
    barrier_wait<P>(exchange.barrier(), 0);
#pragma unroll 1
    for (int row = rank + warp * kJoiningCtas; row < kWarpgroupRows; row += 4 * kJoiningCtas)
      if (const RowCoord target = row_coord(p, work, 0, row); target.q >= 0)
        store_joined<P, 1>(p, work.sequence, target, parts_of(exchange, row), 0);
  }
  /// The sum of a row's parts.
  static __device__ __forceinline__ JoinedParts<P> parts_of(const RowExchange<P>& exchange, int row) {
    JoinedParts<P> joined;
    const float* lse = exchange.pointer(exchange.lse(row, 0));
#pragma unroll
    for (int part = 0; part < kJoiningCtas; ++part) joined.highest = fmaxf(joined.highest, lse[part]);
#pragma unroll
    for (int part = 0; part < kJoiningCtas; ++part) {
      const float weight = expf(lse[part] - joined.shift());
      const float4* from = reinterpret_cast<const float4*>(exchange.pointer(exchange.o(row, part)));
      joined.sum += weight;
#pragma unroll
      for (int i = 0; i < joined.kLaneChunks; ++i) {
        const int chunk = static_cast<int>(threadIdx.x) % 32 + i * 32;
        if (chunk >= joined.kChunks) continue;
        const float4 x = from[chunk];
        joined.o[i] = {fmaf(weight, x.x, joined.o[i].x), fmaf(weight, x.y, joined.o[i].y),
                       fmaf(weight, x.z, joined.o[i].z), fmaf(weight, x.w, joined.o[i].w)};
      }
    }
    return joined;
  }
};
template <class P>
struct NoJoin {
  static __device__ __forceinline__ void run(const Params&) {}
};

}  // namespace flashjit::sm90
