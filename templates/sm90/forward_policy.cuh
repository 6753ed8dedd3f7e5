// The compile-time switches of the forward pass: what each decides, and the measurement that decided it
// (H100, NOTES.md). To tune the kernel, begin here. Switches of the schedule are in tma/forward_policy.cuh,
// of codes and of rows in forward_codes.cuh and forward_rows.cuh.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/visible.cuh"
#include "flashjit/sm90/layout.cuh"
#include "flashjit/tma/forward_policy.cuh"

namespace flashjit::sm90 {

// --- Schedule ---------------------------------------------------------------------------------------------

/// Where KV tiles are listed, the producer posts each tile's list entry in shared memory beside its K.
/// Butterfly +2.2%, block maps at d64 +1 to +2%. With one Q tile at a time and a mask tested pair by pair
/// that cost 4 to 8% at d128: there the consumers read the list themselves, a step ahead.
/// NOTES.md#walking-lists
template <class P>
constexpr bool kConsumersReadList = (kLists<P> && kTestsMask<P> && kQTilesPerCta<P> == 1);
template <class P>
constexpr bool kProducerPostsEntries = kLists<P> && !kConsumersReadList<P>;

/// K is released by each thread, which has read what threads wrote beside it: racecheck does not take a
/// lane's arrival for its warp's reads. Beside lists of keys only where racecheck looks: see
/// tests/gpu/sanitize.sh.
template <class P>
constexpr bool kThreadsReleaseK = kProducerPostsEntries<P> || P::kKeyScales ||
                                  (P::kCheckWaits && P::kIndices && !P::kSharedKv);

/// The type of pipeline counters. Unsigned, a stage and its phase are fewer instructions: causal d128 +1.4 to
/// +2.0% from 4k on; but lists tested pair by pair -1 to -3.5%.
/// NOTES.md#ptxas-orders-equal-sources-differently
template <bool kSigned>
struct PipelineCountOf {
  using Type = unsigned;
};
template <>
struct PipelineCountOf<true> {
  using Type = int;
};
template <class P>
using PipelineCount = typename PipelineCountOf<kConsumersReadList<P>>::Type;

/// K and V come row by row instead of by TMA, whose boxes would span pages, or what no list names; and whose
/// strides rows that are decoded need not have.
template <class P>
constexpr bool kGathers = kDecodesKv<P> || gathers(P::kIndices, P::kPageRows);

/// K and V of pages are copied by a warp each, as many small boxes take long.
template <class P>
constexpr bool kLoadsKvApart = (P::kPageRows > 0 && !kGathers<P> && !P::kSharedKv && !P::kBiasTile &&
                                !P::kScoreColumnTerm && !P::kQCodes && kQTilesPerCta<P> == 1 &&
                                P::kDSplit == 1);

/// V is the first columns of rows that are decoded: see kv_latents.cuh.
template <class P>
constexpr bool kDecodesLatents = kDecodesKv<P>&& P::kSharedKv;

/// Tiles of K and V come as codes.
template <class P>
constexpr bool kLoadsCodes = kScaledKv<P> || kDecodesKv<P>;

/// K and V of 8 bits, or of formats that are decoded, beside Q of 16: a warpgroup or two more convert them.
/// Consumers then have fewer registers. NOTES.md#k-and-v-of-8-bits
template <class P>
constexpr int kConverters =
    kDecodesKv<P> && !has_few_rows(P::kBr) ? row_decoders(P::kWarps / 4, P::kMinBlocks)
                                           : converters(kLoadsCodes<P>, P::kQCodes);
template <class P>
constexpr bool kConvertsKv = kConverters<P> > 0;
constexpr int kConverterThreads = 128;
/// Converters' arrivals when they have read a slot: one a warp, or one a thread where racecheck looks.
template <class P>
constexpr int kConverterReleases = P::kCheckWaits ? kConverterThreads : kConverterThreads / 32;

template <class P, bool kDecodes = kDecodesKv<P>>
constexpr DecodedRows kDecodedRows = DecodedRows::none;
template <class Format>
constexpr bool kHalvesOrBook = Format::kHalves || Format::kCode == KvCode::book;
template <class P>
constexpr DecodedRows kDecodedRows<P, true> =
    P::kSharedKv                                                               ? DecodedRows::latents
    : max(P::KFormat::kKeys, P::VFormat::kKeys) > 0                            ? DecodedRows::shared_scales
    : kHalvesOrBook<typename P::KFormat> || kHalvesOrBook<typename P::VFormat> ? DecodedRows::halves_or_book
                                                                               : DecodedRows::plain;

/// The pitch of rows in slots, where they are decoded: see kv_rows.cuh.
template <class P, bool kDecodes = kDecodesKv<P>>
constexpr int kRowPitch = 0;
template <class P>
constexpr int kRowPitch<P, true> = max(row_pitch(P::KFormat::kBytes, P::KFormat::kAlignment),
                                       row_pitch(P::VFormat::kBytes, P::VFormat::kAlignment));
/// What a slot has of their scales in a tensor of their own: see kv_scale_rows.cuh.
template <class P, class Format>
constexpr int kScaleBytesOf = scale_rows_bytes(P::kBc, Format::kKeys, Format::kScaleRowBytes,
                                               Format::kScaleAlignment);
template <class P, bool kDecodes = kDecodesKv<P>>
constexpr int kScaleBytes = 0;
template <class P>
constexpr int kScaleBytes<P, true> = max(kScaleBytesOf<P, typename P::KFormat>,
                                         kScaleBytesOf<P, typename P::VFormat>);

/// A tile of few rows, over which codes become operands in registers, by the consumers and what else would
/// convert them: see forward_few_rows.cuh.
template <class P>
constexpr bool kHasFewRows = has_few_rows(P::kBr);

/// Q, K and V of 8 bits are multiplied as they are: see forward_codes.cuh. Producer warps transpose V.
template <class P>
constexpr bool kCodeProducts = P::kQCodes;
template <class P>
constexpr int kTransposers = P::kScoreColumnTerm || P::kKeyScales ? 1 : 2;

/// Scales of keys are then factors that consumers read: see KeyFactorFinder. S becomes scores before its
/// softmax, also without a score program.
template <class P>
constexpr bool kKeyFactors = kCodeProducts<P>&& P::kKeyScales;
template <class P>
constexpr bool kSoftmaxOfScores = P::kHasScore || kKeyFactors<P>;
/// The score is a line along the keys, which the softmax adds to products.
template <class P>
constexpr bool kAddsScoreLine = P::kScoreLine && !kKeyFactors<P> && !P::kWeightMod && !P::kSkipSoftmax;

/// The tensor cores sum up P V of several KV tiles, or of all: see forward_code_sums.cuh. A score program and
/// dropout leave too few registers.
template <class P>
constexpr bool kSumsTiles = kCodeProducts<P>&& sums_tiles(P::kSumsOfFour, P::kSumsAll, P::kHeadDimV) &&
                            !P::kKeyScales && !P::kHasScore && !P::kDropout;

/// Columns of tiles of Q and K.
template <class P>
constexpr int kQkColumns = tile_columns(P::kHeadDim, kCodeProducts<P>);

/// P of a row's largest key, and its logarithm. P as e4m3 has 2^-9 to 448; a power of two is exact.
template <class P>
constexpr float kLargestP = kCodeProducts<P> ? 256.0f : 1.0f;
constexpr float kLargestPLog2 = 8.0f;

// --- Products ---------------------------------------------------------------------------------------------

/// With P::kFp16Products codes are multiplied as fp16, which has all of them exactly, also where Q is bf16: a
/// pair is one instruction instead of four. Q is then converted, each row times a power of two, so that
/// nothing that counts is lost. NOTES.md#k-and-v-of-8-bits
template <class P>
constexpr bool kConvertsQ = (P::kFp16Products && !kIsFp16<typename P::Element>);
template <class P>
using ProductElement = Conditional<P::kFp16Products, fp16, typename P::Element>;

/// Intra-warpgroup overlap (FlashAttention-3, section 3.2): a warpgroup's own P V runs under its softmax,
/// too. d128 +1 to +5%, d256 +1%, d64 -2 to -10%: for few columns P V is so short that the other warpgroups'
/// products fill the time. NOTES.md#order-of-a-step
template <class P>
constexpr bool kIntraWarpgroupOverlap = P::kHeadDimV > 64;

/// The first P V of a Q tile overwrites O, so that O need not be cleared. Short rows +1 to +2%, block maps at
/// d64 +1.7 to +2.6%; d64 full -0.7 to -1.6% by another order of the same instructions, and 8 to 20 bytes of
/// spills with two bounds and two Q tiles at a time; but lists of whole tiles spill otherwise.
/// NOTES.md#the-first-and-the-last-product-of-a-q-tile
template <class P>
constexpr bool kFirstPvOverwritesO = P::kHeadDimV > 64 || P::kBlockMap || P::kMaskBounds == 1 ||
                                     (kProducerPostsEntries<P> && !kTestsMask<P> && kQTilesPerCta<P> > 1);

/// A product is one asm statement instead of one for each step of 16 columns, which compiles sooner. d256
/// 1.40 -> 1.27 s; d128 causal runs at 0.983, since ptxas orders fewer columns otherwise then.
/// NOTES.md#what-a-compilation-consists-of
template <class P>
constexpr bool kOneStatementPerProduct = has_whole_products(P::kHeadDimV, kCodeProducts<P>);

/// V's descriptor is found from K's, since V of a stage is as far from K in every stage. d128 +0.3 to +0.9%,
/// d64 -3%. NOTES.md#ptxas-orders-equal-sources-differently
template <class P>
constexpr bool kVDescriptorFromK =
    P::kHeadDim > 64 && P::kDSplit == 1 && !P::kSharedKv &&
    tile_bytes(P::kBc, P::kHeadDim) == tile_bytes(P::kBc, P::kHeadDimV) && !kConsumersReadList<P>;

/// V's barrier is polled at the end of the step before, as K's always is, so that the warpgroup holds the
/// ping-pong barrier shortly. Lists +0.5 to +1%; else -1%, and d256 spills 100 bytes.
/// NOTES.md#where-a-steps-time-goes
template <class P>
constexpr bool kPollsV = (kProducerPostsEntries<P> && P::kHeadDim <= 128);

// --- Softmax ----------------------------------------------------------------------------------------------

/// O is rescaled exactly where a maximum grows, so that P of a row's largest key is 1, which no rounding
/// changes. A rescale threshold of 2^8 (FA4's) was 3 to 5% faster, with errors of O 1.05 to 1.10 times those
/// of PyTorch's FlashAttention-2. A vote passes over eight rows whose maxima all stay; d64 -2%, where it
/// costs more than the multiplications. NOTES.md#rescaling-o
template <class P>
constexpr bool kVotesOnRescale = P::kHeadDimV > 64;

/// The exponentials of a thread's two rows alternate column by column, instead of row after row. Two listed Q
/// tiles at a time +1 to +3%; d64 else -0.4 to -1%, d128 -0.5%.
/// NOTES.md#ptxas-orders-equal-sources-differently
template <class P>
constexpr bool kAlternatesRows = (kProducerPostsEntries<P> && kQTilesPerCta<P> > 1);

/// Row maxima are found by integer instructions, three values at a time: d64 full +3.3%, d128 +2% with 192
/// rows and +4% with 128, d256 +0.3%. Not for a score that is a line, whose maximum is in other units, and
/// not beside a partial first step, or a score program over codes, where registers do not suffice, nor where
/// nearly all tiles are masked, which find the maximum of floats anyway (dilated d128 -3%, d64 -7%).
/// NOTES.md#exponentials-and-instructions
template <class P>
constexpr bool kMaxByBits = !kAddsScoreLine<P> && !kPartialFirstStep<P> &&
                            !(kLoadsCodes<P> && P::kHasScore) && !(kTestsMask<P> && P::kEvaluateTiles);

// --- Mask and dropout -------------------------------------------------------------------------------------

/// The mask's bounds give each Q tile the range of keys within which KV tiles are full, once, instead of
/// classifying each KV tile. With the next switch window d64 +4.3%, d128 +2.9%; causal d128 +0.8 to +1.1%.
/// NOTES.md#masked-tiles
template <class P>
constexpr bool kFullTilesByBounds = ((P::kMaskBounds > 0 && !kLists<P>) || kClassesTiles<P>);

/// A word of bits says which keys of a row attend, instead of two comparisons of every pair. Window d64
/// +3.5%, d128 +0.3%; causal d64 -1.4%: for masks of two bounds.
/// NOTES.md#masked-tiles
template <class P>
constexpr bool kMasksByBits = (P::kMaskBounds > 1);

/// Warps without queries, most of a decoding tile's, have no softmax where K and V are decoded: instructions
/// are then what there is least of. NOTES.md#rows-of-formats-that-are-decoded
/// Beside a shared prefix a sequence's own tile has few queries, too; at d64 the branch would have ptxas
/// serialise the products (C7511). NOTES.md#a-shared-prefix
template <class P>
constexpr bool kSkipsIdleWarps = (kDecodesKv<P> && P::kStreamK && !P::kPackGqa && P::kBr == kWarpgroupRows) ||
                                 (P::kCascade && P::kHeadDim > 64);

/// Dropout's bits are drawn while S is computed, and wait in registers; else where P is packed. Early, late:
/// d64 1.14, 1.24 times as fast as before, d128 1.20, 1.14, d256 1.08, 1.13. Beside codes registers do not
/// suffice.
/// NOTES.md#dropout
template <class P>
constexpr bool kDrawsEarly = (P::kDropout && P::kHeadDimV > 64 && P::kHeadDimV <= 128 && !kLoadsCodes<P>);

// --- Shared memory and epilogue ---------------------------------------------------------------------------

template <class P>
constexpr ForwardLayout kForwardLayout{.br = P::kBr,
                                       .bc = P::kBc,
                                       .head_dim = P::kHeadDim,
                                       .head_dim_v = P::kHeadDimV,
                                       .stages = P::kStages,
                                       .reads_bias_tile = P::kBiasTile,
                                       .reads_column_terms = P::kScoreColumnTerm,
                                       .lists = kLists<P>,
                                       .q_tiles_per_cta = kQTilesPerCta<P>,
                                       .d_split = P::kDSplit,
                                       .shared_kv = P::kSharedKv,
                                       .codes = kLoadsCodes<P>,
                                       .row_pitch = kRowPitch<P>,
                                       .scale_bytes = kScaleBytes<P>,
                                       .code_products = kCodeProducts<P>,
                                       .key_scales = P::kKeyScales,
                                       .split = P::kSplit,
                                       .indices = P::kIndices,
                                       .joined_queries = P::kJoinsLists ? kMostJoinedQueries : 0,
                                       .joins_parts = P::kClusterSplit,
                                       .ctas = P::kMinBlocks,
                                       .reads_out_tile = P::kOutTile && !P::kSkipSoftmax};

/// Where two warpgroups share rows, the second one's P V waits for the first one's S, if K is there already,
/// so that it runs under the softmax. With one stage it would hold up V.
template <class P>
constexpr bool kHoldsPv = (kTileInHalves<P> || P::kStages > 1);
/// The first of a warpgroup's columns of O, and how many chunks of eight there are.
template <class P>
__device__ __forceinline__ int first_column(int wg) {
  return kSharesRows<P> ? wg * kOwnColumns<P> : 0;
}
template <class P>
__device__ __forceinline__ int own_chunks(int wg) {
  return kSharesRows<P> ? min(kOwnColumns<P>, P::kHeadDimV - first_column<P>(wg)) / 8 : P::kHeadDimV / 8;
}

/// O leaves through shared memory and TMA, with half of the instructions of stores by threads, where O has
/// room of its own. d128 512 +3.2%, 1k +1.1 to +2.9%; d64 +0.8%. Not for packed sequences, whose boxes would
/// reach into the next sequence, nor for splits of the keys, whose O is fp32.
/// NOTES.md#epilogue
template <class P>
constexpr bool kTmaStoresO = P::kTmaStoresO;

}  // namespace flashjit::sm90
