// Bias tiles, which a score reads from a captured tensor, in shared memory: [slice of 64 keys][query][64],
// swizzled as tiles of Q and K are. TMA loads them where it can, before V or beside dO; else each consumer
// warp loads the elements that it needs.
#pragma once

#include "flashjit/async/mbarrier.cuh"
#include "flashjit/common/capture.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/tma/tile.cuh"

namespace flashjit::tma {

/// Whether TMA can load the bias tile: it does not clamp, and begins at multiples of 16 bytes only.
__device__ __forceinline__ bool tma_loads_bias_tile(const Params& p, const TensorMaps& maps,
                                                    const BiasTile& bias) {
  return (maps.bias.words[0] | maps.bias.words[1]) != 0 && bias.kv_shift % 8 == 0 &&
         bias.holds(p.seqlen_q, p.seqlen_kv);
}

/// Makes `barrier` expect `bytes`, and the bias tile where TMA loads it, which starts
/// here. By one thread.
template <int kRows, int kColumns>
__device__ __forceinline__ void expect_and_load_bias_tile(const Params& p, const TensorMaps& maps,
                                                          unsigned barrier, int bytes, const BiasTile& bias,
                                                          unsigned to, int q, int kv) {
  const bool copied = tma_loads_bias_tile(p, maps, bias);
  barrier_expect(barrier, bytes + (copied ? tile_bytes(kRows, kColumns) : 0));
  if (!copied) return;
  for (int slice = 0; slice < slices(kColumns); ++slice)
    load_box(to + slice * kRows * kRowBytes, maps.bias, barrier, kv + bias.kv_shift + slice * kSliceColumns,
             q + bias.q_shift, bias.leading[0], bias.leading[1]);
}

/// What a warp loads for itself: kCount rows of a tile of kRows from `row` on, and kKeys keys of each from
/// `key` on. The tile begins at the pair (q, kv). Fast where two elements are one word. kTogether: how many
/// rows are loaded at a time, as many as registers suffice for.
template <int kRows, int kCount, int kKeys, int kTogether>
struct BiasTileRows {
  static constexpr int kWords = kKeys / 2, kAcross = kWords % 32 == 0 ? 32 : kWords % 16 == 0 ? 16 : 8;
  static constexpr int kDown = 32 / kAcross;
  char* tile;
  BiasTile bias;
  int q, kv, row, key;

  __device__ __forceinline__ int first() const { return wrap_add(kv + key, bias.kv_shift); }
  __device__ __forceinline__ bool in_words() const {
    const unsigned long long address = reinterpret_cast<unsigned long long>(bias.first + first());
    return bias.stride_kv == 1 && first() >= 0 && first() <= bias.size_kv - kKeys &&
           (address | bias.stride_q * 2) % 4 == 0;
  }
  /// This lane's word of each row, and its row of each kDown.
  __device__ __forceinline__ int own_word() const { return static_cast<int>(threadIdx.x) % kAcross; }
  __device__ __forceinline__ int own_row(int n) const {
    return row + n + static_cast<int>(threadIdx.x) % 32 / kAcross;
  }
  __device__ __forceinline__ char* word_at(int n, int word) const {
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
          copy_async_4(shared_address(word_at(n, word)), bias.row(q + own_row(n)) + first() + word * 2);
    }
    copy_async_commit();
  }
  /// Waits for them, or copies elements.
  __device__ __forceinline__ void finish() const {
    if (!in_words()) {
#pragma unroll 1
      for (int word = own_word(); word < kWords; word += kAcross) {
        const int at = kv + key + word * 2;
        const long long low = bias.column(at), high = bias.column(at + 1);
#pragma unroll kTogether
        for (int n = 0; n < kCount; n += kDown) {
          const unsigned short* from = bias.row(q + own_row(n));
          *reinterpret_cast<unsigned*>(word_at(n, word)) =
              __ldg(from + low) | static_cast<unsigned>(__ldg(from + high)) << 16;
        }
      }
    }
    copy_async_wait<0>();
    __syncwarp();
    publish_to_async_proxy();  // TMA may load there next
  }
};

}  // namespace flashjit::tma
