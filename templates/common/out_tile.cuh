// The rows of a captured tensor that a tile of O reads (kOutTile), such as a gate: 16 bytes a lane, so that a
// warp's loads touch few lines, exchanged among the four lanes of a row as accumulators have their elements.
#pragma once

#include "flashjit/common/capture.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit {

/// Transposes four words of four lanes: words[i] of lane `part` becomes word `part` of lane i. The lanes'
/// numbers differ in the last two bits.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
  const int part = static_cast<int>(threadIdx.x) % 4;
  const bool odd = part % 2 != 0, late = part / 2 != 0;
  const unsigned keep[2] = {late ? words[2] : words[0], late ? words[3] : words[1]};
  const unsigned give[2] = {late ? words[0] : words[2], late ? words[1] : words[3]};
  const unsigned got[2] = {__shfl_xor_sync(kWholeWarp, give[0], 2), __shfl_xor_sync(kWholeWarp, give[1], 2)};
  const unsigned own = odd ? keep[1] : keep[0], over = odd ? got[1] : got[0];
  const unsigned beside = __shfl_xor_sync(kWholeWarp, odd ? keep[0] : keep[1], 1);
  const unsigned across = __shfl_xor_sync(kWholeWarp, odd ? got[0] : got[1], 1);
  const unsigned low[2] = {odd ? beside : own, odd ? own : beside};
  const unsigned high[2] = {odd ? across : over, odd ? over : across};
  words[0] = late ? high[0] : low[0], words[1] = late ? high[1] : low[1];
  words[2] = late ? low[0] : high[0], words[3] = late ? low[1] : high[1];
}

/// Elements of any stride, which may not all exist: one after the other, for few registers.
__device__ __forceinline__ uint4 eight_elements(const OutModTile& tile, const unsigned short* row,
                                                int column) {
  uint4 read = {};
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const unsigned next = __ldg(row + tile.column(column + i));
    read = {read.x >> 16 | read.y << 16, read.y >> 16 | read.z << 16, read.z >> 16 | read.w << 16,
            read.w >> 16 | next << 16};
  }
  return read;
}

/// A thread's pairs of elements of a row, one for each chunk of eight columns.
template <int kChunks>
struct OutModRow {
  static constexpr int kGroups = (kChunks + 3) / 4;
  unsigned words[kGroups][4];

  /// Lane `part` of four reads chunk `part` of each four, of the row of query q. `first`: the column of the
  /// warp's first chunk. `whole`: what the tile's holds() says.
  __device__ __forceinline__ void start(const OutModTile& tile, bool whole, int q, bool inside, int first,
                                        int chunks) {
    const int part = static_cast<int>(threadIdx.x) % 4;
    const unsigned short* row = tile.row(q);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int chunk = group * 4 + part, column = first + chunk * 8;
      uint4 read = {};
      if (inside && chunk < chunks)
        read =
            whole ? __ldg(reinterpret_cast<const uint4*>(row + column)) : eight_elements(tile, row, column);
      words[group][0] = read.x, words[group][1] = read.y, words[group][2] = read.z, words[group][3] = read.w;
    }
  }
  __device__ __forceinline__ void exchange() {
#pragma unroll
    for (auto& group : words) transpose_quad(group);
  }
  /// The element of a chunk's column `odd` of the thread's two.
  __device__ __forceinline__ unsigned short element(int chunk, int odd) const {
    return static_cast<unsigned short>(words[chunk / 4][chunk % 4] >> odd * 16);
  }
};

}  // namespace flashjit
