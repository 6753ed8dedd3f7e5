// Who does what in a CTA of the forward pass, besides the consumers: the roles of the producer's four warps,
// each a type with run(), and the warpgroup that converts quantized K and V.
#pragma once

#include "flashjit/async/warp_roles.cuh"
#include "flashjit/common/unused_out_rows.cuh"
#include "flashjit/sm90/forward_codes.cuh"
#include "flashjit/sm90/forward_few_rows.cuh"
#include "flashjit/sm90/forward_producer.cuh"
#include "flashjit/sm90/kv_codes.cuh"
#include "flashjit/sm90/kv_gather.cuh"
#include "flashjit/sm90/kv_latents.cuh"
#include "flashjit/sm90/kv_rows.cuh"

namespace flashjit::sm90 {

template <class P>
struct QLoader {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps& maps, const SegmentStart& start, int) {
    if (elected()) schedule_and_load_q(p, smem, maps, start);
  }
};
/// Where two slots share the producer's warps, idle threads write empty rows, which would cost 1 to 3% if
/// they waited for the loading thread (NOTES.md#two-q-tiles-per-cta).
template <class P>
struct BusyQLoader {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps& maps, const SegmentStart& start, int) {
    const bool loads = elected();
    const unsigned others = __ballot_sync(kWholeWarp, !loads);
    if (!loads)
      write_empty_rows<P>(p, start, smem.slot, __popc(others & ((1u << threadIdx.x % 32) - 1u)), 31);
    else
      schedule_and_load_q(p, smem, maps, start);
  }
};

template <class P>
struct Idle {
  static __device__ __forceinline__ bool is(int warp) { return warp / kQTilesPerCta<P> == 2; }
  static __device__ __forceinline__ void run(const Params&, const ForwardStorage<P>&, const TensorMaps&,
                                             const SegmentStart&, int) {}
};

/// Copies K and V row by row.
template <class P, int kWarp>
using RowLoader = Conditional<kDecodesLatents<P>, LatentCopier<P, kWarp>,
                              Conditional<kDecodesKv<P>, KvRowCopier<P, kWarp>, KvRowLoader<P, kWarp>>>;
template <class P>
struct ProducerRoles {
  using KvWarp = Conditional<kGathers<P>, RowLoader<P, 0>,
                             Conditional<kLoadsKvApart<P>, KvLoader<P, KvTensors::k>, KvLoader<P>>>;
  using QWarp = Conditional<kQTilesPerCta<P> == 2, BusyQLoader<P>, QLoader<P>>;
  /// Rows that are decoded are not copied beside the warp that has the rows of a single query's heads.
  using First = Conditional<kDecodesKv<P>, QWarp, KvWarp>;
  using Second = Conditional<kDecodesKv<P>, KvWarp, QWarp>;
  /// Then it writes empty rows. With two transposers the fourth warp is one, too.
  using Third =
      Conditional<kCodeProducts<P>, VTransposer<P>, Conditional<P::kKeyScales, KeyScaleLoader<P>, Idle<P>>>;
  using Fourth =
      Conditional<kKeyFactors<P>, KeyFactorFinder<P>,
                  Conditional<kGathers<P>, RowLoader<P, 1>,
                              Conditional<kLoadsKvApart<P>, KvLoader<P, KvTensors::v>,
                                          Conditional<P::kScoreColumnTerm, ColumnTermFinder<P>, Idle<P>>>>>;
};
/// Two slots share the four warps, and have the first two roles each.
template <class P>
__device__ __forceinline__ void run_producer(const Params& p, const TensorMaps& maps, char* shared,
                                             const SegmentStart& start) {
  using Roles = ProducerRoles<P>;
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int slot = warp % kQTilesPerCta<P>;
  const ForwardStorage<P> smem(slot, shared);
  if (warp / kQTilesPerCta<P> == 0) {
    Roles::First::run(p, smem, maps, start, warp);
  } else if (warp / kQTilesPerCta<P> == 1) {
    Roles::Second::run(p, smem, maps, start, warp);
  } else if (Roles::Third::is(warp)) {
    Roles::Third::run(p, smem, maps, start, warp);
    if (!kCodeProducts<P> || warp == 2) write_empty_rows<P>(p, start, slot, threadIdx.x % 32, 32);
  } else {
    Roles::Fourth::run(p, smem, maps, start, warp);
  }
}

/// What makes elements of K and V.
template <class P>
using KvConverter =
    Conditional<kHasFewRows<P>, NoKvConverter,
                Conditional<kDecodesLatents<P>, LatentDecoder<P>,
                            Conditional<kDecodesKv<P>, KvRowDecoder<P>,
                                        Conditional<kConvertsKv<P>, KvConverterGroup<P>, NoKvConverter>>>>;

/// The roles of warpgroups, with their registers.
template <class P>
struct ForwardRoles {
  static constexpr ForwardGroups kGroups{.consumers = kQTilesPerCta<P> * ForwardStorage<P>::kWarpgroups,
                                         .ctas = P::kMinBlocks,
                                         .converters = sm90::kConverters<P>,
                                         .d_split = P::kDSplit,
                                         .rows = kDecodedRows<P>,
                                         .cascade = P::kCascade,
                                         .key_factors = kKeyFactors<P>};
  static constexpr int kConsumerGroups = kGroups.consumers;
  static constexpr WarpgroupRole kProducer{
      .first = 0,
      .registers = kHasFewRows<P> ? few_rows_producer_registers(P::kMinBlocks, kScaleBytes<P> > 0)
                                  : producer_registers(kGroups),
      .gives = true};
  static constexpr WarpgroupRole kConsumers{
      .first = 1,
      .registers = kHasFewRows<P> ? few_rows_registers(P::kMinBlocks, kScaleBytes<P> > 0)
                                  : consumer_registers(kGroups),
      .gives = false};
  static constexpr WarpgroupRole kConverters{
      .first = 1 + kConsumerGroups + (kHasFewRows<P> ? 1 : 0),  // who would convert is a consumer
      .registers = converter_registers(kGroups),
      .gives = true};
};

// --- Before the roles -------------------------------------------------------------------------------------

template <class P>
__device__ __forceinline__ void init_barriers(char* shared) {
  if (threadIdx.x != 0) return;
  for (int slot = 0; slot < kQTilesPerCta<P>; ++slot) ForwardStorage<P>(slot, shared).init_barriers();
  barrier_init_fence();
}
// The preparation of stream-K's first work tile; SegmentStage<P> names one of these types.
template <class P>
struct NoSegments {
  static __device__ __forceinline__ void prepare(const Params&, const TensorMaps&) {}
  static __device__ __forceinline__ void find(const Params&, char*, SegmentStart&) {}
};
template <class P>
__device__ __forceinline__ void prefetch_maps(const Params& p, const TensorMaps& maps) {
  if (threadIdx.x == 32 && p.seqlen_q > 0 && p.seqlen_kv > 0) {  // tensors without rows have no map
    prefetch_map(maps.q);
    if (!kGathers<P>) prefetch_map(maps.k);
    if (!kGathers<P> && !P::kSharedKv) prefetch_map(maps.v);
  }
}
template <class P>
struct SegmentsOfCtas {
  static __device__ __forceinline__ void prepare(const Params& p, const TensorMaps& maps) {
    let_next_grid_start<P>();  // the combine entry, which waits for this one's end by itself
    prefetch_maps<P>(p, maps);
  }
  static __device__ __forceinline__ void find(const Params& p, char* shared, SegmentStart& start) {
    start = find_segment<P>(p, static_cast<int>(blockIdx.x) / p.head_groups,
                            ForwardStorage<P>(0, shared).segment_scratch());
  }
};
template <class P>
struct PartsOfCluster {
  static __device__ __forceinline__ void prepare(const Params& p, const TensorMaps& maps) {
    let_next_grid_start<P>();
    prefetch_maps<P>(p, maps);
    if (threadIdx.x == 0) {
      barrier_init(RowExchange<P>::of_cta().barrier(), 1);
      barrier_init_fence();
    }
    cluster_sync();  // before other CTAs send rows
  }
  static __device__ __forceinline__ void find(const Params&, char*, SegmentStart&) {}
};
template <class P>
using SegmentStage = Conditional<kSharesWork<P>, SegmentsOfCtas<P>,
                                 Conditional<P::kClusterSplit, PartsOfCluster<P>, NoSegments<P>>>;

/// Waits for what this launch depends on; stream-K: finds the CTA's segment of the work.
template <class P>
__device__ __forceinline__ SegmentStart begin_schedule(const Params& p, const TensorMaps& maps,
                                                       char* shared) {
  SegmentStage<P>::prepare(p, maps);
  __syncthreads();
  if (P::kCountsTiles || kSharesWork<P> || P::kClusterSplit) wait_for_prior_grid<P>();
  zero_unused_rows_of_output<P>(p);
  SegmentStart start;
  SegmentStage<P>::find(p, shared, start);
  return start;
}

}  // namespace flashjit::sm90
