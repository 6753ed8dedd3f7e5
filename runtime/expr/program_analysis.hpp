// A spec's programs as one list of operations, and where in it is what kernels treat apart.
#pragma once

#include <optional>
#include <vector>

#include "expr/analyze.hpp"
#include "expr/facts.hpp"
#include "expr/graph.hpp"
#include "expr/pair_sigmoid.hpp"

namespace flashjit::expr {

/// A problem's programs; null: the identity, and all pairs.
struct Trees {
  NodePtr score = {}, mask = {}, out_mod = {};
  std::vector<Declaration> declarations = {};  ///< in the order of Params
  NodePtr q_mod = {}, k_mod = {};
  bool weighs = false;  ///< the score is a weight, and no softmax follows
};
Trees trees_of(const ScoreProgram& score, const MaskProgram& mask, const OutProgram& out_mod = {},
               const Prologue& prologue = {});

/// To which elements a head's pairs add: see templates/common/capture_grads.cuh.
enum class AccumulationPattern { any, by_difference, own };

/// The gradient of one read: d score / d read, or d out / d read.
struct ReadGrad {
  int read, derivative;
  AccumulationPattern pattern = AccumulationPattern::any;
};

class ProgramAnalysis {
 public:
  ProgramAnalysis(const Trees& programs, const EmitOptions& options);
  ProgramAnalysis(const ProgramAnalysis&) = delete;
  ProgramAnalysis& operator=(const ProgramAnalysis&) = delete;

  ProgramFacts facts() const;

  /// As they are emitted: folded.
  const Trees& programs() const { return programs_; }
  /// Emitting adds operations.
  Graph& graph() { return graph_; }
  int score() const { return score_; }
  int score_grad() const { return score_grad_; }
  int mask_root() const { return mask_root_; }
  int out() const { return out_; }
  int out_grad() const { return out_grad_; }  ///< d out / d O's element before the program
  const std::vector<ReadGrad>& out_read_grads() const { return out_read_grads_; }
  const MaskAnalysis& mask() const { return mask_; }
  int bias_read() const { return bias_read_; }  ///< of the score; -1: none
  const OutTileRead& out_tile() const { return out_tile_; }
  /// Whether that is the only read of the program of O with a gradient, to which each element adds its own.
  bool has_out_tile_grad() const {
    return out_read_grads_.size() == 1 && out_read_grads_.front().read == out_tile_.place &&
           reads_own_element(graph_, out_tile_);
  }
  const PositionTerms& terms() const { return terms_; }
  const std::optional<ScoreLine>& line() const { return line_; }
  bool mask_terms() const { return mask_terms_; }
  const PairSigmoid& pair_sigmoid() const { return pair_sigmoid_; }
  /// By pattern; at most one is AccumulationPattern::own, the last.
  const std::vector<ReadGrad>& read_grads() const { return read_grads_; }
  bool has_bias_tile_grad() const {
    return !read_grads_.empty() && read_grads_.back().pattern == AccumulationPattern::own;
  }

 private:
  void find_read_grads();
  AccumulationPattern pattern_of(const ReadGrad& grad) const;
  bool mask_reads_one_position() const;
  BiasTile bias_tile() const;

  Trees programs_;
  Graph graph_;
  int score_, score_grad_, mask_root_, out_, out_grad_;
  MaskAnalysis mask_;
  int bias_read_;
  OutTileRead out_tile_;
  PositionTerms terms_;
  std::optional<ScoreLine> line_;
  PairSigmoid pair_sigmoid_;
  bool mask_terms_;
  std::vector<ReadGrad> read_grads_, out_read_grads_;
};

}  // namespace flashjit::expr
