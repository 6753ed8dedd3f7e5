// What a family decides of one kernel: everything that its source is printed from and its launches are made
// of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/analysed_spec.hpp"

namespace flashjit::plan {

/// One extern "C" kernel of a rendered source.
struct Entry {
  std::string name;      ///< "forward"; the symbol is flashjit_<name>
  std::string header;    ///< template that defines it: "flashjit/sm80/forward.cuh"
  std::string function;  ///< template over the Problem: "flashjit::sm80::forward"
  int threads = 0;
  int min_blocks = 1;
  int cluster = 1;                  ///< blocks that share their shared memory, or take neighbouring tiles
  int shared_bytes = 0;             ///< dynamic shared memory
  bool hot = false;                 ///< holds the main loop: spills disqualify the configuration
  bool tensor_maps = false;         ///< takes the tensor maps of Q, K and V as a second parameter
  std::string params = "Params";    ///< the struct that it takes
  std::string problem = "Problem";  ///< what it is a template over
  bool persistent = false;          ///< blocks take work until there is none: min_blocks a multiprocessor do

  bool operator==(const Entry&) const = default;
};

/// What an entry is for.
enum class Step : std::uint8_t {
  join_lists,             ///< lists of keys of the queries of each Q tile
  decode_cache,           ///< elements of a quantized cache, for all entries that follow
  preprocess,             ///< D, LSE and row terms of a backward pass, zeros for what it adds to
  out_grads,              ///< dO, and gradients of captured tensors, from gradients of out_mod's results
  row_mods,               ///< Q and K as q_mod and k_mod make them
  row_mod_grads,          ///< dQ and dK of Q and K before that, and gradients of captured tensors
  sink_grads,             ///< sink gradients
  term_bounds,            ///< bounds of what a mask reads over each tile
  tile_lists,             ///< lists of tiles
  list_ranks,             ///< the order of additions to dQ among them
  reset_work,             ///< the counter of listed tiles, where lists are given
  main,                   ///< the main loop: over Q tiles forward, over KV tiles backward
  main_of_dq,             ///< another of Q tiles, for dQ alone
  convert_dq,             ///< dQ from its fp32 accumulator
  combine,                ///< O and LSE of all splits of the keys (split-KV)
  combine_parts,          ///< O and LSE of the work tiles that segments cut (stream-K)
  combine_cascade,        ///< O and LSE of all rows, from parts of their own keys and of the prefix
  combine_dkdv,           ///< dK and dV of all splits of the queries (split-Q)
  ordered_capture_grads,  ///< gradients of captured tensors, added up in one order
  append,                 ///< new rows of K, V and Q, rotated, into a cache
  append_lanes,           ///< new rows of K and V as they come, instead
  merge,                  ///< O and LSE of partial states
  clear_scales,           ///< before they are found
  find_scales,            ///< of a tensor's largest elements
  quantize,               ///< the tensor divided by them
};

/// A captured tensor whose last two dimensions TMA copies in tiles: rows at a time, its number among the
/// captured tensors, its dimensions.
struct BiasBox {
  int rows = 0, capture = 0, rank = 0;

  bool operator==(const BiasBox&) const = default;
};

/// What TMA copies at a time: rows of Q, of K and V, and of O or dO, where it copies that; whether rows of Q
/// are of all heads that share K and V; and the dense bias, where it copies the bias tiles.
struct TensorBoxes {
  int q_rows = 0, kv_rows = 0, o_rows = 0;
  bool pack_gqa = false;
  int most_queries = 0;         ///< of those that are packed
  bool pairs_of_codes = false;  ///< Q, K and V are codes of 8 bits, copied in pairs
  BiasBox bias = {};
  /// Whole rows of K and V, with padding, which becomes zeros; 0: slices of 64 columns, swizzled.
  int k_columns = 0, v_columns = 0;

  bool operator==(const TensorBoxes&) const = default;
};

/// How the blocks of the main loop come by their tiles, and what they leave to other entries.
struct Schedule {
  int q_tiles_per_cta = 1;        ///< Q tiles that a block of the forward pass computes at a time
  bool dynamic_tiles = false;     ///< blocks take tiles from a counter until there are none; backward they
                                  ///< convert dQ themselves, too
  bool ragged_tiles = false;      ///< and an entry before counts each sequence's
  bool tile_lists = false;        ///< blocks walk lists of tiles; else what lies within the mask's bounds
  bool early_launch = false;      ///< kernels wait by themselves for the launch before
  bool row_terms = false;         ///< rows' terms of the score are found beforehand, once
  bool stream_k = false;          ///< CTAs take equal segments of all KV tiles of all work tiles
  bool q_tiles_as_heads = false;  ///< and a sequence's Q tiles, which meet the same KV tiles, count as heads
  bool cascade = false;           ///< and what all sequences share is one sequence more, read once
  bool fixed_parts = false;       ///< CTAs take equal shares of parts of a fixed number of KV tiles
  bool cluster_split = false;     ///< the blocks of a cluster share the keys of a Q tile and join their parts
  bool sums_dq = false;           ///< a cluster has one KV tile, whose dQ it sums up
  bool lse_log2 = false;          ///< backward: LSE in units of log2, too
  bool claims_tiles = false;      ///< backward: blocks load their first KV tile while the launch before ends
  bool finds_row_stats = false;   ///< clusters that sum up dQ may find what the preprocess entry does

  bool operator==(const Schedule&) const = default;
};

struct KernelPlan {
  AnalysedSpec spec;
  TileConfig config;
  std::vector<Entry> entries = {};  ///< in the order in which a call launches them
  std::vector<Step> steps = {};     ///< what each of them is for
  /// The Problem's constants, but for the element type and the architecture.
  std::vector<expr::Constant> constants = {};
  std::optional<TensorBoxes> tensor_boxes = {};  ///< where an entry takes tensor maps
  Schedule schedule = {};

  void add(Step step, Entry entry);
  /// The first entry that holds a main loop.
  const Entry& main() const;
};

/// Spec, configuration and part of the batch: an architecture's kernels of one name are the same.
std::string name_of(const KernelPlan& kernel);

/// The constants that the Problem of every family has: of the spec, its programs and the configuration. A
/// family adds its own. `tile_lists`: see Schedule.
std::vector<expr::Constant> problem_constants(const AnalysedSpec& spec, const TileConfig& config,
                                              bool tile_lists);

/// An entry from templates/<family>/<header>.cuh.
Entry family_entry(Family family, const std::string& name, const std::string& header, int threads);
/// An entry from templates/auxiliary/<header>.cuh, by default of its own name.
Entry auxiliary_entry(const std::string& name, const std::string& header = {});

/// Adds entry `sink_grads` where finds_sink_grads(): it reads LSE and D in the workspace, after the others.
void add_sink_grads(KernelPlan& kernel);

/// The first entry of a plan whose spec has q_mod or k_mod, and the last one of its backward pass.
void add_row_mods(KernelPlan& kernel);
void add_row_mod_grads(KernelPlan& kernel);

}  // namespace flashjit::plan
