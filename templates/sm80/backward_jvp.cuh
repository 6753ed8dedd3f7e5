// Tangents of dQ, dK and dV by mma.sync: the derivative of the backward pass (common/gradient_tangents.cuh).
// A warp has 16 rows of a tile, whose products with a few columns at a time it multiplies on. One kernel has
// tiles of Q as rows. It goes over the keys twice: for D, LSE' and D', which it also stores, and for dQ'.
// Another has tiles of K and V as rows, reads them and computes dK' and dV'.
#pragma once

#include "flashjit/common/capture_grads.cuh"
#include "flashjit/common/dropout.cuh"
#include "flashjit/common/gradient_tangents.cuh"
#include "flashjit/common/tile_class.cuh"
#include "flashjit/common/unused_rows.cuh"
#include "flashjit/sm80/forward_lse.cuh"
#include "flashjit/sm80/instructions.cuh"
#include "flashjit/sm80/products.cuh"

namespace flashjit::sm80 {

template <class P>
constexpr BackwardJvpLayout kBackwardJvpLayout{P::kBr, P::kHeadDim, P::kHeadDimV};

/// The rows or columns of a tile of pairs: Q and dO, or K and V, each followed by its tangent, in shared
/// memory.
template <class P>
struct TangentOperands {
  static constexpr int kXBytes = tile_bytes(P::kBr, P::kHeadDim), kYBytes = tile_bytes(P::kBr, P::kHeadDimV);
  unsigned x, y;
  bool has_x_tangent, has_y_tangent;  ///< else zeros

  __device__ __forceinline__ TangentOperands(unsigned memory, const TensorParam& x_tangent,
                                             const TensorParam& y_tangent)
      : x(memory),
        y(memory + 2 * kXBytes),
        has_x_tangent(x_tangent.data != nullptr),
        has_y_tangent(y_tangent.data != nullptr) {}

  /// Starts copying; `pointer(tensor)` is a tensor's first row; `valid` rows exist.
  template <class Pointer>
  __device__ __forceinline__ void load(const TensorParam& x_from, const TensorParam& x_tangent,
                                       const TensorParam& y_from, const TensorParam& y_tangent, int valid,
                                       const Pointer& pointer) const {
    constexpr int kThreads = P::kWarps * 32;
    const auto tangent = [&](const TensorParam& tensor) { return tensor.data ? pointer(tensor) : nullptr; };
    load_with_tangent<P, P::kBr, P::kHeadDim, kThreads>(x, x + kXBytes, pointer(x_from), x_from.stride_s,
                                                        tangent(x_tangent), x_tangent.stride_s, valid);
    load_with_tangent<P, P::kBr, P::kHeadDimV, kThreads>(y, y + kYBytes, pointer(y_from), y_from.stride_s,
                                                         tangent(y_tangent), y_tangent.stride_s, valid);
    P::Copies::commit();
  }
};

template <class P>
__device__ __forceinline__ void load_queries(const TangentOperands<P>& to, const BackwardJvpParams& p,
                                             const Sequence<P>& sequence, int h, int q) {
  to.load(p.q, p.q_tangent, p.dout, p.dout_tangent, sequence.seqlen_q(p) - q,
          [&](const TensorParam& tensor) { return sequence.q_pointer(tensor, h, q); });
}
template <class P>
__device__ __forceinline__ void load_keys(const TangentOperands<P>& to, const BackwardJvpParams& p,
                                          const Sequence<P>& sequence, int h_kv, int kv) {
  to.load(p.k, p.k_tangent, p.v, p.v_tangent, sequence.seqused_kv(p) - kv,
          [&](const TensorParam& tensor) { return sequence.kv_pointer(tensor, h_kv, kv); });
}

/// A warp's rows times kN columns: Q K^T and dO V^T and their tangents, then P and dS and theirs.
template <int kN>
struct PairFragments {
  float x[1][kN / 8][4], x_tangent[1][kN / 8][4], y[1][kN / 8][4], y_tangent[1][kN / 8][4];
};

/// product = A B^T, tangent = A' B^T + A B'^T, of tiles of kDim columns whose tangents are `apart` bytes on.
template <class P, int kDim, int kNt>
__device__ __forceinline__ void multiply_with_tangent(float (&product)[1][kNt][4],
                                                      float (&tangent)[1][kNt][4], unsigned a, bool has_a,
                                                      unsigned b, bool has_b, int apart) {
  constexpr int kUnroll = 2;
  using Mma = typename P::Mma;
  using Element = typename P::Element;
  const auto rows = [&](unsigned tile) {
    return [tile](unsigned(&fragment)[4], int, int k) { load_matrix_x4(fragment, tile + k * 32); };
  };
#pragma unroll
  for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) product[0][nt][e] = tangent[0][nt][e] = 0.0f;
  multiply_transposed<Mma, Element, kDim, kUnroll>(product, b, rows(a));
  if (has_a) multiply_transposed<Mma, Element, kDim, kUnroll>(tangent, b, rows(a + apart));
  if (has_b) multiply_transposed<Mma, Element, kDim, kUnroll>(tangent, b + apart, rows(a));
}

template <class P, int kN>
__device__ __forceinline__ void multiply_pairs(PairFragments<kN>& pairs, const TangentOperands<P>& rows,
                                               int first_row, const TangentOperands<P>& columns,
                                               int first_column) {
  constexpr int kXPitch = pitch(P::kHeadDim), kYPitch = pitch(P::kHeadDimV);
  const auto a = [&](unsigned tile, int tile_pitch) {
    return tile + matrix_offset<true>(tile_pitch) + first_row * tile_pitch * 2;
  };
  const auto b = [&](unsigned tile, int tile_pitch) {
    return tile + matrix_offset<false>(tile_pitch) + first_column * tile_pitch * 2;
  };
  multiply_with_tangent<P, P::kHeadDim>(pairs.x, pairs.x_tangent, a(rows.x, kXPitch), rows.has_x_tangent,
                                        b(columns.x, kXPitch), columns.has_x_tangent, rows.kXBytes);
  multiply_with_tangent<P, P::kHeadDimV>(pairs.y, pairs.y_tangent, a(rows.y, kYPitch), rows.has_y_tangent,
                                         b(columns.y, kYPitch), columns.has_y_tangent, rows.kYBytes);
}

/// result += tangents B + values B', where B has kN rows from `first` on.
template <class P, int kDim, int kN, int kOt>
__device__ __forceinline__ void add_products(float (&result)[1][kOt][4],
                                             const float (&tangents)[1][kN / 8][4],
                                             const float (&values)[1][kN / 8][4], unsigned b, bool has_b,
                                             int apart, int first) {
  using Element = typename P::Element;
  const unsigned rows = b + matrix_offset<true>(pitch(kDim)) + first * pitch(kDim) * 2;
  const auto add = [&](const float(&from)[1][kN / 8][4], unsigned tile) {
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      unsigned a[1][4];
      as_left_operand<Element>(a[0], from[0], k);
      multiply_step<typename P::Mma, Element, kOt / 2, false>(result, a, tile + k * 16 * pitch(kDim) * 2, 0);
    }
  };
  add(tangents, rows);
  if (has_b) add(values, rows + apart);
}

/// Which pairs of a tile attend.
struct TileOfPairs {
  Range q, kv;
  bool any, whole;
};
template <class P>
__device__ __forceinline__ TileOfPairs tile_of_pairs(const Params& p, const typename P::Head& head, Range q,
                                                     Range kv) {
  const TileClass kind = tile_class<P>(p, head, q, kv);
  const bool ragged = q.end - q.begin < P::kBr || kv.end - kv.begin < P::kBc;
  return {q, kv, kind != TileClass::empty, kind == TileClass::full && !ragged};
}

/// The row, or the column, of a lane's value `e` of n8 tile `nt`, counted within its warp.
__device__ __forceinline__ int row_of_value(int e) { return lane_index() / 4 + e / 2 * 8; }
__device__ __forceinline__ int column_of_value(int nt, int e) {
  return nt * 8 + lane_index() % 4 * 2 + e % 2;
}

/// The pairs of a lane's values, a bit each: nt * 4 + e.
struct PairBits {
  unsigned attending, kept;  ///< kept: the attending ones that dropout leaves
};
template <class P, bool kRowsAreQueries, int kN>
__device__ __forceinline__ PairBits pair_bits(const Params& p, const typename P::Head& head,
                                              const TileOfPairs& tile, int first_row, int first_column) {
  if (tile.whole && !P::kDropout) return {~0u, ~0u};
  PairBits bits = {0, 0};
  // Not unrolled: many copies of masks and random numbers at once would spill.
#pragma unroll 1
  for (int pair = 0; pair < kN / 2; ++pair) {
    const int row = first_row + row_of_value(pair % 4),
              column = first_column + column_of_value(pair / 4, pair % 4);
    const int q = tile.q.begin + (kRowsAreQueries ? row : column);
    const int kv = tile.kv.begin + (kRowsAreQueries ? column : row);
    if (!tile.whole && !(q < tile.q.end && kv < tile.kv.end && pair_attends<P>(p, head, q, kv))) continue;
    bits.attending |= 1u << pair;
    if (P::kDropout && pair_dropped<P>(p, dropout_head<P>(p, head.b, head.h), q, kv)) continue;
    bits.kept |= 1u << pair;
  }
  return bits;
}

/// Calls f(nt, e, pair) for the pairs of a lane that attend, and none(nt, e) for the others.
template <class P, bool kRowsAreQueries, int kN, class F, class None>
__device__ __forceinline__ void for_each_pair(const PairFragments<kN>& pairs, const Params& p,
                                              const typename P::Head& head, const TileOfPairs& tile,
                                              int first_row, int first_column, const F& f, const None& none) {
  const PairBits bits = pair_bits<P, kRowsAreQueries, kN>(p, head, tile, first_row, first_column);
#pragma unroll
  for (int nt = 0; nt < kN / 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_row + row_of_value(e), column = first_column + column_of_value(nt, e);
      const int q = tile.q.begin + (kRowsAreQueries ? row : column);
      const int kv = tile.kv.begin + (kRowsAreQueries ? column : row);
      const float dropout = !P::kDropout ? 1.0f : bits.kept >> (nt * 4 + e) & 1u ? p.keep_scale : 0.0f;
      if (bits.attending >> (nt * 4 + e) & 1u)
        f(nt, e,
          PairProducts{q, kv, pairs.x[0][nt][e], pairs.x_tangent[0][nt][e], pairs.y[0][nt][e],
                       pairs.y_tangent[0][nt][e], dropout});
      else
        none(nt, e);
    }
}

/// Turns the products into P and dS, and their tangents. `row_of(nt, e)`: what the pair's query has.
template <class P, bool kRowsAreQueries, int kN, class RowOf>
__device__ __forceinline__ void apply_pair_tangents(PairFragments<kN>& pairs, const BackwardJvpParams& p,
                                                    const typename P::Head& head, const TileOfPairs& tile,
                                                    int first_row, int first_column, const RowOf& row_of) {
  [[maybe_unused]] CaptureSums<P::kCaptureGrads, kRowsAreQueries ? kN / 4 : 1> sums;
  const auto put = [&](int nt, int e, const PairTangents& found) {
    pairs.x[0][nt][e] = found.p, pairs.x_tangent[0][nt][e] = found.p_tangent;
    pairs.y[0][nt][e] = found.ds, pairs.y_tangent[0][nt][e] = found.ds_tangent;
  };
  for_each_pair<P, kRowsAreQueries>(
      pairs, p, head, tile, first_row, first_column,
      [&](int nt, int e, const PairProducts& pair) {
        // One of the two kernels adds to the gradients of captures.
        const auto add = [&](auto which, float* at, float value) {
          if (kRowsAreQueries) sums.of_key(kRowsAreQueries ? nt * 2 + e % 2 : 0)(which, at, value);
        };
        put(nt, e, pair_tangents<P>(p, head, pair, row_of(nt, e), add));
      },
      [&](int nt, int e) {
        put(nt, e, {0.0f, 0.0f, 0.0f, 0.0f});
      });
  if (kRowsAreQueries) sums.end();
}

/// Writes a warp's 16 rows from `first` on; rows from `end` on do not exist.
template <class P, int kColumns, int kOt, class RowPointer>
__device__ __forceinline__ void store_rows(const float (&result)[1][kOt][4], int first, int end,
                                           const RowPointer& row_pointer) {
  using Grad = GradElement<P>;
  const int lane = lane_index();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + lane / 4 + half * 8;
    if (row >= end) continue;
    Grad* const to = row_pointer(row);
#pragma unroll
    for (int ot = 0; ot < kOt; ++ot) {
      if (ot * 8 >= kColumns) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Grad& at = to[ot * 8 + lane % 4 * 2 + e];
        const float before = P::kAddGrads ? to_float(at) : 0.0f;
        at = from_float<Grad>(before + result[0][ot][half * 2 + e]);
      }
    }
  }
}

/// Columns that a warp multiplies at a time, beside so many of its results.
template <class P>
constexpr int columns_at_once(int results) {
  return results > 128 || P::kCaptureGrads > 0 ? 16 : 32;
}

/// Loads a tile of columns, and calls f(pairs, first) with the warp's rows times kN of them at a time, and
/// the first of these.
template <class P, int kColumns, int kN, class Load, class F>
__device__ __forceinline__ void for_columns(const TangentOperands<P>& rows, int warp_row,
                                            const TangentOperands<P>& columns, const Load& load, const F& f) {
  __syncthreads();  // the columns before have been read
  load();
  P::Copies::template wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < kColumns; first += kN) {
    PairFragments<kN> pairs;
    multiply_pairs(pairs, rows, warp_row, columns, first);
    f(pairs, first);
  }
}

/// CTAs: batch * heads_q * ceil(seqlen_q / Br).
template <class P>
__device__ void backward_jvp_dq(const BackwardJvpParams& p) {
  constexpr int kN = columns_at_once<P>(P::kHeadDim);
  static_assert(kBackwardJvpLayout<P>.bytes() == P::kSharedBytes, "what the planner counts on");
  zero_unused_rows_of_gradients<P>(p);
  extern __shared__ __align__(128) char shared[];
  const int tiles = (p.seqlen_q + P::kBr - 1) / P::kBr, cta = static_cast<int>(blockIdx.x);
  const int h = cta / tiles % p.heads_q, h_kv = h / p.qhead_per_kvhead();
  const Sequence<P> sequence(p, cta / tiles / p.heads_q);
  const auto head = sequence.head(p, h);
  const Range q_range = tile_range(cta % tiles, P::kBr, sequence.seqlen_q(p));
  if (P::kVarlen && q_range.begin == q_range.end) return;
  const int kv_end = sequence.seqused_kv(p), warp_row = warp_index() * 16;
  const TangentOperands<P> queries(shared_address(shared), p.q_tangent, p.dout_tangent);
  const TangentOperands<P> keys(shared_address(shared) + kBackwardJvpLayout<P>.side(), p.k_tangent,
                                p.v_tangent);
  load_queries(queries, p, sequence, h, q_range.begin);

  // Calls f with the products of a few columns of each tile, the tile and the first of them.
  const auto for_each_part = [&](auto&& f) {
    const Range bounds = P::kv_bounds(p, head, q_range);
    for (int kv = bounds.begin / P::kBc * P::kBc; kv < min(bounds.end, kv_end); kv += P::kBc) {
      const TileOfPairs tile = tile_of_pairs<P>(p, head, q_range, {kv, min(kv + P::kBc, kv_end)});
      if (!tile.any) continue;
      for_columns<P, P::kBc, kN>(
          queries, warp_row, keys, [&] { load_keys(keys, p, sequence, h_kv, kv); },
          [&](PairFragments<kN>& pairs, int first) { f(pairs, tile, first); });
    }
  };

  const int row = q_range.begin + warp_row + lane_index() / 4;
  const float lse[2] = {lse_or_infinity(p, sequence, h, row), lse_or_infinity(p, sequence, h, row + 8)};
  RowTangentSums sums[2];
  for_each_part([&](PairFragments<kN>& pairs, const TileOfPairs& tile, int first) {
    for_each_pair<P, true>(
        pairs, p, head, tile, warp_row, first,
        [&](int, int e, const PairProducts& pair) { sums[e / 2].template add<P>(p, head, pair, lse[e / 2]); },
        [](int, int) {});
  });
  RowTangents rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowTangentSums whole{quad_sum(sums[half].p), quad_sum(sums[half].d),
                               quad_sum(sums[half].lse_tangent), quad_sum(sums[half].d_tangent)};
    rows[half] = finish_row(lse[half], whole, p, sequence, h, row + half * 8, lane_index() % 4 == 0);
  }

  float dq[1][round_up(P::kHeadDim, 16) / 8][4] = {};
  for_each_part([&](PairFragments<kN>& pairs, const TileOfPairs& tile, int first) {
    apply_pair_tangents<P, true>(pairs, p, head, tile, warp_row, first,
                                 [&](int, int e) { return rows[e / 2]; });
    add_products<P, P::kHeadDim, kN>(dq, pairs.y_tangent, pairs.y, keys.x, keys.has_x_tangent, keys.kXBytes,
                                     first);
  });
  P::Copies::template wait<0>();
  store_rows<P, P::kHeadDim>(dq, q_range.begin + warp_row, q_range.end,
                             [&](int q) { return sequence.template q_pointer<GradElement<P>>(p.dq, h, q); });
}

/// CTAs: batch * heads_kv * ceil(seqlen_kv / Bc), after backward_jvp_dq.
template <class P>
__device__ void backward_jvp_dkdv(const BackwardJvpParams& p) {
  constexpr int kN = columns_at_once<P>(P::kHeadDim + P::kHeadDimV);
  extern __shared__ __align__(128) char shared[];
  const int tiles = (p.seqlen_kv + P::kBc - 1) / P::kBc, cta = static_cast<int>(blockIdx.x);
  const int h_kv = cta / tiles % p.heads_kv, group = p.qhead_per_kvhead();
  const int kv_first = cta % tiles * P::kBc, warp_row = warp_index() * 16;
  const Sequence<P> sequence(p, cta / tiles / p.heads_kv);
  if (P::kVarlen && kv_first >= sequence.seqlen_kv(p)) return;
  const Range kv_range = tile_range(cta % tiles, P::kBc, sequence.seqused_kv(p));
  const TangentOperands<P> keys(shared_address(shared), p.k_tangent, p.v_tangent);
  const TangentOperands<P> queries(shared_address(shared) + kBackwardJvpLayout<P>.side(), p.q_tangent,
                                   p.dout_tangent);
  load_keys(keys, p, sequence, h_kv, kv_first);

  float dk[1][round_up(P::kHeadDim, 16) / 8][4] = {}, dv[1][round_up(P::kHeadDimV, 16) / 8][4] = {};
  // A tile of padding alone attends to nothing: zeros are stored.
  const int head_end = kv_range.begin < kv_range.end ? (h_kv + 1) * group : 0;
  for (int h = h_kv * group; h < head_end; ++h) {
    const auto head = sequence.head(p, h);
    const Range bounds = P::q_bounds(p, head, kv_range);
    for (int q = bounds.begin / P::kBr * P::kBr; q < bounds.end; q += P::kBr) {
      const Range q_range = {q, min(q + P::kBr, sequence.seqlen_q(p))};
      const TileOfPairs tile = tile_of_pairs<P>(p, head, q_range, kv_range);
      if (!tile.any) continue;
      const auto add_columns = [&](PairFragments<kN>& pairs, int first) {
        const auto row_of = [&](int nt, int e) {
          return stored_row(p, sequence, h, q + first + column_of_value(nt, e));
        };
        apply_pair_tangents<P, false>(pairs, p, head, tile, warp_row, first, row_of);
        add_products<P, P::kHeadDimV, kN>(dv, pairs.x_tangent, pairs.x, queries.y, queries.has_y_tangent,
                                          queries.kYBytes, first);
        add_products<P, P::kHeadDim, kN>(dk, pairs.y_tangent, pairs.y, queries.x, queries.has_x_tangent,
                                         queries.kXBytes, first);
      };
      for_columns<P, P::kBr, kN>(
          keys, warp_row, queries, [&] { load_queries(queries, p, sequence, h, q); }, add_columns);
    }
  }
  P::Copies::template wait<0>();
  using Grad = GradElement<P>;
  const int kv_end = sequence.seqlen_kv(p);
  store_rows<P, P::kHeadDim>(dk, kv_first + warp_row, kv_end,
                             [&](int kv) { return sequence.template kv_pointer<Grad>(p.dk, h_kv, kv); });
  store_rows<P, P::kHeadDimV>(dv, kv_first + warp_row, kv_end,
                              [&](int kv) { return sequence.template kv_pointer<Grad>(p.dv, h_kv, kv); });
}

}  // namespace flashjit::sm80
