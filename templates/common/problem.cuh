// The contract between a rendered source and the templates. A kernel source is one include of a family's
// template, one struct like the one below with this problem's constants and generated hooks, and its extern
// "C" entries.
#pragma once

#include "flashjit/common/capture.cuh"
#include "flashjit/common/capture_grads.cuh"
#include "flashjit/common/interval.cuh"
#include "flashjit/common/params.cuh"
#include "flashjit/common/program_math.cuh"
#include "flashjit/common/program_support.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

/// The shape of a generated problem; an editor sees it, NVRTC never instantiates it.
struct ExampleProblem {
  using Element = bf16;             // of Q and O: fp16, bf16 or float
  using KvElement = bf16;           // of K and V: Element, or e4m3, e5m2 or int8, which have scales
  static constexpr int kArch = 80;  // compute capability compiled for
  static constexpr bool kBackward = false;
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr bool kDropout = false;
  static constexpr bool kDropoutPlace = false;  // its mask is a larger problem's
  static constexpr bool kKvLengths = false;
  static constexpr bool kVarlen = false;
  static constexpr bool kCache = false;         // K and V are a cache's; with kVarlen only Q is packed
  static constexpr int kPageRows = 0;           // of its pages; 0: it has slots
  static constexpr bool kSharedKv = false;      // forward: V is K's first columns
  static constexpr bool kIndices = false;       // queries have lists of keys: index_list.cuh
  static constexpr bool kSharedPrefix = false;  // all sequences have the same first keys
  static constexpr bool kSinks = false;
  static constexpr bool kRowMax = false;          // forward: the largest score of each row is a result
  static constexpr bool kSkipSoftmax = false;     // forward: tiles far below the maximum: skip_softmax.cuh
  static constexpr bool kSwizzledScales = false;  // forward: scales of blocks of O: out_scales.cuh
  static constexpr bool kKeyScales = false;       // scales of keys or pages; else a head has one
  static constexpr bool kQCodes = false;          // Q is of KvElement, too
  static constexpr bool kSumsOfFour = false;      // forward: the tensor cores may sum P V of four KV tiles
  static constexpr bool kSumsAll = false;         // forward: or of all: sm90/forward_code_sums.cuh
  static constexpr bool kQRope = false;           // forward: Q's columns behind V's are a tensor of their own
  static constexpr bool kFp32Out = false;         // O is fp32, whatever Q is
  static constexpr bool kTwoTerms = false;        // P and dS are two elements each: sm80/two_terms.cuh
  static constexpr bool kRunningState =
      false;                                 // forward: O and LSE of other keys are joined: running_state.cuh
  static constexpr bool kWeightMod = false;  // score() is P: there is no softmax, LSE or D
  static constexpr bool kFp32Grads = false;  // backward: so are dQ, dK and dV
  static constexpr bool kAddGrads = false;   // backward: they are added to values in memory, in fp32
  static constexpr bool kInvariant =
      false;  // forward: with kSplit, the splits of a row depend on its keys alone
  static constexpr bool kBlockMap = false;
  static constexpr bool kDeterministic = false;
  static constexpr int kBlockQ = 0;  // of the block map
  static constexpr int kBlockKv = 0;
  static constexpr bool kTileLists = false;  // tiles are visited by lists, which the tile_lists entry makes
  static constexpr bool kListsByBatch = false;  // batch entries, or heads, have lists of their own also where
  static constexpr bool kListsByHead = false;   // the block map does not tell them apart
  // The rows of a Q tile whose meeting with a KV tile its list records as one bit: kBr, or fewer, and then
  // all their pairs attend or none. Backward: more than kBr where two entries are visited at a time.
  static constexpr int kListedRows = 128;
  static constexpr int kBr = 128;  // the TileConfig
  static constexpr int kBc = 64;
  static constexpr int kWarps = 4;
  static constexpr int kStages = 1;
  static constexpr bool kQInRegisters = false;
  static constexpr int kDSplit = 1;
  static constexpr int kMinBlocks = 1;
  static constexpr bool kSplit = false;
  static constexpr bool kFindsRowStats =
      false;  // backward: clusters may find D themselves: backward_schedule.cuh
  static constexpr bool kClaimsTiles = false;  // backward: CTAs claim their first KV tile: semaphores.cuh
  static constexpr bool kLseLog2 = false;      // backward: LSE in units of log2, too: lse_log2.cuh
  static constexpr bool kFixedParts =
      false;  // sm90 forward: kInvariant, and CTAs share the parts out: tma/fixed_parts.cuh
  static constexpr bool kClusterSplit =
      false;  // sm90 forward: with kSplit, within clusters: sm90/forward_cluster.cuh
  static constexpr bool kPackGqa = false;
  static constexpr bool kJoinsLists = false;  // lists of a tile's queries are joined: joined_list.cuh
  static constexpr bool kTma = false;         // sm80: TMA copies K and V: sm80/kv_loader_tma.cuh
  // Packed sequences with more or fewer queries are another kernel's.
  static constexpr int kFewestQueries = -0x7fffffff - 1;
  static constexpr int kMostQueries = 0x7fffffff;
  static constexpr bool kCheckIndices = false;  // indices that are no keys are printed: index_list.cuh
  static constexpr bool kCheckWaits = false;    // waits that hang trap: wait.cuh

  // What a family decides for kernels of its own:
  //   Mma, Copies     sm75, sm80: types of its instructions (sm80/instructions.cuh)
  //   kSharedBytes    sm75 to sm90: dynamic shared memory of the main loop
  //   kExchanged      sm75, sm80 backward: values of a pair that one warp of two hands to the other
  //   kMostBoxRows    sm90 forward: rows of K and V that TMA copies at a time, at most: tma/kv_tile.cuh
  //   kQTilesPerCta   sm90 forward: Q tiles that a CTA computes at a time
  //   kHoldsQ         sm90 forward: Q is multiplied from registers
  //   kTmaStoresO     sm90 forward: O leaves through shared memory and TMA
  //   kCountsTiles    sm90 forward: CTAs take Q tiles from a counter
  //   kRaggedTiles    sm90 forward: with kCountsTiles, sequences have Q tiles of their own number
  //   kFp16Products   sm90 forward: codes of 8 bits are multiplied as fp16
  //   kStreamK        sm90 forward: with kSplit, all CTAs have equal shares of all work (stream_k.cuh)
  //   kQTilesAsHeads  sm90 forward: with kStreamK, the Q tiles of a sequence meet the same KV tiles
  //   kCascade        sm90 forward: with kStreamK, keys that all sequences share are read once for all
  //   kSplitTailWave  sm90 forward: the Q tiles of the last, partial wave are split

  // What follows is generated from the programs: runtime/expr/facts.hpp, runtime/expr/emit.cpp.
  static constexpr bool kHasScore = false;         // false: score() is the identity
  static constexpr bool kHasMask = false;          // false: mask() is always true
  static constexpr bool kScoreGrad = false;        // false: score_grad() is 1
  static constexpr bool kScoreLine = false;        // the score is a line along kv, see score_offset()
  static constexpr bool kPairSigmoid = false;      // a weight of one sigmoid: there is sigmoid_exponent()
  static constexpr bool kFiniteWeight = false;     // a weight and its derivative are finite where scores are
  static constexpr bool kBiasTile = false;         // there are bias_tile() and scores of its elements
  static constexpr bool kNearMinScores = false;    // scores may be near the least float: exponent_factor()
  static constexpr bool kScoreRowTerm = false;     // there are score_row_term() and score_of_terms()
  static constexpr bool kScoreColumnTerm = false;  // there are score_column_term() and score_of_terms()
  // How many bounds the mask consists of: the keys of a query are then kv_bounds() of it alone. 0: the mask
  // is something else.
  static constexpr int kMaskBounds = 0;
  static constexpr bool kMaskBoundsFirstKey = false;  // kv_bounds() may begin after key 0
  // The mask is the same for all pairs of so many queries and keys, from multiples of these on; 0: for all.
  static constexpr int kMaskBlockQ = 0;
  static constexpr int kMaskBlockKv = 0;
  static constexpr bool kListed = false;         // the mask's tiles are visited by lists, not within bounds
  static constexpr bool kEvaluateTiles = false;  // listed only: lists evaluate partial tiles pair by pair
  static constexpr bool kMaskUsesHead = false;   // the mask depends on h or h_kv
  static constexpr bool kMaskTerms = false;      // there is mask_of_terms()
  static constexpr int kMaskRowTerms = 0;        // listed only: how many mask_row_term() there are
  static constexpr int kMaskColumnTerms = 0;     // and mask_column_term()
  static constexpr int kCaptureGrads = 0;        // additions of add_capture_grads()
  // How many of them are AccumulationPattern::by_difference. They are the last, but AccumulationPattern::own,
  // which has bias_tile_grad(), may stand behind them.
  static constexpr int kDifferenceGrads = 0;
  static constexpr bool kBiasTileGrad = false;
  static constexpr bool kOutMod = false;   // there are out_mod(), out_mod_grad() and add_out_mod_grads()
  static constexpr bool kOutTile = false;  // and out_tile() and out_mod_of_element(), see common/out_tile.cuh
  static constexpr bool kOutTileGrad = false;  // and out_tile_grad(): its gradient is the only one
  static constexpr int kOutModGrads = 0;       // additions of add_out_mod_grads()

  /// What the programs need of one head of one batch entry, made once for a work tile; the lengths are the
  /// sequence's.
  struct Head {
    int b, h, h_kv, seqlen_q, seqlen_kv;
  };
  static __device__ __forceinline__ Head head(const Params& p, int b, int h, int seqlen_q, int seqlen_kv) {
    return {b, h, h / p.qhead_per_kvhead(), seqlen_q, seqlen_kv};
  }

  /// The score program, applied to p.softmax_scale * dot where dot = (Q K^T)[q, kv]; natural units.
  static __device__ __forceinline__ float score(const Params& p, const Head&, float dot, Position /*q*/,
                                                Position /*kv*/) {
    return dot * p.softmax_scale;
  }
  // With kBiasTile there are bias_tile(p, head), the BiasTile that the score reads, and score_of_element(p,
  // head, dot, element, q, kv) and score_grad_of_element(), for a kernel that has read the pair's element.
  // With kScoreRowTerm there is score_row_term(p, head, q), which reads tensors by the query; with
  // kScoreColumnTerm score_column_term(p, head, kv); and with either score_of_terms(p, head, dot, of_query,
  // of_key, q, kv) and score_grad_of_terms(), for a kernel that finds each term once for a row or a column of
  // a tile.
  // With kScoreLine the score is p.softmax_scale * dot + score_offset(p, head, q, kv), which grows by
  // score_slope(p, head) a key.
  // With kPairSigmoid the score is score_of_sigmoid(p, head, dot, sigmoid, q, kv), and its derivative
  // score_grad_of_sigmoid(), where the sigmoid is 1 / (1 + exp2(sigmoid_exponent(p, head, dot, q, kv))); both
  // are finite where dot is.
  /// d score / d (p.softmax_scale * dot) of the same pair.
  static __device__ __forceinline__ float score_grad(const Params&, const Head&, float /*dot*/,
                                                     Position /*q*/, Position /*kv*/) {
    return 1.0f;
  }
  /// Calls add(Addition, float* at, float value) for each of the kCaptureGrads additions of a pair to
  /// gradients of captures, where ds = d loss / d score.
  template <class Add>
  static __device__ __forceinline__ void add_capture_grads(const Params&, const Head&, float /*ds*/,
                                                           float /*dot*/, Position /*q*/, Position /*kv*/,
                                                           Add&& /*add*/) {}
  // With kBiasTileGrad there is bias_tile_grad(p, head), a BiasTileGrad: where the last of the additions adds
  // the gradient of p.softmax_scale * dot.

  /// Whether the pair attends, by the mask program alone: lengths and block maps come on top.
  static __device__ __forceinline__ bool mask(const Params&, const Head&, Position /*q*/, Position /*kv*/) {
    return true;
  }
  /// The class of a tile, whose ranges are within the sequence and not empty. It may be partial where the
  /// tile is empty or full, but not the other way round. A CTA of a cluster may have no keys; the answer is
  /// then not used. With kListed it gets the bounds of each mask_row_term() and mask_column_term() over the
  /// ranges.
  static __device__ __forceinline__ TileClass classify_tile(const Params&, const Head&, Range /*q*/,
                                                            Range /*kv*/, const Interval* /*row_terms*/,
                                                            const Interval* /*column_terms*/) {
    return TileClass::full;
  }
  // With kMaskTerms there is mask_of_terms(p, head, row_terms, column_terms, q, kv), for a kernel that finds
  // each mask_row_term() and mask_column_term() once for a row or a column of a tile.
  /// The mask's integers and conditions (0 and 1) that depend on one position alone, besides those in Head.
  static __device__ __forceinline__ int mask_row_term(const Params&, const Head&, int /*i*/, int /*q*/) {
    return 0;
  }
  static __device__ __forceinline__ int mask_column_term(const Params&, const Head&, int /*i*/, int /*kv*/) {
    return 0;
  }
  /// Keys outside of this range attend to none of the queries in `q`; within [0, seqlen_kv].
  static __device__ __forceinline__ Range kv_bounds(const Params&, const Head& head, Range /*q*/) {
    return {0, head.seqlen_kv};
  }
  // With kMaskBounds > 0 there is kv_bounds_of_all(p, head, q), the keys that all of the queries attend to.
  /// Queries outside of this range attend to none of the keys in `kv`; within [0, seqlen_q].
  static __device__ __forceinline__ Range q_bounds(const Params&, const Head& head, Range /*kv*/) {
    return {0, head.seqlen_q};
  }
  // With kOutTile there are out_tile(p, head), the OutModTile of a tensor that the program of O reads, and
  // out_mod_of_element(p, head, element, out, q, column), what becomes of O where the kernel has its element;
  // and out_mod_grads_of_element(p, head, element, dout, out, q, column), the OutModGrads. With kOutMod there
  // are out_mod(p, head, out, q, column), what becomes of an element of O, out_mod_grad(), its derivative by
  // `out`, and add_out_mod_grads(p, head, dout, out, q, column, add), which calls add(OutAddition, float* at,
  // float value) for each of the kOutModGrads additions. Where the spec has a program of Q or K there are
  // kQMod, kQModGrads, q_mod(p, head, row, element, sum_of_squares, q, column), what becomes of an element of
  // a row of Q, and q_mod_grads(.., column, dout, add), which calls add.own(), add.at(), add.squares() and
  // add.capture() with what its gradient gives to the element, others of the row, the sum of squares and
  // captures; and kKMod, k_mod() and so on of K.
};

/// Whether formats decode the rows of K and V: kv_format.cuh.
template <class P>
constexpr bool kDecodesKv = requires {
  typename P::KFormat;
};

}  // namespace flashjit
