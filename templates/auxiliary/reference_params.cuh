// Parameters of the reference kernels. The GPU tests, which launch them, include this file, too.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flashjit::auxiliary {

constexpr int kReferenceThreads = 128;

/// Inputs as for the real kernels, in `base`; of its outputs only the captures' gradients are added to.
/// Results are contiguous, as doubles, and not packed: rows past a sequence's end are zero.
struct ReferenceParams {
  Params base;
  int q_begin, q_count;    ///< the queries to compute; others are left out
  int kv_begin, kv_count;  ///< the keys whose dK and dV are computed
  double* out;             ///< [batch, heads_q, q_count, head_dim_v]
  double* lse;             ///< [batch, heads_q, q_count]
  double* dq;              ///< [batch, heads_q, q_count, head_dim]
  double* dk;              ///< [batch, heads_kv, kv_count, head_dim]: added to
  double* dv;              ///< [batch, heads_kv, kv_count, head_dim_v]: added to
  double* dsink_rows;      ///< [batch, heads_q, q_count]: dsinks are the sums of these
};

/// A tensor to fill with values of mean 0 and variance 1, a different one for each seed.
struct FillParams {
  void* data;
  long long count;
  unsigned seed;
};

}  // namespace flashjit::auxiliary
