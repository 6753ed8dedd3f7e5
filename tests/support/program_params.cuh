// The parameters of program_kernel.cuh. Host and device include this file.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flashjit::test {

/// All pairs of one head, and all tiles and ranges of a size; results by their place.
struct ProgramParams {
  Params base;
  int b, h, tile_q, tile_kv;
  const float* dot;  ///< [seqlen_q, seqlen_kv], as the results of pairs
  float* score;
  float* score_grad;
  int* attends;
  int* tile_class;  ///< [tiles of q, tiles of kv]
  int* kv_bounds;   ///< [tiles of q, 2]
  int* q_bounds;    ///< [tiles of kv, 2]
};

}  // namespace flashjit::test
