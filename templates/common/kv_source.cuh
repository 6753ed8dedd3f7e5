// Where key n is in memory: the one place to change when keys are found in another way, such as by a page
// table.
#pragma once

#include "flashjit/common/visible.cuh"

namespace flashjit {

/// The keys of one head of one sequence, in K or in V. They follow each other at one stride, so that a tile
/// of them is its first row and the stride. With pages a tile lies within one, and row() looks it up.
template <class P, class Element = unsigned short>
class KvSource {
 public:
  __device__ KvSource(const TensorParam& tensor, const Sequence<P>& sequence, int h_kv)
      : tensor_(tensor), first_(sequence.template kv_pointer<Element>(tensor, h_kv, 0)) {}

  __device__ __forceinline__ Element* row(int kv) const { return first_ + kv * tensor_.stride_s; }
  /// From one key of a tile to the next, in elements.
  __device__ __forceinline__ long long stride() const { return tensor_.stride_s; }

 private:
  const TensorParam& tensor_;
  Element* first_;  // of key 0
};

}  // namespace flashjit
