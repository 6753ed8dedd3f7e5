// A running state: O and LSE, in fp32, of the same queries over other keys. The epilogue joins the call's
// keys with it: LSE = log(exp(LSE_state) + exp(LSE_keys)), O = exp(LSE_state - LSE) O_state + exp(LSE_keys -
// LSE) O_keys. Its memory may be O's and LSE's: each element of O is read by the thread that writes it.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// Whether the kernel that visits the keys joins them with a running state; with split-KV the combine entry
/// does.
template <class P>
constexpr bool kJoinsState = P::kRunningState && !P::kSplit;

/// Joins a row, `row` of LSE: what its keys gave, in `end`, becomes what all keys give. Returns the factor
/// for the state's O; 0: that may be anything. For all threads of a warp, which write LSE after that;
/// `exists`: the thread has a row.
template <class P>
__device__ __forceinline__ float join_state(const Params& p, bool exists, long long row, RowEnd& end) {
  if constexpr (!P::kRunningState) return 0.0f;
  const float before = exists ? p.lse_state[row] : -infinity();
  __syncwarp();
  if (!exists || (before == -infinity() && end.lse == -infinity())) return 0.0f;
  const float highest = fmaxf(before, end.lse);
  const float of_state = expf(before - highest), of_keys = expf(end.lse - highest), sum = of_state + of_keys;
  end.lse = highest + logf(sum);
  end.factor *= of_keys / sum;
  return of_state / sum;
}

/// Adds the state's O to a thread's values of one of its two rows of an accumulator, see store_row().
template <int kChunks>
__device__ __forceinline__ void add_state(float* c, int half, const float* row, float factor,
                                          int chunks = kChunks) {
  if (factor == 0.0f) return;
  const float* from = row + threadIdx.x % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= chunks) continue;
    const float2 x = *reinterpret_cast<const float2*>(from + chunk * 8);
    float(&to)[2] = reinterpret_cast<float(&)[2]>(c[chunk * 4 + half * 2]);
    to[0] = fmaf(factor, x.x, to[0]), to[1] = fmaf(factor, x.y, to[1]);
  }
}

/// Four columns of the state's O.
__device__ __forceinline__ float4 state_columns(const float* at, float factor) {
  if (factor == 0.0f) return {};
  const float4 x = *reinterpret_cast<const float4*>(at);
  return {factor * x.x, factor * x.y, factor * x.z, factor * x.w};
}

/// O and LSE of rows without keys, from query `first` on, are the state's. By the threads of one warp, or
/// most of them.
template <class P>
__device__ __forceinline__ void copy_state(const Params& p, const Sequence<P>& sequence, int h, int first,
                                           int count, int thread, int threads) {
  constexpr int kChunks = P::kHeadDimV / 4;
#pragma unroll 1
  for (int chunk = thread; chunk < count * kChunks; chunk += threads) {
    const int row = chunk / kChunks, column = chunk % kChunks * 4;
    const float factor = p.lse_state[sequence.lse_row(p, h, first + row)] == -infinity() ? 0.0f : 1.0f;
    const float* from = sequence.template q_pointer<float>(p.o_state, h, first + row) + column;
    store_columns(sequence.template q_pointer<OutElement<P>>(p.o, h, first + row) + column,
                  state_columns(from, factor));
  }
  if (p.lse.data == nullptr) return;
#pragma unroll 1
  for (int row = thread; row < count; row += threads) {
    const long long at = sequence.lse_row(p, h, first + row);
    p.lse.data[at] = p.lse_state[at];
  }
}

}  // namespace flashjit
