// Tiles in shared memory: filling them from global memory, reading them as matrix fragments, storing them
// back.
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/sm80/layout.cuh"

namespace flashjit::sm80 {

__device__ __forceinline__ int warp_index() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

/// Starts copying rows [0, kRows) of a row-major matrix into a tile. Rows from `valid` on become zero, and so
/// do the columns that pad kColumns to a multiple of 16.
template <class Copies, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_tile(unsigned tile, const unsigned short* from, long long stride,
                                          int valid) {
  constexpr int kChunks = round_up(kColumns, 16) / 8;
  if constexpr (kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0) {
    // A thread keeps its column and strides over rows: one running pointer instead of one for every step.
    constexpr int kRowStep = kThreads / kChunks;
    const int row = static_cast<int>(threadIdx.x) / kChunks,
              column = static_cast<int>(threadIdx.x) % kChunks * 8;
    const bool in_columns = kColumns % 16 == 0 || column < kColumns;
    const unsigned short* pointer = from + row * stride + (in_columns ? column : 0);
    tile += (row * pitch(kColumns) + column) * 2;
#pragma unroll
    for (int step = 0; step < kRows / kRowStep; ++step) {
      const bool in = in_columns && row + step * kRowStep < valid;
      Copies::start_16(tile + step * kRowStep * pitch(kColumns) * 2, pointer, in);
      pointer += kRowStep * stride;
    }
  } else {
    for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
      const int row = index / kChunks, column = index % kChunks * 8;
      const bool in = row < valid && column < kColumns;
      Copies::start_16(tile + (row * pitch(kColumns) + column) * 2, in ? from + row * stride + column : from,
                       in);
    }
  }
}

/// A tile and its tangent from row `first` on; `valid` rows exist. A tangent that is null becomes zeros.
template <class P, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_with_tangent(unsigned tile, unsigned tangent_tile,
                                                  const unsigned short* rows, long long stride,
                                                  const unsigned short* tangent, long long tangent_stride,
                                                  int valid) {
  load_tile<typename P::Copies, kRows, kColumns, kThreads>(tile, rows, stride, valid);
  const bool given = tangent != nullptr;
  load_tile<typename P::Copies, kRows, kColumns, kThreads>(
      tangent_tile, given ? tangent : rows, given ? tangent_stride : stride, given ? valid : 0);
}

/// Q beside codes of K: among 16 columns each, the pairs in which a lane has four codes that lie together:
/// pairs 0, 2, 4, 6, then 1, 3, 5, 7.
template <class Copies, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_paired_tile(unsigned tile, const unsigned short* from, long long stride,
                                                 int valid) {
  constexpr int kPairs = kColumns / 2;
  for (int index = threadIdx.x; index < kRows * kPairs; index += kThreads) {
    const int row = index / kPairs, pair = index % kPairs;
    const int to = pair / 8 * 8 + pair % 2 * 4 + pair % 8 / 2;
    Copies::start_4(tile + row * pitch(kColumns) * 2 + to * 4,
                    row < valid ? from + row * stride + pair * 2 : from, row < valid);
  }
}

/// The same of Q of codes, which become elements: at once, so that a barrier has to follow.
template <class Element, class Code, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_converted_tile(char* tile, const unsigned char* from, long long stride,
                                                    int valid) {
  constexpr int kFours = kColumns / 4;
  for (int index = threadIdx.x; index < kRows * kFours; index += kThreads) {
    const int row = index / kFours, four = index % kFours;
    const unsigned codes =
        row < valid ? *reinterpret_cast<const unsigned*>(from + row * stride + four * 4) : 0;
    auto* to = reinterpret_cast<unsigned*>(tile + row * pitch(kColumns) * 2) + four / 4 * 8 + four % 4;
    to[0] = pair_of_codes<Element, Code>(codes);
    to[4] = pair_of_codes<Element, Code>(codes >> 16);
  }
}

/// Per-lane offset, in bytes, of ldmatrix.x4 addresses over a tile with the given pitch.
/// rows_first: matrices are ordered (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), (0-7, 8-15), (8-15,
/// 8-15); else (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
template <bool rows_first>
__device__ __forceinline__ unsigned matrix_offset(int pitch_elements) {
  const int lane = threadIdx.x % 32;
  const int a = lane / 8 % 2, b = lane / 16;
  const int row = lane % 8 + (rows_first ? a : b) * 8, column = (rows_first ? b : a) * 8;
  return static_cast<unsigned>((row * pitch_elements + column) * 2);
}

/// Writes one m16n8 accumulator as 16-bit pairs into a tile at (row, column) of its top left corner.
template <class Element, int kPitch>
__device__ __forceinline__ void store_fragment(char* tile, int row, int column, const float (&c)[4],
                                               float scale0, float scale1) {
  const int lane = threadIdx.x % 32;
  char* at = tile + ((row + lane / 4) * kPitch + column + lane % 4 * 2) * 2;
  *reinterpret_cast<unsigned*>(at) = pack<Element>(c[0] * scale0, c[1] * scale0);
  *reinterpret_cast<unsigned*>(at + 8 * kPitch * 2) = pack<Element>(c[2] * scale1, c[3] * scale1);
}

/// Stores rows [0, valid) of a tile to global memory, 16 bytes a thread.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void store_tile(unsigned short* to, long long stride, const char* tile, int valid,
                                           int thread) {
  constexpr int kChunks = kColumns / 8;
  for (int index = thread; index < kRows * kChunks; index += kThreads) {
    const int row = index / kChunks, column = index % kChunks * 8;
    if (row < valid) {
      *reinterpret_cast<uint4*>(to + row * stride + column) =
          *reinterpret_cast<const uint4*>(tile + (row * pitch(kColumns) + column) * 2);
    }
  }
}

}  // namespace flashjit::sm80
