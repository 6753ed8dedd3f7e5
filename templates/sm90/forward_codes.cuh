// Q, K and V of 8 bits, multiplied as they are. wgmma has such operands with rows along the depth only, so V
// is transposed on its way: TMA brings its tiles to slots of their own, and warps of the producer write V^T
// to V's stages. There the keys are in the order in which S's accumulators, as codes, are the left operand
// of P V. S and P V of one KV tile are computed by the tensor cores, whose sums have few bits; O is the
// registers' own sum over KV tiles, so that its error does not grow with the length.
#pragma once

#include "flashjit/sm90/forward_mainloop.cuh"

namespace flashjit::sm90 {

// --- V^T --------------------------------------------------------------------------------------------------

/// Of 16 keys, a thread has four codes of a column: keys 2t, 2t + 1, 2t + 8 and 2t + 9, t being its number
/// among four lanes; in S's accumulators, too. Which of them are among the first `count`: a byte of ones
/// each.
__device__ __forceinline__ unsigned codes_of_first_keys(int count) {
  const int own = count - static_cast<int>(threadIdx.x) % 4 * 2;
  unsigned bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i % 2 + i / 2 * 8 < own) bytes |= 0xffu << 8 * i;
  return bytes;
}

/// Writes V^T of a tile of V; `kSomeKeys`: zeros for keys from `valid` on, and for codes that are NaN. By a
/// warp, of kTransposers; 32 keys of 16 columns at a time. ldmatrix gives a thread two columns of two keys in
/// a word, bytes are selected, and stmatrix writes eight columns of V, each a row of V^T, with 16 keys. Of
/// the sixteen, rows 0, 2, 4, 6, 9, 11, 13 and 15 are one matrix, as the swizzle then gives each its own
/// banks.
template <class P, bool kSomeKeys>
__device__ __forceinline__ void transpose_tile(unsigned to, unsigned from, int valid, int warp) {
  constexpr int kBlocks = P::kBc / 32, kLoads = min(kBlocks, kSomeKeys ? 2 : 4);
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 8, odd = (row >= 4) ^ (lane / 8 % 2);
  const int column = 2 * row + odd;
  const unsigned read = from + lane * kRowBytes + row * 16;
  const unsigned write = to + column * kRowBytes + ((lane / 16) ^ (column % 8)) * 16;
  const unsigned first_bytes = lane < 16 ? 0x6420 : 0x7531, second_bytes = lane < 16 ? 0x7531 : 0x6420;
#pragma unroll 1
  for (int group = warp; group < P::kHeadDimV / 16; group += kTransposers<P>) {
    const unsigned read_group = (read ^ (group % 8 * 16)) + group / 8 * P::kBc * kRowBytes;
    const unsigned write_group = write + group * 16 * kRowBytes;
#pragma unroll
    for (int begin = 0; begin < kBlocks; begin += kLoads) {
      unsigned words[kLoads][4];
#pragma unroll
      for (int load = 0; load < kLoads; ++load)
        if (begin + load < kBlocks)
          load_matrix_x4_transposed(words[load], read_group + (begin + load) * 32 * kRowBytes);
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        const int block = begin + load;
        if (block >= kBlocks) break;
        unsigned(&of)[4] = words[load];
        unsigned codes[4] = {
            select_bytes(of[0], of[1], first_bytes), select_bytes(of[0], of[1], second_bytes),
            select_bytes(of[2], of[3], first_bytes), select_bytes(of[2], of[3], second_bytes)};
        if constexpr (kSomeKeys) {
#pragma unroll
          for (int i = 0; i < 4; ++i) codes[i] &= codes_of_first_keys(valid - block * 32 - i / 2 * 16);
          clear_special_codes<typename P::KvElement>(codes);
        }
        store_matrices((write_group ^ (block % 4 * 32)) + block / 4 * P::kHeadDimV * kRowBytes, codes);
      }
    }
  }
}

/// Transposes the tiles of V that the CTA visits. Each of kTransposers warps has a share.
template <class P>
struct VTransposer {
  static __device__ __forceinline__ bool is(int warp) { return warp < 2 + kTransposers<P>; }
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const SegmentStart&, int warp) {
    const int transposer = warp - 2;
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const Range visited = keys_of_work_tile(p, work);
#pragma unroll 1
      for (int i = work.count() - 1; i >= 0; --i, ++n) {
        const int begin = work.kv_begin(i), valid = work.sequence.seqused_kv(p) - begin;
        RawVRing<P>::wait_full(smem, n);
        VRing<P>::acquire(smem, n);
        if ((kOutOfRangeKeys<P> && valid < P::kBc) || (kHidesKeys<P> && !has_tile<P>(visited, begin)))
          transpose_tile<P, true>(smem.v(n), smem.raw_v(n), valid, transposer);
        else
          transpose_tile<P, false>(smem.v(n), smem.raw_v(n), valid, transposer);
        publish_to_async_proxy();
        VRing<P>::commit_thread(smem, n);
        RawVRing<P>::release(smem, n);
      }
    });
  }
};

/// Finds three factors of each key that the CTA visits: what makes scores of S, or what a program takes; and
/// the logarithm and the inverse of V's scale. P times V's scale is what becomes codes, so the logarithm is
/// added to scores, and the row sum l, which is of P alone, is multiplied by the inverse. By a warp.
template <class P>
struct KeyFactorFinder {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const SegmentStart&, int) {
    constexpr int kPerLane = P::kBc / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const int h_kv = work.h / p.qhead_per_kvhead(), first_key = work.first_key_read(p);
      const KvScales<P> k_scales(p, p.k_scale, work.sequence, h_kv, first_key),
          v_scales(p, p.v_scale, work.sequence, h_kv, first_key);
      const float of_all = q_scale<P>(p, work.sequence.b, h_kv) * (P::kHasScore ? 1.0f : p.softmax_scale);
#pragma unroll 1
      for (int i = work.count() - 1; i >= 0; --i, ++n) {
        const int begin = work.kv_begin(i), valid = work.sequence.seqused_kv(p) - begin;
        float k[kPerLane], v[kPerLane];
#pragma unroll
        for (int own = 0; own < kPerLane; ++own) {
          const int row = own * 32 + lane;
          const bool exists = k_scales.reads(begin + row) && row < valid;
          k[own] = exists ? *k_scales.of_key(begin + row) : 1.0f;
          v[own] = exists ? *v_scales.of_key(begin + row) : 1.0f;
        }
        KRing<P>::acquire(smem, n);
#pragma unroll
        for (int own = 0; own < kPerLane; ++own) {
          float* to = smem.key_scales(n) + own * 32 + lane;
          to[kOfScore * P::kBc] = k[own] * of_all;
          to[kLogOfV * P::kBc] = log2_approx(v[own]) * kLn2;
          to[kInverseOfV * P::kBc] = __fdividef(1.0f, v[own]);
        }
        KRing<P>::commit_thread(smem, n);
      }
    });
  }
};

// --- Consumers --------------------------------------------------------------------------------------------

/// P as the left operand of P V: codes of e4m3, 32 keys a step, in the order of V^T.
template <class P>
__device__ __forceinline__ void pack_codes(POperand<P>& codes, const SAccumulator<P>& s) {
#pragma unroll
  for (int step = 0; step < P::kBc / 32; ++step)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* of = s + step * 16 + r / 2 * 8 + r % 2 * 2;
      codes[step][r] = pack_e4m3(of[0], of[1], of[4], of[5]);
    }
}
/// Zeros where dropout drops a pair.
template <class P>
__device__ __forceinline__ void drop_codes(const Params& p, const WorkTile<P>& work, const RowState<P>& rows,
                                           int kv_begin, POperand<P>& codes) {
  constexpr unsigned kOfEachHalf = 0x6420;
#pragma unroll
  for (int keys = 0; keys < P::kBc / 16; ++keys) {
    unsigned dropped[4];
    draw_dropout(p, work, rows, kv_begin, keys, dropped);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      codes[keys / 2][keys % 2 * 2 + row] &= ~select_bytes(dropped[row], dropped[row + 2], kOfEachHalf);
  }
}

/// O = rescale O + P V, some columns after the other. A part's product is under way while the one before is
/// added.
template <class P>
__device__ __forceinline__ void add_pv(OAccumulator<P>& o, const POperand<P>& codes, unsigned v,
                                       const float (&rescale)[2]) {
  constexpr int kParts = pv_parts(P::kHeadDimV, true, true), kColumns = P::kHeadDimV / kParts,
                kBuffers = pv_parts_at_a_time(kParts, P::kWarps / 4);
  float products[kBuffers][kColumns / 2];
  const auto start = [&](int part) {
    pin(products[part % kBuffers]);
    wgmma_fence();
    P::multiply_output(products[part % kBuffers], codes, tile_descriptor(v + part * kColumns * kRowBytes, 0),
                       0);
    wgmma_commit();
  };
  const auto add = [&](int part) {
    float(&product)[kColumns / 2] = products[part % kBuffers];
    pin(product);
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) {
      float& sum = o[part * kColumns / 2 + n];
      sum = fmaf(sum, rescale[n / 2 % 2], product[n]);
    }
  };
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    start(part);
    if (part + 1 < kBuffers) continue;
    wgmma_wait<kBuffers - 1>();
    add(part + 1 - kBuffers);
  }
  if (kBuffers > 1) wgmma_wait<0>();
#pragma unroll
  for (int part = kParts + 1 - kBuffers; part < kParts; ++part) add(part);
}

// How O = rescale O + P V of a KV tile is found; PvSum<P> names one of these types.

/// The tensor cores sum up one KV tile, and registers all.
template <class P>
struct SumOfTile {
  static __device__ __forceinline__ void add(OAccumulator<P>& o, const POperand<P>& codes, unsigned v,
                                             const float (&rescale)[2]) {
    add_pv<P>(o, codes, v, rescale);
  }
};
/// The tensor cores sum up all of a work tile's.
template <class P>
struct SumOfAll {
  static __device__ __forceinline__ void add(OAccumulator<P>& o, const POperand<P>& codes, unsigned v,
                                             const float (&rescale)[2]) {
    rescale_o<P>(o, rescale);
    pin(o);
    wgmma_fence();
    P::multiply_output(o, codes, tile_descriptor(v, 0), 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
  }
};
template <class P>
using PvSum = Conditional<kSumsTiles<P>, SumOfAll<P>, SumOfTile<P>>;

/// Whether a warpgroup's turn ends when it has P, and not when S has started: then one's softmax runs beside
/// the other's products. Three warpgroups have too little time for such turns above 64 columns.
/// NOTES.md#products-of-8-bits
template <class P>
constexpr bool kTurnEndsWithP = P::kWarps / 4 == 2 || P::kHeadDim <= 64;

/// Computes a consumer warpgroup's rows of O, work tile after work tile.
template <class P>
__device__ __forceinline__ void consume_codes(const Params& p, const TensorMaps& maps,
                                              const ForwardStorage<P>& smem, int wg) {
  using Storage = ForwardStorage<P>;
  int n = 0;
  if (wg == Storage::kWarpgroups - 1) ping_pong_arrive(smem, wg);
#pragma unroll 1
  for (int round = 0;; ++round) {
    QRing<P>::wait_full(smem, wg, round);
    const WorkTile<P>& work = smem.work(round);
    if (work.h < 0) break;
    int i = work.count() - 1, entry = 0;
    if (kSplitTailWave<P> && wg >= work.warpgroups) {  // it has no rows of this one
      QRing<P>::release(smem, wg, round);
      skip_tiles(smem, n, wg, round, i);
      break;
    }
    if (kConsumersReadList<P>) entry = work.kv_tiles.entry(i);
    RowState<P> rows;
    rows.begin(p, work, wg);
    OAccumulator<P> o = {};
    float rescale[2], scale[2];
#pragma unroll 1
    for (; i >= 0; --i, ++n) {
      int kv_begin;
      bool full;
      unsigned bias = 0;
      const auto fill = [&](auto how) { fill_bias(p, maps, smem, work, n, i, wg, bias, how); };
      fill([](const auto& warp_rows) { warp_rows.start(); });
      wait_k(smem, n, false);
      ping_pong_wait(smem, wg);
      SAccumulator<P> s;
      start_qk<P>(s, tile_descriptor(smem.q(wg, round), 0), tile_descriptor(smem.k(n), 0));  // S = Q K^T
      if (!kTurnEndsWithP<P>) ping_pong_arrive(smem, wg);
      find_tile(p, smem, work, rows, n, i, wg, kv_begin, full, entry);
      fill([](const auto& warp_rows) { warp_rows.finish(); });
      wgmma_wait<0>();
      pin(s);
      if constexpr (kKeyFactors<P>)
        rows.factors = smem.key_scales(n) + threadIdx.x % 4 * 2;
      else
        release_k(smem, n, wg, round, i == 0);
      wait_terms(smem, n);
      scale_products(rows, rows, s);
      ScoreStage<P>::apply(p, rows, kv_begin, bias, smem.column_terms(n) + threadIdx.x % 4 * 2, s);
      release_terms(smem, n);
      add_log_of_v_scales<P>(rows, s);
      online_softmax<ScoreMask<P>>(p, work, rows, kv_begin, full, false, s, rescale);  // P = exp2(S - m)
      if constexpr (kKeyFactors<P>) release_k(smem, n, wg, round, i == 0);
      POperand<P> codes;
      pack_codes<P>(codes, s);
      if (kTurnEndsWithP<P>) ping_pong_arrive(smem, wg);
      if constexpr (P::kDropout) drop_codes(p, work, rows, kv_begin, codes);
      VRing<P>::wait_full(smem, n);
      PvSum<P>::add(o, codes, smem.v(n), rescale);  // O = exp2(m before - m) O + P V
      VRing<P>::release(smem, n);
    }
    if (Storage::kQStages == 2) QRing<P>::release(smem, wg, round);
    RunningState<P> state;
    finalize_rows(p, work, rows, wg, scale, state);     // LSE = m + log(l)
    store_o(p, maps, smem, work, wg, state, scale, o);  // O / l
  }
  if (kTmaStoresO<P> && elected()) bulk_wait_read();  // before the next CTA gets this shared memory
  if (wg == 0) ping_pong_wait(smem, wg);              // the last arrival, which no other warpgroup waits for
}

template <class P>
struct QuantizedConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const ForwardStorage<P>& smem, int wg) {
    consume_codes(p, maps, smem, wg);
  }
};

}  // namespace flashjit::sm90
