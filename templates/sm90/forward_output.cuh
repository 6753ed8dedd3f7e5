// Where O and LSE of a work tile go at the end of the forward pass; StoredOutput<P> names one of the types
// below. All have join_sink(), for a row of several heads' rows; store_lse(), for values of a thread's two
// rows; and store() for O, which is scaled already.
#pragma once

#include "flashjit/async/tma.cuh"
#include "flashjit/async/warp_roles.cuh"
#include "flashjit/common/running_state.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/sm90/forward_cluster.cuh"
#include "flashjit/sm90/forward_smem.cuh"
#include "flashjit/sm90/fragment.cuh"
#include "flashjit/tma/stream_k.cuh"

namespace flashjit::sm90 {

/// The first of a warpgroup's queries.
template <class P>
__device__ __forceinline__ int first_query(const WorkTile<P>& work, int wg) {
  return work.q_begin + row_group<P>(wg) * kWarpgroupRows;
}

/// LSE of a thread's two rows, and where wanted their largest scores, by an output's store_values().
template <class Values, class P>
__device__ __forceinline__ void store_row_stats(const Params& p, const WorkTile<P>& work, int wg,
                                                const float (&lse)[2], const float (&highest)[2]) {
  Values::store_values(p, work, wg, lse_of<P>(p, work.split), lse);
  if (P::kRowMax) Values::store_values(p, work, wg, row_max_of<P>(p, work.split), highest);
}

/// Rows of a work tile are rows of O one after the other: in Q's type.
template <class P>
struct PlainOutput {
  /// All rows are one head's, whose sink end_of_row() has joined.
  static __device__ __forceinline__ void join_sink(const Params&, const WorkTile<P>&, int, int, float,
                                                   RowEnd&) {}
  /// Writes a value of each of a thread's two rows to LSE's place, or to what has its strides; null: nowhere.
  static __device__ __forceinline__ void store_values(const Params& p, const WorkTile<P>& work, int wg,
                                                      float* to, const float (&value)[2]) {
    if (to == nullptr || threadIdx.x % 4 != 0) return;
    const int q = first_query(work, wg) + own_row(), count = work.sequence.seqlen_q(p) - q;
    if (count > 0) to[work.sequence.written_row(p, work.h, q)] = value[0];
    if (count > 8) to[work.sequence.written_row(p, work.h, q + 8)] = value[1];
  }
  static __device__ __forceinline__ void store_lse(const Params& p, const WorkTile<P>& work, int wg,
                                                   const float (&lse)[2], const float (&highest)[2]) {
    store_row_stats<PlainOutput>(p, work, wg, lse, highest);
  }
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps&, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg, const float (&o)[kCount]) {
    const int q = first_query(work, wg) + own_row();
    store_rows<typename P::Element>(o, own_chunks<P>(wg),
                                    work.sequence.q_pointer(p.o, work.h, q) + first_column<P>(wg),
                                    p.o.stride_s, work.sequence.seqlen_q(p) - q);
  }
};
template <class P>
struct Fp32Output : PlainOutput<P> {
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps&, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg, const float (&o)[kCount]) {
    const int q_begin = first_query(work, wg);
    for (int half = 0; half < 2; ++half)
      if (const int q = q_begin + own_row() + half * 8; q < work.sequence.seqlen_q(p))
        store_row<kCount / 4>(work.sequence.template q_pointer<float>(p.o, work.h, q) + first_column<P>(wg),
                              half, o, own_chunks<P>(wg));
  }
};
/// By way of shared memory, see kTmaStoresO.
template <class P>
struct TmaOutput : PlainOutput<P> {
  template <int kCount>
  static __device__ __forceinline__ void store(const Params&, const TensorMaps& maps,
                                               const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                               const float (&o)[kCount]) {
    const int q_begin = first_query(work, wg), first_row = static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
    if (elected()) bulk_wait_read();  // of the work tile before
    __syncwarp();
    stage_rows<typename P::Element, kWarpgroupRows>(o, smem.o(wg), first_row);
    publish_to_async_proxy();
    __syncwarp();
    if (!elected()) return;
    for (int slice = 0; slice < slices(P::kHeadDimV); ++slice)
      store_box(maps.o, smem.o(wg) + (slice * kWarpgroupRows + first_row) * kRowBytes, slice * kSliceColumns,
                q_begin + first_row, work.h, work.sequence.batch());
    bulk_commit();
  }
};

/// One split of the keys: fp32, for the combine entry.
template <class P>
struct SplitOutput : PlainOutput<P> {
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps&, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg, const float (&o)[kCount]) {
    const int q_begin = first_query(work, wg);
    const auto store_columns = [&](long long row, int half) {
      store_row<kCount / 4>(o_of_split<P>(p, work.split) + row * P::kHeadDimV + first_column<P>(wg), half, o,
                            own_chunks<P>(wg));
    };
    for (int half = 0; half < 2; ++half)
      if (const int q = q_begin + own_row() + half * 8; q < work.sequence.seqlen_q(p))
        store_columns(work.sequence.split_row(p, work.h, q), half);
  }
};
/// The same of rows of several heads.
template <class P>
struct PackedSplitOutput : SplitOutput<P> {
  /// The row of LSE, and of O's splits, of one of a thread's two rows; -1: none.
  static __device__ __forceinline__ long long row_of(const Params& p, const WorkTile<P>& work, int wg,
                                                     int half) {
    const int row = own_row() + half * 8, query = query_of_row<P>(p, row);
    const int head = row - query * p.packed.heads,
              q = work.q_begin + row_group<P>(wg) * p.packed.queries + query;
    if (query >= p.packed.queries || head >= work.heads || q >= work.sequence.seqlen_q(p)) return -1;
    return work.sequence.split_row(p, work.h + head, q);
  }
  static __device__ __forceinline__ void store_values(const Params& p, const WorkTile<P>& work, int wg,
                                                      float* to, const float (&value)[2]) {
    if (to == nullptr || threadIdx.x % 4 != 0) return;
    for (int half = 0; half < 2; ++half)
      if (const long long row = row_of(p, work, wg, half); row >= 0) to[row] = value[half];
  }
  static __device__ __forceinline__ void store_lse(const Params& p, const WorkTile<P>& work, int wg,
                                                   const float (&lse)[2], const float (&highest)[2]) {
    store_row_stats<PackedSplitOutput>(p, work, wg, lse, highest);
  }
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps&, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg, const float (&o)[kCount]) {
    const auto store_columns = [&](long long row, int half) {
      store_row<kCount / 4>(o_of_split<P>(p, work.split) + row * P::kHeadDimV + first_column<P>(wg), half, o,
                            own_chunks<P>(wg));
    };
    for (int half = 0; half < 2; ++half)
      if (const long long row = row_of(p, work, wg, half); row >= 0) store_columns(row, half);
  }
};

/// Stores a thread's values of one of its two rows in the type of O.
template <int kChunks>
__device__ __forceinline__ void store_columns_of_row(float* row, int half, const float* o, int chunks) {
  store_row<kChunks>(row, half, o, chunks);
}
template <int kChunks, class Element>
__device__ __forceinline__ void store_columns_of_row(Element* row, int half, const float* o, int chunks) {
  Element* to = row + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    if (chunk < chunks) store_pair(to + chunk * 8, o[chunk * 4 + half * 2], o[chunk * 4 + half * 2 + 1]);
}
/// Stream-K: whole work tiles, in O's type, and partial ones: fp32, for the combine entry. PackGQA without
/// splits: whole ones alone.
template <class P>
struct StreamKOutput {
  static __device__ __forceinline__ void join_sink(const Params& p, const WorkTile<P>& work, int wg, int half,
                                                   float lse, RowEnd& end) {
    if (P::kSinks && work.is_whole())
      end = with_sink<P>(p, row_coord(p, work, wg, own_row() + half * 8).h, lse);
  }
  static __device__ __forceinline__ void store_lse(const Params& p, const WorkTile<P>& work, int wg,
                                                   const float (&lse)[2], const float (&)[2]) {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row() + half * 8;
      const RowCoord target = row_coord(p, work, wg, row);
      if (target.q < 0) continue;
      if (!work.is_whole()) {
        p.lse_splits[row_of_part<P>(work.split, wg, row)] = lse[half];
      } else if (p.lse.data != nullptr) {
        p.lse.data[work.sequence.lse_row(p, target.h, target.q)] = lse[half];
      }
    }
  }
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps&, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg, const float (&o)[kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row() + half * 8;
      const RowCoord target = row_coord(p, work, wg, row);
      if (target.q < 0) continue;  // 16 heads are a quarter of a tile's rows
      if (!work.is_whole()) {
        store_row<kCount / 4>(o_of_part<P>(p, row_of_part<P>(work.split, wg, row)) + first_column<P>(wg),
                              half, o, own_chunks<P>(wg));
      } else {
        OutElement<P>* to =
            work.sequence.template q_pointer<OutElement<P>>(p.o, target.h, target.q) + first_column<P>(wg);
        store_columns_of_row<kCount / 4>(to, half, o, own_chunks<P>(wg));
      }
    }
  }
};

/// Fixed parts: of a work tile that has several, each as a split; of others as stream-K's whole ones.
template <class P>
struct FixedPartOutput {
  using Split = Conditional<P::kPackGqa, PackedSplitOutput<P>, SplitOutput<P>>;
  using Whole = StreamKOutput<P>;
  static __device__ __forceinline__ void join_sink(const Params& p, const WorkTile<P>& work, int wg, int half,
                                                   float lse, RowEnd& end) {
    Whole::join_sink(p, work, wg, half, lse, end);
  }
  static __device__ __forceinline__ void store_lse(const Params& p, const WorkTile<P>& work, int wg,
                                                   const float (&lse)[2], const float (&highest)[2]) {
    if (work.is_whole())
      Whole::store_lse(p, work, wg, lse, highest);
    else
      Split::store_lse(p, work, wg, lse, highest);
  }
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps& maps,
                                               const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                               const float (&o)[kCount]) {
    if (work.is_whole())
      Whole::store(p, maps, smem, work, wg, o);
    else
      Split::store(p, maps, smem, work, wg, o);
  }
};

template <class P>
using SplitOutputs = Conditional<P::kFixedParts, FixedPartOutput<P>,
                                 Conditional<P::kClusterSplit, ClusterOutput<P>,
                                             Conditional<P::kPackGqa, PackedSplitOutput<P>, SplitOutput<P>>>>;
template <class P>
using StoredOutput =
    Conditional<kScattersRows<P>, StreamKOutput<P>,
                Conditional<P::kSplit, SplitOutputs<P>,
                            Conditional<kTmaStoresO<P>, TmaOutput<P>,
                                        Conditional<P::kFp32Out, Fp32Output<P>, PlainOutput<P>>>>>;

}  // namespace flashjit::sm90
