// Copies of rows of a KV tile as they are to a slot, by the producer's warps: in pieces of 16 bytes at
// multiples of 16, since rows begin anywhere; or together, where they follow each other.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/sm90/forward_rings.cuh"
#include "flashjit/tma/gather_rows.cuh"

namespace flashjit::sm90 {

/// The rows of a KV tile in a slot.
template <class P>
struct RowSlot {
  char* rows;        ///< at kRowPitch<P> from each other
  int* begins;       ///< where each begins behind `rows`
  float* scales;     ///< the call's of each, if it has some
  char* scale_rows;  ///< of a format that has them in a tensor of their own, see kv_scale_rows.cuh

  __device__ __forceinline__ RowSlot(const ForwardStorage<P>& smem, PipelineCount<P> c)
      : rows(smem.shared + (smem.codes(c) - smem.base)),
        begins(reinterpret_cast<int*>(smem.code_scales(c))),
        scales(smem.code_scales(c) + P::kBc),
        scale_rows(rows + kForwardLayout<P>.scale_rows()) {}
};

/// A warp's keys of a KV tile, in groups of 32, one a lane, and what the page table says of them; -1: no key.
template <class P>
struct RowKeys {
  static constexpr int kOwn = KeyGroups<P>::kOwn;
  int kv[kOwn], entry[kOwn];

  __device__ __forceinline__ RowKeys() {}
  __device__ __forceinline__ RowKeys(const Params& p, const WorkTile<P>& work, int begin, int warp) {
    constexpr int kGroup = max(max(P::KFormat::kKeys, P::VFormat::kKeys), 1);  // whole groups are read
    const FirstKey<kLeavesPages<P>> first_key(work.first_key_read(p) / kGroup * kGroup);
    const int end = work.sequence.seqused_kv(p);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      kv[own] = begin + KeyGroups<P>::first(own, warp) + static_cast<int>(threadIdx.x) % 32;
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

/// A KV tile whose rows are copied.
template <class P>
struct RowTile {
  RowKeys<P> keys;
  Sequence<P> sequence;
  int h_kv;
};

/// Rows of a group of 32 that follow each other in memory wherever pages have their rows one after the other,
/// if copies of them are of whole pieces.
template <class P, class Format>
struct RowRuns {
  static constexpr int kRows = kv_box_rows(P::kPageRows, 32, 32), kBytes = kRows * Format::kBytes;
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
  constexpr int kFew = kPieces == 2 ? 1 : 2;
  constexpr int kUnrolled = kConverters<P> == 2 && kPieces <= 6 ? kPieces : kFew;  // as registers allow
  int lane = static_cast<int>(threadIdx.x) % 32;
  if (kHasFewRows<P> && (Format::kAlignment < 4 || Format::kZero != KvZero::none))
    lane = opaque(lane);  // else what depends on it is spilled
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

/// Starts the copies of a warp's rows, and returns how many bytes are bulk copies'.
template <class P, class Format>
__device__ __forceinline__ int copy_rows(const Params& p, const RowSlot<P>& to,
                                         const KvSource<P, typename Format::Stored>& from,
                                         const KvScales<P, Format::kArgumentOfKeys, true>& scales,
                                         const RowKeys<P>& keys, int warp, bool contiguous, unsigned full) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int in_runs_bytes = 0;
#pragma unroll
  for (int own = 0; own < KeyGroups<P>::kOwn; ++own) {
    const int first = KeyGroups<P>::first(own, warp), own_row = first + lane, kv = keys.kv[own];
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
  return in_runs_bytes;
}

}  // namespace flashjit::sm90
