// Which rows of a packed tensor are a sequence's. Host and device include this file: the CPU reference reads
// wrong offsets as kernels do.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/types.cuh"
#else
#include "templates/common/types.cuh"
#endif

namespace flashjit {

struct PackedRows {
  int first, count;
};

/// Between two neighbouring numbers of cu_seqlens. Nobody has checked these, since they are on the device:
/// whatever they say, the rows are some of the tensor's `rows`, and no more than `longest`.
constexpr PackedRows packed_rows(int begin, int end, int rows, int longest) {
  const int first = clamped(begin, 0, rows);
  return {first, min(clamped(end, first, rows) - first, longest)};
}

}  // namespace flashjit
