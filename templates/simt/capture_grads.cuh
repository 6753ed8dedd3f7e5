// Gradients of captured tensors with the same bits on every run, instead of the atomic additions of
// backward_dq. Each CTA sums what a tile of pairs adds to each element, and adds the sums to memory after
// the tiles before it: one tile after the other, which is slow.
#pragma once

#include "flashjit/common/wait.cuh"
#include "flashjit/simt/backward.cuh"

namespace flashjit::simt {

/// One of the additions that a pair makes.
struct ChosenAddition {
  int chosen;
  float* at = nullptr;
  float value = 0.0f;

  template <class Which>
  __device__ __forceinline__ void operator()(Which, float* at_, float value_) {
    if (Which::kIndex == chosen && value_ != 0.0f) at = at_, value = value_;
  }
};

/// One addition of the program for one tile of pairs of one head.
struct TileAddition {
  int addition, b, h, q_tile, kv_tile;

  template <class Problem>
  static __device__ TileAddition of(const Params& p, unsigned long long work) {
    const int q_tiles = tiles_of(p.seqlen_q, Problem::kBr), kv_tiles = tiles_of(p.seqlen_kv, Problem::kBc);
    const auto next = [&](int count) {
      const int at = static_cast<int>(work % count);
      work /= count;
      return at;
    };
    TileAddition made;
    made.kv_tile = next(kv_tiles), made.q_tile = next(q_tiles);
    made.h = next(p.heads_q), made.b = next(p.batch), made.addition = static_cast<int>(work);
    return made;
  }
  template <class Problem>
  static __device__ unsigned long long count(const Params& p) {
    return static_cast<unsigned long long>(Problem::kCaptureGrads) * p.batch * p.heads_q *
           tiles_of(p.seqlen_q, Problem::kBr) * tiles_of(p.seqlen_kv, Problem::kBc);
  }
};

/// What each pair of the tile adds, and to which element, in shared memory; a null pointer: nothing.
template <class T>
struct PairAdditions {
  static constexpr int kPairs = T::kRows * T::kColumns;
  static_assert(kPairs * (sizeof(float*) + sizeof(float)) <= shared_bytes(T::kRows, T::kColumns),
                "they lie where the products' operands were");
  float** at;
  float* value;

  __device__ explicit PairAdditions(const Shared& shared)
      : at(reinterpret_cast<float**>(shared.rows)), value(reinterpret_cast<float*>(at + kPairs)) {}
  __device__ void put(int pair, float* at_, float value_) const { at[pair] = at_, value[pair] = value_; }
};

/// The pairs of one tile; false: none attends.
template <class Problem, class T>
__device__ bool find_additions(const Params& p, const TileAddition& work, const Shared& shared) {
  const Sequence<Problem> sequence(p, work.b);
  const Range q_range = tile_range(work.q_tile, Problem::kBr, sequence.seqlen_q(p));
  const Range kv_range = tile_range(work.kv_tile, Problem::kBc, sequence.seqused_kv(p));
  if (q_range.begin == q_range.end || kv_range.begin == kv_range.end) return false;
  const auto head = sequence.head(p, work.h);
  const Visible tile = visible<Problem>(p, head, q_range, kv_range);
  if (!tile.any) return false;

  const int h_kv = work.h / p.qhead_per_kvhead();
  const Pairs pairs = pairs_of_thread<Problem, T, true>(p, tile, head);
  typename T::Scores s, dp;
  multiply_transposed<T, Problem::kHeadDim>(s, shared, q_matrix(sequence, p.q, work.h, q_range.end),
                                            q_range.begin, kv_matrix(p, sequence, p.k, h_kv, kv_range.end),
                                            kv_range.begin);
  multiply_transposed<T, Problem::kHeadDimV>(dp, shared, q_matrix(sequence, p.dout, work.h, q_range.end),
                                             q_range.begin, kv_matrix(p, sequence, p.v, h_kv, kv_range.end),
                                             kv_range.begin);
  __syncthreads();  // the operands have been read
  const PairAdditions<T> additions(shared);
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    const RowStats stats = row_stats(p, sequence, work.h, q_range.begin + T::row(i));
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      ChosenAddition chosen{work.addition};
      if (pairs.attends(i * T::kN + j)) {
        float dropout = 1.0f;
        if constexpr (Problem::kDropout) dropout = pairs.keeps(i * T::kN + j) ? p.keep_scale : 0.0f;
        pair_gradient<Problem>(p, head, q_range.begin + T::row(i), kv_range.begin + T::column(j), s[i][j],
                               dp[i][j], stats, dropout, chosen);
      }
      additions.put(T::row(i) * T::kColumns + T::column(j), chosen.at, chosen.value);
    }
  }
  __syncthreads();
  return true;
}

/// The tile's sum for the element that a pair adds to, in the order of the pairs; a null pointer where an
/// earlier pair has it.
template <class T>
__device__ void sum_for_place(const PairAdditions<T>& additions, int pair, float*& at, float& sum) {
  at = additions.at[pair], sum = 0.0f;
#pragma unroll 4
  for (int other = 0; at != nullptr && other < PairAdditions<T>::kPairs; ++other) {
    if (additions.at[other] != at) continue;
    if (other < pair)
      at = nullptr;
    else
      sum += additions.value[other];
  }
}

/// CTAs: any number. Tiles are numbered as they start, so that a CTA waits only for CTAs that run.
template <class Problem>
__device__ void capture_grads(const Params& p) {
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  constexpr int kOwn = T::kM * T::kN;
  __shared__ unsigned long long started;
  unsigned long long* next = reinterpret_cast<unsigned long long*>(p.semaphores);
  unsigned long long* semaphore = next + 1;
  const unsigned long long count = TileAddition::count<Problem>(p);
  const Shared shared = shared_memory<T>();
  for (;;) {
    if (threadIdx.x == 0) started = atomicAdd(next, 1ull);
    __syncthreads();
    const unsigned long long mine = started;
    if (mine >= count) return;

    float* at[kOwn];
    float sum[kOwn];
    const bool any = find_additions<Problem, T>(p, TileAddition::of<Problem>(p, mine), shared);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      at[i] = nullptr, sum[i] = 0.0f;
      const int pair = static_cast<int>(threadIdx.x) + i * T::kThreads;
      if (any) sum_for_place(PairAdditions<T>(shared), pair, at[i], sum[i]);
    }
    if (threadIdx.x == 0) wait_semaphore<Problem, 32>(semaphore, mine);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (at[i] != nullptr) __stcg(at[i], __ldcg(at[i]) + sum[i]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(semaphore, mine + 1);
  }
}

}  // namespace flashjit::simt
