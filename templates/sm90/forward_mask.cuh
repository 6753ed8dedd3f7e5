// S = -infinity where a pair of query and key does not attend.
#pragma once

#include "flashjit/common/tile_mask.cuh"
#include "flashjit/sm90/forward_rows.cuh"

namespace flashjit::sm90 {

/// By the mask, the block map, and the number of keys; ScoreMask<P> names one of two types.
template <class P>
struct MaskOfPairs {
  template <int kCount>
  static __device__ __forceinline__ void apply(const Params& p, const WorkTile<P>& work,
                                               const RowState<P>& rows, int kv_begin, float (&s)[kCount]) {
    const int lane = threadIdx.x % 32, row = rows.first_query(), column = kv_begin + lane % 4 * 2;
    const Position row_position = position(row), column_position = position(column);
    const bool any = kTestsMask<P> || P::mask(p, rows.head, row_position, column_position);
    TileMask<P, P::kBc> mask;
    const auto row_at = [&](int half) { return row + half * rows.to_second(); };
    mask.find(p, rows.head, row_at, kv_begin);
    [[maybe_unused]] unsigned attend[2][(kCount + 63) / 64];
    if (kMasksByBits<P>) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kCount; n += 64)
          attend[half][n / 64] =
              own_keys<P>(p, rows.head, row + half * rows.to_second(), column + n * 2, rows.seqused_kv);
    }
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      // The map's blocks are multiples of 16, so a warp's sixteen rows and these eight columns lie in one.
      bool block = true;
      if constexpr (kTestsMap<P>) {
        const int q = min(row - lane / 4, rows.q.end - 1), kv = min(kv_begin + n * 2, rows.seqused_kv - 1);
        block = in_block_map<P>(p, work.sequence.b, work.h, q, kv);
      }
      const auto columns = mask.columns(n * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Position kv = column_position + (n / 4 * 8 + e % 2);
        if (kMasksByBits<P>)
          s[n + e] = mask_score<P>(s[n + e], block, true, attend[e / 2][n / 64] >> (n % 64 / 2 + e % 2) & 1u);
        else
          s[n + e] = mask_score<P>(s[n + e], block, kv.at < rows.seqused_kv,
                                   kTestsMask<P> ? mask.attends(p, rows.head, e / 2, columns, e % 2,
                                                                row_position + e / 2 * rows.to_second(), kv)
                                                 : any);
      }
    }
  }
};
/// Lists of keys: by which of the tile's entries are keys.
template <class P>
struct MaskOfEntries {
  template <int kCount>
  static __device__ __forceinline__ void apply(const Params&, const WorkTile<P>&, const RowState<P>& rows,
                                               int, float (&s)[kCount]) {
    const int of_lane = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < kCount; n += 16) {  // 32 keys
      const unsigned present = rows.present[n / 16] >> of_lane;
#pragma unroll
      for (int e = 0; e < 16; ++e)
        if (!(present >> (e / 4 * 8 + e % 2) & 1u)) s[n + e] = -infinity();
    }
  }
};
template <class P>
using ScoreMask =
    Conditional<P::kJoinsLists, MaskOfRows<P>, Conditional<P::kIndices, MaskOfEntries<P>, MaskOfPairs<P>>>;

}  // namespace flashjit::sm90
