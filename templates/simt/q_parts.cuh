// Family simt's rows of Q: of one tensor, or of two where the columns behind V's are in a tensor of their
// own, as latent attention has them.
#pragma once

#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

/// `Rows` of the first columns, and of those behind V's.
template <class Problem, class Rows>
struct RowsInParts : Rows {
  Rows rope;
};
/// As V's columns are a multiple of 8, no 16 bytes have columns of both.
template <class Problem, class Rows>
__device__ __forceinline__ auto elements(const RowsInParts<Problem, Rows>& from, int row, int column) {
  return column < Problem::kHeadDimV ? from.row(row) + column
                                     : from.rope.row(row) + (column - Problem::kHeadDimV);
}

/// Q, as `rows_of` has the rows of a tensor; QRows<Problem> names one of these types.
template <class Problem>
struct JoinedQ {
  template <class RowsOf>
  static __device__ __forceinline__ auto rows(const Params& p, const RowsOf& rows_of) {
    return rows_of(p.q);
  }
};
template <class Problem>
struct QInParts {
  template <class RowsOf>
  static __device__ __forceinline__ auto rows(const Params& p, const RowsOf& rows_of) {
    using Rows = decltype(rows_of(p.q));
    return RowsInParts<Problem, Rows>{rows_of(p.q), rows_of(p.q_rope)};
  }
};
template <class Problem>
using QRows = Conditional<Problem::kQRope, QInParts<Problem>, JoinedQ<Problem>>;

}  // namespace flashjit::simt
