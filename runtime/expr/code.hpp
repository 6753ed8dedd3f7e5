// Operations of programs as straight lines of CUDA.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "expr/affine.hpp"
#include "expr/graph.hpp"

namespace flashjit::expr {

/// How a function reports indices out of range, in the debug mode for that.
struct ReadCheck {
  std::string_view exists = {};  ///< condition on which a read is wanted; empty: another function checks it
  std::string_view place = {};   ///< b, h, q and kv; -1: any
};

/// What the generated functions of a Problem share: the operations, the places of what is declared, and
/// the members of Head, which arise as the functions ask for them.
class HeadCode {
 public:
  /// `graph` gets more operations.
  HeadCode(Graph& graph, const std::vector<Declaration>& declarations, bool check_indices);

  Graph& graph() { return graph_; }
  /// Place of a tensor in Params::captures, or of a scalar in Params::scalars.
  int slot(const Declaration& declaration) const;

  /// Text of what all pairs of a head share. A Rest is a long long, or a float.
  std::string uniform(int place);
  std::string rest(const Rest& rest);
  /// softmax_scale times a float.
  std::string scaled(int place);
  std::string rest_float(const Rest& rest);
  /// A Divisor by an int, one for what is not negative, and its Multiples.
  std::string divisor(int place);
  std::string natural_divisor(int place);
  std::string multiples(int place);

  /// The element that `read` reads at indices.
  std::string read_text(const Node& read, const std::vector<std::string>& indices) const;
  /// A line that reports indices out of range; empty outside of that mode.
  std::string check_text(const Node& read, const std::vector<std::string>& indices,
                         const ReadCheck& check) const;

  std::string members() const { return members_; }
  std::string body() const { return body_; }

 private:
  /// Text of the member that `known` names for the key: a new one, set to `value()` in head(), if there is
  /// none.
  template <class Key, class Value>
  std::string member(std::map<Key, std::string>& known, const Key& key, char prefix, std::string_view type,
                     const Value& value);
  std::string term_sum(const Rest& rest);
  std::string value(int place);

  Graph& graph_;
  std::map<std::string, int> slots_;
  bool check_indices_;
  std::map<int, std::string> values_;  // within head()
  std::map<int, std::string> known_, scaled_, divisors_, natural_divisors_, multiples_;
  std::map<Rest, std::string> rests_, rest_floats_;
  std::string members_, body_;
};

/// How the floats of a function are computed.
enum class Style : std::uint8_t {
  fast,   ///< scores: contracted, approximate for 16-bit elements, positions as floats
  exact,  ///< masks: each step rounded to fp32, as the reference does
};

/// The lines of one function that computes with positions `q` and `kv`, Head `head` and Params `p`.
class Code {
 public:
  Code(HeadCode& head, Style style, ReadCheck check)
      : head_(head), graph_(head.graph()), style_(style), check_(check) {}

  /// From now on `text` is the value at `place`.
  void know(int place, std::string text) { known_[place] = std::move(text); }
  /// A variable or a literal with the value at `place`; its lines are added if need be.
  std::string value(int place);
  /// The score program's result from `dot`: as few instructions as can be.
  std::string score_result(int place);
  /// Adds a line for an expression; the variable's name.
  std::string line(const std::string& type, const std::string& expression);

  const std::string& lines() const { return lines_; }

 private:
  std::string expression(int place);
  std::string affine_int(const Affine& form);
  std::string comparison(int place);
  std::pair<std::string, std::string> affine_float(const Affine& form);
  bool has_float_positions(int place) const;
  std::string product(int place);
  std::string quotient(int place);
  bool shared_divisor(int place) const;
  bool natural(int place) const;
  bool divides_naturals(int place) const;
  std::optional<std::string> divisibility(int place);
  std::string by_uniform(int place, int factor);
  std::string scaled_sum(int place);

  HeadCode& head_;
  Graph& graph_;
  Style style_;
  ReadCheck check_;
  std::map<int, std::string> known_;
  std::string lines_;
  int variables_ = 0;
};

/// `operation` on the texts of its operands, where it is computed pair by pair.
std::string operation_text(const Node& node, const std::vector<std::string>& args, Style style);
std::string literal_text(const Node& node);
std::string literal_text(float value);
std::string literal_text(std::int32_t value);
std::string type_text(Type type);
std::string element_text(ElementType type);

}  // namespace flashjit::expr
