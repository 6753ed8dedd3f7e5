// A mask's row and column terms, such as the document of a query or of a key: found once for a row or a
// column of a tile instead of for each pair.
#pragma once

#include "flashjit/common/visible.cuh"

namespace flashjit {

/// The mask over a partial tile, for a thread with values of an accumulator: two of every eight columns, and
/// two of every sixteen rows, kRows in all. In the forward pass rows are queries and columns keys, in the
/// backward pass the other way round.
template <class P, int kColumns, int kRows = 2>
class TileMask {
  static constexpr bool kFinds = P::kMaskTerms && kTestsMask<P>;
  static constexpr int kOfRow = P::kBackward ? P::kMaskColumnTerms : P::kMaskRowTerms,
                       kOfColumn = P::kBackward ? P::kMaskRowTerms : P::kMaskColumnTerms;
  int rows_[kRows][kOfRow + 1];
  int columns_[(kColumns + 31) / 32][kOfColumn + 1];  // lane n has the terms of column n of each 32

 public:
  /// The terms of the two columns that a thread has of eight.
  struct Columns {
    int reads[2][kOfColumn + 1];
  };

  /// `row(n)`: the position of this thread's n-th row; `column`: that of the tile's first column.
  template <class Row>
  __device__ __forceinline__ void find(const Params& p, const typename P::Head& head, Row&& row, int column) {
    if constexpr (kFinds) {
      const auto read = [&](bool of_key, int i, int at) {
        return of_key ? P::mask_column_term(p, head, i, at) : P::mask_row_term(p, head, i, at);
      };
#pragma unroll
      for (int n = 0; n < kRows; ++n)
#pragma unroll
        for (int i = 0; i < kOfRow; ++i) rows_[n][i] = read(P::kBackward, i, row(n));
#pragma unroll
      for (int n = 0; n < kColumns; n += 32)
#pragma unroll
        for (int i = 0; i < kOfColumn; ++i)
          columns_[n / 32][i] = read(!P::kBackward, i, column + n + static_cast<int>(threadIdx.x) % 32);
    }
  }
  /// For the eight columns from `column` on. By whole warps.
  __device__ __forceinline__ Columns columns(int column) const {
    Columns found = {};
    if constexpr (kFinds) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int i = 0; i < kOfColumn; ++i)
          found.reads[e][i] = __shfl_sync(kWholeWarp, columns_[column / 32][i],
                                          column % 32 + e + static_cast<int>(threadIdx.x) % 4 * 2);
    }
    return found;
  }
  /// Whether the pair of the n-th row and the first or second of two columns attends.
  __device__ __forceinline__ bool attends(const Params& p, const typename P::Head& head, int n,
                                          const Columns& columns, int e, Position q, Position kv) const {
    if constexpr (!kFinds)
      return P::mask(p, head, q, kv);
    else if constexpr (P::kBackward)
      return P::mask_of_terms(p, head, columns.reads[e], rows_[n], q, kv);
    else
      return P::mask_of_terms(p, head, rows_[n], columns.reads[e], q, kv);
  }
};

}  // namespace flashjit
