// Forward pass for Hopper: one warp group loads tiles through the TMA unit, the others each own 64 rows of Q
// and compute with wgmma. The products of one tile run under the softmax of the tile before, and the warp
// groups take turns, so that one group's softmax runs under another's products (FlashAttention-3,
// sections 3.1 and 3.2).
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

/// Registers of a producer and of a consumer thread, by the number of consumer warp groups.
constexpr int producer_registers(int groups) { return groups == 1 ? 56 : groups == 2 ? 24 : 32; }
constexpr int consumer_registers(int groups) { return groups == 1 ? 256 - 16 : groups == 2 ? 240 : 160; }

/// By how many powers of two a row's exponentials may exceed one before O is rescaled: their sum and O share
/// the factor. Asking whether to rescale costs more than doing it for few columns.
template <class P>
constexpr float kSlack = P::kHeadDimV > 64 ? 8.0f : 0.0f;

/// The order of the walk over all Q tiles, of which each block takes one a round. Without a mask the tiles of
/// a head follow each other, so that its K and V are read once. A mask makes some rows longer: then some
/// heads' tiles are mixed, the longest (causal) first, and every other round runs backwards, so that all
/// blocks get the same. As few heads are mixed as make whole pairs of rounds.
template <class P>
struct ForwardWalk {
  unsigned rows, heads, mixed;

  __device__ explicit ForwardWalk(const Params& p)
      : rows(q_tiles<P>(p)), heads(p.batch * p.heads_q), mixed(1) {
    if (!P::kHasMask || gridDim.x >= rows * heads) return;  // every block has one tile: no rounds
    unsigned divisor = 2 * gridDim.x, rest = rows;
    while (rest != 0) {
      const unsigned remainder = divisor % rest;
      divisor = rest, rest = remainder;
    }
    mixed = min(2 * gridDim.x / divisor, heads);
  }
  /// The batch and head, and the tile, of this block; false when there is none.
  __device__ bool find(unsigned round, unsigned& batch_head, unsigned& tile) const {
    const unsigned index = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (index >= rows * heads) return false;
    // A few last heads are mixed with those before them.
    const unsigned last = max((heads + mixed / 2) / mixed, 1) - 1, group = min(index / (rows * mixed), last);
    const unsigned first = group * mixed, rest = index - first * rows;
    const unsigned count = group == last ? heads - first : mixed;
    batch_head = first + rest % count;
    tile = rows - 1 - rest / count;
    return true;
  }
};

/// A Q tile and the KV tiles that it meets. The producer finds it, the consumers read it in shared memory.
template <class P>
struct ForwardWork {
  Sequence<P> sequence;
  int h = -1;  ///< -1: there is no more work
  int q_begin = 0;
  KvTiles<P> tiles;  ///< visited from the last to the first

  __device__ ForwardWork() {}
  __device__ ForwardWork(const Params& p, const ForwardWalk<P>& walk, unsigned round) {
    unsigned batch_head, tile;
    if (!walk.find(round, batch_head, tile)) return;
    h = static_cast<int>(batch_head % p.heads_q);
    sequence = Sequence<P>(p, static_cast<int>(batch_head / p.heads_q));
    q_begin = static_cast<int>(tile) * P::kBr;
    const Range q_range = tile_range(static_cast<int>(tile), P::kBr, sequence.seqlen_q(p));
    if (q_range.begin < q_range.end)
      tiles = KvTiles<P>(p, sequence.head(p, h), static_cast<int>(tile), q_range, sequence.kv_limit(p));
  }
  __device__ int count() const { return tiles.count; }
  __device__ int kv_begin(int i) const { return tiles.tile(tiles.count - 1 - i) * P::kBc; }
};

/// Where things are in shared memory. Tiles of K and V are counted through all of a block's work, as `n`.
template <class P>
struct ForwardPlaces {
  static constexpr ForwardLayout kLayout{P::kBr, P::kBc, P::kHeadDim, P::kHeadDimV, P::kStages};
  static constexpr int kGroups = P::kWarps / 4;
  static constexpr int kKBytes = tile_bytes(P::kBc, P::kHeadDim), kVBytes = tile_bytes(P::kBc, P::kHeadDimV);
  static constexpr int kSliceBytes = P::kBc * kRowBytes;
  static_assert(sizeof(ForwardWork<P>) <= kWorkBytes);

  char* shared;   ///< aligned
  unsigned base;  ///< its address

  __device__ ForwardWork<P>& work(int round) const {
    return *reinterpret_cast<ForwardWork<P>*>(shared + kLayout.work() + round % 2 * kWorkBytes);
  }
  __device__ unsigned q() const { return base + kLayout.q(); }
  __device__ unsigned k(int n) const { return base + kLayout.k() + n % P::kStages * kKBytes; }
  __device__ unsigned v(int n) const { return base + kLayout.v() + n % P::kStages * kVBytes; }
  __device__ unsigned q_full() const { return base + kLayout.barriers(); }
  __device__ unsigned q_empty() const { return q_full() + 8; }
  __device__ unsigned k_full(int n) const { return q_full() + (2 + n % P::kStages * 4) * 8; }
  __device__ unsigned k_empty(int n) const { return k_full(n) + 8; }
  __device__ unsigned v_full(int n) const { return k_full(n) + 16; }
  __device__ unsigned v_empty(int n) const { return k_full(n) + 24; }
  __device__ int phase(int n) const { return n / P::kStages & 1; }
};

/// Loads what the work reads; `before` counts the tiles of K and V until then.
template <class P>
__device__ __forceinline__ void load(const Params& p, const ForwardPlaces<P>& at, const TensorMaps& maps,
                                     const ForwardWork<P>& work, int round, int before) {
  using Places = ForwardPlaces<P>;
  const int h_kv = work.h / (p.heads_q / p.heads_kv), batch = work.sequence.batch();
  const auto load_k = [&](int i) {
    const int n = before + i;
    barrier_wait<P>(at.k_empty(n), at.phase(n) ^ 1);
    barrier_expect(at.k_full(n), Places::kKBytes);
    load_tile<P::kBc, P::kHeadDim>(at.k(n), maps.k, at.k_full(n), work.sequence.kv_row(work.kv_begin(i)),
                                   h_kv, batch);
  };
  const auto load_v = [&](int i) {
    const int n = before + i;
    barrier_wait<P>(at.v_empty(n), at.phase(n) ^ 1);
    barrier_expect(at.v_full(n), Places::kVBytes);
    load_tile<P::kBc, P::kHeadDimV>(at.v(n), maps.v, at.v_full(n), work.sequence.kv_row(work.kv_begin(i)),
                                    h_kv, batch);
  };
  if (work.count() > 0) load_k(0);
  barrier_wait<P>(at.q_empty(), (round & 1) ^ 1);
  at.work(round) = work;
  if (work.count() == 0) return barrier_arrive(at.q_full());
  barrier_expect(at.q_full(), tile_bytes(P::kBr, P::kHeadDim));
  load_tile<P::kBr, P::kHeadDim>(at.q(), maps.q, at.q_full(), work.sequence.q_row(work.q_begin), work.h,
                                 batch);
  for (int i = 1; i < work.count(); ++i) {
    load_k(i);
    load_v(i - 1);
  }
  load_v(work.count() - 1);
}

template <class P>
__device__ __forceinline__ void produce(const Params& p, const ForwardPlaces<P>& at, const TensorMaps& maps) {
  const ForwardWalk<P> walk(p);
  int before = 0, round = 0;
  for (;; ++round) {
    const ForwardWork<P> work(p, walk, round);
    if (work.h < 0) break;
    load(p, at, maps, work, round, before);
    before += work.count();
  }
  barrier_wait<P>(at.q_empty(), (round & 1) ^ 1);
  at.work(round).h = -1;
  barrier_arrive(at.q_full());
}

/// The warp groups take turns at starting products.
template <int kGroups>
__device__ __forceinline__ void wait_for_turn(int group) {
  if constexpr (kGroups > 1) named_barrier_sync(1 + group, 256);
}
template <int kGroups>
__device__ __forceinline__ void pass_turn(int group) {
  if constexpr (kGroups > 1) named_barrier_arrive(1 + (group + 1 == kGroups ? 0 : group + 1), 256);
}

/// Computes a warp group's rows of O, and releases Q.
template <class P>
__device__ __forceinline__ void compute(const Params& p, const ForwardPlaces<P>& at,
                                        const ForwardWork<P>& work, int group, int before) {
  using Element = typename P::Element;
  using Places = ForwardPlaces<P>;
  constexpr int kS = P::kBc / 2, kO = P::kHeadDimV / 2;  // accumulators of a thread
  constexpr int kKSteps = (P::kHeadDim + 15) / 16, kPSteps = P::kBc / 16;
  constexpr bool kOwnO = Places::kLayout.own_o(), kLazy = (kSlack<P>) != 0.0f;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = work.q_begin + group * 64 + warp * 16 + lane / 4;  // and row + 8
  const int seqlen_q = work.sequence.seqlen_q(p), kv_limit = work.sequence.kv_limit(p);
  const Range q_range{work.q_begin, min(work.q_begin + P::kBr, seqlen_q)};
  [[maybe_unused]] const auto head = work.sequence.head(p, work.h);
  [[maybe_unused]] const Position row_position = position(row);
  const float scale_log2 = P::kHasScore ? kLog2E : p.softmax_scale * kLog2E;

  float o[kO] = {};
  float s[kS];
  unsigned probability[kPSteps][4];
  float row_max[2] = {-infinity(), -infinity()}, row_sum[2] = {0.0f, 0.0f};

  const auto start_scores = [&](int i) {
    const unsigned long long q = tile_descriptor(at.q() + group * 64 * kRowBytes, 0);
    const unsigned long long k = tile_descriptor(at.k(before + i), 0);
    pin(s);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
      // Four steps of 16 columns (32 bytes) make a slice.
      const int q_offset = step / 4 * P::kBr * kRowBytes + step % 4 * 32;
      const int k_offset = step / 4 * Places::kSliceBytes + step % 4 * 32;
      P::multiply_scores(s, q + (q_offset >> 4), k + (k_offset >> 4), step > 0);
    }
    multiply_commit();
    pin(s);
  };
  // What stands behind the last key may be anything, and zero times anything is not zero.
  const auto wait_for_v = [&](int i) {
    const int valid = kv_limit - work.kv_begin(i);
    barrier_wait<P>(at.v_full(before + i), at.phase(before + i));
    if (kForeignKeys<P> && valid < P::kBc) {
      clear_rows<P::kBc, P::kHeadDimV>(at.shared + (at.v(before + i) - at.base), valid);
      publish_to_async_proxy();
      named_barrier_sync(1 + Places::kGroups + group, 128);
    }
  };
  const auto start_output = [&](int i) {
    const unsigned long long v = tile_descriptor(at.v(before + i), Places::kSliceBytes);
    pin(o);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kPSteps; ++step)
      P::multiply_output(o, probability[step], v + (step * 16 * kRowBytes >> 4));
    multiply_commit();
    pin(o);
  };
  // One arrival a warp, when all of its lanes have read.
  const auto release = [&](unsigned barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  const auto scores_are_done = [&](int i) {
    pin(s);
    release(at.k_empty(before + i));
    if (kOwnO && i == work.count() - 1) release(at.q_empty());
  };
  // Scores to exponentials; returns what O and the sums so far are multiplied with.
  const auto softmax = [&](int i, float(&rescale)[2]) {
    const int kv_begin = work.kv_begin(i);
    [[maybe_unused]] const Position column_position = position(kv_begin + lane % 4 * 2);
    [[maybe_unused]] const auto at_kv = [&](int n) { return column_position + (n / 4 * 8 + n % 2); };
    if constexpr (P::kHasScore) {
#pragma unroll
      for (int n = 0; n < kS; ++n) s[n] = P::score(p, head, s[n], row_position + n / 2 % 2 * 8, at_kv(n));
    }
    const bool full =
        kv_begin + P::kBc <= kv_limit && work.tiles.full(p, head, q_range, work.count() - 1 - i);
    if (!full) {
#pragma unroll
      for (int n = 0; n < kS; n += 4) {
        // The map's blocks are multiples of 16, so a warp's sixteen rows and these eight columns lie in one.
        bool block = true;
        if constexpr (P::kBlockMap) {
          const int q = min(row - lane / 4, seqlen_q - 1), kv = min(kv_begin + n * 2, kv_limit - 1);
          block = block_map_row<P>(p, work.sequence.b, work.h, q)[kv / P::kBlockKv] != 0;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Position kv = at_kv(n + e);
          s[n + e] =
              mask_score(s[n + e], block, kv.at < kv_limit, P::mask(p, head, row_position + e / 2 * 8, kv));
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = row_max[half];
#pragma unroll
      for (int n = 2 * half; n < kS; n += 4) highest = fmaxf(highest, fmaxf(s[n], s[n + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
      if (kLazy && !((highest - row_max[half]) * scale_log2 > kSlack<P>)) highest = row_max[half];
      const float shift = highest == -infinity() ? 0.0f : __fmul_rn(highest, scale_log2);
      rescale[half] =
          row_max[half] == -infinity() ? 0.0f : exp2_approx(__fmul_rn(row_max[half], scale_log2) - shift);
      row_max[half] = highest;
      float sum = 0.0f;
#pragma unroll
      for (int n = 2 * half; n < kS; n += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[n + e] = exp2_approx(fmaf(s[n + e], scale_log2, -shift));
          sum += s[n + e];
        }
      row_sum[half] = row_sum[half] * rescale[half] + sum;
    }
    if constexpr (P::kDropout) {
      unsigned dropped[(kS + 31) / 32];
      dropped_values<kS, false>(dropped, p, work.sequence.b * p.heads_q + work.h, row,
                                kv_begin + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kS; ++n)
        if (dropped[n / 32] >> (n % 32) & 1u) s[n] = 0.0f;
    }
  };
  if (kOwnO && work.count() == 0) release(at.q_empty());
  if (work.count() > 0) {
    float rescale[2];
    barrier_wait<P>(at.k_full(before), at.phase(before));
    wait_for_turn<Places::kGroups>(group);
    start_scores(0);
    pass_turn<Places::kGroups>(group);
    multiply_wait<0>();
    scores_are_done(0);
    softmax(0, rescale);
    as_left_operand<Element>(probability, s);
    for (int i = 1; i < work.count(); ++i) {
      barrier_wait<P>(at.k_full(before + i), at.phase(before + i));
      wait_for_turn<Places::kGroups>(group);
      start_scores(i);
      wait_for_v(i - 1);
      start_output(i - 1);
      pass_turn<Places::kGroups>(group);
      multiply_wait<1>();
      scores_are_done(i);
      softmax(i, rescale);
      finish_before_wait(row_sum[0] + row_sum[1], at.base);
      multiply_wait<0>();
      pin(o);
      release(at.v_empty(before + i - 1));
      if (!kLazy || __any_sync(kWholeWarp, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kO; ++n) o[n] *= rescale[n / 2 % 2];
      }
      as_left_operand<Element>(probability, s);
    }
    const int last = work.count() - 1;
    wait_for_v(last);
    start_output(last);
    multiply_wait<0>();
    pin(o);
    release(at.v_empty(before + last));
  }

  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(kWholeWarp, sum, 1);
    sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    // As in sm80/forward.cuh: the sum is relative to a rounded shift, and the LSE is not.
    const float highest = P::kHasScore ? row_max[half] : __fmul_rn(row_max[half], p.softmax_scale);
    const float rest = fmaf(row_max[half], scale_log2, -__fmul_rn(row_max[half], scale_log2));
    const float lse = sum > 0.0f ? highest + (log2f(sum) - rest) * kLn2 : -infinity();
    const RowEnd end = end_of_row<P>(p, work.h, lse);
    const int q = row + half * 8;
    if (p.lse != nullptr && lane % 4 == 0 && q < seqlen_q)
      p.lse[work.sequence.lse_row(p, work.h) + q] = end.lse;
    scale[half] = sum > 0.0f ? (P::kDropout ? p.keep_scale : 1.0f) / sum * end.factor : 0.0f;
  }
  // Without a place of its own, O takes that of the rows of Q that only this warp group has read.
  if constexpr (!kOwnO) named_barrier_sync(1 + Places::kGroups + group, 128);
  const int first_row = group * 64 + warp * 16;
  store_rows<Element, P::kBr>(at.shared + Places::kLayout.o(), first_row, 0, P::kHeadDimV / 8, o, scale[0],
                              scale[1], work.sequence.q_pointer(p.o, work.h, 0), p.o.stride_s, work.q_begin,
                              seqlen_q);
  if constexpr (!kOwnO) {
    publish_to_async_proxy();
    release(at.q_empty());
  }
}

template <class P>
__device__ __forceinline__ void consume(const Params& p, const ForwardPlaces<P>& at, int group) {
  constexpr int kGroups = ForwardPlaces<P>::kGroups;
  int before = 0;
  if (group == kGroups - 1) pass_turn<kGroups>(group);
  for (int round = 0;; ++round) {
    barrier_wait<P>(at.q_full(), round & 1);
    const ForwardWork<P>& work = at.work(round);
    if (work.h < 0) break;
    compute(p, at, work, group, before);
    before += work.count();
  }
  if (group == 0) wait_for_turn<kGroups>(group);  // takes the turn that nobody else wants
}

template <class P>
__device__ void forward(const Params& p, const TensorMaps& maps) {
  using Places = ForwardPlaces<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  Places at;
  at.base = (shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment;
  at.shared = shared + (at.base - shared_address(shared));
  if (threadIdx.x == 0) {
    barrier_init(at.q_full(), 1);
    barrier_init(at.q_empty(), Places::kGroups * 4);
    for (int stage = 0; stage < P::kStages; ++stage) {
      barrier_init(at.k_full(stage), 1);
      barrier_init(at.v_full(stage), 1);
      barrier_init(at.k_empty(stage), Places::kGroups * 4);
      barrier_init(at.v_empty(stage), Places::kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  if (group < 0) {
    lower_register_limit<producer_registers(Places::kGroups)>();
    if (threadIdx.x == 0) produce(p, at, maps);
  } else {
    raise_register_limit<consumer_registers(Places::kGroups)>();
    consume(p, at, group);
  }
}

}  // namespace flashjit::sm90
