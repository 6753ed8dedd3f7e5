// Forward pass for Hopper: FlashAttention-3 (sections 3.1 and 3.2). A producer warpgroup loads Q, K and V by
// TMA; each consumer warpgroup owns 64 rows of Q and computes them by wgmma. Consumers take turns at starting
// products (ping-pong), so that the softmax of one runs under the products of another; and a consumer's own P
// V runs under its next softmax.
//
//   forward_policy.cuh    the compile-time switches, with their measurements
//   forward_schedule.cuh  the tile scheduler and the work tile
//   forward_smem.cuh      shared memory and barriers
//   forward_producer.cuh  the producer's warps
//   forward_softmax.cuh   S to P: score program, mask, online softmax
//   forward_epilogue.cuh  LSE and O to global memory
#pragma once

#include "flashjit/async/warp_roles.cuh"
#include "flashjit/common/unused_rows.cuh"
#include "flashjit/sm90/forward_epilogue.cuh"
#include "flashjit/sm90/forward_producer.cuh"

namespace flashjit::sm90 {

/// The warpgroups of a slot take turns at starting products.
template <class P>
__device__ __forceinline__ void ping_pong_wait(const ForwardStorage<P>& smem, int wg) {
  if constexpr (ForwardStorage<P>::kWarpgroups > 1) named_barrier_sync(smem.ping_pong(wg), 256);
}
template <class P>
__device__ __forceinline__ void ping_pong_arrive(const ForwardStorage<P>& smem, int wg) {
  if constexpr (ForwardStorage<P>::kWarpgroups > 1)
    named_barrier_arrive(smem.ping_pong(wg + 1 == ForwardStorage<P>::kWarpgroups ? 0 : wg + 1), 256);
}

/// Computes a consumer warpgroup's rows of O. The steps, one a KV tile, follow each other without a gap, also
/// from one Q tile to the next: each starts its own S = Q K^T, then O += P V of the step before.
template <class P>
__device__ __forceinline__ void consume(const Params& p, const TensorMaps& maps,
                                        const ForwardStorage<P>& smem, int wg) {
  using Element = typename P::Element;
  using Storage = ForwardStorage<P>;
  constexpr int kWarpgroups = Storage::kWarpgroups;
  constexpr int kS = P::kBc / 2, kO = P::kHeadDimV / 2;  // accumulators of a thread
  constexpr bool kWhole = kOneStatementPerProduct<P>;
  constexpr int kScoreStatements = kWhole ? 1 : (P::kHeadDim + 15) / 16;
  constexpr int kOutputStatements = kWhole ? 1 : P::kBc / 16;
  int round = 0, i = 0;  // of the Q tile and the KV tile, of which the last is 0
  SoftmaxRows<P> rows;
  // Of the step, until the next one looks at its tile: its first key, and whether every pair attends.
  int kv_begin = 0;
  bool full = false;
  int entry = 0;  // of the tile, read a step ahead where it stands in a list of which nobody tells
  float o[kO] = {};
  float s[kS];
  unsigned p_fragment[P::kBc / 16][4];
  unsigned plane = 0;  // of the step

  // False when there is no more work.
  const auto find_work = [&] {
    barrier_wait<P>(smem.q_full(wg, round), smem.q_phase(round));
    const WorkTile<P>& work = smem.work(round);
    i = work.count() - 1;
    if (kConsumersReadList<P> && i >= 0) entry = work.kv_tiles.entry(i);
    return work.h >= 0;
  };
  // Who has the turn is to start at once: what it needs is known from the step before.
  unsigned long long q_tile, k_tile = 0, v_tile;
  const auto find_tiles = [&](int n) {
    if constexpr (kVDescriptorFromK<P>)
      v_tile = k_tile + (tile_descriptor(smem.v(0), Storage::kSliceBytes) - tile_descriptor(smem.k(0), 0));
    else
      v_tile = tile_descriptor(smem.v(n - 1), Storage::kSliceBytes);
    k_tile = tile_descriptor(smem.k(n), 0);
  };
  // Asked at the end of the step before.
  bool keys_ready = false;
  [[maybe_unused]] bool v_ready = false;
  const auto ask = [&](int n) {
    keys_ready = barrier_ready(smem.k_full(n + 1), smem.phase(n + 1));
    if constexpr (kPollsV<P>) v_ready = barrier_ready(smem.v_full(n), smem.phase(n));
  };
  const auto wait_for_k = [&](int n) {
    if (!keys_ready) barrier_wait<P>(smem.k_full(n), smem.phase(n));
  };
  const auto start_scores = [&] {
    pin(s);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kScoreStatements; ++step) {
      // Four steps of 16 columns (32 bytes) make a slice.
      const int q_offset = step / 4 * kGroupRows * kRowBytes + step % 4 * 32;
      const int k_offset = step / 4 * Storage::kSliceBytes + step % 4 * 32;
      P::multiply_scores(s, q_tile + (q_offset >> 4), k_tile + (k_offset >> 4), step > 0);
    }
    multiply_commit();
    pin(s);
  };
  // What stands behind the last key may be anything, and zero times anything is not zero.
  const auto wait_for_v = [&](int n) {
    if (!v_ready) barrier_wait<P>(smem.v_full(n), smem.phase(n));
    if (const int valid = rows.seqused_kv - kv_begin; kForeignKeys<P> && valid < P::kBc) {
      clear_rows<P::kBc, P::kHeadDimV>(smem.shared + (smem.v(n) - smem.base), valid);
      publish_to_async_proxy();
      named_barrier_sync(smem.warpgroup_barrier(wg), 128);
    }
  };
  int adds = kFirstPvOverwritesO<P> ? 0 : 1;  // whether the next P V adds to O
  // What dropout drops of 16 keys of the step's P.
  [[maybe_unused]] unsigned dropped[P::kBc / 16][4];
  const auto draw = [&](int keys) {
    const WorkTile<P>& work = smem.work(round);
    drop_masks(dropped[keys], p, work.sequence.b * p.heads_q + work.h, rows.first_query(),
               kv_begin + keys * 16 + static_cast<int>(threadIdx.x) % 4 * 2);
  };
  const auto draw_early = [&] {
    if constexpr (kDrawsEarly<P>) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) draw(keys);
    }
  };
  // P of the step as the left operand of its product with V.
  const auto pack_probabilities = [&] {
    as_left_operand<Element>(p_fragment, s);
    if constexpr (P::kDropout) {
#pragma unroll
      for (int keys = 0; keys < P::kBc / 16; ++keys) {
        if constexpr (!kDrawsEarly<P>) draw(keys);
#pragma unroll
        for (int r = 0; r < 4; ++r) p_fragment[keys][r] &= ~dropped[keys][r];
      }
    }
  };
  const auto start_output = [&] {
    pin(o);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kOutputStatements; ++step)
      P::multiply_output(o, &p_fragment[step], v_tile + (step * 16 * kRowBytes >> 4), step > 0 ? 1 : adds);
    adds = 1;
    pin(o);
  };
  // One arrival a warp, when all of its lanes have read. What threads wrote each reader gives back for
  // itself: racecheck does not see that a warp's lanes have read where one says so for all.
  const auto release = [&](unsigned barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  };
  const auto scores_are_done = [&](int n) {
    pin(s);
    if constexpr (kProducerPostsEntries<P>)
      barrier_arrive(smem.k_empty(n));
    else
      release(smem.k_empty(n));
    if (Storage::kQStages == 1 && i == 0) release(smem.q_empty(wg, round));
  };
  static_assert(kProducerPostsEntries<P> || !kTellsRows<P>);
  // Whether any of the wg's rows meet the tile, of which K is there.
  const auto meets = [&](int n) { return (smem.entry(n) >> (kListedRowsBit + wg) & 1) != 0; };
  const auto look_at_tile = [&](int n) {
    const WorkTile<P>& work = smem.work(round);
    if constexpr (!kConsumersReadList<P>)
      entry = kProducerPostsEntries<P> ? smem.entry(n) : work.kv_tiles.entry(i);
    kv_begin = tile_of_entry<P>(entry) * P::kBc;
    if constexpr (kTellsRows<P>) {
      // Of a tile that it does not meet the wg masks all.
      const bool met = meets(n);
      full = met && (entry & 1);
      rows.seqused_kv = met ? work.sequence.seqused_kv(p) : 0;
    } else if constexpr (kProducerPostsEntries<P>)
      full = entry & 1;
    else
      full = kv_begin + P::kBc <= rows.full_keys.end &&
             (kFullTilesByBounds<P> ? rows.full_keys.begin <= kv_begin
                                    : work.kv_tiles.full(p, rows.head, rows.q, entry));
    if (kConsumersReadList<P> && i > 0) entry = work.kv_tiles.entry(i - 1);
  };
  const auto await_reads = [&](int n) {
    if constexpr (P::kBiasTile || P::kScoreColumnTerm) barrier_wait<P>(smem.terms_full(n), smem.phase(n));
  };
  const auto reads_are_done = [&](int n) {
    if constexpr (P::kBiasTile)
      release(smem.terms_empty(n));
    else if constexpr (P::kScoreColumnTerm)
      barrier_arrive(smem.terms_empty(n));
  };
  // A wg passes over the tiles that only others' rows meet. But it computes one of each Q tile, so that O
  // and LSE are written, and its V waits for P no longer than there are stages: else nobody could go on.
  int last = -1;  // the tile that was computed last
  const auto computes = [&](int n, bool is_first) {
    const bool must = n - last >= P::kStages || (is_first && i == 0);
    return __any_sync(kWholeWarp, must || meets(n)) != 0;
  };
  const auto pass_over = [&](int n) {
    ping_pong_wait(smem, wg);
    ping_pong_arrive(smem, wg);
    barrier_arrive(smem.k_empty(n));
    if (Storage::kQStages == 1 && i == 0) release(smem.q_empty(wg, round));
    barrier_wait<P>(smem.v_full(n), smem.phase(n));
    release(smem.v_empty(n));
    k_tile = tile_descriptor(smem.k(n + 1), 0);
    keys_ready = false;
  };
  // The tile before n that was computed.
  const auto before = [&](int n) {
    if constexpr (kTellsRows<P>) return last;
    return n - 1;
  };
  // Where the TMA unit does not copy the plane, each warp fills in what it reads: starts so before it waits
  // for anything else, and ends under the products.
  const auto fill_plane = [&](int n, auto fill) {
    if constexpr (P::kBiasTile) {
      const WorkTile<P>& work = smem.work(round);
      const BiasTile of = P::bias_tile(p, work.sequence.head(p, work.h));
      const int row = wg * kGroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows;
      if (!unit_copies(p, maps, of))
        fill(PlaneRows<P::kBr, kWarpRows, P::kBc, 8>{smem.shared + (smem.bias_tile(n) - smem.base), of,
                                                     work.q_begin, work.kv_begin(i), row, 0});
      const int lane = threadIdx.x % 32;
      plane = smem.bias_tile(n) + chunk_offset<P::kBr>(row + lane % 16, lane / 16);
    }
  };
  const auto start_plane = [&](int n) { fill_plane(n, [](const auto& rows) { rows.start(); }); };
  const auto finish_plane = [&](int n) { fill_plane(n, [](const auto& rows) { rows.finish(); }); };
  float rescale[2], scale[2];
  // Of tile n, whose dot products and reads are there.
  const auto to_exponentials = [&](int n, auto& scores) {
    apply_score(p, rows, kv_begin, plane, smem.column_terms(n) + threadIdx.x % 4 * 2, scores);
    reads_are_done(n);
    online_softmax(p, smem.work(round), rows, kv_begin, full, scores, rescale);
  };
  int n = 0;
  find_tiles(0);
  if (wg == kWarpgroups - 1) ping_pong_arrive(smem, wg);
  for (; find_work(); ++round) {
    if (kSplitTailWave<P> && wg >= smem.work(round).warpgroups) break;  // its last
    const bool follows = n > 0;
    q_tile = tile_descriptor(smem.q(wg, round), 0);
    wait_for_k(n);
    if constexpr (kTellsRows<P>) {
      for (; !computes(n, true); --i) {
        pass_over(n);
        wait_for_k(++n);
      }
    }
    ping_pong_wait(smem, wg);
    start_scores();
    // The vote tells ptxas that all lanes go one way: else it may make products wait for each other.
    if (__any_sync(kWholeWarp, follows)) {
      wait_for_v(before(n));
      start_output();
    }
    multiply_commit();
    ping_pong_arrive(smem, wg);
    find_tiles(n + 1);
    if (follows) finalize_rows(p, smem.work(round - 1), rows, wg, scale);
    rows.begin(p, smem.work(round), wg);
    look_at_tile(n);
    draw_early();
    start_plane(n);
    finish_plane(n);
    multiply_wait<1>();
    scores_are_done(n);
    await_reads(n);
    if (kPartialFirstStep<P> && smem.work(round).partial >> wg & 1u) {
      auto& few = reinterpret_cast<float(&)[kPartialKvTile<P> / 2]>(s);
      to_exponentials(n, few);
#pragma unroll
      for (int value = kPartialKvTile<P> / 2; value < kS; ++value) s[value] = 0.0f;
    } else {
      to_exponentials(n, s);
    }
    if constexpr (kIntraWarpgroupOverlap<P>) finish_before_wait(rows.sum[0] + rows.sum[1], smem.base);
    multiply_wait<0>();
    ask(n);
    pin(o);
    pack_probabilities();
    if (follows) {
      release(smem.v_empty(before(n)));
      scale_o(o, scale);
      store_o(p, maps, smem, smem.work(round - 1), wg, o);
    }
    last = n;
    if constexpr (kFirstPvOverwritesO<P>) {
      adds = 0;
    } else {
#pragma unroll
      for (int value = 0; value < kO; ++value) o[value] = 0.0f;
    }
    for (++n; i > 0; ++n) {
      --i;
      start_plane(n);
      wait_for_k(n);
      if constexpr (kTellsRows<P>) {
        if (!computes(n, false)) {
          pass_over(n);
          continue;
        }
      }
      ping_pong_wait(smem, wg);
      start_scores();
      wait_for_v(before(n));
      start_output();
      multiply_commit();
      ping_pong_arrive(smem, wg);
      find_tiles(n + 1);
      look_at_tile(n);
      draw_early();
      finish_plane(n);
      multiply_wait<1>();
      scores_are_done(n);
      await_reads(n);
      to_exponentials(n, s);
      if constexpr (kIntraWarpgroupOverlap<P>) finish_before_wait(rows.sum[0] + rows.sum[1], smem.base);
      multiply_wait<0>();
      ask(n);
      pin(o);
      release(smem.v_empty(before(n)));
      last = n;
      rescale_o<P>(o, rescale);
      pack_probabilities();
    }
    // Where there are two, nobody waits for this one yet.
    if (Storage::kQStages == 2) release(smem.q_empty(wg, round));
  }
  if (n > 0) {
    wait_for_v(before(n));
    start_output();
    multiply_commit();
    finalize_rows(p, smem.work(round - 1), rows, wg, scale);
    multiply_wait<0>();
    pin(o);
    scale_o(o, scale);
    store_o(p, maps, smem, smem.work(round - 1), wg, o);
    if (kTmaStoresO<P> && elected()) bulk_wait_read();  // before shared memory is another block's
  }
  if constexpr (kSplitTailWave<P>) {
    // Other groups have rows of one more tile: the order in which its KV tiles come and go is kept.
    if (i >= 0) {
      release(smem.q_empty(wg, round));
      release(smem.v_empty(n - 1));
    }
    for (; i >= 0; --i, ++n) {
      ping_pong_wait(smem, wg);
      ping_pong_arrive(smem, wg);
      barrier_wait<P>(smem.k_full(n), smem.phase(n));
      release(smem.k_empty(n));
      barrier_wait<P>(smem.v_full(n), smem.phase(n));
      release(smem.v_empty(n));
      await_reads(n);
      reads_are_done(n);
    }
  }
  if (wg == 0) ping_pong_wait(smem, wg);  // takes the turn that nobody else wants
}

template <class P>
__device__ void forward(const Params& p, const TensorMaps& maps) {
  using Storage = ForwardStorage<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kQTilesPerCta<P>; ++slot) Storage(slot, shared).init_barriers();
    barrier_init_fence();
  }
  __syncthreads();
  zero_unused_rows_of_output<P>(p);
  if constexpr (kLists<P>) wait_for_prior_grid<P>();

  constexpr int kAllWarpgroups = kQTilesPerCta<P> * Storage::kWarpgroups;
  const int wg = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  if (wg < 0) {
    lower_register_limit<producer_registers(kAllWarpgroups, P::kMinBlocks)>();
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
    const int slot = warp % kQTilesPerCta<P>;
    const ForwardStorage<P> smem(slot, shared);
    if (warp / kQTilesPerCta<P> == 0) {
      if (elected()) load_kv(p, smem, maps);
    } else if (warp / kQTilesPerCta<P> == 1) {
      if constexpr (kQTilesPerCta<P> == 2) {
        const bool loads = elected();
        const unsigned others = __ballot_sync(kWholeWarp, !loads);
        if (!loads)
          write_empty_rows<P>(p, slot, __popc(others & ((1u << threadIdx.x % 32) - 1u)), 31);
        else
          schedule_and_load_q(p, smem, maps);
      } else if (elected())
        schedule_and_load_q(p, smem, maps);
    } else if (warp / kQTilesPerCta<P> == 2) {
      write_empty_rows<P>(p, slot, threadIdx.x % 32, 32);
    } else if constexpr (P::kScoreColumnTerm) {
      find_column_terms(p, smem);
    }
  } else {
    raise_register_limit<consumer_registers(kAllWarpgroups, P::kMinBlocks)>();
    const int slot = kQTilesPerCta<P> > 1 ? wg / Storage::kWarpgroups : 0;
    consume(p, maps, Storage(slot, shared), wg - slot * Storage::kWarpgroups);
  }
}

}  // namespace flashjit::sm90
