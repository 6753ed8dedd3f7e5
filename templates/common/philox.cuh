// Philox 4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and the dropout mask made
// of it. Host and device include this file: the reference and every kernel see the same mask.
#pragma once

#if defined(__CUDACC__)
#define FLASHJIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHJIT_HOST_DEVICE inline
#endif

namespace flashjit {

struct Philox4 {
  unsigned word[4];
};

template <int kRounds>
FLASHJIT_HOST_DEVICE Philox4 philox4x32(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0,
                                        unsigned k1) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
    const unsigned long long p0 = 0xD2511F53ull * c0;
    const unsigned long long p1 = 0xCD9E8D57ull * c2;
    const unsigned n0 = static_cast<unsigned>(p1 >> 32) ^ c1 ^ k0;
    const unsigned n2 = static_cast<unsigned>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<unsigned>(p1);
    c3 = static_cast<unsigned>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// The random bits of the eight pairs {q, q ^ 8} x {kv, kv ^ 1, kv ^ 8}, a half of a word each: one Philox
/// call serves as many scores that a thread of m16n8 accumulators of S holds, and with them a left operand of
/// P V of 16 keys. Seven rounds: the fewest that pass BigCrush (table 2 there), since attention with dropout
/// is bound by them.
FLASHJIT_HOST_DEVICE Philox4 dropout_words(unsigned seed_lo, unsigned seed_hi, unsigned offset_lo,
                                           unsigned offset_hi, unsigned batch_head, int q, int kv) {
  const unsigned q_cell = (static_cast<unsigned>(q) >> 4 << 3) | (static_cast<unsigned>(q) & 7u);
  const unsigned kv_cell = (static_cast<unsigned>(kv) >> 4 << 2) | (static_cast<unsigned>(kv) >> 1 & 3u);
  return philox4x32<7>(kv_cell, q_cell, batch_head, offset_lo, seed_lo, seed_hi ^ offset_hi);
}

/// Which of the four words of dropout_words() has the bits of the pair (q, kv): in its lower half where kv is
/// even, with the bits of kv ^ 1 in the other.
FLASHJIT_HOST_DEVICE int dropout_word_index(int q, int kv) { return ((kv >> 3) & 1) * 2 + ((q >> 3) & 1); }

/// Draws for the two pairs of a word: the highest bit of a half says that dropout drops its pair. `share` has
/// 2^15 p in each half; of a half's bits 15 are used.
FLASHJIT_HOST_DEVICE unsigned draw_dropped(unsigned word, unsigned share) {
  return (word & 0x7fff7fffu) + share;
}
/// What is drawn for the lower (0) or the upper (1) pair.
FLASHJIT_HOST_DEVICE bool is_dropped(unsigned drawn, int half) {
  return (drawn >> (half == 0 ? 15 : 31) & 1u) != 0;
}

}  // namespace flashjit
