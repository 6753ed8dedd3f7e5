// Backward_jvp: what a pair and a row give to tangents of gradients. With a prime for a tangent, and a
// program's slope g = d score / d (scale Q K^T),
//
//   S' = g scale (Q' K^T + Q K'^T) + (d score / d capture) capture',   LSE' = rowsum(P S'),   P' = P (S' -
//   LSE') dP' = dO' V^T + dO V'^T,   D' = rowsum(P' dP + P dP') - dLSE' dS = P (dP - D),   dS' = P' (dP - D)
//   + P (dP' - D')
//
// and then through the program: (dS g)' = dS' g + dS g'.
#pragma once

#include "flashjit/common/backward_jvp_params.cuh"
#include "flashjit/common/score_tangent.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// What the pairs of a query share. LSE is inf for queries without P and queries that do not exist.
struct RowTangents {
  float lse, d, lse_tangent, d_tangent;
};

/// Where they are stored.
struct RowTangentsPlace {
  float *d, *lse_tangent, *d_tangent;

  template <class P>
  static __device__ __forceinline__ RowTangentsPlace of(const BackwardJvpParams& p,
                                                        const Sequence<P>& sequence, int h, int q) {
    const long long plane = static_cast<long long>(p.batch) * p.heads_q * p.seqlen_q_padded;
    float* const first = p.row_tangents + sequence.stats_row(p, h) + q;
    return {first, first + plane, first + 2 * plane};
  }
};

template <class P>
__device__ __forceinline__ float lse_or_infinity(const Params& p, const Sequence<P>& sequence, int h, int q) {
  if (q >= sequence.seqlen_q(p)) return infinity();
  const float lse = p.lse.data[sequence.lse_row(p, h, q)];
  return lse_gives_p(lse) ? lse : infinity();
}

/// What finish_row() stored.
template <class P>
__device__ __forceinline__ RowTangents stored_row(const BackwardJvpParams& p, const Sequence<P>& sequence,
                                                  int h, int q) {
  const auto place = RowTangentsPlace::of(p, sequence, h, q);
  return {lse_or_infinity(p, sequence, h, q), *place.d, *place.lse_tangent, *place.d_tangent};
}

/// A pair that attends: where it is, its products, and what dropout multiplies P with.
struct PairProducts {
  int q, kv;
  float dot, dot_tangent, dp, dp_tangent, dropout;
};

template <class P>
__device__ __forceinline__ float weight_of(const Params& p, const typename P::Head& head,
                                           const PairProducts& pair, float lse) {
  // Not fused with what follows: see scaled() of simt/tile.cuh.
  const float score = P::kHasScore ? P::score(p, head, pair.dot, position(pair.q), position(pair.kv))
                                   : __fmul_rn(p.softmax_scale, pair.dot);
  return exp2f((score - lse) * kLog2E);
}

template <class P>
__device__ __forceinline__ float score_tangent_of(const BackwardJvpParams& p, const typename P::Head& head,
                                                  const PairProducts& pair) {
  return score_tangent<P>(p, head, pair.dot, pair.dot_tangent, position(pair.q), position(pair.kv));
}

/// A row's rowsum(P), D, LSE' and what D' is without LSE'; a lane's own parts.
struct RowTangentSums {
  float p = 0.0f, d = 0.0f, lse_tangent = 0.0f, d_tangent = 0.0f;

  template <class P>
  __device__ __forceinline__ void add(const BackwardJvpParams& params, const typename P::Head& head,
                                      const PairProducts& pair, float lse) {
    const float weight = weight_of<P>(params, head, pair, lse);
    if (weight == 0.0f) return;  // tangents may be anything there
    const float moved = weight * score_tangent_of<P>(params, head, pair), dp = pair.dp * pair.dropout;
    p += weight;
    d += weight * dp;
    lse_tangent += moved;
    d_tangent += moved * dp + weight * (pair.dp_tangent * pair.dropout);
  }
};

/// What a row's pairs share, from the sums of all lanes. `stores`: also stores it, and with a sink what
/// sink_grads multiplies its P with.
template <class P>
__device__ __forceinline__ RowTangents finish_row(float lse, const RowTangentSums& sums,
                                                  const BackwardJvpParams& p, const Sequence<P>& sequence,
                                                  int h, int q, bool stores) {
  RowTangents row{lse, sums.d, with_sink_tangent<P>(p, h, sums.lse_tangent, sums.p), 0.0f};
  row.d_tangent = sums.d_tangent - row.lse_tangent * sums.d;
  if (q >= sequence.seqlen_q(p)) return row;
  const long long at = sequence.lse_row(p, h, q);
  const bool has_p = lse != infinity();  // else dLSE has no effect, and may be NaN
  if (p.dlse && has_p) row.d -= p.dlse[at];
  if (p.dlse_tangent && has_p) row.d_tangent -= p.dlse_tangent[at];
  if (!stores) return row;
  const auto place = RowTangentsPlace::of(p, sequence, h, q);
  *place.d = row.d, *place.lse_tangent = row.lse_tangent, *place.d_tangent = row.d_tangent;
  const float moved = (P::kSinks && p.sinks_tangent ? p.sinks_tangent[h] : 0.0f) - row.lse_tangent;
  if (P::kSinks) p.d[sequence.stats_row(p, h) + q] = moved * row.d + row.d_tangent;
  return row;
}

/// What a pair adds to dV' and dV (P after dropout), and to dQ' and dK' (dS with respect to Q K^T).
struct PairTangents {
  float p, p_tangent, ds, ds_tangent;
};

/// `add` gets what the pair adds to tangents of captures' gradients.
template <class P, class Add>
__device__ __forceinline__ PairTangents pair_tangents(const BackwardJvpParams& p,
                                                      const typename P::Head& head, const PairProducts& pair,
                                                      const RowTangents& row, Add&& add) {
  const float weight = weight_of<P>(p, head, pair, row.lse);
  if (weight == 0.0f) return {0.0f, 0.0f, 0.0f, 0.0f};
  const float weight_tangent = weight * (score_tangent_of<P>(p, head, pair) - row.lse_tangent);
  const float from_d = pair.dp * pair.dropout - row.d;
  float ds = weight * from_d;
  float ds_tangent = weight_tangent * from_d + weight * (pair.dp_tangent * pair.dropout - row.d_tangent);
  const float moved = pair.dot_tangent * p.softmax_scale;
  const Position q = position(pair.q), kv = position(pair.kv);
  P::add_capture_grad_tangents(p, head, ds, ds_tangent, pair.dot, moved, q, kv, add);
  if (P::kScoreGrad) {
    const float slope = P::score_grad(p, head, pair.dot, q, kv);
    ds_tangent =
        chained(ds_tangent, slope) + chained(ds, P::score_grad_tangent(p, head, pair.dot, moved, q, kv));
    ds = chained(ds, slope);
  }
  return {weight * pair.dropout, weight_tangent * pair.dropout, ds * p.softmax_scale,
          ds_tangent * p.softmax_scale};
}

}  // namespace flashjit
