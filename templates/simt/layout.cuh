// How family simt cuts a problem into tiles and threads. Host and device include this file, so that the
// planner prunes with the numbers that the kernels use.
#pragma once

#if defined(__CUDACC__)
#define FLASHJIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHJIT_HOST_DEVICE inline
#endif

namespace flashjit::simt {

constexpr int kLanes = 16;  // threads across a tile's columns: rows reduce within half a warp
constexpr int kChunk = 64;  // columns of Q, K, V or dO that pass through shared memory at once
constexpr int kChunkStride =
    kChunk + 4;  // floats; the skew keeps 16-byte reads of a column free of bank conflicts
constexpr int kColumnsPerLane = kChunk / kLanes;

FLASHJIT_HOST_DEVICE constexpr int chunks(int dim) { return (dim + kChunk - 1) / kChunk; }

/// Threads that share the columns of a row, one such group beside the other.
FLASHJIT_HOST_DEVICE constexpr int groups(int warps) { return warps * 32 / kLanes; }

/// Shared memory holds, in floats: a chunk of the rows' operand, a chunk of the columns' operand, and the
/// tile of P or dS that one product hands to the next.
FLASHJIT_HOST_DEVICE constexpr int tile_stride(int columns) { return columns + 4; }
FLASHJIT_HOST_DEVICE constexpr int columns_operand_offset(int rows) { return rows * kChunkStride; }
FLASHJIT_HOST_DEVICE constexpr int tile_offset(int rows, int columns) {
  return (rows + columns) * kChunkStride;
}
FLASHJIT_HOST_DEVICE constexpr int shared_bytes(int rows, int columns) {
  return (tile_offset(rows, columns) + rows * tile_stride(columns)) * 4;
}

/// Rows of a tile, and values of its results, that a thread has: with more, too few registers are left.
constexpr int kMaxRowsPerThread = 4, kMaxResultsPerThread = 144;

/// Whether the threads of a CTA can share a tile of so many rows and columns, whose results have
/// `result_chunks` chunks in all: evenly, and without spilling.
FLASHJIT_HOST_DEVICE constexpr bool shares_tile(int rows, int columns, int warps, int result_chunks) {
  const int own_rows = rows / groups(warps);
  return rows % groups(warps) == 0 && columns % kLanes == 0 && own_rows <= kMaxRowsPerThread &&
         own_rows * result_chunks * kColumnsPerLane <= kMaxResultsPerThread;
}

}  // namespace flashjit::simt
