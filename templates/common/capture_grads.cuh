// Additions of pairs, and of O's elements, to the gradients of captured tensors, in any order.
#pragma once

namespace flashjit {

/// To which elements the pairs of a head add: to any; to one that depends on kv - q alone, as the factor
/// does; or each to an element of its own, which bias_tile_grad() gives.
enum class AccumulationPattern { any, by_difference, own };

/// One of the additions that each pair makes. `shared`: pairs of a head may add to the same element.
/// `of_score`: it adds the gradient of p.softmax_scale * dot.
template <int index, bool shared, AccumulationPattern pattern, bool of_score>
struct Addition {
  static constexpr int kIndex = index;
  static constexpr bool kShared = shared, kOfScore = of_score;
  static constexpr AccumulationPattern kPattern = pattern;
};

/// One of the additions that each element of O makes. `by_column`: to which element depends on its column.
template <int index, bool by_column>
struct OutAddition {
  static constexpr int kIndex = index;
  static constexpr bool kByColumn = by_column;
};

/// The share of an element of O's gradient in O before the program, and in the element of its tile.
struct OutModGrads {
  float out, element;
};

/// ds times a derivative, which may be NaN where ds is zero.
__device__ __forceinline__ float chained(float ds, float derivative) {
  return ds == 0.0f ? 0.0f : ds * derivative;
}

__device__ __forceinline__ void add_to_memory(float* at, float value) {
  if (value != 0.0f) atomicAdd(at, value);
}

/// Adds each lane's value to its element; neighbouring lanes with the same element add once. By a whole warp.
__device__ __forceinline__ void add_by_runs(float* at, float value) {
  const unsigned lane = threadIdx.x % 32;
  const auto address = reinterpret_cast<unsigned long long>(at);
  const bool begins = __shfl_up_sync(~0u, address, 1) != address || lane == 0;
  const unsigned beginners = __ballot_sync(~0u, begins), later = beginners & ~((2u << lane) - 1);
  if (beginners != ~0u) {
    const unsigned end = later == 0 ? 32 : __ffs(static_cast<int>(later)) - 1;
#pragma unroll
    for (unsigned ahead = 1; ahead < 32; ahead *= 2) {
      const float other = __shfl_down_sync(~0u, value, ahead);
      if (lane + ahead < end) value += other;
    }
  }
  if (begins) add_to_memory(at, value);
}

/// What a thread's pairs of a tile add. Successive additions to one element are summed first, and in the end
/// the sums of a warp's lanes, too: atomics on one line are done one after the other, 0.9 ns each on an H100.
/// Each of a thread's keys has its own sum, because its pairs with the queries may share an element
/// (gate[h, kv]).
template <int kCount, int kKeys>
class CaptureSums {
 public:
  /// Adds what pairs of the thread's n-th key give.
  __device__ __forceinline__ auto of_key(int n) {
    return [this, n](auto which, float* at, float value) {
      if constexpr (which.kShared)
        sums_[which.kIndex][n].add(at, value);
      else
        add_to_memory(at, value);
    };
  }
  /// By whole warps.
  __device__ __forceinline__ void end() {
    if constexpr (kCount > 0) {
#pragma unroll
      for (Sum(&of_keys)[kKeys] : sums_) {
#pragma unroll
        for (int n = kKeys - 1; n > 0; --n) {
          if (__all_sync(~0u, of_keys[n].at == of_keys[n - 1].at))
            of_keys[n - 1].value += of_keys[n].value;
          else
            of_keys[n].end();
        }
        of_keys[0].end();
      }
    }
  }

 private:
  struct Sum {
    float* at = nullptr;
    float value = 0.0f;

    __device__ __forceinline__ void add(float* at_, float value_) {
      if (at == at_) {
        value += value_;
      } else {
        add_to_memory(at, value);
        value = value_;
      }
      at = at_;
    }
    __device__ __forceinline__ void end() {
      if (__all_sync(~0u, value == 0.0f)) return;
      const auto address = reinterpret_cast<unsigned long long>(at);
      const bool same = __all_sync(~0u, __shfl_sync(~0u, address, 0) == address);
      unsigned taken = 0;  // bits of the lane's number; lanes without them have the others' sums
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) {
        if (!same && !__all_sync(~0u, __shfl_xor_sync(~0u, address, bit) == address)) continue;
        value += __shfl_xor_sync(~0u, value, bit);
        taken |= bit;
      }
      if ((threadIdx.x & taken) == 0) add_to_memory(at, value);
    }
  };

  Sum sums_[kCount > 0 ? kCount : 1][kKeys];
};

}  // namespace flashjit
