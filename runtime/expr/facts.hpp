// What a spec's programs mean for its kernels, found once: the planner decides by it, and the emitted hooks
// are what it says. Whatever needs to know of a program more than this is part of the analysis.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "flashjit/expr.hpp"
#include "flashjit/programs.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::expr {

/// How programs are emitted.
struct EmitOptions {
  bool check_indices = false;      ///< kernels print each index of a captured tensor that is clamped
  bool gradient_tangents = false;  ///< see gradient_tangents.hpp

  bool operator==(const EmitOptions&) const = default;
};

/// A constant of a Problem.
struct Constant {
  std::string_view name;  ///< a literal: "kHasMask"
  std::variant<bool, int> value;

  bool operator==(const Constant&) const = default;
};
/// Its line in the Problem.
std::string to_string(const Constant& constant);

/// A captured tensor that the score reads as a dense bias: a tile of pairs reads a tile of its last two
/// dimensions.
struct BiasTile {
  int capture = 0;  ///< its place in Params::captures
  int rank = 0;

  bool operator==(const BiasTile&) const = default;
};

/// What a mask means to the lists of tiles.
struct MaskTraits {
  bool listed = false;  ///< the kernels visit the mask's tiles by lists rather than within bounds
  bool uses_batch = false, uses_head = false;
  int q_reads = 0, kv_reads = 0;  ///< values that depend on one position alone, where tiles are listed

  bool operator==(const MaskTraits&) const = default;
};

struct ProgramFacts {
  std::vector<Declaration> declarations;  ///< in the order of Params

  bool has_score = false;             ///< the score is not the identity
  bool has_slope = false;             ///< d score / d score before the program is not 1
  bool score_is_line = false;         ///< see ScoreLine
  bool pair_sigmoid = false;          ///< see PairSigmoid
  bool finite_weight = false;         ///< a weight and its derivative are finite for finite scores
  bool silu = false;                  ///< see PairSigmoid::silu
  bool names_score_once = false;      ///< the score program does
  bool joins_scores = false;          ///< see joins_scores()
  bool near_min_scores = false;       ///< scores may lie next to the least float, see may_be_near_min()
  std::optional<BiasTile> bias_tile;  ///< where indices are checked there is none: each pair checks its own
  bool row_term = false;              ///< the score reads a value of the query that a row shares; so of terms
  bool column_term = false;           ///< the same of the key
  bool score_uses_head = false;
  bool score_reads_pairs = false;  ///< it reads a tensor by positions, besides its row and column terms

  bool has_mask = false;  ///< some pairs may not attend
  MaskTraits mask;
  int mask_bounds = 0;                      ///< see MaskAnalysis::bounds()
  bool mask_bounds_first_key = false;       ///< see MaskAnalysis::bounds_first_key()
  bool evaluates_tiles = false;             ///< see MaskAnalysis::evaluate_tiles()
  int mask_block_q = 0, mask_block_kv = 0;  ///< see block_of()
  bool mask_terms = false;                  ///< the mask reads tensors by one position, and is emitted as one
                                            ///< of what was read, too
  bool mask_reads_tensors = false;          ///< by positions
  bool mask_reads_pairs = false;            ///< and not by one position alone

  int capture_grads = 0;        ///< additions to gradients of captured tensors
  int difference_grads = 0;     ///< of those, AccumulationPattern::by_difference
  bool bias_tile_grad = false;  ///< the last of them is AccumulationPattern::own

  bool has_out_mod = false;    ///< O's elements are changed before they are stored
  bool out_tile = false;       ///< see OutTileRead
  bool out_tile_grad = false;  ///< see ProgramAnalysis::has_out_tile_grad()
  int out_mod_grads = 0;       ///< additions to gradients of tensors that this reads
  int row_mod_grads = 0;       ///< of tensors that q_mod and k_mod read

  bool operator==(const ProgramFacts&) const = default;
};

/// Throws Error(invalid_argument) where declarations() does.
ProgramFacts facts_of(const ScoreProgram& score, const MaskProgram& mask, const EmitOptions& options = {},
                      const OutProgram& out_mod = {}, const Prologue& prologue = {});

/// The constants that templates/common/problem.cuh says are generated from the programs.
std::vector<Constant> constants_of(const ProgramFacts& facts);

}  // namespace flashjit::expr
