// Latents in a format that is decoded: rows with their scales at multiples of 16 bytes, in which V is the
// first columns of K. Warps of the producer copy rows as they are to slots, each by one bulk copy, in order
// or as a query's list names them. A warpgroup makes the tile of elements of them once for both consumers, in
// the halves that these release apart (forward_wide.cuh). NOTES.md#latents-that-are-decoded
#pragma once

#include "flashjit/common/kv_format.cuh"
#include "flashjit/sm90/forward_rings.cuh"
#include "flashjit/tma/gather_rows.cuh"

namespace flashjit::sm90 {

/// The rows of a tile in a slot, and which of them are keys, a bit for each, and for each query where lists
/// are joined.
template <class P>
struct LatentSlot {
  static constexpr int kPitch = kRowPitch<P>;
  static_assert(kPitch == P::KFormat::kBytes && P::KFormat::kAlignment == 16, "rows for bulk copies");
  char* rows;
  unsigned* present;

  __device__ __forceinline__ LatentSlot(const ForwardStorage<P>& smem, PipelineCount<P> c)
      : rows(smem.shared + (smem.codes(c) - smem.base)),
        present(reinterpret_cast<unsigned*>(smem.code_scales(c))) {}
};

/// Words that say which rows of a tile are keys.
template <class P>
constexpr int kPresentWords = (P::kJoinsLists ? kMostJoinedQueries : 1) * (P::kBc / 32);

/// A tile of one group of 32 rows is both warps', half of the lanes each: a warp starts its copies one by
/// one.
template <class P>
constexpr bool kHalvesGroup = KeyGroups<P>::kGroups == 1;
/// The warp whose groups these are.
template <class P>
constexpr int group_owner(int warp) {
  return kHalvesGroup<P> ? 0 : warp;
}

/// Starts the copies of a warp's rows, a lane a row, and arrives with their bytes; zeros for rows that are no
/// keys.
template <class P, int kWarp>
__device__ __forceinline__ void copy_latents(const LatentSlot<P>& to,
                                             const KvSource<P, typename P::KFormat::Stored>& from,
                                             const GatheredKeys<P>& keys, unsigned full) {
  using Groups = KeyGroups<P>;
  constexpr int kBytes = LatentSlot<P>::kPitch, kOwner = group_owner<P>(kWarp);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int bytes = 0;
#pragma unroll
  for (int own = 0; own < Groups::kOwn; ++own) {
    const int first = Groups::first(own, kOwner), row = Groups::at(own, kOwner), slot = keys.slot[own];
    if (first >= P::kBc) break;
    if (P::kJoinsLists && kOwner == kWarp) keys.mark(to.present, own, first, slot >= 0);
    if (P::kIndices && !P::kJoinsLists && kOwner == kWarp) {
      const unsigned present = __ballot_sync(kWholeWarp, slot >= 0);
      if (lane == 0) to.present[first / 32] = present;
    }
    if ((P::kBc % 32 != 0 && row >= P::kBc) || (kHalvesGroup<P> && lane / 16 != kWarp)) continue;
    char* line = to.rows + row * kBytes;
    if (slot >= 0) {
      load_line(shared_address(line), from.row_in_slot(slot), kBytes, full);
      bytes += kBytes;
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < kBytes; i += 16) *reinterpret_cast<uint4*>(line + i) = {0, 0, 0, 0};
    publish_to_async_proxy();  // the next rows here are bulk copies'
  }
  barrier_expect(full, bytes);
}

/// Copies the latents of all tiles that the CTA meets. By each of kGatherWarps warps.
template <class P, int kWarp>
struct LatentCopier {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const SegmentStart&, int) {
    constexpr int kOwner = group_owner<P>(kWarp);
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const FirstKey<kLeavesPages<P>> first_key(work.first_key_read(p));
      const KvSource<P, typename P::KFormat::Stored> from(p, p.k, work.sequence,
                                                          work.h / p.qhead_per_kvhead());
      KeyEntries<P> entries(p, work, work.kv_begin(work.count() - 1), first_key, kOwner);
#pragma unroll 1
      for (int i = work.count() - 1; i >= 0; --i, ++n) {
        const GatheredKeys<P> keys(p, work, work.kv_begin(i), first_key, entries, kOwner);
        if (i > 0) entries = KeyEntries<P>(p, work, work.kv_begin(i - 1), first_key, kOwner);
        RawKRing<P>::acquire(smem, n);
        copy_latents<P, kWarp>(LatentSlot<P>(smem, smem.code_index_k(n)), from, keys, smem.raw_k_full(n));
      }
    });
  }
};

/// Writes a half of a tile of elements, whose rows that are no keys are zeros. By a warpgroup: eight lanes
/// side by side have the same 16 columns of eight rows, which are at all banks in the slot and in the tile.
template <class P, TileHalf kHalf>
__device__ __forceinline__ void decode_latents(char* tile, const char* rows) {
  using Element = typename P::Element;
  using Format = typename P::KFormat;
  constexpr int kGroups = P::kBc / 8, kAtOnce = 2;  // slices, as registers allow
  const auto has_codes = [](int slice, int column) {
    return (slice + 1) * kSliceColumns <= Format::kColumns ||
           (slice * kSliceColumns < Format::kColumns && column < Format::kColumns);
  };
  // Unsigned, so that the compiler knows which block of a slice has the columns.
  const int own_row = static_cast<int>(threadIdx.x % 8),
            own_column = static_cast<int>(threadIdx.x % 32 / 8 * 16);
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  char *even = tile + chunk_offset<P::kBc>(own_row, own_column / 8),
       *odd = tile + chunk_offset<P::kBc>(own_row, own_column / 8 + 1);
#pragma unroll 1
  for (int group = kGroups * warp / 4; group < kGroups * (warp + 1) / 4; ++group) {
    const auto* row = reinterpret_cast<const unsigned char*>(rows) + (group * 8 + own_row) * Format::kBytes;
    const auto put = [&](int slice, const uint4(&elements)[2]) {
      // The swizzle is of eight rows, so it is the first row's.
      const int to = (slice * P::kBc + group * 8) * kRowBytes;
      *reinterpret_cast<uint4*>(even + to) = elements[0];
      *reinterpret_cast<uint4*>(odd + to) = elements[1];
    };
#pragma unroll
    for (int begin = 0; begin < slices(P::kHeadDim); begin += kAtOnce) {
      KvCodes16<Format> codes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (const int column = (begin + i) * kSliceColumns + own_column;
            is_in_half<P>(kHalf, begin + i) && has_codes(begin + i, column))
          load_codes16<Format, true>(row, row, column, 1.0f, codes[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int column = (begin + i) * kSliceColumns + own_column;
        if (!is_in_half<P>(kHalf, begin + i) || begin + i >= slices(P::kHeadDim)) continue;
        if (P::kHeadDim % kSliceColumns != 0 && column >= P::kHeadDim) continue;
        uint4 elements[2];
        if (has_codes(begin + i, column))
          elements_of_codes16<Element>(codes[i], elements);
        else
          tail_elements16<Element, Format>(row, column, elements);
        put(begin + i, elements);
      }
    }
  }
}

/// Decodes all tiles that the CTA meets. By a warpgroup.
template <class P>
struct LatentDecoder {
  static __device__ __forceinline__ void run(const Params&, const ForwardStorage<P>& smem, int) {
    const int thread = static_cast<int>(threadIdx.x) % kConverterThreads;
    const auto finish = [](unsigned full) {
      publish_to_async_proxy();
      barrier_arrive(full);
    };
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
#pragma unroll 1
      for (int i = work.count(); i > 0; --i, ++n) {
        const LatentSlot<P> from(smem, smem.code_index_k(n));
        char* tile = smem.shared + (smem.k(n) - smem.base);
        RawKRing<P>::wait_full(smem, n);
        KRing<P>::acquire(smem, n);
        if (P::kIndices && thread < kPresentWords<P>) smem.present_keys(n)[thread] = from.present[thread];
        decode_latents<P, TileHalf::left>(tile, from.rows);
        finish(smem.k_full(n));
        VRing<P>::acquire(smem, n);
        decode_latents<P, TileHalf::right>(tile, from.rows);
        finish(smem.v_full(n));
        release_codes<P>(smem.raw_k_empty(n));
      }
    });
  }
};

}  // namespace flashjit::sm90
