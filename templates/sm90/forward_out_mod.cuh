// A program of O's elements (kOutMod), before CompleteOutput<P> of forward_out_codes.cuh stores them;
// Output<P> names one of both. EmptyOutput<P> writes O of rows without keys.
#pragma once

#include "flashjit/common/out_tile.cuh"
#include "flashjit/sm90/forward_out_codes.cuh"

namespace flashjit::sm90 {

/// Stores the program's value of each element, found in fp32, and O as it was where the call wants that.
template <class P>
struct ModifiedOutput : CompleteOutput<P> {
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
    CompleteOutput<P>::store(p, maps, smem, work, wg, o);
  }
};

// What brings the rows that the program reads of a tensor nearer while the keys are visited; OutTileFetch<P>
// names one of these types.

struct NoOutTile {
  template <class... Arguments>
  static __device__ __forceinline__ void fetch(const Arguments&...) {}
};
/// Into L2.
template <class P>
struct OutTileInL2 {
  static __device__ __forceinline__ void fetch(const Params& p, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg) {
    constexpr int kLineElements = 64, kLines = (P::kHeadDimV + kLineElements - 1) / kLineElements;
    const auto head = work.sequence.head(p, work.h);
    const OutModTile tile = P::out_tile(p, head);
    const int seqlen_q = work.sequence.seqlen_q(p);
    if (!tile.holds(seqlen_q, P::kHeadDimV)) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = first_query(work, wg) + static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
#pragma unroll 1
    for (int i = 0; i < kWarpRows * kLines; i += 32) {
      const int q = first + (i + lane) / kLines, line = (i + lane) % kLines;
      if ((i + lane) / kLines < kWarpRows && q < seqlen_q)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(tile.row(q) + line * kLineElements));
    }
  }
};
/// Into shared memory, each warp its own rows, when it has stored O of the work tile before.
template <class P>
struct OutTileInShared {
  static __device__ __forceinline__ void fetch(const Params& p, const ForwardStorage<P>& smem,
                                               const WorkTile<P>& work, int wg) {
    constexpr int kChunks = P::kHeadDimV / 8, kAll = kWarpRows * kChunks;
    const OutModTile tile = P::out_tile(p, work.sequence.head(p, work.h));
    const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
    const int lane = static_cast<int>(threadIdx.x) % 32, first = first_query(work, wg) + first_row;
    const auto place = [&](int i) {
      return smem.out_tile(wg) + chunk_offset<kWarpgroupRows>(first_row + i / kChunks, i % kChunks);
    };
    __syncwarp();
    if (tile.holds(work.sequence.seqlen_q(p), P::kHeadDimV)) {
#pragma unroll 2
      for (int i = lane; i < kAll; i += 32)
        copy_async_16(place(i), tile.row(first + i / kChunks) + i % kChunks * 8, true);
    } else {
#pragma unroll 1
      for (int i = lane; i < kAll; i += 32)
        store_shared_16(place(i), eight_elements(tile, tile.row(first + i / kChunks), i % kChunks * 8));
    }
    copy_async_commit();
  }
};
/// Up to 64 columns L2 alone saves less time than its addresses take:
/// ../auxiliary/NOTES.md#gates-of-os-elements.
template <class P>
using OutTileFetch = Conditional<kForwardLayout<P>.has_out_tile(), OutTileInShared<P>,
                                 Conditional<P::kOutTile && (P::kHeadDimV > 64), OutTileInL2<P>, NoOutTile>>;

/// Stores the program's values where it reads a tensor's tile (kOutTile), which is in shared memory.
template <class P>
struct SharedTileModifiedOutput : CompleteOutput<P> {
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps& maps,
                                               const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                               float (&o)[kCount]) {
    const int q = first_query(work, wg) + own_row(), lane = static_cast<int>(threadIdx.x) % 32;
    if (p.out_mod.data != nullptr)
      store_rows<typename P::Element>(o, own_chunks<P>(wg), work.sequence.q_pointer(p.out_mod, work.h, q),
                                      p.out_mod.stride_s, work.sequence.seqlen_q(p) - q);
    copy_async_wait<0>();
    __syncwarp();
    const auto head = work.sequence.head(p, work.h);
    // As stage_rows() has addresses.
    const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
    const unsigned address =
        smem.out_tile(wg) + chunk_offset<kWarpgroupRows>(first_row + lane % 16, lane / 16);
#pragma unroll
    for (int chunk = 0; chunk < kCount / 4; chunk += 2) {
      unsigned words[4];
      load_matrix_x4(words, (address ^ (chunk % 8 * 16)) + chunk / 8 * kWarpgroupRows * kRowBytes);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (chunk * 4 + n >= kCount) continue;
        float& value = o[chunk * 4 + n];
        value =
            P::out_mod_of_element(p, head, static_cast<unsigned short>(words[n / 2] >> n % 2 * 16), value,
                                  position(q + n / 2 % 2 * 8), (chunk + n / 4) * 8 + lane % 4 * 2 + n % 2);
      }
    }
    CompleteOutput<P>::store(p, maps, smem, work, wg, o);
  }
};
/// The same from global memory.
template <class P>
struct TileModifiedOutput : CompleteOutput<P> {
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps& maps,
                                               const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                               float (&o)[kCount]) {
    const int q = first_query(work, wg) + own_row(), first = first_column<P>(wg);
    const int seqlen_q = work.sequence.seqlen_q(p);
    const auto head = work.sequence.head(p, work.h);
    const OutModTile tile = P::out_tile(p, head);
    const bool whole = tile.holds(seqlen_q, P::kHeadDimV);
    // Both rows, up to 128 columns whole, else in parts; loads of the next part are under way.
    constexpr int kChunks = kCount / 4, kPart = kChunks <= 16 ? kChunks : 8,
                  kParts = 2 * ((kChunks + kPart - 1) / kPart);
    OutModRow<kPart> parts[2];
    const auto start = [&](int part) {
      const int row = q + part % 2 * 8, chunk = part / 2 * kPart;
      parts[part % 2].start(tile, whole, row, row < seqlen_q, first + chunk * 8, own_chunks<P>(wg) - chunk);
    };
    start(0);
    if (kParts == 2) start(1);
    if (p.out_mod.data != nullptr)
      store_rows<typename P::Element>(o, own_chunks<P>(wg),
                                      work.sequence.q_pointer(p.out_mod, work.h, q) + first,
                                      p.out_mod.stride_s, seqlen_q - q);
    const int column = first + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (kParts > 2 && part + 1 < kParts) start(part + 1);
      OutModRow<kPart>& elements = parts[part % 2];
      elements.exchange();
      const Position row = position(q + part % 2 * 8);
#pragma unroll
      for (int n = 0; n < 2 * kPart; ++n) {
        const int chunk = part / 2 * kPart + n / 2;
        if (chunk >= kChunks) continue;
        float& value = o[chunk * 4 + part % 2 * 2 + n % 2];
        value = P::out_mod_of_element(p, head, elements.element(n / 2, n % 2), value, row,
                                      column + chunk * 8 + n % 2);
      }
    }
    CompleteOutput<P>::store(p, maps, smem, work, wg, o);
  }
};

template <class P>
using StoredOutTile =
    Conditional<kForwardLayout<P>.has_out_tile(), SharedTileModifiedOutput<P>, TileModifiedOutput<P>>;
template <class P>
using Output =
    Conditional<P::kOutMod, Conditional<P::kOutTile, StoredOutTile<P>, ModifiedOutput<P>>, CompleteOutput<P>>;

/// An element of a row without keys.
template <class P>
struct PlainZeroElement {
  static __device__ __forceinline__ float at(const Params&, const typename P::Head&, int, int) {
    return 0.0f;
  }
};
template <class P>
struct ModifiedZeroElement {
  static __device__ __forceinline__ float at(const Params& p, const typename P::Head& head, int q,
                                             int column) {
    return P::out_mod(p, head, 0.0f, position(q), column);
  }
};
template <class P>
using ZeroElement = Conditional<P::kOutMod, ModifiedZeroElement<P>, PlainZeroElement<P>>;

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
/// The same as codes.
template <class P>
struct CodedZeroOutput {
  static __device__ __forceinline__ void write(const Params& p, const WorkTile<P>& work, int count,
                                               int thread, int threads) {
    const auto head = work.sequence.head(p, work.h);
#pragma unroll 1
    for (int row = thread; row < count; row += threads) {
      const int q = work.q_begin + row;
      store_codes_of_thread<P>(coded_row(p, work.sequence, work.h, q, true),
                               [&](int column) { return ZeroElement<P>::at(p, head, q, column); });
    }
  }
};
template <class P>
using EmptyOutput = Conditional<kOutCodes<P>, CodedZeroOutput<P>,
                                Conditional<P::kOutMod, ModifiedZeroOutput<P>, ZeroOutput<P>>>;

}  // namespace flashjit::sm90
