#include "expr/program_analysis.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "expr/declarations.hpp"
#include "expr/derive.hpp"
#include "expr/fold.hpp"
#include "expr/near_min_scores.hpp"
#include "expr/nodes.hpp"
#include "expr/row_hooks.hpp"

namespace flashjit::expr {
namespace {

Trees folded(const Trees& programs) {
  return {.score = programs.score ? fold(programs.score) : nullptr,
          .mask = programs.mask ? prepared_mask(programs.mask) : nullptr,
          .out_mod = programs.out_mod ? fold(programs.out_mod) : nullptr,
          .declarations = programs.declarations,
          .q_mod = programs.q_mod ? fold(programs.q_mod) : nullptr,
          .k_mod = programs.k_mod ? fold(programs.k_mod) : nullptr,
          .weighs = programs.weighs};
}

}  // namespace

Trees trees_of(const ScoreProgram& score, const MaskProgram& mask, const OutProgram& out_mod,
               const Prologue& prologue) {
  return {score.tree(),          mask.tree(),
          out_mod.tree(),        declarations(score, mask, out_mod, prologue),
          prologue.q_mod.tree(), prologue.k_mod.tree(),
          score.is_weight()};
}

ProgramAnalysis::ProgramAnalysis(const Trees& programs, const EmitOptions& options)
    : programs_(folded(programs)),
      score_(graph_.add(programs_.score ? programs_.score : make_name(Name::score))),
      score_grad_(graph_.add(derivative(graph_[score_].node, make_name(Name::score)))),
      mask_root_(graph_.add(programs_.mask ? programs_.mask : make_boolean(true))),
      out_(graph_.add(programs_.out_mod ? programs_.out_mod : make_name(Name::out))),
      out_grad_(graph_.add(derivative(graph_[out_].node, make_name(Name::out)))),
      mask_(graph_, mask_root_),
      bias_read_(options.check_indices ? -1 : bias_tile_read(graph_, score_)),
      out_tile_(options.check_indices ? OutTileRead{} : out_tile_read(graph_, out_)),
      terms_(options.check_indices || bias_read_ >= 0 ? PositionTerms{} : position_terms(graph_, score_)),
      line_(line_of_score(graph_, score_)),
      pair_sigmoid_(!programs.weighs || options.check_indices || bias_read_ >= 0 || terms_.row >= 0 ||
                            terms_.column >= 0
                        ? PairSigmoid{}
                        : pair_sigmoid_of(graph_, score_)),
      mask_terms_(!options.check_indices && mask_reads_one_position()) {
  find_read_grads();
}

/// Whether any of what the mask reads of one position comes from a tensor.
bool ProgramAnalysis::mask_reads_one_position() const {
  const auto reads = [&](int place) { return reads_by_position(graph_[place].node); };
  return std::ranges::any_of(mask_.q_reads(), reads) || std::ranges::any_of(mask_.kv_reads(), reads);
}

void ProgramAnalysis::find_read_grads() {
  for (const NodePtr& read : reads_with_grad(graph_[score_].node)) {
    const NodePtr slope = derivative(graph_[score_].node, read);
    if (is_real(*slope, 0)) continue;
    ReadGrad grad{graph_.add(read), graph_.add(slope)};
    grad.pattern = pattern_of(grad);
    read_grads_.push_back(grad);
  }
  const auto owning = [](const ReadGrad& grad) { return grad.pattern == AccumulationPattern::own; };
  const auto first = std::ranges::find_if(read_grads_, owning);
  if (first != read_grads_.end())
    std::for_each(first + 1, read_grads_.end(), [&](ReadGrad& grad) {
      if (owning(grad)) grad.pattern = AccumulationPattern::any;
    });
  std::ranges::stable_sort(read_grads_, {}, &ReadGrad::pattern);
  for (const NodePtr& read : reads_with_grad(graph_[out_].node))
    if (const NodePtr slope = derivative(graph_[out_].node, read); !is_real(*slope, 0))
      out_read_grads_.push_back({graph_.add(read), graph_.add(slope)});
}

/// Own: each pair adds dS to an element of its own, as for `score + bias[q, kv]` or a softcap of that. By
/// difference: dS, or dS times a factor, as for `score + table[h, kv - q]`. An element to which all pairs of
/// a head add is neither: a thread's additions are soon one sum.
AccumulationPattern ProgramAnalysis::pattern_of(const ReadGrad& grad) const {
  const auto of_difference = [&](int place) { return depends_on_difference(graph_, place); };
  const bool of_score = grad.derivative == score_grad_;
  const std::vector<int>& indices = graph_[grad.read].args;
  if (of_score && reads_bias_tile(graph_, grad.read)) return AccumulationPattern::own;
  const bool product = is_real(graph_.node(score_grad_), 1) && of_difference(grad.derivative);
  return (of_score || product) && std::ranges::all_of(indices, of_difference) &&
                 std::ranges::any_of(indices, [&](int index) { return graph_.uses_positions(index); })
             ? AccumulationPattern::by_difference
             : AccumulationPattern::any;
}

BiasTile ProgramAnalysis::bias_tile() const {
  const Declaration& bias = graph_.node(bias_read_).declaration;
  int capture = 0;
  for (const Declaration& d : programs_.declarations) {
    if (d.name == bias.name) break;
    capture += !d.is_scalar();
  }
  return {capture, bias.rank};
}

ProgramFacts ProgramAnalysis::facts() const {
  const unsigned uses = graph_.uses(mask_root_);
  const auto count = [](const std::vector<int>& places) { return static_cast<int>(places.size()); };
  std::vector<int> one_position = mask_.q_reads();
  one_position.insert(one_position.end(), mask_.kv_reads().begin(), mask_.kv_reads().end());
  return {.declarations = programs_.declarations,
          .has_score = !is_name(graph_.node(score_), Name::score),
          .has_slope = !is_real(graph_.node(score_grad_), 1),
          .score_is_line = line_.has_value(),
          .pair_sigmoid = pair_sigmoid_.place >= 0,
          .finite_weight = programs_.weighs && is_finite(graph_, score_) && is_finite(graph_, score_grad_),
          .silu = pair_sigmoid_.silu,
          .names_score_once = names_score_once(graph_[score_].node),
          .joins_scores = joins_scores(graph_, score_),
          .near_min_scores = may_be_near_min(graph_, score_),
          .bias_tile = bias_read_ < 0 ? std::nullopt : std::optional(bias_tile()),
          .row_term = terms_.row >= 0,
          .column_term = terms_.column >= 0,
          .score_uses_head = (graph_.uses(score_) & kUsesHead) != 0,
          .score_reads_pairs = reads_beyond(graph_, score_, {terms_.row, terms_.column}),
          .has_mask = !is_boolean(graph_.node(mask_root_), true),
          .mask = {.listed = mask_.listed(),
                   .uses_batch = (uses & kUsesBatch) != 0,
                   .uses_head = (uses & kUsesHead) != 0,
                   .q_reads = count(mask_.q_reads()),
                   .kv_reads = count(mask_.kv_reads())},
          .mask_bounds = static_cast<int>(mask_.bounds()),
          .mask_bounds_first_key = mask_.bounds_first_key(),
          .evaluates_tiles = mask_.evaluate_tiles(),
          .mask_block_q = block_of(graph_, mask_root_, kUsesQ),
          .mask_block_kv = block_of(graph_, mask_root_, kUsesKv),
          .mask_terms = mask_terms_,
          .mask_reads_tensors = reads_by_position(graph_[mask_root_].node),
          .mask_reads_pairs = reads_beyond(graph_, mask_root_, one_position),
          .capture_grads = static_cast<int>(read_grads_.size()),
          .difference_grads = static_cast<int>(
              std::ranges::count(read_grads_, AccumulationPattern::by_difference, &ReadGrad::pattern)),
          .bias_tile_grad = has_bias_tile_grad(),
          .has_out_mod = !is_name(graph_.node(out_), Name::out),
          .out_tile = out_tile_.place >= 0,
          .out_tile_grad = has_out_tile_grad(),
          .out_mod_grads = static_cast<int>(out_read_grads_.size()),
          .row_mod_grads = static_cast<int>(row_read_grads(programs_.q_mod).size() +
                                            row_read_grads(programs_.k_mod).size())};
}

ProgramFacts facts_of(const ScoreProgram& score, const MaskProgram& mask, const EmitOptions& options,
                      const OutProgram& out_mod, const Prologue& prologue) {
  return ProgramAnalysis(trees_of(score, mask, out_mod, prologue), options).facts();
}

std::vector<Constant> constants_of(const ProgramFacts& facts) {
  return {{"kHasScore", facts.has_score},
          {"kHasMask", facts.has_mask},
          {"kScoreGrad", facts.has_slope},
          {"kBiasTile", facts.bias_tile.has_value()},
          {"kScoreRowTerm", facts.row_term},
          {"kScoreColumnTerm", facts.column_term},
          {"kScoreLine", facts.score_is_line},
          {"kPairSigmoid", facts.pair_sigmoid},
          {"kFiniteWeight", facts.finite_weight},
          {"kNearMinScores", facts.near_min_scores},
          {"kMaskBounds", facts.mask_bounds},
          {"kMaskBoundsFirstKey", facts.mask_bounds_first_key},
          {"kListed", facts.mask.listed},
          {"kEvaluateTiles", facts.evaluates_tiles},
          {"kMaskBlockQ", facts.mask_block_q},
          {"kMaskBlockKv", facts.mask_block_kv},
          {"kMaskUsesHead", facts.mask.uses_head},
          {"kMaskTerms", facts.mask_terms},
          {"kMaskRowTerms", facts.mask.q_reads},
          {"kMaskColumnTerms", facts.mask.kv_reads},
          {"kCaptureGrads", facts.capture_grads},
          {"kDifferenceGrads", facts.difference_grads},
          {"kBiasTileGrad", facts.bias_tile_grad},
          {"kOutMod", facts.has_out_mod},
          {"kOutTile", facts.out_tile},
          {"kOutTileGrad", facts.out_tile_grad},
          {"kOutModGrads", facts.out_mod_grads}};
}

std::string to_string(const Constant& constant) {
  if (const bool* value = std::get_if<bool>(&constant.value))
    return fmt::format("  static constexpr bool {} = {};\n", constant.name, *value);
  return fmt::format("  static constexpr int {} = {};\n", constant.name, std::get<int>(constant.value));
}

}  // namespace flashjit::expr
