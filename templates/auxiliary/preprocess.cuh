// Before the backward pass: D = rowsum(dO * O) - dLSE, LSE padded to whole tiles, the score's row terms,
// zeros in the dQ accumulator (all of it, or the first heads) and in rows of no sequence, and the semaphores.
#pragma once

#include "flashjit/common/lse_log2.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/common/semaphores.cuh"
#include "flashjit/common/unused_rows.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

constexpr int kPreprocessedRows = 128;

/// Eight lanes share the columns of a row, and a warp has eight times as many rows as it loads at once.
constexpr int kLanesOfRow = 8, kRowsAtOnce = 32 / kLanesOfRow, kRowsOfWarp = kRowsAtOnce * kLanesOfRow;
static_assert(kRowsOfWarp == kLseRows);

/// LSE of a row and its gradient, zero if there is none.
struct RowStats {
  float lse, dlse;
};
template <class P>
__device__ __forceinline__ RowStats load_row_stats(const Params& p, int head, int row, int seqlen_q) {
  RowStats stats{-infinity(), 0.0f};
  if (row >= seqlen_q) return stats;
  const long long at = static_cast<long long>(head) * p.seqlen_q + row;
  stats.lse = p.lse[at];
  if (p.dlse != nullptr) stats.dlse = p.dlse[at];
  return stats;
}

/// A lane's 16 bytes of O and dO, in rows kRowsAtOnce apart. All are loaded before any is used: with few rows
/// for each multiprocessor the waits for memory are nearly all of the time.
template <class P>
struct RowChunks {
  using Element = typename P::Element;
  static constexpr int kVector = 16 / sizeof(Element), kChunks = P::kHeadDimV / kVector;
  uint4 o[kLanesOfRow], dout[kLanesOfRow];

  __device__ __forceinline__ void load(const Params& p, const Sequence<P>& sequence, int h, int first,
                                       int chunk) {
    const int rows = chunk < kChunks ? sequence.seqlen_q(p) - first : 0;
    const Element* from_o = sequence.template q_pointer<Element>(p.o, h, first) + chunk * kVector;
    const Element* from_dout = sequence.template q_pointer<Element>(p.dout, h, first) + chunk * kVector;
#pragma unroll
    for (int i = 0; i < kLanesOfRow; ++i) {
      o[i] = dout[i] = uint4{0, 0, 0, 0};
      if (i * kRowsAtOnce < rows) {
        o[i] = *reinterpret_cast<const uint4*>(from_o);
        dout[i] = *reinterpret_cast<const uint4*>(from_dout);
      }
      from_o += kRowsAtOnce * p.o.stride_s;
      from_dout += kRowsAtOnce * p.dout.stride_s;
    }
  }
  /// Adds the products of each row to its sum.
  __device__ __forceinline__ void add_to(float (&sums)[kLanesOfRow]) const {
    union Elements {
      uint4 whole;
      Element element[kVector];
    };
    // Whole words: the compiler else takes each row apart as soon as it is here, before it loads the next.
    const auto whole = [](const uint4& words) {
      return uint4{opaque(words.x), opaque(words.y), opaque(words.z), opaque(words.w)};
    };
#pragma unroll
    for (int i = 0; i < kLanesOfRow; ++i) {
      const Elements x{whole(o[i])}, y{whole(dout[i])};
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

/// Zeros where dQ is added up.
template <class P>
__device__ __forceinline__ void clear_dq(const Params& p, int head, int first) {
  constexpr int kColumns = (P::kHeadDim + 15) / 16 * 16;
  const long long row = static_cast<long long>(head) * p.seqlen_q_padded + first;
  float4* accumulator = reinterpret_cast<float4*>(p.dq_accum + row * kColumns);
  for (int i = threadIdx.x; i < kPreprocessedRows * kColumns / 4; i += 128)
    accumulator[i] = float4{0, 0, 0, 0};
}

/// Zeros where dK and dV are added up, with lists of keys. By all threads of the grid.
template <class P>
__device__ __forceinline__ void clear_dkdv(const Params& p) {
  const long long rows = static_cast<long long>(p.batch) * p.heads_kv * p.seqlen_kv,
                  threads = gridDim.x * 128ll;
  const auto clear = [&](float* to, int columns) {
    for (long long i = blockIdx.x * 128ll + threadIdx.x; i < rows * columns / 4; i += threads)
      reinterpret_cast<float4*>(to)[i] = float4{0, 0, 0, 0};
  };
  clear(p.dk_splits, P::kHeadDim);
  clear(p.dv_splits, P::kHeadDimV);
}

/// All of common/semaphores.cuh, or the two counters of simt/capture_grads.cuh. The heads that clear_dq()
/// clears count as cleared.
template <class P>
__device__ __forceinline__ void reset_semaphores(const Params& p) {
  const long long of_dq =
      P::kDeterministic ? static_cast<long long>(p.heads_q) * q_tiles<P>(p) * kDqSemaphores : 0;
  const long long count = kTileCounters + p.batch * (p.heads_kv * kHeadSemaphores + of_dq);
  const int heads = p.batch * p.heads_kv, pieces = pieces_to_clear(p);
#pragma unroll 1
  for (long long i = blockIdx.x * 128ll + threadIdx.x; i < count; i += gridDim.x * 128ll) {
    const long long of_head = i - kTileCounters;
    const bool is_of_head = of_head >= 0 && of_head < heads * kHeadSemaphores;
    const bool cleared = is_of_head && static_cast<int>(of_head) % heads < p.heads_cleared;
    p.semaphores[i] = cleared ? pieces : 0;
  }
  if (p.dq_accum != nullptr && blockIdx.x == 0 && threadIdx.x == clear_counter(p) - p.semaphores)
    *clear_counter(p) = p.heads_cleared * pieces;
}

/// One CTA of 128 threads for 128 queries of one head; grid: batch * heads_q * seqlen_q_padded / 128.
template <class P>
__device__ void preprocess(const Params& p) {
  let_next_grid_start<P>();
  wait_for_prior_grid<P>();
  zero_unused_rows_of_gradients<P>(p);
  if constexpr (P::kIndices) clear_dkdv<P>(p);
  const int tiles = p.seqlen_q_padded / kPreprocessedRows;
  const int first = static_cast<int>(blockIdx.x % tiles) * kPreprocessedRows;
  const int head = static_cast<int>(blockIdx.x) / tiles, h = head % p.heads_q;
  const Sequence<P> sequence(p, head / p.heads_q);
  const int lane = threadIdx.x % 32, part = lane % kLanesOfRow;
  const int row = first + static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp + lane / kLanesOfRow;
  const int own_row = row + part * kRowsAtOnce;
  const RowStats stats = load_row_stats<P>(p, head, own_row, sequence.seqlen_q(p));
  RowChunks<P> chunks;
  chunks.load(p, sequence, h, row, part);

  // Stores, while the loads are under way.
  if (p.dq_accum != nullptr && head / p.qhead_per_kvhead() < p.heads_cleared) clear_dq<P>(p, head, first);
  if (p.semaphores != nullptr) reset_semaphores<P>(p);

  float sums[kLanesOfRow] = {};
  chunks.add_to(sums);
#pragma unroll 1
  for (int chunk = part + kLanesOfRow; chunk < RowChunks<P>::kChunks; chunk += kLanesOfRow) {
    chunks.load(p, sequence, h, row, chunk);
    chunks.add_to(sums);
  }
  const bool large = store_row_stats<P>(p, sequence, h, head, own_row, stats, sum_of_own_row(sums));
  if constexpr (P::kLseLog2) {
    const bool any_large = __any_sync(kWholeWarp, large);
    if (lane == 0) *large_lse(p, static_cast<long long>(head) * p.seqlen_q_padded + row) = any_large;
  }
}

}  // namespace flashjit::auxiliary
