// Products of 8 bits, where the tensor cores may sum P V over several KV tiles (kSumsTiles), in
// FlashAttention-3's order: S of the next KV tile and P V start together, and the softmax of S runs beside P
// V. The tensor cores' sums have about 14 bits, so their error grows with the number of tiles; SumsOfTiles
// bounds it.
#pragma once

#include "flashjit/sm90/forward_codes.cuh"

namespace flashjit::sm90 {

// How P V of a work tile's KV tiles are summed; PvSums<P> names one of these types. `accumulators` are the
// tensor cores', `adds` whether the next product adds to them.

/// All by the tensor cores: O is their accumulators.
template <class P>
struct SumOfAllTiles {
  OAccumulator<P> accumulators = {};
  int adds = 0;

  /// After a product: O *= exp2(m before - m).
  __device__ __forceinline__ void rescale(const float (&by)[2]) { rescale_o<P>(accumulators, by); }
  /// After the last one.
  __device__ __forceinline__ OAccumulator<P>& finish() { return accumulators; }
};
/// kTiles by the tensor cores, and their sums in fp32. O waits for its factors until it is added to.
template <class P, int kTiles>
struct SumsOfTiles {
  OAccumulator<P> accumulators = {}, o = {};
  float pending[2] = {1.0f, 1.0f};
  int adds = 0, summed = 0;

  __device__ __forceinline__ void rescale(const float (&by)[2]) {
    if (++summed == kTiles) {
      add();
      pending[0] = by[0], pending[1] = by[1];
      summed = adds = 0;
    } else {
      rescale_o<P>(accumulators, by);
      pending[0] *= by[0], pending[1] *= by[1];
    }
  }
  __device__ __forceinline__ OAccumulator<P>& finish() {
    add();
    return o;
  }

 private:
  __device__ __forceinline__ void add() {
#pragma unroll
    for (int n = 0; n < kOwnColumns<P> / 2; ++n) o[n] = fmaf(o[n], pending[n / 2 % 2], accumulators[n]);
  }
};
template <class P>
using PvSums = Conditional<P::kSumsAll, SumOfAllTiles<P>, SumsOfTiles<P, 4>>;

/// Computes a consumer warpgroup's rows of O, work tile after work tile.
template <class P>
struct SummingConsumer {
  using Storage = ForwardStorage<P>;
  static_assert(!P::kHasScore && !P::kDropout && !P::kKeyScales);

  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps, const Storage& smem,
                                             int wg) {
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
      PvSums<P> sums;
      SAccumulator<P> s;
      POperand<P> codes;
      float rescale[2], scale[2];
      if (i >= 0) {
        start_s(smem, n, wg, round, s);
        weigh<0>(p, smem, work, rows, n, i, wg, round, entry, s, rescale);
        pack_codes<P>(codes, s);
        ++n;
#pragma unroll 1
        for (--i; i >= 0; --i, ++n) {
          start_s(smem, n, wg, round, s);      // S = Q K^T
          start_pv(smem, n - 1, codes, sums);  // O += P V of the KV tile before
          weigh<1>(p, smem, work, rows, n, i, wg, round, entry, s, rescale);  // P = exp2(S - m)
          finish_before_wait(rows.sum[0] + rows.sum[1], smem.base);
          end_pv(smem, n - 1, sums);
          sums.rescale(rescale);  // O *= exp2(m before - m)
          pack_codes<P>(codes, s);
        }
        start_pv(smem, n - 1, codes, sums);
        end_pv(smem, n - 1, sums);
      }
      if (Storage::kQStages == 2) QRing<P>::release(smem, wg, round);
      RunningState<P> state;
      finalize_rows(p, work, rows, wg, scale, state);                 // LSE = m + log(l)
      store_o(p, maps, smem, work, wg, state, scale, sums.finish());  // O / l
    }
    if (kTmaStoresO<P> && elected()) bulk_wait_read();  // before the next CTA gets this shared memory
    if (wg == 0) ping_pong_wait(smem, wg);  // the last arrival, which no other warpgroup waits for
  }

 private:
  static __device__ __forceinline__ void start_s(const Storage& smem, int n, int wg, int round,
                                                 SAccumulator<P>& s) {
    wait_k(smem, n, false);
    ping_pong_wait(smem, wg);
    start_qk<P>(s, tile_descriptor(smem.q(wg, round), 0), tile_descriptor(smem.k(n), 0));
  }
  static __device__ __forceinline__ void start_pv(const Storage& smem, int n, const POperand<P>& codes,
                                                  PvSums<P>& sums) {
    VRing<P>::wait_full(smem, n);
    pin(sums.accumulators);
    wgmma_fence();
    P::multiply_output(sums.accumulators, codes, tile_descriptor(smem.v(n), 0), sums.adds);
    wgmma_commit();
    sums.adds = 1;
  }
  static __device__ __forceinline__ void end_pv(const Storage& smem, int n, PvSums<P>& sums) {
    wgmma_wait<0>();
    pin(sums.accumulators);
    VRing<P>::release(smem, n);
  }
  /// Waits for S, while kUnderWay products that started later run, ends the warpgroup's turn, releases K, and
  /// makes P of S. NOTES.md#sums-in-the-tensor-cores
  template <int kUnderWay>
  static __device__ __forceinline__ void weigh(const Params& p, const Storage& smem, const WorkTile<P>& work,
                                               RowState<P>& rows, int n, int i, int wg, int round, int& entry,
                                               SAccumulator<P>& s, float (&rescale)[2]) {
    int kv_begin;
    bool full;
    find_tile(p, smem, work, rows, n, i, wg, kv_begin, full, entry);
    wgmma_wait<kUnderWay>();
    pin(s);
    ping_pong_arrive(smem, wg);
    release_k(smem, n, wg, round, i == 0);
    scale_products(rows, rows, s);
    online_softmax<ScoreMask<P>>(p, work, rows, kv_begin, full, false, s, rescale);
  }
};

/// The main loop where Q, K and V are of 8 bits.
template <class P>
using CodeConsumer =
    Conditional<kSumsTiles<P> && overlaps_sums(P::kHeadDimV), SummingConsumer<P>, QuantizedConsumer<P>>;

}  // namespace flashjit::sm90
