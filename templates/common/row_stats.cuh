// What the backward pass needs to know of the rows of O and dO: D = rowsum(dO * O) - dLSE, LSE padded to
// whole tiles, the score's row terms.
#pragma once

#include "flashjit/common/lse_log2.cuh"
#include "flashjit/common/out_element.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// Eight lanes share the columns of a row, and a warp has eight times as many rows as it loads at once.
constexpr int kLanesOfRow = 8, kRowsAtOnce = 32 / kLanesOfRow, kRowsOfWarp = kRowsAtOnce * kLanesOfRow;
static_assert(kRowsOfWarp == kLseRows);

/// LSE of a row and its gradient, zero if there is none.
struct RowStats {
  float lse, dlse;
};
template <class P>
__device__ __forceinline__ RowStats load_row_stats(const Params& p, const Sequence<P>& sequence, int h,
                                                   int row) {
  RowStats stats{-infinity(), 0.0f};
  if (row >= sequence.seqlen_q(p)) return stats;
  const long long at = sequence.lse_row(p, h, row);
  stats.lse = p.lse.data[at];
  if (p.dlse != nullptr) stats.dlse = p.dlse[at];
  return stats;
}

/// Columns of a row that a lane loads at once.
template <class T, int kColumns>
struct RowChunk {
  static constexpr int kWords = kColumns * static_cast<int>(sizeof(T)) / 16;
  union Elements {
    uint4 words[kWords];
    T element[kColumns];
  };
  uint4 words[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint4& word : words) word = uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  /// Whole words: the compiler else takes each row apart as soon as it is here, before it loads the next.
  __device__ __forceinline__ void read(Elements& elements) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      elements.words[i] =
          uint4{opaque(words[i].x), opaque(words[i].y), opaque(words[i].z), opaque(words[i].w)};
  }
};

/// A lane's columns of O and dO, 16 bytes of dO, in rows kRowsAtOnce apart. All are loaded before any is
/// used: with few rows for each multiprocessor the waits for memory are nearly all of the time.
template <class P>
struct RowChunks {
  using Element = typename P::Element;
  using Out = OutElement<P>;
  static constexpr int kVector = 16 / sizeof(Element), kChunks = P::kHeadDimV / kVector;
  RowChunk<Out, kVector> o[kLanesOfRow];
  RowChunk<Element, kVector> dout[kLanesOfRow];

  __device__ __forceinline__ void load(const Params& p, const Sequence<P>& sequence, int h, int first,
                                       int chunk) {
    const int rows = chunk < kChunks ? sequence.seqlen_q(p) - first : 0;
    const Out* from_o = sequence.template q_pointer<Out>(p.o, h, first) + chunk * kVector;
    const Element* from_dout = sequence.template q_pointer<Element>(p.dout, h, first) + chunk * kVector;
#pragma unroll
    for (int i = 0; i < kLanesOfRow; ++i) {
      dout[i].clear(), o[i].clear();
      if (i * kRowsAtOnce < rows) o[i].load(from_o), dout[i].load(from_dout);
      from_o += kRowsAtOnce * p.o.stride_s;
      from_dout += kRowsAtOnce * p.dout.stride_s;
    }
  }
  /// Adds the products of each row to its sum.
  __device__ __forceinline__ void add_to(float (&sums)[kLanesOfRow]) const {
#pragma unroll
    for (int i = 0; i < kLanesOfRow; ++i) {
      typename RowChunk<Out, kVector>::Elements x;
      typename RowChunk<Element, kVector>::Elements y;
      o[i].read(x), dout[i].read(y);
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        sums[i] = fmaf(to_float(x.element[j]), to_float(y.element[j]), sums[i]);
    }
  }
};

/// Adds up the parts of eight lanes; each lane gets the sum of one of their eight rows, its own number's.
__device__ __forceinline__ float sum_of_own_row(float (&sums)[kLanesOfRow]) {
#pragma unroll
  for (int lanes = kLanesOfRow / 2; lanes > 0; lanes /= 2) {
    const bool upper = threadIdx.x & lanes;
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      const float other = __shfl_xor_sync(kWholeWarp, upper ? sums[i] : sums[i + lanes], lanes);
      sums[i] = (upper ? sums[i + lanes] : sums[i]) + other;
    }
  }
  return sums[0];
}

/// D, LSE and the row term of one row, by one thread. Rows that attend to nothing, or that
/// do not exist, get LSE = inf, so that their P is zero. Whether LSE is large.
template <class P>
__device__ __forceinline__ bool store_row_stats(const Params& p, const Sequence<P>& sequence, int h, int head,
                                                int row, const RowStats& stats, float dot) {
  const long long at = static_cast<long long>(head) * p.seqlen_q_padded + row;
  const bool has_p = lse_gives_p(stats.lse);
  // dS = P (dP - D) + P dLSE. Where P is zero dLSE has no effect, and may be NaN.
  p.d[at] = dot - (has_p ? stats.dlse : 0.0f);
  p.lse_padded[at] = has_p ? stats.lse : infinity();
  // Also behind the last row: else P of a NaN score would not be 0.
  if constexpr (P::kScoreRowTerm)
    if (p.row_terms != nullptr) p.row_terms[at] = P::score_row_term(p, sequence.head(p, h), position(row));
  const float log2 = stats.lse * kLog2E;
  if constexpr (P::kLseLog2) lse_log2(p)[at] = has_p ? log2 : infinity();
  return has_p && !(fabsf(log2) < kLargeLseLog2);
}

/// D, LSE and row terms of a warp's kRowsOfWarp rows of a head, from query `first` on. Calls `meanwhile()`
/// while it waits for memory.
template <class P>
__device__ __forceinline__ void find_row_stats(const Params& p, const Sequence<P>& sequence, int h, int head,
                                               int first, const auto& meanwhile) {
  const int lane = threadIdx.x % 32, part = lane % kLanesOfRow;
  const int row = first + lane / kLanesOfRow, own_row = row + part * kRowsAtOnce;
  const RowStats stats = load_row_stats<P>(p, sequence, h, own_row);
  // Two turns at once where that is all and registers suffice: ../sm90/NOTES.md#beside-the-products.
  constexpr int kTurns = (RowChunks<P>::kChunks + kLanesOfRow - 1) / kLanesOfRow;
  constexpr int kAtOnce = P::kArch >= 90 && kTurns == 2 && !P::kFp32Out ? 2 : 1;
  RowChunks<P> chunks[kAtOnce];
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) chunks[n].load(p, sequence, h, row, part + n * kLanesOfRow);
  meanwhile();
  float sums[kLanesOfRow] = {};
#pragma unroll
  for (const RowChunks<P>& chunk : chunks) chunk.add_to(sums);
#pragma unroll 1
  for (int chunk = part + kAtOnce * kLanesOfRow; chunk < RowChunks<P>::kChunks; chunk += kLanesOfRow) {
    chunks[0].load(p, sequence, h, row, chunk);
    chunks[0].add_to(sums);
  }
  const bool large = store_row_stats<P>(p, sequence, h, head, own_row, stats, sum_of_own_row(sums));
  if constexpr (P::kLseLog2) {
    const bool any_large = __any_sync(kWholeWarp, large);
    if (lane == 0) *large_lse(p, static_cast<long long>(head) * p.seqlen_q_padded + row) = any_large;
  }
}

}  // namespace flashjit
