// Latents in a format that is decoded, straight from memory where tiles of 64 keys leave no room for slots: a
// warpgroup loads rows, in order or as a query's list names them, into its registers, a tile ahead, and
// decodes them into the halves of a stage. NOTES.md#latents-that-are-decoded
#pragma once

#include "flashjit/common/kv_format.cuh"
#include "flashjit/sm90/forward_rings.cuh"
#include "flashjit/tma/gather_rows.cuh"

namespace flashjit::sm90 {

/// A lane's rows of a tile: one of each of the warp's groups of eight, which four lanes share.
template <class P>
struct RowsOfLane {
  static constexpr int kOwn = P::kBc / 32;
  /// Of eight keys, in the tile.
  static __device__ __forceinline__ int first(int own, int warp) { return (warp * kOwn + own) * 8; }
  static __device__ __forceinline__ int at(int own, int warp) {
    return first(own, warp) + static_cast<int>(threadIdx.x) % 32 / 4;
  }
};

/// What a lane has of half of a row: 16 columns of each slice. Zeros for a row that is no key.
template <class P, TileHalf kHalf>
struct HalfOfRow {
  using Element = typename P::Element;
  using Format = typename P::KFormat;
  static constexpr int kSlices = slices(P::kHeadDim), kOwn = slices_of_half<P>(kHalf, P::kHeadDim);
  static_assert(Format::kColumns % kSliceColumns == 0, "a slice is of codes or of a tail");
  static constexpr int count_tail() {
    int count = 0;
    for (int slice = Format::kColumns / kSliceColumns; slice < kSlices; ++slice)
      count += is_in_half<P>(kHalf, slice);
    return count;
  }
  static constexpr int kTailSlices = count_tail();
  static_assert(kTailSlices == 0 || size_of(Format::kTailType) == 2);
  KvCodes16<Format> codes[kOwn - kTailSlices];
  uint4 tail[max(2 * kTailSlices, 1)];

  /// Calls visit(slice, which of the half's) for slices of codes or of the tail.
  template <bool kOfTail, class Visit>
  static __device__ __forceinline__ void for_each_slice(const Visit& visit) {
    int own = 0;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (!is_in_half<P>(kHalf, slice)) continue;
      if ((slice * kSliceColumns >= Format::kColumns) != kOfTail) continue;
      visit(slice, own);
      ++own;
    }
  }
  __device__ __forceinline__ void load(const unsigned char* row, int own_column) {
    for_each_slice<false>([&](int slice, int i) {
      if (row != nullptr) {
        load_codes16<Format>(row, row, slice * kSliceColumns + own_column, 1.0f, codes[i]);
        return;
      }
#pragma unroll
      for (unsigned& word : codes[i].words) word = 0;
      codes[i].scale = codes[i].zero = 0.0f;
    });
    for_each_slice<true>([&](int slice, int i) {
      const int column = slice * kSliceColumns + own_column - Format::kColumns;
      const bool exists =
          row != nullptr && (P::kHeadDim % kSliceColumns == 0 || column < P::kHeadDim - Format::kColumns);
      const auto* from = reinterpret_cast<const uint4*>(row + Format::kTail + column * 2);
      tail[2 * i] = exists ? from[0] : uint4{0, 0, 0, 0};
      tail[2 * i + 1] = exists ? from[1] : uint4{0, 0, 0, 0};
    });
  }
  /// `even`, `odd`: where the lane's first and second eight columns go in the first slice.
  __device__ __forceinline__ void decode(char* even, char* odd) const {
    for_each_slice<false>([&](int slice, int i) {
      uint4 elements[2];
      elements_of_codes16<Element>(codes[i], elements);
      *reinterpret_cast<uint4*>(even + slice * P::kBc * kRowBytes) = elements[0];
      *reinterpret_cast<uint4*>(odd + slice * P::kBc * kRowBytes) = elements[1];
    });
    for_each_slice<true>([&](int slice, int i) {
      *reinterpret_cast<uint4*>(even + slice * P::kBc * kRowBytes) = tail[2 * i];
      *reinterpret_cast<uint4*>(odd + slice * P::kBc * kRowBytes) = tail[2 * i + 1];
    });
  }
};

/// Loads and decodes all tiles that the CTA meets. By a warpgroup.
template <class P>
struct StraightLatentDecoder {
  using Rows = RowsOfLane<P>;
  using Keys = GatheredKeys<P, Rows>;
  using Entries = KeyEntries<P, Rows>;
  using Source = KvSource<P, typename P::KFormat::Stored>;
  static constexpr int kOwn = Rows::kOwn;
  static_assert(kOwn == 2);

  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem, int) {
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    const int lane = static_cast<int>(threadIdx.x % 32),
              own_column =
                  static_cast<int>(threadIdx.x % 4 * 16);  // unsigned, so that blocks of slices are known
    const int even = chunk_offset<P::kBc>(lane / 4, own_column / 8) + Rows::first(0, warp) * kRowBytes,
              odd = chunk_offset<P::kBc>(lane / 4, own_column / 8 + 1) + Rows::first(0, warp) * kRowBytes;
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const FirstKey<kLeavesPages<P>> first_key(work.first_key_read(p));
      const Source from(p, p.k, work.sequence, work.h / p.qhead_per_kvhead());
      const auto entries_of = [&](int i) {
        return Entries(p, work, work.kv_begin(max(i, 0)), first_key, warp);
      };
      const auto keys_of = [&](int i, const Entries& entries) {
        return Keys(p, work, work.kv_begin(max(i, 0)), first_key, entries, warp);
      };
      const auto row_of = [&](const Keys& keys, int own) {
        return keys.slot[own] >= 0 ? reinterpret_cast<const unsigned char*>(from.row_in_slot(keys.slot[own]))
                                   : nullptr;
      };
      // In the order of decoding, of which the next three are in registers or on their way.
      HalfOfRow<P, TileHalf::left> left[2];
      HalfOfRow<P, TileHalf::right> right[2];
      const int last = work.count() - 1;
      Keys keys = keys_of(last, entries_of(last));
      left[0].load(row_of(keys, 0), own_column);
      left[1].load(row_of(keys, 1), own_column);
      right[0].load(row_of(keys, 0), own_column);
      Entries entries = entries_of(last - 1);
#pragma unroll 1
      for (int i = last; i >= 0; --i, ++n) {
        char* tile = smem.shared + (smem.k(n) - smem.base);
        const auto decode = [&](const auto& half, int own) {
          half.decode(tile + even + own * 8 * kRowBytes, tile + odd + own * 8 * kRowBytes);
        };
        const auto finish = [&](unsigned full) {
          publish_to_async_proxy();
          barrier_arrive(full);
        };
        KRing<P>::acquire(smem, n);
        publish_present(smem, n, warp, keys);
        decode(left[0], 0);
        right[1].load(row_of(keys, 1), own_column);
        keys = keys_of(i - 1, entries);  // of the next tile
        entries = entries_of(i - 2);     // of the one behind it
        decode(left[1], 1);
        if (i > 0) left[0].load(row_of(keys, 0), own_column);
        finish(smem.k_full(n));
        VRing<P>::acquire(smem, n);
        decode(right[0], 0);
        if (i > 0) left[1].load(row_of(keys, 1), own_column);
        decode(right[1], 1);
        if (i > 0) right[0].load(row_of(keys, 0), own_column);
        finish(smem.v_full(n));
      }
    });
  }

 private:
  /// Says which of the warp's rows are keys, a bit for each.
  static __device__ __forceinline__ void publish_present(const ForwardStorage<P>& smem, int n, int warp,
                                                         const Keys& keys) {
    if (!P::kIndices) return;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int slot = __shfl_sync(kWholeWarp, keys.slot[own], static_cast<int>(threadIdx.x) % 8 * 4);
      const unsigned present = __ballot_sync(kWholeWarp, slot >= 0) & 0xffu;
      if (threadIdx.x % 32 == 0)
        reinterpret_cast<unsigned char*>(smem.present_keys(n))[Rows::first(own, warp) / 8] =
            static_cast<unsigned char>(present);
    }
  }
};

}  // namespace flashjit::sm90
