// What the planner knows of a kernel family: what it supports, with which tiles, and which kernels it makes.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"
#include "plan/joined_lists.hpp"
#include "plan/kernel_plan.hpp"

namespace flashjit::plan {

/// What a call needs besides its tensors; workspace.hpp turns it into offsets.
struct WorkspaceNeeds {
  bool row_stats = false;     ///< D, and LSE padded to whole tiles
  bool dout = false;          ///< dO of O before out_mod
  bool row_tangents = false;  ///< D, and tangents of LSE and D
  bool lse_log2 = false;      ///< and LSE in units of log2
  bool row_terms = false;     ///< what the score reads of each query
  bool dq_accum = false;
  bool clears_dq = false;   ///< the main entry clears dq_accum as it goes, but for the first heads
  bool semaphores = false;  ///< blocks ask for their tiles, or wait for each other to add to dQ
  bool ranks = false;
  bool claims_tiles = false;   ///< blocks claim their first KV tile
  std::int64_t list_sets = 0;  ///< batch entries and heads with lists of their own; 0: no lists
  std::int64_t list_rows = 0, list_columns = 0;  ///< tiles
  std::int64_t term_bounds = 0;      ///< values whose bounds over tiles a set of lists is made from
  std::int64_t ordered_q_tiles = 0;  ///< a head's, to whose dQ KV tiles add in order
  std::int64_t num_splits = 0;       ///< of what a tile meets, each with results of its own; the planner's
  std::int64_t part_rows = 0;        ///< stream-K: rows of Q in a part; a CTA makes at most two
  std::int64_t cascade_tiles = 0;    ///< or one for each work tile that it meets, of so many in all
  bool whole_tiles = false;          ///< all keys are in one part, which writes O and LSE itself
  bool decoded_cache = false;        ///< K and V as elements
  JoinedLists joined_lists = {};

  bool operator==(const WorkspaceNeeds&) const = default;
};

/// Why the other families leave gradients of captured tensors in a fixed order to simt.
inline constexpr const char* kUnorderedGrads =
    "adds gradients of captured tensors up in any order, the spec says det";

/// Why they leave tangents of gradients to simt.
inline constexpr const char* kNoSecondDerivative = "it has no kernel of gradients' tangents";

/// Why they leave kernels that are not attention to simt.
inline constexpr const char* kNoProducts = "has kernels of matrix products alone";

/// Why some leave weight_mod to others.
inline constexpr const char* kNeedsSoftmax =
    "its kernels have a softmax, the spec says weight_mod: families sm90, sm80 and simt have kernels without";

/// Why weight_mod leaves keys together.
inline constexpr const char* kJoinsByLse =
    "split is not for weight_mod: splits are joined by their LSE, which it has not";

/// Why out_mod leaves keys together.
inline constexpr const char* kModifiesWholeOut =
    "split is not for out_mod: a split has a part of O, which another kernel completes";

/// Why wide rows of O do not become codes.
inline constexpr const char* kCodesOfWholeRows =
    "out_format is for up to 256 columns of V: above, warps share a row of O, and a block may be a whole row";

/// What computes a tile together, with which instructions.
enum class ComputedBy : std::uint8_t {
  threads,      ///< fused multiply-adds of fp32, from shared memory
  warps,        ///< mma.sync; each warp loads what it computes with
  warp_groups,  ///< wgmma; other warps load
};

/// A family is a table of pure functions: no state, no device.
struct FamilyTraits {
  Family family;
  ComputedBy computed_by;
  /// Whether the family has kernels for the spec on the device.
  Support (*supports)(const AnalysedSpec&, const DeviceInfo&);
  /// Whether the configuration is legal for the spec and fits the device.
  Support (*admits)(const AnalysedSpec&, const TileConfig&, const DeviceInfo&);
  /// A good configuration without measuring; admitted whenever supports() says yes.
  TileConfig (*heuristic)(const AnalysedSpec&, const AttentionShape&, const DeviceInfo&);
  /// Every configuration worth measuring, all admitted; none where another family is faster with any.
  std::vector<TileConfig> (*search_space)(const AnalysedSpec&, const DeviceInfo&);
  /// Everything about the kernel of an admitted configuration but its text.
  KernelPlan (*kernel)(const AnalysedSpec&, const TileConfig&);
  WorkspaceNeeds (*workspace)(const KernelPlan&, const AttentionShape&);
  /// The Problem's functions that are the family's own; apart, as a search plans hundreds of kernels and
  /// renders few.
  std::string (*functions)(const AnalysedSpec&, const TileConfig&);
};

/// All families, in order of preference.
std::span<const FamilyTraits> families();
const FamilyTraits& traits(Family family);

const FamilyTraits& sm90_traits();
const FamilyTraits& sm80_traits();
const FamilyTraits& sm75_traits();
const FamilyTraits& simt_traits();

}  // namespace flashjit::plan
