// Tiles of a captured plane, which a score reads, in shared memory: [slice of 64 keys][query][64], swizzled
// as tiles of Q and K are. The TMA unit copies them where it can, before V or beside dO; else the warps that
// compute fill in what they need themselves.
#pragma once

#include "flashjit/common/capture.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

/// Whether the TMA unit copies a plane's tiles: it does not clamp, and begins at whole 16 bytes alone.
__device__ __forceinline__ bool unit_copies(const Params& p, const TensorMaps& maps, const BiasTile& plane) {
  return (maps.plane.words[0] | maps.plane.words[1]) != 0 && plane.kv_shift % 8 == 0 &&
         plane.holds(p.seqlen_q, p.seqlen_kv);
}

/// Says on `barrier` how many bytes come: `bytes`, and a tile of the plane where the TMA unit copies it,
/// which starts here. By one thread.
template <int kRows, int kColumns>
__device__ __forceinline__ void expect_with_plane(const Params& p, const TensorMaps& maps, unsigned barrier,
                                                  int bytes, const BiasTile& plane, unsigned to, int q,
                                                  int kv) {
  const bool copied = unit_copies(p, maps, plane);
  barrier_expect(barrier, bytes + (copied ? tile_bytes(kRows, kColumns) : 0));
  if (!copied) return;
  for (int slice = 0; slice < slices(kColumns); ++slice)
    load_box(to + slice * kRows * kRowBytes, maps.plane, barrier, kv + plane.kv_shift + slice * kSliceColumns,
             q + plane.q_shift, plane.leading[0], plane.leading[1]);
}

/// What a warp fills in, for itself: kCount rows of a tile of kRows from `row` on, of each kKeys keys from
/// `key` on. The tile begins at the pair (q, kv). Fast where two elements are one word. kTogether: rows on
/// their way at a time, for which registers suffice.
template <int kRows, int kCount, int kKeys, int kTogether>
struct PlaneRows {
  static constexpr int kWords = kKeys / 2, kAcross = kWords % 32 == 0 ? 32 : kWords % 16 == 0 ? 16 : 8;
  static constexpr int kDown = 32 / kAcross;
  char* tile;
  BiasTile plane;
  int q, kv, row, key;

  __device__ __forceinline__ int first() const { return wrap_add(kv + key, plane.kv_shift); }
  __device__ __forceinline__ bool in_words() const {
    const unsigned long long address = reinterpret_cast<unsigned long long>(plane.first + first());
    return plane.stride_kv == 1 && first() >= 0 && first() <= plane.size_kv - kKeys &&
           (address | plane.stride_q * 2) % 4 == 0;
  }
  /// Of this lane's words of each row and its rows of each kDown.
  __device__ __forceinline__ int own_word() const { return static_cast<int>(threadIdx.x) % kAcross; }
  __device__ __forceinline__ int own_row(int n) const {
    return row + n + static_cast<int>(threadIdx.x) % 32 / kAcross;
  }
  __device__ __forceinline__ char* place(int n, int word) const {
    const int own_key = key + word * 2;
    return tile + chunk_offset<kRows>(own_row(n), own_key / 8) + own_key % 8 * 2;
  }

  /// Starts copying words, where elements lie in words.
  __device__ __forceinline__ void start() const {
    if (in_words()) {
#pragma unroll 1
      for (int word = own_word(); word < kWords; word += kAcross)
#pragma unroll kTogether
        for (int n = 0; n < kCount; n += kDown)
          copy_async_4(shared_address(place(n, word)), plane.row(q + own_row(n)) + first() + word * 2);
    }
    copy_async_commit();
  }
  /// Waits for them, or copies elements.
  __device__ __forceinline__ void finish() const {
    if (!in_words()) {
#pragma unroll 1
      for (int word = own_word(); word < kWords; word += kAcross) {
        const int at = kv + key + word * 2;
        const long long low = plane.column(at), high = plane.column(at + 1);
#pragma unroll kTogether
        for (int n = 0; n < kCount; n += kDown) {
          const unsigned short* from = plane.row(q + own_row(n));
          *reinterpret_cast<unsigned*>(place(n, word)) =
              __ldg(from + low) | static_cast<unsigned>(__ldg(from + high)) << 16;
        }
      }
    }
    copy_async_wait<0>();
    __syncwarp();
    publish_to_async_proxy();  // the TMA unit may write there next
  }
};

}  // namespace flashjit::sm90
