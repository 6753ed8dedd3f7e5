// What the forward pass does of its own where the rows of a tile are heads of one query with a list of keys.
#pragma once

#include "flashjit/common/index_list.cuh"
#include "flashjit/common/out_codes.cuh"
#include "flashjit/common/out_element.cuh"
#include "flashjit/sm80/forward_lse.cuh"
#include "flashjit/sm80/forward_output.cuh"

namespace flashjit::sm80 {

/// S = -inf for the entries that are no keys; `first`: the entry of the lane's first column.
template <class P>
__device__ __forceinline__ void mask_entries(ForwardScores<P>& s, const IndexList<P>& list, int first) {
  using Policy = ForwardPolicy<P>;
#pragma unroll
  for (int nt = 0; nt < Policy::kNt; ++nt)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (list.key(first + nt * 8 + e) >= 0) continue;
#pragma unroll
      for (int mt = 0; mt < Policy::kMt; ++mt) s[mt][nt][e] = s[mt][nt][2 + e] = -infinity();
    }
}

/// Writes LSE of a head's row; what its O must be multiplied by.
template <class P>
__device__ __forceinline__ float end_of_head(const Params& p, const Sequence<P>& sequence, int q, int h,
                                             float max, float sum, float scale_log2) {
  const RowEnd end = end_of_row<P>(p, h, row_lse<P>(p, max, sum, scale_log2, 1.0f));
  if (p.lse.data != nullptr && threadIdx.x % 4 == 0) p.lse.data[sequence.lse_row(p, h, q)] = end.lse;
  const float of_products = sum_of_row<P>(sum, max, scale_log2);
  return has_keys(sum) ? end.factor / of_products : 0.0f;
}

// LSE and O of an m16 tile's rows, which are heads from `h` on, `row` the lane's first; HeadsOutput<P> names
// one of these types.

template <class P>
struct StoredHeads {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int q, int h,
                                               int heads, int row, const float (&max)[2],
                                               const float (&sum)[2], float scale_log2, const OutTile<P>& o) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= heads) continue;
      const int of_row = h + row + half * 8;
      const float scale = end_of_head<P>(p, sequence, q, of_row, max[half], sum[half], scale_log2);
      OutElement<P>* to = sequence.template q_pointer<OutElement<P>>(p.o, of_row, q) + first_column<P>() +
                          threadIdx.x % 4 * 2;
#pragma unroll
      for (int ot = 0; ot < ForwardPolicy<P>::kOt; ++ot) {
        if (ot >= own_chunks<P>()) continue;
        store_pair(to + ot * 8, o[ot][half * 2] * scale, o[ot][half * 2 + 1] * scale);
      }
    }
  }
};
/// O as codes. By whole warps.
template <class P>
struct CodedHeads {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int q, int h,
                                               int heads, int row, const float (&max)[2],
                                               const float (&sum)[2], float scale_log2, OutTile<P>& o) {
    static_assert(!ForwardPolicy<P>::kSharesRows, "a warp has whole rows");
    float scale[2] = {};
    for (int half = 0; half < 2; ++half)
      if (row + half * 8 < heads)
        scale[half] = end_of_head<P>(p, sequence, q, h + row + half * 8, max[half], sum[half], scale_log2);
    scale_tile<P>(o, scale);
    const auto& all = reinterpret_cast<const float(&)[ForwardPolicy<P>::kOt * 4]>(o);
    store_codes<P, 0>(coded_row(p, sequence, h + row, q, row < heads), all);
    store_codes<P, 1>(coded_row(p, sequence, h + row + 8, q, row + 8 < heads), all);
  }
};
template <class P>
using HeadsOutput = Conditional<kOutCodes<P>, CodedHeads<P>, StoredHeads<P>>;

/// LSE and O of all of a warp's rows.
template <class P, int kMt, class WarpRow>
__device__ __forceinline__ void store_heads(const Params& p, const Sequence<P>& sequence, int q, int h,
                                            int heads, float (&o)[kMt][ForwardPolicy<P>::kOt][4],
                                            const RowValues<P>& row_max, const RowValues<P>& row_sum,
                                            const WarpRow& warp_row, int lane, float scale_log2) {
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
    float sum[2];
    for (int half = 0; half < 2; ++half) sum[half] = whole_sum<P>(row_sum[mt][half]);
    HeadsOutput<P>::store(p, sequence, q, h, heads, warp_row(mt) + lane / 4, row_max[mt], sum, scale_log2,
                          o[mt]);
  }
}

}  // namespace flashjit::sm80
