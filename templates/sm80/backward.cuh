// Backward pass with mma.sync (FlashAttention-2, algorithm 2): one thread block a KV tile, Q tiles streamed
// through shared memory. S and dP are computed transposed, so that P^T and dS^T feed dV and dK from
// registers; only dS goes through shared memory, for dQ, which is added up in fp32 in global memory. With
// split2 two warps have the same rows: one computes S and dV, the other dP and dK, and P goes from one to the
// other. Each has twice as many rows as if it had both, so that Q and dO are read half as often, and one
// computes products while the other computes exponentials. Blocks may share the queries of a KV tile, as in
// sm90/backward.cuh.
#pragma once

#include "flashjit/common/dropout.cuh"
#include "flashjit/common/tile_mask.cuh"
#include "flashjit/common/visible.cuh"
#include "flashjit/common/wait.cuh"
#include "flashjit/sm80/dq_layout.cuh"
#include "flashjit/sm80/forward.cuh"

namespace flashjit::sm80 {

/// How the warps share the Br x head_dim tile of dQ: `rows` of them along Br, the rest along head_dim, such
/// that the operands read from shared memory are fewest.
template <class P>
constexpr int dq_warp_rows() {
  int best = 1, least = 1 << 30;
  for (int rows = 1; rows <= P::kWarps; rows *= 2) {
    if (P::kWarps % rows != 0 || P::kBr / 16 % rows != 0) continue;
    const int units = round_up(P::kHeadDim, 16) / 16, across = P::kWarps / rows;
    const int traffic = P::kBr / rows + (units + across - 1) / across * 16;
    if (traffic < least) least = traffic, best = rows;
  }
  return best;
}

/// C += A B with A from registers and B's rows along the summed dimension. The warp owns n16 units of C from
/// `first_unit` on, at most those that the array holds; kTotal are there, which the last owner's share may
/// exceed.
template <class Element, int kTotal, bool kGuard, int kMt, int kNt>
__device__ __forceinline__ void multiply_step(float (&c)[kMt][kNt][4], const unsigned (&a)[kMt][4],
                                              unsigned b_tile, int first_unit) {
#pragma unroll
  for (int unit = 0; unit < kNt / 2; ++unit) {
    if (kGuard && first_unit + unit >= kTotal) break;
    unsigned b[4];
    load_matrix_x4_transposed(b, b_tile + (first_unit + unit) * 32);
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      mma_16x8x16<Element>(c[mt][2 * unit], a[mt], b[0], b[1]);
      mma_16x8x16<Element>(c[mt][2 * unit + 1], a[mt], b[2], b[3]);
    }
  }
}

template <bool kFirst, class A, class B>
__device__ __forceinline__ auto& either(A& first, B& second) {
  if constexpr (kFirst)
    return first;
  else
    return second;
}

/// The number of this block's work. With ordered additions work is numbered as it starts: whoever waits for
/// its turn waits for a block that already runs. Uses the first word of shared memory.
template <class P>
__device__ __forceinline__ unsigned next_work(const Params& p, char* shared) {
  unsigned work = blockIdx.x;
  if constexpr (P::kDeterministic) {
    // Without queries nobody waits, and nobody has cleared the counter.
    int* next = reinterpret_cast<int*>(shared);
    if (threadIdx.x == 0)
      *next = p.seqlen_q > 0 ? atomicAdd(kv_tile_counter(p), 1) : static_cast<int>(blockIdx.x);
    __syncthreads();
    work = static_cast<unsigned>(*next);
    __syncthreads();
  }
  return work;
}

template <class P>
__device__ void backward(const Params& p) {
  using Element = typename P::Element;
  constexpr int kThreads = P::kWarps * 32;
  constexpr bool kPairs = P::kDSplit == 2;
  constexpr int kRowWarps = P::kWarps / P::kDSplit;  // warps along the KV rows
  constexpr int kMt = P::kBc / (16 * kRowWarps);     // m16 tiles of KV rows a warp owns
  constexpr int kNt = P::kBr / 8;                    // n8 tiles of queries
  constexpr int kDUnits = round_up(P::kHeadDim, 16) / 16;
  constexpr int kDvUnits = round_up(P::kHeadDimV, 16) / 16;
  constexpr int kDqRowWarps = dq_warp_rows<P>();
  constexpr int kDqColumnWarps = P::kWarps / kDqRowWarps;
  constexpr int kDqMt = P::kBr / 16 / kDqRowWarps;
  constexpr int kDqUnits = (kDUnits + kDqColumnWarps - 1) / kDqColumnWarps;
  constexpr bool kGuardDq = kDqUnits * kDqColumnWarps != kDUnits;
  constexpr int kQPitch = pitch(P::kHeadDim), kVPitch = pitch(P::kHeadDimV), kDsPitch = pitch(P::kBr);
  constexpr int kExchanged = kPairs ? 1 + P::kScoreGrad + (P::kCaptureGrads > 0) : 0;
  constexpr BackwardLayout kLayout{P::kBr, P::kBc, P::kHeadDim, P::kHeadDimV, P::kStages, kExchanged};
  constexpr bool kLateDq = P::kStages > 1 && !P::kDeterministic;
  constexpr int kDsBytes = tile_bytes(P::kBc, P::kBr);
  constexpr int kQBytes = tile_bytes(P::kBr, P::kHeadDim), kDoutBytes = tile_bytes(P::kBr, P::kHeadDimV);
  extern __shared__ __align__(128) char shared[];
  const unsigned base = shared_address(shared);

  const unsigned number = next_work<P>(p, shared);
  const KvWorkTile<P> work(p, number);
  const Sequence<P> sequence(p, work.b);
  const int h_kv = work.h_kv, kv_tile = work.kv_tile, kv_begin = kv_tile * P::kBc;
  const int seqused_kv = sequence.seqused_kv(p);
  if (P::kVarlen && kv_begin >= sequence.seqlen_kv(p) &&
      (!kListedDqOrder<P> || QWalk<P>(p, sequence, work).next(p, sequence).head < 0))
    return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_warp = warp % kRowWarps;
  const bool has_p = !kPairs || warp < kRowWarps, has_ds = !kPairs || warp >= kRowWarps;
  const auto warp_row = [&](int mt) { return (row_warp * kMt + mt) * 16; };

  load_tile<P::kBc, P::kHeadDim, kThreads>(base + kLayout.k(), sequence.kv_pointer(p.k, h_kv, kv_begin),
                                           p.k.stride_s, seqused_kv - kv_begin);
  load_tile<P::kBc, P::kHeadDimV, kThreads>(base + kLayout.v(), sequence.kv_pointer(p.v, h_kv, kv_begin),
                                            p.v.stride_s, seqused_kv - kv_begin);

  // What a stage holds loading says in shared memory.
  StagedTile* staged = reinterpret_cast<StagedTile*>(shared + kLayout.staged());
  QWalk<P> walk(p, sequence, work);
  const auto load_next = [&](int slot) {
    StagedTile next = walk.next(p, sequence);
    if (kv_begin + P::kBc > seqused_kv) next.full = 0;  // asked here, the loop has a register more
    if (threadIdx.x == 0) staged[slot] = next;
    if (next.head >= 0) {
      const int h = next.head, q = next.tile * P::kBr, valid = sequence.seqlen_q(p) - q;
      load_tile<P::kBr, P::kHeadDim, kThreads>(base + kLayout.q() + slot * kQBytes,
                                               sequence.q_pointer(p.q, h, q), p.q.stride_s, valid);
      load_tile<P::kBr, P::kHeadDimV, kThreads>(base + kLayout.dout() + slot * kDoutBytes,
                                                sequence.q_pointer(p.dout, h, q), p.dout.stride_s, valid);
      const long long row = sequence.stats_row(p, h) + q;
      static_assert(P::kBr / 2 <= kThreads, "one thread for each four rows of LSE and of D");
      if (threadIdx.x < P::kBr / 2) {
        const bool first = threadIdx.x < P::kBr / 4;
        const int part = static_cast<int>(threadIdx.x) % (P::kBr / 4) * 4;
        copy_async_16(base + (first ? kLayout.lse() : kLayout.d()) + (slot * P::kBr + part) * 4,
                      (first ? p.lse_log2 : p.d) + row + part, true);
      }
    }
    copy_async_commit();
  };
#pragma unroll
  for (int slot = 0; slot < (P::kStages > 1 ? P::kStages - 1 : 1); ++slot) load_next(slot);

  const unsigned k_rows = base + kLayout.k() + matrix_offset<true>(kQPitch);
  const unsigned v_rows = base + kLayout.v() + matrix_offset<true>(kVPitch);
  const float scale_log2 = score_scale_log2<P>(p);
  constexpr int kUnits = kPairs ? larger(kDUnits, kDvUnits) : kDvUnits;
  float dv[kMt][2 * kUnits][4] = {};  // of a pair the second warp's dK
  float dk_of_one[kPairs ? 1 : kMt][kPairs ? 2 : 2 * kDUnits][4] = {};
  auto& dk = either<kPairs>(dv, dk_of_one);

  // From the first warp of a pair to the second, each lane's values to the same lane.
  const auto exchanged = [&](int which, int mt, int nt) {
    return reinterpret_cast<float4*>(shared + kLayout.exchange()) +
           ((which * kMt + mt) * kNt + nt) * kRowWarps * 32 + row_warp * 32 + lane;
  };
  const auto hand_over = [&](int which, const float(&values)[kMt][kNt][4]) {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
      for (int nt = 0; nt < kNt; ++nt) {
        const float(&of)[4] = values[mt][nt];
        *exchanged(which, mt, nt) = {of[0], of[1], of[2], of[3]};
      }
  };
  const auto take_over = [&](int which, int mt, int nt, float(&to)[4]) {
    const float4 of = *exchanged(which, mt, nt);
    to[0] = of.x, to[1] = of.y, to[2] = of.z, to[3] = of.w;
  };

  const auto ds_place = [&](int buffer) { return kLayout.ds() + buffer * kDsBytes; };
  // Adds a tile's dS K to dQ.
  const auto add_to_dq_of = [&](const StagedTile& of, int buffer) {
    // dQ = dS K. dS lies transposed, as [KV row][query].
    const int dq_row = warp / kDqColumnWarps * kDqMt * 16, dq_unit = warp % kDqColumnWarps * kDqUnits;
    float dq[kDqMt][2 * kDqUnits][4] = {};
    const unsigned ds_offset = base + ds_place(buffer) + matrix_offset<false>(kDsPitch) + dq_row * 2;
    const unsigned k_columns = base + kLayout.k() + matrix_offset<true>(kQPitch);
#pragma unroll
    for (int k = 0; k < P::kBc / 16; ++k) {
      unsigned a[kDqMt][4];
#pragma unroll
      for (int mt = 0; mt < kDqMt; ++mt)
        load_matrix_x4_transposed(a[mt], ds_offset + (k * 16 * kDsPitch + mt * 16) * 2);
      multiply_step<Element, kDUnits, kGuardDq>(dq, a, k_columns + k * 16 * kQPitch * 2, dq_unit);
    }
    int* turn = nullptr;
    if constexpr (P::kDeterministic) {
      turn = dq_semaphore<P>(p, sequence.b, of.head, of.tile);
      if (threadIdx.x == 0) wait_semaphore<P, 64>(turn, of.dq_order);
      __syncthreads();
    }
    float* accumulator = p.dq_accum + (sequence.stats_row(p, of.head) + of.tile * P::kBr) * (kDUnits * 16);
#pragma unroll
    for (int mt = 0; mt < kDqMt; ++mt)
#pragma unroll
      for (int unit = 0; unit < kDqUnits; ++unit) {
        if (kGuardDq && dq_unit + unit >= kDUnits) break;
        // Unit by unit a lane's four values of a row stand together: dq_layout.cuh.
        float* at = accumulator + (dq_row + mt * 16 + lane / 4) * (kDUnits * 16) + (dq_unit + unit) * 16 +
                    lane % 4 * 4;
        const float(&left)[4] = dq[mt][2 * unit];
        const float(&right)[4] = dq[mt][2 * unit + 1];
        add_four(at, left[0], left[1], right[0], right[1]);
        add_four(at + 8 * kDUnits * 16, left[2], left[3], right[2], right[3]);
      }
    if constexpr (P::kDeterministic) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) atomicAdd(turn, 1);
    }
  };

  // With more stages than one dQ of a tile comes a step late: then a step has one barrier, and a warp that
  // would wait for another's P has work.
  StagedTile last{-1, 0, 0, 0};
  int buffer = 0;
  const auto add_last = [&] {
    if (kLateDq && last.head >= 0) add_to_dq_of(last, buffer ^ 1);
  };
  for (int slot = 0;; slot = slot + 1 < P::kStages ? slot + 1 : 0) {
    copy_async_wait<P::kStages == 1 ? 0 : P::kStages - 2>();
    __syncthreads();
    const StagedTile tile = staged[slot];
    if (tile.head < 0) break;
    if constexpr (P::kStages > 1) load_next(slot > 0 ? slot - 1 : P::kStages - 1);
    const int h = tile.head, q_begin = tile.tile * P::kBr;
    const unsigned q_tile = base + kLayout.q() + slot * kQBytes;
    const unsigned dout_tile = base + kLayout.dout() + slot * kDoutBytes;
    const float* lse = reinterpret_cast<const float*>(shared + kLayout.lse()) + slot * P::kBr;
    const float* row_d = reinterpret_cast<const float*>(shared + kLayout.d()) + slot * P::kBr;
    const Position q_position = position(q_begin + lane % 4 * 2);
    const Position kv_position = position(kv_begin + warp_row(0) + lane / 4);
    const auto at_q = [&](int nt, int e) { return q_position + (nt * 8 + e % 2); };
    const auto at_kv = [&](int mt, int e) { return kv_position + (mt * 16 + e / 2 * 8); };
    [[maybe_unused]] const auto head = sequence.head(p, h);

    float s[kMt][kNt][4];  // S^T, then P^T
    // What the gradients want.
    [[maybe_unused]] float slope[P::kScoreGrad ? kMt : 1][P::kScoreGrad ? kNt : 1][4];
    [[maybe_unused]] float dots[P::kCaptureGrads > 0 ? kMt : 1][P::kCaptureGrads > 0 ? kNt : 1][4];
    if (has_p) {
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
          for (float& value : s[mt][nt]) value = 0.0f;
      multiply_transposed<Element, P::kHeadDim, 2>(
          s, q_tile + matrix_offset<false>(kQPitch), [&](unsigned(&a)[4], int mt, int k) {
            load_matrix_x4(a, k_rows + (warp_row(mt) * kQPitch + k * 16) * 2);
          });
      if constexpr (P::kHasScore) {
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
          for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float dot = s[mt][nt][e];
              if constexpr (P::kScoreGrad)
                slope[mt][nt][e] = P::score_grad(p, head, dot, at_q(nt, e), at_kv(mt, e));
              if constexpr (P::kCaptureGrads > 0) dots[mt][nt][e] = dot;
              s[mt][nt][e] = P::score(p, head, dot, at_q(nt, e), at_kv(mt, e));
            }
      }
      if (tile.full == 0) {
        TileMask<P, P::kBr, kMt * 2> mask;
        const auto row_at = [&](int n) { return at_kv(n / 2, n % 2 * 2).at; };
        mask.find(p, head, row_at, q_begin);
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
          for (int nt = 0; nt < kNt; ++nt) {
            bool block = true;
            if constexpr (kTestsMap<P>) {
              const int q = min(q_begin + nt * 8, sequence.seqlen_q(p) - 1);
              const int kv = min(kv_begin + warp_row(mt), seqused_kv - 1);
              block = block_map_row<P>(p, sequence.b, h, q)[kv / P::kBlockKv] != 0;
            }
            const auto columns = mask.columns(nt * 8);
#pragma unroll
            for (int e = 0; e < 4; ++e)
              s[mt][nt][e] = mask_score(
                  s[mt][nt][e], block, at_kv(mt, e).at < seqused_kv,
                  mask.attends(p, head, mt * 2 + e / 2, columns, e % 2, at_q(nt, e), at_kv(mt, e)));
          }
      }
#pragma unroll
      for (int nt = 0; nt < kNt; ++nt) {
        const float2 row_lse = *reinterpret_cast<const float2*>(lse + nt * 8 + lane % 4 * 2);
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            s[mt][nt][e] = exp2_approx(fmaf(s[mt][nt][e], scale_log2, e % 2 ? -row_lse.y : -row_lse.x));
      }

      // P is never negative: its sign says that dropout drops the pair.
      if constexpr (P::kDropout) {
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
          for (int nt = 0; nt < kNt; nt += 2) {
            const Philox4 drawn =
                draw_transposed(p, sequence.b * p.heads_q + h, at_q(nt, 0).at, at_kv(mt, 0).at);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              float& value = s[mt][nt + i / 4][i % 4];
              if (is_dropped(drawn.word[i / 2], i % 2)) value = -value;
            }
          }
      }
      if constexpr (kPairs) {
        hand_over(0, s);
        if constexpr (P::kScoreGrad) hand_over(1, slope);
        if constexpr (P::kCaptureGrads > 0) hand_over(kExchanged - 1, dots);
        // racecheck does not follow arrivals, and synccheck wants one place for all who wait: see
        // tests/gpu/sanitize.sh.
        if constexpr (P::kCheckWaits)
          named_barrier_sync(1 + row_warp, 64);
        else
          named_barrier_arrive(1 + row_warp, 64);
      }
      const unsigned dout_columns = dout_tile + matrix_offset<true>(kVPitch);
#pragma unroll
      for (int k = 0; k < kNt / 2; ++k) {
        unsigned a[kMt][4];
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          as_left_operand<Element, kNt>(a[mt], s[mt], k);
          if constexpr (P::kDropout) {
#pragma unroll
            for (unsigned& pair : a[mt]) pair = without_negatives(pair);
          }
        }
        multiply_step<Element, kDvUnits, kUnits != kDvUnits>(dv, a, dout_columns + k * 16 * kVPitch * 2, 0);
      }
      if constexpr (kPairs) add_last();
    }
    if (has_ds) {
      if constexpr (kPairs) add_last();
      float dp[kMt][kNt][4] = {};  // dP^T, then dS^T
      multiply_transposed<Element, P::kHeadDimV, 2>(
          dp, dout_tile + matrix_offset<false>(kVPitch), [&](unsigned(&a)[4], int mt, int k) {
            load_matrix_x4(a, v_rows + (warp_row(mt) * kVPitch + k * 16) * 2);
          });
      if constexpr (kPairs) named_barrier_sync(1 + row_warp, 64);
      [[maybe_unused]] CaptureSums<P::kCaptureGrads, kMt * 2> sums;
#pragma unroll
      for (int nt = 0; nt < kNt; ++nt) {
        const float2 d = *reinterpret_cast<const float2*>(row_d + nt * 8 + lane % 4 * 2);
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          if constexpr (kPairs) {
            take_over(0, mt, nt, s[mt][nt]);
            if constexpr (P::kScoreGrad) take_over(1, mt, nt, slope[mt][nt]);
            if constexpr (P::kCaptureGrads > 0) take_over(kExchanged - 1, mt, nt, dots[mt][nt]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float grad = dp[mt][nt][e];
            if constexpr (P::kDropout) grad = signbit(s[mt][nt][e]) ? 0.0f : grad * p.keep_scale;
            grad = fabsf(s[mt][nt][e]) * (grad - (e % 2 ? d.y : d.x));
            if constexpr (P::kCaptureGrads > 0)
              P::add_capture_grads(p, head, grad, dots[mt][nt][e], at_q(nt, e), at_kv(mt, e),
                                   sums.of_key(mt * 2 + e / 2));
            // A slope may be anything where P is zero.
            if constexpr (P::kScoreGrad) grad = grad == 0.0f ? 0.0f : grad * slope[mt][nt][e];
            dp[mt][nt][e] = grad;
          }
          store_fragment<Element, kDsPitch>(shared + ds_place(buffer), warp_row(mt), nt * 8, dp[mt][nt], 1.0f,
                                            1.0f);
        }
      }
      sums.end();
      const unsigned q_columns = q_tile + matrix_offset<true>(kQPitch);
#pragma unroll
      for (int k = 0; k < kNt / 2; ++k) {
        unsigned a[kMt][4];
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) as_left_operand<Element, kNt>(a[mt], dp[mt], k);
        multiply_step<Element, kDUnits, kPairs && kUnits != kDUnits>(dk, a, q_columns + k * 16 * kQPitch * 2,
                                                                     0);
      }
    }
    if constexpr (!kPairs) add_last();
    if constexpr (!kLateDq) {
      __syncthreads();  // dS is complete, and with one stage Q and dO are free
      if constexpr (P::kStages == 1) load_next(0);
      add_to_dq_of(tile, 0);
    }
    last = tile;
    buffer ^= kLateDq;
  }
  add_last();
  copy_async_wait<0>();
  const float v_scale = P::kDropout ? p.keep_scale : 1.0f;
  const auto work_again = [&] { return KvWorkTile<P>(p, opaque(number)); };  // else it keeps registers
  if constexpr (P::kSplit) {
    const KvWorkTile<P> done = work_again();
    const int begin = done.kv_tile * P::kBc, valid = sequence.seqlen_kv(p) - begin;
    const auto store = [&]<int kChunks>(float* parts, int mt, float(&c)[kChunks][4], int columns,
                                        float scale) {
#pragma unroll
      for (int n = 0; n < kChunks * 4; ++n) c[n / 4][n % 4] *= scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row(mt) + lane / 4 + half * 8;
        if (row >= valid) continue;
        const long long at = kv_row_of_split(p, done.part, sequence.b, done.h_kv, begin + row);
        store_row<kChunks>(parts + at * columns, half, c[0], columns / 8);
      }
    };
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      if (has_ds) store(p.dk_splits, mt, dk[mt], P::kHeadDim, p.softmax_scale);
      if (has_p) store(p.dv_splits, mt, dv[mt], P::kHeadDimV, v_scale);
    }
    return;
  }
  __syncthreads();  // K and V are free: dK and dV take their place

#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int n = 0; has_ds && n < 2 * kDUnits; ++n)
      store_fragment<Element, kQPitch>(shared + kLayout.k(), warp_row(mt), n * 8, dk[mt][n], p.softmax_scale,
                                       p.softmax_scale);
#pragma unroll
    for (int n = 0; has_p && n < 2 * kDvUnits; ++n)
      store_fragment<Element, kVPitch>(shared + kLayout.v(), warp_row(mt), n * 8, dv[mt][n], v_scale,
                                       v_scale);
  }
  __syncthreads();
  const KvWorkTile<P> done = work_again();
  const int begin = done.kv_tile * P::kBc, valid = sequence.seqlen_kv(p) - begin;
  store_tile<P::kBc, P::kHeadDim, kThreads>(sequence.kv_pointer(p.dk, done.h_kv, begin), p.dk.stride_s,
                                            shared + kLayout.k(), valid, threadIdx.x);
  store_tile<P::kBc, P::kHeadDimV, kThreads>(sequence.kv_pointer(p.dv, done.h_kv, begin), p.dv.stride_s,
                                             shared + kLayout.v(), valid, threadIdx.x);
}

}  // namespace flashjit::sm80
