// The order in which K and V travel to shared memory in the forward pass: cp.async by all threads.
//
// Step i needs K(i), and V of the KV tile whose P V it computes. With one stage V travels under Q K(i)^T and
// K(i + 1) under what follows; with more, whole steps run ahead. `load_k(i)` and `load_v(i)` start a tile's
// copies, if the tile exists.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/sm80/forward_policy.cuh"
#include "flashjit/sm80/forward_smem.cuh"
#include "flashjit/sm80/kv_loader.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// Which V goes with K(i).
template <class P>
constexpr int v_with(int i) {
  return ForwardPolicy<P>::kLatePv ? i - 1 : i;
}

/// What the first steps need; Q's copies, started before, belong to the first group.
template <class P, class LoadK, class LoadV>
__device__ __forceinline__ void start_copies(const LoadK& load_k, const LoadV& load_v) {
  load_k(0);
  if constexpr (P::kStages > 1) load_v(v_with<P>(0));
  P::Copies::commit();
#pragma unroll
  for (int i = 1; i < P::kStages - 1; ++i) {
    load_k(i);
    load_v(v_with<P>(i));
    P::Copies::commit();
  }
}

/// K(i) has arrived, and with more stages than one its V. The stage that step i - 1 has read is filled again.
template <class P, class LoadK, class LoadV>
__device__ __forceinline__ void begin_step(ForwardSmem<P>& smem, int i, const LoadK& load_k,
                                           const LoadV& load_v) {
  P::Copies::template wait<ForwardPolicy<P>::kPendingCopies>();
  KvTileLoader<P>::template put<ForwardPolicy<P>::kKColumns>(smem, smem.k(i));
  __syncthreads();
  if constexpr (P::kStages > 1) load_k(i + P::kStages - 1);
  load_v(v_with<P>(i + P::kStages - 1));
  P::Copies::commit();
}

/// With one stage: V has arrived, and K(i), which has been read, gives way to K(i + 1).
template <class P, class LoadK>
__device__ __forceinline__ void end_qk(ForwardSmem<P>& smem, int i, const LoadK& load_k) {
  if constexpr (P::kStages == 1 && !P::kSharedKv) {
    P::Copies::template wait<0>();
    KvTileLoader<P>::template put<ForwardPolicy<P>::kVColumns>(smem, smem.v(i));
    __syncthreads();
    load_k(i + 1);
    P::Copies::commit();
  }
}
/// Where K(i) is V, too: only now it does.
template <class P, class LoadK>
__device__ __forceinline__ void end_step(int i, const LoadK& load_k) {
  if constexpr (P::kStages == 1 && P::kSharedKv) {
    __syncthreads();
    load_k(i + 1);
    P::Copies::commit();
  }
}

/// Runs the steps of a work tile: `step(i, first)`. With kLatePv the last P V comes after them. Then all
/// warps are done with Q, so that O may overwrite it.
template <class P, class Step, class LoadV, class AddPv>
__device__ __forceinline__ void run_steps(ForwardSmem<P>& smem, int count, const Step& step,
                                          const LoadV& load_v, const AddPv& add_pv) {
  constexpr bool kLatePv = ForwardPolicy<P>::kLatePv;
  if constexpr (kLatePv) {
    if (count > 0) step(0, Flag<true>{});
    for (int i = 1; i < count; ++i) step(i, Flag<false>{});
    if constexpr (P::kStages == 1) {
      __syncthreads();
      load_v(count - 1);
      KvTileLoader<P>::template put<ForwardPolicy<P>::kVColumns>(smem, smem.v(count - 1));
      P::Copies::commit();
    }
  } else {
    for (int i = 0; i < count; ++i) step(i, Flag<false>{});
  }
  P::Copies::template wait<0>();
  __syncthreads();
  if (kLatePv && count > 0) {
#pragma unroll
    for (int k = 0; k < ForwardPolicy<P>::kNt / 2; ++k) add_pv(count - 1, k, 0.0f);
  }
}

/// What Q is read as.
template <class P>
using QBits = Conditional<P::kQCodes, unsigned char, unsigned short>;

/// How `valid` rows of Q get to shared memory; QLoader<P> names one of these types.
template <class P>
struct PlainQLoader {
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const QBits<P>* rows,
                                              long long stride, int valid) {
    load_tile<typename P::Copies, P::kBr, P::kHeadDim, ForwardPolicy<P>::kThreads>(smem.q, rows, stride,
                                                                                   valid);
  }
};
/// Columns in the order in which K's codes are met.
template <class P>
struct PairedQLoader {
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const QBits<P>* rows,
                                              long long stride, int valid) {
    load_paired_tile<typename P::Copies, P::kBr, P::kHeadDim, ForwardPolicy<P>::kThreads>(smem.q, rows,
                                                                                          stride, valid);
  }
};
/// Q of 8 bits, multiplied as it is: two codes in a column.
template <class P>
struct QuantizedQLoader {
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const QBits<P>* rows,
                                              long long stride, int valid) {
    load_tile<typename P::Copies, P::kBr, P::kHeadDim / 2, ForwardPolicy<P>::kThreads>(
        smem.q, reinterpret_cast<const unsigned short*>(rows), stride / 2, valid);
  }
};
/// Q of 8 bits, multiplied in 16, as K's codes are.
template <class P>
struct ConvertedQLoader {
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const QBits<P>* rows,
                                              long long stride, int valid) {
    load_converted_tile<typename P::Element, typename P::KvElement, P::kBr, P::kHeadDim,
                        ForwardPolicy<P>::kThreads>(smem.shared + smem.kLayout.q(), rows, stride, valid);
  }
};
template <class P>
using QLoader =
    Conditional<P::kQCodes,
                Conditional<ForwardPolicy<P>::kCodeProducts, QuantizedQLoader<P>, ConvertedQLoader<P>>,
                Conditional<kScaledKv<P>, PairedQLoader<P>, PlainQLoader<P>>>;

/// Q to registers, for all KV tiles.
template <class P, class LoadQ>
__device__ __forceinline__ void load_q_fragments(
    unsigned (&q)[ForwardPolicy<P>::kQSteps][ForwardPolicy<P>::kMt][4], const LoadQ& load_q) {
  P::Copies::template wait<ForwardPolicy<P>::kPendingCopies>();
  __syncthreads();
#pragma unroll
  for (int k = 0; k < ForwardPolicy<P>::kQSteps; ++k)
#pragma unroll
    for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt) load_q(q[k][mt], mt, k);
}

}  // namespace flashjit::sm80
