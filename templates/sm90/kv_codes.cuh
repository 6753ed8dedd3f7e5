// K and V of 8 bits. TMA brings tiles of codes to slots of their own, and a warp their keys' scales; a
// warpgroup makes elements of them in the stages of K and V, where the consumers find what they find of 16
// bits. Scales of heads are the consumers', in the score's scale and in O; of scales of keys, K's are the
// consumers', in S, and V's are in what this warpgroup writes.
#pragma once

#include "flashjit/sm90/forward_mainloop.cuh"
#include "flashjit/sm90/forward_producer.cuh"

namespace flashjit::sm90 {

/// Visits the KV tiles of all work tiles in the order in which KvLoader loads them. `visit_k(work, i, n)` is
/// of K of tile n, KV tile i of its work tile, and returns what `visit_v(found, n)` gets.
template <class P, class VisitK, class VisitV>
__device__ __forceinline__ void visit_kv_tiles(const ForwardStorage<P>& smem, const VisitK& visit_k,
                                               const VisitV& visit_v) {
  int n = 0;
  decltype(visit_k(smem.work(0), 0, 0)) before{};
  for_each_work_tile(smem, [&](const WorkTile<P>& work) {
#pragma unroll 1
    for (int i = work.count() - 1; i >= 0; --i, ++n) {
      const auto found = visit_k(work, i, n);
      if (n > 0) visit_v(before, n - 1);
      before = found;
    }
  });
  if (n > 0) visit_v(before, n - 1);
}

/// The keys of a KV tile: `valid` of them exist; the work tile reads keys from `first_key` on.
template <class P>
struct TileKeys {
  Sequence<P> sequence;
  int h_kv = 0, begin = 0, valid = 0, first_key = 0;
};

/// Starts the copies of the keys' scales, which count as one of each lane's arrivals on `full`. By a warp.
template <class P>
__device__ __forceinline__ void copy_key_scales(float* to, const KvScales<P>& from, const TileKeys<P>& keys,
                                                unsigned full) {
  constexpr int kOwn = (P::kBc + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto has = [&](int row) { return from.reads(keys.begin + row) && row < keys.valid; };
  const float* scales[kOwn];  // before any copy, so that look-ups of pages do not wait for each other
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int row = own * 32 + lane;
    scales[own] = has(row) ? from.of_key(keys.begin + row) : from.some();
  }
#pragma unroll
  for (int own = 0; own < kOwn; ++own)
    if (const int row = own * 32 + lane; P::kBc % 32 == 0 || row < P::kBc)
      copy_async_4(shared_address(to + row), scales[own], has(row));
  barrier_arrive_after_copies(full);
}

/// Loads the scales of all keys that the CTA visits, K's and V's alternately. A warp does it.
template <class P>
struct KeyScaleLoader {
  static __device__ __forceinline__ bool is(int warp) { return warp / kQTilesPerCta<P> == 2; }
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const SegmentStart&, int) {
    visit_kv_tiles<P>(
        smem,
        [&](const WorkTile<P>& work, int i, int n) {
          const int begin = work.kv_begin(i);
          const TileKeys<P> keys{work.sequence, work.h / p.qhead_per_kvhead(), begin,
                                 min(work.sequence.seqused_kv(p) - begin, P::kBc), work.first_key_read(p)};
          RawKRing<P>::acquire(smem, n);
          copy_key_scales(smem.code_scales(smem.code_index_k(n)),
                          KvScales<P>(p, p.k_scale, keys.sequence, keys.h_kv, keys.first_key), keys,
                          smem.raw_k_full(n));
          return keys;
        },
        [&](const TileKeys<P>& keys, int n) {
          RawVRing<P>::acquire(smem, n);
          copy_key_scales(smem.code_scales(smem.code_index_v(n)),
                          KvScales<P>(p, p.v_scale, keys.sequence, keys.h_kv, keys.first_key), keys,
                          smem.raw_v_full(n));
        });
  }
};

/// Eight codes as elements, times a scale where there is one.
template <class P, class... Scale>
__device__ __forceinline__ uint4 elements_of_codes(uint2 codes, Scale... scale) {
  using Code = typename P::KvElement;
  const auto pair = [&](unsigned two) { return pair_of_fp16<ProductElement<P>>(two, scale..., scale...); };
  return {pair(fp16_of_codes<Code>(codes.x)), pair(fp16_of_upper_codes<Code>(codes.x)),
          pair(fp16_of_codes<Code>(codes.y)), pair(fp16_of_upper_codes<Code>(codes.y))};
}

/// Zeros for NaN.
template <class P>
__device__ __forceinline__ uint2 without_special_codes(uint2 codes) {
  unsigned words[2] = {codes.x, codes.y};
  clear_special_codes<typename P::KvElement>(words);
  return {words[0], words[1]};
}

/// Writes a tile of elements, rows of zeros from `valid` on, whose codes may be NaN; `kCut`: zeros for all
/// such codes. By a warpgroup: a thread has eight columns of every kRowStep-th row, at addresses that differ
/// by constants.
template <class P, int kColumns, bool kScaled, bool kCut = false>
__device__ __forceinline__ void convert_tile(char* tile, const char* codes, const float* scales, int valid) {
  constexpr int kChunks = kColumns / 8, kLanes = next_power_of_two(kChunks);
  constexpr int kRowStep = kConverterThreads / kLanes, kSteps = (P::kBc + kRowStep - 1) / kRowStep;
  static_assert(kRowStep % 4 == 0 && kLanes * 8 >= kColumns);
  constexpr int kMostLoads =
      P::kKeyScales || max(P::kHeadDim, P::kHeadDimV) > 128 ? 4 : 8;  // as registers allow
  constexpr int kLoads = min(kSteps, kMostLoads);
  const int thread = static_cast<int>(threadIdx.x) % kConverterThreads;
  const int chunk = thread & (kLanes - 1), first = thread / kLanes;
  if (kChunks < kLanes && chunk >= kChunks) return;
  const char* from = codes + first * kColumns + chunk * 8;
  const int to = chunk_offset<P::kBc>(first, chunk);
  const auto exists = [](int row) {
    return (kSteps % kLoads == 0 && P::kBc % kRowStep == 0) || row < P::kBc;
  };
#pragma unroll 1
  for (int begin = 0; begin < kSteps; begin += kLoads) {
    uint2 eight[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      if (const int rows = (begin + load) * kRowStep; exists(first + rows))
        eight[load] = *reinterpret_cast<const uint2*>(from + rows * kColumns);
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int rows = (begin + load) * kRowStep, row = first + rows;
      if (!exists(row)) break;
      if (kOutOfRangeKeys<P> && row >= valid) eight[load] = {0, 0};
      if constexpr (kCut) eight[load] = without_special_codes<P>(eight[load]);
      // Where four rows are a step, each second step's swizzle is another.
      const int flipped = kRowStep % 8 == 0 || load % 2 == 0 ? to : to ^ 4 * 16;
      uint4& at = *reinterpret_cast<uint4*>(tile + flipped + rows * kRowBytes);
      if constexpr (kScaled)
        at = elements_of_codes<P>(eight[load], scales[row]);
      else
        at = elements_of_codes<P>(eight[load]);
    }
  }
}

/// Converts all tiles that the CTA visits, K and V alternately. A warpgroup does it.
template <class P>
struct KvConverterGroup {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem, int) {
    const int thread = static_cast<int>(threadIdx.x) % kConverterThreads;
    const auto at = [&](unsigned address) { return smem.shared + (address - smem.base); };
    const auto finish = [&](unsigned full, unsigned codes_empty) {
      publish_to_async_proxy();
      barrier_arrive(full);
      release_codes<P>(codes_empty);
    };
    constexpr bool kClearsNan = kHidesKeys<P> && kFirstSpecialCode<typename P::KvElement> < 0x80;
    struct Keys {
      int valid;
      bool cut;  // a mask may hide some
    };
    visit_kv_tiles<P>(
        smem,
        [&](const WorkTile<P>& work, int i, int n) {
          const int entry = work.kv_tiles.entry(i), begin = tile_of_entry<P>(entry) * P::kBc,
                    valid = work.sequence.seqused_kv(p) - begin;
          RawKRing<P>::wait_full(smem, n);
          KRing<P>::acquire(smem, n);
          if constexpr (kProducerPostsEntries<P>)
            if (thread == 0) post_entry(p, smem, work, n, entry);
          convert_tile<P, P::kHeadDim, false>(at(smem.k(n)), at(smem.raw_k(n)), nullptr, valid);
          if constexpr (P::kKeyScales)
            for (int row = thread; row < P::kBc; row += kConverterThreads)
              smem.key_scales(n)[row] = smem.code_scales(smem.code_index_k(n))[row];
          finish(smem.k_full(n), smem.raw_k_empty(n));
          return Keys{valid, kClearsNan && !has_tile<P>(keys_of_work_tile(p, work), begin)};
        },
        [&](const Keys& keys, int n) {
          RawVRing<P>::wait_full(smem, n);
          VRing<P>::acquire(smem, n);
          char *tile = at(smem.v(n)), *codes = at(smem.raw_v(n));
          const float* scales = smem.code_scales(smem.code_index_v(n));
          if (kClearsNan && keys.cut)
            convert_tile<P, P::kHeadDimV, P::kKeyScales, kClearsNan>(tile, codes, scales, keys.valid);
          else
            convert_tile<P, P::kHeadDimV, P::kKeyScales>(tile, codes, scales, keys.valid);
          finish(smem.v_full(n), smem.raw_v_empty(n));
        });
  }
};
struct NoKvConverter {
  template <class... Arguments>
  static __device__ __forceinline__ void run(const Arguments&...) {}
};

}  // namespace flashjit::sm90
