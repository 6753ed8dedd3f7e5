// K and V in formats that are decoded (common/kv_format.cuh). Two of the producer's warps copy rows as they
// are to the slots for codes. One or two warpgroups make elements of them in the stages of K and V, where the
// consumers find what they find of 16 bits.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/sm90/kv_codes.cuh"
#include "flashjit/sm90/kv_row_copies.cuh"
#include "flashjit/sm90/kv_scale_rows.cuh"

namespace flashjit::sm90 {

// --- Copies -----------------------------------------------------------------------------------------------

/// Starts the copies of a warp's rows of a tile of K or V, and of their scales, which count as an arrival of
/// each lane on `full`; another is of what the lanes themselves have written.
template <class P, class Format>
__device__ __forceinline__ void copy_tile(const Params& p, const RowSlot<P>& to, const TensorParam& tensor,
                                          const ScaleParam& scales, const TensorParam& block_scales,
                                          const RowTile<P>& tile, int warp, unsigned full) {
  using Stored = typename Format::Stored;
  int bytes = copy_rows<P, Format>(p, to, {p, tensor, tile.sequence, tile.h_kv},
                                   {p, scales, tile.sequence, tile.h_kv}, tile.keys, warp,
                                   tensor.stride_s * sizeof(Stored) == Format::kBytes, full);
  bytes += TileScales<P, Format>::copy(p, to, block_scales, tile, warp, full);
  barrier_expect(full, bytes);
  barrier_arrive_after_copies(full);
}

/// Copies K and V in the order in which KvLoader loads them. By each of kGatherWarps warps.
template <class P, int kWarp>
struct KvRowCopier {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const SegmentStart&, int) {
    RowTile<P> loaded;  // whose K was loaded last
    const auto copy_v = [&](int n) {
      RawVRing<P>::acquire(smem, n);
      copy_tile<P, OfHead<typename P::VFormat>>(p, RowSlot<P>(smem, smem.code_index_v(n)), p.v, p.v_scale,
                                                p.v_block_scale, loaded, kWarp, smem.raw_v_full(n));
    };
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const int last = work.count() - 1;
      RowKeys<P> keys(p, work, work.kv_begin(last), kWarp);
#pragma unroll 1
      for (int i = last; i >= 0; --i, ++n) {
        const RowTile<P> tile{keys, work.sequence, work.h / p.qhead_per_kvhead()};
        RawKRing<P>::acquire(smem, n);
        copy_tile<P, OfHead<typename P::KFormat>>(p, RowSlot<P>(smem, smem.code_index_k(n)), p.k, p.k_scale,
                                                  p.k_block_scale, tile, kWarp, smem.raw_k_full(n));
        // The page table is read a tile ahead of its copies.
        if (i > 0) keys = RowKeys<P>(p, work, work.kv_begin(i - 1), kWarp);
        if (n > 0) copy_v(n - 1);
        loaded = tile;
      }
    });
    if (n > 0) copy_v(n - 1);
  }
};

// --- Decoding ---------------------------------------------------------------------------------------------

/// Which groups of eight rows of a tile a warp decodes.
template <class P>
__device__ __forceinline__ Range groups_of_warp(int warp) {
  constexpr int kGroups = P::kBc / 8;
  return {kGroups * warp / 4, kGroups * (warp + 1) / 4};
}

/// Writes a tile of elements; rows that are no keys, whose bytes are zeros, become finite numbers. By a
/// warpgroup: four lanes have the 64 columns of a slice, so that eight write to all banks.
template <class P, class Format, int kColumns>
__device__ __forceinline__ void decode_tile(char* tile, const RowSlot<P>& from, Range groups) {
  using Element = typename P::Element;
  using Scales = TileScales<P, Format>;
  constexpr int kSlices = slices(kColumns), kMostLoads = kConverters<P> == 2 ? 4 : Format::kApart ? 1 : 2;
  constexpr int kLoads = max(kMostLoads / kSlices, 1);  // rows at a time, as registers allow
  const int lane = static_cast<int>(threadIdx.x) % 32, own_row = lane / 4, own_column = lane % 4 * 16;
  const auto has_codes = [](int column) { return Format::kColumns >= kColumns || column < Format::kColumns; };
  const auto bytes_of = [&](int begin) { return reinterpret_cast<const unsigned char*>(from.rows) + begin; };
  char *even = tile + chunk_offset<P::kBc>(own_row, own_column / 8),
       *odd = tile + chunk_offset<P::kBc>(own_row, own_column / 8 + 1);
#pragma unroll 1
  for (int group = groups.begin; group < groups.end; group += kLoads) {
    KvCodes16<Format> codes[kLoads][kSlices];
    int begins[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (kLoads > 1 && group + load >= groups.end) break;
      const int row = (group + load) * 8 + own_row;
      begins[load] = from.begins[row];
      const float argument = Format::kArgument ? from.scales[row] : 1.0f;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
        if (const int column = slice * 64 + own_column; has_codes(column))
          load_codes16<Format, true>(bytes_of(begins[load]),
                                     Format::kApart ? Scales::of_row(from, row) : bytes_of(begins[load]),
                                     column, argument, codes[load][slice]);
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (kLoads > 1 && group + load >= groups.end) break;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = slice * 64 + own_column;
        if (kColumns % 64 != 0 && column >= kColumns) continue;
        uint4 elements[2];
        if (has_codes(column))
          elements_of_codes16<Element>(codes[load][slice], elements);
        else
          tail_elements16<Element, Format>(bytes_of(begins[load]), column, elements);
        // The swizzle is of eight rows, so it is the first row's.
        const int to = (slice * P::kBc + (group + load) * 8) * kRowBytes;
        *reinterpret_cast<uint4*>(even + to) = elements[0];
        *reinterpret_cast<uint4*>(odd + to) = elements[1];
      }
    }
  }
}

/// Eight columns of all rows where keys share scales, which a lane keeps for the rows that share them.
/// `column` is the column of 16, `to` the first row's.
template <class P, class Format, int kHalf>
__device__ __forceinline__ void decode_columns8(char* to, const RowSlot<P>& from, Range groups, int own_row,
                                                int column) {
  constexpr int kGroupsOfKeys = Format::kKeys / 8;
  ColumnScales8<Format> by;
#pragma unroll 1
  for (int group = groups.begin; group < groups.end; ++group) {
    const int row = group * 8 + own_row;
    const auto* bytes = reinterpret_cast<const unsigned char*>(from.rows) + from.begins[row];
    if (group == groups.begin || group % kGroupsOfKeys == 0)
      by.load(TileScales<P, Format>::of_row(from, row), column + 8 * kHalf);
    KvCodes16<Format> codes;
    load_codes16<Format, true>(bytes, nullptr, column, 1.0f, codes);
    *reinterpret_cast<uint4*>(to + group * 8 * kRowBytes) =
        by.template elements<typename P::Element>(codes, 8 * kHalf);
  }
}
template <class P, class Format, int kColumns>
requires KeysShareScales<Format> __device__ __forceinline__ void decode_tile(char* tile,
                                                                             const RowSlot<P>& from,
                                                                             Range groups) {
  const int lane = static_cast<int>(threadIdx.x) % 32, own_row = lane / 4, own_column = lane % 4 * 16;
  const int even = chunk_offset<P::kBc>(own_row, own_column / 8),
            odd = chunk_offset<P::kBc>(own_row, own_column / 8 + 1);
#pragma unroll 1
  for (int slice = 0; slice < slices(kColumns); ++slice, tile += P::kBc * kRowBytes) {
    const int column = slice * 64 + own_column;
    if (kColumns % 64 != 0 && column >= kColumns) break;
    if (Format::kColumns == kColumns || column < Format::kColumns) {
      decode_columns8<P, Format, 0>(tile + even, from, groups, own_row, column);
      decode_columns8<P, Format, 1>(tile + odd, from, groups, own_row, column);
    } else {
#pragma unroll 1
      for (int group = groups.begin; group < groups.end; ++group) {
        uint4 elements[2];
        tail_elements16<typename P::Element, Format>(
            reinterpret_cast<const unsigned char*>(from.rows) + from.begins[group * 8 + own_row], column,
            elements);
        *reinterpret_cast<uint4*>(tile + even + group * 8 * kRowBytes) = elements[0];
        *reinterpret_cast<uint4*>(tile + odd + group * 8 * kRowBytes) = elements[1];
      }
    }
  }
}

/// Decodes all tiles that the CTA visits: K and V alternately, or with two warpgroups each its own.
template <class P>
struct KvRowDecoder {
  static __device__ __forceinline__ void run(const Params&, const ForwardStorage<P>& smem, int wg) {
    const bool has_k = kConverters<P> == 1 || wg == 0, has_v = kConverters<P> == 1 || wg == 1;
    const auto finish = [&](unsigned full, unsigned rows_empty) {
      publish_to_async_proxy();
      barrier_arrive(full);
      release_codes<P>(rows_empty);
    };
    const auto at = [&](unsigned address) { return smem.shared + (address - smem.base); };
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    const Range groups = groups_of_warp<P>(warp);
    visit_kv_tiles<P>(
        smem,
        [&](const WorkTile<P>&, int, int n) {
          if (!has_k) return 0;
          RawKRing<P>::wait_full(smem, n);
          KRing<P>::acquire(smem, n);
          decode_tile<P, OfHead<typename P::KFormat>, P::kHeadDim>(
              at(smem.k(n)), RowSlot<P>(smem, smem.code_index_k(n)), groups);
          finish(smem.k_full(n), smem.raw_k_empty(n));
          return 0;
        },
        [&](int, int n) {
          if (!has_v) return;
          RawVRing<P>::wait_full(smem, n);
          VRing<P>::acquire(smem, n);
          decode_tile<P, OfHead<typename P::VFormat>, P::kHeadDimV>(
              at(smem.v(n)), RowSlot<P>(smem, smem.code_index_v(n)), groups);
          finish(smem.v_full(n), smem.raw_v_empty(n));
        });
  }
};

}  // namespace flashjit::sm90
