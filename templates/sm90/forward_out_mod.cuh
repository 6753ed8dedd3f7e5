// A program of O's elements (kOutMod), before StoredOutput<P> of forward_output.cuh stores them; Output<P>
// names one of both. EmptyOutput<P> writes O of rows without keys.
#pragma once

#include "flashjit/sm90/forward_output.cuh"

namespace flashjit::sm90 {

/// Stores the program's value of each element, found in fp32, and O as it was where the call wants that.
template <class P>
struct ModifiedOutput : StoredOutput<P> {
  static_assert(!P::kSplit, "a split has a part of O");

  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps& maps,
                                               const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                               float (&o)[kCount]) {
    const int q = first_query(work, wg) + own_row(), first = first_column<P>(wg);
    if (p.out_mod.data != nullptr)
      store_rows<typename P::Element>(o, own_chunks<P>(wg),
                                      work.sequence.q_pointer(p.out_mod, work.h, q) + first,
                                      p.out_mod.stride_s, work.sequence.seqlen_q(p) - q);
    const auto head = work.sequence.head(p, work.h);
    const int column = first + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Position row = position(q + half * 8);
#pragma unroll
      for (int n = 0; n < kCount / 2; ++n) {
        float& value = o[n / 2 * 4 + half * 2 + n % 2];
        value = P::out_mod(p, head, value, row, column + n / 2 * 8 + n % 2);
      }
    }
    StoredOutput<P>::store(p, maps, smem, work, wg, o);
  }
};

template <class P>
using Output = Conditional<P::kOutMod, ModifiedOutput<P>, StoredOutput<P>>;

/// `count` rows of zeros.
template <class P>
struct ZeroOutput {
  static __device__ __forceinline__ void write(const Params& p, const WorkTile<P>& work, int count,
                                               int thread, int threads) {
    constexpr int kChunks = P::kHeadDimV / kOutVector<P>;
    OutElement<P>* o = work.sequence.template q_pointer<OutElement<P>>(p.o, work.h, work.q_begin);
#pragma unroll 1
    for (int chunk = thread; chunk < count * kChunks; chunk += threads)
      *reinterpret_cast<uint4*>(o + chunk / kChunks * p.o.stride_s + chunk % kChunks * kOutVector<P>) =
          uint4{0, 0, 0, 0};
  }
};
/// What the program makes of zeros.
template <class P>
struct ModifiedZeroOutput {
  static __device__ __forceinline__ void write(const Params& p, const WorkTile<P>& work, int count,
                                               int thread, int threads) {
    using Element = typename P::Element;
    OutElement<P>* o = work.sequence.template q_pointer<OutElement<P>>(p.o, work.h, work.q_begin);
    Element* before = work.sequence.template q_pointer<Element>(p.out_mod, work.h, work.q_begin);
    const auto head = work.sequence.head(p, work.h);
#pragma unroll 1
    for (int i = thread; i < count * P::kHeadDimV; i += threads) {
      const int row = i / P::kHeadDimV, column = i % P::kHeadDimV;
      o[row * p.o.stride_s + column] =
          from_float<OutElement<P>>(P::out_mod(p, head, 0.0f, position(work.q_begin + row), column));
      if (p.out_mod.data != nullptr) before[row * p.out_mod.stride_s + column] = from_float<Element>(0.0f);
    }
  }
};
template <class P>
using EmptyOutput = Conditional<P::kOutMod, ModifiedZeroOutput<P>, ZeroOutput<P>>;

}  // namespace flashjit::sm90
