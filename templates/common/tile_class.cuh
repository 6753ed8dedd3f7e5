// How much of a tile attends by block map and mask program together.
#pragma once

#include "flashjit/common/visible.cuh"

namespace flashjit {

/// The class of a tile by the block map alone. The ranges are within the tensors and not empty.
template <class Problem>
__device__ __forceinline__ TileClass classify_map(const Params& p, int b, int h, Range q, Range kv) {
  bool any = false, all = true;
  for (int row = q.begin / Problem::kBlockQ; row <= (q.end - 1) / Problem::kBlockQ; ++row) {
    const unsigned char* entries = block_map_row<Problem>(p, b, h, row * Problem::kBlockQ);
    for (int column = kv.begin / Problem::kBlockKv; column <= (kv.end - 1) / Problem::kBlockKv; ++column) {
      const bool attends = entries[column] != 0;
      any |= attends;
      all &= attends;
    }
  }
  return all ? TileClass::full : any ? TileClass::partial : TileClass::empty;
}

/// The class of a tile by block map and mask program. The ranges are within the sequence and not empty.
/// Without the bounds of the mask's terms it is "partial" wherever the mask reads tensors.
template <class Problem>
__device__ __forceinline__ TileClass tile_class(const Params& p, const typename Problem::Head& head, Range q,
                                                Range kv, const Interval* q_reads = nullptr,
                                                const Interval* kv_reads = nullptr) {
  constexpr bool kReads = Problem::kMaskRowTerms + Problem::kMaskColumnTerms > 0;
  TileClass map = TileClass::full, mask = TileClass::full;
  if constexpr (Problem::kBlockMap) {
    map = classify_map<Problem>(p, head.b, head.h, q, kv);
    if (map == TileClass::empty) return TileClass::empty;
  }
  if constexpr (Problem::kHasMask) {
    mask = kReads && q_reads == nullptr ? TileClass::partial
                                        : Problem::classify_tile(p, head, q, kv, q_reads, kv_reads);
  }
  if (mask == TileClass::empty) return TileClass::empty;
  return map == TileClass::full && mask == TileClass::full ? TileClass::full : TileClass::partial;
}

}  // namespace flashjit
