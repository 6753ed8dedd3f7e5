// After a backward pass with lists of keys, whose CTAs add to dK and dV in fp32: converts both.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

/// One CTA of 128 threads for kCombinedRows keys of a head of K and V, as in combine_dkdv. Zeros where there
/// were no queries to clear the accumulators for.
template <class Problem>
__device__ void convert_dkdv(const Params& p) {
  const int pieces = (p.seqlen_kv + kCombinedRows - 1) / kCombinedRows;
  const int head = static_cast<int>(blockIdx.x) / pieces, h_kv = head % p.heads_kv;
  const Sequence<Problem> sequence(p, head / p.heads_kv);
  const Range rows = tile_range(static_cast<int>(blockIdx.x) % pieces, kCombinedRows, sequence.seqlen_kv(p));
  const auto convert = [&](const float* from, const TensorParam& to, int columns) {
    using Element = GradElement<Problem>;
    for (int i = threadIdx.x; i < (rows.end - rows.begin) * columns; i += blockDim.x) {
      const int row = rows.begin + i / columns, column = i % columns;
      const long long at = kv_row_of_split(p, 0, sequence.b, h_kv, row) * columns + column;
      sequence.template kv_pointer<Element>(to, h_kv, row)[column] =
          from_float<Element>(p.seqlen_q > 0 ? from[at] : 0.0f);
    }
  };
  convert(p.dk_splits, p.dk, Problem::kHeadDim);
  convert(p.dv_splits, p.dv, Problem::kHeadDimV);
}

}  // namespace flashjit::auxiliary
