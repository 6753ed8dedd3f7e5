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

/// The rows between two neighbouring numbers of cu_seqlens. These are unchecked, since they are on the
/// device: whatever they are, the rows lie within the tensor's `rows`, and are no more than `longest`.
constexpr PackedRows packed_rows(int begin, int end, int rows, int longest) {
  const int first = clamped(begin, 0, rows);
  return {first, min(clamped(end, first, rows) - first, longest)};
}

}  // namespace flashjit
