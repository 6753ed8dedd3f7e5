// S to P: the score program, the mask and the online softmax of a warpgroup's S, in registers.
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/common/tile_mask.cuh"
#include "flashjit/sm90/forward_policy.cuh"
#include "flashjit/sm90/fragment.cuh"
#include "flashjit/tma/tile_scheduler.cuh"

namespace flashjit::sm90 {

/// The keys that are no padding and, where the mask's bounds say so, that all queries of a range attend to.
template <class P>
__device__ __forceinline__ Range keys_of_all_rows(const Params& p, const typename P::Head& head, Range q,
                                                  int seqused_kv) {
  if constexpr (!kFullTilesByBounds<P>) {
    return {0, seqused_kv};
  } else {
    const Range keys = P::kv_bounds_of_all(p, head, q);
    return {keys.begin, min(keys.end, seqused_kv)};
  }
}

/// The keys that all rows of a work tile attend to, as far as the mask's bounds say so, be they padding or
/// not. In other KV tiles V must have no codes that are NaN: P of a hidden key is 0, and 0 times NaN is NaN.
template <class P>
constexpr bool kHidesKeys = P::kHasMask || P::kBlockMap;
template <class P>
__device__ __forceinline__ Range keys_of_work_tile(const Params& p, const WorkTile<P>& work) {
  if constexpr (!kHidesKeys<P>) return {0, 0x7fffffff};
  const int end = min(work.q_begin + queries_per_tile<P>(p), work.sequence.seqlen_q(p));
  if constexpr (kFullTilesByBounds<P>)
    return keys_of_all_rows<P>(p, work.sequence.head(p, work.h), {work.q_begin, end}, 0x7fffffff);
  return {0, 0};
}
template <class P>
__device__ __forceinline__ bool has_tile(Range keys, int kv_begin) {
  return keys.begin <= kv_begin && kv_begin + P::kBc <= keys.end;
}

/// What all codes of a work tile's head of K and V are multiplied with: K's, and Q's, with the score's scale,
/// V's with O. Scales of keys are multiplied with S and V.
template <class P, bool kOfHeads = kScaledKv<P> && !P::kKeyScales>
struct HeadScales {
  __device__ void read(const Params&, const WorkTile<P>&) {}
  __device__ float times_k_scale(float x, int) const { return x; }
  __device__ float times_v_scale(float x) const { return x; }
};
template <class P>
struct HeadScales<P, true> {
  static constexpr int kOwn = kConvertsQ<P> ? 2 : 1;
  float k_scale[kOwn];  ///< of each of the thread's rows, with Q's, where that was converted
  float v_scale;
  __device__ void read(const Params& p, const WorkTile<P>& work) {
    const int h_kv = work.h / p.qhead_per_kvhead();
    k_scale[0] = KvScales<P>(p, p.k_scale, work.sequence, h_kv).of_head();
    if constexpr (P::kQCodes) k_scale[0] *= q_scale<P>(p, work.sequence.b, h_kv);
    k_scale[kOwn - 1] = k_scale[0];
    v_scale = KvScales<P>(p, p.v_scale, work.sequence, h_kv).of_head();
  }
  __device__ float times_k_scale(float x, int half) const { return x * k_scale[half % kOwn]; }
  __device__ float times_v_scale(float x) const { return x * v_scale; }
};

/// Lists of keys: which entries of the KV tile are keys.
template <bool kIndices>
struct PresentKeys {};
template <>
struct PresentKeys<true> {
  const unsigned* present = nullptr;
};

/// Products of codes beside scales of keys: what consumers read of the KV tile's keys, from the thread's
/// first on; three rows of Bc floats.
template <bool kOfKeys>
struct KeyFactors {};
template <>
struct KeyFactors<true> {
  const float* factors = nullptr;
};
enum KeyFactor { kOfScore, kLogOfV, kInverseOfV };
template <class P, int kFactor>
__device__ __forceinline__ float2 factors_of_keys(const KeyFactors<true>& keys, int n) {
  return *reinterpret_cast<const float2*>(keys.factors + kFactor * P::kBc + n / 4 * 8);
}

/// The softmax state of a warpgroup's rows of a Q tile. A thread has two rows, the second eight after the
/// first.
template <class P>
struct SoftmaxRows : HeadScales<P>, PresentKeys<P::kIndices>, KeyFactors<kKeyFactors<P>> {
  Range q{0, 0};          ///< the warpgroup's queries
  Range full_keys{0, 0};  ///< that all of them attend to
  int seqused_kv = 0;
  typename P::Head head;
  float max[2], sum[2];    ///< the thread's rows: m and l so far
  float row_term[2] = {};  ///< what the score reads of the rows' queries
  int packed_query[2];     ///< PackGQA: the rows' queries, which else follow from `q`

  __device__ void begin(const Params& p, const WorkTile<P>& work, int wg) {
    const int queries = queries_per_warpgroup<P>(p), q_begin = work.q_begin + row_group<P>(wg) * queries;
    q = {q_begin, min(q_begin + queries, work.sequence.seqlen_q(p))};
    if constexpr (P::kPackGqa)
      for (int half = 0; half < 2; ++half)
        packed_query[half] = q_begin + query_of_row<P>(p, own_row() + half * 8);
    seqused_kv = work.sequence.seqused_kv(p);
    this->read(p, work);
    head = work.sequence.head(p, work.h);
    full_keys = keys_of_all_rows<P>(p, head, q, seqused_kv);
    max[0] = max[1] = -infinity();
    sum[0] = sum[1] = 0.0f;
    if constexpr (P::kScoreRowTerm)
      for (int half = 0; half < 2; ++half)
        row_term[half] = P::score_row_term(p, head, position(first_query() + half * to_second()));
  }
  __device__ int first_query() const { return P::kPackGqa ? packed_query[0] : q.begin + own_row(); }
  __device__ int to_second() const { return P::kPackGqa ? packed_query[1] - packed_query[0] : 8; }
};

/// What takes S of one of a thread's rows to exponents of a power of two.
template <class P>
__device__ __forceinline__ float exponent_scale(const Params& p, const SoftmaxRows<P>& rows, int half) {
  if constexpr (kKeyFactors<P>) return kLog2E;
  return P::kHasScore ? scale_operand<P>(p) : rows.times_k_scale(scale_operand<P>(p), half);
}
/// S *= K's scale, where a program makes scores of it, or keys have their own.
template <class P, int kCount>
__device__ __forceinline__ void scale_products(const SoftmaxRows<P>& rows, float (&s)[kCount]) {
  if constexpr (kKeyFactors<P>) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float2 factor = factors_of_keys<P, kOfScore>(rows, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n + e] *= e % 2 ? factor.y : factor.x;
    }
  } else if constexpr (kScaledKv<P> && P::kHasScore && !P::kKeyScales) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) s[n] *= rows.k_scale[n / 2 % SoftmaxRows<P>::kOwn];
  }
}
/// S += log of V's scales: so P has them before it is rounded, and the row maximum is that of what P will be.
template <class P, int kCount>
__device__ __forceinline__ void add_log_of_v_scales(const SoftmaxRows<P>& rows, float (&s)[kCount]) {
  if constexpr (kKeyFactors<P>) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float2 log = factors_of_keys<P, kLogOfV>(rows, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n + e] += e % 2 ? log.y : log.x;
    }
  }
}
/// S *= the scales of K's keys, `scales` being of the thread's first on.
template <int kCount>
__device__ __forceinline__ void scale_keys(float (&s)[kCount], const float* scales) {
#pragma unroll
  for (int n = 0; n < kCount; n += 4) {
    const float2 of_keys = *reinterpret_cast<const float2*>(scales + n * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n + e] *= e % 2 ? of_keys.y : of_keys.x;
  }
}

/// The score program, pair by pair. `bias`: this lane's address in the bias tile, in the first four 8 x 8
/// matrices. `column_terms`: from this thread's first key on.
template <class P, int kCount>
__device__ __forceinline__ void apply_score(const Params& p, const SoftmaxRows<P>& rows, int kv_begin,
                                            unsigned bias, const float* column_terms, float (&s)[kCount]) {
  if constexpr (P::kHasScore && !kAddsScoreLine<P>) {
    const Position row = position(rows.first_query()),
                   column = position(kv_begin + static_cast<int>(threadIdx.x) % 4 * 2);
    [[maybe_unused]] unsigned elements[4];
    [[maybe_unused]] float2 of_keys{};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const Position q = row + n / 2 % 2 * rows.to_second(), kv = column + (n / 4 * 8 + n % 2);
      if constexpr (P::kBiasTile) {
        const int chunk = n / 4;
        if (n % 8 == 0) load_matrix_x4(elements, (bias ^ (chunk % 8 * 16)) + chunk / 8 * P::kBr * kRowBytes);
        const unsigned word = elements[n % 8 / 2] >> n % 2 * 16;
        s[n] = P::score_of_element(p, rows.head, s[n], static_cast<unsigned short>(word), q, kv);
      } else if constexpr (P::kScoreRowTerm || P::kScoreColumnTerm) {
        if (P::kScoreColumnTerm && n % 4 == 0)
          of_keys = *reinterpret_cast<const float2*>(column_terms + n * 2);
        s[n] = P::score_of_terms(p, rows.head, s[n], rows.row_term[n / 2 % 2], n % 2 ? of_keys.y : of_keys.x,
                                 q, kv);
      } else {
        s[n] = P::score(p, rows.head, s[n], q, kv);
      }
    }
  }
}

/// Lists of keys: S = -infinity for the entries that are no keys.
template <class P, int kCount>
__device__ __forceinline__ void mask_entries(const SoftmaxRows<P>& rows, float (&s)[kCount]) {
  const int of_lane = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kCount; n += 16) {  // 32 keys
    const unsigned present = rows.present[n / 16] >> of_lane;
#pragma unroll
    for (int e = 0; e < 16; ++e)
      if (!(present >> (e / 4 * 8 + e % 2) & 1u)) s[n + e] = -infinity();
  }
}

/// S = -infinity for the pairs that do not attend, in a KV tile that is not full.
template <class P, int kCount>
__device__ __forceinline__ void mask_scores(const Params& p, const WorkTile<P>& work,
                                            const SoftmaxRows<P>& rows, int kv_begin, float (&s)[kCount]) {
  const int lane = threadIdx.x % 32, row = rows.first_query(), column = kv_begin + lane % 4 * 2;
  const Position row_position = position(row), column_position = position(column);
  const bool any = kTestsMask<P> || P::mask(p, rows.head, row_position, column_position);
  TileMask<P, P::kBc> mask;
  const auto row_at = [&](int half) { return row + half * rows.to_second(); };
  mask.find(p, rows.head, row_at, kv_begin);
  [[maybe_unused]] unsigned attend[2][(kCount + 63) / 64];
  if constexpr (kMasksByBits<P>) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kCount; n += 64)
        attend[half][n / 64] =
            own_keys<P>(p, rows.head, row + half * rows.to_second(), column + n * 2, rows.seqused_kv);
  }
#pragma unroll
  for (int n = 0; n < kCount; n += 4) {
    // The map's blocks are multiples of 16, so a warp's sixteen rows and these eight columns lie in one.
    bool block = true;
    if constexpr (kTestsMap<P>) {
      const int q = min(row - lane / 4, rows.q.end - 1), kv = min(kv_begin + n * 2, rows.seqused_kv - 1);
      block = block_map_row<P>(p, work.sequence.b, work.h, q)[kv / P::kBlockKv] != 0;
    }
    const auto columns = mask.columns(n * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Position kv = column_position + (n / 4 * 8 + e % 2);
      if constexpr (kMasksByBits<P>)
        s[n + e] = mask_score(s[n + e], block, true, attend[e / 2][n / 64] >> (n % 64 / 2 + e % 2) & 1u);
      else
        s[n + e] = mask_score(s[n + e], block, kv.at < rows.seqused_kv,
                              kTestsMask<P> ? mask.attends(p, rows.head, e / 2, columns, e % 2,
                                                           row_position + e / 2 * rows.to_second(), kv)
                                            : any);
    }
  }
}

__device__ __forceinline__ bool any_negative(const float (&max)[2]) {
  return __any_sync(kWholeWarp, (__float_as_int(max[0]) | __float_as_int(max[1])) < 0) != 0;
}
/// The largest of `first` and this thread's columns of one of its rows.
template <int kCount>
__device__ __forceinline__ float largest(float first, const float (&s)[kCount], int half) {
#pragma unroll
  for (int n = 2 * half; n < kCount; n += 4) first = fmaxf(first, fmaxf(s[n], s[n + 1]));
  return first;
}
/// The same, for a `first` from +0 on: such floats are ordered as integers are, every other is less than they
/// are, and of integers the largest of three is one instruction. NOTES.md#exponentials-and-instructions
template <int kCount>
__device__ __forceinline__ float largest_by_bits(float first, const float (&s)[kCount], int half) {
  int bits = __float_as_int(first);
#pragma unroll
  for (int n = 2 * half; n < kCount; n += 4)
    bits = __vimax3_s32(__float_as_int(s[n]), __float_as_int(s[n + 1]), bits);
  return __int_as_float(bits);
}

/// P = kLargestP exp2(S * scale - m), in place of S, with the row maximum m and the row sum l carried on.
/// `rescale` is what O and l so far must be multiplied by, exp2(m before - m). `first`: of a work tile's
/// first KV tile.
template <class P, int kCount>
__device__ __forceinline__ void online_softmax(const Params& p, const WorkTile<P>& work, SoftmaxRows<P>& rows,
                                               int kv_begin, bool full, bool first, float (&s)[kCount],
                                               float (&rescale)[2]) {
  const int lane = threadIdx.x % 32, row = rows.first_query(), column = kv_begin + lane % 4 * 2;
  const float first_scale = exponent_scale(p, rows, 0),
              second_scale = kConvertsQ<P> ? exponent_scale(p, rows, 1) : first_scale;
  const auto scale = [&](int half) { return half == 0 ? first_scale : second_scale; };
  // A score that is a line along the keys stays in units of dot products, without its value at this thread's
  // first key: `unit` and `line` make it a score. With a scale below 1e-30 no slope could be recovered.
  [[maybe_unused]] const float unit = fmaxf(p.softmax_scale, 1e-30f);
  [[maybe_unused]] float line[2], slope;
  if constexpr (kAddsScoreLine<P>) {
    slope = __fdividef(P::score_slope(p, rows.head), unit);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      line[half] = P::score_offset(p, rows.head, position(row + half * rows.to_second()), position(column));
  }
  float top[2] = {rows.max[0], rows.max[1]};  // no less than m so far, no more than m
  const bool by_bits = kMaxByBits<P> && !first, negative = by_bits && any_negative(top);
  if (!full || negative) {  // one branch for both: with two, ptxas serialises products, if any are under way
    if constexpr (P::kIndices)
      mask_entries(rows, s);
    else if (!kCodeProducts<P> || !full)
      mask_scores(p, work, rows, kv_begin, s);
    if (by_bits)
      for (int half = 0; half < 2; ++half) top[half] = largest(top[half], s, half);
  }
  float offset[2], sum[2] = {0.0f, 0.0f};
  const auto factor = [&](int half) { return kAddsScoreLine<P> ? unit * scale(half) : scale(half); };
  [[maybe_unused]] float row_factor[2];  // with kFarScores
  // The row maximum: of this thread's columns, then of the four lanes that share the row.
  const auto find_max = [&](int half) {
    const float before = rows.max[half];
    float highest;
    if constexpr (kAddsScoreLine<P>) {
#pragma unroll
      for (int n = 2 * half; n < kCount; n += 4)
        for (int e = 0; e < 2; ++e) s[n + e] = fmaf(slope, static_cast<float>(n / 4 * 8 + e), s[n + e]);
      highest = fmaxf(before, fmaf(largest(-infinity(), s, half), unit, line[half]));
    } else {
      highest = by_bits ? fmaxf(top[half], largest_by_bits(top[half], s, half)) : largest(before, s, half);
    }
    highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
    const float of_scores = exponent_factor<P>(highest, scale(half));
    const float shift = highest == -infinity() ? 0.0f : __fmul_rn(highest, of_scores);
    rescale[half] = before == -infinity() ? 0.0f : exp2_approx(__fmul_rn(before, of_scores) - shift);
    rows.max[half] = highest;
    offset[half] = -shift;
    if constexpr (kAddsScoreLine<P>) offset[half] = fmaf(line[half], of_scores, -shift);
    if constexpr (kCodeProducts<P>) offset[half] += kLargestPLog2;
    // Beside a far line products count for nothing; but one that is -infinity must stay so.
    if constexpr (P::kFarScores)
      row_factor[half] = !kAddsScoreLine<P> ? of_scores : of_scores == scale(half) ? factor(half) : 1e-30f;
  };
  const auto exponentiate = [&](int n) {
    const int half = n / 2 % 2;
    float by = factor(half);
    if constexpr (P::kFarScores) by = row_factor[half];
    s[n] = exp2_approx(fmaf(s[n], by, offset[half]));
    if constexpr (kKeyFactors<P>) {
      const float2 inverse = factors_of_keys<P, kInverseOfV>(rows, n);
      sum[half] = fmaf(s[n], n % 2 ? inverse.y : inverse.x, sum[half]);
    } else {
      sum[half] += s[n];
    }
  };
  const auto add_sum = [&](int half) { rows.sum[half] = rows.sum[half] * rescale[half] + sum[half]; };
  if constexpr (kAlternatesRows<P>) {
    find_max(0), find_max(1);
#pragma unroll
    for (int n = 0; n < kCount; ++n) exponentiate(n);
    add_sum(0), add_sum(1);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      find_max(half);
#pragma unroll
      for (int n = 2 * half; n < kCount; n += 4) exponentiate(n), exponentiate(n + 1);
      add_sum(half);
    }
  }
}

}  // namespace flashjit::sm90
