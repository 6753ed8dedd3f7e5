// The epilogue of the forward pass: LSE of a warpgroup's rows, and O from its accumulators to global memory.
#pragma once

#include "flashjit/async/warp_roles.cuh"
#include "flashjit/common/running_state.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/sm90/forward_policy.cuh"
#include "flashjit/sm90/forward_smem.cuh"
#include "flashjit/sm90/forward_softmax.cuh"
#include "flashjit/tma/stream_k.cuh"

namespace flashjit::sm90 {

/// PackGQA: the row of LSE, and of O's splits, of one of a thread's two rows; -1: none.
template <class P>
__device__ __forceinline__ long long packed_row(const Params& p, const WorkTile<P>& work, int wg, int half) {
  const int row = own_row() + half * 8, query = query_of_row<P>(p, row);
  const int head = row - query * p.packed.heads,
            q = work.q_begin + row_group<P>(wg) * p.packed.queries + query;
  if (query >= p.packed.queries || head >= work.heads || q >= work.sequence.seqlen_q(p)) return -1;
  return work.sequence.lse_row(p, work.h + head) + q;
}

/// Writes a value of each of a thread's two rows to [batch, heads_q, seqlen_q]; null: nowhere.
template <class P>
__device__ __forceinline__ void store_of_rows(const Params& p, const WorkTile<P>& work, int wg, float* to,
                                              const float (&value)[2]) {
  if (to == nullptr || threadIdx.x % 4 != 0) return;
  if constexpr (P::kPackGqa) {
    for (int half = 0; half < 2; ++half)
      if (const long long row = packed_row(p, work, wg, half); row >= 0) to[row] = value[half];
    return;
  }
  const int q = work.q_begin + row_group<P>(wg) * kWarpgroupRows + own_row(),
            count = work.sequence.seqlen_q(p) - q;
  to += work.sequence.lse_row(p, work.h) + q;
  if (count > 0) to[0] = value[0];
  if (count > 8) to[8] = value[1];
}

/// LSE of a thread's two rows, of a part or of a whole work tile.
template <class P>
__device__ __forceinline__ void store_lse_of_part(const Params& p, const WorkTile<P>& work, int wg,
                                                  const float (&lse)[2]) {
  if (threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own_row() + half * 8;
    const RowPlace place = row_place(p, work, wg, row);
    if (place.q < 0) continue;
    if (work.split != kWhole) {
      p.lse_splits[row_of_part<P>(work.split, wg, row)] = lse[half];
    } else if (p.lse != nullptr) {
      p.lse[work.sequence.lse_row(p, place.h) + place.q] = lse[half];
    }
  }
}
/// And O.
template <class P, int kCount>
__device__ __forceinline__ void store_o_of_part(const Params& p, const WorkTile<P>& work, int wg,
                                                const float (&o)[kCount]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own_row() + half * 8;
    const RowPlace place = row_place(p, work, wg, row);
    if (place.q < 0) continue;  // 16 heads are a quarter of a tile's rows
    if (work.split != kWhole) {
      store_row<kCount / 4>(o_of_part<P>(p, row_of_part<P>(work.split, wg, row)) + first_column<P>(wg), half,
                            o, own_chunks<P>(wg));
    } else {
      OutElement<P>* row_of_o =
          work.sequence.template q_pointer<OutElement<P>>(p.o, place.h, place.q) + first_column<P>(wg);
      if constexpr (P::kFp32Out) {
        store_row<kCount / 4>(row_of_o, half, o, own_chunks<P>(wg));
        continue;
      }
      OutElement<P>* to = row_of_o + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int chunk = 0; chunk < kCount / 4; ++chunk)
        if (chunk < own_chunks<P>(wg))
          *reinterpret_cast<unsigned*>(to + chunk * 8) =
              pack<typename P::Element>(o[chunk * 4 + half * 2], o[chunk * 4 + half * 2 + 1]);
    }
  }
}

/// With a running state: the factors for its O of a thread's two rows.
struct StateFactors {
  float of_row[2] = {};
};

/// Writes LSE = m + log(l) of the rows; `scale` is what O must be multiplied by, 1 / l.
template <class P>
__device__ __forceinline__ StateFactors finalize_rows(const Params& p, const WorkTile<P>& work,
                                                      const SoftmaxRows<P>& rows, int wg, float (&scale)[2]) {
  const float to_log2[] = {exponent_scale(p, rows, 0), exponent_scale(p, rows, 1)};
  float lse[2], highest[2];
  StateFactors state;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_quad(rows.sum[half]);
    highest[half] = largest_score(p, rows, half);
    const float rest = shift_rest<P>(rows.max[half], to_log2[half]);
    lse[half] = row_lse<P>(sum, highest[half], rest);
    if (P::kSplit && P::kFarScores && sum > 0.0f && is_far(highest[half]))
      lse[half] = far_lse(highest[half], sum);
    if (P::kRowMax) highest[half] = largest_or_nan(highest[half], sum);
    RowEnd end = end_of_row<P>(p, work.h, lse[half]);
    if constexpr (kPlacesRows<P> && P::kSinks)
      if (work.split == kWhole)
        end = with_sink<P>(p, row_place(p, work, wg, own_row() + half * 8).h, lse[half]);
    if constexpr (kJoinsState<P>) {
      const int q = work.q_begin + row_group<P>(wg) * kWarpgroupRows + own_row() + half * 8;
      state.of_row[half] =
          join_state<P>(p, q < work.sequence.seqlen_q(p), work.sequence.lse_row(p, work.h) + q, end);
    }
    lse[half] = end.lse;
    scale[half] = scale_of_row(p, rows, sum, rest, end.factor);
  }
  if constexpr (kPlacesRows<P>) {
    store_lse_of_part(p, work, wg, lse);
  } else {
    store_of_rows<P>(p, work, wg, lse_of<P>(p, work.split), lse);
    if constexpr (P::kRowMax) store_of_rows<P>(p, work, wg, row_max_of<P>(p, work.split), highest);
  }
  return state;
}

/// Adds the running state's O, where there is one, to O of a work tile, scaled already.
template <class P, int kCount>
__device__ __forceinline__ void add_state(const Params& p, const WorkTile<P>& work, int wg,
                                          const StateFactors& state, float (&o)[kCount]) {
  if constexpr (kJoinsState<P>) {
    const int q = work.q_begin + row_group<P>(wg) * kWarpgroupRows + own_row();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      flashjit::add_state<kCount / 4>(
          o, half, work.sequence.template q_pointer<float>(p.o_state, work.h, q + half * 8),
          state.of_row[half]);
  }
}

/// Stores O of a work tile, scaled already.
template <class P, int kCount>
__device__ __forceinline__ void store_o(const Params& p, const TensorMaps& maps,
                                        const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                        const float (&o)[kCount]) {
  using Element = typename P::Element;
  const int q_begin = work.q_begin + row_group<P>(wg) * kWarpgroupRows;
  const auto store_columns = [&](long long row, int half) {
    store_row<kCount / 4>(o_of_split<P>(p, work.split) + row * P::kHeadDimV + first_column<P>(wg), half, o,
                          own_chunks<P>(wg));
  };
  if constexpr (kPlacesRows<P>) {
    store_o_of_part(p, work, wg, o);
  } else if constexpr (P::kPackGqa) {
    for (int half = 0; half < 2; ++half)
      if (const long long row = packed_row(p, work, wg, half); row >= 0) store_columns(row, half);
  } else if constexpr (P::kSplit) {
    for (int half = 0; half < 2; ++half)
      if (const int q = q_begin + own_row() + half * 8; q < work.sequence.seqlen_q(p))
        store_columns(work.sequence.lse_row(p, work.h) + q, half);
  } else if constexpr (kTmaStoresO<P>) {
    const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
    if (elected()) bulk_wait_read();  // of the work tile before
    __syncwarp();
    stage_rows<Element, kWarpgroupRows>(o, smem.o(wg), first_row);
    publish_to_async_proxy();
    __syncwarp();
    if (!elected()) return;
    for (int slice = 0; slice < slices(P::kHeadDimV); ++slice)
      store_box(maps.o, smem.o(wg) + (slice * kWarpgroupRows + first_row) * kRowBytes, slice * kSliceColumns,
                q_begin + first_row, work.h, work.sequence.batch());
    bulk_commit();
  } else if constexpr (P::kFp32Out) {
    for (int half = 0; half < 2; ++half)
      if (const int q = q_begin + own_row() + half * 8; q < work.sequence.seqlen_q(p))
        store_row<kCount / 4>(work.sequence.template q_pointer<float>(p.o, work.h, q) + first_column<P>(wg),
                              half, o, own_chunks<P>(wg));
  } else {
    const int q = q_begin + own_row();
    store_rows<Element>(o, own_chunks<P>(wg), work.sequence.q_pointer(p.o, work.h, q) + first_column<P>(wg),
                        p.o.stride_s, work.sequence.seqlen_q(p) - q);
  }
}

}  // namespace flashjit::sm90
