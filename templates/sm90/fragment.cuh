// Accumulators of wgmma as operands and as results. A thread of a warpgroup holds, of each eight columns,
// two in row lane / 4 and two in row lane / 4 + 8 of its warp's sixteen rows: the layout of mma.m16n8
// repeated.
#pragma once

#include "flashjit/common/dropout.cuh"
#include "flashjit/common/out_element.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/common/visible.cuh"
#include "flashjit/sm90/wgmma.cuh"

namespace flashjit::sm90 {

/// threadIdx.x, read again, so that values derived from it hold no registers through a loop that does not
/// need them.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// This thread's first row of a warpgroup's 64 rows of an accumulator; the other is eight on.
__device__ __forceinline__ int own_row(int thread = static_cast<int>(threadIdx.x)) {
  return thread / 32 % 4 * 16 + thread % 32 / 4;
}

/// Packs an accumulator as the left operand, in registers, of the next product: 16 columns a step.
template <class Element, int kSteps>
__device__ __forceinline__ void as_left_operand(unsigned (&a)[kSteps][4], const float (&c)[kSteps * 8]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int r = 0; r < 4; ++r) a[step][r] = pack<Element>(c[step * 8 + r * 2], c[step * 8 + r * 2 + 1]);
}

/// score_scale_log2() as a constant: while the tensor cores work, register reads are scarce.
template <class P>
__device__ __forceinline__ float scale_operand(const Params& p) {
  return P::kHasScore ? kLog2E : p.softmax_scale_log2;
}

/// Writes zeros over rows [first, kRows) of a tile, by the 128 threads of a warpgroup. Several groups may do
/// the same. If ptxas does not know how many slices there are, its one copy of the loop takes fewer
/// registers, also where there is nothing to clear.
template <int kRows, int kColumns>
__device__ __forceinline__ void clear_rows(char* tile, int first, int count = slices(kColumns)) {
  for (int slice = 0; slice < count; ++slice) {
    char* rows = tile + slice * kRows * kRowBytes;
    for (int at = max(first, 0) * kRowBytes + static_cast<int>(threadIdx.x) % 128 * 16;
         at < kRows * kRowBytes; at += 128 * 16)
      *reinterpret_cast<uint4*>(rows + at) = uint4{0, 0, 0, 0};
  }
}

/// Writes a warp's sixteen rows of an accumulator to a tile in shared memory, as TMA reads it.
template <class Element, int kRows, int kCount>
__device__ __forceinline__ void stage_rows(const float (&c)[kCount], unsigned tile, int first_row) {
  constexpr int kChunks = kCount / 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Lane l has the address of row l % 8 of matrix l / 8. The swizzle lets a chunk change bits of the address.
  const unsigned address = tile + chunk_offset<kRows>(first_row + lane % 16, lane / 16);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk += 2) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = chunk * 4 + i * 2;
      words[i] = at < kCount ? pack<Element>(c[at], c[at + 1]) : 0u;
    }
    store_matrices((address ^ (chunk % 8 * 16)) + chunk / 8 * kRows * kRowBytes, words);
  }
}

/// Stores a warp's sixteen rows of an accumulator, `chunks` chunks of eight columns. `to` is the thread's
/// first row, which is inside when `rows` is positive; the other is eight rows on. Lanes exchange words, so
/// that each of the four of a row stores eight bytes of two chunks, or a chunk of four where there are many
/// columns: fewer requests to L2 for more exchanges.
template <class Element, int kCount>
__device__ __forceinline__ void store_rows(const float (&c)[kCount], int chunks, unsigned short* to,
                                           long long stride, int rows,
                                           int thread = static_cast<int>(threadIdx.x)) {
  constexpr int kChunks = kCount / 4;
  constexpr bool kWholeChunks = kChunks > 16;
  const int part = thread % 4, odd = thread % 2, late = part / 2;
  // Two addresses, from which chunks are at constant offsets.
  unsigned short* row = opaque(to + (kWholeChunks ? part * 8 : odd * 8 + late * 4));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto word = [&](int chunk) {
      return chunk < kChunks ? pack<Element>(c[chunk * 4 + half * 2], c[chunk * 4 + half * 2 + 1]) : 0u;
    };
    // The even lanes' words of a chunk and of their neighbour's, the odd lanes' of the next chunk.
    const auto two_words = [&](int chunk) {
      const unsigned first = word(chunk), second = word(chunk + 1);
      const unsigned other = __shfl_xor_sync(kWholeWarp, odd ? first : second, 1);
      return odd ? uint2{other, second} : uint2{first, other};
    };
    const bool inside = half * 8 < rows;
    unsigned short* at = opaque(row + half * 8 * stride);
    if constexpr (kWholeChunks) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 4) {
        const uint2 low = two_words(chunk), high = two_words(chunk + 2), give = late ? low : high;
        const uint2 got{__shfl_xor_sync(kWholeWarp, give.x, 2), __shfl_xor_sync(kWholeWarp, give.y, 2)};
        if (inside && chunk + part < chunks)
          store_global(at + chunk * 8,
                       late ? uint4{got.x, got.y, high.x, high.y} : uint4{low.x, low.y, got.x, got.y});
      }
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        const uint2 words = two_words(chunk);
        if (inside && chunk + odd < chunks) store_global(at + chunk * 8, words);
      }
    }
  }
}

/// What a gradient is stored as.
template <class P>
using GradBits = Conditional<P::kFp32Grads, float, unsigned short>;

/// The same of a gradient, which may be fp32.
template <class P, int kCount>
__device__ __forceinline__ void store_grad_rows(const float (&c)[kCount], int chunks, GradBits<P>* to,
                                                long long stride, int rows, int thread) {
  if constexpr (P::kFp32Grads) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half * 8 < rows) store_row<kCount / 4, P::kAddGrads>(to + half * 8 * stride, half, c, chunks);
  } else {
    store_rows<typename P::Element>(c, chunks, to, stride, rows, thread);
  }
}

}  // namespace flashjit::sm90
