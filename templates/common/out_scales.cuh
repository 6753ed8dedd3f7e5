// Where the scales of O's blocks are written (kOutCodes); OutScalePlace<P> names one of the types below.
#pragma once

#include "flashjit/common/scale_tiles.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// A row's are next to each other.
template <class P>
struct ScalesInRows {
  using Scale = typename P::OutFormat::StoredScale;

  static __device__ __forceinline__ Scale* row(const Params& p, const Sequence<P>& sequence, int h, int q) {
    return sequence.template q_pointer<Scale>(p.out_block_scale, h, q);
  }
  static __device__ __forceinline__ int of_block(int block) { return block; }
};

/// In the tiles of scale_tiles.cuh: a matrix of all tokens and of the blocks of all heads. The strides are:
/// of a sequence, its tokens; of a head and of the tiles of 128 tokens, bytes.
template <class P>
struct SwizzledScales {
  static_assert(P::OutFormat::kColumns / P::OutFormat::kBlock % kScaleTileColumns == 0,
                "a head has whole tiles");

  static __device__ __forceinline__ unsigned char* row(const Params& p, const Sequence<P>& sequence, int h,
                                                       int q) {
    const TensorParam& scales = p.out_block_scale;
    const long long token = sequence.batch() * scales.stride_b + sequence.q_row(q);
    return row_of_scales(static_cast<unsigned char*>(scales.data), token, scales.stride_s,
                         h * scales.stride_h);
  }
  static __device__ __forceinline__ int of_block(int block) { return byte_of_scale_column(block); }
};

template <class P>
using OutScalePlace = Conditional<P::kSwizzledScales, SwizzledScales<P>, ScalesInRows<P>>;

}  // namespace flashjit
