// A tile on its way from global to shared memory, without cp.async: each thread's part of it is in its
// registers while the tensor cores work, and goes to shared memory where cp.async would be waited for.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/sm80/layout.cuh"

namespace flashjit::sm75 {

/// kRows rows of kColumns 16-bit elements, which kThreads threads copy, 16 bytes at a time.
template <int kRows, int kColumns, int kThreads>
struct HeldTile {
  static constexpr int kChunks = sm80::round_up(kColumns, 16) / 8;
  static constexpr int kVectors = (kRows * kChunks + kThreads - 1) / kThreads;  ///< of a thread
  static constexpr bool kFills = kRows * kChunks % kThreads == 0;  ///< whether all threads have as many
  /// Whether a thread's vectors are of one column, so that one pointer walks along them.
  static constexpr bool kKeepsColumn = kThreads % kChunks == 0;
  static constexpr int kRowStep = kThreads / kChunks;

  static __device__ __forceinline__ int row(int n) {
    const int thread = static_cast<int>(threadIdx.x);
    return kKeepsColumn ? thread / kChunks + n * kRowStep : (thread + n * kThreads) / kChunks;
  }
  static __device__ __forceinline__ int column(int n) {
    const int thread = static_cast<int>(threadIdx.x);
    return (kKeepsColumn ? thread : thread + n * kThreads) % kChunks * 8;
  }

  /// Starts loading rows [0, kRows) of a matrix. Rows from `valid` on become zero, and so do the columns that
  /// pad kColumns to a multiple of 16.
  static __device__ __forceinline__ void load(uint4* held, const unsigned short* rows, long long stride,
                                              int valid) {
    const unsigned short* pointer = rows + row(0) * stride + column(0);
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      if (!kKeepsColumn) pointer = rows + row(n) * stride + column(n);
      const bool in = row(n) < min(valid, kRows) && column(n) < kColumns;
      held[n] = uint4{0, 0, 0, 0};
      if (in) held[n] = *reinterpret_cast<const uint4*>(pointer);
      pointer += kRowStep * stride;
    }
  }
  static __device__ __forceinline__ void put(const uint4* held, unsigned tile) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      if (kFills || row(n) < kRows)
        store_shared_16(tile + (row(n) * sm80::pitch(kColumns) + column(n)) * 2, held[n]);
  }
};

}  // namespace flashjit::sm75
