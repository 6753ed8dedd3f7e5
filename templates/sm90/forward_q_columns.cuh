// Which tensors have the columns of Q: one, or two where the columns behind V's are in a tensor of their own,
// as latent attention has them. QColumns<P> names one of these types.
#pragma once

#include "flashjit/async/tma.cuh"
#include "flashjit/sm90/forward_policy.cuh"

namespace flashjit::sm90 {

/// Columns that one tensor map has, and the slice of the Q tile that they begin with.
template <int kColumnCount, int kFirstSlice>
struct QPart {
  static constexpr int kColumns = kColumnCount, kFirst = kFirstSlice;
};

template <class P>
struct JoinedQColumns {
  template <class Load>
  static __device__ __forceinline__ void for_each_part(const TensorMaps& maps, const Load& load) {
    load(maps.q, QPart<kQkColumns<P>, 0>{});
  }
};
template <class P>
struct QColumnsInParts {
  template <class Load>
  static __device__ __forceinline__ void for_each_part(const TensorMaps& maps, const Load& load) {
    load(maps.q, QPart<P::kHeadDimV, 0>{});
    load(maps.q_rope, QPart<kQkColumns<P> - P::kHeadDimV, P::kHeadDimV / kSliceColumns>{});
  }
};
template <class P>
using QColumns = Conditional<P::kQRope, QColumnsInParts<P>, JoinedQColumns<P>>;

}  // namespace flashjit::sm90
