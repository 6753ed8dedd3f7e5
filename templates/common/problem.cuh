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

/// A query's or a key's position in its sequence; also as a float, base + offset, exact below 2^24. Kernels
/// add constants to a thread's first position, so that `offset` is known when the kernel is compiled and a
/// program's floats of positions cost no conversion.
struct Position {
  int at;
  float base, offset;
};

/// Closed interval of integers.
struct Interval {
  long long low, high;
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
  static constexpr int kBr = 128;  // the TileConfig
  static constexpr int kBc = 64;
  static constexpr int kWarps = 4;
  static constexpr int kStages = 1;
  static constexpr bool kQInRegisters = false;
  static constexpr int kDSplit = 1;
  static constexpr int kMinBlocks = 1;

  static constexpr bool kHasScore = false;   // false: the score is softmax_scale * (Q K^T)
  static constexpr bool kScoreGrad = false;  // false: d score / d score before the program is 1
  static constexpr bool kHasMask = false;    // false: mask() is always true
  static constexpr bool kListed = false;     // the mask's tiles are visited by lists, not in a range
  static constexpr bool kEvaluateTiles =
      false;  // lists: a "partial" of classify_tile() is looked into, pair by pair
  static constexpr bool kMaskUsesBatch = false, kMaskUsesHead = false;
  static constexpr int kQReads = 0,
                       kKvReads = 0;       // lists: what the mask reads at a query alone, at a key alone
  static constexpr int kCaptureGrads = 0;  // captured tensors that want a gradient

  /// What programs need of one head: its place, its lengths, and what depends on those alone.
  struct Head {
    int b, h, h_kv, seqlen_q, seqlen_kv;
  };
  static __device__ __forceinline__ Head head(const Params& p, int b, int h, int seqlen_q, int seqlen_kv) {
    return {b, h, h / (p.heads_q / p.heads_kv), seqlen_q, seqlen_kv};
  }
  /// The score of a pair, in natural units; `dot` is (Q K^T)[q, kv].
  static __device__ __forceinline__ float score(const Params& p, const Head&, float dot, Position /*q*/,
                                                Position /*kv*/) {
    return __fmul_rn(dot, p.softmax_scale);
  }
  /// d score / d (softmax_scale * dot).
  static __device__ __forceinline__ float score_grad(const Params&, const Head&, float /*dot*/,
                                                     Position /*q*/, Position /*kv*/) {
    return 1.0f;
  }
  /// Adds to the gradients of captured tensors; `ds` is d loss / d score, not zero.
  static __device__ __forceinline__ void add_capture_grads(const Params&, const Head&, float /*ds*/,
                                                           float /*dot*/, Position /*q*/, Position /*kv*/) {}
  /// Whether the pair attends. Lengths, padding and block maps are not its business.
  static __device__ __forceinline__ bool mask(const Params&, const Head&, Position /*q*/, Position /*kv*/) {
    return true;
  }
  /// The i-th value that the mask reads at a query alone, and at a key alone.
  static __device__ __forceinline__ int q_read(const Params&, const Head&, int /*i*/, int /*q*/) { return 0; }
  static __device__ __forceinline__ int kv_read(const Params&, const Head&, int /*i*/, int /*kv*/) {
    return 0;
  }
  /// What mask() says over the tile [q.begin, q.end) x [kv.begin, kv.end), which is not empty. Never empty or
  /// full when it is not. The bounds of what is read are those over the tile's queries and keys.
  static __device__ __forceinline__ TileClass classify_tile(const Params&, const Head&, Range /*q*/,
                                                            Range /*kv*/, const Interval* /*q_reads*/,
                                                            const Interval* /*kv_reads*/) {
    return TileClass::full;
  }
  /// Keys outside of this range attend to none of the queries in `q`; within [0, seqlen_kv].
  static __device__ __forceinline__ Range kv_bounds(const Params&, const Head& head, Range /*q*/) {
    return {0, head.seqlen_kv};
  }
  /// Queries outside of this range attend to none of the keys in `kv`; within [0, seqlen_q].
  static __device__ __forceinline__ Range q_bounds(const Params&, const Head& head, Range /*kv*/) {
    return {0, head.seqlen_q};
  }
};

}  // namespace flashjit
