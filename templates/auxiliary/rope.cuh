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

/// The positions of a new row: one, or with M-RoPE its time, height and width.
struct RowPositions {
  int of[3];

  __device__ __forceinline__ RowPositions(const RopeParam& rope, int row, int key) : of{key, key, key} {
    if (rope.positions == nullptr) return;
    const bool several = rope.sections[0] + rope.sections[1] + rope.sections[2] > 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) of[i] = rope.positions[row + (several ? i * rope.position_count : 0)];
  }

  /// The one that turns a pair.
  __device__ __forceinline__ int of_pair(const RopeParam& rope, int pair) const {
    const int turn = pair % 3;
    if (rope.interleaved_sections)
      return turn == 1 && pair < 3 * rope.sections[1]   ? of[1]
             : turn == 2 && pair < 3 * rope.sections[2] ? of[2]
                                                        : of[0];
    return pair < rope.sections[0] ? of[0] : pair < rope.sections[0] + rope.sections[1] ? of[1] : of[2];
  }

  /// Whether all of them have angles.
  __device__ __forceinline__ bool have_angles(const RopeParam& rope) const {
    const auto has = [&](int i) {
      return static_cast<unsigned>(of[i]) < static_cast<unsigned>(rope.table_rows);
    };
    return rope.cos == nullptr || (has(0) && has(1) && has(2));
  }
};

/// Turns the pairs of a row in shared memory by its positions' angles. By a warp.
template <class Element>
__device__ __forceinline__ void rotate_row(const RopeParam& rope, const RowPositions& positions, float* row,
                                           int lane) {
  for (int pair = lane; pair < rope.pairs; pair += 32) {
    const float2 angle = rotation<Element>(rope, positions.of_pair(rope, pair), pair);
    float &x = row[rope.interleaved ? 2 * pair : pair],
          &y = row[rope.interleaved ? 2 * pair + 1 : pair + rope.pairs];
    const float before = x;
    x = x * angle.x - y * angle.y;
    y = before * angle.y + y * angle.x;
  }
  __syncwarp();
}

}  // namespace flashjit::auxiliary
