// After the forward pass by stream-K: O and LSE of the work tiles that shares cut, each from its parts, by
// the formula of combine.cuh.
#pragma once

#include "flashjit/sm90/stream_k.cuh"

namespace flashjit::sm90 {

/// Joins the parts of the work tile that begins in a share and does not end in it. A warp for each row; grid:
/// shares * rows that a work tile may have / 4.
template <class P>
__device__ void combine_parts(const Params& p) {
  constexpr int kRows = 4, kChunks = P::kHeadDimV / 4, kLaneChunks = (kChunks + 31) / 32;
  constexpr int kAtOnce = max(8 / kLaneChunks, 2);
  wait_for_prior_grid<P>();
  const int blocks = static_cast<int>(gridDim.x) / p.num_splits;  // of a share
  const int cta = static_cast<int>(blockIdx.x) / blocks, share = cta / p.head_lanes,
            lane = cta % p.head_lanes;
  const int row = static_cast<int>(blockIdx.x) % blocks * kRows + static_cast<int>(threadIdx.x) / 32;
  const int thread = static_cast<int>(threadIdx.x) % 32;

  const CutTile cut = p.cut_tiles[cta];
  if (cut.shares_end == 0) return;
  TileCoord coord;
  coord.batch_head = cut.batch_head;
  coord.q_tile = cut.q_tile;
  coord.warpgroups = {0, P::kBr / kWarpgroupRows};
  coord.split = kWhole;
  coord.kv_tiles = {0, 0};
  const WorkTile<P> tile(p, coord);
  const RowPlace place = row_place(p, tile, row / kWarpgroupRows, row % kWarpgroupRows);
  if (place.q < 0) return;

  // The last part is its share's first, the others are their share's last.
  const auto row_in = [&](int other) {
    return row_of_part<P>(part_of_share(p, other, lane, other + 1 < cut.shares_end), 0, row);
  };
  float highest = -infinity(), sum = 0.0f;
  float4 o[kLaneChunks] = {};
  // Several parts at once, and LSE beside O, so that reads do not wait for each other.
#pragma unroll 1
  for (int first = share; first < cut.shares_end; first += kAtOnce) {
    float lse[kAtOnce];
    float4 x[kAtOnce][kLaneChunks];
#pragma unroll
    for (int part = 0; part < kAtOnce; ++part) {
      const bool exists = first + part < cut.shares_end;
      const long long from = exists ? row_in(first + part) : 0;
      lse[part] = exists ? p.lse_splits[from] : -infinity();
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const int chunk = thread + i * 32;
        x[part][i] = {};
        if (exists && chunk < kChunks)
          x[part][i] = reinterpret_cast<const float4*>(o_of_part<P>(p, from))[chunk];
      }
    }
    const float before = highest;
#pragma unroll
    for (int part = 0; part < kAtOnce; ++part) highest = fmaxf(highest, lse[part]);
    const float shift = highest == -infinity() ? 0.0f : highest, rescale = expf(before - shift);
    sum *= rescale;
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i)
      o[i] = {o[i].x * rescale, o[i].y * rescale, o[i].z * rescale, o[i].w * rescale};
#pragma unroll
    for (int part = 0; part < kAtOnce; ++part) {
      const bool has_o = lse[part] != -infinity();  // else there is memory, but it was not written
      const float weight = expf(lse[part] - shift);
      sum += weight;
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const auto add = [&](float& to, float value) { to = has_o ? fmaf(weight, value, to) : to; };
        add(o[i].x, x[part][i].x), add(o[i].y, x[part][i].y);
        add(o[i].z, x[part][i].z), add(o[i].w, x[part][i].w);
      }
    }
  }
  const RowEnd row_end = with_sink<P>(p, place.h, sum > 0.0f ? highest + logf(sum) : -infinity());
  const float factor = sum > 0.0f ? row_end.factor / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneChunks; ++i) {
    const int chunk = thread + i * 32;
    if (chunk >= kChunks) break;
    store_columns(tile.sequence.template q_pointer<OutElement<P>>(p.o, place.h, place.q) + chunk * 4,
                  {o[i].x * factor, o[i].y * factor, o[i].z * factor, o[i].w * factor});
  }
  if (p.lse != nullptr && thread == 0) p.lse[tile.sequence.lse_row(p, place.h) + place.q] = row_end.lse;
}

}  // namespace flashjit::sm90
