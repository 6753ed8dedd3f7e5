// Up to eight rows of Q over K and V in 4 or 8 bits: codes become operands in registers, and no tile of
// elements is written. A warp has sixteen keys of a KV tile: S^T = K Q^T and O^T += V^T P^T by mma.sync,
// whose left operand has keys, or columns of V, as rows. Warps have a softmax of their own each, and join
// their O at a work tile's end. few_rows_codes.cuh has the operands. NOTES.md#codes-as-operands
#pragma once

#include "flashjit/sm90/few_rows_codes.cuh"
#include "flashjit/sm90/forward_mainloop.cuh"

namespace flashjit::sm90 {

/// What a warp has of its rows: a thread has columns of O of two of them, m, and what its own keys add to l.
template <class P>
struct FewRowsState {
  FewRowsOut<P> o;
  float max[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};

  /// S becomes P = exp2(S factor - m), and l and O follow m where it grows.
  __device__ __forceinline__ void weigh(const float (&factor)[2], float (&s)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] *= factor[i % 2];
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
    if (__any_sync(kWholeWarp, top[0] > max[0] || top[1] > max[1])) raise(top);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float m = max[i % 2];
      s[i] = exp2_approx(s[i] - (m == -infinity() ? 0.0f : m));
      sum[i % 2] += s[i];
    }
  }

 private:
  __device__ __forceinline__ void raise(float (&top)[2]) {
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        top[i] = fmaxf(top[i], __shfl_xor_sync(kWholeWarp, top[i], lanes));
      const float highest = fmaxf(max[i], top[i]);
      rescale[i] = highest == -infinity() ? 1.0f : exp2_approx(max[i] - highest);
      max[i] = highest;
      sum[i] *= rescale[i];
    }
    o.rescale(rescale);
  }
};

// --- The end of a work tile -------------------------------------------------------------------------------

/// How many warps leave what they have of their rows at a time; with fewer than all, the last ones' is added
/// to the others'.
template <class P>
constexpr int kFewRowsParts = few_rows_parts(kForwardLayout<P>.code_slot_bytes());

/// What a warp leaves of its rows for the others.
template <class P>
struct FewRowsPart {
  float o[kFewRows][few_rows_pitch(P::kHeadDimV)];
  float max[kFewRows], sum[kFewRows];

  /// Adds what another warp has left to a warp's own.
  __device__ __forceinline__ void add_to(FewRowsState<P>& rows) const {
    const int lane = opaque(static_cast<int>(threadIdx.x) % 32), row = lane % 4 * 2;
    float own[2], other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float highest = fmaxf(rows.max[i], max[row + i]);
      own[i] = highest == -infinity() ? 1.0f : exp2_approx(rows.max[i] - highest);
      other[i] = highest == -infinity() ? 0.0f : exp2_approx(max[row + i] - highest);
      rows.max[i] = highest;
      rows.sum[i] = rows.sum[i] * own[i] + (lane < 4 ? sum[row + i] * other[i] : 0.0f);
    }
    rows.o.rescale(own);
    rows.o.add([&](int of_thread, int column) {
      const float2 two = *reinterpret_cast<const float2*>(&o[row + of_thread][column]);
      return float2{two.x * other[of_thread], two.y * other[of_thread]};
    });
    __syncwarp();  // before put()
  }
  __device__ __forceinline__ void put(FewRowsState<P>& rows) {
    const int lane = opaque(static_cast<int>(threadIdx.x) % 32), row = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        rows.sum[i] += __shfl_xor_sync(kWholeWarp, rows.sum[i], lanes);
      if (lane < 4) max[row + i] = rows.max[i], sum[row + i] = rows.sum[i];
    }
    rows.o.for_each_pair([&](int of_thread, int column, float x, float y) {
      *reinterpret_cast<float2*>(&o[row + of_thread][column]) = float2{x, y};
    });
  }
};

/// Joins the warps' parts of a row, and writes O and LSE. By 64 threads, two columns each.
template <class P>
__device__ __forceinline__ void join_row(const Params& p, const WorkTile<P>& work,
                                         const FewRowsPart<P>* parts, int row, float v_scale) {
  static_assert(P::kHeadDimV == 128);
  const int column = static_cast<int>(threadIdx.x) % 64 * 2;
  const RowCoord target = row_coord(p, work, 0, row);
  if (target.q < 0) return;
  float max = -infinity(), sum = 0.0f;
  float2 o{0.0f, 0.0f};
#pragma unroll
  for (int part = 0; part < kFewRowsParts<P>; ++part) max = fmaxf(max, parts[part].max[row]);
#pragma unroll
  for (int part = 0; part < kFewRowsParts<P>; ++part) {
    const float factor = parts[part].max[row] == -infinity() ? 0.0f : exp2_approx(parts[part].max[row] - max);
    const float2 own = *reinterpret_cast<const float2*>(&parts[part].o[row][column]);
    sum = fmaf(parts[part].sum[row], factor, sum);
    o = {fmaf(own.x, factor, o.x), fmaf(own.y, factor, o.y)};
  }
  const float lse = has_keys(sum) ? (max + log2_approx(sum)) * kLn2 : -infinity();
  const RowEnd end = work.is_whole() ? with_sink<P>(p, target.h, lse) : RowEnd{lse, 1.0f};
  const float scale = has_keys(sum) ? __fdividef(v_scale, sum) * end.factor : 0.0f;
  if (!work.is_whole()) {
    const long long at = row_of_part<P>(work.split, 0, row);
    store_pair(o_of_part<P>(p, at) + column, o.x * scale, o.y * scale);
    if (column == 0) p.lse_splits[at] = lse;
    return;
  }
  store_pair(work.sequence.template q_pointer<OutElement<P>>(p.o, target.h, target.q) + column, o.x * scale,
             o.y * scale);
  if (column == 0 && p.lse.data != nullptr)
    p.lse.data[work.sequence.lse_row(p, target.h, target.q)] = end.lse;
}

// --- The main loop ----------------------------------------------------------------------------------------

/// By each of two warpgroups: a warp has sixteen keys of each KV tile. A slot is released when its words have
/// been used, as ptxas lets an arrival pass loads before it that nothing has waited for.
template <class P>
__device__ __forceinline__ void consume_few_rows(const Params& p, const ForwardStorage<P>& smem, int wg) {
  static_assert(P::kBc == kFewRowsKeys && kFewRowsKeys == kFewRowsWarps * 16);
  static_assert(!kDecodesKv<P> || kForwardLayout<P>.code_slots() >= kFewestFewRowsSlots);
  const int warp = wg * 4 + __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  const int first = warp * 16;
  auto* parts = reinterpret_cast<FewRowsPart<P>*>(smem.parts());
  const auto sync = [&] { named_barrier_sync(smem.ping_pong(0), kFewRowsWarps * 32); };
  int n = 0;
#pragma unroll 1
  for (int round = 0;; ++round) {
    QRing<P>::wait_full(smem, 0, round);
    const WorkTile<P>& work = smem.work(round);
    if (work.h < 0) break;
    FewRowsOfQ<P> q;
    q.read(smem.shared + (smem.q(0, round) - smem.base));
    HeadScales<P> scales;
    scales.read(p, work);
    const float scale = scales.times_k_scale(p.softmax_scale_log2, 0);
    const float factor[2] = {scale * q.undo[0], scale * q.undo[1]};
    const int keys = work.sequence.seqused_kv(p);
    FewRowsState<P> rows;
#pragma unroll 1
    for (int i = work.count() - 1; i >= 0; --i, ++n) {
      const int left = keys - work.kv_begin(i);
      HeldK<P> k;
      HeldV<P> v;
      float s[4];
      RawKRing<P>::wait_full(smem, n);
      k.read(smem, n, first);
      multiply_keys(k, q, s);  // S^T = K Q^T
      RawVRing<P>::wait_full(smem, n);
      v.read(smem, n, first, left);
      if (left < P::kBc) {
        if (key_of_lane<P>(first, 0) >= left) s[0] = s[1] = -infinity();
        if (key_of_lane<P>(first, 1) >= left) s[2] = s[3] = -infinity();
      }
      rows.weigh(factor, s);  // P = exp2(S - m)
      RawKRing<P>::release(smem, n);
      add_values(v, s, rows.o);  // O^T += V^T P^T
      RawVRing<P>::release(smem, n);
    }
    if (kFewRowsParts<P> < kFewRowsWarps) {
      FewRowsPart<P>& part = parts[warp % kFewRowsParts<P>];
      if (warp >= kFewRowsParts<P>) part.put(rows);
      sync();
      if (warp < kFewRowsParts<P>) part.add_to(rows), part.put(rows);
    } else {
      parts[warp].put(rows);
    }
    sync();
    const float v_scale = scales.times_v_scale(1.0f);
#pragma unroll 1
    for (int row = warp / 2; row < kFewRows; row += kFewRowsWarps / 2) join_row(p, work, parts, row, v_scale);
    QRing<P>::release(smem, 0, round);
    sync();
  }
}

template <class P>
struct FewRowsConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps&,
                                             const ForwardStorage<P>& smem, int wg) {
    consume_few_rows(p, smem, wg);
  }
};

}  // namespace flashjit::sm90
