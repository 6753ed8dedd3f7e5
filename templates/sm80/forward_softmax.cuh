// From S to P in the forward pass: score program, mask, online softmax, dropout, and the two products.
#pragma once

#include "flashjit/common/dropout.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm80/forward_loader.cuh"
#include "flashjit/sm80/forward_policy.cuh"
#include "flashjit/sm80/mask.cuh"
#include "flashjit/sm80/products.cuh"

namespace flashjit::sm80 {

/// S of a KV tile, then P in fp32: a warp's m16n8 tiles, four values a lane.
template <class P>
using ForwardScores = float[ForwardPolicy<P>::kMt][ForwardPolicy<P>::kNt][4];

/// What all codes of a head's K (or Q's and K's) and V are multiplied with; 1 where they are none, or keys
/// have their own.
struct HeadScales {
  float k = 1.0f, v = 1.0f;
};
template <class P>
__device__ __forceinline__ HeadScales head_scales(float q, const KvScales<P>& k, const KvScales<P>& v) {
  if constexpr (kScaledKv<P> && !P::kKeyScales) return {q * k.of_head(), v.of_head()};
  return {q};
}

/// Multiplies the columns of S with their keys' scales, with kKeyScales.
template <class P>
__device__ __forceinline__ void scale_keys(ForwardScores<P>& s, const float* scales) {
  using Policy = ForwardPolicy<P>;
#pragma unroll
  for (int nt = 0; nt < Policy::kNt; ++nt) {
    const float2 of_keys = *reinterpret_cast<const float2*>(scales + nt * 8 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[mt][nt][e] *= e % 2 ? of_keys.y : of_keys.x;
  }
}

/// S = score(k_scale S). Without a program scores stay unscaled until the exponent.
template <class P>
struct ProgramScoreStage {
  template <class AtQ, class AtKv>
  static __device__ __forceinline__ void apply(ForwardScores<P>& s, const Params& p,
                                               const typename P::Head& head, float k_scale, const AtQ& at_q,
                                               const AtKv& at_kv) {
    using Policy = ForwardPolicy<P>;
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int nt = 0; nt < Policy::kNt; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[mt][nt][e] = P::score(p, head, s[mt][nt][e] * k_scale, at_q(mt, e), at_kv(nt, e));
  }
};
template <class P>
struct NoScoreStage {
  template <class AtQ, class AtKv>
  static __device__ __forceinline__ void apply(ForwardScores<P>&, const Params&, const typename P::Head&,
                                               float, const AtQ&, const AtKv&) {}
};
template <class P>
using ScoreStage = Conditional<P::kHasScore, ProgramScoreStage<P>, NoScoreStage<P>>;

/// A value of each of a lane's rows: rows g and g + 8 of each m16 tile belong to the four lanes of a quad.
template <class P>
using RowValues = float[ForwardPolicy<P>::kMt][2];

/// Before the first KV tile.
template <class P>
__device__ __forceinline__ void clear_rows(RowValues<P>& row_max, RowValues<P>& row_sum) {
#pragma unroll
  for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) row_max[mt][half] = -infinity(), row_sum[mt][half] = 0.0f;
}

/// max(start, rowmax(S)) of a lane's row.
template <class P>
__device__ __forceinline__ float max_of_row(const ForwardScores<P>& s, float start, int mt, int half) {
  float highest = start;
#pragma unroll
  for (int nt = 0; nt < ForwardPolicy<P>::kNt; ++nt)
    highest = fmaxf(highest, fmaxf(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
  highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
  return fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
}

/// Online softmax, m = max(m, rowmax(S)): the exponent's `shift` is m, less the log of the largest P, and
/// what was summed before is brought to it by `rescale`. Returns whether no row's m has changed.
/// `max_of(before, mt, half)` finds m.
template <class P, class MaxOf>
__device__ __forceinline__ bool update_max(RowValues<P>& row_max, RowValues<P>& row_sum, RowValues<P>& shift,
                                           RowValues<P>& rescale, float scale_log2, const MaxOf& max_of) {
  using Policy = ForwardPolicy<P>;
  bool same_max = true;
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float highest = max_of(row_max[mt][half], mt, half);
      // A row that attends to nothing so far has no maximum to subtract.
      const float factor = exponent_factor<P>(highest, scale_log2);
      shift[mt][half] = highest == -infinity() ? 0.0f : __fmul_rn(highest, factor);
      rescale[mt][half] = row_max[mt][half] == -infinity()
                              ? 0.0f
                              : exp2_approx(__fmul_rn(row_max[mt][half], factor) - shift[mt][half]);
      same_max = same_max && row_max[mt][half] == highest;
      row_max[mt][half] = highest;
      row_sum[mt][half] *= rescale[mt][half];
      if (Policy::kCodeProducts) shift[mt][half] -= Policy::kLargestPLog2;
    }
  return same_max;
}

/// P = exp2(S - m) of n8 tiles from `first` on, of 16 keys or of those that there are; returns the last.
template <class P>
__device__ __forceinline__ float exponentials(ForwardScores<P>& s, RowValues<P>& row_sum,
                                              const RowValues<P>& row_max, const RowValues<P>& shift,
                                              float scale_log2, int first) {
  using Policy = ForwardPolicy<P>;
  constexpr int kCount = Policy::kNt == 1 ? 1 : 2;
#pragma unroll
  for (int nt = first; nt < first + kCount; ++nt)
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float factor = exponent_factor<P>(row_max[mt][e / 2], scale_log2);
        s[mt][nt][e] = exp2_approx(fmaf(s[mt][nt][e], factor, -shift[mt][e / 2]));
        row_sum[mt][e / 2] += s[mt][nt][e];
      }
  return s[Policy::kMt - 1][first + kCount - 1][3];
}

/// O = exp2(m before - m) O
template <class P, int kMt, int kOt>
__device__ __forceinline__ void rescale_rows(float (&o)[kMt][kOt][4], const RowValues<P>& rescale) {
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
    for (int ot = 0; ot < kOt; ++ot)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[mt][ot][e] *= rescale[mt][e / 2];
}

/// P of 16 keys as left operands of P V.
template <class P>
__device__ __forceinline__ void pack_p(unsigned (&fragments)[ForwardPolicy<P>::kMt][4],
                                       const ForwardScores<P>& s, int k) {
  using Policy = ForwardPolicy<P>;
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
    as_left_operand<typename P::Element, Policy::kNt>(fragments[mt], s[mt], k);
}

// Zeros in P where dropout drops a pair; DropStage<P> names one of these types. `batch_head()` is
// dropout_head().

template <class P>
struct NoDropout {
  template <class... Rest>
  static __device__ __forceinline__ void drop(Rest&&...) {}
};
template <class P>
struct DroppedPairs {
  /// In P of 16 keys.
  template <class BatchHead, class AtQ, class AtKv>
  static __device__ __forceinline__ void drop(unsigned (&fragments)[ForwardPolicy<P>::kMt][4],
                                              const Params& p, const BatchHead& batch_head, const AtQ& at_q,
                                              const AtKv& at_kv, int k) {
    const unsigned of = batch_head();
#pragma unroll
    for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt) {
      unsigned masks[4];
      drop_masks<P>(masks, p, of, at_q(mt, 0).at, at_kv(2 * k, 0).at);
#pragma unroll
      for (int r = 0; r < 4; ++r) fragments[mt][r] &= ~masks[r];
    }
  }
  /// In P before it is packed.
  template <class BatchHead, class AtQ, class AtKv>
  static __device__ __forceinline__ void drop(ForwardScores<P>& s, const Params& p,
                                              const BatchHead& batch_head, const AtQ& at_q,
                                              const AtKv& at_kv) {
    const unsigned of = batch_head();
#pragma unroll
    for (int k = 0; k < ForwardPolicy<P>::kNt / 2; ++k)
#pragma unroll
      for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt) {
        unsigned masks[4];
        drop_masks<P>(masks, p, of, at_q(mt, 0).at, at_kv(2 * k, 0).at);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (masks[r] >> (16 * e) & 1u) s[mt][2 * k + r / 2][r % 2 * 2 + e] = 0.0f;
      }
  }
};
template <class P>
using DropStage = Conditional<P::kDropout, DroppedPairs<P>, NoDropout<P>>;

/// O = exp2(m before - m) O + P V where both are codes; `zero` is multiply_codes().
template <class P, int kMt, int kOt>
__device__ __forceinline__ void add_pv_of_codes(float (&o)[kMt][kOt][4], const RowValues<P>& rescale,
                                                const ForwardScores<P>& s, unsigned v_tile, unsigned zero) {
  using Policy = ForwardPolicy<P>;
  static_assert(Policy::kNt % 4 == 0, "a product has 32 keys");
  unsigned p_codes[Policy::kNt / 4][kMt][4];
#pragma unroll
  for (int k = 0; k < Policy::kNt / 4; ++k)
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const auto &first = s[mt][4 * k + r / 2 * 2], &second = s[mt][4 * k + r / 2 * 2 + 1];
        const int row = r % 2 * 2;
        p_codes[k][mt][r] = pack_e4m3(first[row], first[row + 1], second[row], second[row + 1]);
      }
  multiply_codes<typename P::KvElement>(o, rescale, p_codes, v_tile, Policy::kVPitch, zero);
}

// The two products by what K and V are; Products<P> names one of these types. `load_a`: Q's fragments.
// multiply_pv(): for 16 of the keys, whose scales are at `scales`.

/// As Q is.
template <class P>
struct PlainProducts {
  template <class LoadA>
  static __device__ __forceinline__ void multiply_qk(ForwardScores<P>& s, unsigned k_tile,
                                                     const LoadA& load_a) {
    multiply_transposed<typename P::Mma, typename P::Element, P::kHeadDim, ForwardPolicy<P>::kQkUnroll>(
        s, k_tile, load_a);
  }
  template <int kMt, int kOt>
  static __device__ __forceinline__ void multiply_pv(float (&o)[kMt][kOt][4],
                                                     const unsigned (&p_fragments)[kMt][4], unsigned v_tile,
                                                     const float*) {
    multiply_step<typename P::Mma, typename P::Element, kOt / 2, false>(o, p_fragments, v_tile, 0);
  }
};
/// Codes of 8 bits, which become 16 bits as fragments.
template <class P>
struct ConvertedProducts {
  using Element = typename P::Element;
  using Code = typename P::KvElement;

  template <class LoadA>
  static __device__ __forceinline__ void multiply_qk(ForwardScores<P>& s, unsigned k_tile,
                                                     const LoadA& load_a) {
    multiply_transposed_codes<typename P::Mma, Element, Code, P::kHeadDim, ForwardPolicy<P>::kQkUnroll>(
        s, k_tile, load_a);
  }
  template <int kMt, int kOt>
  static __device__ __forceinline__ void multiply_pv(float (&o)[kMt][kOt][4],
                                                     const unsigned (&p_fragments)[kMt][4], unsigned v_tile,
                                                     const float*) {
    multiply_step_codes<typename P::Mma, Element>(
        o, p_fragments, v_tile, [](unsigned codes, int) { return pair_of_codes<Element, Code>(codes); });
  }
};
/// And each key has a scale of its own, which its row of V is multiplied with.
template <class P>
struct ScaledKeysProducts : ConvertedProducts<P> {
  using Element = typename P::Element;
  using Code = typename P::KvElement;

  template <int kMt, int kOt>
  static __device__ __forceinline__ void multiply_pv(float (&o)[kMt][kOt][4],
                                                     const unsigned (&p_fragments)[kMt][4], unsigned v_tile,
                                                     const float* scales) {
    float2 of_keys[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of_keys[i] = *reinterpret_cast<const float2*>(scales + i * 8 + threadIdx.x % 4 * 2);
    multiply_step_codes<typename P::Mma, Element>(o, p_fragments, v_tile, [&](unsigned codes, int i) {
      return pair_of_codes<Element, Code>(codes, of_keys[i].x, of_keys[i].y);
    });
  }
};
/// Q has codes, too, and both products are of 8 bits (add_pv_of_codes()).
template <class P>
struct CodeProducts : ConvertedProducts<P> {
  template <class LoadA>
  static __device__ __forceinline__ void multiply_qk(ForwardScores<P>& s, unsigned k_tile,
                                                     const LoadA& load_a) {
    using Policy = ForwardPolicy<P>;
    multiply_transposed<typename P::Mma, typename P::KvElement, Policy::kQColumns, Policy::kQkUnroll>(
        s, k_tile, load_a);
  }
};
template <class P>
using Products =
    Conditional<ForwardPolicy<P>::kCodeProducts, CodeProducts<P>,
                Conditional<!kScaledKv<P>, PlainProducts<P>,
                            Conditional<P::kKeyScales, ScaledKeysProducts<P>, ConvertedProducts<P>>>>;

/// S = Q K^T. `load_q` gives Q's fragments where they are not in registers.
template <class P, int kSteps, class LoadQ>
__device__ __forceinline__ void multiply_qk(ForwardScores<P>& s,
                                            const unsigned (&q)[kSteps][ForwardPolicy<P>::kMt][4],
                                            unsigned k_tile, const LoadQ& load_q) {
  Products<P>::multiply_qk(s, k_tile,
                           [&](unsigned(&a)[4], int mt, int k) { QFragments<P>::get(a, q, load_q, mt, k); });
}

/// O += P V for 16 of the keys. `scales`: where the scales of the tile's keys are, with kKeyScales. `after`
/// is not negative, nor is a NaN that ex2.approx makes: its sign in the address makes the products wait for
/// it; otherwise ptxas starts them all at once and no exponential runs beside them.
template <class P, int kMt, int kOt>
__device__ __forceinline__ void multiply_pv(float (&o)[kMt][kOt][4], const unsigned (&p_fragments)[kMt][4],
                                            unsigned v_tile, const float* scales, int k, float after) {
  v_tile += __float_as_uint(after) >> 31;
  v_tile += k * 16 * ForwardPolicy<P>::kVPitch * 2;
  Products<P>::multiply_pv(o, p_fragments, v_tile, scales + k * 16);
}

}  // namespace flashjit::sm80
