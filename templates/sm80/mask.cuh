// The mask over a warp's scores, for both passes: S has queries as rows, S^T of the backward pass keys.
#pragma once

#include "flashjit/common/tile_mask.cuh"
#include "flashjit/sm80/layout.cuh"

namespace flashjit::sm80 {

/// S = masked_score() where a pair does not attend. `at_row(mt, e)` and `at_column(nt, e)` are positions of a
/// lane's values; `in_map(mt, nt)`: whether the block map lets an m16n8 tile attend. kKeyBits: a word of bits
/// holds which keys of a row attend.
template <class P, bool kRowsAreKeys, bool kKeyBits, int kMt, int kNt, class AtRow, class AtColumn,
          class InMap>
__device__ __forceinline__ void apply_mask(float (&s)[kMt][kNt][4], const Params& p,
                                           const typename P::Head& head, const AtRow& at_row,
                                           const AtColumn& at_column, int first_column, int seqused_kv,
                                           const InMap& in_map) {
  TileMask<P, kNt * 8, kMt * 2> mask;
  const auto row_at = [&](int n) { return at_row(n / 2, n % 2 * 2).at; };
  mask.find(p, head, row_at, first_column);
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
    [[maybe_unused]] unsigned attend[2][(kNt + 15) / 16];
    if constexpr (kKeyBits) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int nt = 0; nt < kNt; nt += 16)
          attend[half][nt / 16] =
              own_keys<P>(p, head, at_row(mt, half * 2).at, at_column(nt, 0).at, seqused_kv);
    }
#pragma unroll
    for (int nt = 0; nt < kNt; ++nt) {
      const bool block = in_map(mt, nt);
      const auto columns = mask.columns(nt * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = s[mt][nt][e];
        if constexpr (kKeyBits) {
          score = mask_score<P>(score, block, true, attend[e / 2][nt / 16] >> (nt % 16 * 2 + e % 2) & 1u);
        } else {
          const Position q = kRowsAreKeys ? at_column(nt, e) : at_row(mt, e),
                         kv = kRowsAreKeys ? at_row(mt, e) : at_column(nt, e);
          score = mask_score<P>(score, block, kv.at < seqused_kv,
                                mask.attends(p, head, mt * 2 + e / 2, columns, e % 2, q, kv));
        }
      }
    }
  }
}

}  // namespace flashjit::sm80
