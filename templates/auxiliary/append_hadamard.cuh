// New rows on their way into a cache of codes as append_rows() has them, K's and Q's rotated by a Hadamard
// matrix last. An entry of its own, so that rows without it cost nothing; for codes of 8 bits, too.
#pragma once

#include "flashjit/auxiliary/append_rows.cuh"
#include "flashjit/auxiliary/hadamard.cuh"

namespace flashjit::auxiliary {

/// Codes with the call's scale alone, in place of a RowEncoder.
template <class Code, int kDim>
struct RowOfCodes {};
template <class P>
struct Encoders<P, false> {
  using K = RowOfCodes<typename P::KvElement, P::kHeadDim>;
  using V = RowOfCodes<typename P::KvElement, P::kHeadDimV>;
};

template <class P, class Code, int kDim>
__device__ __forceinline__ void store_encoded(RowOfCodes<Code, kDim>&, const float* row,
                                              const TensorParam& cache, const TensorParam&,
                                              const ScaleParam& scales, int b, KeyPlace place, int h) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* scale = scale_at(scales, b, place, h);
  const float largest = P::kKeyScales ? magnitude_of_block<32>(row, kDim).extreme : 0.0f;
  const float divisor = divisor_of_key<P, Code>(scale, largest, lane == 0);
  Code* to = row_of<Code>(cache, place.page, h, place.row);
  for (int four = lane; four < kDim / 4; four += 32) {
    const float* x = row + four * 4;
    reinterpret_cast<unsigned*>(to)[four] =
        codes_of_four<Code>({x[0] / divisor, x[1] / divisor, x[2] / divisor, x[3] / divisor});
  }
  __syncwarp();
}

struct ByHadamard {
  template <int kDim>
  static __device__ __forceinline__ void change(float* row, int lane) {
    rotate_by_hadamard<kDim>(row, lane);
  }
};

template <class P>
__device__ void append_hadamard(const AppendParams& p) {
  append_rows<P, ByHadamard>(p);
}

}  // namespace flashjit::auxiliary
