// What a mask program is made of, as tiles of pairs see it: comparisons that are affine in the positions,
// values that depend on one position alone, and the rest.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "expr/affine.hpp"
#include "expr/graph.hpp"
#include "flashjit/programs.hpp"

namespace flashjit::expr {

enum class Relation : std::uint8_t { at_most_zero, zero, not_zero };

/// A comparison of ints: what `difference` is, where both sides fit into an int.
struct Comparison {
  Relation relation;
  Affine difference;
  Affine left, right;
  bool fits;  ///< both sides fit at all pairs, whatever the call gives
};

/// For an operation that compares ints, where both sides are affine and not the same for all pairs.
std::optional<Comparison> affine_comparison(const Graph& graph, int place);

/// One of the conditions that a mask is the conjunction of.
struct Conjunct {
  int place;
  bool negated;
};

class MaskAnalysis {
 public:
  /// `root` is a condition without the score.
  MaskAnalysis(const Graph& graph, int root);

  int root() const { return root_; }
  const std::vector<Conjunct>& conjuncts() const { return conjuncts_; }
  /// The affine comparison that a condition is; nothing: it is none, or the same for all pairs.
  std::optional<Comparison> comparison_of(const Conjunct& conjunct) const;
  /// The comparison at a place; null: no affine one, or one that is the same for all pairs.
  const Comparison* comparison(int place) const;

  /// Whether tiles are visited by lists: the mask is no conjunction of affine comparisons and of conditions
  /// that are the same for all pairs.
  bool listed() const { return listed_; }
  /// How many affine comparisons tell all: a query attends to exactly what they leave of the keys, an
  /// interval. 0: other conditions do, or comparisons of sides that may wrap.
  std::size_t bounds() const { return bounds_; }
  /// Whether kv_bounds() may begin after key 0, as behind a window.
  bool bounds_first_key() const;
  /// Whether intervals say too often "partial", so that pairs are evaluated when lists are made.
  bool evaluate_tiles() const { return evaluate_; }
  /// Places of the values that depend on one position alone, whose bounds over a tile are found by evaluating
  /// them. Only where tiles are listed.
  const std::vector<int>& q_reads() const { return q_reads_; }
  const std::vector<int>& kv_reads() const { return kv_reads_; }

 private:
  void find_conjuncts(int place, bool negated);
  void find_comparisons();
  std::size_t count_bounds() const;
  void find_reads(int place, bool negated);
  bool plain(int place) const;
  bool is_block(int place) const;
  bool is_stretched(int place) const;
  bool inexact(int place, bool negated) const;

  const Graph& graph_;
  int root_;
  std::vector<Conjunct> conjuncts_;
  std::map<int, Comparison> comparisons_;
  std::vector<int> q_reads_, kv_reads_;
  bool listed_ = false, evaluate_ = false;
  std::size_t bounds_ = 0;
};

/// A mask's tree as it is analysed and emitted: folded, and with bounds on both sides in place of bounds on
/// the size of affine values.
NodePtr prepared_mask(const NodePtr& mask);

/// The size of blocks of positions, from each multiple of it on, in which something is the same: as `q / 128`
/// is in blocks of 128. 0: everywhere. `position`: kUsesQ or kUsesKv.
int block_of(const Graph& graph, int root, unsigned position);

/// Whether a program reads a tensor at a place that depends on q or kv. Null reads nothing.
bool reads_by_position(const NodePtr& program);

/// Whether what is at `root` is computed from a read by positions that none of `found` needs alone.
bool reads_beyond(const Graph& graph, int root, const std::vector<int>& found);

/// Whether something is the same for all pairs of a head of the same kv - q; not where the score is needed.
bool depends_on_difference(const Graph& graph, int root);

/// Whether an operation of the root's has two operands that depend on the score, as score * sigmoid(score)
/// has.
bool joins_scores(const Graph& graph, int root);

/// Whether no two pairs of a head read the same element, but for indices that are clamped.
bool reads_each_once(const Graph& graph, int read);

/// Whether something is the read of a tensor whose last two indices are q and kv, but for what all pairs of a
/// head share, as are the others: a dense bias.
bool reads_bias_tile(const Graph& graph, int place);
/// Among what `root` is computed from: such a read of 16-bit floats. -1: there is none.
int bias_tile_read(const Graph& graph, int root);

/// The read of a gate: a tensor of 16-bit floats. Its last index is the column of O's element, one more is q
/// plus what all elements of a head share, and the rest are what these share.
struct OutTileRead {
  int place = -1;  ///< -1: there is none
  int of_q = 0;    ///< which index is q
};
/// Such a read among what a program of O at `root` is computed from.
OutTileRead out_tile_read(const Graph& graph, int root);
/// Whether each element of O reads another one there, but for indices that are clamped: its others are b and
/// h.
bool reads_own_element(const Graph& graph, const OutTileRead& tile);

/// Among what `root` is computed from: the only real that depends on the query alone, or on the key alone,
/// besides what all pairs of a head share, and reads a tensor by it; the largest such. -1: there is none, or
/// several. A row of a tile shares the query's, a column the key's.
struct PositionTerms {
  int row = -1, column = -1;
};
PositionTerms position_terms(const Graph& graph, int root);

/// What is added to the score of a program that does nothing else, where it is a line along kv, such as
/// ALiBi's: the value at `place`, or its negative.
struct ScoreLine {
  int place;
  bool negated;
  int factor;  ///< shared by all pairs; -1: one
  float keys;  ///< times the factor: what a key more adds
};
/// The line of the score at `root`.
std::optional<ScoreLine> line_of_score(const Graph& graph, int root);

}  // namespace flashjit::expr
