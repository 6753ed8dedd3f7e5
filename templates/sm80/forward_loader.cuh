// The order in which K and V travel to shared memory in the forward pass: cp.async by all threads.
//
// Step i needs K(i), and V of the KV tile whose P V it computes. With one stage V travels under Q K(i)^T and
// K(i + 1) under what follows; with more, whole steps run ahead. `load_k(i)` and `load_v(i)` start a tile's
// copies, if the tile exists.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/sm80/forward_policy.cuh"
#include "flashjit/sm80/forward_q_parts.cuh"
#include "flashjit/sm80/forward_smem.cuh"
#include "flashjit/sm80/kv_loader.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// Which V goes with K(i).
template <class P>
constexpr int v_with(int i) {
  return ForwardPolicy<P>::kLatePv ? i - 1 : i;
}

// The stages of K and V: start() begins the copies that the first steps need; Q's copies, started before,
// belong to the first group. A step calls begin_step(), which waits for K(i), end_qk() when all warps may
// have read K(i), and end_step(). load_last_v() is for kLatePv, after all steps. KvStages<P> names one of the
// types.

/// One: V has arrived when S is there, and K(i), which has been read, gives way to K(i + 1).
template <class P>
struct OneKvStage {
  template <class LoadK, class LoadV>
  static __device__ __forceinline__ void start(const LoadK& load_k, const LoadV&) {
    load_k(0);
    P::Copies::commit();
  }
  template <class LoadK, class LoadV>
  static __device__ __forceinline__ void begin_step(ForwardSmem<P>& smem, int i, const LoadK&,
                                                    const LoadV& load_v) {
    P::Copies::template wait<0>();
    KvTileLoader<P>::template put<ForwardPolicy<P>::kKColumns>(smem, smem.k(i));
    __syncthreads();
    load_v(v_with<P>(i));
    P::Copies::commit();
  }
  template <class LoadK>
  static __device__ __forceinline__ void end_qk(ForwardSmem<P>& smem, int i, const LoadK& load_k) {
    P::Copies::template wait<0>();
    KvTileLoader<P>::template put<ForwardPolicy<P>::kVColumns>(smem, smem.v(i));
    __syncthreads();
    load_k(i + 1);
    P::Copies::commit();
  }
  template <class LoadK>
  static __device__ __forceinline__ void end_step(int, const LoadK&) {}
  template <class LoadV>
  static __device__ __forceinline__ void load_last_v(ForwardSmem<P>& smem, int i, const LoadV& load_v) {
    __syncthreads();
    load_v(i);
    KvTileLoader<P>::template put<ForwardPolicy<P>::kVColumns>(smem, smem.v(i));
    P::Copies::commit();
  }
};
/// One, where K(i) is V, too: only at the end of the step it gives way.
template <class P>
struct OneSharedKvStage : OneKvStage<P> {
  template <class LoadK>
  static __device__ __forceinline__ void end_qk(ForwardSmem<P>&, int, const LoadK&) {}
  template <class LoadK>
  static __device__ __forceinline__ void end_step(int i, const LoadK& load_k) {
    __syncthreads();
    load_k(i + 1);
    P::Copies::commit();
  }
};
/// More: K(i) has arrived with its V, and the stage that step i - 1 has read is filled again.
template <class P>
struct KvStageRing {
  template <class LoadK, class LoadV>
  static __device__ __forceinline__ void start(const LoadK& load_k, const LoadV& load_v) {
    load_k(0);
    load_v(v_with<P>(0));
    P::Copies::commit();
#pragma unroll
    for (int i = 1; i < P::kStages - 1; ++i) {
      load_k(i);
      load_v(v_with<P>(i));
      P::Copies::commit();
    }
  }
  template <class LoadK, class LoadV>
  static __device__ __forceinline__ void begin_step(ForwardSmem<P>& smem, int i, const LoadK& load_k,
                                                    const LoadV& load_v) {
    P::Copies::template wait<ForwardPolicy<P>::kPendingCopies>();
    KvTileLoader<P>::template put<ForwardPolicy<P>::kKColumns>(smem, smem.k(i));
    __syncthreads();
    load_k(i + P::kStages - 1);
    load_v(v_with<P>(i + P::kStages - 1));
    P::Copies::commit();
  }
  template <class LoadK>
  static __device__ __forceinline__ void end_qk(ForwardSmem<P>&, int, const LoadK&) {}
  template <class LoadK>
  static __device__ __forceinline__ void end_step(int, const LoadK&) {}
  template <class LoadV>
  static __device__ __forceinline__ void load_last_v(ForwardSmem<P>&, int, const LoadV&) {}
};
template <class P>
using KvStages = Conditional<(P::kStages > 1), KvStageRing<P>,
                             Conditional<P::kSharedKv, OneSharedKvStage<P>, OneKvStage<P>>>;

// The loop over a work tile's KV tiles: `step(i, first)`. Then all warps are done with Q, so that O may
// overwrite it. StepLoop<P> names one of the types.

/// A step computes P V of its own tile.
template <class P>
struct PlainSteps {
  template <class Step, class LoadV, class AddPv>
  static __device__ __forceinline__ void run(ForwardSmem<P>&, int count, const Step& step, const LoadV&,
                                             const AddPv&) {
    for (int i = 0; i < count; ++i) step(i, Flag<false>{});
    P::Copies::template wait<0>();
    __syncthreads();
  }
};
/// A step computes P V of the tile before (kLatePv), so that the last comes after all steps.
template <class P>
struct LatePvSteps {
  template <class Step, class LoadV, class AddPv>
  static __device__ __forceinline__ void run(ForwardSmem<P>& smem, int count, const Step& step,
                                             const LoadV& load_v, const AddPv& add_pv) {
    if (count > 0) step(0, Flag<true>{});
    for (int i = 1; i < count; ++i) step(i, Flag<false>{});
    KvStages<P>::load_last_v(smem, count - 1, load_v);
    P::Copies::template wait<0>();
    __syncthreads();
    if (count > 0) {
#pragma unroll
      for (int k = 0; k < ForwardPolicy<P>::kNt / 2; ++k) add_pv(count - 1, k, 0.0f);
    }
  }
};
template <class P>
using StepLoop = Conditional<ForwardPolicy<P>::kLatePv, LatePvSteps<P>, PlainSteps<P>>;

/// Copies rows of 16-bit elements to a tile of shared memory.
using TileCopy = void (*)(unsigned tile, const unsigned short* from, long long stride, int valid);

/// Copies `valid` rows of Q to shared memory; `rows_of` gives a tensor's rows. QLoader<P> names one of these
/// types. Elements are copied by `kCopy`, which knows the order of columns.
template <class P, TileCopy kCopy>
struct ElementsQLoader {
  template <class RowsOf>
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const Params& p,
                                              const RowsOf& rows_of, int valid) {
    const QRows<P> rows = rows_of(p.q);
    kCopy(smem.q, rows.data, rows.stride, valid);
  }
};
template <class P>
using PlainQLoader =
    ElementsQLoader<P, load_tile<typename P::Copies, P::kBr, P::kHeadDim, ForwardPolicy<P>::kThreads>>;
/// Columns in the order in which a lane has K's codes.
template <class P>
using PairedQLoader =
    ElementsQLoader<P, load_paired_tile<typename P::Copies, P::kBr, P::kHeadDim, ForwardPolicy<P>::kThreads>>;
/// Q of 8 bits, multiplied as it is: two codes in a column.
template <class P>
struct QuantizedQLoader {
  template <class RowsOf>
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const Params& p,
                                              const RowsOf& rows_of, int valid) {
    const QRows<P> rows = rows_of(p.q);
    load_tile<typename P::Copies, P::kBr, P::kHeadDim / 2, ForwardPolicy<P>::kThreads>(
        smem.q, reinterpret_cast<const unsigned short*>(rows.data), rows.stride / 2, valid);
  }
};
/// Q of 8 bits, multiplied in 16, as K's codes are.
template <class P>
struct ConvertedQLoader {
  template <class RowsOf>
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const Params& p,
                                              const RowsOf& rows_of, int valid) {
    const QRows<P> rows = rows_of(p.q);
    load_converted_tile<typename P::Element, typename P::KvElement, P::kBr, P::kHeadDim,
                        ForwardPolicy<P>::kThreads>(smem.shared + smem.kLayout.q(), rows.data, rows.stride,
                                                    valid);
  }
};
template <class P>
using QLoader = Conditional<
    P::kQCodes, Conditional<ForwardPolicy<P>::kCodeProducts, QuantizedQLoader<P>, ConvertedQLoader<P>>,
    Conditional<P::kQRope, QPartsLoader<P>, Conditional<kScaledKv<P>, PairedQLoader<P>, PlainQLoader<P>>>>;

/// Q's fragments: read from shared memory for each KV tile, as `load_q` gives them, or once, to registers.
template <class P>
struct LoadedQ {
  template <int kSteps, class LoadQ>
  static __device__ __forceinline__ void load(unsigned (&)[kSteps][ForwardPolicy<P>::kMt][4], const LoadQ&) {}
  template <int kSteps, class LoadQ>
  static __device__ __forceinline__ void get(unsigned (&a)[4],
                                             const unsigned (&)[kSteps][ForwardPolicy<P>::kMt][4],
                                             const LoadQ& load_q, int mt, int k) {
    load_q(a, mt, k);
  }
};
template <class P>
struct HeldQ {
  template <int kSteps, class LoadQ>
  static __device__ __forceinline__ void load(unsigned (&q)[kSteps][ForwardPolicy<P>::kMt][4],
                                              const LoadQ& load_q) {
    P::Copies::template wait<ForwardPolicy<P>::kPendingCopies>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ForwardPolicy<P>::kQSteps; ++k)
#pragma unroll
      for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt) load_q(q[k][mt], mt, k);
  }
  template <int kSteps, class LoadQ>
  static __device__ __forceinline__ void get(unsigned (&a)[4],
                                             const unsigned (&q)[kSteps][ForwardPolicy<P>::kMt][4],
                                             const LoadQ&, int mt, int k) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = q[k][mt][r];
  }
};
template <class P>
using QFragments = Conditional<P::kQInRegisters, HeldQ<P>, LoadedQ<P>>;

}  // namespace flashjit::sm80
