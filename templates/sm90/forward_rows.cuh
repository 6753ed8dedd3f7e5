// The state of a consumer's rows: their queries, keys and scales, and the row maximum m and sum l.
#pragma once

#include "flashjit/sm90/forward_joined.cuh"
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
    const Range keys = FullKeys<P>::of(p, head, q);
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
template <class P>
constexpr bool kHeadScales = kDecodesKv<P> || kScaledElements<P> || (kScaledKv<P> && !P::kKeyScales);
/// That of K or V.
template <class P, class Format>
__device__ __forceinline__ float factor_of_head(const KvScales<P>& scales) {
  return (Format::kArgumentOfHead ? scales.of_head() : 1.0f) * Format::kUnit;
}
struct Plain8bit {
  static constexpr bool kArgumentOfHead = true;
  static constexpr float kUnit = 1.0f;
};
template <class P, bool kDecodes = kDecodesKv<P>>
struct KvHeadFormats {
  using K = Plain8bit;
  using V = Plain8bit;
};
template <class P>
struct KvHeadFormats<P, true> {
  using K = OfHead<typename P::KFormat>;
  using V = OfHead<typename P::VFormat>;
};

template <class P, bool kOfHeads = kHeadScales<P>>
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
    using Formats = KvHeadFormats<P>;
    k_scale[0] = factor_of_head<P, typename Formats::K>({p, p.k_scale, work.sequence, h_kv});
    k_scale[0] *= q_scale<P>(p, work.sequence.b, h_kv);
    k_scale[kOwn - 1] = k_scale[0];
    v_scale = factor_of_head<P, typename Formats::V>({p, p.v_scale, work.sequence, h_kv});
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
template <class P>
using ListedKeys = Conditional<P::kJoinsLists, KeysOfRows, PresentKeys<P::kIndices>>;

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
struct RowState : HeadScales<P>, ListedKeys<P>, KeyFactors<kKeyFactors<P>> {
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
  /// Whether the warp has no queries. A vote, so that ptxas sees all lanes branch alike.
  __device__ bool warp_is_idle() const {
    const int first =
        P::kPackGqa ? packed_query[0] : q.begin + static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
    return !__any_sync(kWholeWarp, first < q.end);
  }
  __device__ int to_second() const { return P::kPackGqa ? packed_query[1] - packed_query[0] : 8; }
};

/// What takes S of one of a thread's rows to exponents of a power of two.
template <class P>
__device__ __forceinline__ float exponent_scale(const Params& p, const RowState<P>& rows, int half) {
  if constexpr (kKeyFactors<P>) return kLog2E;
  return P::kHasScore ? scale_operand<P>(p) : rows.times_k_scale(scale_operand<P>(p), half);
}

}  // namespace flashjit::sm90
