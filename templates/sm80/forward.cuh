// Forward pass with mma.sync (FlashAttention-2, algorithm 1): one thread block a Q tile, KV tiles streamed
// through shared memory by cp.async, each warp owns rows of S, P and O in registers. Where registers allow,
// P V of a tile is computed among the softmax of the next one (FlashAttention-3, section 3.2): tensor cores
// and exponentials then work at the same time within a warp, too.
#pragma once

#include "flashjit/common/dropout.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/tile_mask.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/unused_rows.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// Adds A B^T (A in `a` tile or registers; B's rows are the columns of the result) over kDim / 16 steps.
template <class Element, int kDim, int kUnroll, int kMt, int kNt, class LoadA>
__device__ __forceinline__ void multiply_transposed(float (&c)[kMt][kNt][4], unsigned b_tile,
                                                    const LoadA& load_a) {
  constexpr int kPitch = pitch(kDim);
#pragma unroll kUnroll
  for (int k = 0; k < round_up(kDim, 16) / 16; ++k) {
    unsigned a[kMt][4];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) load_a(a[mt], mt, k);
#pragma unroll
    for (int nt = 0; nt < kNt; nt += 2) {
      unsigned b[4];
      load_matrix_x4(b, b_tile + (nt * 8 * kPitch + k * 16) * 2);
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        mma_16x8x16<Element>(c[mt][nt], a[mt], b[0], b[1]);
        mma_16x8x16<Element>(c[mt][nt + 1], a[mt], b[2], b[3]);
      }
    }
  }
}

/// Packs an accumulator's columns [16k, 16k + 16) as the left operand of the next product.
template <class Element, int kNt>
__device__ __forceinline__ void as_left_operand(unsigned (&a)[4], const float (&c)[kNt][4], int k) {
  a[0] = pack<Element>(c[2 * k][0], c[2 * k][1]);
  a[1] = pack<Element>(c[2 * k][2], c[2 * k][3]);
  a[2] = pack<Element>(c[2 * k + 1][0], c[2 * k + 1][1]);
  a[3] = pack<Element>(c[2 * k + 1][2], c[2 * k + 1][3]);
}

template <class P>
__device__ void forward(const Params& p) {
  using Element = typename P::Element;
  constexpr int kThreads = P::kWarps * 32;
  constexpr int kMt = P::kBr / (16 * P::kWarps);       // m16 tiles of rows a warp owns
  constexpr int kNt = P::kBc / 8;                      // n8 tiles of S
  constexpr int kOt = round_up(P::kHeadDimV, 16) / 8;  // n8 tiles of O
  constexpr int kQSteps = round_up(P::kHeadDim, 16) / 16;
  constexpr ForwardLayout kLayout{P::kBr, P::kBc, P::kHeadDim, P::kHeadDimV, P::kStages};
  // Whether P V waits for the next softmax: if registers suffice, and not where small blocks are several a
  // multiprocessor and do without.
  constexpr int kLateRegisters =
      forward_registers(kMt, P::kBc, P::kHeadDim, P::kHeadDimV, P::kQInRegisters, true);
  constexpr bool kLateV =
      kLateRegisters <= 192 && !P::kDropout && !P::kBlockMap && (kMt > 1 || P::kWarps > 4);
  // Whether a word of bits tells which keys of a row attend. Beside a map's blocks it takes registers too
  // many.
  constexpr bool kBits = P::kMaskBounds > 0 && !P::kBlockMap;
  constexpr int kKBytes = tile_bytes(P::kBc, P::kHeadDim), kVBytes = tile_bytes(P::kBc, P::kHeadDimV);
  extern __shared__ __align__(128) char shared[];
  const unsigned q_tile = shared_address(shared) + kLayout.q();
  const unsigned k_tiles = shared_address(shared) + kLayout.k();
  const unsigned v_tiles = shared_address(shared) + kLayout.v();

  const int tile_count = q_tiles<P>(p), parts = num_splits<P>(p);
  const int part = static_cast<int>(blockIdx.x % parts);
  const unsigned index = blockIdx.x / parts;
  const int tile_index =
      tile_count - 1 - static_cast<int>(index % tile_count);  // the longest causal rows first
  const int h = static_cast<int>(index / tile_count % p.heads_q);
  const int h_kv = h / p.qhead_per_kvhead();
  const Sequence<P> sequence(p, static_cast<int>(index / tile_count / p.heads_q));
  const int seqlen_q = sequence.seqlen_q(p), seqused_kv = sequence.seqused_kv(p);
  zero_unused_rows_of_output<P>(p);
  const int q_begin = tile_index * P::kBr;
  const Range q_range = tile_range(tile_index, P::kBr, seqlen_q);
  if (P::kVarlen && q_range.begin == q_range.end) return;
  const auto head = sequence.head(p, h);
  KvTiles<P> tiles(p, head, tile_index, q_range, seqused_kv);
  if constexpr (P::kSplit) tiles.keep_split(p, part);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto warp_row = [&](int mt) { return mt * 16 * P::kWarps + warp * 16; };
  const unsigned short* k_head = sequence.kv_pointer(p.k, h_kv, 0);
  const unsigned short* v_head = sequence.kv_pointer(p.v, h_kv, 0);
  const auto load_k = [&](int i) {
    if (i >= tiles.count) return;
    const int kv = tiles.tile(i) * P::kBc;
    load_tile<P::kBc, P::kHeadDim, kThreads>(k_tiles + i % P::kStages * kKBytes, k_head + kv * p.k.stride_s,
                                             p.k.stride_s, seqused_kv - kv);
  };
  const auto load_v = [&](int i) {
    if (i < 0 || i >= tiles.count) return;
    const int kv = tiles.tile(i) * P::kBc;
    load_tile<P::kBc, P::kHeadDimV, kThreads>(v_tiles + i % P::kStages * kVBytes, v_head + kv * p.v.stride_s,
                                              p.v.stride_s, seqused_kv - kv);
  };

  load_tile<P::kBr, P::kHeadDim, kThreads>(q_tile, sequence.q_pointer(p.q, h, q_begin), p.q.stride_s,
                                           seqlen_q - q_begin);
  // Step i needs K(i), and V of the tile whose P V it computes. With one stage, V travels under Q K(i)^T and
  // K(i + 1) under what follows; with more, whole steps run ahead.
  const auto v_of = [](int i) { return kLateV ? i - 1 : i; };
  load_k(0);
  if constexpr (P::kStages > 1) load_v(v_of(0));
  copy_async_commit();
#pragma unroll
  for (int i = 1; i < P::kStages - 1; ++i) {
    load_k(i);
    load_v(v_of(i));
    copy_async_commit();
  }

  unsigned q_fragments[P::kQInRegisters ? kQSteps : 1][kMt][4];
  const unsigned q_offset = matrix_offset<true>(pitch(P::kHeadDim));
  const unsigned k_offset = matrix_offset<false>(pitch(P::kHeadDim));
  const unsigned v_offset = matrix_offset<true>(pitch(P::kHeadDimV));
  const auto load_q = [&](unsigned(&a)[4], int mt, int k) {
    load_matrix_x4(a, q_tile + q_offset + (warp_row(mt) * pitch(P::kHeadDim) + k * 16) * 2);
  };

  // Scores stay unscaled until the exponent where no score program needs their natural units.
  const float scale_log2 = score_scale_log2<P>(p);
  float o[kMt][kOt][4] = {};
  float row_max[kMt][2], row_sum[kMt][2];
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) row_max[mt][half] = -infinity(), row_sum[mt][half] = 0.0f;

  unsigned weights[kNt / 2][kMt][4];  // P as left operands of P V
  // Adds 16 columns of P times 16 rows of V(i). `after` is not negative: its sign in the address makes the
  // products wait for it, else ptxas starts them all at once and no exponential runs beside them.
  const auto multiply_v = [&](int i, int k, float after) {
    const unsigned v_tile = v_tiles + i % P::kStages * kVBytes + v_offset + (__float_as_uint(after) >> 31);
#pragma unroll
    for (int ot = 0; ot < kOt; ot += 2) {
      unsigned v[4];
      load_matrix_x4_transposed(v, v_tile + (k * 16 * pitch(P::kHeadDimV) + ot * 8) * 2);
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        mma_16x8x16<Element>(o[mt][ot], weights[k][mt], v[0], v[1]);
        mma_16x8x16<Element>(o[mt][ot + 1], weights[k][mt], v[2], v[3]);
      }
    }
  };
  if constexpr (P::kQInRegisters) {
    copy_async_wait<P::kStages == 1 ? 0 : P::kStages - 2>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kQSteps; ++k)
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) load_q(q_fragments[k][mt], mt, k);
  }

  // S and the softmax of tile i, and a P V: its own, or, among the softmax, that of the tile before.
  const auto step = [&](int i, auto first) {
    copy_async_wait<P::kStages == 1 ? 0 : P::kStages - 2>();
    __syncthreads();
    if constexpr (P::kStages > 1) load_k(i + P::kStages - 1);
    load_v(v_of(i + P::kStages - 1));
    copy_async_commit();

    float s[kMt][kNt][4] = {};
    multiply_transposed<Element, P::kHeadDim, P::kQInRegisters ? kQSteps : 8>(
        s, k_tiles + i % P::kStages * kKBytes + k_offset, [&](unsigned(&a)[4], int mt, int k) {
          if constexpr (P::kQInRegisters) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[r] = q_fragments[k][mt][r];
          } else {
            load_q(a, mt, k);
          }
        });

    if constexpr (P::kStages == 1) {
      copy_async_wait<0>();
      __syncthreads();
      load_k(i + 1);
      copy_async_commit();
    }

    const int kv_begin = tiles.tile(i) * P::kBc;
    const Position q_position = position(q_begin + warp_row(0) + lane / 4);
    const Position kv_position = position(kv_begin + lane % 4 * 2);
    const auto at_q = [&](int mt, int e) { return q_position + (mt * 16 * P::kWarps + e / 2 * 8); };
    const auto at_kv = [&](int nt, int e) { return kv_position + (nt * 8 + e % 2); };
    if constexpr (P::kHasScore) {
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            s[mt][nt][e] = P::score(p, head, s[mt][nt][e], at_q(mt, e), at_kv(nt, e));
    }
    const bool unmasked = kv_begin + P::kBc <= seqused_kv && tiles.full(p, head, q_range, tiles.entry(i));
    if (!unmasked) {
      TileMask<P, P::kBc, kMt * 2> mask;
      const auto row_at = [&](int n) { return at_q(n / 2, n % 2 * 2).at; };
      mask.find(p, head, row_at, kv_begin);
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        [[maybe_unused]] unsigned attend[2][(kNt + 15) / 16];
        if constexpr (kBits) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int nt = 0; nt < kNt; nt += 16)
              attend[half][nt / 16] =
                  own_keys<P>(p, head, at_q(mt, half * 2).at, at_kv(nt, 0).at, seqused_kv);
        }
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt) {
          // The map's blocks are multiples of 16, so an m16n8 tile lies in one of them.
          bool block = true;
          if constexpr (kTestsMap<P>) {
            const int q = min(q_begin + warp_row(mt), seqlen_q - 1);
            const int kv = min(kv_begin + nt * 8, seqused_kv - 1);
            block = block_map_row<P>(p, sequence.b, h, q)[kv / P::kBlockKv] != 0;
          }
          const auto columns = mask.columns(nt * 8);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& score = s[mt][nt][e];
            if constexpr (kBits)
              score = mask_score(score, block, true, attend[e / 2][nt / 16] >> (nt % 16 * 2 + e % 2) & 1u);
            else
              score = mask_score(
                  score, block, at_kv(nt, e).at < seqused_kv,
                  mask.attends(p, head, mt * 2 + e / 2, columns, e % 2, at_q(mt, e), at_kv(nt, e)));
          }
        }
      }
    }

    // Online softmax: rows g and g + 8 of each m16 tile belong to the four lanes of a quad.
    float shift[kMt][2], rescale[kMt][2];
    bool same_max = true;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = row_max[mt][half];
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt)
          highest = fmaxf(highest, fmaxf(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
        // A row that attends to nothing so far has no maximum to subtract.
        shift[mt][half] = highest == -infinity() ? 0.0f : __fmul_rn(highest, scale_log2);
        rescale[mt][half] = row_max[mt][half] == -infinity()
                                ? 0.0f
                                : exp2_approx(__fmul_rn(row_max[mt][half], scale_log2) - shift[mt][half]);
        same_max = same_max && row_max[mt][half] == highest;
        row_max[mt][half] = highest;
        row_sum[mt][half] *= rescale[mt][half];
      }
    float exponential = 0.0f;
#pragma unroll
    for (int k = 0; k < kNt / 2; ++k) {
      if constexpr (kLateV && !first.value) multiply_v(i - 1, k, exponential);
#pragma unroll
      for (int nt = 2 * k; nt < 2 * k + 2; ++nt)
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[mt][nt][e] = exp2_approx(fmaf(s[mt][nt][e], scale_log2, -shift[mt][e / 2]));
            row_sum[mt][e / 2] += s[mt][nt][e];
          }
      exponential = s[kMt - 1][2 * k + 1][3];
      if constexpr (kLateV) {
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) as_left_operand<Element, kNt>(weights[k][mt], s[mt], k);
      }
    }
    if (!__all_sync(kWholeWarp, same_max)) {
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
        for (int ot = 0; ot < kOt; ++ot)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[mt][ot][e] *= rescale[mt][e / 2];
    }
    if constexpr (!kLateV) {
#pragma unroll
      for (int k = 0; k < kNt / 2; ++k) {
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          as_left_operand<Element, kNt>(weights[k][mt], s[mt], k);
          if constexpr (P::kDropout) {
            unsigned masks[4];
            drop_masks(masks, p, sequence.b * p.heads_q + h, at_q(mt, 0).at, at_kv(2 * k, 0).at);
#pragma unroll
            for (int r = 0; r < 4; ++r) weights[k][mt][r] &= ~masks[r];
          }
        }
        multiply_v(i, k, 0.0f);
      }
    }
  };

  if constexpr (kLateV) {
    if (tiles.count > 0) step(0, Flag<true>{});
    for (int i = 1; i < tiles.count; ++i) step(i, Flag<false>{});
    if constexpr (P::kStages == 1) {
      __syncthreads();
      load_v(tiles.count - 1);
      copy_async_commit();
    }
  } else {
    for (int i = 0; i < tiles.count; ++i) step(i, Flag<false>{});
  }
  copy_async_wait<0>();
  __syncthreads();  // every warp is done with Q before O takes its place
  if (kLateV && tiles.count > 0) {
#pragma unroll
    for (int k = 0; k < kNt / 2; ++k) multiply_v(tiles.count - 1, k, 0.0f);
  }

  char* o_tile = shared + kLayout.q();
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[mt][half];
      sum += __shfl_xor_sync(kWholeWarp, sum, 1);
      sum += __shfl_xor_sync(kWholeWarp, sum, 2);
      const int q = q_begin + warp_row(mt) + lane / 4 + half * 8;
      // The sum is relative to the rounded shift of the exponent; what rounding took is given back to the
      // LSE.
      const float highest = P::kHasScore ? row_max[mt][half] : __fmul_rn(row_max[mt][half], p.softmax_scale);
      const float shift = __fmul_rn(row_max[mt][half], scale_log2);
      const float rest = fmaf(row_max[mt][half], scale_log2, -shift);
      const float lse = sum > 0.0f ? highest + (log2f(sum) - rest) * kLn2 : -infinity();
      const RowEnd end = end_of_row<P>(p, h, lse);
      if (float* to = lse_of<P>(p, part); to != nullptr && lane % 4 == 0 && q < seqlen_q)
        to[sequence.lse_row(p, h) + q] = end.lse;
      scale[half] = sum > 0.0f ? (P::kDropout ? p.keep_scale : 1.0f) / sum * end.factor : 0.0f;
    }
    if constexpr (P::kSplit) {
#pragma unroll
      for (int n = 0; n < kOt * 4; ++n) o[mt][n / 4][n % 4] *= scale[n / 2 % 2];
      const int row = q_begin + warp_row(mt) + lane / 4;
      for (int half = 0; half < 2; ++half)
        if (row + half * 8 < seqlen_q)
          store_split<P>(p, part, sequence.lse_row(p, h) + row + half * 8, half, o[mt][0]);
    } else {
#pragma unroll
      for (int ot = 0; ot < kOt; ++ot)
        store_fragment<Element, pitch(P::kHeadDimV)>(o_tile, warp_row(mt), ot * 8, o[mt][ot], scale[0],
                                                     scale[1]);
      __syncwarp();
      const int row = warp_row(mt);
      store_tile<16, P::kHeadDimV, 32>(sequence.q_pointer(p.o, h, q_begin + row), p.o.stride_s,
                                       o_tile + row * pitch(P::kHeadDimV) * 2, seqlen_q - q_begin - row,
                                       lane);
    }
  }
}

}  // namespace flashjit::sm80
