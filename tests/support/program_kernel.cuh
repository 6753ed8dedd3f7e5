// Calls each hook of a Problem, without any attention around.
#pragma once

#include "flashjit/common/element.cuh"
#include "program_params.cuh"

namespace flashjit::test {

__device__ Position position_of(int at) {
  return {at, static_cast<float>(at / 4 * 4), static_cast<float>(at % 4)};
}
__device__ Range range_of(int tile, int size, int length) {
  return {tile * size, min(tile * size + size, length)};
}

/// Bounds of what the mask reads over a range.
template <class P>
__device__ void find_reads(const Params& p, const typename P::Head& head, Range q, Range kv,
                           Interval* q_reads, Interval* kv_reads) {
  for (int i = 0; i < P::kMaskRowTerms; ++i) {
    q_reads[i] = {2147483647LL, -2147483648LL};
    for (int at = q.begin; at < q.end; ++at) {
      const int value = P::mask_row_term(p, head, i, at);
      q_reads[i] = join(q_reads[i], {value, value});
    }
  }
  for (int i = 0; i < P::kMaskColumnTerms; ++i) {
    kv_reads[i] = {2147483647LL, -2147483648LL};
    for (int at = kv.begin; at < kv.end; ++at) {
      const int value = P::mask_column_term(p, head, i, at);
      kv_reads[i] = join(kv_reads[i], {value, value});
    }
  }
}

template <class P>
__device__ void evaluate(const ProgramParams& t) {
  const Params& p = t.base;
  const typename P::Head head = P::head(p, t.b, t.h, p.seqlen_q, p.seqlen_kv);
  const int rows = (p.seqlen_q + t.tile_q - 1) / t.tile_q,
            columns = (p.seqlen_kv + t.tile_kv - 1) / t.tile_kv;
  for (int i = threadIdx.x; i < p.seqlen_q * p.seqlen_kv; i += blockDim.x) {
    const Position q = position_of(i / p.seqlen_kv), kv = position_of(i % p.seqlen_kv);
    t.score[i] = P::score(p, head, t.dot[i], q, kv);
    t.score_grad[i] = P::score_grad(p, head, t.dot[i], q, kv);
    t.attends[i] = P::mask(p, head, q, kv);
    P::add_capture_grads(p, head, 1.0f, t.dot[i], q, kv,
                         [](auto, float* at, float value) { add_to_memory(at, value); });
  }
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const Range q = range_of(i / columns, t.tile_q, p.seqlen_q),
                kv = range_of(i % columns, t.tile_kv, p.seqlen_kv);
    Interval q_reads[P::kMaskRowTerms + 1], kv_reads[P::kMaskColumnTerms + 1];
    find_reads<P>(p, head, q, kv, q_reads, kv_reads);
    t.tile_class[i] = static_cast<int>(P::classify_tile(p, head, q, kv, q_reads, kv_reads));
  }
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    const Range bounds = P::kv_bounds(p, head, range_of(i, t.tile_q, p.seqlen_q));
    t.kv_bounds[2 * i] = bounds.begin, t.kv_bounds[2 * i + 1] = bounds.end;
  }
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const Range bounds = P::q_bounds(p, head, range_of(i, t.tile_kv, p.seqlen_kv));
    t.q_bounds[2 * i] = bounds.begin, t.q_bounds[2 * i + 1] = bounds.end;
  }
}

}  // namespace flashjit::test
