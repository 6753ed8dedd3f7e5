// A warpgroup's S becomes scores: the scales of quantized K and V, and the score program.
#pragma once

#include "flashjit/sm90/forward_rows.cuh"

namespace flashjit::sm90 {

// --- Scales -----------------------------------------------------------------------------------------------

/// Calls apply(value of S, its key's factor); `pair(n)` gives the factors of the keys of values n and n + 1.
template <int kCount, class Pair, class Apply>
__device__ __forceinline__ void apply_to_keys(float (&s)[kCount], const Pair& pair, const Apply& apply) {
#pragma unroll
  for (int n = 0; n < kCount; n += 4) {
    const float2 factor = pair(n);
#pragma unroll
    for (int e = 0; e < 4; ++e) apply(s[n + e], e % 2 ? factor.y : factor.x);
  }
}
/// S *= the scales of K's keys, `scales` being of the thread's first on.
template <int kCount>
__device__ __forceinline__ void scale_keys(float (&s)[kCount], const float* scales) {
  apply_to_keys(
      s, [&](int n) { return *reinterpret_cast<const float2*>(scales + n * 2); },
      [](float& score, float scale) { score *= scale; });
}

/// S *= K's scale, where a program makes scores of it, or keys have their own.
template <class P, int kCount>
__device__ __forceinline__ void scale_products(const KeyFactors<true>& keys, const RowState<P>&,
                                               float (&s)[kCount]) {
  apply_to_keys(
      s, [&](int n) { return factors_of_keys<P, kOfScore>(keys, n); },
      [](float& score, float scale) { score *= scale; });
}
template <class P, int kCount>
__device__ __forceinline__ void scale_products(const KeyFactors<false>&, const RowState<P>& rows,
                                               float (&s)[kCount]) {
  if (kHeadScales<P> && P::kHasScore) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) s[n] = rows.times_k_scale(s[n], n / 2 % 2);
  }
}
/// S += log of V's scales: so P has them before it is rounded, and the row maximum counts them.
template <class P, int kCount>
__device__ __forceinline__ void add_log_of_v_scales(const KeyFactors<true>& keys, float (&s)[kCount]) {
  apply_to_keys(
      s, [&](int n) { return factors_of_keys<P, kLogOfV>(keys, n); },
      [](float& score, float log) { score += log; });
}
template <class P, int kCount>
__device__ __forceinline__ void add_log_of_v_scales(const KeyFactors<false>&, float (&)[kCount]) {}

// --- The score program ------------------------------------------------------------------------------------

/// Calls score(S, n, q, kv) for each value n of S, and the positions of its query and key.
template <class P, int kCount, class Score>
__device__ __forceinline__ void score_pairs(const RowState<P>& rows, int kv_begin, float (&s)[kCount],
                                            const Score& score) {
  const Position row = position(rows.first_query()),
                 column = position(kv_begin + static_cast<int>(threadIdx.x) % 4 * 2);
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    s[n] = score(s[n], n, row + n / 2 % 2 * rows.to_second(), column + (n / 4 * 8 + n % 2));
}

/// S = score(S). ScoreStage<P> names one of four types. `bias`: this lane's address in the bias tile, in the
/// first four 8 x 8 matrices. `column_terms`: from this thread's first key on.
template <class P>
struct NoScore {  // or a line, which the softmax adds, or the stage of weights finds it
  template <int kCount>
  static __device__ __forceinline__ void apply(const Params&, const RowState<P>&, int, unsigned, const float*,
                                               float (&)[kCount]) {}
};
template <class P>
struct ScoreOfPairs {
  template <int kCount>
  static __device__ __forceinline__ void apply(const Params& p, const RowState<P>& rows, int kv_begin,
                                               unsigned, const float*, float (&s)[kCount]) {
    score_pairs(rows, kv_begin, s, [&](float score, int, Position q, Position kv) {
      return P::score(p, rows.head, score, q, kv);
    });
  }
};
template <class P>
struct ScoreOfTerms {
  template <int kCount>
  static __device__ __forceinline__ void apply(const Params& p, const RowState<P>& rows, int kv_begin,
                                               unsigned, const float* column_terms, float (&s)[kCount]) {
    const Position row = position(rows.first_query()),
                   column = position(kv_begin + static_cast<int>(threadIdx.x) % 4 * 2);
    float2 of_keys{};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const Position q = row + n / 2 % 2 * rows.to_second(), kv = column + (n / 4 * 8 + n % 2);
      if (P::kScoreColumnTerm && n % 4 == 0) of_keys = *reinterpret_cast<const float2*>(column_terms + n * 2);
      s[n] = P::score_of_terms(p, rows.head, s[n], rows.row_term[n / 2 % 2], n % 2 ? of_keys.y : of_keys.x, q,
                               kv);
    }
  }
};
template <class P>
struct ScoreOfBias {
  template <int kCount>
  static __device__ __forceinline__ void apply(const Params& p, const RowState<P>& rows, int kv_begin,
                                               unsigned bias, const float*, float (&s)[kCount]) {
    unsigned elements[4];
    score_pairs(rows, kv_begin, s, [&](float score, int n, Position q, Position kv) {
      const int chunk = n / 4;
      if (n % 8 == 0) load_matrix_x4(elements, (bias ^ (chunk % 8 * 16)) + chunk / 8 * P::kBr * kRowBytes);
      const unsigned word = elements[n % 8 / 2] >> n % 2 * 16;
      return P::score_of_element(p, rows.head, score, static_cast<unsigned short>(word), q, kv);
    });
  }
};
template <class P>
using ScoreStage = Conditional<
    !P::kHasScore || kAddsScoreLine<P> || P::kPairSigmoid, NoScore<P>,
    Conditional<P::kBiasTile, ScoreOfBias<P>,
                Conditional<P::kScoreRowTerm || P::kScoreColumnTerm, ScoreOfTerms<P>, ScoreOfPairs<P>>>>;

}  // namespace flashjit::sm90
