// Which pairs dropout drops: for one pair, and for the fragments of S and S^T that a thread holds.
#pragma once

#include "flashjit/common/params.cuh"
#include "flashjit/common/philox.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit {

/// Seed and offset, in that order: from the parameters, or from memory on the device.
__device__ __forceinline__ uint4 rng_state(const Params& p) {
  uint4 state{p.seed_lo, p.seed_hi, p.offset_lo, p.offset_hi};
  // Not volatile, so that equal loads become one.
  asm("{\n"
      ".reg .pred given;\n"
      "setp.ne.u64 given, %4, 0;\n"
      "@given ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(state.x), "+r"(state.y), "+r"(state.z), "+r"(state.w)
      : "l"(p.rng_state));
  return state;
}

/// The number of a head in the problem that the mask is of.
template <class P>
__device__ __forceinline__ unsigned dropout_head(const Params& p, int b, int h) {
  if constexpr (P::kDropoutPlace) return p.dropout_place.first_head + b * p.dropout_place.heads + h;
  return b * p.heads_q + h;
}

/// The word that has the bits of a pair. Selects instead of an index, which would put the words into local
/// memory.
__device__ __forceinline__ unsigned word_of_pair(const Philox4& random, int q, int kv) {
  const int index = dropout_word_index(q, kv);
  const unsigned low = index & 1 ? random.word[1] : random.word[0];
  const unsigned high = index & 1 ? random.word[3] : random.word[2];
  return index & 2 ? high : low;
}

/// The bits of the eight pairs of a call, which are in calls of their own where the mask's problem has them.
__device__ __forceinline__ Philox4 gathered_words(const DropoutPlaceParam& place, const uint4& state,
                                                  unsigned batch_head, int q, int kv) {
  Philox4 words{};
#pragma unroll 1  // eight calls at once would spill
  for (int pair = 0; pair < 8; ++pair) {
    const int row = place.q + place.q_step * ((q & ~8) | (pair & 1) << 3);
    const int key = place.kv + place.kv_step * ((kv & ~9) | (pair & 2) << 2 | pair >> 2);
    const Philox4 random = dropout_words(state.x, state.y, state.z, state.w, batch_head, row, key);
    const unsigned bits = (word_of_pair(random, row, key) >> (key & 1) * 16 & 0xffffu) << (pair >> 2) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if ((pair & 3) == i) words.word[i] |= bits;
  }
  return words;
}

template <class P>
__device__ __forceinline__ Philox4 dropout_words(const Params& p, unsigned batch_head, int q, int kv) {
  const uint4 state = rng_state(p);
  if constexpr (P::kDropoutPlace) {
    const DropoutPlaceParam& place = p.dropout_place;
    if (!place.whole_cells) return gathered_words(place, state, batch_head, q, kv);
    q += place.q, kv += place.kv;
  }
  return dropout_words(state.x, state.y, state.z, state.w, batch_head, q, kv);
}

/// Whether dropout drops the pair.
template <class P>
__device__ __forceinline__ bool pair_dropped(const Params& p, unsigned batch_head, int q, int kv) {
  if constexpr (P::kDropoutPlace) {
    const DropoutPlaceParam& place = p.dropout_place;
    q = place.q + place.q_step * q, kv = place.kv + place.kv_step * kv;
  }
  const uint4 state = rng_state(p);
  const Philox4 random = dropout_words(state.x, state.y, state.z, state.w, batch_head, q, kv);
  return is_dropped(draw_dropped(word_of_pair(random, q, kv), p.drop_share), kv & 1);
}

/// Masks for P as the left operand of P V: in its words for 16 keys, the halves that become zero. The
/// thread's first pair is (q, kv).
template <class P>
__device__ __forceinline__ void drop_masks(unsigned (&masks)[4], const Params& p, unsigned batch_head, int q,
                                           int kv) {
  const Philox4 random = dropout_words<P>(p, batch_head, q, kv);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const unsigned drawn = draw_dropped(random.word[r], p.drop_share);
    masks[r] = select_bytes(drawn, drawn, 0xbb99);  // each half filled with its highest bit
  }
}

/// What is drawn for 16 queries of S^T; the thread's first pair is (q, kv). Word r is for the queries q and
/// q + 1, plus 8 for r above 1, and for the key kv, plus 8 for odd r. One call of Philox also has the bits of
/// kv ^ 1, which another lane needs: the two lanes make one call each, for even and for odd queries, and
/// exchange halves. By whole warps.
template <class P>
__device__ __forceinline__ Philox4 draw_transposed(const Params& p, unsigned batch_head, int q, int kv) {
  const int odd = kv & 1;
  const Philox4 own = dropout_words<P>(p, batch_head, q + odd, kv);
  const unsigned others = odd ? 0x5410 : 0x7632, even_words = odd ? 0x3254 : 0x5410,
                 odd_words = odd ? 0x3276 : 0x7610;
  Philox4 drawn;
#pragma unroll
  for (int r = 0; r < 4; r += 2) {
    // What the other lane needs of words 2 (kv >= 8) and 2 (kv >= 8) + 1.
    const unsigned other = __shfl_xor_sync(kWholeWarp, select_bytes(own.word[r], own.word[r + 1], others), 4);
    drawn.word[r / 2] = draw_dropped(select_bytes(own.word[r], other, even_words), p.drop_share);
    drawn.word[r / 2 + 2] = draw_dropped(select_bytes(own.word[r + 1], other, odd_words), p.drop_share);
  }
  return drawn;
}

/// A bit for each of a thread's kCount values of an accumulator of S^T: whether dropout drops it.
template <int kCount>
class DroppedValues {
  static constexpr int kWords = (kCount + 31) / 32, kOfWord = kCount < 32 ? kCount : 32;
  unsigned bits_[kWords];

 public:
  /// The first value is the pair (q, kv). By whole warps.
  template <class P>
  __device__ __forceinline__ void draw(const Params& p, unsigned batch_head, int q, int kv) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      unsigned bits = 0;
#pragma unroll
      for (int first = 0; first < kOfWord; first += 8) {
        const Philox4 drawn = draw_transposed<P>(p, batch_head, q + word * 64 + first * 2, kv);
#pragma unroll
        for (int r = 0; r < 4; ++r) bits = bits >> 1 | (drawn.word[r] & 0x80008000u);
      }
      bits_[word] = opaque(bits);  // else each bit gets a register
    }
  }
  __device__ __forceinline__ bool operator[](int n) const {
    return (bits_[n / 32] >> (16 - kOfWord / 2 + n % 32 / 2 + n % 2 * 16) & 1u) != 0;
  }
};

}  // namespace flashjit
