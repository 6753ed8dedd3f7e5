// The stores of O's elements of a tile of queries; CompleteOut names one of these types.
#pragma once

#include "flashjit/common/out_codes.cuh"
#include "flashjit/common/out_element.cuh"
#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

template <class Problem, class T>
struct StoredOut {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<Problem>& sequence, int h,
                                               Range queries, const Result<T, Problem::kHeadDimV>& out) {
    store_result(out, q_matrix<Problem, OutElement<Problem>>(sequence, p.o, h, queries.end), queries.begin);
  }
};
/// As codes.
template <class Problem, class T>
struct CodedOut {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<Problem>& sequence, int h,
                                               Range queries, const Result<T, Problem::kHeadDimV>& out) {
    static_assert(kColumnsPerLane == 4);
    constexpr int kChunks = chunks(Problem::kHeadDimV);
#pragma unroll
    for (int i = 0; i < T::kM; ++i) {
      const int q = queries.begin + T::row(i);
      float4 row[kChunks];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const float(&x)[4] = out.at[chunk][i];
        row[chunk] = {x[0], x[1], x[2], x[3]};
      }
      store_codes_of_lanes<Problem, kLanes>(coded_row(p, sequence, h, q, q < queries.end), row);
    }
  }
};

template <class Problem, class T>
using CompleteOut = Conditional<kOutCodes<Problem>, CodedOut<Problem, T>, StoredOut<Problem, T>>;

}  // namespace flashjit::simt
