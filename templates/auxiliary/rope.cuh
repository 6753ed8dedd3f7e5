// The angles of rotary position embeddings (RoPE), from tables or by theta.
#pragma once

#include "flashjit/auxiliary/append_params.cuh"
#include "flashjit/common/element.cuh"

namespace flashjit::auxiliary {

/// cos and sin of a pair's angle. Whole turns are dropped in fp64, which keeps the rest exact for positions
/// of millions.
template <class Element>
__device__ __forceinline__ float2 rotation(const RopeParam& rope, int position, int pair) {
  if (rope.cos == nullptr) {
    double turns = position * rope.turns;
#pragma unroll
    for (int n = 0; n < kRopeFactors; ++n)
      if (pair >> n & 1) turns *= rope.factors[n];
    float2 result;
    sincospif(2.0f * static_cast<float>(turns - rint(turns)), &result.y, &result.x);
    return result;
  }
  const long long at = position * rope.stride + pair;
  const auto read = [&]<class T>(T) {
    return float2{to_float(static_cast<const T*>(rope.cos)[at]),
                  to_float(static_cast<const T*>(rope.sin)[at])};
  };
  return rope.fp32_tables ? read(float{}) : read(Element{});
}
/// Turns the pairs of a row in shared memory by its position's angles. By a warp.
template <class Element>
__device__ __forceinline__ void rotate_row(const RopeParam& rope, int position, float* row, int lane) {
  for (int pair = lane; pair < rope.pairs; pair += 32) {
    const float2 angle = rotation<Element>(rope, position, pair);
    float &x = row[rope.interleaved ? 2 * pair : pair],
          &y = row[rope.interleaved ? 2 * pair + 1 : pair + rope.pairs];
    const float before = x;
    x = x * angle.x - y * angle.y;
    y = before * angle.y + y * angle.x;
  }
  __syncwarp();
}
/// Whether a position has angles.
__device__ __forceinline__ bool has_angles(const RopeParam& rope, int position) {
  return rope.cos == nullptr || static_cast<unsigned>(position) < static_cast<unsigned>(rope.table_rows);
}

}  // namespace flashjit::auxiliary
