// Tiles in shared memory: loads by TMA, and addresses for ordinary code.
#pragma once

#include "flashjit/async/tma.cuh"
#include "flashjit/tma/tile_layout.cuh"

namespace flashjit::tma {

/// Loads a tile by TMA, slice by slice, from `column` on, or slice `first` behind it.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap& map, unsigned barrier, int row,
                                          int head, int batch, int column = 0, int first = 0) {
  for (int slice = 0; slice < slices(kColumns); ++slice)
    load_box(to + slice * kRows * kRowBytes, map, barrier, column + (first + slice) * kSliceColumns, row,
             head, batch);
}

/// The offset of a chunk of eight columns of a row in a tile of kRows rows, for ordinary code: swizzled as by
/// TMA, so that products can read it and no two rows of eight share a bank.
template <int kRows>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return chunk / 8 * kRows * kRowBytes + row * kRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
}

}  // namespace flashjit::tma
