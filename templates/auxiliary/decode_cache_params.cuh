// What the decode_cache entry takes, by value. Host and device include this file.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flashjit {

/// Keys of one head that a CTA of the decode_cache entry decodes.
constexpr int kDecodedKeys = 64;

/// The call, whose K and V are quantized, and where their elements go: [batch, heads_kv, seqlen_kv, dim].
struct DecodeCacheParams {
  Params call;
  TensorParam k, v;
};

}  // namespace flashjit
