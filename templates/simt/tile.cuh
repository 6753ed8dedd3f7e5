// The parts of family simt's kernels. All three have one structure: a tile of rows stays (Q, or K and V),
// tiles of columns pass by, S = A B^T is multiplied chunk by chunk of the head dimension, and the resulting
// tile, P or dS, is multiplied with a matrix of the columns into results that stay in registers.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/common/dropout.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/common/tile_class.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/simt/layout.cuh"

namespace flashjit::simt {

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Vector {
  Element at[kCount];
};
using Float4 = Vector<float, 4>;

/// A tile of kRows x kColumns scores shared by the CTA's threads: a thread holds rows group() + kGroups * i
/// and columns lane() + kLanes * j.
template <class Problem, int kRowCount, int kColumnCount>
struct Tile {
  static constexpr int kRows = kRowCount;
  static constexpr int kColumns = kColumnCount;
  static constexpr int kThreads = Problem::kWarps * 32;
  static constexpr int kGroups = groups(Problem::kWarps);
  static constexpr int kM = kRows / kGroups;
  static constexpr int kN = kColumns / kLanes;
  static_assert(shares_tile(kRows, kColumns, Problem::kWarps, 0), "the planner admits no such tile");

  using Scores = float[kM][kN];

  static __device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int group() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ int row(int i) { return group() + kGroups * i; }
  static __device__ __forceinline__ int column(int j) { return lane() + kLanes * j; }
};

/// The thread's part of a result of kRows x kDim: columns kColumnsPerLane * lane() + 0..3 of each chunk.
template <class T, int kDim>
struct Result {
  float at[chunks(kDim)][T::kM][kColumnsPerLane];
};

struct Shared {
  float* rows;
  float* columns;
  float* tile;
};

template <class T>
__device__ __forceinline__ Shared shared_memory() {
  extern __shared__ Float4 dynamic_shared[];
  float* base = dynamic_shared[0].at;
  return {base, base + columns_operand_offset(T::kRows), base + tile_offset(T::kRows, T::kColumns)};
}

/// The rows of one head of a tensor; rows from `end` on read as zero.
template <class T>
struct Matrix {
  using Element = T;
  static constexpr bool kScaled = false;
  Element* data;
  long long stride;
  int end;
  __device__ __forceinline__ bool has(int n) const { return n < end; }
  __device__ __forceinline__ Element* row(int n) const { return data + n * stride; }
};
/// The same of K or V, or of their gradients; rows that the source does not read are zero, too.
template <class Problem, class T = typename Problem::KvElement>
struct KvMatrix {
  using Element = T;
  static constexpr bool kScaled = false;
  KvSource<Problem, Element> source;
  int end;
  __device__ __forceinline__ bool has(int n) const { return source.reads(n) && n < end; }
  __device__ __forceinline__ Element* row(int n) const { return source.row(n); }
};
/// Q, whose elements may be codes.
template <class Problem>
struct ScaledQMatrix : Matrix<QElement<Problem>> {
  static constexpr bool kScaled = Problem::kQCodes;
  float factor;
  __device__ __forceinline__ float scale(int) const { return factor; }
};
/// K or V, whose elements may be codes.
template <class Problem>
struct ScaledKvMatrix : KvMatrix<Problem> {
  static constexpr bool kScaled = kScaledKv<Problem>;
  KvScales<Problem> scales;
  /// What the elements of a row are multiplied with.
  __device__ __forceinline__ float scale(int n) const { return *scales.of_key(n); }
};

/// The same where rows are decoded.
template <class Source>
struct DecodedKvMatrix {
  static constexpr bool kDecodes = true;
  Source source;
  int end;
  __device__ __forceinline__ bool has(int n) const { return source.reads(n) && n < end; }
  __device__ __forceinline__ void decode16(int n, int column, float (&to)[16]) const {
    source.decode16(n, column, to);
  }
};

template <class Problem, class Element = typename Problem::Element>
__device__ __forceinline__ Matrix<Element> q_matrix(const Sequence<Problem>& sequence,
                                                    const TensorParam& tensor, int h, int end) {
  return {sequence.template q_pointer<Element>(tensor, h, 0), tensor.stride_s, end};
}
template <class Problem, class Element = typename Problem::KvElement>
__device__ __forceinline__ KvMatrix<Problem, Element> kv_matrix(const Params& p,
                                                                const Sequence<Problem>& sequence,
                                                                const TensorParam& tensor, int h, int end,
                                                                int begin = 0) {
  return {{p, tensor, sequence, h, begin}, end};
}

/// K and V of a head.
template <class Problem, bool kDecodes = kDecodesKv<Problem>>
struct KvMatrices {
  using Source = ScaledKvMatrix<Problem>;
  static __device__ __forceinline__ Source k(const Params& p, const Sequence<Problem>& sequence, int h_kv,
                                             int end, int begin) {
    return {kv_matrix(p, sequence, p.k, h_kv, end, begin), {p, p.k_scale, sequence, h_kv}};
  }
  static __device__ __forceinline__ Source v(const Params& p, const Sequence<Problem>& sequence, int h_kv,
                                             int end, int begin) {
    return {kv_matrix(p, sequence, p.v, h_kv, end, begin), {p, p.v_scale, sequence, h_kv}};
  }
};
template <class Problem>
struct KvMatrices<Problem, true> {
  using Sources = KvSources<Problem>;
  static __device__ __forceinline__ auto k(const Params& p, const Sequence<Problem>& sequence, int h_kv,
                                           int end, int begin) {
    return DecodedKvMatrix<typename Sources::K>{Sources::k(p, sequence, h_kv, begin), end};
  }
  static __device__ __forceinline__ auto v(const Params& p, const Sequence<Problem>& sequence, int h_kv,
                                           int end, int begin) {
    return DecodedKvMatrix<typename Sources::V>{Sources::v(p, sequence, h_kv, begin), end};
  }
};

/// The address of a row's elements from a column on; rows of two tensors have an overload (q_parts.cuh).
template <class Rows>
__device__ __forceinline__ auto elements(const Rows& from, int row, int column) {
  return from.row(row) + column;
}

/// Copies columns [chunk * kChunk, ...) of kRows rows from `first` on to shared memory, as floats. Columns
/// from kDim on stay as they are, as they are never read.
template <int kThreads, int kRows, int kDim, class Rows>
__device__ __forceinline__ void load_chunk(float* shared, const Rows& from, int first, int chunk) {
  using Element = typename Rows::Element;
  constexpr int kElements = 16 / sizeof(Element);
  constexpr int kPieces = kChunk / kElements;
  using Piece = Vector<Element, kElements>;
  const int column = static_cast<int>(threadIdx.x) % kPieces * kElements;
  if (chunk * kChunk + column >= kDim) return;
#pragma unroll 2
  for (int row = threadIdx.x / kPieces; row < kRows; row += kThreads / kPieces) {
    Piece value = {};
    if (from.has(first + row))
      value = *reinterpret_cast<const Piece*>(elements(from, first + row, chunk * kChunk + column));
    Float4* to = reinterpret_cast<Float4*>(shared + row * kChunkStride + column);
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      to[e / 4] = {{to_float(value.at[e]), to_float(value.at[e + 1]), to_float(value.at[e + 2]),
                    to_float(value.at[e + 3])}};
      if constexpr (Rows::kScaled) {
        const float scale = from.has(first + row) ? from.scale(first + row) : 0.0f;
        for (float& x : to[e / 4].at) x *= scale;
      }
    }
  }
}

/// The same of rows that are decoded, 16 columns at a time.
template <int kThreads, int kRows, int kDim, class Rows>
requires Rows::kDecodes __device__ __forceinline__ void load_chunk(float* shared, const Rows& from, int first,
                                                                   int chunk) {
  constexpr int kPieces = kChunk / 16;
  const int column = static_cast<int>(threadIdx.x) % kPieces * 16;
  if (chunk * kChunk + column >= kDim) return;
#pragma unroll 1
  for (int row = threadIdx.x / kPieces; row < kRows; row += kThreads / kPieces) {
    float x[16] = {};
    if (from.has(first + row)) from.decode16(first + row, chunk * kChunk + column, x);
    Float4* to = reinterpret_cast<Float4*>(shared + row * kChunkStride + column);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = {{x[4 * e], x[4 * e + 1], x[4 * e + 2], x[4 * e + 3]}};
  }
}

/// scores += A B^T, where A has the tile's rows and B its columns.
template <class T, int kDim, class RowsOfA, class RowsOfB>
__device__ __forceinline__ void add_transposed(typename T::Scores& scores, const Shared& shared,
                                               const RowsOfA& a, int first_row, const RowsOfB& b,
                                               int first_column) {
#pragma unroll 1
  for (int chunk = 0; chunk < chunks(kDim); ++chunk) {
    __syncthreads();
    load_chunk<T::kThreads, T::kRows, kDim>(shared.rows, a, first_row, chunk);
    load_chunk<T::kThreads, T::kColumns, kDim>(shared.columns, b, first_column, chunk);
    __syncthreads();
    const int width = min(kChunk, kDim - chunk * kChunk);
#pragma unroll 1
    for (int d = 0; d < width; d += 4) {
      Float4 x[T::kM], y[T::kN];
#pragma unroll
      for (int i = 0; i < T::kM; ++i) {
        x[i] = *reinterpret_cast<const Float4*>(shared.rows + T::row(i) * kChunkStride + d);
      }
#pragma unroll
      for (int j = 0; j < T::kN; ++j) {
        y[j] = *reinterpret_cast<const Float4*>(shared.columns + T::column(j) * kChunkStride + d);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int i = 0; i < T::kM; ++i) {
#pragma unroll
          for (int j = 0; j < T::kN; ++j) scores[i][j] = fmaf(x[i].at[e], y[j].at[e], scores[i][j]);
        }
      }
    }
  }
}

/// scores = A B^T
template <class T, int kDim, class RowsOfA, class RowsOfB>
__device__ __forceinline__ void multiply_transposed(typename T::Scores& scores, const Shared& shared,
                                                    const RowsOfA& a, int first_row, const RowsOfB& b,
                                                    int first_column) {
  for (int i = 0; i < T::kM; ++i) {
    for (int j = 0; j < T::kN; ++j) scores[i][j] = 0.0f;
  }
  add_transposed<T, kDim>(scores, shared, a, first_row, b, first_column);
}

/// Puts the tile where the threads that share its rows can read it. They are of one warp: no CTA-wide
/// barrier.
template <class T>
__device__ __forceinline__ void store_tile(const Shared& shared, const typename T::Scores& values) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kN; ++j)
      shared.tile[T::row(i) * tile_stride(T::kColumns) + T::column(j)] = values[i][j];
  }
  __syncwarp();
}

/// sums += tile * (the chunk of B in shared memory).
template <class T>
__device__ __forceinline__ void multiply_add_chunk(float (&sums)[T::kM][kColumnsPerLane],
                                                   const Shared& shared) {
#pragma unroll 1
  for (int k = 0; k < T::kColumns; k += 4) {
    Float4 x[T::kM], y[4];
#pragma unroll
    for (int i = 0; i < T::kM; ++i) {
      x[i] = *reinterpret_cast<const Float4*>(shared.tile + T::row(i) * tile_stride(T::kColumns) + k);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      y[e] = *reinterpret_cast<const Float4*>(shared.columns + (k + e) * kChunkStride +
                                              T::lane() * kColumnsPerLane);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int i = 0; i < T::kM; ++i) {
#pragma unroll
        for (int c = 0; c < kColumnsPerLane; ++c) sums[i][c] = fmaf(x[i].at[e], y[e].at[c], sums[i][c]);
      }
    }
  }
}

/// result += tile * B, where B has the tile's columns as rows.
template <class T, int kDim, class Rows>
__device__ __forceinline__ void multiply_add(Result<T, kDim>& result, const Shared& shared, const Rows& b,
                                             int first_column) {
#pragma unroll
  for (int chunk = 0; chunk < chunks(kDim); ++chunk) {
    __syncthreads();
    load_chunk<T::kThreads, T::kColumns, kDim>(shared.columns, b, first_column, chunk);
    __syncthreads();
    const bool holds_columns = chunk * kChunk + T::lane() * kColumnsPerLane < kDim;
    if (!holds_columns) continue;
    // A tile is summed by itself: in one sum over all tiles rounding errors would grow with their number.
    float sums[T::kM][kColumnsPerLane] = {};
    multiply_add_chunk<T>(sums, shared);
#pragma unroll
    for (int i = 0; i < T::kM; ++i) {
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) result.at[chunk][i][c] += sums[i][c];
    }
  }
}

template <class T, int kDim>
__device__ __forceinline__ void scale_row(Result<T, kDim>& result, int i, float factor) {
#pragma unroll
  for (int chunk = 0; chunk < chunks(kDim); ++chunk) {
#pragma unroll
    for (int c = 0; c < kColumnsPerLane; ++c) result.at[chunk][i][c] *= factor;
  }
}

/// Writes the rows from `first` on that lie before the matrix's end.
template <bool kAdd = false, class T, int kDim, class Rows>
__device__ __forceinline__ void store_result(const Result<T, kDim>& result, const Rows& to, int first) {
  using Element = typename Rows::Element;
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    const int row = first + T::row(i);
#pragma unroll
    for (int chunk = 0; chunk < chunks(kDim); ++chunk) {
      const int column = chunk * kChunk + T::lane() * kColumnsPerLane;
      if (row >= to.end || column >= kDim) continue;
      Vector<Element, kColumnsPerLane> value;
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) value.at[c] = from_float<Element>(result.at[chunk][i][c]);
      auto* at = reinterpret_cast<Vector<Element, kColumnsPerLane>*>(to.row(row) + column);
      if constexpr (kAdd) {
#pragma unroll
        for (int c = 0; c < kColumnsPerLane; ++c) value.at[c] += at->at[c];
      }
      *at = value;
    }
  }
}

/// A CTA's work in a one-dimensional grid of (tile, head, batch), tile fastest.
struct Work {
  int tile, h, b;
};

__device__ __forceinline__ Work work_of_cta(int tiles, int heads) {
  const int cta = static_cast<int>(blockIdx.x);
  return {cta % tiles, cta / tiles % heads, cta / tiles / heads};
}

__device__ __forceinline__ int tiles_of(int length, int tile) { return (length + tile - 1) / tile; }

/// Which pairs of a tile attend, with ragged ends and padding: `whole` when all do and none lies outside.
struct Visible {
  Range q, kv;
  bool any, whole;
};

/// The ranges are the tile's parts inside the tensors and before the padding; neither is empty.
template <class Problem>
__device__ __forceinline__ Visible visible(const Params& p, const typename Problem::Head& head, Range q,
                                           Range kv) {
  const TileClass kind = tile_class<Problem>(p, head, q, kv);
  const bool ragged = q.end - q.begin < Problem::kBr || kv.end - kv.begin < Problem::kBc;
  return {q, kv, kind != TileClass::empty, kind == TileClass::full && !ragged};
}

/// Forward and backward must see the same bits, or P = exp(S - LSE) is off where scores are large: the
/// product may not be fused with what follows it.
__device__ __forceinline__ float scaled(const Params& p, float dot) {
  return __fmul_rn(p.softmax_scale, dot);
}

template <class Problem>
__device__ __forceinline__ bool attends(const Params& p, const Visible& tile,
                                        const typename Problem::Head& head, int q, int kv) {
  return tile.whole || (q < tile.q.end && kv < tile.kv.end && pair_attends<Problem>(p, head, q, kv));
}

/// The pairs of a thread, a bit each.
struct Pairs {
  unsigned attending;
  unsigned kept;  ///< attending ones that dropout leaves

  __device__ __forceinline__ bool attends(int pair) const { return attending >> pair & 1u; }
  __device__ __forceinline__ bool keeps(int pair) const { return kept >> pair & 1u; }
};

/// Pair i * kN + j is the tile's row(i) and column(j).
template <class Problem, class T, bool kRowsAreQueries>
__device__ __forceinline__ Pairs pairs_of_thread(const Params& p, const Visible& tile,
                                                 const typename Problem::Head& head) {
  static_assert(T::kM * T::kN <= 32, "a bit for each pair");
  if (tile.whole && !Problem::kDropout) return {~0u, ~0u};
  Pairs pairs = {0, 0};
  // Not unrolled: sixteen copies of masks and random numbers at once would spill.
#pragma unroll 1
  for (int pair = 0; pair < T::kM * T::kN; ++pair) {
    const int row = T::row(pair / T::kN), column = T::column(pair % T::kN);
    const int q = tile.q.begin + (kRowsAreQueries ? row : column);
    const int kv = tile.kv.begin + (kRowsAreQueries ? column : row);
    if (!attends<Problem>(p, tile, head, q, kv)) continue;
    pairs.attending |= 1u << pair;
    if (Problem::kDropout && pair_dropped<Problem>(p, dropout_head<Problem>(p, head.b, head.h), q, kv))
      continue;
    pairs.kept |= 1u << pair;
  }
  return pairs;
}

}  // namespace flashjit::simt
