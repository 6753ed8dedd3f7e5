// Scales of rows that are decoded (kv_rows.cuh), in a slot: in their rows, or where a format has them in a
// tensor of their own, behind the rows. The producer's warps copy those, too: a row for each key as the keys'
// rows are copied, or one for the keys that share it, at a multiple of 16 bytes.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/sm90/kv_row_copies.cuh"

namespace flashjit::sm90 {

/// In the row.
template <class P, class Format, bool kApart = Format::kApart, bool kOfKeys = KeysShareScales<Format>>
struct TileScales {
  /// Starts a warp's copies, which are among the lane's of `full`, and returns how many bytes are bulk
  /// copies'.
  static __device__ __forceinline__ int copy(const Params&, const RowSlot<P>&, const TensorParam&,
                                             const RowTile<P>&, int, unsigned) {
    return 0;
  }
  /// The scales of row `row` of the tile, where they are not in the row.
  static __device__ __forceinline__ const unsigned char* of_row(const RowSlot<P>&, int) { return nullptr; }
};

/// In a row for each key, which its lane copies: these are short.
template <class P, class Format>
struct TileScales<P, Format, true, false> : TileScales<P, Format, false, false> {
  static constexpr int kBytes = Format::kScaleRowBytes, kPitch = row_pitch(kBytes, Format::kScaleAlignment);

  static __device__ __forceinline__ int copy(const Params& p, const RowSlot<P>& to, const TensorParam& tensor,
                                             const RowTile<P>& tile, int warp, unsigned) {
    const KvSource<P, typename Format::StoredScale> from(p, tensor, tile.sequence, tile.h_kv);
#pragma unroll
    for (int own = 0; own < KeyGroups<P>::kOwn; ++own) {
      const int row = KeyGroups<P>::first(own, warp) + static_cast<int>(threadIdx.x) % 32;
      if (row >= P::kBc) break;
      const bool exists = tile.keys.kv[own] >= 0;
      const unsigned long long scales = tile.keys.row(p, from, own);
      const int ahead = static_cast<int>(scales & 15u);
      begins(to)[row] = row * kPitch + ahead;
#pragma unroll 1
      for (int piece = 0; piece < kBytes + ahead; piece += 16)
        copy_async_first(shared_address(to.scale_rows + row * kPitch + piece),
                         reinterpret_cast<const char*>(scales - ahead) + (exists ? piece : 0),
                         exists ? min(kBytes + ahead - piece, 16) : 0);
    }
    return 0;
  }
  static __device__ __forceinline__ const unsigned char* of_row(const RowSlot<P>& from, int row) {
    return reinterpret_cast<const unsigned char*>(from.scale_rows) + begins(from)[row];
  }

 private:
  static __device__ __forceinline__ int* begins(const RowSlot<P>& slot) {
    return reinterpret_cast<int*>(slot.scale_rows + P::kBc * kPitch);
  }
};

/// In a row for the keys that share it; zeros where none of them exists.
template <class P, class Format>
struct TileScales<P, Format, true, true> {
  static constexpr int kKeys = Format::kKeys, kBytes = Format::kScaleRowBytes;
  static_assert(P::kBc % kKeys == 0 || kKeys % P::kBc == 0,
                "a tile has whole groups, or a group whole tiles");

  static __device__ __forceinline__ int copy(const Params& p, const RowSlot<P>& to, const TensorParam& tensor,
                                             const RowTile<P>& tile, int warp, unsigned full) {
    const KvSource<P, typename Format::StoredScale> from(p, tensor, tile.sequence, tile.h_kv);
    int bytes = 0;
#pragma unroll
    for (int own = 0; own < KeyGroups<P>::kOwn; ++own) {
      const int row = KeyGroups<P>::first(own, warp) + static_cast<int>(threadIdx.x) % 32,
                kv = tile.keys.kv[own];
      if (row >= P::kBc || row % min(kKeys, P::kBc) != 0) continue;
      char* line = to.scale_rows + row / kKeys * kBytes;
      if (kv >= 0) {
        load_line(shared_address(line), row_of_group(p, from, tile.keys, own), kBytes, full);
        bytes += kBytes;
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < kBytes; i += 16) *reinterpret_cast<uint4*>(line + i) = {0, 0, 0, 0};
    }
    return bytes;
  }
  static __device__ __forceinline__ const unsigned char* of_row(const RowSlot<P>& from, int row) {
    return reinterpret_cast<const unsigned char*>(from.scale_rows) + row / kKeys * kBytes;
  }

 private:
  template <class Source>
  static __device__ __forceinline__ const void* row_of_group(const Params& p, const Source& from,
                                                             const RowKeys<P>& keys, int own) {
    const int kv = keys.kv[own], in_page = kv % max(P::kPageRows, 1);
    return P::kPageRows == 0 ? from.row(kv / kKeys)
                             : from.row_in_page(existing_page(p, keys.entry[own]), in_page / kKeys);
  }
};

}  // namespace flashjit::sm90
