// The producer warp of the backward pass: it loads K, V, Q, dO, LSE and D.
#pragma once

#include "flashjit/sm90/backward_schedule.cuh"
#include "flashjit/sm90/plane.cuh"

namespace flashjit::sm90 {

/// Finds the KV tiles and loads them and their Q tiles as soon as there is room. By one thread.
template <class P>
__device__ __forceinline__ void produce(const Params& p, const BackwardTile<P>& tile,
                                        const TensorMaps& maps) {
  using Tile = BackwardTile<P>;
  unsigned n = 0, i = 0;
  // Without queries there is no work, and nobody has cleared the counter.
  while (p.seqlen_q > 0) {
    const unsigned number = take_work(p, tile, n);
    if (number >= kv_works<P>(p)) {
      tell_work(tile, n, number);  // that there are no more
      break;
    }
    const KvWork<P> work(p, number);
    const Sequence<P> sequence(p, work.b);
    QWalk<P> walk(p, sequence, work, block_keys<P>(p, tile.rank()));
    StagedTile now = walk.next(p, sequence);
    if (now.head < 0) continue;
    tell_work(tile, n, number);
    const int place = n % Tile::kLayout.kept_places(), batch = sequence.batch();
    const int own = tile.rank() * Tile::kKeys, kv_begin = work.kv_tile * P::kBc + own;
    tile.places()[place] = {sequence, work.h_kv, kv_begin, sequence.kv_limit(p)};
    // Where there are none the tensor may be none, too: those who compute clear what is not loaded then.
    const bool has_keys = !Tile::kSumsDq || !kForeignKeys<P> || kv_begin < sequence.kv_limit(p);
    const auto await_kv_room = [&] { barrier_wait<P>(tile.kv_empty(), n & 1 ^ 1); };
    bool first = true;
#pragma unroll 1
    while (now.head >= 0) {
      const StagedTile next = walk.next(p, sequence);
      const int q_begin = now.tile * P::kBr, q_row = sequence.q_row(q_begin);
      const long long row = sequence.stats_row(p, now.head) + q_begin;
      const int last = next.head < 0 ? work.part + 1 : 0;
      tile.staged(i) = {now, row, place, first, static_cast<short>(last)};
      const int slot = i % P::kStages, dout_slot = i % Tile::kDoutStages;
      const unsigned q_full = tile.q_full(slot), dout_full = tile.dout_full(dout_slot);
      barrier_wait<P>(tile.q_empty(slot), i / P::kStages & 1 ^ 1);
      barrier_expect(q_full, Tile::kQBytes + (P::kQueryValues ? 2 : 1) * P::kBr * 4 +
                                 (first && has_keys ? Tile::kKBytes + Tile::kOtherKBytes : 0));
      load_tile<P::kBr, Tile::kDim>(tile.q(slot), maps.q, q_full, q_row, now.head, batch);
      load_line(tile.base + Tile::kLayout.lse() + slot * P::kBr * 4, p.lse_log2 + row, P::kBr * 4, q_full);
      if constexpr (P::kQueryValues)
        load_line(tile.base + Tile::kLayout.values() + slot * P::kBr * 4, p.query_values + row, P::kBr * 4,
                  q_full);
      barrier_wait<P>(tile.dout_empty(dout_slot), i / Tile::kDoutStages & 1 ^ 1);
      // By dO those who clear know that nobody reads the keys before.
      if (first && !has_keys) await_kv_room();
      const int dout_bytes = Tile::kDoutBytes + P::kBr * 4 + (first && has_keys ? Tile::kVBytes : 0);
      if constexpr (Tile::kHasPlane) {
        expect_with_plane<P::kBr, Tile::kKeys>(p, maps, dout_full, dout_bytes,
                                               P::plane(p, sequence.head(p, now.head)), tile.plane(dout_slot),
                                               q_begin, kv_begin);
      } else {
        barrier_expect(dout_full, dout_bytes);
      }
      load_tile<P::kBr, Tile::kDimV>(tile.dout(dout_slot), maps.o, dout_full, q_row, now.head, batch);
      load_line(tile.base + Tile::kLayout.d() + slot * P::kBr * 4, p.d + row, P::kBr * 4, dout_full);
      if (first && has_keys) {
        const int kv_row = sequence.kv_row(kv_begin);
        await_kv_room();
        load_tile<Tile::kKeys, Tile::kDim>(tile.k(), maps.k, q_full, kv_row, work.h_kv, batch);
        if constexpr (Tile::kExchangesDs) {
          load_tile<Tile::kKeys, Tile::kDim / 2>(tile.other_k(), maps.k, q_full,
                                                 kv_row + Tile::kKeys - 2 * own, work.h_kv, batch,
                                                 tile.first_other_column() / kSliceColumns);
        }
        load_tile<Tile::kKeys, Tile::kDimV>(tile.v(), maps.v, dout_full, kv_row, work.h_kv, batch);
      }
      first = false;
      now = next;
      ++i;
    }
    ++n;
  }
  barrier_wait<P>(tile.q_empty(i % P::kStages), i / P::kStages & 1 ^ 1);
  tile.staged(i).head = -1;
  barrier_arrive(tile.q_full(i % P::kStages));
}

}  // namespace flashjit::sm90
