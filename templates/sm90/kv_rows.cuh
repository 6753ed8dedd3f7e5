// K and V in formats that are decoded (common/kv_format.cuh). Two of the producer's warps copy rows as they
// are to the slots for codes: in pieces of 16 bytes at multiples of 16, since rows begin anywhere. One or two
// warpgroups make elements of them in the stages of K and V, where the consumers find what they find of 16
// bits.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/sm90/kv_codes.cuh"
#include "flashjit/tma/gather_rows.cuh"

namespace flashjit::sm90 {

/// The rows of a KV tile in a slot.
template <class P>
struct RowSlot {
  char* rows;     ///< at kRowPitch<P> from each other
  int* begins;    ///< where each begins behind `rows`
  float* scales;  ///< the call's of each, if it has some

  __device__ __forceinline__ RowSlot(const ForwardStorage<P>& smem, PipelineCount<P> c)
      : rows(smem.shared + (smem.codes(c) - smem.base)),
        begins(reinterpret_cast<int*>(smem.code_scales(c))),
        scales(smem.code_scales(c) + P::kBc) {}
};

// --- Copies -----------------------------------------------------------------------------------------------

/// A warp's keys of a KV tile, in groups of 32, one a lane, and what the page table says of them; -1: no key.
template <class P>
struct RowKeys {
  static constexpr int kOwn = GatheredKeys<P>::kOwn;
  int kv[kOwn], entry[kOwn];

  __device__ __forceinline__ RowKeys() {}
  __device__ __forceinline__ RowKeys(const Params& p, const WorkTile<P>& work, int begin, int warp) {
    const FirstKey<kLeavesPages<P>> first_key(work.first_key(p));
    const int end = work.sequence.seqused_kv(p);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      kv[own] = begin + GatheredKeys<P>::first(own, warp) + static_cast<int>(threadIdx.x) % 32;
      if (kv[own] >= end || !first_key.reads(kv[own])) kv[own] = -1;
      entry[own] = P::kPageRows > 0 && kv[own] >= 0 ? table_entry<P>(p, work.sequence.b, kv[own]) : 0;
    }
  }
  template <class Source>
  __device__ __forceinline__ unsigned long long row(const Params& p, const Source& from, int own) const {
    const auto* row = kv[own] < 0         ? from.some_row()
                      : P::kPageRows == 0 ? from.row(kv[own])
                                          : from.row_in_page(existing_page(p, entry[own]), kv[own]);
    return reinterpret_cast<unsigned long long>(row);
  }
};

/// Rows of a group of 32 that follow each other in memory wherever pages have their rows one after the other,
/// if copies of them are of whole pieces.
template <class P, class Format>
struct RowRuns {
  static constexpr int kRows = kv_box_rows(P::kPageRows, 32), kBytes = kRows * Format::kBytes;
  static constexpr bool kMayBe = P::kPageRows > 0 && kRows >= 8 && kBytes % 16 == 0 && P::kBc % 32 == 0;

  /// Starts the copies of a group, a lane a run, and counts their bytes; false: its runs are none. `row` is
  /// the lane's.
  static __device__ __forceinline__ bool copy(unsigned to, int* begins, int offset, bool contiguous,
                                              unsigned long long row, unsigned exist, unsigned full,
                                              int& bytes) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool begins_run = lane % kRows == 0;
    if (!kMayBe || !contiguous || exist != kWholeWarp) return false;
    if (__any_sync(kWholeWarp, begins_run && row % 16 != 0)) return false;
    begins[lane] = offset + lane * Format::kBytes;
    if (begins_run) {
      bytes += kBytes;
      load_line(to + lane * Format::kBytes, reinterpret_cast<const void*>(row), kBytes, full);
    }
    return true;
  }
};

/// Starts the copies of a group's rows in pieces, `row` is the lane's; zeros for rows that do not
/// exist. kAll: all do.
template <class P, class Format, bool kAll>
__device__ __forceinline__ void copy_pieces(unsigned to, unsigned long long row, unsigned exist, int rows) {
  constexpr int kPieces = row_pitch(Format::kBytes, Format::kAlignment) / 16;
  constexpr int kUnrolled = kConverters<P> == 2 && kPieces <= 6 ? kPieces : 2;  // as registers allow
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll kUnrolled
  for (int step = 0; step < kPieces; ++step) {
    const int index = step * 32 + lane, of_group = index / kPieces, piece = index % kPieces * 16;
    const unsigned long long of = __shfl_sync(kWholeWarp, row, of_group);
    const int ahead = static_cast<int>(of & 15u), bytes = min(Format::kBytes + ahead - piece, 16);
    const bool exists = kAll || (exist >> of_group & 1u) != 0;
    if (bytes > 0 && (P::kBc % 32 == 0 || of_group < rows))
      copy_async_first(to + of_group * kRowPitch<P> + piece,
                       reinterpret_cast<const char*>(of - ahead) + (exists ? piece : 0), exists ? bytes : 0);
  }
}

/// Starts the copies of a warp's rows, which count as an arrival of each lane on `full`; another is of what
/// the lanes themselves have written.
template <class P, class Format>
__device__ __forceinline__ void copy_rows(const Params& p, const RowSlot<P>& to,
                                          const KvSource<P, typename Format::Stored>& from,
                                          const KvScales<P, Format::kArgumentOfKeys>& scales,
                                          const RowKeys<P>& keys, int warp, bool contiguous, unsigned full) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int in_runs_bytes = 0;
#pragma unroll
  for (int own = 0; own < GatheredKeys<P>::kOwn; ++own) {
    const int first = GatheredKeys<P>::first(own, warp), own_row = first + lane, kv = keys.kv[own];
    if (first >= P::kBc) break;
    const unsigned long long row = keys.row(p, from, own);
    const unsigned exist = __ballot_sync(kWholeWarp, kv >= 0);
    const unsigned line = shared_address(to.rows) + first * kRowPitch<P>;
    const bool in_runs = RowRuns<P, Format>::copy(line, to.begins + first, first * kRowPitch<P>, contiguous,
                                                  row, exist, full, in_runs_bytes);
    if (P::kBc % 32 == 0 || own_row < P::kBc) {
      if (!in_runs) to.begins[own_row] = own_row * kRowPitch<P> + static_cast<int>(row & 15u);
      if (Format::kArgument)
        copy_async_4(shared_address(to.scales + own_row), kv >= 0 ? scales.of_key(kv) : scales.some(),
                     kv >= 0);
    }
    if (in_runs) continue;
    if (exist == kWholeWarp)
      copy_pieces<P, Format, true>(line, row, exist, P::kBc - first);
    else
      copy_pieces<P, Format, false>(line, row, exist, P::kBc - first);
  }
  barrier_expect(full, in_runs_bytes);
  barrier_arrive_after_copies(full);
}

/// Copies K and V in the order in which KvLoader loads them. By each of kGatherWarps warps.
template <class P, int kWarp>
struct KvRowCopier {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const ShareStart&, int) {
    struct Tile {
      RowKeys<P> keys;
      Sequence<P> sequence;
      int h_kv;
    } loaded;  // whose K was loaded last
    const auto copy = [&]<class Format>(Format, const TensorParam& tensor, const ScaleParam& scales,
                                        const Tile& tile, auto c, unsigned full) {
      copy_rows<P, OfHead<Format>>(p, RowSlot<P>(smem, c), {p, tensor, tile.sequence, tile.h_kv},
                                   {p, scales, tile.sequence, tile.h_kv}, tile.keys, kWarp,
                                   tensor.stride_s * sizeof(typename Format::Stored) == Format::kBytes, full);
    };
    const auto copy_v = [&](int n) {
      barrier_wait<P>(smem.raw_v_empty(n), smem.raw_v_phase(n) ^ 1);
      copy(typename P::VFormat{}, p.v, p.v_scale, loaded, smem.code_tile_v(n), smem.raw_v_full(n));
    };
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const int last = work.count() - 1;
      RowKeys<P> keys(p, work, work.kv_begin(last), kWarp);
#pragma unroll 1
      for (int i = last; i >= 0; --i, ++n) {
        const Tile tile{keys, work.sequence, work.h / p.qhead_per_kvhead()};
        barrier_wait<P>(smem.raw_k_empty(n), smem.raw_k_phase(n) ^ 1);
        copy(typename P::KFormat{}, p.k, p.k_scale, tile, smem.code_tile_k(n), smem.raw_k_full(n));
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
  constexpr int kSlices = slices(kColumns), kMostLoads = kConverters<P> == 2 ? 4 : 2;
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
          load_codes16<Format, true>(bytes_of(begins[load]), bytes_of(begins[load]), column, argument,
                                     codes[load][slice]);
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

/// Decodes all tiles that the CTA meets: K and V by turns, or where there are two warpgroups, each its own.
template <class P>
struct KvRowDecoder {
  static __device__ __forceinline__ void run(const Params&, const ForwardStorage<P>& smem, int wg) {
    const bool has_k = kConverters<P> == 1 || wg == 0, has_v = kConverters<P> == 1 || wg == 1;
    const auto finish = [&](unsigned full, unsigned rows_empty) {
      publish_to_async_proxy();
      barrier_arrive(full);
      release(rows_empty);
    };
    const auto at = [&](unsigned address) { return smem.shared + (address - smem.base); };
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    const Range groups = groups_of_warp<P>(warp);
    visit_kv_tiles<P>(
        smem,
        [&](const WorkTile<P>&, int, int n) {
          if (!has_k) return 0;
          barrier_wait<P>(smem.raw_k_full(n), smem.raw_k_phase(n));
          barrier_wait<P>(smem.k_empty(n), smem.phase(n) ^ 1);
          decode_tile<P, OfHead<typename P::KFormat>, P::kHeadDim>(
              at(smem.k(n)), RowSlot<P>(smem, smem.code_tile_k(n)), groups);
          finish(smem.k_full(n), smem.raw_k_empty(n));
          return 0;
        },
        [&](int, int n) {
          if (!has_v) return;
          barrier_wait<P>(smem.raw_v_full(n), smem.raw_v_phase(n));
          barrier_wait<P>(smem.v_empty(n), smem.phase(n) ^ 1);
          decode_tile<P, OfHead<typename P::VFormat>, P::kHeadDimV>(
              at(smem.v(n)), RowSlot<P>(smem, smem.code_tile_v(n)), groups);
          finish(smem.v_full(n), smem.raw_v_empty(n));
        });
  }
};

}  // namespace flashjit::sm90
