// What becomes of O's elements before they are stored; OutMod names one of these types.
#pragma once

#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

template <class Problem, class T>
struct UnchangedOut {
  static __device__ __forceinline__ void apply(const Params&, const Sequence<Problem>&,
                                               const typename Problem::Head&, Range,
                                               Result<T, Problem::kHeadDimV>&) {}
};

/// The program's value of each element of a tile of queries. Before, O as it is goes to memory where that is
/// wanted.
template <class Problem, class T>
struct ProgramOut {
  static __device__ __forceinline__ void apply(const Params& p, const Sequence<Problem>& sequence,
                                               const typename Problem::Head& head, Range queries,
                                               Result<T, Problem::kHeadDimV>& out) {
    if (p.out_mod.data != nullptr)
      store_result(out,
                   q_matrix<Problem, typename Problem::Element>(sequence, p.out_mod, head.h, queries.end),
                   queries.begin);
#pragma unroll
    for (int i = 0; i < T::kM; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < chunks(Problem::kHeadDimV); ++chunk) {
#pragma unroll
        for (int c = 0; c < kColumnsPerLane; ++c) {
          float& value = out.at[chunk][i][c];
          value = Problem::out_mod(p, head, value, position(queries.begin + T::row(i)),
                                   chunk * kChunk + T::lane() * kColumnsPerLane + c);
        }
      }
    }
  }
};

template <class Problem, class T>
using OutMod = Conditional<Problem::kOutMod, ProgramOut<Problem, T>, UnchangedOut<Problem, T>>;

}  // namespace flashjit::simt
