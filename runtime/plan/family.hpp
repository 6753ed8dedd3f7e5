// What a kernel family tells the planner: what it can do, with which tiles, and what it launches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::plan {

/// One extern "C" kernel of a rendered source.
struct Entry {
  std::string name;      ///< "forward"; the symbol is flashjit_<name>
  std::string header;    ///< template that defines it: "flashjit/sm80/forward.cuh"
  std::string function;  ///< template over the Problem: "flashjit::sm80::forward"
  int threads = 0;
  int min_blocks = 1;
  int cluster = 1;           ///< blocks that share their shared memory, or take neighbouring tiles
  int shared_bytes = 0;      ///< dynamic shared memory
  bool hot = false;          ///< holds the main loop: spills disqualify the configuration
  bool tensor_maps = false;  ///< takes the tensor maps of Q, K and V as a second parameter
  bool persistent = false;   ///< blocks take work until there is none: min_blocks a multiprocessor do

  bool operator==(const Entry&) const = default;
};

/// In which calls there is a launch: in those that are given tile lists, lists need not be made.
enum class LaunchedWhen : std::uint8_t { always, lists_are_made, lists_are_given };

/// One launch: an entry by its place in the family's list, and a one-dimensional grid.
struct Launch {
  std::size_t entry = 0;
  std::int64_t blocks = 0;  ///< 0: nothing to do, skipped. Of a family: clusters
  LaunchedWhen when = LaunchedWhen::always;
  bool early = false;  ///< may start before the launch before it has ended, for which it waits by itself

  bool operator==(const Launch&) const = default;
};

/// What a call needs beside its tensors; workspace.hpp turns it into offsets.
struct WorkspaceNeeds {
  bool row_stats = false;  ///< D, and LSE padded to whole tiles
  bool row_terms = false;  ///< what the score reads of each query
  bool dq_accum = false;
  bool clears_dq = false;   ///< the main entry clears dq_accum as it goes, but for the first heads
  bool semaphores = false;  ///< blocks ask for their work, or wait for their turn
  bool ranks = false;
  std::int64_t list_sets = 0;  ///< batch entries and heads with lists of their own; 0: no lists
  std::int64_t list_rows = 0, list_columns = 0;  ///< tiles
  std::int64_t term_bounds = 0;      ///< values whose bounds over tiles a set of lists is made from
  std::int64_t ordered_q_tiles = 0;  ///< a head's, to whose dQ is added in turns
  std::int64_t parts = 0;            ///< of what a tile meets, each with results of its own; the planner's

  bool operator==(const WorkspaceNeeds&) const = default;
};

/// Whether the spec's kernels walk lists of tiles: those of a block map, of a mask without bounds, or of any
/// mask where additions to dQ are ordered. The kernels' own rule: kLists in templates/common/tile_lists.cuh.
bool has_tile_lists(const AttentionSpec& spec);

/// Whether it is a causal mask, of either alignment.
bool is_causal(const MaskProgram& mask);

/// Whether the pass gives gradients to captured tensors.
bool has_capture_grads(const AttentionSpec& spec);
/// Whether they are to be added up in one order.
bool orders_capture_grads(const AttentionSpec& spec);

/// Why the other families leave deterministic ones to simt.
inline constexpr const char* kUnorderedGrads =
    "adds gradients of captured tensors up in any order, the spec says det";

/// A captured tensor of which the TMA unit copies tiles of its last two dimensions: rows at a time, its
/// number among the captured tensors, its dimensions.
struct PlaneBox {
  int rows = 0, capture = 0, rank = 0;

  bool operator==(const PlaneBox&) const = default;
};

/// Rows that the TMA unit copies at a time: of Q, of K and V, and of O or dO, where it copies that; whether
/// those of Q are of all heads that share K and V; and the tensor of which the score reads planes, where it
/// copies those.
struct TensorBoxes {
  int q_rows = 0, kv_rows = 0, o_rows = 0;
  bool packs_heads = false;
  PlaneBox plane = {};

  bool operator==(const TensorBoxes&) const = default;
};

/// A family is a table of pure functions: no state, no device.
struct FamilyTraits {
  Family family;
  /// Whether the family has kernels for the spec on the device. The spec is valid and normalized.
  Support (*supports)(const AttentionSpec&, const DeviceInfo&);
  /// Whether the configuration is legal for the spec and fits the device.
  Support (*admits)(const AttentionSpec&, const TileConfig&, const DeviceInfo&);
  /// A good configuration without measuring; admitted whenever supports() says yes.
  TileConfig (*heuristic)(const AttentionSpec&, const AttentionShape&, const DeviceInfo&);
  /// Every configuration worth measuring, all admitted.
  std::vector<TileConfig> (*search_space)(const AttentionSpec&, const DeviceInfo&);
  /// The kernels of the source, in a fixed order.
  std::vector<Entry> (*entries)(const AttentionSpec&, const TileConfig&);
  /// What one call launches, in order.
  std::vector<Launch> (*launches)(const AttentionSpec&, const AttentionShape&, const TileConfig&);
  WorkspaceNeeds (*workspace)(const AttentionSpec&, const AttentionShape&, const TileConfig&);
  /// The boxes of the tensor maps; nothing where no entry takes them.
  std::optional<TensorBoxes> (*tensor_boxes)(const AttentionSpec&, const TileConfig&);
};

/// All families, in order of preference.
std::span<const FamilyTraits> families();
const FamilyTraits& traits(Family family);

const FamilyTraits& sm90_traits();
const FamilyTraits& sm80_traits();
const FamilyTraits& simt_traits();

}  // namespace flashjit::plan
