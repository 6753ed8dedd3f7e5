// The stores of O's elements of a tile of queries; CompleteOut names one of these types.
#pragma once

#include "flashjit/common/out_codes.cuh"
#include "flashjit/common/out_element.cuh"
#include "flashjit/simt/query_heads.cuh"
#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

template <class Problem, class T>
struct StoredOut {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<Problem>& sequence, int h,
                                               Range queries, const Result<T, Problem::kHeadDimV>& out) {
    store_result(out, q_matrix<Problem, OutElement<Problem>>(sequence, p.o, h, queries.end), queries.begin);
  }
};
/// Row i of a lane's. By whole warps.
template <class Problem, class T>
__device__ __forceinline__ void store_row_of_codes(const CodedRow& to, int i,
                                                   const Result<T, Problem::kHeadDimV>& out) {
  static_assert(kColumnsPerLane == 4);
  constexpr int kChunks = chunks(Problem::kHeadDimV);
  float4 row[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float(&x)[4] = out.at[chunk][i];
    row[chunk] = {x[0], x[1], x[2], x[3]};
  }
  store_codes_of_lanes<Problem, kLanes>(to, row);
}
/// As codes.
template <class Problem, class T>
struct CodedOut {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<Problem>& sequence, int h,
                                               Range queries, const Result<T, Problem::kHeadDimV>& out) {
#pragma unroll
    for (int i = 0; i < T::kM; ++i) {
      const int q = queries.begin + T::row(i);
      store_row_of_codes<Problem, T>(coded_row(p, sequence, h, q, q < queries.end), i, out);
    }
  }
};

template <class Problem, class T>
using CompleteOut = Conditional<kOutCodes<Problem>, CodedOut<Problem, T>, StoredOut<Problem, T>>;

// The same where a tile's rows are heads of one query; HeadsOut names one of these types.

template <class Problem, class T>
struct StoredHeads {
  static __device__ __forceinline__ void store(const Params& p, const QueryHeads<Problem>& rows,
                                               const Result<T, Problem::kHeadDimV>& out) {
    store_result(out, rows.template matrix<OutElement<Problem>>(p.o), 0);
  }
};
template <class Problem, class T>
struct CodedHeads {
  static __device__ __forceinline__ void store(const Params& p, const QueryHeads<Problem>& rows,
                                               const Result<T, Problem::kHeadDimV>& out) {
#pragma unroll
    for (int i = 0; i < T::kM; ++i) {
      const int row = T::row(i);
      store_row_of_codes<Problem, T>(coded_row(p, rows.sequence, rows.h + row, rows.q, row < rows.count), i,
                                     out);
    }
  }
};
template <class Problem, class T>
using HeadsOut = Conditional<kOutCodes<Problem>, CodedHeads<Problem, T>, StoredHeads<Problem, T>>;

}  // namespace flashjit::simt
