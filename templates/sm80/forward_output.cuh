// Where an m16 tile of O goes at the end of the forward pass; StoredOutput<P> names one of these types. A
// warp has all columns, or its column_part() of them, and `row` is its first row within the Q tile.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/common/visible.cuh"
#include "flashjit/sm80/forward_smem.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// An m16 tile of O as a warp has it in registers.
template <class P>
using OutTile = float[ForwardPolicy<P>::kOt][4];

/// The first column of O that the warp has.
template <class P>
__device__ __forceinline__ int first_column() {
  return column_part<P>() * ForwardPolicy<P>::kOt * 8;
}
/// n8 tiles of O that the warp has; the last warp's may be fewer.
template <class P>
__device__ __forceinline__ int own_chunks() {
  return min(ForwardPolicy<P>::kOt, P::kHeadDimV / 8 - column_part<P>() * ForwardPolicy<P>::kOt);
}

template <class P>
__device__ __forceinline__ void scale_tile(OutTile<P>& o, const float (&scale)[2]) {
#pragma unroll
  for (int n = 0; n < ForwardPolicy<P>::kOt * 4; ++n) o[n / 4][n % 4] *= scale[n / 2 % 2];
}

/// One split of the keys: fp32, for the combine entry.
template <class P>
struct SplitOutput {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int h, int split,
                                               int q_begin, int row, int seqlen_q, int lane, char* /*o_tile*/,
                                               OutTile<P>& o, const float (&scale)[2]) {
    const int first_q = q_begin + row + lane / 4;
    scale_tile<P>(o, scale);
    for (int half = 0; half < 2; ++half)
      if (first_q + half * 8 < seqlen_q)
        store_split<P>(p, split, sequence.split_row(p, h, first_q + half * 8), half, o[0]);
  }
};
/// The same of a warp that has some of the columns.
template <class P>
struct SplitColumnsOutput {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int h, int split,
                                               int q_begin, int row, int seqlen_q, int lane, char* /*o_tile*/,
                                               OutTile<P>& o, const float (&scale)[2]) {
    const int first_q = q_begin + row + lane / 4;
    scale_tile<P>(o, scale);
    float* columns = o_of_split<P>(p, split) + first_column<P>();
    for (int half = 0; half < 2; ++half)
      if (const int q = first_q + half * 8; q < seqlen_q)
        store_row<ForwardPolicy<P>::kOt>(columns + sequence.split_row(p, h, q) * P::kHeadDimV, half, o[0],
                                         own_chunks<P>());
  }
};

template <class P>
struct Fp32Output {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int h,
                                               int /*split*/, int q_begin, int row, int seqlen_q, int lane,
                                               char* /*o_tile*/, OutTile<P>& o, const float (&scale)[2]) {
    const int first_q = q_begin + row + lane / 4;
    scale_tile<P>(o, scale);
    float* columns = sequence.template q_pointer<float>(p.o, h, first_q) + first_column<P>();
    for (int half = 0; half < 2; ++half)
      if (first_q + half * 8 < seqlen_q)
        store_row<ForwardPolicy<P>::kOt>(columns + half * 8 * p.o.stride_s, half, o[0], own_chunks<P>());
  }
};

/// Q's type, by way of shared memory in Q's place, for whole cache lines.
template <class P>
struct SharedOutput {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int h,
                                               int /*split*/, int q_begin, int row, int seqlen_q, int lane,
                                               char* o_tile, OutTile<P>& o, const float (&scale)[2]) {
    constexpr int kPitch = pitch(P::kHeadDimV);
#pragma unroll
    for (int ot = 0; ot < ForwardPolicy<P>::kOt; ++ot)
      store_fragment<typename P::Element, kPitch>(o_tile, row, ot * 8, o[ot], scale[0], scale[1]);
    __syncwarp();
    store_tile<16, P::kHeadDimV, 32>(sequence.q_pointer(p.o, h, q_begin + row), p.o.stride_s,
                                     o_tile + row * kPitch * 2, seqlen_q - q_begin - row, lane);
  }
};
template <class P>
struct SharedColumnsOutput {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int h,
                                               int /*split*/, int q_begin, int row, int seqlen_q, int lane,
                                               char* o_tile, OutTile<P>& o, const float (&scale)[2]) {
    constexpr int kPitch = pitch(P::kHeadDimV), kOt = ForwardPolicy<P>::kOt;
    const int first = first_column<P>(), chunks = own_chunks<P>();
#pragma unroll
    for (int ot = 0; ot < kOt; ++ot)
      if (ot < chunks)
        store_fragment<typename P::Element, kPitch>(o_tile, row, first + ot * 8, o[ot], scale[0], scale[1]);
    __syncwarp();
    unsigned short* to = sequence.q_pointer(p.o, h, q_begin + row) + first;
    const char* from = o_tile + (row * kPitch + first) * 2;
    for (int index = lane; index < 16 * kOt; index += 32) {
      const int of_tile = index / kOt, chunk = index % kOt;
      if (chunk < chunks && of_tile < seqlen_q - q_begin - row)
        *reinterpret_cast<uint4*>(to + of_tile * p.o.stride_s + chunk * 8) =
            *reinterpret_cast<const uint4*>(from + (of_tile * kPitch + chunk * 8) * 2);
    }
  }
};

template <class P>
using StoredOutput = Conditional<
    P::kSplit, Conditional<ForwardPolicy<P>::kSharesRows, SplitColumnsOutput<P>, SplitOutput<P>>,
    Conditional<P::kFp32Out, Fp32Output<P>,
                Conditional<ForwardPolicy<P>::kSharesRows, SharedColumnsOutput<P>, SharedOutput<P>>>>;

}  // namespace flashjit::sm80
