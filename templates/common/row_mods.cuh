// Rows of Q and K that programs change before the scores, or whose gradients they lead back: by warps, which
// have a row each.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// Q and its program.
template <class P>
struct QRows {
  static constexpr bool kExists = P::kQMod;
  static constexpr int kGrads = P::kQModGrads;
  const Params& p;

  __device__ int heads() const { return p.heads_q; }
  __device__ int longest() const { return p.seqlen_q; }
  __device__ int length(const Sequence<P>& sequence) const { return sequence.seqlen_q(p); }
  __device__ typename P::Head head(const Sequence<P>& sequence, int h) const { return sequence.head(p, h); }
  template <class Element>
  __device__ Element* row(const Sequence<P>& sequence, const TensorParam& tensor, int h, int at) const {
    return sequence.template q_pointer<Element>(tensor, h, at);
  }
  template <class... Args>
  static __device__ float value(const Args&... args) {
    return P::q_mod(args...);
  }
  template <class... Args>
  static __device__ void add_grads(Args&&... args) {
    P::q_mod_grads(args...);
  }
};

/// K and its program.
template <class P>
struct KRows {
  static constexpr bool kExists = P::kKMod;
  static constexpr int kGrads = P::kKModGrads;
  const Params& p;

  __device__ int heads() const { return p.heads_kv; }
  __device__ int longest() const { return p.seqlen_kv; }
  __device__ int length(const Sequence<P>& sequence) const { return sequence.seqlen_kv(p); }
  /// The first query head that shares the head of K.
  __device__ typename P::Head head(const Sequence<P>& sequence, int h) const {
    return sequence.head(p, h * p.qhead_per_kvhead());
  }
  template <class Element>
  __device__ Element* row(const Sequence<P>& sequence, const TensorParam& tensor, int h, int at) const {
    return sequence.template kv_pointer<Element>(tensor, h, at);
  }
  template <class... Args>
  static __device__ float value(const Args&... args) {
    return P::k_mod(args...);
  }
  template <class... Args>
  static __device__ void add_grads(Args&&... args) {
    P::k_mod_grads(args...);
  }
};

/// Blocks of the rows of Q or K; 0 where there is no program of them.
template <class Rows>
__device__ __forceinline__ int blocks_of_rows(const Params& p, const Rows& rows) {
  const int tiles = (rows.longest() + kRowsOfModCta - 1) / kRowsOfModCta;
  return Rows::kExists ? p.batch * rows.heads() * tiles : 0;
}

/// A warp's row in shared memory, as programs read it: a column out of range is clamped.
template <int kColumns>
struct SharedRow {
  float* elements;
  __device__ __forceinline__ float operator()(int column) const {
    return elements[clamped(column, 0, kColumns - 1)];
  }
};

/// A lane has two neighbouring columns of each 64.
template <class P>
constexpr int kColumnPairs = (P::kHeadDim + 63) / 64;
__device__ __forceinline__ int first_column(int pair) {
  return pair * 64 + static_cast<int>(threadIdx.x) % 32 * 2;
}

__device__ __forceinline__ void load_pair(const float* from, float (&x)[2]) {
  const float2 both = *reinterpret_cast<const float2*>(from);
  x[0] = both.x, x[1] = both.y;
}
template <class Element>
__device__ __forceinline__ void load_pair(const Element* from, float (&x)[2]) {
  const unsigned both = *reinterpret_cast<const unsigned*>(from);
  x[0] = low_of<Element>(both), x[1] = high_of<Element>(both);
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kWholeWarp, value, lanes);
  return value;
}

/// A warp's row of Q or K: the lane's elements, zeros where it has none, and in shared memory all of them.
template <class P>
struct ModifiedRow {
  float x[kColumnPairs<P>][2] = {};
  float sum_of_squares = 0.0f;
  SharedRow<P::kHeadDim> shared;

  /// By whole warps.
  __device__ __forceinline__ ModifiedRow(const typename P::Element* from, float* memory) : shared{memory} {
#pragma unroll
    for (int pair = 0; pair < kColumnPairs<P>; ++pair) {
      const int column = first_column(pair);
      if (column >= P::kHeadDim) continue;
      load_pair(from + column, x[pair]);
      memory[column] = x[pair][0], memory[column + 1] = x[pair][1];
      sum_of_squares += x[pair][0] * x[pair][0] + x[pair][1] * x[pair][1];
    }
    sum_of_squares = sum_of_warp(sum_of_squares);
    __syncwarp();
  }
};

/// A row that the warp reads soon.
template <int kColumns, class Element>
__device__ __forceinline__ void prefetch_row(const Element* row) {
  constexpr int kBytes = kColumns * sizeof(Element), kSector = 32;
  for (int at = static_cast<int>(threadIdx.x) % 32 * kSector; at < kBytes; at += 32 * kSector)
    prefetch_to_l2(reinterpret_cast<const char*>(row) + at);
}

/// Calls visit(sequence, head, h, row) for each row that the warp has, and before that prefetch(sequence, h,
/// row), see ../auxiliary/NOTES.md#programs-of-rows; `block` is one of Q's, then K's.
template <class P, class Rows, class Prefetch, class Visit>
__device__ __forceinline__ void visit_rows(const Params& p, const Rows& rows, int block,
                                           const Prefetch& prefetch, const Visit& visit) {
  constexpr int kRowsAhead = 8;
  const int tiles = (rows.longest() + kRowsOfModCta - 1) / kRowsOfModCta, batch_head = block / tiles;
  const int h = batch_head % rows.heads();
  const Sequence<P> sequence(p, batch_head / rows.heads());
  const typename P::Head head = rows.head(sequence, h);
  const int begin = block % tiles * kRowsOfModCta, end = min(begin + kRowsOfModCta, rows.length(sequence));
  const int warps = static_cast<int>(blockDim.x) / 32, first = begin + static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int row = first; row < min(first + kRowsAhead * warps, end); row += warps) prefetch(sequence, h, row);
#pragma unroll 1
  for (int row = first; row < end; row += warps) {
    if (const int ahead = row + kRowsAhead * warps; ahead < end) prefetch(sequence, h, ahead);
    visit(sequence, head, h, row);
  }
}

}  // namespace flashjit
