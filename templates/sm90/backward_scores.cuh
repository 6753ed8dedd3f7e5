// The score program in the backward pass: S becomes score(S), and its derivative, `slope`, is kept for dS.
#pragma once

#include "flashjit/sm90/backward_score_tile.cuh"

namespace flashjit::sm90 {

/// What P and dS of a thread's pairs are made from, beside the products.
template <class P>
struct PairInputs {
  unsigned bias_tile = 0;  ///< this lane's address in the bias tile
  float column_term[2] = {};
  DroppedValues<ScoreTile<P>::kCount> dropped;
  TileMask<P, BackwardPolicy<P>::kPairQueries> mask;
  unsigned map_bits = ~0u;
  float2 lse, d;      ///< of the first two queries
  float scale, log2;  ///< LSE's unit, see common/lse_log2.cuh
};

// What a program reads, besides the positions: prepare() begins it for all pairs, before dP takes the
// registers, and find() gets it for pair e of the four from n on.

/// Nothing.
template <class P>
struct PairPositions {
  static __device__ __forceinline__ void prepare(const Params&, const TensorMaps&, const BackwardSmem<P>&,
                                                 const typename P::Head&, const ScoreTile<P>&,
                                                 PairInputs<P>&) {}
  __device__ __forceinline__ void find(const Params&, const typename P::Head&, const ScoreTile<P>&,
                                       PairInputs<P>&, int, int) {}
  __device__ __forceinline__ float slope(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score_grad(p, head, dot, q, kv);
  }
  __device__ __forceinline__ float score(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score(p, head, dot, q, kv);
  }
};
/// An element of the bias tile.
template <class P>
struct PairBias {
  unsigned words[4];  // of eight values
  unsigned short element;

  static __device__ __forceinline__ void prepare(const Params& p, const TensorMaps& maps,
                                                 const BackwardSmem<P>& smem, const typename P::Head& head,
                                                 const ScoreTile<P>& tile, PairInputs<P>& in) {
    in.bias_tile = prepare_bias_tile(p, maps, smem, head, tile);
  }

  __device__ __forceinline__ void find(const Params&, const typename P::Head&, const ScoreTile<P>&,
                                       PairInputs<P>& in, int n, int e) {
    if (n % 8 + e == 0) load_matrix_x4_transposed(words, in.bias_tile + n / 8 * 16 * kRowBytes);
    element = static_cast<unsigned short>(words[(n + e) % 8 / 2] >> e % 2 * 16);
  }
  __device__ __forceinline__ float slope(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score_grad_of_element(p, head, dot, element, q, kv);
  }
  __device__ __forceinline__ float score(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score_of_element(p, head, dot, element, q, kv);
  }
};
/// The terms of its row and of its column.
template <class P>
struct PairTerms {
  float2 of_rows{};
  float row, column;

  static __device__ __forceinline__ void prepare(const Params& p, const TensorMaps&, const BackwardSmem<P>&,
                                                 const typename P::Head& head, const ScoreTile<P>& tile,
                                                 PairInputs<P>& in) {
    if constexpr (BackwardPolicy<P>::kFindsColumnTermsEarly)
      for (int half = 0; half < 2; ++half)
        in.column_term[half] = P::score_column_term(p, head, tile.at_kv(half * 2));
  }

  __device__ __forceinline__ void find(const Params& p, const typename P::Head& head,
                                       const ScoreTile<P>& tile, PairInputs<P>& in, int n, int e) {
    if (P::kScoreRowTerm && e == 0) of_rows = tile.of_queries(tile.row_terms, n);
    row = e % 2 ? of_rows.y : of_rows.x;
    if constexpr (P::kScoreColumnTerm && !BackwardPolicy<P>::kFindsColumnTermsEarly)
      in.column_term[e / 2] = P::score_column_term(p, head, tile.at_kv(n + e));
    column = in.column_term[e / 2];
  }
  __device__ __forceinline__ float slope(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score_grad_of_terms(p, head, dot, row, column, q, kv);
  }
  __device__ __forceinline__ float score(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score_of_terms(p, head, dot, row, column, q, kv);
  }
};

/// Nothing but the sigmoid, each with a reciprocal of its own: exponentials and reciprocals bound the forward
/// pass, not this one. NOTES.md#weights-of-sigmoids
template <class P>
struct PairSigmoids : PairPositions<P> {
  __device__ __forceinline__ float slope(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score_grad_of_sigmoid(p, head, dot, sigmoid(p, head, dot, q, kv), q, kv);
  }
  __device__ __forceinline__ float score(const Params& p, const typename P::Head& head, float dot, Position q,
                                         Position kv) const {
    return P::score_of_sigmoid(p, head, dot, sigmoid(p, head, dot, q, kv), q, kv);
  }

 private:
  static __device__ __forceinline__ float sigmoid(const Params& p, const typename P::Head& head, float dot,
                                                  Position q, Position kv) {
    using Math = flashjit::Math<typename P::Element>;
    return Math::reciprocal(1.0f + Math::exp2(P::sigmoid_exponent(p, head, dot, q, kv)));
  }
};

template <class P>
using PairScore = Conditional<
    BackwardPolicy<P>::kHasBiasTile, PairBias<P>,
    Conditional<P::kScoreRowTerm || P::kScoreColumnTerm, PairTerms<P>,
                Conditional<P::kPairSigmoid && P::kCaptureGrads == 0, PairSigmoids<P>, PairPositions<P>>>>;

/// The program's derivative, `slope`, which dS is multiplied with: 1, or a value.
template <class P>
struct UnitSlope {
  template <class... Rest>
  static __device__ __forceinline__ void find(Rest&&...) {}
  static __device__ __forceinline__ void chain(float&, const float&, const float (&)[4], int) {}
};
template <class P>
struct ProgramSlope {
  static __device__ __forceinline__ void find(float (&slope)[4], const PairScore<P>& program, const Params& p,
                                              const typename P::Head& head, const float& dot,
                                              const ScoreTile<P>& tile, int n, int e) {
    slope[e] = program.slope(p, head, dot, tile.at_q(n + e), tile.at_kv(n + e));
  }
  /// Where nothing attends, as `deciding` 0 says, a slope may be NaN.
  static __device__ __forceinline__ void chain(float& ds, const float& deciding, const float (&slope)[4],
                                               int e) {
    ds = deciding == 0.0f ? 0.0f : ds * slope[e];
  }
};
/// The slope is finite: 0 stays 0.
template <class P>
struct FiniteSlope : ProgramSlope<P> {
  static __device__ __forceinline__ void chain(float& ds, const float&, const float (&slope)[4], int e) {
    ds *= slope[e];
  }
};
template <class P, bool kMasked>
using ScoreSlope = Conditional<!P::kScoreGrad, UnitSlope<P>,
                               Conditional<P::kFiniteWeight && !kMasked, FiniteSlope<P>, ProgramSlope<P>>>;

/// What a thread's pairs add to those gradients of captures that the consumers add.
template <class P>
using PairSums = CaptureSums<P::kCaptureGrads - BackwardPolicy<P>::kGradsFromDs, 2>;

/// Adds what pair e of the four from n on gives, with its dS before the program's derivative.
template <class P>
struct AddedPairGrads {
  static __device__ __forceinline__ void add(const Params& p, const typename P::Head& head,
                                             const ScoreTile<P>& tile, int n, int e, float ds,
                                             const float (&dots)[4], PairSums<P>& sums) {
    P::add_capture_grads(p, head, ds, dots[e], tile.at_q(n + e), tile.at_kv(n + e),
                         [&](auto which, float* at, float value) {
                           if constexpr (!BackwardPolicy<P>::is_from_ds(which))
                             sums.of_key(e / 2)(which, at, value);
                         });
  }
};
template <class P>
struct NoPairGrads {
  static __device__ __forceinline__ void add(const Params&, const typename P::Head&, const ScoreTile<P>&, int,
                                             int, float, const float (&)[4], PairSums<P>&) {}
};
template <class P>
using PairGrads =
    Conditional<(P::kCaptureGrads > BackwardPolicy<P>::kGradsFromDs), AddedPairGrads<P>, NoPairGrads<P>>;

}  // namespace flashjit::sm90
