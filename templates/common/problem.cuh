// What a rendered source tells the templates. A kernel source is one include of a family's template, one
// struct like the one below with this problem's constants and generated hooks, and its extern "C" entries.
#pragma once

#include "flashjit/common/causal.cuh"
#include "flashjit/common/params.cuh"

namespace flashjit {

struct fp16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};

/// How much of a tile attends.
enum class TileClass : int { empty, partial, full };

/// Half-open range of queries or keys.
struct Range {
  int begin, end;
};

__device__ __forceinline__ int min(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max(int a, int b) { return a > b ? a : b; }

/// The shape of a generated problem; an editor sees it, NVRTC never instantiates it.
struct ExampleProblem {
  using Element = bf16;             // fp16, bf16 or float
  static constexpr int kArch = 80;  // compute capability compiled for
  static constexpr bool kBackward = false;
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr bool kDropout = false;
  static constexpr bool kKvLengths = false;
  static constexpr bool kVarlen = false;
  static constexpr bool kSinks = false;
  static constexpr bool kBlockMap = false;
  static constexpr bool kDeterministic = false;
  static constexpr int kBlockQ = 0;  // of the block map
  static constexpr int kBlockKv = 0;
  static constexpr bool kHasScore = false;  // false: score() is the identity
  static constexpr bool kHasMask = false;   // false: mask() is always true
  static constexpr int kBr = 128;           // the TileConfig
  static constexpr int kBc = 64;
  static constexpr int kWarps = 4;
  static constexpr int kStages = 1;
  static constexpr bool kQInRegisters = false;
  static constexpr int kDSplit = 1;
  static constexpr int kMinBlocks = 1;

  /// The score program, applied to softmax_scale * (Q K^T)[q, kv]; natural units.
  static __device__ __forceinline__ float score(const Params&, float s, int /*b*/, int /*h*/, int /*q*/,
                                                int /*kv*/) {
    return s;
  }
  /// d score / d s at the same place, from the score before the program.
  static __device__ __forceinline__ float score_grad(const Params&, float /*s*/, int /*b*/, int /*h*/,
                                                     int /*q*/, int /*kv*/) {
    return 1.0f;
  }
  /// Whether the pair attends. Lengths, padding and block maps are not its business.
  static __device__ __forceinline__ bool mask(const Params&, int /*b*/, int /*h*/, int /*q*/, int /*kv*/) {
    return true;
  }
  /// What mask() says over the tile [q.begin, q.end) x [kv.begin, kv.end). Never empty or full when it is
  /// not.
  static __device__ __forceinline__ TileClass classify_tile(const Params&, int /*b*/, int /*h*/, Range /*q*/,
                                                            Range /*kv*/) {
    return TileClass::full;
  }
  /// Keys outside of this range attend to none of the queries in `q`; within [0, seqlen_kv].
  static __device__ __forceinline__ Range kv_bounds(const Params& p, int /*b*/, int /*h*/, Range /*q*/) {
    return {0, p.seqlen_kv};
  }
  /// Queries outside of this range attend to none of the keys in `kv`; within [0, seqlen_q].
  static __device__ __forceinline__ Range q_bounds(const Params& p, int /*b*/, int /*h*/, Range /*kv*/) {
    return {0, p.seqlen_q};
  }
};

}  // namespace flashjit
