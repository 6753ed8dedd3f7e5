// Textbook attention on the GPU, to check the real kernels at sizes where the CPU would take too long.
// Nothing is tiled or fused: one CTA of 128 threads computes one query's row.
#pragma once

#include "flashjit/auxiliary/reference_params.cuh"
#include "flashjit/common/dropout.cuh"
#include "flashjit/common/element.cuh"
#include "flashjit/common/kv_source.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/tile_class.cuh"

namespace flashjit::auxiliary {

/// A query, and shared memory for its row of Q, dO and O and for a slice of its row of P and dS.
template <class P>
struct ReferenceRow {
  const Params& p;
  int b, h, q;
  long long row;  ///< among [batch, heads_q, q_count]
  Sequence<P> sequence;
  double *query, *dout, *out, *probs, *grads, *reduced;

  __device__ explicit ReferenceRow(const ReferenceParams& r) : p(r.base) {
    __shared__ double shared[P::kHeadDim + 2 * P::kHeadDimV + 3 * kReferenceThreads];
    row = blockIdx.x;
    q = r.q_begin + static_cast<int>(row % r.q_count);
    h = static_cast<int>(row / r.q_count % p.heads_q);
    b = static_cast<int>(row / r.q_count / p.heads_q);
    sequence = Sequence<P>(p, b);
    query = shared;
    dout = query + P::kHeadDim;
    out = dout + P::kHeadDimV;
    probs = out + P::kHeadDimV;
    grads = probs + kReferenceThreads;
    reduced = grads + kReferenceThreads;
  }

  __device__ int kv_head() const { return h / p.qhead_per_kvhead(); }
  __device__ bool exists() const { return q < sequence.seqlen_q(p); }
  /// Keys without padding.
  __device__ int length() const { return sequence.seqused_kv(p); }
  __device__ typename P::Head head() const { return sequence.head(p, h); }
  /// Q K^T from a score, as programs get it.
  __device__ float raw(double score) const { return static_cast<float>(score / p.softmax_scale); }

  using Element = typename P::Element;
  /// The query's row of a tensor like Q.
  __device__ const Element* own(const TensorParam& tensor) const {
    return sequence.template q_pointer<Element>(tensor, h, q);
  }
  /// A key's row of K or V.
  __device__ const Element* key(const TensorParam& tensor, int kv) const {
    return KvSource<P, Element>(p, tensor, sequence, kv_head()).row(kv);
  }
};

/// `Real` is the arithmetic: double computes exactly; float also rounds every matrix to the element type, as
/// a straightforward implementation does.
template <class Element, class Real>
__device__ __forceinline__ double rounded(double x) {
  if constexpr (sizeof(Real) == sizeof(double)) return x;
  return to_float(from_float<Element>(static_cast<float>(x)));
}

template <class Element, class Real>
__device__ double dot(const double* a, const Element* b, int size) {
  Real sum = 0;
  for (int i = 0; i < size; ++i) sum += static_cast<Real>(a[i]) * static_cast<Real>(to_float(b[i]));
  return sum;
}

__device__ __forceinline__ double negative_infinity() { return -static_cast<double>(infinity()); }

/// softmax_scale * (Q K^T) of one key.
template <class P, class Real>
__device__ double reference_product(const ReferenceRow<P>& r, int kv) {
  using Element = typename P::Element;
  return rounded<Element, Real>(dot<Element, Real>(r.query, r.key(r.p.k, kv), P::kHeadDim) *
                                r.p.softmax_scale);
}

/// The score of one key; -inf where the pair does not attend.
template <class P, class Real>
__device__ double reference_score(const ReferenceRow<P>& r, int kv) {
  using Element = typename P::Element;
  if (!pair_attends<P>(r.p, r.head(), r.q, kv)) return negative_infinity();
  const double s = reference_product<P, Real>(r, kv);
  if constexpr (P::kHasScore)
    return rounded<Element, Real>(P::score(r.p, r.head(), r.raw(s), position(r.q), position(kv)));
  return s;
}

/// The logit in the softmax besides the keys, a sink; -inf: none.
template <class P>
__device__ double reference_sink(const ReferenceRow<P>& r) {
  return static_cast<double>(sink_of_head<P>(r.p, r.h));
}

template <class P>
__device__ double reference_dropout(const ReferenceRow<P>& r, int kv) {
  if constexpr (P::kDropout)
    return pair_dropped<P>(r.p, dropout_head<P>(r.p, r.b, r.h), r.q, kv)
               ? 0.0
               : static_cast<double>(r.p.keep_scale);
  return 1.0;
}

struct Softmax {
  double max, sum;

  __device__ bool nothing() const { return max == negative_infinity(); }
  __device__ double prob(double score) const { return nothing() ? 0.0 : exp(score - max) / sum; }
};

/// Sum or maximum over the CTA's threads; every thread must call it and gets the result.
template <class P, class Combine>
__device__ double reduce(const ReferenceRow<P>& r, double value, Combine combine) {
  __syncthreads();
  r.reduced[threadIdx.x] = value;
  __syncthreads();
  double result = r.reduced[0];
  for (int i = 1; i < kReferenceThreads; ++i) result = combine(result, r.reduced[i]);
  return result;
}

template <class P, class Real>
__device__ Softmax reference_softmax(const ReferenceRow<P>& r) {
  const double sink = reference_sink<P>(r);
  double max = sink, sum = 0.0;
  for (int kv = threadIdx.x; kv < r.length(); kv += kReferenceThreads)
    max = fmax(max, reference_score<P, Real>(r, kv));
  max = reduce(r, max, [](double x, double y) { return fmax(x, y); });
  if (max == negative_infinity()) return {max, 0.0};
  for (int kv = threadIdx.x; kv < r.length(); kv += kReferenceThreads)
    sum += exp(reference_score<P, Real>(r, kv) - max);
  return {max, reduce(r, sum, [](double x, double y) { return x + y; }) + exp(sink - max)};
}

template <class P>
__device__ void load_row(const ReferenceRow<P>& r, double* to, const TensorParam& from, int size) {
  for (int d = threadIdx.x; d < size; d += kReferenceThreads) to[d] = to_float(r.own(from)[d]);
  __syncthreads();
}

/// O = P V of one row, into r.out.
template <class P, class Real>
__device__ void reference_output(const ReferenceRow<P>& r, const Softmax& softmax) {
  using Element = typename P::Element;
  for (int d = threadIdx.x; d < P::kHeadDimV; d += kReferenceThreads) r.out[d] = 0.0;
  for (int first = 0; first < r.length(); first += kReferenceThreads) {
    const int kv = first + static_cast<int>(threadIdx.x);
    __syncthreads();
    if (kv < r.length()) {
      const double prob = rounded<Element, Real>(softmax.prob(reference_score<P, Real>(r, kv)));
      r.probs[threadIdx.x] = rounded<Element, Real>(prob * reference_dropout<P>(r, kv));
    }
    __syncthreads();
    for (int d = threadIdx.x; d < P::kHeadDimV; d += kReferenceThreads) {
      Real sum = static_cast<Real>(r.out[d]);
      for (int i = 0; i < min(kReferenceThreads, r.length() - first); ++i) {
        const Real value = to_float(r.key(r.p.v, first + i)[d]);
        sum += static_cast<Real>(r.probs[i]) * value;
      }
      r.out[d] = sum;
    }
  }
  for (int d = threadIdx.x; d < P::kHeadDimV; d += kReferenceThreads)
    r.out[d] = rounded<Element, Real>(r.out[d]);
  __syncthreads();
}

/// CTAs: batch * heads_q * q_count. O and LSE.
template <class P, class Real>
__device__ void reference_forward(const ReferenceParams& params) {
  const ReferenceRow<P> r(params);
  if (!r.exists()) return;
  load_row(r, r.query, r.p.q, P::kHeadDim);
  const Softmax softmax = reference_softmax<P, Real>(r);
  reference_output<P, Real>(r, softmax);
  for (int d = threadIdx.x; d < P::kHeadDimV; d += kReferenceThreads)
    params.out[r.row * P::kHeadDimV + d] = r.out[d];
  if (params.lse && threadIdx.x == 0)
    params.lse[r.row] = softmax.nothing() ? softmax.max : softmax.max + log(softmax.sum);
}

/// P after dropout and dS = P * (dP - D) of one key, into r.probs and r.grads.
template <class P, class Real>
__device__ void reference_pair(const ReferenceRow<P>& r, const Softmax& softmax, double d, int kv) {
  using Element = typename P::Element;
  const double score = reference_score<P, Real>(r, kv);
  const double prob = rounded<Element, Real>(softmax.prob(score));
  const double dropout = reference_dropout<P>(r, kv);
  const double product = dot<Element, Real>(r.dout, r.key(r.p.v, kv), P::kHeadDimV);
  const double dp = rounded<Element, Real>(rounded<Element, Real>(product) * dropout);
  double grad = prob == 0.0 ? 0.0 : rounded<Element, Real>(prob * (dp - d));
  if constexpr (P::kHasScore) {
    if (grad != 0.0) {
      const float dot = r.raw(reference_product<P, Real>(r, kv));
      grad = rounded<Element, Real>(grad * P::score_grad(r.p, r.head(), dot, position(r.q), position(kv)));
    }
  }
  r.probs[threadIdx.x] = rounded<Element, Real>(prob * dropout);
  r.grads[threadIdx.x] = grad;
}

/// What a row adds to dK and dV of one of the requested keys.
template <class P>
__device__ void add_to_key(const ReferenceParams& params, const ReferenceRow<P>& r, int kv, double prob,
                           double grad) {
  const int key = kv - params.kv_begin;
  if (key < 0 || key >= params.kv_count) return;
  const long long row = (static_cast<long long>(r.b) * r.p.heads_kv + r.kv_head()) * params.kv_count + key;
  for (int d = threadIdx.x; d < P::kHeadDim; d += kReferenceThreads) {
    atomicAdd(params.dk + row * P::kHeadDim + d, grad * r.query[d]);
  }
  for (int d = threadIdx.x; d < P::kHeadDimV; d += kReferenceThreads) {
    atomicAdd(params.dv + row * P::kHeadDimV + d, prob * r.dout[d]);
  }
}

/// CTAs: batch * heads_q * q_count. dQ of each row, and what the row adds to dK and dV; their sums are not
/// rounded.
template <class P, class Real>
__device__ void reference_backward(const ReferenceParams& params) {
  using Element = typename P::Element;
  const ReferenceRow<P> r(params);
  if (!r.exists()) return;
  load_row(r, r.query, r.p.q, P::kHeadDim);
  load_row(r, r.dout, r.p.dout, P::kHeadDimV);
  const Softmax softmax = reference_softmax<P, Real>(r);
  reference_output<P, Real>(r, softmax);
  double row_d = 0.0;
  for (int d = 0; d < P::kHeadDimV; ++d) row_d += r.dout[d] * r.out[d];
  if (r.p.dlse != nullptr && !softmax.nothing()) row_d -= r.p.dlse[r.sequence.lse_row(r.p, r.h, r.q)];
  if (P::kSinks && threadIdx.x == 0 && !softmax.nothing()) {
    const double prob = rounded<Element, Real>(softmax.prob(reference_sink<P>(r)));
    params.dsink_rows[r.row] = -rounded<Element, Real>(prob * row_d);
  }

  const double scale = r.p.softmax_scale;
  double dq[(P::kHeadDim + kReferenceThreads - 1) / kReferenceThreads] = {};
  for (int first = 0; first < r.length(); first += kReferenceThreads) {
    const int kv = first + static_cast<int>(threadIdx.x);
    __syncthreads();
    if (kv < r.length()) reference_pair<P, Real>(r, softmax, row_d, kv);
    __syncthreads();
    for (int i = 0; i < min(kReferenceThreads, r.length() - first); ++i) {
      const double prob = r.probs[i], grad = r.grads[i] * scale;
      if (prob == 0.0 && grad == 0.0) continue;
      const Element* key = r.key(r.p.k, first + i);
      for (int d = threadIdx.x; d < P::kHeadDim; d += kReferenceThreads) {
        dq[d / kReferenceThreads] += grad * to_float(key[d]);
      }
      add_to_key(params, r, first + i, prob, grad);
    }
  }
  for (int d = threadIdx.x; d < P::kHeadDim; d += kReferenceThreads) {
    params.dq[r.row * P::kHeadDim + d] = rounded<Element, Real>(dq[d / kReferenceThreads]);
  }
}

/// CTAs: any number, of kReferenceThreads. The sum of four uniform numbers is normal enough.
template <class P>
__device__ void fill(const FillParams& params) {
  using Element = typename P::Element;
  constexpr float kUnit = 1.0f / 4294967296.0f, kDeviation = 1.7320508f;
  const long long threads = static_cast<long long>(gridDim.x) * kReferenceThreads;
  const long long first = static_cast<long long>(blockIdx.x) * kReferenceThreads + threadIdx.x;
  for (long long i = first; i < params.count; i += threads) {
    const Philox4 random =
        philox4x32<10>(static_cast<unsigned>(i), static_cast<unsigned>(i >> 32), 0, 0, params.seed, 0);
    float sum = -2.0f;
    for (int word = 0; word < 4; ++word) sum += static_cast<float>(random.word[word]) * kUnit;
    static_cast<Element*>(params.data)[i] = from_float<Element>(sum * kDeviation);
  }
}

}  // namespace flashjit::auxiliary
